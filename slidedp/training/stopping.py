"""SIGTERM and SIGINT of a training run: finish the step that all ranks agree on, save, leave. Again: leave at once.

A batch system sends SIGTERM to all processes of a job, torchrun passes it on to its ranks, and a terminal's Ctrl-C reaches both
as well: the same wish arrives twice within moments. Hence a signal counts as another only `REPEAT_S` after the first.

torchrun also sends SIGTERM when a rank has died. That needs nothing here: the next step's agreement waits for the dead rank,
its watchdog names it, and the plan raises PeerError.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_S = 3.0


class StopSignals:
    """A context in which the signals are handled; in a thread other than the main one, nothing is.

    `name`: of the signal that has come, if any. Until :meth:`save_on_stop` there is nothing to save, and the first one ends the
    process, as SystemExit with the status that a shell gives it.
    """

    def __init__(self, *, quiet: bool = False, leave: Callable[[int], object] = os._exit) -> None:
        self.name: str | None = None
        self._quiet, self._leave = quiet, leave
        self._first_s = 0.0
        self._ask: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def save_on_stop(self, ask: Callable[[], object]) -> None:
        """From here on a signal calls `ask`, which must be safe in a signal handler."""
        self._ask = ask

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if self._ask is None:
            raise SystemExit(128 + number)
        if self.name is None:
            self.name, self._first_s = name, now
            self._say(f"{name}: saving after the step under way; once more to leave at once")
            self._ask()
        elif now - self._first_s > REPEAT_S:
            self._say(f"{name} once more: leaving at once, without saving")
            self._leave(128 + number)

    def _say(self, text: str) -> None:
        if not self._quiet:
            os.write(2, f"\nslidedp: {text}\n".encode())  # print may be what was interrupted, and is not reentrant
