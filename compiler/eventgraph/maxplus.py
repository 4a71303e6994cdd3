"""The period of an event graph for fixed choices, twice over: by running it, and as its maximum cycle ratio.

Both are independent of the solver, and of each other; tests hold all three together. The cycle is the explanation of the
period: the constraints along it, each just as tight as the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from slidedp.compiler.eventgraph.eventgraph import OFF, EventGraph, TimedEdge


@dataclass(frozen=True)
class Cycle:
    """The critical cycle: `ratio` is sum of weights over steps spanned, in microseconds a step; `edges` in order."""

    ratio: Fraction
    edges: tuple[TimedEdge, ...]


def simulate_events(graph: EventGraph, selection: Sequence[int], num_steps: int = 16) -> float:
    """Microseconds a step of an as-soon-as-possible run of `num_steps` steps, over their second half (max-plus algebra)."""
    active = _Active.of(graph, graph.weights(selection))
    incoming = active.by_event(active.src, active.weight, active.distance)
    before = [0] * len(graph.events)
    half: list[int] = []
    for step in range(num_steps):
        now = [0] * len(graph.events)
        for v, into in enumerate(incoming):
            latest = 0
            for u, w, distance in into:
                if distance == 0:
                    latest = max(latest, now[u] + w)
                elif step:
                    latest = max(latest, before[u] + w)
            now[v] = latest
        before = now
        if step == num_steps // 2 - 1:
            half = now
    return max((b - a for a, b in zip(half, before, strict=True)), default=0) / (num_steps - num_steps // 2) * graph.unit_us


def max_cycle_ratio(graph: EventGraph, selection: Sequence[int], at_least: int = 0) -> Cycle:
    """The maximum over all cycles of weight / distance: the least period, by Dinkelbach's method.

    Start from a period that some cycles exceed; longest paths under ``weight - T * distance`` find such a cycle; its ratio is
    the next T; no cycle left: done. `at_least`: microseconds of a period known to be too small or right.

    Source: Dasdan, "Experimental analysis of the fastest optimum cycle ratio and mean algorithms" (2004), Burns and others.
    """
    weights = graph.weights(selection)
    active = _Active.of(graph, weights)
    ratio, cycle = Fraction(at_least, graph.unit_us), ()
    while found := _longest_paths(active, ratio, find_cycle=True)[1]:
        edges = tuple(graph.edges[i] for i in found)
        ratio = Fraction(sum(weights[i] for i in found), sum(e.distance for e in edges))
        cycle = edges  # type: ignore[assignment]
    return Cycle(ratio * graph.unit_us, cycle)


def start_times(graph: EventGraph, selection: Sequence[int], period: int) -> list[int]:
    """Earliest times of all events in units, from 0, under a `period` in units that is feasible."""
    times, _ = _longest_paths(_Active.of(graph, graph.weights(selection)), Fraction(period), find_cycle=False)
    return times


@dataclass(frozen=True)
class _Active:
    """The constraints that are not switched off, by the event that waits: of event v those from ``bounds[v]`` to the next bound.

    int64, one a constraint: source, weight, distance, and the number of its edge.
    """

    src: np.ndarray
    weight: np.ndarray
    distance: np.ndarray
    edge: np.ndarray
    bounds: list[int]

    @staticmethod
    def of(graph: EventGraph, weights: Sequence[int]) -> _Active:
        numbers = np.array(weights, dtype=np.int64)
        by_end = graph.by_end
        edge = by_end.edge[numbers[by_end.edge] > OFF // 2]
        bounds = np.searchsorted(by_end.dst[edge], np.arange(len(graph.events) + 1)).tolist()
        return _Active(by_end.src[edge], numbers[edge], by_end.distance[edge], edge, bounds)

    def by_event(self, *columns: np.ndarray) -> list[list[tuple[int, ...]]]:
        """For each event its constraints' values in these columns."""
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        return [rows[lo:hi] for lo, hi in pairwise(self.bounds)]


def _longest_paths(active: _Active, ratio: Fraction, *, find_cycle: bool) -> tuple[list[int], list[int]]:
    """Longest paths from anywhere under ``weight - ratio * distance``, times the ratio's denominator; or a positive cycle.

    Events stand in an order of the edges of distance 0, so one sweep settles all those, and a path around the step takes one
    sweep more for each time around.
    """
    p, q = ratio.numerator, ratio.denominator
    scaled = active.by_event(active.src, active.weight * q - active.distance * p, active.edge)
    best = [0] * len(scaled)
    parent = [-1] * len(scaled)
    source = [-1] * len(scaled)
    changed = True
    while changed:
        changed = False
        for v, into in enumerate(scaled):
            top, cause = best[v], -1
            for u, w, i in into:
                if best[u] + w > top:
                    top, cause, source[v] = best[u] + w, i, u
            if cause >= 0:
                best[v], parent[v], changed = top, cause, True
        if changed and (cycle := _cycle(parent, source)):
            assert find_cycle, "the period is too small"
            return best, cycle
    return best, []


def _cycle(parent: list[int], source: list[int]) -> list[int]:
    """A cycle among the causes, as edges in order of time; every such cycle is positive."""
    state = [0] * len(parent)
    for root in range(len(parent)):
        path, v = [], root
        while v >= 0 and not state[v] and parent[v] >= 0:
            state[v] = root + 1
            path.append(v)
            v = source[v]
        if v >= 0 and state[v] == root + 1 and v in path:
            around = path[path.index(v) :]
            return [parent[u] for u in reversed(around)]
    return []


def positive_cycle(graph: EventGraph, selection: Sequence[int], period: Fraction) -> tuple[TimedEdge, ...]:
    """A cycle for which steps every `period` units are too fast; () if there is none."""
    return tuple(graph.edges[i] for i in _longest_paths(_Active.of(graph, graph.weights(selection)), period, find_cycle=True)[1])


def is_period(graph: EventGraph, selection: Sequence[int], period: int) -> bool:
    """True if the step can repeat every `period` units."""
    return not positive_cycle(graph, selection, Fraction(period))
