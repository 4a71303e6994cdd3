"""The interface of every stream: a host thread that takes ops in and answers each with a Ticket."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slidedp.compiler.ops import Stream
from slidedp.executor.streams.tickets import Ticket

if TYPE_CHECKING:
    from slidedp.executor.streams.streams import Streams

Task = Callable[[], object]

FIRST_PAUSE_S = 20e-6
"""Pause after the first look at a condition that another process will make true; each further pause is twice as long."""

LONGEST_PAUSE_S = 1e-3


class DeviceQueue(Protocol):
    """A device's in-order queue, as a stream sees it. Events are opaque but for `synchronize()`."""

    def wait(self, event: Any) -> None:
        """Work issued later starts after `event`, which must have been recorded already (else CUDA makes this a no-op)."""

    def record(self, *, blocking: bool, timing: bool) -> Any:
        """An event after all work issued so far. `blocking`: a host thread will sleep, not spin, on it."""

    def pause(self, seconds: float) -> None:
        """Work issued later starts that much later: a test mode."""

    def elapsed_s(self, begin: Any, end: Any) -> float:
        """Seconds between two completed timing events."""

    def time_s(self, event: Any) -> float:
        """When a completed timing event happened, on the clock of `time.perf_counter`."""


class Worker(ABC):
    """The thread of `stream`. A subclass sets up what it needs before this constructor, which starts the thread."""

    device: DeviceQueue | None = None

    def __init__(self, stream: Stream, streams: Streams, enter: Task | None) -> None:
        self.stream = stream
        self._streams, self._enter = streams, enter
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
        """Queues `fn`, to run in the stream's thread after `waits`. Raises :class:`Aborted` after an error.

        before: called in the thread, after the waits and again and again until it returns anything but False.
        need_done: hint for device ops that the host or a host stream will wait for.
        deadline: what a :class:`PriorityStream` orders by; others ignore it.
        """
        streams = self._streams
        streams._check_open()
        ticket = Ticket(name, self, tracked=need_done or self.device is None)
        self._enqueue(ticket, fn, waits, before, deadline)
        if streams.error is not None:  # an abort may have emptied the queue just before our op got there
            ticket._fail(streams.error)
        return ticket

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
        except BaseException as exc:
            self._streams.abort(exc)
        self._serve()

    @abstractmethod
    def _enqueue(self, ticket: Ticket, fn: Task, waits: Sequence[Ticket], before: Task | None, deadline: int) -> None:
        """Takes an op in, in the submitter's thread."""

    @abstractmethod
    def _serve(self) -> None:
        """Runs ops, in the stream's thread, until there are none left after :meth:`_stop`. Errors of ops do not end it."""

    @abstractmethod
    def _track(self, ticket: Ticket) -> None:
        """Somebody waits for the completion of an issued `ticket` that was submitted without `need_done`."""

    @abstractmethod
    def _halt(self) -> None:
        """What this stream runs without Python, which cannot look at the error, must not begin any more. Precedes `_abort`."""

    @abstractmethod
    def _abort(self, error: BaseException) -> None:
        """Fails every unfinished ticket. From any thread."""

    @abstractmethod
    def _stop(self) -> None:
        """No more ops will come."""

    def _threads(self) -> list[threading.Thread]:
        return [self._thread]

    def _join(self, until_s: float) -> None:
        """Waits for the threads to end, until `until_s` on the clock of `time.monotonic`."""
        for thread in self._threads():
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
