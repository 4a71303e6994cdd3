"""Numbers of slots worth a look: what is enumerated outside the solver, since a window changes who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph

WINDOWS = (2, 3, 4, 6, 8)
GRAD_SLOTS = (1, 2, 3, 4)


def find_frames(layers: LayerGraph, rule: Decisions, pinned: frozenset[str]) -> Iterator[Decisions]:
    """The rule's slots first, then others from few to many. `pinned`: counts that the user has set."""
    yield rule
    streamed = sum(layers.streams(g) for g in layers.groups)
    windows = [rule.window] if "window" in pinned else sorted({w for w in WINDOWS if w <= streamed} | {rule.window})
    slots = [rule.grad_slots] if "grad_slots" in pinned else sorted({n for n in GRAD_SLOTS if n <= streamed} | {rule.grad_slots})
    for window, grad_slots in product(windows, slots):
        if (window, grad_slots) != (rule.window, rule.grad_slots):
            yield replace(rule, window=window, grad_slots=grad_slots)
