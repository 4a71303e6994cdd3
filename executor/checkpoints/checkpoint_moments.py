"""Moments that live in HBM, between the GPUs and a checkpoint's files: each rank has a part of every group's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slidedp.compiler.layergraph import Group
from slidedp.executor.optim.resident import ResidentState
from slidedp.executor.ranks.collectives import Collectives
from slidedp.executor.shared.segment import SharedSegment
from slidedp.executor.state.host_state import HostState
from slidedp.executor.state.state_layout import MOMENTS, Buffer


class ResidentMoments:
    """Made and used by all ranks together. `flat`: the flat moments of the groups at hand, in memory that all ranks share."""

    def __init__(self, state: HostState, resident: ResidentState | None, collectives: Collectives) -> None:
        self._state, self._resident, self._collectives = state, resident, collectives
        self.flat: dict[tuple[Buffer, str], Tensor] = {}

    def each(self, parts: Sequence[Sequence[str]], work: Callable[[int], object], *, to_host: bool) -> None:
        """``work(i)`` for this rank's share of `parts`, each some groups. The part's moments cross from the GPUs to `flat`
        before it (`to_host`), or back after it. An error of `work` is raised once all ranks have come to the end.
        """
        problem: Exception | None = None
        resident = [self._of(part) for part in parts]
        memory = self._open(resident)
        try:
            for i, groups in enumerate(resident):
                self._bind(memory, groups)
                if to_host:
                    self._cross(groups, to_host=True)
                if i % self._state.world_size == self._state.rank and problem is None:
                    try:
                        work(i)
                    except Exception as e:
                        problem = e
                if groups:
                    self._collectives.barrier()  # the file has been written, or read
                if not to_host:
                    self._cross(groups, to_host=False)
        finally:
            self.flat.clear()
            if memory is not None:
                memory.close()
        if problem is not None:
            raise problem

    def _of(self, part: Sequence[str]) -> list[Group]:
        there = self._resident.groups if self._resident else {}
        return [g for g in (self._state.groups[name] for name in part) if g.name in there and g.trainable]

    def _open(self, parts: Sequence[Sequence[Group]]) -> SharedSegment | None:
        most = max((sum(8 * g.num_trainable for g in groups) for groups in parts), default=0)
        if not most:
            return None
        segment = SharedSegment("moments of a checkpoint", most, rank=self._state.rank, exchange=self._collectives.exchange_ints)
        self._collectives.barrier()  # rank 0 must not close what another is about to open
        return segment

    def _bind(self, memory: SharedSegment | None, groups: Sequence[Group]) -> None:
        self.flat.clear()
        offset = 0
        for g in groups:
            assert memory is not None
            for buffer in MOMENTS:
                self.flat[buffer, g.name] = memory.tensor(torch.float32, offset, g.num_trainable)
                offset += 4 * g.num_trainable

    def _cross(self, groups: Sequence[Group], *, to_host: bool) -> None:
        for g in groups:
            assert self._resident is not None
            move = self._resident.read_moments if to_host else self._resident.write_moments
            move(g.name, *(self.flat[buffer, g.name] for buffer in MOMENTS))
        if groups:
            self._collectives.barrier()
