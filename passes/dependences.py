"""Derives the edges: what must wait for what, from what the ops read, write and overwrite.

Classic dependence analysis on a periodic program. Read after write: `data`, or `version` when the value comes from the
step before. Overwrite after use: `reuse`, when a place gets its next occupant. The verifier asks the same questions in
its own words; this pass answers them with edges, :mod:`slidedp.passes.prune` drops those that the rest implies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Chunk, Edge, Op, OpGraph, Reason, Ref
from slidedp.passes.base import Pass

Access = tuple[Op, Ref]
Occupant = tuple[str, int, Chunk | None]


@dataclass(frozen=True)
class Dependences(Pass):
    """Adds every edge that reads, writes and places ask for."""

    name: ClassVar[str] = "dependences"
    requires: ClassVar[frozenset[str]] = frozenset({"compute", "delivery"})
    provides: ClassVar[frozenset[str]] = frozenset({"edges"})

    def run(self, graph: OpGraph) -> OpGraph:
        overlaps = Overlap(graph)
        edges = dict.fromkeys(flow_edges(graph, overlaps) + reuse_edges(graph, overlaps))
        return graph.with_(edges=tuple(edges))


class Overlap:
    """Which ranks' accesses meet: computed for all ranks, remembered by shape, since layers repeat."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.known: dict[tuple[object, ...], tuple[bool, bool]] = {}
        self.known_ranges: dict[tuple[object, ...], list[tuple[tuple[int, int], ...]]] = {}

    def __call__(self, a: Ref, b: Ref, *, one_copy: bool, distance: int = 0) -> tuple[bool, bool]:
        """(some rank's `a` meets its own `b`, some rank's `a` meets another rank's `b`).

        `distance`: in steps, each of which has touched rows of its own. `one_copy`: the memory is shared by the ranks; private
        memory never meets another rank's. A read of all ranks' instances (`peers`) meets the others wherever it meets its own.
        """
        if distance == 0 and a.disjoint(b):
            return False, False
        group = self.graph.group_by_name.get(a.group)
        size = (group.numel, group.num_trainable) if group else None
        key = (size, a.chunk, a.scope, b.chunk, b.scope, one_copy, a.peers or b.peers)
        if key not in self.known:
            self.known[key] = self.compute(a, b, group, one_copy)
        return self.known[key]

    def compute(self, a: Ref, b: Ref, group: Group | None, one_copy: bool) -> tuple[bool, bool]:
        ranks = range(self.graph.world_size)
        ranges_a, ranges_b = self.ranges(a, group), self.ranges(b, group)

        def meet(i: int, j: int) -> bool:
            return any(x[0] < y[1] and y[0] < x[1] for x in ranges_a[i] for y in ranges_b[j])

        own = any(meet(r, r) for r in ranks)
        if a.peers or b.peers:
            return own, own and len(ranks) > 1
        return own, one_copy and any(meet(i, j) for i in ranks for j in ranks if i != j)

    def ranges(self, ref: Ref, group: Group | None) -> list[tuple[tuple[int, int], ...]]:
        """What each rank touches."""
        key = (group and (group.numel, group.num_trainable), ref.chunk, ref.scope)
        if key not in self.known_ranges:
            world = self.graph.world_size
            self.known_ranges[key] = [ref.ranges(group, world, rank) for rank in range(world)]
        return self.known_ranges[key]


def flow_edges(graph: OpGraph, overlap: Overlap) -> list[Edge]:
    """Read after write. The start version of persistent state is what the step before wrote last."""
    writers: dict[tuple[str, int], list[Access]] = defaultdict(list)
    for op in graph.ops:
        for ref in op.writes:
            writers[ref.value, ref.version].append((op, ref))
    edges = []
    for op in graph.ops:
        for ref in op.reads:
            carried = ref.persistent and ref.version == 0
            for source, written in writers[ref.value, 1 if carried else ref.version]:
                own, others = overlap(written, ref, one_copy=ref.shared or ref.peers, distance=int(carried))
                if own or others:
                    reason = Reason.VERSION if carried else Reason.DATA
                    edges.append(Edge(source.name, op.name, reason, distance=int(carried), all_ranks=others))
    return edges


def reuse_edges(graph: OpGraph, overlap: Overlap) -> list[Edge]:
    """Overwrite after use: from the users of a place's occupant to the writers of the next, around to the next step."""
    users: dict[str, dict[Occupant, list[Access]]] = defaultdict(lambda: defaultdict(list))
    writers: dict[str, dict[Occupant, list[Access]]] = defaultdict(lambda: defaultdict(list))
    for op in graph.ops:
        for ref in op.writes:
            if ref.place or ref.group:  # anything else is allocated afresh each step
                writers[ref.location][ref.occupant].append((op, ref))
    for op in graph.ops:
        for ref in op.reads:
            if ref.location in writers:
                users[ref.location][ref.occupant].append((op, ref))
    edges = []
    for location, occupants in writers.items():
        sequence = list(occupants)
        value = sequence[0][0]
        if occupants[sequence[0]][0][1].persistent:  # version 0, then 1, which is the next step's 0
            edges += between(users[location][value, 0, None], occupants[sequence[0]], location, 0, overlap)
            continue
        for occupant in sequence:
            edges += later_versions(users[location][occupant], occupants[occupant], location, overlap)
        for i, occupant in enumerate(sequence):
            following = sequence[(i + 1) % len(sequence)]
            using = users[location][occupant] or occupants[occupant]
            edges += between(using, occupants[following], location, int(i + 1 == len(sequence)), overlap)
    return edges


def later_versions(using: list[Access], writing: list[Access], location: str, overlap: Overlap) -> list[Edge]:
    """A version takes the place of those before it, within the step."""
    edges = []
    for version in {ref.version for _, ref in writing}:
        before, then = ([(op, ref) for op, ref in accesses if (ref.version < version) is earlier and ref.version <= version]
                        for accesses, earlier in ((using, True), (writing, False)))
        edges += between(before, then, location, 0, overlap)
    return edges


def between(using: list[Access], writing: list[Access], location: str, distance: int, overlap: Overlap) -> list[Edge]:
    edges = []
    for user, used in using:
        for writer, written in writing:
            if user.name == writer.name and distance == 0:
                continue
            one_copy = used.shared or used.peers
            if used.occupant[::2] != written.occupant[::2]:
                own, others = True, one_copy
            else:
                own, others = overlap(used, written, one_copy=one_copy, distance=distance)
            if own or others:
                edges.append(Edge(user.name, writer.name, Reason.REUSE, distance, others, location))
    return edges
