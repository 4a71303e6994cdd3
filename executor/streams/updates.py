"""The `cpu` stream: updates go to a native queue that runs them without Python, anything else to a Python worker.

    UpdateQueue   the threads of native/queue.cpp, which take updates by earliest deadline, and what they wait for
    UpdateStream  a PriorityStream with such a queue beside it; one Python thread turns completions into tickets

Where there is no native library, where an op is no native update, and in tests that delay ops, PriorityStream does it all. It
works on what it has begun to its end; in the queue an update makes way for one of an earlier deadline.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from slidedp.compiler.ops import Stream
from slidedp.executor.native.build import COMPLETION, GATE, Ranks, StepConstants, in_process
from slidedp.executor.streams.priority import PriorityStream
from slidedp.executor.streams.tickets import Ticket
from slidedp.executor.streams.worker import Task

if TYPE_CHECKING:
    from slidedp.executor.streams.streams import Streams

_MOST = 64  # completions taken over at a time

Gates = Sequence[tuple[int, int]]
"""(address of a word of every rank, what each must reach)."""


class _Handle(ctypes.c_void_p):
    """The native queue; it lives for as long as any callback that may still call it."""


class UpdateQueue:
    """Threads that run bound updates (:class:`slidedp.executor.optim.adam.BoundUpdate`), which must outlive it.

    `ranks`: how words, losses and presence flags are laid out. `niceness`: of the threads, above the process's (see
    :func:`slidedp.executor.options.update_niceness`). Raises OSError when the system gives no thread.
    """

    def __init__(self, library: Any, num_threads: int, ranks: Ranks, niceness: int = 0) -> None:
        self._library = library
        address = library.slidedp_queue_create(num_threads, niceness, ctypes.byref(ranks))
        if not address:
            raise OSError("no thread can be started for the CPU updates; is the process limit (ulimit -u) reached?")
        self._handle = _Handle(address)
        weakref.finalize(self._handle, in_process, os.getpid(), library.slidedp_queue_destroy, address).atexit = False
        weakref.finalize(self._handle, in_process, os.getpid(), library.slidedp_queue_close, address)  # first; at exit, alone
        self._add, self._arrive = library.slidedp_queue_add, library.slidedp_queue_arrive
        self._found = np.zeros(_MOST, dtype=COMPLETION)

    @property
    def crew(self) -> int:
        """Address of what HostKernels run on: these threads, ahead of all updates. Good for as long as this object is."""
        address: int = self._library.slidedp_queue_crew(self._handle)
        return address

    def add(self, key: int, handle: int, deadline: int, missing: int, step: StepConstants, present: int, gates: Gates) -> None:
        """Update `handle` runs once `missing` arrivals have been called and all `gates` are open. `key`: unique, increasing.

        `present`: address of the first parameter's flag in rank 0's row; 0: all parameters have a gradient.
        """
        if gates:
            table = np.array(gates, dtype=GATE)
            self._add(self._handle, key, handle, deadline, missing, ctypes.byref(step), present, table.ctypes.data, table.size)
        else:
            self._add(self._handle, key, handle, deadline, missing, ctypes.byref(step), present, None, 0)

    def arrival(self, key: int) -> Callable[[], object]:
        """To be called, from any thread, when one thing that update `key` waits for is there."""
        return partial(self._arrive, self._handle, key)

    def collect(self) -> list[tuple[int, int, float, float]]:
        """(key, result, start, end) of what is complete, at least one; blocks. Empty: nothing is left after :meth:`stop`."""
        count = self._library.slidedp_queue_collect(self._handle, self._found.ctypes.data, _MOST)
        found: list[tuple[int, int, float, float]] = self._found[:count].tolist()
        return found

    def halt(self) -> None:
        """No update begins any more; those that have begun run to their ends, the others are dropped."""
        self._library.slidedp_queue_halt(self._handle)

    def stop(self) -> None:
        """No more will be added."""
        self._library.slidedp_queue_stop(self._handle)

    def close(self) -> None:
        """Halts, and waits for the threads to end: for what has begun, of each layer a chunk at most. Idempotent."""
        self._library.slidedp_queue_close(self._handle)


class UpdateStream(PriorityStream):
    """A PriorityStream that passes native updates on to its queue, once it has one.

    Both take the earliest deadline first, each of its own ops; they are not ordered between the two.
    """

    def __init__(self, stream: Stream, streams: Streams, enter: Task | None = None) -> None:
        self._queue: UpdateQueue | None = None
        self._collector: threading.Thread | None = None
        self._keys = itertools.count()
        self._queued: dict[int, tuple[Ticket, Callable[[int], object]]] = {}  # `pop` decides who ends a ticket
        super().__init__(stream, streams, enter)

    def open_queue(self, queue: UpdateQueue) -> None:
        assert self._queue is None
        self._queue = queue
        self._collector = threading.Thread(target=self._collect, name=f"slidedp-{self.stream}-done", daemon=True)
        self._collector.start()

    @property
    def takes_updates(self) -> bool:
        """False if updates must come as Python functions: no queue, or a test that delays ops."""
        return self._queue is not None and self._streams.delay is None

    def submit_update(
        self,
        handle: int,
        step: StepConstants,
        waits: Sequence[Ticket],
        *,
        present: int,
        gates: Gates,
        finished: Callable[[int], object],
        name: str,
        deadline: int,
    ) -> Ticket:
        """Queues a native update: see :meth:`UpdateQueue.add`. Raises :class:`Aborted` after an error.

        `finished(result)` runs before the ticket is done, in a thread of ours; what it raises aborts the streams.
        """
        streams, queue = self._streams, self._queue
        assert queue is not None
        streams._check_open()
        ticket, key = Ticket(name, self), next(self._keys)
        missing = [t for t in waits if not t.done]
        self._queued[key] = (ticket, finished)  # first: it may be complete before `add` returns
        queue.add(key, handle, deadline, len(missing), step, present, gates)
        if missing:
            arrival = queue.arrival(key)
            for awaited in missing:
                awaited.add_done_callback(arrival)
        if streams.error is not None:  # an abort may have looked just before our op got there
            ticket._fail(streams.error)
        return ticket

    def _collect(self) -> None:
        queue = self._queue
        assert queue is not None
        while found := queue.collect():
            for key, result, start, end in found:
                if (entry := self._queued.pop(key, None)) is not None:  # else aborted meanwhile
                    self._finish(*entry, result, start, end)
                    del entry  # not kept while blocked in `collect`

    def _finish(self, ticket: Ticket, finished: Callable[[int], object], result: int, start: float, end: float) -> None:
        streams = self._streams
        try:
            finished(result)
            if streams.pulse is not None:
                streams.pulse.progressed(self.stream)
            if streams.trace is not None:
                streams.trace(ticket.name, self.stream, start, end)
            ticket._mark_done()
        except BaseException as exc:
            streams.abort(exc)
            ticket._fail(streams.error or exc)

    def _halt(self) -> None:
        if self._queue is not None:
            self._queue.halt()

    def _abort(self, error: BaseException) -> None:
        super()._abort(error)
        for key in list(self._queued):
            if (entry := self._queued.pop(key, None)) is not None:
                entry[0]._fail(error)

    def _stop(self) -> None:
        super()._stop()
        if self._queue is not None:
            self._queue.stop()

    def _threads(self) -> list[threading.Thread]:
        return [*super()._threads(), *([] if self._collector is None else [self._collector])]

    def _join(self, until_s: float) -> None:
        super()._join(until_s)
        if self._queue is not None:
            self._queue.close()
