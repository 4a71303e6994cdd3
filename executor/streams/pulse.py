"""What each rank is doing, in shared memory, for the others to tell a rank that hangs from one that is slow (hangs.py).

A row of the control segment a rank. The watchdog's thread writes `beat` and where the user's thread is; the user's thread
writes which turn it has come to; each stream's thread writes the op that it is in, and how many it has done. All are hints: a
torn name harms nobody, and at a standstill, when they are read, nothing writes them.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from slidedp.compiler.ops import Stream
from slidedp.executor.shared.words import PULSE_INTS, Words

_STREAMS = {stream: i for i, stream in enumerate(Stream)}
_BEAT, _ARRIVED, _STEP, _TURN, _FRESH, _SAVING, _LOADS = range(7)
_DONE, _NAMES = 8, 16  # int64s: where the streams' counts begin, and their ops' names
_NAME_BYTES = 48
_PLACE = 8 * _NAMES + len(_STREAMS) * _NAME_BYTES  # bytes: where the place of the user's thread begins
_PLACE_BYTES = 8 * PULSE_INTS - _PLACE

WAITING = frozenset({Stream.COMM, Stream.UPDATE, Stream.CPU})
"""Streams whose ops may themselves wait for other ranks: to be in one says nothing about who hangs."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A rank's row. `arrived`: the turn that it has called `run` (or `evaluate`, `save`) for; `turn`: the last one submitted, of
    `step`. `fresh`: the last turn that had a graph run for the first time. `saving`: what it has under way that is at files.
    `loads`: of batches since `arrived`, twice what it has ended, and one more while it is in one. `ops`: stream -> op that it is
    in.
    """

    beat: int
    arrived: int
    step: int
    turn: int
    fresh: int
    saving: int
    loads: int
    done: tuple[int, ...]
    ops: dict[Stream, str]
    place: str

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes whenever the rank gets anything done."""
        return self.arrived, self.turn, *self.done

    @property
    def place_in_loop(self) -> tuple[int, int]:
        """Grows with every call that all ranks make, and with every batch that is asked for or got in between."""
        return self.arrived, self.loads

    @property
    def loading(self) -> bool:
        """True if it has said that it waits for its next batch."""
        return self.loads % 2 == 1

    @property
    def working_on(self) -> tuple[Stream, str] | None:
        """The op that the rank itself is in, not waiting for others."""
        return next(((s, op) for s, op in self.ops.items() if s not in WAITING), None)


class Pulse:
    """This rank's row, and a view of the others'."""

    def __init__(self, words: Words) -> None:
        self.rank, self.world_size = words.rank, words.world_size
        self._rows = words.pulse
        self._mine: np.ndarray = words.pulse[words.rank]
        self._bytes = memoryview(self._mine.view(np.uint8))
        self._saving_lock = threading.Lock()

    # ---- written ----

    def beat(self, place: str) -> None:
        """The watchdog's thread, every time it looks."""
        self._write(_PLACE, place, _PLACE_BYTES)
        self._mine[_BEAT] += 1

    def arrive(self, turn: int) -> None:
        """The user's thread is about to meet the other ranks."""
        self._mine[_LOADS] = 0
        self._mine[_ARRIVED] = turn

    def load(self, now: bool) -> None:
        """The user's thread asks for its next batch, or has got it."""
        self._mine[_LOADS] = (int(self._mine[_LOADS]) | 1) + (not now)

    def begin(self, step: int, turn: int, *, fresh: bool) -> None:
        """A step's ops are about to be submitted."""
        self._mine[_STEP] = step
        if fresh:
            self._mine[_FRESH] = turn
        self._mine[_TURN] = turn

    def saving(self, now: bool) -> None:
        """Updates may wait for a disk, or not any more; what goes on beside training and what does not overlap."""
        with self._saving_lock:  # the save's thread and the user's
            self._mine[_SAVING] += 1 if now else -1

    def started(self, stream: Stream, op: str) -> None:
        """The stream's thread is in `op`: it waits for no other op any more."""
        at = 8 * _NAMES + _STREAMS[stream] * _NAME_BYTES
        self._bytes[at : at + _NAME_BYTES] = _padded(op)

    def ended(self, stream: Stream) -> None:
        i = _STREAMS[stream]
        self._bytes[8 * _NAMES + i * _NAME_BYTES] = 0
        self._mine[_DONE + i] += 1

    def progressed(self, stream: Stream) -> None:
        """An op of the stream that its thread only issues, or does not see, is complete."""
        self._mine[_DONE + _STREAMS[stream]] += 1

    def _write(self, at: int, text: str, size: int) -> None:
        data = text.encode()[: size - 1]
        self._bytes[at : at + len(data) + 1] = data + b"\0"

    # ---- read ----

    def read(self, rank: int) -> Reading:
        row = self._rows[rank]
        raw: bytes = row.view(np.uint8).tobytes()

        def text(at: int, size: int) -> str:
            return raw[at : at + size].partition(b"\0")[0].decode(errors="replace")

        names = {stream: text(8 * _NAMES + i * _NAME_BYTES, _NAME_BYTES) for stream, i in _STREAMS.items()}
        beat, arrived, step, turn, fresh, saving, loads = row[: _LOADS + 1].tolist()
        return Reading(beat, arrived, step, turn, fresh, saving, loads,
                       done=tuple(row[_DONE : _DONE + len(_STREAMS)].tolist()),
                       ops={stream: name for stream, name in names.items() if name}, place=text(_PLACE, _PLACE_BYTES))


@cache
def _padded(op: str) -> bytes:
    return op.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")


OURS = str(Path(__file__).parents[2])
"""The folder of our package, as frames of its code have it."""


@cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<frozen", OURS, *(paths[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")))


def place_of(thread: threading.Thread) -> str:
    """Where a thread of this process is, in code that is neither Python's, nor a library's, nor ours, if it is in any."""
    frame = innermost = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_libraries()):
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def is_in_a_call(thread: threading.Thread) -> bool:
    """True if a thread of this process is in code of ours, or in what that has called."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame is not None


def lowest(ranks: Sequence[int], readings: Sequence[Reading]) -> int:
    """The one of `ranks` that has got least far."""
    return min(ranks, key=lambda r: (readings[r].turn, sum(readings[r].done)))
