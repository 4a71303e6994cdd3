"""Reads the state for a save beside training, and keeps track of what has been read.

This rank's parts of the state (those that it alone updates) are cut into pieces. Each piece is copied once, into a slot of a
bounded buffer; the save's thread writes it to the file, which frees the slot.

    unread ──▶ being read ──▶ read, in a slot ──▶ written

Two threads read. `read` is called by a `snapshot` op, for which an update waits (passes/snapshot.py): it returns once the
pieces that the update will overwrite have been copied, and so waits while all slots are full. This is the stall: `stall_s` is
the time for which an update waited for nothing else. `drain`, in the save's own thread, writes full slots out and, when there
are none, reads the next piece in the order of the files: otherwise a save would wait for a step that may never come.

A piece is read by whichever thread claims it under the lock, and never again: a later reader could find newer values. Each
update of the step after the save waits for its `snapshot` op, and every later update for that one. So whatever is unread is as
it was when the save began.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import Group, shard
from slidedp.compiler.residency import update_chunks
from slidedp.executor.errors import CheckpointError
from slidedp.executor.optim.resident import ResidentState
from slidedp.executor.state.host_state import HostState
from slidedp.executor.state.state_layout import MOMENTS, Buffer
from slidedp.executor.streams.tickets import Ticket

BYTES_PER_ELEMENT = 12
"""FP32 master weights and two moments."""

_ALIGN = 64
_MOST_ELEMENTS = 1 << 22  # of a piece: 48 MiB, a millisecond or ten of copying
_FEWEST_SLOTS = 2  # one is filled while the other is written
SMALLEST_BUFFER_BYTES = _FEWEST_SLOTS * _ALIGN * BYTES_PER_ELEMENT


class _Progress(Enum):
    UNREAD, READING, READ = range(3)


@dataclass(eq=False, slots=True)
class Piece:
    """Elements ``[lo, hi)`` of a group. `moments`: with moments, being trainable; `in_hbm`: masters and moments are there."""

    group: Group
    lo: int
    hi: int
    moments: bool
    in_hbm: bool
    progress: _Progress = _Progress.UNREAD


def own_pieces(state: HostState, decisions: Decisions, resident: ResidentState | None, most: int) -> list[Piece]:
    """What this rank has to save, in the order of the groups: its parts of each chunk as its updates overwrite them,
    and its share of what is frozen. At most `most` elements a piece, a multiple of 64.
    """
    rank, world, there = state.rank, state.world_size, resident.groups if resident else {}
    pieces = []
    for i, g in enumerate(state.groups.values()):
        if g.trainable:
            for chunk in update_chunks(g, decisions.of(g.name), world):
                pieces += [Piece(g, *part, True, g.name in there) for part in cut(*shard(*chunk, rank, world), most)]
        if i % world == rank:
            pieces += [Piece(g, *part, False, False) for part in cut(g.num_trainable, g.numel, most)]
    return pieces


def cut(lo: int, hi: int, most: int) -> list[tuple[int, int]]:
    return [(at, min(at + most, hi)) for at in range(lo, hi, most)]


class Snapshot:
    """Reads one rank's part of the state for one save. Made while no step is under way.

    `buffer_bytes`: of the slots together; `resident`: the state that lives in HBM, if any does.
    """

    def __init__(self, state: HostState, decisions: Decisions, resident: ResidentState | None, buffer_bytes: int) -> None:
        if buffer_bytes < SMALLEST_BUFFER_BYTES:
            raise ValueError(f"save_buffer={buffer_bytes} bytes: at least {SMALLEST_BUFFER_BYTES} are needed")
        most = min(buffer_bytes // (4 * BYTES_PER_ELEMENT), _MOST_ELEMENTS) // _ALIGN * _ALIGN or _ALIGN
        self._state, self._resident = state, resident
        self._pieces = own_pieces(state, decisions, resident, most)
        self._of_group: dict[str, list[Piece]] = {}
        for piece in self._pieces:
            self._of_group.setdefault(piece.group.name, []).append(piece)
        num_slots = min(buffer_bytes // (most * BYTES_PER_ELEMENT), max(len(self._pieces), 1))
        self._free = [torch.empty(3, most) for _ in range(num_slots)]
        self._full: deque[tuple[Piece, Tensor]] = deque()
        self._left = deque(self._pieces)  # for `drain`; claimed ones are dropped when they are come to
        self._unread = len(self._pieces)
        self._over = False
        self._changed = threading.Condition(threading.Lock())  # guards all of the above: updates, the save and the user's thread
        self.stall = StallClock()
        self.num_bytes = 0

    # ---- for updates ----

    def has_room(self, group: str, lo: int, hi: int) -> bool:
        """False if `read` would have to wait for a slot to become free."""
        with self._changed:
            return bool(self._free) or self._over or all(p.progress is _Progress.READ for p in self._within(group, lo, hi))

    def read(self, group: str, lo: int, hi: int) -> None:
        """Returns once ``[lo, hi)``, which this rank is about to update, has been read, or the save has been given up."""
        for piece in self._within(group, lo, hi):
            if (slot := self._claim(piece)) is not None:
                self._copy(piece, slot)

    def _within(self, group: str, lo: int, hi: int) -> list[Piece]:
        return [p for p in self._of_group.get(group, ()) if p.lo < hi and lo < p.hi]

    def _claim(self, piece: Piece) -> Tensor | None:
        """A slot for it; None if somebody else has read it."""
        with self._changed:
            while not self._over and piece.progress is not _Progress.READ:
                if piece.progress is _Progress.UNREAD and self._free:
                    piece.progress = _Progress.READING
                    return self._free.pop()
                self._changed.wait()
            return None

    @torch.no_grad()
    def _copy(self, piece: Piece, slot: Tensor) -> None:
        name, lo, hi = piece.group.name, piece.lo, piece.hi
        try:
            if piece.in_hbm:
                assert self._resident is not None
                self._resident.read_state(name, lo, hi, *(row[: hi - lo] for row in slot))
            else:
                for row, buffer in zip(slot, buffers_of(piece), strict=False):
                    row[: hi - lo].copy_(self._state.flat(buffer, name)[lo:hi])
        except BaseException:
            self.stop()  # or the save's thread would wait for this piece
            raise
        with self._changed:
            piece.progress = _Progress.READ
            self._unread -= 1
            self._full.append((piece, slot))
            self._changed.notify_all()

    # ---- for the save's thread ----

    def drain(self, write: Callable[[Piece, Tensor], int]) -> None:
        """Until all has been read and written. ``write(piece, values)``: FP32, masters and moments, ``[3 or 1, hi - lo]``; says
        how many bytes that came to.

        Raises CheckpointError when it has been stopped before that.
        """
        while (todo := self._next()) is not None:
            piece, slot, full = todo
            if not full:
                self._copy(piece, slot)
                continue
            num_bytes = write(piece, slot[: len(buffers_of(piece)), : piece.hi - piece.lo])
            with self._changed:
                self.num_bytes += num_bytes
                self._free.append(slot)
                self._changed.notify_all()
        if self._over:
            raise CheckpointError("the save has been given up, for something else has failed")

    def _next(self) -> tuple[Piece, Tensor, bool] | None:
        """A full slot to write out, or else a free one to read the next piece into; waits for either. None: all is done."""
        with self._changed:
            while not self._over:
                if self._full:
                    return *self._full.popleft(), True
                while self._left and self._left[0].progress is not _Progress.UNREAD:
                    self._left.popleft()
                if self._left and self._free:
                    self._left[0].progress = _Progress.READING
                    return self._left.popleft(), self._free.pop(), False
                if not self._unread:
                    break
                self._changed.wait()
            return None

    def stop(self) -> None:
        """Nothing more is read or written, and nobody waits any more. Idempotent."""
        with self._changed:
            self._over = True
            self._free.clear()
            self._full.clear()
            self._changed.notify_all()

    # ---- for the user's thread ----

    @property
    def all_read(self) -> bool:
        """True once updates have nothing to wait for."""
        return self._over or not self._unread

    def wait_read(self) -> None:
        """Until the state may be overwritten by anybody."""
        with self._changed:
            while not self.all_read:
                self._changed.wait()

    def let_go(self) -> None:
        """All has been read: the state in HBM is not kept alive any longer."""
        assert self.all_read
        self._resident = None


def buffers_of(piece: Piece) -> tuple[Buffer, ...]:
    return (Buffer.MASTER, *MOMENTS) if piece.moments else (Buffer.MASTER,)


class StallClock:
    """Seconds in which at least one update on this rank had all that it needed but for the save."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # completions come from any stream's thread
        self._held, self._since_s, self._seconds = 0, 0.0, 0.0
        self._stopped = False

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since_s if self._held and not self._stopped else 0.0)

    def stop(self) -> float:
        """Counts no more; returns `seconds`. Not twice."""
        with self._lock:
            if self._held:
                self._seconds += time.perf_counter() - self._since_s
            self._stopped = True
            return self._seconds

    def watch(self, others: Sequence[Ticket], snapshot: Ticket) -> None:
        """An update waits for `others` and for `snapshot`."""
        _after_all(others, lambda: self._enter(snapshot))

    def _enter(self, snapshot: Ticket) -> None:
        if snapshot.done:
            return
        with self._lock:
            self._held += 1
            if self._held == 1:
                self._since_s = time.perf_counter()
        snapshot.add_done_callback(self._leave)  # at once, if it is done by now

    def _leave(self) -> None:
        with self._lock:
            self._held -= 1
            if self._held == 0 and not self._stopped:
                self._seconds += time.perf_counter() - self._since_s


def _after_all(tickets: Iterable[Ticket], call: Callable[[], object]) -> None:
    """`call()` once all are done, in the thread that finds out."""
    waiting = list(tickets)
    left, lock = len(waiting) + 1, threading.Lock()

    def arrived() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            call()

    for ticket in waiting:
        ticket.add_done_callback(arrived)
    arrived()
