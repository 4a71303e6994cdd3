"""What happens when something fails: waits that end, the error that is raised, and what the other ranks are told.

An op that fails aborts this rank's streams (tickets.py). The watchdog sees that, and posts it for the others; it sees what
they post and which of them have died, and aborts our streams for it. So every wait on every rank ends within seconds, and
each rank raises one error that names its cause.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from slidedp.executor.errors import CheckpointError
from slidedp.executor.failures.hangs import Hangs
from slidedp.executor.failures.liveness import Watchdog
from slidedp.executor.options import MachineOptions
from slidedp.executor.shared.words import AbortReason, PeerError, Words
from slidedp.executor.streams.pulse import Pulse
from slidedp.executor.streams.streams import Streams
from slidedp.executor.streams.tickets import Aborted, Ticket

VERDICT_S = 3.0
"""How long an error of our own waits for the watchdog to say that a peer's death is behind it."""

LOOK_S = 0.2
"""How often a wait looks whether there is still something to wait for."""


class Failure:
    """Failure policy of one rank: the only place that decides which error the user sees."""

    def __init__(self, streams: Streams, words: Words, options: MachineOptions, drained_word: int) -> None:
        self.streams, self.words = streams, words
        self.pulse, hangs = None, None
        if words.world_size > 1:
            self.pulse = streams.pulse = Pulse(words)
            hangs = Hangs(
                self.pulse, lambda: words.each(drained_word), lambda: words.alive[:, 0].tolist(), streams.place_of,
                peer_timeout_s=options.peer_timeout_s, peer_absence_s=options.peer_absence_s)
        self.watchdog = Watchdog(words, local_error=lambda: streams.error, on_failure=streams.abort, hangs=hangs,
                                 pulse=self.pulse)
        self._cause: BaseException | None = None

    def arrive(self, turn: int) -> None:
        """The user's thread is about to meet the other ranks, which may have waited for it."""
        if self.pulse is not None:
            self.pulse.arrive(turn)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The user's thread waits for its next batch."""
        if self.pulse is not None:
            self.pulse.load(True)
        try:
            yield
        finally:
            if self.pulse is not None:
                self.pulse.load(False)

    def begin(self, step: int, turn: int, *, fresh: bool) -> None:
        """A step's ops are about to be submitted; `fresh`: of a graph that has not run yet."""
        if self.pulse is not None:
            self.pulse.begin(step, turn, fresh=fresh)

    def saving(self, now: bool) -> None:
        """Updates may wait for a disk from here on, or do not any more."""
        if self.pulse is not None:
            self.pulse.saving(now)

    @contextmanager
    def at_files(self) -> Iterator[None]:
        """All ranks write or read files, and wait for one another outside of steps."""
        self.saving(True)
        try:
            yield
        finally:
            self.saving(False)

    def check(self) -> None:
        """Raises when waiting has become pointless: a peer died or failed, or an op of ours did."""
        self.watchdog.check()
        self.streams.check()

    def wait(self, ticket: Ticket) -> None:
        """Until the op is done. Raises the cause, if it or anything else fails meanwhile."""
        done = threading.Event()
        ticket.add_done_callback(done.set)
        self.wait_event(done)
        if ticket.error is not None:
            raise self.cause() from ticket.error

    def wait_event(self, event: threading.Event) -> None:
        try:
            while not event.wait(LOOK_S):
                self.check()
        except (PeerError, Aborted) as e:
            raise self.cause(e) from e

    def wait_word(self, word: int, step: int) -> None:
        """Until every rank has published `step`. Raises the cause, if anything fails meanwhile."""
        try:
            self.words.wait(word, step, self.check)
        except (PeerError, Aborted) as e:
            raise self.cause(e) from e

    @property
    def unreported(self) -> bool:
        """True if something has failed that nobody has been told of yet."""
        return self._cause is None and self.streams.error is not None

    def raise_if_failed(self) -> None:
        if self.streams.error is not None:
            raise self.cause()

    def stop(self, error: BaseException) -> None:
        """Something outside the streams has failed: they stop too."""
        self.streams.abort(error)

    def clear_frames(self) -> None:
        """The errors no longer hold what our ops and waits worked on: slots, most of all. The user's frames stay as they are."""
        todo, seen = [self._cause, self.streams.error], set[int]()
        while todo:
            error = todo.pop()
            if error is None or id(error) in seen:
                continue
            seen.add(id(error))
            todo += [error.__cause__, error.__context__]
            for frame, _ in traceback.walk_tb(error.__traceback__):
                if frame.f_globals.get("__name__", "").startswith("slidedp."):
                    with suppress(RuntimeError):  # it still runs
                        frame.clear()

    def cause(self, seen: BaseException | None = None) -> BaseException:
        """The error to raise, the same one from the first time on; tells the other ranks if it is ours."""
        if self._cause is None:
            if isinstance(seen, PeerError):
                self.streams.abort(seen)
            error = self.streams.error or seen
            assert error is not None
            if self.words.world_size > 1 and not isinstance(error, PeerError):
                # A connection that broke, say: was it a peer that died? Our own kinds of error are nobody else's fault.
                # But a save breaks with whatever it was that ended the connection.
                foreign = isinstance(error, CheckpointError) or type(error).__module__.partition(".")[0] != "slidedp"
                blamed = self.watchdog.verdict(VERDICT_S) if foreign else None
                if blamed is None:
                    self.words.abort(self.words.rank, AbortReason.ERROR, f"{type(error).__name__}: {error}")
                error = blamed or error
            self._cause = error
        self.watchdog.acknowledge()
        return self._cause
