"""Collectives through shared memory, between steps (for a checkpoint, say): they never wait for a rank that is gone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slidedp.executor.ranks.collectives import SingleRank
from slidedp.executor.shared.words import NUM_VALUES, Board, Check, PeerError, Words
from slidedp.executor.streams.tickets import Aborted

OUTSIDE = -1
"""Instead of a step's number: a rank that has come to a step instead has diverged."""


class Meetings(SingleRank):
    """Collectives among one thread of each rank, on a `board` of its own.

    `check`: see :class:`Words`. `cause`: maps an error seen while waiting to the one to raise.
    """

    def __init__(self, words: Words, board: Board, check: Check, cause: Callable[[BaseException], BaseException]) -> None:
        self.rank, self.world_size = words.rank, words.world_size
        self._words, self._board, self._check, self._cause = words, board, check, cause

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        parts = [values[i : i + NUM_VALUES] for i in range(0, max(len(values), 1), NUM_VALUES)]
        rows: list[list[int]] = [[] for _ in range(self.world_size)]
        for part in parts:
            for row, its in zip(rows, self._exchange(part), strict=True):
                row += its[: len(part)]
        return rows

    def _exchange(self, values: list[int]) -> list[list[int]]:
        try:
            return self._words.exchange(OUTSIDE, values, self._check, self._board)
        except (PeerError, Aborted) as e:
            raise self._cause(e) from e

    def exchange_ints(self, values: list[int]) -> list[int]:
        return self.gather_ints(values)[0]

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        (length,) = self.exchange_ints([len(data)])
        padded = data[:length].ljust(-(-length // 8) * 8, b"\0")
        return np.array(self.exchange_ints(np.frombuffer(padded, np.int64).tolist()), np.int64).tobytes()[:length]

    def barrier(self) -> None:
        self.gather_ints([])
