"""Derives the edges: what must wait for what, from what the ops read, write and overwrite.

Classic dependence analysis on a periodic program. Read after write: `data`, or `version` when the value comes from the
step before. Overwrite after use: `reuse`, when a place gets its next occupant. The verifier asks the same questions in
its own words; this pass answers them with edges, :mod:`slidedp.passes.prune` drops those that the rest implies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Chunk, Edge, Op, OpGraph, Reason, Ref, Scope
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


class Touched(NamedTuple):
    """All that decides which elements of a value the ranks touch: the size of its group, chunk, and whose parts."""

    numel: int
    num_trainable: int
    chunk: Chunk | None
    scope: Scope
    peers: bool


class Overlap:
    """Which ranks' accesses meet: computed for all ranks, remembered by shape, since layers repeat."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.touched: dict[Touched, int] = {}  # numbered
        self.number_of: dict[int, int] = {}  # by identity of a ref, all of which the graph keeps
        self.known: dict[tuple[int, int, bool], tuple[bool, bool]] = {}

    def __call__(self, a: Ref, b: Ref, *, one_copy: bool, distance: int = 0) -> tuple[bool, bool]:
        """(some rank's `a` meets its own `b`, some rank's `a` meets another rank's `b`), for two refs of the graph to one value.

        `distance`: in steps, each of which has touched rows of its own. `one_copy`: the memory is shared by the ranks; private
        memory never meets another rank's. A read of all ranks' instances (`peers`) meets the others wherever it meets its own.
        """
        if distance == 0 and a.rows and a.disjoint(b):
            return False, False
        key = self.number(a), self.number(b), one_copy
        if key not in self.known:
            every = list(self.touched)  # in the order of their numbers
            self.known[key] = meeting(every[key[0]], every[key[1]], one_copy, self.graph.world_size)
        return self.known[key]

    def number(self, ref: Ref) -> int:
        """The same for refs that touch the same elements."""
        number = self.number_of.get(id(ref))
        if number is None:
            group = self.graph.group_by_name.get(ref.group)
            size = (group.numel, group.num_trainable) if group else (-1, -1)
            number = self.touched.setdefault(Touched(*size, ref.chunk, ref.scope, ref.peers), len(self.touched))
            self.number_of[id(ref)] = number
        return number


@lru_cache(1 << 15)  # the search lowers dozens of graphs of the same groups
def meeting(a: Touched, b: Touched, one_copy: bool, world_size: int) -> tuple[bool, bool]:
    """As :class:`Overlap` says."""
    ranks = range(world_size)
    ranges_a, ranges_b = ranges(a, world_size), ranges(b, world_size)

    def meet(i: int, j: int) -> bool:
        return any(x[0] < y[1] and y[0] < x[1] for x in ranges_a[i] for y in ranges_b[j])

    own = any(meet(r, r) for r in ranks)
    if a.peers or b.peers:
        return own, own and len(ranks) > 1
    return own, one_copy and any(meet(i, j) for i in ranks for j in ranks if i != j)


@lru_cache(1 << 12)
def ranges(touched: Touched, world_size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """What each rank touches."""
    group = Group("", touched.numel, touched.num_trainable, ()) if touched.numel >= 0 else None
    ref = Ref("", chunk=touched.chunk, scope=touched.scope)
    return tuple([ref.ranges(group, world_size, rank) for rank in range(world_size)])


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
    moving_in = [(writer, written, written.occupant[::2]) for writer, written in writing]
    for user, used in using:
        one_copy, there = used.shared or used.peers, used.occupant[::2]
        for writer, written, occupant in moving_in:
            if user.name == writer.name and distance == 0:
                continue
            if there != occupant:
                own, others = True, one_copy
            else:
                own, others = overlap(used, written, one_copy=one_copy, distance=distance)
            if own or others:
                edges.append(Edge(user.name, writer.name, Reason.REUSE, distance, others, location))
    return edges
