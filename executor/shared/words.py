"""What ranks tell one another through shared memory: version words, per-step boards, gradient presence, abort records.

Everything here is one writer per cell. A rank writes its payload, then releases a stamp; a reader acquires the stamp,
then reads the payload. Without the native library the same accesses go through numpy, which is right on x86 only: there
every store is a release and every load an acquire (total store order; aligned 8-byte accesses are single), and CPython
does not reorder calls. Elsewhere :class:`Words` refuses to run several ranks that way.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from slidedp.executor.native.build import NativeUnavailable, Ranks, load_library
from slidedp.executor.shared.segment import SharedSegment

Check = Callable[[], None]
"""Called while waiting; raises when waiting has become pointless (a peer died, the run was aborted)."""


class Board(IntEnum):
    """Where ranks exchange values, each of one thread of every rank: the user's, and that of a save beside training."""

    STEP = 0
    SAVE = 1


NUM_VALUES = 12
"""int64s that a rank can post in one exchange."""
LOSS_DEPTH = 4
_TEXT_BYTES = 1000
_POLL_FIRST_S, _POLL_LAST_S = 20e-6, 1e-3
LEFT = -1
"""In place of a rank's process id (see liveness.py): it has closed its plan and will publish nothing more."""
_LINE = 8  # int64s in a cache line: each rank's cells start on their own
PULSE_INTS = 11 * _LINE
"""int64s of a rank's row in `Words.pulse`; see pulse.py."""
_STEP_OF_PULSE = 2  # where pulse.py keeps the last step that a rank has begun


def added_in_order(values: Iterable[float]) -> float:
    """The values added one after the other, each result rounded, as a loop does, with any Python: since 3.12 `sum` carries the
    rounding errors along, and so gives other bits.
    """
    total = 0.0
    for value in values:
        total += value
    return total


