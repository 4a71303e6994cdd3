"""Which op has ended before which other starts: reachability over steps and ranks.

An edge of distance d orders the instance of `src` of step s-d before `dst` of step s; ops on an ordered stream follow one
another, also from one step to the next. Across ranks only two things order anything: an `all_ranks` edge (`src` on every rank
before `dst` on each), and a collective (what precedes it on any rank has ended before it moves a byte on any rank).

Ranks need no nodes of their own. Whatever orders across ranks orders every rank before every rank, itself included, so a path
from rank q to rank p, by way of any others, is a path of the one-rank graph that *crosses* at least once (at its first
crossing go straight to p, then stay); and a cycle through several ranks is a cycle of the one-rank graph. It is enough to keep,
for each op, four sets: which ops precede it, 0 or 1 steps earlier, by any path and by a path that crosses. They are Python
integers as bit sets: 8000 ops take about 8 MB a table.
"""

from __future__ import annotations

from dataclasses import dataclass

from slidedp.compiler.ops import COLLECTIVES, Edge, OpGraph

MAX_DISTANCE = 1
"""Steps back that are answered for: a value lives at most until its next instance replaces it."""


@dataclass(frozen=True, slots=True)
class _Arc:
    """An edge as positions: `crosses` if it orders other ranks' `src` too."""

    src: int
    distance: int
    crosses: bool
    edge: Edge


class Reach:
    """Answers for one graph, built once: O(edges) bit-set unions. A cyclic graph only answers :meth:`cycle`."""

    def __init__(self, graph: OpGraph) -> None:
        self._names = [op.name for op in graph.ops]
        self._index = graph.index
        self._world_size = graph.world_size
        self._into: list[list[_Arc]] = [[] for _ in graph.ops]
        for e in (*graph.edges, *graph.stream_edges()):
            dst = self._index[e.dst]
            crosses = e.all_ranks or graph.ops[dst].kind in COLLECTIVES
            self._into[dst].append(_Arc(self._index[e.src], e.distance, crosses, e))
        order = self._topological_order()
        self._cyclic = len(order) < len(graph.ops)
        # _before[distance][crossed][op]: the ops that precede `op`
        self._before = [[[0] * len(graph.ops) for _ in range(2)] for _ in range(MAX_DISTANCE + 1)]
        if not self._cyclic:
            for distance in range(MAX_DISTANCE + 1):
                self._fill(order, distance)

    def _topological_order(self) -> list[int]:
        """Ops in an order that respects the edges within a step; those on or behind a cycle are left out."""
        waits = [sum(arc.distance == 0 for arc in arcs) for arcs in self._into]
        out: list[list[int]] = [[] for _ in self._into]
        for v, arcs in enumerate(self._into):
            for arc in arcs:
                if arc.distance == 0:
                    out[arc.src].append(v)
        order = [v for v, n in enumerate(waits) if n == 0]
        for u in order:
            for v in out[u]:
                waits[v] -= 1
                if waits[v] == 0:
                    order.append(v)
        return order

    def _fill(self, order: list[int], distance: int) -> None:
        """The tables of `distance`, from those of smaller distances: what precedes the source, and the source itself."""
        any_path, crossed = self._before[distance]
        for v in order:
            for arc in self._into[v]:
                left = distance - arc.distance
                if left < 0:
                    continue
                before = self._before[left][0][arc.src]
                if left == 0:
                    before |= 1 << arc.src
                any_path[v] |= before
                crossed[v] |= before if arc.crosses else self._before[left][1][arc.src]

    def cycle(self) -> list[str] | None:
        """Names of ops that wait for one another within a step, each for the one before it, or None."""
        if not self._cyclic:
            return None
        placed = set(self._topological_order())
        v = next(v for v in range(len(self._names)) if v not in placed)
        path: list[int] = []
        while v not in path:
            path.append(v)
            v = next(arc.src for arc in self._into[v] if arc.distance == 0 and arc.src not in placed)
        return [self._names[u] for u in reversed(path[path.index(v) :])]

    def precedes(
        self, src: str, dst: str, distance: int = 0, from_other: bool = False, without: Edge | None = None
    ) -> bool:
        """Has `src` of `distance` steps ago ended, on this rank or (`from_other`) on every other, before `dst` starts?

        `without`: as if that edge of the graph (the object in `graph.edges`) were not there.
        """
        assert not self._cyclic, "a cyclic graph orders nothing; ask cycle() first"
        assert 0 <= distance <= MAX_DISTANCE, distance
        u, v = self._index[src], self._index[dst]
        if without is None:
            return self._reaches(u, v, distance, from_other)
        return self._reaches_without(u, v, distance, from_other, without)

    def implied(self, edge: Edge) -> bool:
        """True if `edge`, one of the graph's, orders nothing that its other edges and the streams do not order already."""
        from_other = edge.all_ranks and self._world_size > 1
        return self.precedes(edge.src, edge.dst, edge.distance, from_other, without=edge)

    def _reaches(self, u: int, v: int, distance: int, crossed: bool) -> bool:
        return bool(self._before[distance][crossed][v] >> u & 1)

    def _may_use(self, edge: Edge, v: int, distance: int) -> bool:
        """Can a path of `distance` to `v` go over `edge` at all?"""
        w = self._index[edge.dst]
        left = distance - edge.distance
        return left >= 0 and (w == v or any(self._reaches(w, v, d, False) for d in range(left + 1)))

    def _reaches_without(self, u: int, v: int, distance: int, crossed: bool, edge: Edge) -> bool:
        """Search backwards from `v`, only where the tables see `u`, and trust them as soon as `edge` is out of the way."""
        todo, seen = [(v, distance, crossed)], set()
        while todo:
            state = todo.pop()
            at, left, must_cross = state
            if state in seen or not self._reaches(u, at, left, must_cross):
                continue
            seen.add(state)
            if not self._may_use(edge, at, left):
                return True
            for arc in self._into[at]:
                if arc.edge is edge or arc.distance > left:
                    continue
                still = must_cross and not arc.crosses
                if arc.src == u and arc.distance == left and not still:
                    return True
                todo.append((arc.src, left - arc.distance, still))
        return False
