"""Tickets: the completion of one op instance, as other streams and the host wait for it.

No locks: a list's `append` and `pop` are atomic, and both sides write first and look second (append a callback, then
look whether it is too late; set the flag, then take the callbacks), so that none is lost and none runs twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slidedp.executor.streams.worker import Worker


class Aborted(RuntimeError):
    """An op was cancelled, or cannot be submitted, because another op failed: see `__cause__`."""


class Ticket:
    """Completion of one op instance. `event`: its device event once issued, None for host ops.

    `stall`: when its waits began and ended to hold up its stream, see :meth:`OpStream.stall_s`.

    After a failure `issued` and `done` are both True and `error` is set. Keeps no closure alive once done.
    """

    __slots__ = ("_on_done", "_on_issued", "done", "error", "event", "issued", "name", "stall", "stream", "tracked")

    def __init__(self, name: str = "", stream: Worker | None = None, tracked: bool = True) -> None:
        self.name, self.stream, self.tracked = name, stream, tracked
        self.issued = self.done = False
        self.error: BaseException | None = None
        self.event: Any = None
        self.stall: tuple[Any, Any] | None = None
        self._on_issued: list[Callable[[], object]] = []
        self._on_done: list[Callable[[], object]] = []

    def wait_issued(self, timeout_s: float = -1) -> bool:
        """Blocks until the op's function has returned; False on timeout. Raises :class:`Aborted` if the op failed."""
        return (self.issued and self._raise_if_failed()) or self._block(self.add_issued_callback, timeout_s)

    def wait_done(self, timeout_s: float = -1) -> bool:
        """Blocks until the op is complete; False on timeout. Raises :class:`Aborted` if the op failed."""
        return (self.done and self._raise_if_failed()) or self._block(self.add_done_callback, timeout_s)

    def add_issued_callback(self, fn: Callable[[], object]) -> None:
        self._on_issued.append(fn)
        if self.issued:
            _call_all(self._on_issued)

    def add_done_callback(self, fn: Callable[[], object]) -> None:
        """`fn()` runs once the op is done or has failed: here if it already is, else in the thread that finds out."""
        self._on_done.append(fn)
        if self.done:
            _call_all(self._on_done)
        elif not self.tracked:
            self.tracked = True
            if self.issued and self.stream is not None:  # its thread may not have seen the flag: hand the event over
                self.stream._track(self)

    def _block(self, subscribe: Callable[[Callable[[], object]], None], timeout_s: float) -> bool:
        gate = threading.Lock()
        gate.acquire()
        subscribe(gate.release)
        return gate.acquire(timeout=timeout_s) and self._raise_if_failed()

    def _raise_if_failed(self) -> bool:
        if self.error is not None:
            raise Aborted(f"{self.name or 'op'}: cancelled after {self.error!r}") from self.error
        return True

    def _mark_issued(self) -> None:
        self.issued = True
        if self._on_issued:
            _call_all(self._on_issued)

    def _mark_done(self) -> None:
        self.issued = self.done = True
        if self._on_issued:
            _call_all(self._on_issued)
        if self._on_done:
            _call_all(self._on_done)

    def _fail(self, error: BaseException) -> None:
        """Also ends the waiting on a ticket that is done, if one of its callbacks raised and so kept the others from running."""
        if not self.done:
            self.error = error
            self.issued = self.done = True
        for callbacks in (self._on_issued, self._on_done):
            while callbacks:
                with contextlib.suppress(Exception):  # the streams have their error; what follows from it adds nothing
                    _call_all(callbacks)


def _call_all(callbacks: list[Callable[[], object]]) -> None:
    """Each callback once, however many threads get here: `pop` hands it to one of them."""
    while callbacks:
        try:
            fn = callbacks.pop()
        except IndexError:
            return
        fn()
