"""How a plan's machine ends: closed by the user, collected as garbage, or left open until the process ends."""

from __future__ import annotations

import threading
from contextlib import suppress

from slidedp.executor.machine.machine import Machine


def close(machine: Machine) -> None:
    """Closes the machine, then the process groups that it was given: left open, they may abort the process when Python exits."""
    try:
        machine.close()
    finally:
        machine.collectives.close(healthy=False)  # as far as that has not been done


def close_quietly(machine: Machine) -> None:
    """A plan that nobody closed and nobody holds any more: at collection, or at exit.

    Collected in another thread than the main one, it is closed in a thread made for it: that one may be a stream's own, which
    must end the step under way, or hold a lock.
    """
    def quietly() -> None:
        with suppress(Exception):
            close(machine)

    if threading.current_thread() is threading.main_thread():
        quietly()
    else:
        threading.Thread(target=quietly, name="slidedp-close").start()
