"""Removes edges that other edges and the streams imply: those left are what the executor has to wait for.

Every edge costs an event, so as few as possible are kept. A path of other edges orders at least as much as the edge it
replaces: the same steps and the same ranks. The unrolled graph has no cycles, so which edges are implied does not depend on
the order of removal, except for edges between the same two ops: those are merged first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.ops import Edge, OpGraph, Reason
from slidedp.compiler.reach import Reach
from slidedp.passes.base import Pass

PREFERENCE = (Reason.DATA, Reason.VERSION, Reason.REUSE, Reason.STREAM)
"""Where one edge has several reasons, the first of these is kept: it says most about why the order is what it is."""


@dataclass(frozen=True)
class Prune(Pass):
    """No edge is left that the rest of the graph implies."""

    name: ClassVar[str] = "prune"
    requires: ClassVar[frozenset[str]] = frozenset({"edges"})
    provides: ClassVar[frozenset[str]] = frozenset({"pruned"})

    def run(self, graph: OpGraph) -> OpGraph:
        return prune(graph)


def prune(graph: OpGraph) -> OpGraph:
    """`graph` without implied edges. A graph whose ops wait for one another is left as it is, for the verifier to name."""
    graph = graph.with_(edges=merge(graph.edges))
    reach = Reach(graph)
    if reach.cycle():
        return graph
    return graph.with_(edges=tuple(e for e in graph.edges if not reach.implied(e)))


def merge(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """One edge for any that order the same instances of two ops: the preferred reason, every rank if any asks for it."""
    best: dict[tuple[str, str, int], Edge] = {}
    for e in sorted(edges, key=lambda e: PREFERENCE.index(e.reason)):
        kept = best.setdefault((e.src, e.dst, e.distance), e)
        if e.all_ranks and not kept.all_ranks:
            best[e.src, e.dst, e.distance] = replace(kept, all_ranks=True)
    return tuple(best.values())