class PeerError(RuntimeError):
    """Another rank died, hung, diverged or gave up; the message names it and says what it said. `rank`: which.

    The rank that hung gets one too, of itself.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class AbortReason(IntEnum):
    ERROR = 1
    DIED = 2
    HUNG = 3


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """`rank` is at fault, `posted_by` says so."""

    rank: int
    posted_by: int
    reason: AbortReason
    text: str

    def error(self) -> PeerError:
        what = self.text if self.reason is AbortReason.HUNG else f"rank {self.rank} stopped the run: {self.text}"
        return PeerError(self.rank, what)


@dataclass(frozen=True, slots=True)
class WordsLayout:
    """Sizes of the control segment's parts, in int64s, and where each begins."""

    num_words: int
    world_size: int
    num_params: int
    num_rows: int = 0

    @property
    def parts(self) -> dict[str, int]:
        n = self.world_size
        return {
            "words": self.num_words * n,
            "boards": len(Board) * 2 * n * 2 * _LINE,  # [board, parity, rank, (stamp, step, values…)]
            "losses": LOSS_DEPTH * n * _LINE,  # [step % depth, rank, (stamp, float64 bits)]
            "norms": 2 * n * _LINE,  # [parity, rank, (float64 bits)]
            "abort": n * (_LINE + _TEXT_BYTES // 8),  # [rank, (state, rank at fault, reason, text bytes), text]
            "alive": n * _LINE,  # [rank, (pid, start time)], see liveness.py
            "pulse": n * PULSE_INTS,  # [rank], see pulse.py
            "present": 2 * n * self.row // 8,  # uint8 [parity, rank, param]
            "rows": 2 * n * self.mask // 8,  # uint8 [parity, rank, row]
        }

    @property
    def row(self) -> int:
        """Bytes of one rank's presence flags."""
        return -(-max(self.num_params, 1) // 64) * 64

    @property
    def mask(self) -> int:
        """Bytes of one rank's masks of rows."""
        return -(-self.num_rows // 64) * 64

    @property
    def nbytes(self) -> int:
        return sum(-(-size // _LINE) * _LINE for size in self.parts.values()) * 8


class Words:
    """The control segment, seen by one rank. `segment` holds at least ``layout.nbytes`` zeroed bytes.

    Raises ValueError for several ranks on a processor without total store order and without the native library.
    """

    def __init__(self, segment: SharedSegment, layout: WordsLayout, rank: int, *, native: bool = True) -> None:
        self.layout, self.rank, self.world_size = layout, rank, layout.world_size
        self._library: Any = None  # ctypes.CDLL
        if native:
            try:
                self._library = load_library()
            except NativeUnavailable as error:
                self._require_ordered(str(error))
        else:
            self._require_ordered("native=False")
        flat = segment.tensor(torch.int64, 0, layout.nbytes // 8).numpy()
        part, start = {}, 0
        for name, size in layout.parts.items():
            part[name] = flat[start : start + size]
            start += -(-size // _LINE) * _LINE
        n = self.world_size
        self._words = part["words"].reshape(layout.num_words, n)
        self._boards = part["boards"].reshape(len(Board), 2, n, 2 * _LINE)
        self._losses = part["losses"].reshape(LOSS_DEPTH, n, _LINE)
        self._norms = part["norms"].reshape(2, n, _LINE)
        self._aborts = part["abort"].reshape(n, -1)
        self.alive = part["alive"].reshape(n, _LINE)
        self.pulse = part["pulse"].reshape(n, PULSE_INTS)
        self._present = part["present"].view(np.uint8).reshape(2, n, layout.row)[:, :, : layout.num_params]
        self._rows = part["rows"].view(np.uint8).reshape(2, n, layout.mask)
        self._num_exchanges = [0] * len(Board)
        self._abort_lock = threading.Lock()

    def _require_ordered(self, why: str) -> None:
        if self.world_size > 1 and platform.machine() not in ("x86_64", "AMD64"):
            raise ValueError(f"several ranks on {platform.machine()} need the native library ({why}); install g++ and ninja")

    # ---- version words ----------------------------------------------------------------------------------------

    def publish(self, word: int, step: int) -> None:
        """This rank has done `word` of `step`: everything it wrote before is visible to who sees the step (release)."""
        self.store(self._words[word], self.rank, step)

    def reached(self, word: int, step: int) -> bool:
        """True once every rank has published `step` or a later one (acquire). Words start at 0."""
        return self._load_min(self._words[word]) >= step

    def own(self, word: int) -> int:
        """The step of `word` that this rank has published last."""
        return int(self._words[word][self.rank])

    def each(self, word: int) -> list[int]:
        """The step of `word` that each rank has published last, as it looks from here."""
        values: list[int] = self._words[word].tolist()
        return values

    def highest(self, word: int) -> int:
        """The latest step of `word` that any rank has published (acquire)."""
        cells = self._words[word]
        return max(self._load_min(cells[rank : rank + 1]) for rank in range(self.world_size))

    def wait(self, word: int, step: int, check: Check | None = None) -> None:
        """Returns when `reached`. Raises what `check` raises, and PeerError when any rank has aborted or closed its plan."""
        self._poll(lambda: self.reached(word, step), check)

    # ---- one small exchange a step ----------------------------------------------------------------------------

    def exchange(self, step: int, values: Sequence[int], check: Check | None = None,
                 on: Board = Board.STEP) -> list[list[int]]:
        """Collective: every rank posts up to NUM_VALUES int64s and gets everybody's (padded with zeros), by rank.

        Raises PeerError when a rank posts another `step`. On the board of saves a rank's own error ends nothing: `check` does.

        Two sides are enough. Exchange k writes side k mod 2. A rank starts exchange k+2 only after it has ended k+1,
        for which every rank had posted k+1, which each does after reading all of side k: nobody still reads what k+2
        overwrites. It holds because all ranks make the same sequence of exchanges, whatever their steps are called.
        """
        assert len(values) <= NUM_VALUES, values
        self._num_exchanges[on] += 1
        turn = self._num_exchanges[on]
        board = self._boards[on, turn % 2]
        mine = board[self.rank]
        mine[1] = step
        mine[2 : 2 + NUM_VALUES] = 0
        mine[2 : 2 + len(values)] = values
        self.store(mine, 0, turn)
        self._poll(lambda: all(self._load_min(row[:1]) >= turn for row in board), check, heed_errors=on is Board.STEP)
        for rank, row in enumerate(board):
            if row[1] != step:
                text = f"rank {rank} is at step {row[1]}, rank {self.rank} at step {step}: the ranks have diverged"
                raise PeerError(rank, text)
        return [row[2 : 2 + NUM_VALUES].tolist() for row in board]

    # ---- losses -----------------------------------------------------------------------------------------------

    def post_loss(self, step: int, value: float) -> None:
        """This rank's loss of `step` (consecutive, from 0 or 1)."""
        cell = self._losses[step % LOSS_DEPTH][self.rank]
        cell[1:2].view(np.float64)[0] = value
        self.store(cell, 0, step + 1)

    def loss_sum(self, step: int, check: Check | None = None) -> float:
        """The ranks' losses of `step`, added in rank order (the same bits on every rank); waits for all of them.

        To be read before this rank enters ``exchange`` of step + LOSS_DEPTH: until then no other rank can have left it
        to post the loss that reuses the cell. Losses are posted after their step's exchange.
        """
        board = self._losses[step % LOSS_DEPTH]
        self._poll(lambda: all(self._load_min(cell[:1]) > step for cell in board), check)
        total = added_in_order(board[:, 1].copy().view(np.float64).tolist())
        assert all(self._load_min(cell[:1]) == step + 1 for cell in board), f"the loss of step {step} was read too late"
        return total

    # ---- gradient norms ---------------------------------------------------------------------------------------

    def post_norm(self, step: int, value: float) -> None:
        """This rank's part of the norm of `step`; seen by others once a word of the step is published after it."""
        self._norms[step % 2][self.rank][:1].view(np.float64)[0] = value

    def norms(self, step: int) -> list[float]:
        """Every rank's, by rank. All must have posted theirs. Two boards are enough: updates wait for who reads this, and a
        rank posts the norm of step + 2 after the exchange of that step, which no rank enters before the updates of `step`.
        """
        values: list[float] = self._norms[step % 2, :, 0].copy().view(np.float64).tolist()
        return values

    # ---- which parameters had a gradient ----------------------------------------------------------------------

    def present(self, step: int) -> np.ndarray:
        """uint8 ``[world_size, num_params]``: 1 where a rank had a gradient for a parameter in `step`; write your own row.

        Ordered by whatever publishes the gradients. Double-buffered by step parity: the flags of step s may be reset
        once the exchange of step s has been passed, when no update of step s - 2 is under way any more (the forward
        of s - 1 needed them all).
        """
        flags: np.ndarray = self._present[step % 2]
        return flags

    def any_present(self, step: int, lo: int, hi: int) -> np.ndarray:
        """bool ``[hi - lo]``: parameters in ``[lo, hi)`` for which at least one rank had a gradient."""
        flags: np.ndarray = np.logical_or.reduce(self._present[step % 2, :, lo:hi], axis=0)
        return flags

    # ---- which rows of tables occur in a batch ----------------------------------------------------------------

    def rows(self, step: int) -> np.ndarray:
        """uint8 ``[world_size, at least num_rows]``: not 0 where a rank's batch of `step` looks a row up; write your own.

        To be written before the exchange of `step`, which shows it to all ranks. Double-buffered by step parity: who writes the
        masks of step s has seen all ranks' losses of s - 1, whose forwards needed every update of s - 2 that read them.
        """
        masks: np.ndarray = self._rows[step % 2]
        return masks

    # ---- abort ------------------------------------------------------------------------------------------------

    def abort(self, rank: int, reason: AbortReason, text: str) -> None:
        """Stops the run: every wait on every rank raises PeerError naming `rank` and `text`. A rank's first record stays."""
        cell = self._aborts[self.rank]
        with self._abort_lock:  # the watchdog and the user's thread may both have something to say
            if cell[0]:
                return
            data = text.encode()[:_TEXT_BYTES]
            cell[1:4] = rank, reason, len(data)
            cell[_LINE:].view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            self.store(cell, 0, 1)

    def aborted(self, *, own: bool = False) -> AbortRecord | None:
        """The record that another rank (or, with `own`, this one) has posted, if any; of several the lowest rank's."""
        for posted_by, cell in enumerate(self._aborts):
            if (own or posted_by != self.rank) and cell[0] and self._load_min(cell[:1]):
                rank, reason, length = (int(x) for x in cell[1:4])
                text = cell[_LINE:].view(np.uint8)[:length].tobytes().decode(errors="replace")
                return AbortRecord(rank, posted_by, AbortReason(reason), text)
        return None

    def raise_if_aborted(self) -> None:
        if (record := self.aborted()) is not None:
            raise record.error()

    # ---- for native code that reads the same cells ------------------------------------------------------------

    def shape(self) -> Ranks:
        """How the cells below are laid out."""
        return Ranks(self.world_size, self.layout.row, _LINE)

    def address_of_word(self, word: int) -> int:
        """The address of rank 0's word; the other ranks' follow it."""
        return int(self._words.ctypes.data) + self._words.strides[0] * word

    def address_of_losses(self, step: int) -> int:
        """The address of rank 0's loss cell of `step`: of its stamp, which is ``step + 1`` once the loss behind it is there."""
        return int(self._losses[step % LOSS_DEPTH].ctypes.data)

    def address_of_present(self, step: int, param: int) -> int:
        """The address of rank 0's flag of `param`."""
        return int(self._present[step % 2].ctypes.data) + param

    # ---- accesses ---------------------------------------------------------------------------------------------

    def _poll(self, ready: Callable[[], bool], check: Check | None, *, heed_errors: bool = True) -> None:
        pause = _POLL_FIRST_S
        while not ready():
            try:
                self._raise_if_pointless(check, heed_errors)
            except PeerError:
                if ready():  # it came between the two looks: the peer published, then left or failed
                    return
                raise
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_S)

    def _raise_if_pointless(self, check: Check | None, heed_errors: bool) -> None:
        if heed_errors:
            self.raise_if_aborted()
        if check is not None:
            check()
        if (self.alive[:, 0] == LEFT).any():
            rank = int(np.argmax(self.alive[:, 0] == LEFT))
            raise PeerError(
                rank,
                f"rank {rank} has closed its plan after step {int(self.pulse[rank, _STEP_OF_PULSE])} while rank {self.rank} "
                "still waits for it in a later one; every rank must run the same number of steps (is its data loader a batch "
                "short?)",
            )

    def store(self, row: np.ndarray, index: int, value: int) -> None:
        """``row[index] = value`` (release)."""
        if self._library is not None:
            self._library.slidedp_store_release(row.ctypes.data + 8 * index, value)
        else:
            row[index] = value

    def _load_min(self, row: np.ndarray) -> int:
        if self._library is not None:
            return int(self._library.slidedp_load_min(row.ctypes.data, row.size))
        return int(row.min())
