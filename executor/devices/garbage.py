"""Garbage collection beside training: what lives as long as a plan is left out of it.

A full collection looks at every container alive, of which torch, transformers and a plan have several hundred thousand, and
holds the interpreter's lock: of a step of 0.93 s on an H200 one took 0.33 to 0.39 s, every ten steps or so, in which no
thread could issue anything to the device. After a plan's first step all that is there is frozen (`gc.freeze`), until the last
such plan is closed; what later steps leave behind is collected as ever.
"""

from __future__ import annotations

import gc

_owners: set[int] = set()


def hold(owner: object) -> None:
    """Collects, then freezes what is alive. Again for the same owner: what has come since. Nothing where the user has turned
    collection off.
    """
    if not gc.isenabled():
        return
    _owners.add(id(owner))
    gc.collect()
    gc.freeze()


def release(owner: object) -> None:
    """Undoes :meth:`hold`, once the last owner lets go. Collections look at what others had frozen, too, from then on."""
    if id(owner) in _owners:
        _owners.remove(id(owner))
        if not _owners:
            gc.unfreeze()


def collect() -> None:
    """A full collection, of what is frozen too: parts of a plan may be garbage before it is closed."""
    if _owners:
        gc.unfreeze()
    gc.collect()
    if _owners:
        gc.freeze()


def collect_abandoned() -> None:
    """Before another plan takes memory: one that nobody holds any more and nobody has closed is frozen itself, with all that it
    has on the device, where it is part of a cycle.
    """
    if _owners:
        collect()
