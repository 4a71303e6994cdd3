"""What there is to copy, cast and update: a host state of one group, shared by the ranks and registered as in a plan.

A cache must serve none of it: hosts have some hundred MB, which keep what soon comes back. So the state is several times as
large (:func:`enough`); updates walk through all of it, and so do copies, either way and whatever a buffer is for otherwise; and
each goes on where the one before it left off. It is allocated as a plan's is, hence on the same memory nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from slidedp.compiler.decisions import Decisions, GroupDecision
from slidedp.compiler.layergraph import ALIGN, Group, Param
from slidedp.compiler.optimizer import AdamW
from slidedp.executor.devices.backend import Backend
from slidedp.executor.measure.lab import Lab, NativeUpdate, Task
from slidedp.executor.optim.adam import CpuAdam
from slidedp.executor.optim.kernels import HostKernels, Kernel
from slidedp.executor.ranks.collectives import Collectives
from slidedp.executor.state.host_state import HostState

GROUP = "bench"
BF16 = torch.bfloat16


STATE_BYTES_PER_PARAM = 16
"""FP32 master and moments, BF16 shadow and gradient."""


def enough(numel: int, piece: int, world_size: int, num_bytes: int) -> int:
    """Parameters of each rank, `numel` or more, whole pieces, so that the state of all ranks has `num_bytes`."""
    return -(-max(numel, -(-num_bytes // (STATE_BYTES_PER_PARAM * world_size))) // piece) * piece


@dataclass(slots=True)
class Walk:
    """Pieces of some ranges of elements, one after the other, then from the start again."""

    sizes: Sequence[int]
    index: int = 0
    at: int = 0

    def step(self, numel: int) -> tuple[int, int]:
        """(which range, where in it) the next `numel` elements are."""
        if self.at + numel > self.sizes[self.index]:
            self.index, self.at = (self.index + 1) % len(self.sizes), 0
        at, self.at = self.at, self.at + numel
        return self.index, at


@dataclass(slots=True)
class Pieces:
    """Native updates of `numel` parameters each, from `lo` on, one after the other (`walk`)."""

    adam: CpuAdam
    walk: Walk
    lo: int
    numel: int

    def next_handle(self) -> int:
        lo = self.lo + self.walk.step(self.numel)[1]
        return self.adam.bind(GROUP, lo, lo + self.numel).handle


class Rig:
    """`numel`: parameters of each rank's part; `piece`: of one op. Construction is collective. Close the lab first."""

    def __init__(self, backend: Backend, collectives: Collectives, numel: int, piece: int, kernel: Kernel | str) -> None:
        assert numel % piece == 0, (numel, piece)
        assert piece % ALIGN == 0, piece
        self.backend, self.piece, self.kernel = backend, piece, kernel
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self._lo, self._hi = self.rank * numel, (self.rank + 1) * numel
        total = numel * self.world_size
        self.groups = (Group(GROUP, total, total, (GROUP,), (Param((f"{GROUP}.weight",), (total,), 0),)),)
        self.state = HostState(
            self.groups, Decisions({GROUP: GroupDecision()}), rank=self.rank, world_size=self.world_size, compute_dtype=BF16,
            grad_dtype=BF16, num_words=1, exchange=collectives.exchange_ints, barrier=collectives.barrier)  # fmt: skip
        state, part = self.state, slice(self._lo, self._hi)
        tensors = [buffer[GROUP] for buffer in (state.shadow, state.grad, state.master, state.exp_avg, state.exp_avg_sq)]
        noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(self.rank)).abs() * 1e-3
        for tensor in tensors:
            backend.register(tensor)
            _fill(tensor[part], noise)
        self._memory = [tensor[part].view(BF16) for tensor in tensors]
        sizes = [memory.numel() for memory in self._memory]
        self._up, self._down = Walk(sizes), Walk(sizes, len(sizes) - 1)
        self._masters, self._updates = Walk([numel]), Walk([numel])
        self.device_weights, self.device_grads = (backend.empty(piece, BF16) for _ in range(2))
        self.device_weights.zero_()
        _fill(self.device_grads, noise)  # it is copied to where updates read: two halves make a small FP32, and no NaN
        self.staging = backend.pinned(piece, BF16)
        backend.fence_caller()
        own = HostKernels(kernel, 1, quiet=True).native
        self.native = all(flag for (flag,) in collectives.gather_ints([int(own)]))
        """True if the update's threads are ours to choose, on all ranks: torch's own kernels use torch's."""

    def to_device(self, num_bytes: int) -> Task:
        numel, copy = num_bytes // BF16.itemsize, self.backend.copy
        target = self.device_weights[:numel]

        def task() -> None:
            copy(target, self._next(self._up, numel))

        return task

    def to_host(self, num_bytes: int) -> Task:
        numel, copy = num_bytes // BF16.itemsize, self.backend.copy
        source = self.device_grads[:numel]

        def task() -> None:
            copy(self._next(self._down, numel), source)

        return task

    def _next(self, walk: Walk, numel: int) -> torch.Tensor:
        index, at = walk.step(numel)
        return self._memory[index][at : at + numel]

    def cast(self, num_bytes: int, num_threads: int) -> Task:
        """`num_bytes`: of BF16, written."""
        numel = num_bytes // BF16.itemsize
        kernels = HostKernels(self.kernel, num_threads, quiet=True)
        source, target = self.state.master[GROUP][self._lo : self._hi], self.staging[:numel]

        def task() -> None:
            _, at = self._masters.step(numel)
            kernels.cast(source[at : at + numel], target)

        return task

    @contextmanager
    def updating(self, lab: Lab, num_threads: int, numel: int | None = None) -> Iterator[tuple[Lab, Task | NativeUpdate]]:
        """A lab like `lab`, and AdamW on `numel` parameters (default: a piece) by `num_threads` threads of this rank: through the
        native queue where a plan's updates go there, else by torch's kernel in the stream's own thread.
        """
        count = numel or self.piece
        adam = CpuAdam(self.state, self.groups, AdamW(), kernel=self.kernel, num_threads=num_threads)

        def task() -> None:
            lo = self._lo + self._updates.step(count)[1]
            adam.update(GROUP, lo, lo + count, 1)

        if not adam.native:
            yield lab, task
            return
        with closing(Lab(self.backend, lab.collectives, lab.budget_s)) as own:
            own.open_queue(adam.kernels.library, num_threads, self.state.words.shape())
            yield own, Pieces(adam, self._updates, self._lo, count)

    def close(self) -> None:
        """The backend, which has the memory registered, is closed by its owner before the ranks part."""
        self.state.close(keep_master=False)


def _fill(tensor: torch.Tensor, noise: torch.Tensor) -> None:
    for part in tensor.split(noise.numel()):
        part.copy_(noise[: part.numel()])
