"""Streams and tickets: every stream has a host thread that runs its ops in order; tickets order ops across streams.

    tickets.py   Ticket: one op instance, issued (its function has returned) and done (the host knows that it is complete)
    worker.py    Worker: a stream's thread, and `submit`
    OpStream     first in, first out; with a device queue, "running" an op means issuing its work to that queue
    priority.py  PriorityStream: host ops that run as their waits complete, earliest deadline first
    updates.py   UpdateStream: the same, with a native queue for the updates
    Streams      one of these for each member of `slidedp.compiler.ops.Stream`, and the one error they share

An error in any op aborts all streams: every unfinished ticket fails, every waiter wakes, later submissions raise
:class:`Aborted`, and `Streams.error` holds the cause. Nothing here knows torch: CUDA comes in as a :class:`DeviceQueue`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from slidedp.compiler.ops import COMPUTE_AHEAD, Stream
from slidedp.executor.streams import turns
from slidedp.executor.streams.pulse import Pulse, place_of
from slidedp.executor.streams.tickets import Aborted, Ticket
from slidedp.executor.streams.updates import UpdateStream
from slidedp.executor.streams.worker import FIRST_PAUSE_S, LONGEST_PAUSE_S, DeviceQueue, Task, Worker

JOIN_S = 10.0
"""How long `close` waits before it leaves threads behind (daemons, perhaps stuck in a dead peer's collective)."""

Seconds = Callable[[str], float]
"""Of an op, by its name."""

Trace = Callable[[str, Stream, float, float], None]
"""Called with op name, stream, start and end in seconds on the clock of `time.perf_counter`."""


class OpStream(Worker):
    """First in, first out. Without `device`, an op is complete when its function returns; with it, when its event is."""

    def __init__(self, stream: Stream, streams: Streams, device: DeviceQueue | None, enter: Task | None) -> None:
        self.device = device
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._issued: SimpleQueue[Any] = SimpleQueue()  # (ticket, timing event of its start): for the completion thread
        self._current: Ticket | None = None
        self._completing: Ticket | None = None
        self._completer: threading.Thread | None = None
        self._completer_lock = threading.Lock()
        # Events of the last ops of compute, oldest first: all of them are issued, at most COMPUTE_AHEAD not done.
        self._ahead: deque[Any] | None = deque() if device is not None and stream is Stream.GPU else None
        super().__init__(stream, streams, enter)

    def _enqueue(self, ticket: Ticket, fn: Task, waits: Sequence[Ticket], before: Task | None, deadline: int) -> None:
        self._queue.put((ticket, fn, waits, before))

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            self._execute(*item)
            del item  # a blocked `get` must not keep the last op's closure, and so its tensors, alive
        self._issued.put(None)

    def _execute(self, ticket: Ticket, fn: Task, waits: Sequence[Ticket], before: Task | None) -> None:
        streams, device = self._streams, self.device
        self._current = ticket  # before the look at `error`: an abort sets `error` first and looks here second
        try:
            if self._ahead is not None and len(self._ahead) == COMPUTE_AHEAD:  # before the look at `error`: it may take long
                self._ahead.popleft().synchronize()
            streams.check()
            self._hold(ticket, waits, before)
            if streams.delay is not None:
                time.sleep(streams.delay(ticket.name))
            if streams.pause is not None and device is not None:
                device.pause(streams.pause(ticket.name))
            timing = streams.trace is not None
            start = time.perf_counter() if timing else 0.0
            begin = device.record(blocking=False, timing=True) if timing and device is not None else None
            if streams.pulse is not None:
                streams.pulse.started(self.stream, ticket.name)
            fn()
            if streams.pulse is not None:
                streams.pulse.ended(self.stream)
            if device is not None:
                tracked = ticket.tracked or timing
                ticket.event = device.record(blocking=tracked or self._ahead is not None, timing=timing)
                ticket._mark_issued()
                if self._ahead is not None:
                    self._ahead.append(ticket.event)
                if timing and streams.issues is not None:
                    streams.issues(ticket.name, self.stream, start, time.perf_counter())
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

    def _hold(self, ticket: Ticket, waits: Sequence[Ticket], before: Task | None) -> None:
        """Waits for all that the op waits for. Of the compute stream, notes how long that holds it up."""
        missing = [t for t in waits if not t.done or t.error is not None]
        stall_begin = self._now() if self.stream is Stream.GPU and (missing or before) else None
        for awaited in missing:
            self._await(awaited)
        if before is not None:
            self._streams._poll(before)
        if stall_begin is not None:
            ticket.stall = stall_begin, self._now()

    def _now(self) -> Any:
        """The moment at which all work of this stream so far is done: seconds, or of a device an event."""
        return time.perf_counter() if self.device is None else self.device.record(blocking=False, timing=True)

    def stall_s(self, ticket: Ticket) -> float:
        """For how long the op, which is done, has held the compute stream up while it waited for other streams."""
        if ticket.stall is None:
            return 0.0
        begin, end = ticket.stall
        return float(end - begin) if self.device is None else self.device.elapsed_s(begin, end)

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
                if self._streams.pulse is not None:
                    self._streams.pulse.progressed(self.stream)
                ticket._mark_done()
            except BaseException as exc:
                self._streams.abort(exc)
                ticket._fail(exc)
            self._completing = None
            del item, ticket, begin

    def _halt(self) -> None:
        """Nothing to do: ops look at the error before they start."""

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

    def _threads(self) -> list[threading.Thread]:
        return [self._thread, *([] if self._completer is None else [self._completer])]


class Streams(Mapping[Stream, Worker]):
    """All streams of a rank. `devices`: the queues of those that issue to a device; the others run their ops on the host.

    enter: runs first in every stream's thread, with the stream (e.g. to choose its device).
    delay: test mode; op name -> seconds that its stream sleeps before running it, to shake out missing edges.
    pause: the same, but the host goes on, and the device waits before it does the op's work.
    trace: receives each op's name, stream, start and end; device ops are then timed by events on the device. While there is
        one, `issues` receives the same of the host's issuing them.
    """

    def __init__(
        self,
        devices: Mapping[Stream, DeviceQueue] | None = None,
        *,
        enter: Callable[[Stream], object] | None = None,
        delay: Seconds | None = None,
        pause: Seconds | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.delay, self.pause, self.trace = delay, pause, trace
        self.issues: Trace | None = None
        self.pulse: Pulse | None = None  # of several ranks: who is told of every op
        self.error: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()
        turns.shorten(self)
        self._members: dict[Stream, Worker] = {}
        for stream in Stream:
            start = partial(enter, stream) if enter is not None else None
            if stream is Stream.CPU:
                self._members[stream] = self.updates = UpdateStream(stream, self, start)
            else:
                self._members[stream] = OpStream(stream, self, (devices or {}).get(stream), start)
        self.compute: OpStream = self._members[Stream.GPU]  # type: ignore[assignment]

    def __getitem__(self, stream: Stream) -> Worker:
        return self._members[stream]

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def submit(self, stream: Stream, fn: Task, waits: Sequence[Ticket] = (), **options: Any) -> Ticket:
        """Queues an op on `stream`: see :meth:`Worker.submit`."""
        return self._members[stream].submit(fn, waits, **options)

    def abort(self, error: BaseException) -> None:
        """Fails every unfinished ticket of every stream. The first error stays; what it cancels does not count."""
        with self._lock:
            if self.error is None:
                # Before anybody can see the error and fail a ticket for it: native code takes that for an arrival.
                for member in list(self._members.values()):
                    member._halt()
                self.error = error.__cause__ if isinstance(error, Aborted) and error.__cause__ is not None else error
        for member in list(self._members.values()):
            member._abort(self.error)

    def place_of(self, stream: Stream) -> str:
        """What the Python code of a stream's op is at just now."""
        return place_of(self._members[stream]._thread)

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
        until_s = time.monotonic() + JOIN_S
        for member in self._members.values():
            member._join(until_s)
        turns.restore(self)

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise RuntimeError("the streams are closed")

    def _poll(self, ready: Task) -> None:
        pause_s = FIRST_PAUSE_S
        while ready() is False:
            self.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
