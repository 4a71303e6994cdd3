"""Which of the two sides of groups that speculate is the state, step by step (host_state.py says what a side is).

One number for all groups and ranks, since it follows from the norm of all gradients: a step that is not clipped changes it, any
other leaves it. It is known before anything that needs it may begin: what reads the state of a step, or writes over what was the
state before, waits for the step before to be settled, and that waits for its norm.
"""

from __future__ import annotations

import numpy as np

_DEPTH = 8  # steps that are remembered: more than can be in flight


class Sides:
    """Of one rank. Steps are numbers of training steps, from 1."""

    def __init__(self) -> None:
        self._cells = np.zeros(_DEPTH, dtype=np.int64)

    def of(self, step: int) -> int:
        """Where the state is when `step` begins."""
        return int(self._cells[step % _DEPTH])

    def decide(self, step: int, *, kept: bool) -> None:
        """`kept`: candidates of `step` are the state of the next. To be called before anything is settled."""
        self._cells[(step + 1) % _DEPTH] = self._cells[step % _DEPTH] ^ kept

    def address(self, step: int) -> int:
        """For native updates, which look themselves."""
        return int(self._cells[step % _DEPTH :].ctypes.data)
