"""AdamW on the GPU, over this rank's part of the groups whose state lives in HBM.

Two arithmetics, chosen as for the CPU (adam.py), with whose step counts, learning rates and ranges they work:

``torch``   the same operations on the same ranges as the CPU's ``torch``: on the CPU backend the same bits. It looks at each
            gradient before it updates, which on a GPU waits for the device.
fused       ``torch._fused_adamw_``, one kernel for the parameters of a chunk; within rounding of torch.optim.AdamW. It never
            waits: a chunk with a gradient that is not finite is left as it is by the kernel itself, and the largest element of
            each gradient comes to the host with the step's last update.

With a norm of all gradients (clipping.py) neither has to look: an update that runs knows that they are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slidedp.executor.devices.backend import Backend
from slidedp.executor.optim.adam import CpuAdam, NonFiniteGradient, _GroupSteps, adamw_as_torch, scaled


@dataclass(frozen=True, slots=True)
class DeviceState:
    """FP32 master and moments on the device, flat, of one length."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def cut(self, lo: int, hi: int) -> DeviceState:
        return DeviceState(self.master[lo:hi], self.exp_avg[lo:hi], self.exp_avg_sq[lo:hi])


@dataclass(frozen=True, slots=True)
class DeviceChunk:
    """This rank's part of a chunk: elements ``[lo, hi)`` of the group's layout, and their state."""

    group: str
    lo: int
    hi: int
    state: DeviceState


@dataclass(frozen=True, slots=True)
class _Part:
    """What a chunk has of one parameter: ``[start, end)`` from the chunk's start, and its state."""

    start: int
    end: int
    state: DeviceState


@dataclass(frozen=True, slots=True)
class _Launch:
    """Parameters of a chunk for one call of the fused kernel: where they are among those of the chunk, and their states."""

    decay: bool
    at: tuple[int, ...]
    masters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


