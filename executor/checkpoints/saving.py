"""A save beside training: its thread, and what the user and the machine ask of it.

    slidedp/saving.py   what the ranks do together, in that thread
    snapshot.py         what this rank reads, and for whom updates wait
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from slidedp.executor.checkpoints.snapshot import Snapshot
from slidedp.executor.errors import CheckpointError
from slidedp.executor.failures.failure import Failure
from slidedp.executor.ranks.meetings import Meetings
from slidedp.executor.shared.words import Board, Words

JOIN_S = 10.0
"""How long a save is waited for that cannot end well, because something else has failed."""


class SaveHandle:
    """A checkpoint being written while training goes on: what ``Plan.save(..., wait=False)`` returns.

    `path`: where it will be. It is there, whole, once `done` is True and `wait` does not raise; until then nobody sees it.
    """

    def __init__(self, path: Path, snapshot: Snapshot, work: Callable[[], object], on_end: Callable[[], object]) -> None:
        self.path, self._snapshot, self._work, self._on_end = path, snapshot, work, on_end
        self._error: BaseException | None = None
        self._told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slidedp-save", daemon=True)

    def __repr__(self) -> str:
        return f"SaveHandle({str(self.path)!r}, {'done' if self.done else 'under way'})"

    @property
    def done(self) -> bool:
        """True once the checkpoint is complete, or has failed."""
        return self._ended.is_set()

    @property
    def stall_s(self) -> float:
        """Seconds in which updates of this rank had to wait for the save, so far: for their state to be read."""
        return self._snapshot.stall.seconds

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and moments that this rank has written so far."""
        return self._snapshot.num_bytes

    def wait(self, timeout_s: float | None = None) -> Path:
        """Returns `path` once the checkpoint is complete, on every rank.

        Raises CheckpointError if it could not be written, on every rank: older checkpoints are as they were. TimeoutError.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"{self.path} has not been written within {timeout_s:g} s")
        self._told = True
        if self._error is not None:
            raise self._error
        return self.path

    # ---- for the plan and its machine ----

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def untold(self) -> BaseException | None:
        """A failure that the user has not heard of yet."""
        return self._error if self._ended.is_set() and not self._told else None

    def tell(self) -> None:
        """The user hears of it now, from elsewhere."""
        self._told = True

    def start(self) -> None:
        self._thread.start()

    def finish(self, *, give_up: bool = False) -> None:
        """Until the thread has ended; `give_up`: without doing more, and not for long."""
        if give_up:
            self._snapshot.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S if give_up else None)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._error = CheckpointError(f"saving {self.path} has failed: {e}") if isinstance(e, Exception) else e
            if self._error is not e:
                self._error.__cause__ = e
        finally:
            self._snapshot.stop()  # its buffer goes
            self._on_end()
            self._ended.set()


class Saves:
    """The saves of one machine: at most one is under way. Used by the user's thread; `reading` by all."""

    def __init__(self, words: Words, failure: Failure, counters: Counter[str]) -> None:
        self._failure, self._counters = failure, counters
        self.meetings = Meetings(words, Board.SAVE, failure.watchdog.check_peers, lambda e: e)
        """For the save's thread alone."""
        self._last: SaveHandle | None = None

    def begin(self, path: Path, snapshot: Snapshot, work: Callable[[], object]) -> SaveHandle:
        """`work` runs in a thread from here on; the one before has ended."""
        def ended() -> None:
            self._counters["save_stall_us"] += int(1e6 * snapshot.stall.stop())
            self._failure.saving(False)

        self._last = SaveHandle(path, snapshot, work, ended)
        self._failure.saving(True)
        self._last.start()
        return self._last

    @property
    def reading(self) -> Snapshot | None:
        """What updates have to wait for; None if there is nothing."""
        return None if self._last is None or self._last.snapshot.all_read else self._last.snapshot

    def wait_read(self) -> None:
        """Until anybody may write into the state."""
        if (snapshot := self.reading) is not None:
            snapshot.wait_read()

    def let_go(self) -> None:
        """Until the state may be exchanged for that of another plan."""
        if self._last is not None:
            self._last.snapshot.wait_read()
            self._last.snapshot.let_go()

    def finish(self) -> None:
        """Until no save is under way. Raises what has failed, if nobody has heard of it."""
        if self._last is not None:
            self._last.finish()
        self.raise_untold()

    def raise_untold(self) -> None:
        error = self._last.untold if self._last is not None else None
        if self._last is not None and error is not None:
            self._last.tell()
            raise error

    def heard(self) -> BaseException | None:
        """Another rank's user has heard that the save has failed: what this rank's has not heard of it yet, and does now.

        It has failed in a meeting, to which this rank's thread has come, too, so that it ends any moment.
        """
        if self._last is None:
            return None
        self._last.finish()
        error = self._last.untold
        self._last.tell()
        return error

    def end(self, *, healthy: bool) -> BaseException | None:
        """Waits for a save under way; where ranks have failed, not for long. Returns what nobody has heard of."""
        if self._last is None:
            return None
        self._last.finish(give_up=not healthy and self.meetings.world_size > 1)
        return self._last.untold
