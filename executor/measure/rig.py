"""What there is to copy, cast and update: a host state of one group, shared by the ranks and registered as in a plan.

Every op walks through its rank's part of the state, piece by piece, so that no cache serves it twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from slidedp.compiler.decisions import Decisions, GroupDecision
from slidedp.compiler.layergraph import ALIGN, Group, Param
from slidedp.compiler.optimizer import AdamW
from slidedp.executor.adam import CpuAdam
from slidedp.executor.backend import Backend
from slidedp.executor.collectives import Collectives
from slidedp.executor.host_state import HostState
from slidedp.executor.kernels import HostKernels, Kernel
from slidedp.executor.measure.lab import Task

GROUP = "bench"
BF16 = torch.bfloat16


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
        for buffer in self.state.dma_buffers():
            backend.register(buffer)
        random = torch.Generator().manual_seed(self.rank)  # our own: the user's generators are not touched
        noise = torch.randn(1 << 16, generator=random)
        for tensor in (self.state.master, self.state.exp_avg, self.state.exp_avg_sq, self.state.shadow, self.state.grad):
            for lo in range(self._lo, self._hi, noise.numel()):
                part = tensor[GROUP][lo : min(lo + noise.numel(), self._hi)]
                part.copy_(noise[: part.numel()].abs() * 1e-3)
        self.device_weights, self.device_grads = (backend.empty(piece, BF16) for _ in range(2))
        self.device_weights.zero_()
        self.device_grads.zero_()  # it is copied to where updates read, which stop at a NaN
        self.staging = backend.pinned(piece, BF16)
        backend.fence_caller()

    def pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        """`[lo, hi)` of this rank's part, `numel` elements at a time, over and over."""
        assert numel <= self.piece, (numel, self.piece)
        return itertools.cycle([(lo, lo + numel) for lo in range(self._lo, self._hi - numel + 1, numel)])

    def to_device(self, num_bytes: int) -> Task:
        numel, copy = num_bytes // BF16.itemsize, self.backend.copy
        pieces, source, target = self.pieces(numel), self.state.shadow[GROUP], self.device_weights[:numel]

        def task() -> None:
            lo, hi = next(pieces)
            copy(target, source[lo:hi])

        return task

    def to_host(self, num_bytes: int) -> Task:
        numel, copy = num_bytes // BF16.itemsize, self.backend.copy
        pieces, source, target = self.pieces(numel), self.device_grads[:numel], self.state.grad[GROUP]

        def task() -> None:
            lo, hi = next(pieces)
            copy(target[lo:hi], source)

        return task

    def cast(self, num_bytes: int, num_threads: int) -> Task:
        """`num_bytes`: of BF16, written."""
        numel = num_bytes // BF16.itemsize
        pieces, kernels = self.pieces(numel), HostKernels(self.kernel, num_threads, quiet=True)
        source, target = self.state.master[GROUP], self.staging[:numel]

        def task() -> None:
            lo, hi = next(pieces)
            kernels.cast(source[lo:hi], target)

        return task

    def update(self, num_threads: int, numel: int | None = None) -> Task:
        """AdamW on `numel` parameters (default: a piece) by `num_threads` threads of this rank."""
        pieces = self.pieces(numel or self.piece)
        adam = CpuAdam(self.state, self.groups, AdamW(), kernel=self.kernel, num_threads=num_threads)

        def task() -> None:
            adam.update(GROUP, *next(pieces), 1)

        return task

    @property
    def native(self) -> bool:
        """True if the update's threads are ours to choose: torch's own kernels use torch's."""
        return HostKernels(self.kernel, 1, quiet=True).native

    def close(self) -> None:
        """The backend, which has the memory registered, is closed by its owner before the ranks part."""
        self.state.close(keep_master=False)
