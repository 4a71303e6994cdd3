"""A bound that an earlier solve has proven, to be taken over where the problem is the very same.

What a bound depends on is all of the event graph (every duration of every option, and who waits for whom) and the memory rows
with their budgets; nothing else, and no hint. The seal is a hash of these and of the bound itself: another machine, shape, cost
or budget has another seal, and so has a bound that was edited. Where it differs, the proof is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slidedp.compiler.eventgraph.eventgraph import EventGraph
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.strict import content_hash

VERSION = 1
"""Raised whenever an earlier version may have proven too much."""


@dataclass(frozen=True, slots=True)
class Proven:
    """No plan takes less than `bound_us`, if `seal` is that of the problem at hand."""

    bound_us: int
    seal: str

    def holds(self, graph: EventGraph, rows: Sequence[MemoryRow]) -> bool:
        return self == prove(graph, rows, self.bound_us)


def prove(graph: EventGraph, rows: Sequence[MemoryRow], bound_us: int) -> Proven:
    """`bound_us`, sealed: for whoever has just proven it."""
    families = [[f.group, f.name, str([dict(o) for o in f.options])] for f in graph.choices.families]
    parts = [families, *map(str, (graph.choices.links, graph.events, graph.edges, graph.works, graph.unit_us, tuple(rows)))]
    return Proven(bound_us, content_hash([VERSION, bound_us, *parts]))
