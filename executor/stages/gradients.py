"""Gradient slots: flat buffers into which a stage's parameter gradients are written, parameter by parameter.

A slot is used by groups of different layouts one after another, and may hold anything (NaN, in tests) when a group comes
to it. The first write of a group in a step therefore covers `[0, num_trainable)`: gaps between parameters, the padded
tail and parameters without a gradient become zero. Reductions, norms and updates may then treat it as one flat array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slidedp.compiler.layergraph import Group

_Views = tuple[list[Tensor], list[Tensor], list[str]]


class GradientSlots:
    """Writes gradients of `groups`, and remembers for the step which parameters have had one."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._views: dict[tuple[str, int], _Views] = {}
        self._present: dict[tuple[str, int], list[bool]] = {}  # by group and memory: a sum over micro-batches has its own

    def start(self) -> None:
        """A new step: no parameter has a gradient."""
        self._present.clear()

    def clear(self) -> None:
        """The slots are given back: nothing is kept of them."""
        self._views.clear()
        self._present.clear()

    @torch.no_grad()
    def write(self, group: str, flat: Tensor, grads: Sequence[Tensor | None], accumulate: bool) -> dict[str, bool]:
        """`grads`: of the group's trainable parameters, in order, None where there is none. Added if `accumulate`.

        Returns, by name, which of them have had a gradient there in this step. Rounds once, when `flat` has another dtype.
        """
        params, gaps, names = self._views_of(group, flat)
        key = group, flat.data_ptr()
        before = self._present.get(key)
        if before is None or not accumulate:
            before = [False] * len(params)
            zero = gaps + [view for view, grad in zip(params, grads, strict=True) if grad is None]
            if zero:
                torch._foreach_zero_(zero)
        here = [(view, grad, had) for view, grad, had in zip(params, grads, before, strict=True) if grad is not None]
        added = [(view, grad) for view, grad, had in here if had]
        copied = [(view, grad) for view, grad, had in here if not had]
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])
        if copied:
            torch._foreach_copy_([view for view, _ in copied], [grad for _, grad in copied])
        present = [had or grad is not None for had, grad in zip(before, grads, strict=True)]
        self._present[key] = present
        return dict(zip(names, present, strict=True))

    def round(self, group: str, total: Tensor, flat: Tensor, accumulate: bool) -> None:
        """Writes what this step has summed up in `total`, FP32, into `flat`, or adds it."""
        params, *_ = self._views_of(group, total)
        present = self._present[group, total.data_ptr()]
        self.write(group, flat, [grad if has else None for grad, has in zip(params, present, strict=True)], accumulate)

    def write_none(self, slots: Mapping[str, tuple[Tensor, bool]]) -> dict[str, bool]:
        """A stage without gradients: zeros, or nothing more where there are some already."""
        present: dict[str, bool] = {}
        for group, (flat, accumulate) in slots.items():
            none = [None for p in self._groups[group].params if p.trainable]
            present |= self.write(group, flat, none, accumulate)
        return present

    def _views_of(self, name: str, flat: Tensor) -> _Views:
        """Views of a slot: the group's trainable parameters, what lies between and after them, and the parameters' names."""
        key = (name, flat.data_ptr())
        if key not in self._views:
            group = self._groups[name]
            params, gaps, end = [], [], 0
            for p in group.params:
                if not p.trainable:
                    break  # trainable ones come first
                params.append(flat[p.offset : p.offset + p.numel].view(p.shape))
                gaps.append(flat[end : p.offset])
                end = p.offset + p.numel
            gaps.append(flat[end : group.num_trainable])
            self._views[key] = params, [gap for gap in gaps if gap.numel()], [p.name for p in group.params[: len(params)]]
        return self._views[key]
