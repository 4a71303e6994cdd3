"""AdamW on the CPU over ranges of the flat groups: native and fused, or torch's own operations.

Both follow ``torch.optim.AdamW`` (torch/optim/adam.py, ``_single_tensor_adam`` with decoupled weight decay):

``torch``   the same operations on the same elements: equal to torch.optim.AdamW bit for bit. Ranges must be cut at multiples
            of 64 elements (as :func:`slidedp.compiler.layergraph.cut_chunks` does), for torch computes the tail of a vector
            loop with scalar code, and the two may round differently. For the same reason torch itself depends on its thread
            count: it cuts tensors from 32768 elements up into equal parts, one a thread, wherever that may be. Equality
            therefore holds with one torch thread, or with as many as the reference had and one chunk a group.
``native``  one pass over memory; within rounding of torch; bits that depend on nothing but the inputs.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slidedp.compiler.layergraph import Group, Param
from slidedp.compiler.ops import RowSet
from slidedp.compiler.optimizer import AdamW
from slidedp.executor.native.build import DTYPE_CODES, PART, STATE, Recipe, Rows, What
from slidedp.executor.optim.kernels import HostKernels, Kernel
from slidedp.executor.state.host_state import GroupState, HostState

_LR_HISTORY = 8  # steps whose learning rates are remembered: more than can be in flight


class NonFiniteGradient(RuntimeError):
    """A gradient holds an Inf or a NaN. The elements around it were not updated; others of its group may have been."""

    def __init__(self, group: str, param: str, step: int) -> None:
        self.group, self.param, self.step = group, param, step
        super().__init__(
            f"group {group}: the gradient of {param} is not finite at step {step}; it was not updated. "
            "Lower the learning rate, or look at this batch"
        )


@dataclass(frozen=True, slots=True)
class _GroupSteps:
    """How many gradients each trainable parameter of a group has had, and the step in which that was last counted."""

    params: tuple[Param, ...]
    decay: np.ndarray  # bool [params]
    record: np.ndarray  # int64 [1 + params]: the step, then the counts; native updates write it too
    cuts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def cut(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Parameters that have elements in ``[lo, hi)``, and those elements: indices, starts, ends. Cached: plans repeat."""
        if (lo, hi) not in self.cuts:
            parts = [(i, max(lo, p.offset), min(hi, p.offset + p.numel)) for i, p in enumerate(self.params)]
            table = np.array([part for part in parts if part[1] < part[2]], dtype=np.int64).reshape(-1, 3)
            self.cuts[lo, hi] = (table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())
        return self.cuts[lo, hi]

    @property
    def counts(self) -> np.ndarray:
        return self.record[1:]

    def count(self, step: int, present: np.ndarray) -> None:
        """`present`: bool, one a parameter; counted at the first call of a step."""
        if self.record[0] != step:
            self.record[0] = step
            self.record[1:] += present


class BoundUpdate:
    """One range of a group, with all that is known of its update before any step is.

    `parts` (dtype PART): the elements of each trainable parameter in ``[lo, hi)``. `rows`: of a table, those that it is of.
    `handle`: the native object, which lives as long as this one; 0 for torch's kernel.
    """

    __slots__ = ("__weakref__", "_steps", "group", "handle", "hi", "lo", "parts", "rows", "what")

    def __init__(self, group: str, lo: int, hi: int, steps: _GroupSteps, what: What, rows: RowSet) -> None:
        self.group, self.lo, self.hi, self.what, self.rows, self.handle = group, lo, hi, what, rows, 0
        self._steps = steps  # the native object writes its record
        self.parts = np.array([(i, a, b, steps.decay[i]) for i, a, b in zip(*steps.cut(lo, hi), strict=True)], dtype=PART)


