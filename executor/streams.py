"""Streams and tickets: every stream has a host thread that runs its ops in order; tickets order ops across streams.

    tickets.py      Ticket: one op instance, issued (its function has returned) and done (the host knows that it is complete)
    OpStream        first in, first out; with a device queue, "running" an op means issuing its work to that queue
    PriorityStream  host ops that run as their waits complete, earliest deadline first
    Streams         one of these for each member of `slidedp.compiler.ops.Stream`, and the one error they share

An error in any op aborts all streams: every unfinished ticket fails, every waiter wakes, later submissions raise
:class:`Aborted`, and `Streams.error` holds the cause. Nothing here knows torch: CUDA comes in as a :class:`DeviceQueue`.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from slidedp.compiler.ops import Stream
from slidedp.executor.tickets import Aborted, Ticket

POLL_S = 50e-6
"""Pause between two looks at a condition that another process will make true."""

JOIN_S = 10.0
"""How long `close` waits for a thread before leaving it behind (a daemon, perhaps stuck in a dead peer's collective)."""

Task = Callable[[], object]

Trace = Callable[[str, Stream, float, float], None]
"""Called with op name, stream, start and end in seconds on the clock of `time.perf_counter`."""


class DeviceQueue(Protocol):
    """A device's in-order queue, as an :class:`OpStream` sees it. Events are opaque but for `synchronize()`."""

    def wait(self, event: Any) -> None:
        """Work issued later starts after `event`, which must have been recorded already (else CUDA makes this a no-op)."""

    def record(self, *, blocking: bool, timing: bool) -> Any:
        """An event after all work issued so far. `blocking`: a host thread will sleep, not spin, on it."""

    def time_s(self, event: Any) -> float:
        """When a completed timing event happened, on the clock of `time.perf_counter`."""


class OpStream:
    """First in, first out. Without `device`, an op is complete when its function returns; with it, when its event is."""

    def __init__(self, stream: Stream, streams: Streams, device: DeviceQueue | None, enter: Callable[[], None] | None) -> None:
        self.stream, self.device = stream, device
        self._streams, self._enter = streams, enter
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._issued: SimpleQueue[Any] = SimpleQueue()  # (ticket, timing event of its start): for the completion thread
        self._current: Ticket | None = None
        self._completing: Ticket | None = None
        self._completer: threading.Thread | None = None
        self._completer_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"slidedp-{stream}", daemon=True)
        self._thread.start()

    def submit(
        self,
        fn: Task,
        waits: Sequence[Ticket] = (),
        *,
        name: str = "",
        before: Task | None = None,
        need_done: bool = False,
        deadline: int = 0,
    ) -> Ticket:
        """Queues `fn`, to run in the stream's thread after `waits`. `deadline` is ignored here.

        before: called in the thread, after the waits and again and again until it returns anything but False.
        need_done: hint for device ops that the host or a host stream will wait for.
        """
        self._streams._check_open()
        ticket = Ticket(name, self, tracked=need_done or self.device is None)
        self._queue.put((ticket, fn, waits, before))
        if self._streams.error is not None:  # an abort may have emptied the queue just before our put
            ticket._fail(self._streams.error)
        return ticket

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
        except BaseException as exc:
            self._streams.abort(exc)
        while (item := self._queue.get()) is not None:
            self._execute(*item)
            del item  # a blocked `get` must not keep the last op's closure, and so its tensors, alive
        self._issued.put(None)

    def _execute(self, ticket: Ticket, fn: Task, waits: Sequence[Ticket], before: Task | None) -> None:
        streams, device = self._streams, self.device
        self._current = ticket  # before the look at `error`: an abort sets `error` first and looks here second
        try:
            streams.check()
            for awaited in waits:
                if not awaited.done or awaited.error is not None:
                    self._await(awaited)
            if before is not None:
                streams._poll(before)
            if streams.delay is not None:
                time.sleep(streams.delay(ticket.name))
            timing = streams.trace is not None
            start = time.perf_counter() if timing else 0.0
            begin = device.record(blocking=False, timing=True) if timing and device is not None else None
            fn()
            if device is not None:
                tracked = ticket.tracked or timing
                ticket.event = device.record(blocking=tracked, timing=timing)
                ticket._mark_issued()
                if tracked or ticket.tracked:
                    self._track(ticket, begin)
            else:
                if streams.trace is not None:
                    streams.trace(ticket.name, self.stream, start, time.perf_counter())
                ticket._mark_done()
        except BaseException as exc:
            streams.abort(exc)
            ticket._fail(streams.error or exc)
        self._current = None

    def _await(self, awaited: Ticket) -> None:
        if awaited.stream is self:
            return  # FIFO
        if self.device is None:
            awaited.wait_done()
        else:
            awaited.wait_issued()  # only then is there a recorded event to wait on
            if awaited.event is not None and not awaited.done:
                self.device.wait(awaited.event)

    def _track(self, ticket: Ticket, begin: Any = None) -> None:
        """The completion thread, made when first needed, will mark `ticket` done."""
        if self._completer is None:
            with self._completer_lock:
                if self._completer is None:
                    self._completer = threading.Thread(target=self._complete, name=f"slidedp-{self.stream}-done", daemon=True)
                    self._completer.start()
        self._issued.put((ticket, begin))
        if self._streams.error is not None:
            ticket._fail(self._streams.error)

    def _complete(self) -> None:
        while (item := self._issued.get()) is not None:
            ticket, begin = item
            self._completing = ticket
            try:
                ticket.event.synchronize()
                if begin is not None and self._streams.trace is not None and self.device is not None:
                    self._streams.trace(ticket.name, self.stream, self.device.time_s(begin), self.device.time_s(ticket.event))
                ticket._mark_done()
            except BaseException as exc:
                self._streams.abort(exc)
                ticket._fail(exc)
            self._completing = None
            del item, ticket, begin

    def _abort(self, error: BaseException) -> None:
        pending = [t for t in (self._current, self._completing) if t is not None]
        for queue in (self._queue, self._issued):
            sentinel = False
            try:
                while True:
                    item = queue.get_nowait()
                    sentinel |= item is None
                    pending += [] if item is None else [item[0]]
            except Empty:
                if sentinel:
                    queue.put(None)
        for ticket in pending:
            ticket._fail(error)

    def _stop(self) -> None:
        self._queue.put(None)

    def _join(self) -> None:
        for thread in (self._thread, self._completer):
            if thread is not None and thread is not threading.current_thread():
                thread.join(JOIN_S)


