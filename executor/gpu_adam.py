"""AdamW on the GPU, over this rank's part of the groups whose state lives in HBM.

Two arithmetics, chosen as for the CPU (adam.py), with whose step counts, learning rates and ranges they work:

``torch``   the same operations on the same ranges as the CPU's ``torch``: on the CPU backend the same bits. It looks at each
            gradient before it updates, which on a GPU waits for the device.
fused       ``torch._fused_adamw_``, one kernel for all parameters of a chunk; within rounding of torch.optim.AdamW. It never
            waits: a chunk with a gradient that is not finite is left as it is by the kernel itself, and the flags of a step's
            parameters come to the host with its last update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slidedp.executor.adam import CpuAdam, NonFiniteGradient, _GroupSteps, adamw_as_torch
from slidedp.executor.backend import Backend


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A rank's part of a group's state on the device, flat FP32 of one length: its parts of the chunks, one after another."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def cut(self, lo: int, hi: int) -> DeviceState:
        return DeviceState(self.master[lo:hi], self.exp_avg[lo:hi], self.exp_avg_sq[lo:hi])


class GpuAdam:
    """Updates chunks of `states` (by group). Used by the update stream's thread alone.

    `adam`: step counts, learning rate, optimizer. `exact`: the arithmetic ``torch``. `workspace`: elements of the largest
    part of a chunk, if gradients are not FP32 and have to be converted; else 0.
    """

    def __init__(self, adam: CpuAdam, states: dict[str, DeviceState], params: dict[str, Sequence[str]], backend: Backend, *,
                 exact: bool, workspace: int) -> None:
        self._adam, self._states, self._backend, self._exact = adam, states, backend, exact
        self._workspace = backend.empty(workspace, torch.float32) if workspace else None
        self._names = [(group, name) for group, names in params.items() for name in names]
        self._first: dict[str, int] = {}
        for i, (group, _) in enumerate(self._names):
            self._first.setdefault(group, i)
        self._bad = backend.empty(len(self._names), torch.bool).zero_()
        self._index: dict[tuple[str, int], Tensor] = {}
        backend.fence_caller()

    @torch.no_grad()
    def update(self, group: str, lo: int, hi: int, local: int, gradient: Tensor, weights: Tensor, step: int,
               present: np.ndarray | None) -> None:
        """AdamW on elements ``[lo, hi)`` of `group`, which start at `local` in the state, and their copy in `weights`.

        `gradient`, `weights`: these elements. `step`, `present`: see :meth:`CpuAdam.parts`. Raises NonFiniteGradient
        (``torch``), or notes it for :meth:`nonfinite` (fused); nothing of the chunk is then updated.
        """
        g, index, starts, ends = self._adam.parts(group, lo, hi, step, present)
        if index.size == 0:
            return
        state = self._states[group].cut(local, local + hi - lo)
        ranges = list(zip(index.tolist(), (starts - lo).tolist(), (ends - lo).tolist(), strict=True))
        if self._exact:
            self._as_torch(group, g, ranges, state, gradient, step)
        else:
            self._fused(group, g, ranges, state, gradient, step, lo)
        weights.copy_(state.master)

    def _as_torch(self, group: str, g: _GroupSteps, ranges: list[tuple[int, int, int]], state: DeviceState, gradient: Tensor,
                  step: int) -> None:
        for i, a, b in ranges:
            if not torch.isfinite(gradient[a:b]).all():
                raise NonFiniteGradient(group, g.params[i].name, step)
        opt = self._adam.optimizer
        for i, a, b in ranges:
            part = state.cut(a, b)
            adamw_as_torch(part.master, gradient[a:b].float(), part.exp_avg, part.exp_avg_sq, int(g.counts[i]),
                           self._adam.lr(step), opt, opt.weight_decay if g.decay[i] else 0.0)

    def _fused(self, group: str, g: _GroupSteps, ranges: list[tuple[int, int, int]], state: DeviceState, gradient: Tensor,
               step: int, lo: int) -> None:
        if gradient.dtype is not torch.float32:
            assert self._workspace is not None
            gradient = self._workspace[: gradient.numel()].copy_(gradient)
        found = self._note_nonfinite(group, g, gradient, lo)
        opt, kinds = self._adam.optimizer, {(bool(g.decay[i]), int(g.counts[i])) for i, _, _ in ranges}
        for decay, count in sorted(kinds):
            alike = [(a, b) for i, a, b in ranges if (bool(g.decay[i]), int(g.counts[i])) == (decay, count)]
            steps = torch.full((len(alike),), float(count), dtype=torch.float32, device=gradient.device).unbind()
            cut: Callable[[Tensor], list[Tensor]] = lambda flat, alike=alike: [flat[a:b] for a, b in alike]  # noqa: E731
            torch._fused_adamw_(
                cut(state.master), cut(gradient), cut(state.exp_avg), cut(state.exp_avg_sq), [], list(steps),
                lr=self._adam.lr(step), beta1=opt.betas[0], beta2=opt.betas[1], eps=opt.eps,
                weight_decay=opt.weight_decay if decay else 0.0, amsgrad=False, maximize=False, found_inf=found)

    def _note_nonfinite(self, group: str, g: _GroupSteps, gradient: Tensor, lo: int) -> Tensor:
        """1.0 if a gradient of the chunk is not finite, else 0.0, on the device; which parameters', into the flags.

        All of the chunk's parameters are looked at: without a gradient it is zero, and so the flags' places never change.
        """
        params, starts, ends = g.cut(lo, lo + gradient.numel())
        parts = [gradient[a - lo : b - lo] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        bad = ~torch.isfinite(torch.stack(torch._foreach_norm(parts, float("inf"))))
        if (group, lo) not in self._index:
            self._index[group, lo] = torch.from_numpy(params + self._first[group]).to(gradient.device)
        index = self._index[group, lo]
        self._bad[index] = self._bad[index] | bad
        return bad.any().float()

    def flags(self) -> Tensor:
        """Which parameters have had a gradient that was not finite: on the host once the op that calls this is done."""
        return self._backend.to_host(self._bad)

    def require_finite(self, flags: Tensor, step: int) -> None:
        """NonFiniteGradient, naming the first parameter that `flags` (of :meth:`flags`) names."""
        for (group, name), bad in zip(self._names, flags.tolist(), strict=True):
            if bad:
                raise NonFiniteGradient(group, name, step)