class CpuAdam:
    """Updates ranges of the host state's groups. One object a rank; used by one thread at a time.

    `kernel`: see :class:`slidedp.executor.optim.kernels.Kernel`; ``auto`` falls back to torch, also for element types that the
    native one does not know. `num_threads`: of the native kernel; default: this process's cores shared among the ranks.
    """

    def __init__(
        self,
        state: HostState,
        groups: Sequence[Group],
        optimizer: AdamW,
        *,
        kernel: Kernel | str = Kernel.AUTO,
        num_threads: int | None = None,
    ) -> None:
        self._state, self.optimizer = state, optimizer
        self.kernels = HostKernels(kernel, num_threads, num_ranks=state.world_size, quiet=state.rank != 0)
        dtypes = {t.dtype for t in (*state.grad.values(), *state.shadow.values())}
        self.native = self.kernels.handles(*dtypes)
        if kernel == Kernel.NATIVE and not self.native:
            names = ", ".join(sorted(str(d) for d in dtypes))
            raise ValueError(f"kernel='native' updates float32 and bfloat16 only, not {names}; use kernel='auto'")
        self._rates: tuple[tuple[int, float], ...] = ((0, optimizer.lr),)  # (from step, rate); replaced whole: updates read it
        self._groups: dict[str, _GroupSteps] = {}
        for g in groups:
            params = tuple(p for p in g.params if p.trainable)
            decay = np.array([optimizer.decays(p.name) for p in params], dtype=bool)
            self._groups[g.name] = _GroupSteps(params, decay, np.array([-1] + len(params) * [0], dtype=np.int64))
        self._bound: dict[tuple[str, int, int, What, RowSet, bool], BoundUpdate] = {}

    # ---- hyperparameters and counters -------------------------------------------------------------------------

    def set_lr(self, lr: float, *, from_step: int = 0) -> None:
        """The learning rate of `from_step` and all later ones; pending updates of earlier steps keep theirs."""
        if lr != self.lr(from_step):
            self._rates = (*[rate for rate in self._rates if rate[0] < from_step][-_LR_HISTORY:], (from_step, lr))

    def lr(self, step: int) -> float:
        rates = self._rates
        return rates[max(bisect_right(rates, step, key=lambda rate: rate[0]) - 1, 0)][1]

    @property
    def steps(self) -> dict[str, int]:
        """Steps in which each trainable parameter had a gradient, by name (torch's ``state["step"]``); the same on every rank."""
        return {p.name: int(n) for g in self._groups.values() for p, n in zip(g.params, g.counts, strict=True)}

    def load_steps(self, steps: dict[str, int]) -> None:
        """Restores `steps`. Raises ValueError, with nothing changed, when a parameter is missing."""
        missing = [p.name for g in self._groups.values() for p in g.params if p.name not in steps]
        if missing:
            raise ValueError(f"optimizer state: no step count for {', '.join(missing[:5])}; it is another model's")
        for g in self._groups.values():
            g.counts[:] = [steps[p.name] for p in g.params]
            g.record[0] = -1

    # ---- the update -------------------------------------------------------------------------------------------

    def update(
        self, group: str, lo: int, hi: int, step: int, present: np.ndarray | Sequence[bool] | None = None, scale: float = 1.0,
        *, what: What = What.UPDATE, rows: RowSet = RowSet.ALL, no_gradient: bool = False,
    ) -> None:
        """AdamW on elements ``[lo, hi)`` of `group`, from its gradient; writes the shadow too where there is one.

        `step`: the training step, whose first call for a group counts it for every parameter with a gradient.
        `present`: bool, one a trainable parameter of the group, the same in every call of a step; None: all. Parameters without
        a gradient are left alone, moments and step count included. Padding is never touched.
        `scale`: an FP32 number that gradients are multiplied by; 1.0 changes no bit. `rows`, `no_gradient`: see :meth:`bind`.
        `what`: SPECULATE writes the other side instead, and counts nothing; SETTLE, which may follow that, counts, and updates if
        `scale` is not 1.0: else the other side is the state from here on.
        Raises NonFiniteGradient; the tile of 512 (native) or the range (torch) with the bad element is then unchanged.
        """
        if self.native:
            flags = None if present is None else self._flags(group, present)
            handle = self.bind(group, lo, hi, what, rows, no_gradient=no_gradient).handle
            self.raise_nonfinite(group, self.kernels.update(handle, step, self.lr(step), flags, scale), step)
        elif what is What.SPECULATE:
            self._torch_apart(group, lo, hi, step, present)
        else:
            assert rows is RowSet.ALL, "torch's kernel updates whole chunks"
            parts = self.parts(group, lo, hi, step, present)
            if what is What.UPDATE or scale != 1.0:
                self._torch(group, *parts, step, scale)

    def _flags(self, group: str, present: np.ndarray | Sequence[bool]) -> np.ndarray:
        flags = np.array(present, dtype=bool)
        assert flags.shape == self._groups[group].counts.shape, (group, flags.shape)
        return flags

    def parts(
        self, group: str, lo: int, hi: int, step: int, present: np.ndarray | Sequence[bool] | None = None
    ) -> tuple[_GroupSteps, np.ndarray, np.ndarray, np.ndarray]:
        """What ``[lo, hi)`` has of parameters with a gradient: their indices, and where each part starts and ends.

        `step` and `present` as for :meth:`update`. For an update in Python: native ones count for themselves.
        """
        g = self._groups[group]
        flags = np.ones(g.counts.shape, dtype=bool) if present is None else self._flags(group, present)
        g.count(step, flags)
        index, starts, ends = g.cut(lo, hi)
        had = flags[index]
        return g, index[had], starts[had], ends[had]

    def cut(self, group: str, lo: int, hi: int) -> tuple[_GroupSteps, np.ndarray, np.ndarray, np.ndarray]:
        """As :meth:`parts`, for all trainable parameters; counts nothing."""
        return self._groups[group], *self._groups[group].cut(lo, hi)

    def bind(self, group: str, lo: int, hi: int, what: What = What.UPDATE, rows: RowSet = RowSet.ALL, *,
             no_gradient: bool = False) -> BoundUpdate:
        """The update of elements ``[lo, hi)`` of `group`; made once: plans repeat.

        `rows`: only those that some rank's batch of the step looks up (``words.rows``), or only the others, for the native
        kernel; `no_gradient`: theirs is zero, whatever the gradient buffer holds.
        """
        key = group, lo, hi, what, rows, no_gradient
        if key not in self._bound:
            assert 0 <= lo <= hi <= self._state.groups[group].num_trainable, key
            bound = self._bound[key] = BoundUpdate(group, lo, hi, self._groups[group], what, rows)
            if self.native:
                self._make_native(bound)
                if rows is not RowSet.ALL:
                    self._take_rows(bound, no_gradient)
        return self._bound[key]

    def unbind(self) -> None:
        """Forgets all bound updates, since the state has other buffers from here on. None may be under way."""
        self._bound.clear()

    def _make_native(self, bound: BoundUpdate) -> None:
        state, group, opt = self._state, bound.group, self.optimizer
        record, grad, shadow = self._groups[group].record, state.grad[group], state.shadow.get(group)
        library: Any = self.kernels.library
        states = np.array([_addresses(side) for side in state.both(group)], dtype=STATE)
        bound.handle = library.slidedp_update_create(
            bound.what,
            states.ctypes.data,
            state.sides.address(group),
            grad.data_ptr(),
            DTYPE_CODES[grad.dtype],
            0 if shadow is None else DTYPE_CODES[shadow.dtype],
            bound.parts.ctypes.data,
            bound.parts.size,
            record.ctypes.data,
            record.size - 1,
            ctypes.byref(Recipe(*opt.betas, opt.eps, opt.weight_decay)),
        )
        weakref.finalize(bound, library.slidedp_update_destroy, bound.handle).atexit = False

    def _take_rows(self, bound: BoundUpdate, no_gradient: bool) -> None:
        (param,), masks = self._groups[bound.group].params, self._state.words.rows(0)
        assert param.offset == 0, param
        (num_ranks, stride), odd_steps = masks.shape, self._state.words.rows(1).ctypes.data - masks.ctypes.data
        first = masks.ctypes.data + self._state.row_index[bound.group]
        rows = Rows(first, odd_steps, num_ranks, stride, param.shape[1], bound.rows is RowSet.TOUCHED, no_gradient)
        self.kernels.library.slidedp_update_take_rows(bound.handle, ctypes.byref(rows))

    def raise_nonfinite(self, group: str, bad: int, step: int) -> None:
        """Raises NonFiniteGradient for the element `bad` of a native result, if it is one."""
        if bad >= 0:
            param = next(p for p in self._groups[group].params if p.offset <= bad < p.offset + p.numel)
            raise NonFiniteGradient(group, param.name, step)

    @torch.no_grad()
    def _torch(self, group: str, g: _GroupSteps, index: np.ndarray, starts: np.ndarray, ends: np.ndarray, step: int,
               scale: float) -> None:
        state, grad = self._state.both(group)[self._state.sides.of(group, step)], self._state.grad[group]
        ranges = list(zip(index.tolist(), starts.tolist(), ends.tolist(), strict=True))
        for i, lo, hi in ranges:
            if not torch.isfinite(grad[lo:hi]).all():
                raise NonFiniteGradient(group, g.params[i].name, step)
        for i, lo, hi in ranges:
            self._torch_range(state, scaled(grad[lo:hi], scale), g, i, lo, hi, step, int(g.counts[i]))

    def _torch_range(self, state: GroupState, grad: Tensor, g: _GroupSteps, i: int, lo: int, hi: int, step: int,
                     count: int) -> None:
        decay = self.optimizer.weight_decay if g.decay[i] else 0.0
        param = state.master[lo:hi]
        adamw_as_torch(param, grad, state.exp_avg[lo:hi], state.exp_avg_sq[lo:hi], count, self.lr(step), self.optimizer, decay)
        if state.shadow is not None:
            state.shadow[lo:hi].copy_(param)

    @torch.no_grad()
    def _torch_apart(self, group: str, lo: int, hi: int, step: int, present: np.ndarray | Sequence[bool] | None) -> None:
        """Updates a copy of the state, since torch has no AdamW that writes elsewhere."""
        g, both, side = self._groups[group], self._state.both(group), self._state.sides.of(group, step)
        now, candidate = both[side], both[1 - side]
        for old, new in ((now.master, candidate.master), (now.exp_avg, candidate.exp_avg), (now.exp_avg_sq, candidate.exp_avg_sq),
                         (now.shadow, candidate.shadow)):
            if old is not None and new is not None:
                new[lo:hi].copy_(old[lo:hi])
        flags = np.ones(g.counts.shape, dtype=bool) if present is None else self._flags(group, present)
        ahead = g.record[0] != step  # not counted yet, and it may never be
        for i, a, b in zip(*(x.tolist() for x in g.cut(lo, hi)), strict=True):
            if flags[i]:
                self._torch_range(candidate, self._state.grad[group][a:b].float(), g, i, a, b, step, int(g.counts[i]) + ahead)


def _addresses(state: GroupState) -> tuple[int, int, int, int]:
    shadow = 0 if state.shadow is None else state.shadow.data_ptr()
    return state.master.data_ptr(), state.exp_avg.data_ptr(), state.exp_avg_sq.data_ptr(), shadow


def scaled(grad: Tensor, scale: float) -> Tensor:
    """`grad` in FP32, times `scale` in FP32."""
    return grad.float() if scale == 1.0 else grad.float() * scale


def adamw_as_torch(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: int, lr: float, opt: AdamW, weight_decay: float
) -> None:
    """``_single_tensor_adam`` of torch 2.11 to 2.13, line for line; `count`: the parameter's steps, this one included."""
    beta1, beta2 = opt.betas
    if weight_decay != 0:
        param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step_size = lr / (1 - beta1**count)
    denom = (exp_avg_sq.sqrt() / (1 - beta2**count) ** 0.5).add_(opt.eps)
    param.addcdiv_(exp_avg, denom, value=-step_size)
