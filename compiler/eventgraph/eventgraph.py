"""The step as a timed event graph whose durations depend on choices (DESIGN §6): what solver, simulation and cycles share.

Events are starts and ends, one pair for all chunks of a transfer. A constraint says

    time[dst] + distance * T  >=  time[src] + weight(choices)

for the period T. Weights are linear in the one-hot choices: a constant and, for some families, a number an option. Order on
a stream is a chain of constraints and one of distance 1 around it; a shared rate is a loop of distance 1 on one event.

CPU updates have no event of their own, and their order is not decided here. The executor takes the earliest deadline
first, and the last gradient to come home is the first that is needed: the interval of each group, from its gradient's return
to its next delivery, encloses those of all groups before it. For nested intervals a preemptive earliest-deadline schedule
exists exactly when each interval is as long as the updates inside it take (Horn 1974, demand criterion), so

    time[delivery of i] + T  >=  time[gradient of i] + sum of the updates with deadlines up to i's

is all there is to say, for any timing: nothing to enumerate. The sums are prefixes of :attr:`EventGraph.works`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from slidedp.compiler.eventgraph.choices import Choices
from slidedp.compiler.ops import Stream

OFF = -(1 << 40)
"""Weight of a constraint that an option switches off, in whatever unit: any sum with it stays far below every duration."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`const` plus, for each (family, values), the value of the option chosen there."""

    const: int = 0
    terms: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def at(self, selection: Sequence[int]) -> int:
        total = self.const
        for family, values in self.terms:
            total += values[selection[family]]
        return total

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.const + other, self.terms)
        merged = dict(self.terms)
        for family, values in other.terms:
            have = merged.get(family)
            merged[family] = values if have is None else tuple(a + b for a, b in zip(have, values, strict=True))
        return Linear(self.const + other.const, tuple(merged.items()))

    def map(self, change: Callable[[int], int]) -> Linear:
        return Linear(change(self.const), tuple((f, tuple(change(v) for v in values)) for f, values in self.terms))


ZERO = Linear()


class Linears:
    """Many linears at once: a search asks thousands of selections for all of them."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        terms = [(i, family, values) for i, linear in enumerate(linears) for family, values in linear.terms]
        self._const = np.array([linear.const for linear in linears], dtype=np.int64)
        self._owner = np.array([i for i, _, _ in terms], dtype=np.int64)
        self._family = np.array([family for _, family, _ in terms], dtype=np.int64)
        self._start = np.cumsum([0, *(len(values) for _, _, values in terms)], dtype=np.int64)[:-1]
        self._values = np.array([v for _, _, values in terms for v in values], dtype=np.int64)

    def at(self, selection: Sequence[int]) -> np.ndarray:
        """int64, one a linear."""
        totals = self._const.copy()
        if len(self._owner):
            chosen = np.array(selection, dtype=np.int64)[self._family]
            np.add.at(totals, self._owner, self._values[self._start + chosen])
        return totals


def total(linears: Iterable[Linear]) -> Linear:
    """The sum, with one term a family."""
    const, merged = 0, dict[int, list[int]]()
    for linear in linears:
        const += linear.const
        for family, values in linear.terms:
            have = merged.get(family)
            merged[family] = [a + b for a, b in zip(have, values, strict=True)] if have else list(values)
    return Linear(const, tuple((f, tuple(values)) for f, values in merged.items()))


@dataclass(frozen=True, slots=True)
class Event:
    """A start, or the end of something chunked. `busy`: microseconds of `stream` that start here, zero for an end."""

    name: str
    stream: Stream
    busy: Linear = ZERO


@dataclass(frozen=True, slots=True)
class TimedEdge:
    """``time[dst] + distance * T >= time[src] + weight + sum of the first num_works works``. Events by position.

    `name` can be shown to a user: which rule this is, and of what.
    """

    src: int
    dst: int
    distance: int
    weight: Linear
    name: str
    num_works: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The CPU updates of one group."""

    group: str
    duration: Linear


@dataclass(frozen=True)
class ByEnd:
    """Fields of all edges, int64, and the numbers of the edges (`edge`) in the order of the events where they end."""

    src: np.ndarray
    dst: np.ndarray
    distance: np.ndarray
    edge: np.ndarray


@dataclass(frozen=True)
class EventGraph:
    """Events in text order (edges of distance 0 point forward), constraints, and CPU works by deadline.

    `choices`: what the families of all Linears stand for. `unit_us`: microseconds of one unit of every weight.
    """

    choices: Choices
    events: tuple[Event, ...]
    edges: tuple[TimedEdge, ...]
    works: tuple[Work, ...] = ()
    unit_us: int = 1

    def __post_init__(self) -> None:
        assert all(e.src < e.dst for e in self.edges if e.distance == 0), "constraints of distance 0 point forward"

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        return tuple(s for s in Stream if s is not Stream.CPU and any(e.stream is s for e in self.events))

    def weights(self, selection: Sequence[int]) -> list[int]:
        """The number of every edge under `selection`."""
        weights: list[int] = (self._weights.at(selection) + np.array(self.sums(selection))[self._num_works]).tolist()
        return weights

    def sums(self, selection: Sequence[int]) -> list[int]:
        """Of the first works: none, one, two…"""
        return [0, *self._works.at(selection).cumsum().tolist()]

    @cached_property
    def _works(self) -> Linears:
        return Linears([w.duration for w in self.works])

    @cached_property
    def _weights(self) -> Linears:
        return Linears([e.weight for e in self.edges])

    @cached_property
    def _num_works(self) -> np.ndarray:
        return np.array([e.num_works for e in self.edges], dtype=np.int64)

    @cached_property
    def by_end(self) -> ByEnd:
        src, dst, distance = np.array([(e.src, e.dst, e.distance) for e in self.edges], dtype=np.int64).reshape(-1, 3).T
        return ByEnd(src, dst, distance, np.argsort(dst, kind="stable"))

    @cached_property
    def totals(self) -> dict[Stream, Linear]:
        """The busy time of each stream as one sum."""
        by_stream: dict[Stream, list[Linear]] = {s: [e.busy for e in self.events if e.stream is s] for s in self.streams}
        by_stream[Stream.CPU] = [w.duration for w in self.works]
        return {stream: total(linears) for stream, linears in by_stream.items()}

    def busy_us(self, selection: Sequence[int]) -> dict[Stream, int]:
        """Busy time of each stream in one step."""
        busy = dict(zip(self.totals, self._totals.at(selection).tolist(), strict=True))
        return {stream: us * self.unit_us for stream, us in busy.items() if us}

    @cached_property
    def _totals(self) -> Linears:
        return Linears(list(self.totals.values()))

    def floor(self, selection: Sequence[int]) -> int:
        """A lower bound of the period, in units: the busiest stream."""
        return max(self.busy_us(selection).values(), default=0) // self.unit_us

    def in_units_of(self, unit_us: int) -> EventGraph:
        """The graph with all weights rounded down to `unit_us`: no cycle gets longer, so that bounds of its period hold."""
        assert self.unit_us == 1
        if unit_us == 1:
            return self

        def convert(value: int) -> int:
            return value if value <= OFF // 2 else value // unit_us

        events = tuple(replace(e, busy=e.busy.map(convert)) for e in self.events)
        edges = tuple(replace(e, weight=e.weight.map(convert)) for e in self.edges)
        works = tuple(replace(w, duration=w.duration.map(convert)) for w in self.works)
        return EventGraph(self.choices, events, edges, works, unit_us)
