"""Notices that a rank of this host has died or hangs, so that the others stop with its name instead of waiting for ever.

A rank's record in the control segment: its process id and that process's start time (an id alone may be reused).
Watching needs nothing but /proc, so it works where a rank was killed, ran out of memory or crashed in a library. Of a rank
that is alive, hangs.py says whether it hangs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from slidedp.executor.failures.hangs import Hangs
from slidedp.executor.shared.words import LEFT, AbortReason, PeerError, Words
from slidedp.executor.streams.pulse import Pulse, is_in_a_call, place_of


class Watchdog:
    """Watches the other ranks from a daemon thread, every `interval_s`.

    A dead or hung peer or an abort record makes `check` raise PeerError. A rank that has ended because it lost another is not
    blamed: it has posted which one. If the peer is dead and the thread that made the watchdog has not noticed `grace_s` later
    (it is stuck inside a library), or has ended while its process has not (at exit, Python joins threads that may be stuck), the
    error goes to stderr and the process exits with status 1. So it does if a rank hangs, but not while this rank is in its
    caller's code: that may be worth something, and will notice when it calls.

    `hangs`, `pulse`: to look for ranks that hang, and to tell the others that this one does not.
    `local_error`: what has failed on this rank, if anything; it is posted for the others. `on_failure`: called once, from the
    watching thread, with another rank's failure.
    """

    def __init__(
        self,
        words: Words,
        *,
        interval_s: float = 1.0,
        grace_s: float = 15.0,
        exit_process: Callable[[int], object] = os._exit,
        local_error: Callable[[], BaseException | None] = lambda: None,
        on_failure: Callable[[PeerError], object] = lambda error: None,
        hangs: Hangs | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._hangs, self._pulse = hangs, pulse
        self._local_error, self._on_failure = local_error, on_failure
        self._words, self._interval_s, self._grace_s, self._exit = words, interval_s, grace_s, exit_process
        self._owner = threading.current_thread()
        self._noticed = threading.Event()
        self._stopped = threading.Event()
        self._verdict_known = threading.Event()
        self._error: PeerError | None = None
        self._lost: PeerError | None = None
        words.alive[words.rank, 1] = process_start_time(os.getpid())
        words.store(words.alive[words.rank], 0, os.getpid())  # release: the start time is there when the id is
        self._thread = threading.Thread(target=self._watch, name="slidedp-watchdog", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises PeerError once a peer is known to be dead, or any rank has aborted. Cheap: for loops that wait."""
        if self._error is None:
            self._words.raise_if_aborted()
            return
        if threading.current_thread() is self._owner:
            self._noticed.set()
        raise self._error

    def check_peers(self) -> None:
        """Raises PeerError once a rank has died or hangs; not for an error, after which ranks may end what they have begun."""
        if self._lost is not None:
            raise self._lost

    def acknowledge(self) -> None:
        """The failure is being handled (raised from elsewhere): the process is not to be ended for it."""
        self._noticed.set()

    def verdict(self, timeout_s: float) -> PeerError | None:
        """Waits up to `timeout_s` for an explanation of a failure seen elsewhere, e.g. a collective's lost connection."""
        if not self._verdict_known.wait(timeout_s):
            return None
        self.acknowledge()
        return self._error

    def stop(self) -> None:
        """This rank leaves: its end is no failure any more, and the thread stops. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._words.store(self._words.alive[self._words.rank], 0, LEFT)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _watch(self) -> None:
        suspect: BaseException | None = None
        looked_s = time.monotonic()
        while not self._stopped.wait(self._interval_s):
            elapsed_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            if self._pulse is not None:
                self._pulse.beat(place_of(self._owner))
            # In this order: a rank that has ended because it lost another had posted by then which one.
            dead, record = self._dead_peer(), self._words.aborted()
            if dead is not None:
                lost = record if record is not None and record.reason is not AbortReason.ERROR else None
                rank, reason, text = (lost.rank, lost.reason, lost.text) if lost else (dead[0], AbortReason.DIED, (
                    f"rank {dead[0]} (pid {dead[1]}) died; see its own output for the cause"))
                self._words.abort(rank, reason, text)  # first: this rank may end once it has been told
                self._report(PeerError(rank, text), lost=True)
                self._end_if_stuck(text, in_calls_only=reason is AbortReason.HUNG)
                return
            if record is not None:
                self._report(record.error(), lost=record.reason is not AbortReason.ERROR)
                if record.reason is AbortReason.HUNG:
                    self._end_if_stuck(record.text, in_calls_only=True)
                    return
            elif self._error is None and (finding := self._hung(elapsed_s)) is not None:
                self._end_if_stuck(finding, in_calls_only=True)
                return
            error = self._local_error()
            if error is not None and error is suspect and not isinstance(error, PeerError):
                # The second look: a connection lost to a dying peer is that peer's failure, seen by now.
                self._words.abort(self._words.rank, AbortReason.ERROR, f"{type(error).__name__}: {error}")
            suspect = error

    def _hung(self, elapsed_s: float) -> str | None:
        """What is said of the rank that hangs, this one or another, once it has been told to all."""
        finding = self._hangs.look(elapsed_s, self._interval_s) if self._hangs is not None and not self._local_error() else None
        if finding is None or not finding.fatal:
            if finding is not None:
                print(f"slidedp: {finding.text}", file=sys.stderr, flush=True)
            return None
        self._words.abort(finding.rank, AbortReason.HUNG, finding.text)
        self._report(PeerError(finding.rank, finding.text), lost=True)
        return finding.text

    def _report(self, error: PeerError, *, lost: bool) -> None:
        if lost and self._lost is None:
            self._lost = error
        if self._error is None:
            self._error = error
            self._verdict_known.set()
            self._on_failure(error)

    def _dead_peer(self) -> tuple[int, int] | None:
        for rank in range(self._words.world_size):
            pid, started = (int(x) for x in self._words.alive[rank, :2])
            if rank != self._words.rank and pid > 0 and not is_alive(pid, started):
                return rank, pid
        return None

    def _end_if_stuck(self, text: str, *, in_calls_only: bool = False) -> None:
        deadline = time.monotonic() + self._grace_s
        while not self._stopped.wait(self._interval_s):
            if in_calls_only and self._owner.is_alive() and not is_in_a_call(self._owner):
                deadline = time.monotonic() + self._grace_s
            if time.monotonic() < deadline or (self._noticed.is_set() and self._owner.is_alive()):
                continue
            print(f"slidedp: {text}; rank {self._words.rank} is stuck and exits", file=sys.stderr, flush=True)
            self._exit(1)
            return


def process_start_time(pid: int) -> int:
    """Clock ticks after boot at which process `pid` began; 0 if there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """True if process `pid`, begun at `started`, still runs."""
    return process_start_time(pid) == started