class _Entry:
    """An op of a PriorityStream; orders by deadline, then submission. `missing`: waits not yet done."""

    __slots__ = ("before", "fn", "key", "missing", "ticket")

    def __init__(self, key: tuple[int, int], ticket: Ticket, fn: Task, before: Task | None) -> None:
        self.key, self.ticket, self.fn, self.before, self.missing = key, ticket, fn, before, 0

    def __lt__(self, other: _Entry) -> bool:
        return self.key < other.key


class PriorityStream:
    """One host worker that takes, of the ops whose waits are done, the one of earliest deadline; ties by submission."""

    device: DeviceQueue | None = None

    def __init__(self, stream: Stream, streams: Streams, enter: Callable[[], None] | None = None) -> None:
        self.stream = stream
        self._streams, self._enter = streams, enter
        self._changed = threading.Condition(threading.Lock())  # guards the four below: any thread may finish a wait
        self._heap: list[_Entry] = []
        self._outstanding: dict[int, _Entry] = {}
        self._sequence = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"slidedp-{stream}", daemon=True)
        self._thread.start()

    def submit(
        self,
        fn: Task,
        waits: Sequence[Ticket] = (),
        *,
        name: str = "",
        before: Task | None = None,
        need_done: bool = False,
        deadline: int = 0,
    ) -> Ticket:
        """As :meth:`OpStream.submit`, but ordered by `deadline`. While `before` returns False, other ops may run."""
        self._streams._check_open()
        ticket = Ticket(name, self)
        with self._changed:
            sequence = next(self._sequence)
            entry = self._outstanding[sequence] = _Entry((deadline, sequence), ticket, fn, before)
            entry.missing = 1 + len(waits)  # one more than the waits: it cannot enter before all are subscribed to
        for awaited in waits:
            awaited.add_done_callback(partial(self._arrived, entry))
        self._arrived(entry)
        if self._streams.error is not None:
            ticket._fail(self._streams.error)
        return ticket

    def _arrived(self, entry: _Entry) -> None:
        with self._changed:
            entry.missing -= 1
            if entry.missing == 0 and entry.key[1] in self._outstanding:
                heapq.heappush(self._heap, entry)
                self._changed.notify()

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
        except BaseException as exc:
            self._streams.abort(exc)
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
        while True:
            with self._changed:
                if not_yet and (self._streams.error is not None or not self._heap):
                    self._changed.wait(POLL_S)
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

    def _track(self, ticket: Ticket) -> None:
        """Nothing to do: host ops are done when they return."""

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
            entry.fn()
            if streams.trace is not None:
                streams.trace(ticket.name, self.stream, start, time.perf_counter())
            with self._changed:
                self._outstanding.pop(entry.key[1], None)
            ticket._mark_done()
        except BaseException as exc:
            streams.abort(exc)
            ticket._fail(streams.error or exc)

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

    def _join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)