class GpuAdam:
    """Updates `chunks`. Used by the update stream's thread alone, whose every call into torch may have to wait for the other
    threads of Python's: what is the same in each step is made once.

    `adam`: step counts, learning rate, optimizer. `exact`: the arithmetic ``torch``. `workspace`: elements of the largest
    chunk, if gradients are not FP32 and have to be converted; else 0.
    """

    def __init__(self, adam: CpuAdam, chunks: Iterable[DeviceChunk], backend: Backend, *, exact: bool, workspace: int) -> None:
        self._adam, self._backend, self._exact = adam, backend, exact
        self._workspace = backend.empty(workspace, torch.float32) if workspace else None
        self._chunks = {(c.group, c.lo): c for c in chunks}
        self._parts: dict[tuple[str, int], dict[int, _Part]] = {}
        self._norms_at: dict[tuple[str, int], slice] = {}
        self._order: dict[tuple[str, int], None] = {}  # chunks as they were first updated: last layers first
        num_norms = 0
        for key, chunk in self._chunks.items():
            _, index, starts, ends = adam.cut(chunk.group, chunk.lo, chunk.hi)
            bounds = zip(index.tolist(), (starts - chunk.lo).tolist(), (ends - chunk.lo).tolist(), strict=True)
            self._parts[key] = {i: _Part(a, b, chunk.state.cut(a, b)) for i, a, b in bounds}
            self._norms_at[key] = slice(num_norms, num_norms + index.size)
            num_norms += index.size
        self._norms = backend.empty(num_norms, torch.float32).zero_()
        self._skip = backend.empty(1, torch.float32).view(())
        self._whole = {} if exact else {key: list(self._launches(key, list(parts))) for key, parts in self._parts.items()}
        self._grads = {} if self._workspace is None else {key: self._cut(key, self._workspace) for key in self._parts}
        self._counted = -1, self._skip  # a number of steps, and a tensor that holds it
        backend.fence_caller()

    @torch.no_grad()
    def update(
        self, group: str, lo: int, gradient: Tensor, weights: Tensor, step: int, present: np.ndarray | None,
        scale: float | None = None,
    ) -> None:  # fmt: skip
        """AdamW on the chunk of `group` that starts at `lo`, from `gradient`; writes its copy in `weights` (both: its elements).

        `step`, `present`: see :meth:`CpuAdam.parts`. `scale`: gradients are finite, and are multiplied by it (in their
        place, where they are FP32: nobody reads them after this); None: nothing is known of them. Then one that is not finite
        raises NonFiniteGradient here (``torch``) or in :meth:`require_finite` (fused), and nothing of the chunk is updated.
        """
        chunk = self._chunks[group, lo]
        g, index, _, _ = self._adam.parts(group, lo, chunk.hi, step, present)
        if index.size == 0:
            return
        self._order.setdefault((group, lo))
        (self._as_torch if self._exact else self._fused)(chunk, g, index, gradient, step, scale)
        weights.copy_(chunk.state.master)

    def _as_torch(self, chunk: DeviceChunk, g: _GroupSteps, index: np.ndarray, gradient: Tensor, step: int,
                  scale: float | None) -> None:
        parts = self._parts[chunk.group, chunk.lo]
        for i in index.tolist() if scale is None else ():
            if not torch.isfinite(gradient[parts[i].start : parts[i].end]).all():
                raise NonFiniteGradient(chunk.group, g.params[i].name, step)
        opt = self._adam.optimizer
        for i in index.tolist():
            part, state = scaled(gradient[parts[i].start : parts[i].end], 1.0 if scale is None else scale), parts[i].state
            adamw_as_torch(state.master, part, state.exp_avg, state.exp_avg_sq, int(g.counts[i]), self._adam.lr(step), opt,
                           opt.weight_decay if g.decay[i] else 0.0)

    def _fused(self, chunk: DeviceChunk, g: _GroupSteps, index: np.ndarray, gradient: Tensor, step: int,
               scale: float | None) -> None:
        key = chunk.group, chunk.lo
        # All of them, so that a norm has its place: without a gradient it is zero.
        if self._workspace is None:
            grads = self._cut(key, gradient)
        else:
            gradient, grads = self._workspace[: gradient.numel()].copy_(gradient), self._grads[key]
        if scale is not None and scale != 1.0:
            gradient.mul_(scale)
        skip, opt = self._look(chunk, grads) if scale is None else None, self._adam.optimizer
        for count, alike in _by_count(g, index):
            launches = self._whole[key] if len(alike) == len(grads) else self._launches(key, alike)
            for each in launches:
                torch._fused_adamw_(
                    each.masters, [grads[i] for i in each.at], each.exp_avgs, each.exp_avg_sqs, [],
                    [self._steps(count)] * len(each.at), lr=self._adam.lr(step), beta1=opt.betas[0], beta2=opt.betas[1],
                    eps=opt.eps, weight_decay=opt.weight_decay if each.decay else 0.0, amsgrad=False, maximize=False,
                    found_inf=skip)

    def _cut(self, key: tuple[str, int], flat: Tensor) -> list[Tensor]:
        """The gradient of each parameter of a chunk."""
        return [flat[p.start : p.end] for p in self._parts[key].values()]

    def _launches(self, key: tuple[str, int], alike: Iterable[int]) -> Iterator[_Launch]:
        """For these parameters of a chunk, by whether their weights decay."""
        parts, (steps, *_) = self._parts[key], self._adam.cut(*key, self._chunks[key].hi)
        place = {i: at for at, i in enumerate(parts)}
        for decay in (True, False):
            if some := [i for i in alike if steps.decay[i] == decay]:
                states = [parts[i].state for i in some]
                yield _Launch(decay, tuple(place[i] for i in some), [s.master for s in states], [s.exp_avg for s in states],
                              [s.exp_avg_sq for s in states])

    def _steps(self, count: int) -> Tensor:
        """`count` on the device."""
        if self._counted[0] != count:
            self._counted = count, torch.full((), float(count), dtype=torch.float32, device=self._skip.device)
        return self._counted[1]

    def _look(self, chunk: DeviceChunk, grads: list[Tensor]) -> Tensor:
        """1.0, on the device, if the chunk's gradients are not finite, else 0.0; keeps their norms."""
        norms = self._norms[self._norms_at[chunk.group, chunk.lo]]
        torch.stack(torch._foreach_norm(grads, math.inf), out=norms)
        return torch.logical_not(torch.isfinite(norms).all(), out=self._skip)

    def norms(self) -> Tensor:
        """Largest magnitudes of the gradients of the step so far: on the host once the op that calls this is done."""
        return self._backend.to_host(self._norms)

    def require_finite(self, norms: Tensor, step: int) -> None:
        """NonFiniteGradient, naming the first parameter that had a norm (of :meth:`norms`) that is not finite."""
        if torch.isfinite(norms).all():
            return
        for group, lo in list(self._order):
            g, index, _, _ = self._adam.cut(group, lo, self._chunks[group, lo].hi)
            for i, norm in zip(index, norms[self._norms_at[group, lo]].tolist(), strict=True):
                if not math.isfinite(norm):
                    raise NonFiniteGradient(group, g.params[i].name, step)


def _by_count(g: _GroupSteps, index: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Parameters by step count: nearly always one."""
    counts = g.counts[index]
    for count in np.unique(counts):
        yield int(count), index[counts == count].tolist()
