"""The stream of CPU updates: not first in, first out, but earliest deadline first of the ops that can run (DESIGN §5)."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from slidedp.compiler.ops import Stream
from slidedp.executor.streams.tickets import Ticket
from slidedp.executor.streams.worker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Task, Worker

if TYPE_CHECKING:
    from slidedp.executor.streams.streams import Streams


class _Entry:
    """An op of a PriorityStream; orders by deadline, then submission. `missing`: waits not yet done."""

    __slots__ = ("before", "fn", "key", "missing", "ticket")

    def __init__(self, key: tuple[int, int], ticket: Ticket, fn: Task, before: Task | None, missing: int) -> None:
        self.key, self.ticket, self.fn, self.before, self.missing = key, ticket, fn, before, missing

    def __lt__(self, other: _Entry) -> bool:
        return self.key < other.key


class PriorityStream(Worker):
    """One host worker that takes, of the ops whose waits are done, the one of earliest deadline; ties by submission.

    While an op's `before` returns False, other ops may run.
    """

    def __init__(self, stream: Stream, streams: Streams, enter: Task | None = None) -> None:
        self._changed = threading.Condition(threading.Lock())  # guards the four below: any thread may finish a wait
        self._heap: list[_Entry] = []
        self._outstanding: dict[int, _Entry] = {}
        self._sequence = itertools.count()
        self._stopping = False
        super().__init__(stream, streams, enter)

    def _enqueue(self, ticket: Ticket, fn: Task, waits: Sequence[Ticket], before: Task | None, deadline: int) -> None:
        with self._changed:
            sequence = next(self._sequence)
            # one more than the waits: it cannot enter the heap before all are subscribed to
            entry = self._outstanding[sequence] = _Entry((deadline, sequence), ticket, fn, before, 1 + len(waits))
        for awaited in waits:
            awaited.add_done_callback(partial(self._arrived, entry))
        self._arrived(entry)

    def _arrived(self, entry: _Entry) -> None:
        with self._changed:
            entry.missing -= 1
            if entry.missing == 0 and entry.key[1] in self._outstanding:
                heapq.heappush(self._heap, entry)
                self._changed.notify()

    def _serve(self) -> None:
        while True:
            try:
                entry = self._take()
                if entry is None:
                    return
            except BaseException as exc:
                self._streams.abort(exc)
                continue
            self._execute(entry)
            del entry  # not kept while blocked in `_take`

    def _take(self) -> _Entry | None:
        """The next op to run; None when the stream is to stop and nothing is outstanding."""
        not_yet: list[_Entry] = []
        pause_s = FIRST_PAUSE_S
        while True:
            with self._changed:
                if not_yet and (self._streams.error is not None or not self._heap):
                    self._changed.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                    self._put_back(not_yet)
                while not self._heap:
                    if self._stopping and not self._outstanding:
                        return None
                    self._changed.wait()
                entry = heapq.heappop(self._heap)
            if entry.before is None or entry.before() is not False:
                if not_yet:
                    with self._changed:
                        self._put_back(not_yet)
                return entry
            not_yet.append(entry)

    def _put_back(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.key[1] in self._outstanding:  # else aborted meanwhile
                heapq.heappush(self._heap, entry)
        entries.clear()

    def _execute(self, entry: _Entry) -> None:
        streams, ticket = self._streams, entry.ticket
        try:
            streams.check()
            if streams.delay is not None:
                time.sleep(streams.delay(ticket.name))
            start = time.perf_counter()
            if streams.pulse is not None:
                streams.pulse.started(self.stream, ticket.name)
            entry.fn()
            if streams.pulse is not None:
                streams.pulse.ended(self.stream)
            if streams.trace is not None:
                streams.trace(ticket.name, self.stream, start, time.perf_counter())
            with self._changed:
                self._outstanding.pop(entry.key[1], None)
            ticket._mark_done()
        except BaseException as exc:
            streams.abort(exc)
            ticket._fail(streams.error or exc)

    def _track(self, ticket: Ticket) -> None:
        """Nothing to do: host ops are done when they return."""

    def _halt(self) -> None:
        """Nothing to do: ops look at the error before they start."""

    def _abort(self, error: BaseException) -> None:
        with self._changed:
            entries = list(self._outstanding.values())
            self._outstanding.clear()
            self._heap.clear()
            self._changed.notify()
        for entry in entries:
            entry.ticket._fail(error)

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
