"""Numbers of slots worth a look: what is enumerated outside the solver, since a window changes who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph

SLOTS: dict[str, tuple[int, ...]] = {"window": (2, 3, 4, 6, 8), "grad_slots": (1, 2, 3, 4)}
"""Counts worth a look, of each kind of slot."""


def smallest_frame(around: Decisions, pinned: frozenset[str]) -> Decisions:
    """The fewest slots that a plan can have."""
    slots: dict[str, Any] = {key: min(counts[0], getattr(around, key)) for key, counts in SLOTS.items() if key not in pinned}
    return replace(around, **slots)


def find_frames(layers: LayerGraph, around: Decisions, pinned: frozenset[str]) -> Iterator[Decisions]:
    """`around`, then other windows, then other gradient slots. `pinned`: counts that the user has set."""
    yield around
    for key, counts in SLOTS.items():
        yield from other_counts(layers, around, key, counts, pinned)


def other_counts(
    layers: LayerGraph, around: Decisions, key: str, counts: tuple[int, ...], pinned: frozenset[str]
) -> Iterator[Decisions]:
    """`around` with other numbers of one kind of slot, from few to many, no more than there are groups to stream."""
    streamed = sum(layers.streams(g) for g in layers.groups)
    if key not in pinned:
        for count in counts:
            if count <= streamed and count != getattr(around, key):
                slots: dict[str, Any] = {key: count}
                yield replace(around, **slots)
