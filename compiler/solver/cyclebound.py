"""A lower bound of the period from a few critical cycles: what no choice can beat, mostly without any search.

Every cycle bounds the period: its weight over its distance, a sum over families. A linear program over the one-hot choices, made
fractional, minimises the largest of the cycles known; the critical cycle of the selection nearest to its optimum is the next.
Each value on the way is a bound (Kelley's cutting planes).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO, EventGraph, Linear, TimedEdge
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio
from slidedp.compiler.eventgraph.memoryrows import MemoryRow

MAX_CUTS = 40


def cycle_bound(graph: EventGraph, rows: Sequence[MemoryRow], selection: Sequence[int]) -> int:
    """Units that no selection's period can be less than. `selection`: a good one, whose cycle is the first cut."""
    lp = _Relaxation(graph, rows)
    first = max_cycle_ratio(graph, graph.choices.default).edges  # the rule's cycle: what a good plan has left behind
    lp.add_cut(first)
    bound, known = 0.0, {first}
    for _ in range(MAX_CUTS):
        cycle = max_cycle_ratio(graph, selection).edges
        if cycle in known and bound:
            break
        if cycle not in known:
            known.add(cycle)
            lp.add_cut(cycle, int(bound))
        solved = lp.solve()
        if solved is None:
            break
        bound = max(bound, solved)
        selection = lp.nearest()
    return max(0, int(bound * (1 - 1e-6)))


class _Relaxation:
    """The linear program: fractions of options, the period, the cuts, the memory rows."""

    def __init__(self, graph: EventGraph, rows: Sequence[MemoryRow]) -> None:
        from ortools.linear_solver import pywraplp

        self.graph = graph
        self.lp: Any = pywraplp.Solver.CreateSolver("GLOP")
        self.unit = max(1, graph.floor(graph.choices.default))  # a step is about 1: the program is solved to absolute tolerances
        self.T = self.lp.NumVar(0, self.lp.infinity(), "T")
        self.x = [[self.lp.NumVar(0, 1, "") for _ in f.options] for f in graph.choices.families]
        for fractions in self.x:
            self.lp.Add(sum(fractions) == 1)
        for link in graph.choices.links:
            self.lp.Add(self.x[link.a][link.a_option] == self.x[link.b][link.b_option])
        for row in rows:
            unit = max(1, row.budget)
            buffers = [self.lp.NumVar(0, self.lp.infinity(), "") for _ in row.largest]
            for largest, each in zip(buffers, row.largest, strict=True):
                for linear in each:
                    self.lp.Add(self.expression(linear, unit) <= largest)
            self.lp.Add(self.expression(row.total, unit) + sum(buffers) <= 1)
        self.lp.Minimize(self.T)
        self.prefixes = [ZERO]
        for work in graph.works:
            self.prefixes.append(self.prefixes[-1] + work.duration)
        self.add_totals()

    def add_totals(self) -> None:
        """The cycles that are always there: every stream, the updates, the shared rates."""
        for stream in self.graph.streams:
            self.lp.Add(self.sum_of([e.busy for e in self.graph.events if e.stream is stream]) <= self.T)
        self.lp.Add(self.sum_of([self.prefixes[-1]]) <= self.T)
        for edge in self.graph.edges:
            if edge.src == edge.dst:
                self.add_cut([edge])

    def expression(self, linear: Linear, unit: int = 1) -> Any:
        terms = [(v / unit) * x for f, values in linear.terms for v, x in zip(values, self.x[f], strict=True) if v]
        return sum(terms) + linear.const / unit

    def sum_of(self, linears: Sequence[Linear], distance: int = 1, bound: int = 0) -> Any:
        """One expression with one coefficient a variable. What is switched off makes it no more than `bound` allows."""
        const, by_family = 0, defaultdict[int, list[int]](list)
        for linear in linears:
            const += linear.const
            for family, values in linear.terms:
                have = by_family[family]
                by_family[family] = [a + b for a, b in zip(have, values, strict=True)] if have else list(values)
        most = const + sum(max((v for v in values if v > OFF // 2), default=0) for values in by_family.values())
        enough = min(0, distance * bound - most)
        terms = [(f, tuple(v if v > OFF // 2 else enough for v in values)) for f, values in by_family.items()]
        return self.expression(Linear(const, tuple(terms)), self.unit)

    def add_cut(self, cycle: Sequence[TimedEdge], bound: int = 0) -> None:
        """`bound`: a period already known to be too small or right."""
        distance = sum(e.distance for e in cycle)
        works = [self.prefixes[e.num_works] for e in cycle]
        self.lp.Add(self.sum_of([*(e.weight for e in cycle), *works], distance, bound) <= distance * self.T)

    def solve(self) -> float | None:
        return float(self.T.solution_value()) * self.unit if self.lp.Solve() == self.lp.OPTIMAL else None

    def nearest(self) -> tuple[int, ...]:
        """The option of each family that has the largest share in the optimum."""
        return tuple(max(range(len(each)), key=lambda o: float(each[o].solution_value())) for each in self.x)
