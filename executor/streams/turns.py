"""The interpreter's switch interval: how long a Python thread that never pauses keeps the others waiting.

Every call into torch gives up the interpreter's lock and takes it again, which a layer does a hundred times. A thread of the
user's that makes batches in Python, say, then keeps it for a whole interval, 5 ms by default. Beside one that never pauses a step
of a small model on two cores took 7 times as long, with intervals of 0.5 ms not quite 4 times. What they cost where nobody is in
the way: 3 % of the time of tests in which the host is the device.

Source: `sys.setswitchinterval`.
"""

from __future__ import annotations

import sys

INTERVAL_S = 5e-4

_owners: set[int] = set()
_before: list[float] = []


def shorten(owner: object) -> None:
    """Until the last owner lets go; a shorter one that the user has set stays."""
    if not _owners and (interval_s := sys.getswitchinterval()) > INTERVAL_S:
        _before[:] = [interval_s]
        sys.setswitchinterval(INTERVAL_S)
    _owners.add(id(owner))


def restore(owner: object) -> None:
    """Undoes :meth:`shorten`. Idempotent."""
    if id(owner) in _owners:
        _owners.remove(id(owner))
        if not _owners and _before:
            sys.setswitchinterval(_before.pop())
