"""The norm of a step's gradients, and what follows from it: one factor for all of them, or no update at all.

On one rank this is ``torch.nn.utils.clip_grad_norm_``, operation for operation: a norm for each parameter that has a gradient,
in the order of ``model.parameters()``, the norm of those, and a factor of at most 1; on the CPU the bits are the same. On several
ranks each takes the norm of its shards of the summed gradients in FP64, and all add the ranks' sums of squares in rank order:
the same factor on every rank, and for any chunks and routes. A parameter lies in one group and an element in one shard, so that
tied parameters, and what several ranks hold, count once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from slidedp.executor.optim.adam import NonFiniteGradient
from slidedp.executor.shared.words import added_in_order
from slidedp.executor.state.host_state import HostState

if TYPE_CHECKING:
    from slidedp.executor.machine.step import Step


class NonFiniteNorm(NonFiniteGradient):
    """The norm of all gradients is not finite, and `skip_nonfinite` is not set. No weight has moved."""

    def __init__(self, norm: float, step: int) -> None:
        RuntimeError.__init__(
            self, f"step {step}: the norm of the gradients is {norm}; nothing has been updated. Lower the learning rate, or pass "
            "skip_nonfinite=True to leave such steps out")


@dataclass(frozen=True, slots=True)
class Clip:
    """What a step's gradients come to. `norm`: before clipping; `scale`: what they are multiplied by, None for no update."""

    norm: float
    scale: float | None


_PIECE = 1 << 22
"""Elements of a shard that are converted to FP64 at a time, which takes 8 bytes each on its device."""


@torch.no_grad()
def norms_of(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of each gradient: FP32 ``[len(gradients)]``, on their device."""
    return torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=torch.float32))


@torch.no_grad()
def norms_of_shard(gradient: Tensor) -> Tensor:
    """FP64 norms of a shard's pieces: in FP64, what depends on how it is cut disappears when the total is rounded to FP32."""
    return torch.stack([torch.linalg.vector_norm(piece, 2.0, dtype=torch.float64) for piece in gradient.split(_PIECE)])


def factor(norm: Tensor, max_norm: float) -> float:
    """The clipping factor of ``clip_grad_norm_`` for an FP32 scalar `norm`, by the same operations and so with the same bits."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


class Clipping:
    """Gradient clipping on one rank.

    `max_norm`: None to leave finite gradients as they are; `skip`: leave out steps that are not finite; `quiet`: do not warn
    (another rank does).
    """

    def __init__(self, model: nn.Module, state: HostState, max_norm: float | None, skip: bool, *, quiet: bool = False) -> None:
        self.max_norm, self.skip = math.inf if max_norm is None else max_norm, skip
        self._state, self._words, self._quiet = state, state.words, quiet
        place = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        self._rank_in_model = {
            p.name: min(place[n] for n in p.names if n in place) for g in state.groups.values() for p in g.params if p.trainable}
        self._skipped_before = False
        self._untold: int | None = None

    # ---- one rank ----

    def model_order(self, groups: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """The trainable parameters of `groups`, as in ``model.parameters()``: their places group by group, and their flags'."""
        params = [p for g in groups for p in self._state.groups[g].params if p.trainable]
        order = sorted(range(len(params)), key=lambda i: self._rank_in_model[params[i].name])
        return np.array(order, dtype=np.int64), np.array([self._state.param_index[params[i].name] for i in order], dtype=np.int64)

    def total_of(self, norms: Tensor, order: tuple[np.ndarray, np.ndarray], step: int) -> Tensor:
        """The norm over `norms`, one a parameter and group by group, without those of parameters that have had no gradient."""
        places, flags = order
        present = self._words.any_present(step, 0, len(self._state.param_index))[flags]
        total: Tensor = torch.linalg.vector_norm(norms[torch.from_numpy(places[present])], 2.0)
        return total

    # ---- several ranks ----

    def post(self, norms: Iterable[Tensor], step: int) -> None:
        """This rank's sum of squares of `norms`, for all ranks to see."""
        self._words.post_norm(step, added_in_order(float(n.square().sum()) for n in norms))

    def total(self, step: int) -> Tensor:
        """The norm of all gradients, from the sums of squares that all ranks have posted."""
        return torch.tensor(math.sqrt(added_in_order(self._words.norms(step))), dtype=torch.float32)

    # ---- what follows ----

    def decide(self, norm: Tensor, step: Step) -> Clip:
        """Clips or skips, alike on all ranks. Raises NonFiniteNorm unless such steps are skipped or `run` raises for the loss."""
        if math.isfinite(norm) and math.isfinite(step.global_loss()):
            self._skipped_before = False
            scale = factor(norm, self.max_norm)
            step.count("clipped_steps", int(scale != 1.0))
            return Clip(float(norm), scale)
        if self.skip:
            step.count("skipped_steps", 1)
            if not self._skipped_before:
                self._untold = step.number
            self._skipped_before = True
        elif math.isfinite(step.global_loss()):
            raise NonFiniteNorm(float(norm), step.number)
        return Clip(float(norm), None)

    def warn(self) -> None:
        """Warns of the first of each run of skipped steps; in the user's thread, where warnings can be filtered."""
        step, self._untold = self._untold, None
        if step is not None and not self._quiet:
            warnings.warn(f"step {step}: a gradient or the loss is not finite; the step is left out as a whole, and so is each "
                          "one after it for as long as that lasts (counters()['skipped_steps'])", stacklevel=4)