class Streams(Mapping[Stream, "OpStream | PriorityStream"]):
    """All streams of a rank. `devices`: the queues of those that issue to a device; the others run their ops on the host.

    enter: runs first in every stream's thread, with the stream (e.g. to choose its device).
    delay: test mode; op name -> seconds that its stream sleeps before running it, to shake out missing edges.
    trace: receives each op's name, stream, start and end; device ops are then timed by events on the device.
    """

    def __init__(
        self,
        devices: Mapping[Stream, DeviceQueue] | None = None,
        *,
        enter: Callable[[Stream], None] | None = None,
        delay: Callable[[str], float] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.delay, self.trace = delay, trace
        self.error: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._members: dict[Stream, OpStream | PriorityStream] = {}
        for stream in Stream:
            start = partial(enter, stream) if enter is not None else None
            if stream is Stream.CPU:
                self._members[stream] = PriorityStream(stream, self, start)
            else:
                self._members[stream] = OpStream(stream, self, (devices or {}).get(stream), start)

    def __getitem__(self, stream: Stream) -> OpStream | PriorityStream:
        return self._members[stream]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def submit(
        self,
        stream: Stream,
        fn: Task,
        waits: Sequence[Ticket] = (),
        *,
        name: str = "",
        before: Task | None = None,
        need_done: bool = False,
        deadline: int = 0,
    ) -> Ticket:
        """Queues an op on `stream`: see :meth:`OpStream.submit` and :meth:`PriorityStream.submit`."""
        return self._members[stream].submit(fn, waits, name=name, before=before, need_done=need_done, deadline=deadline)

    def abort(self, error: BaseException) -> None:
        """Fails every unfinished ticket of every stream. The first error stays; what it cancels does not count."""
        with self._lock:
            if self.error is None:
                self.error = error.__cause__ if isinstance(error, Aborted) and error.__cause__ is not None else error
        for member in list(self._members.values()):
            member._abort(self.error)

    def check(self) -> None:
        """Raises :class:`Aborted` from the first error, if there was one."""
        if self.error is not None:
            raise Aborted(f"streams stopped after {self.error!r}") from self.error

    def close(self) -> None:
        """Runs what was submitted (nothing after an error), then ends the threads. Idempotent; submissions raise from here on."""
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for member in self._members.values():
                member._stop()
        for member in self._members.values():
            member._join()

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise RuntimeError("the streams are closed")

    def _poll(self, ready: Task) -> None:
        while ready() is False:
            self.check()
            time.sleep(POLL_S)
