"""Which of its two sides holds the state of each group that speculates, step by step (host_state.py says what a side is).

A step that is not clipped switches the side of every group that it has made a candidate for; any other step switches none. All
ranks agree on it, since all have the same norm. It is known before anything that depends on it may begin: whatever reads the
state of a step, or overwrites the state before it, waits until the step before is settled, which in turn waits for that step's
norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

DEPTH = 8
"""Steps that are remembered: more than can be in flight. Mirrored in executor/native/update.h."""


class Sides:
    """Which side holds the state of each group that speculates, on one rank. Steps are numbers of training steps, from 1."""

    def __init__(self, groups: Iterable[str] = ()) -> None:
        self._cells = {name: np.zeros(DEPTH, dtype=np.int64) for name in groups}

    def of(self, group: str, step: int) -> int:
        """Where the group's state is when `step` begins; 0 for one that does not speculate."""
        return int(self._cells[group][step % DEPTH]) if group in self._cells else 0

    def decide(self, step: int, taken: Collection[str]) -> None:
        """The candidates of these groups are their states from `step` on. To be called before anything of it is settled."""
        for name, cells in self._cells.items():
            cells[(step + 1) % DEPTH] = cells[step % DEPTH] ^ (name in taken)

    def address(self, group: str) -> int:
        """For native updates, which look themselves, at the entry of their step; 0 if there is only one side."""
        return int(self._cells[group].ctypes.data) if group in self._cells else 0
