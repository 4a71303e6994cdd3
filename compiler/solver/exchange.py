"""Better plans from a good one: what its critical cycle waits for is changed, a choice or a layer at a time.

Most changes are no use, and a cycle known says so of most of them: its weight is a sum over families, so that a change costs a
look at the families changed. What all cycles known have nothing against is tried on the event graph, which either takes it, or
answers with the next cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

from slidedp.compiler.eventgraph.eventgraph import ZERO, EventGraph, TimedEdge
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio, positive_cycle
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.solver.search import choose, feasible, partners_of

LOOK, TRY = 3e-5, 1e-9
"""Deterministic seconds of a change held against the cycles known, and, times the square of the edges, of one that is tried."""
SLACK = 1e-3
"""Share of a step that a change may make it longer at first."""
ONE_FAMILY, SWAP = 0.4, 0.3
"""Shares of the changes: of one family, and of two layers that swap; the others take over what another layer has."""
MAX_KNOWN = 200
"""Cycles that a change is held against, the newest."""
ONE_SEARCH = 0.5
"""Deterministic seconds of one search, then another is begun."""
MOST_SEARCHES = 8
MAX_STALE = 2000
"""Changes in a row of which none makes the step shorter: then they may make it longer too."""


@dataclass(frozen=True, slots=True)
class Known:
    """A cycle: its weight is `const` plus a number for the option of each family, in `distance` steps."""

    const: int
    by_family: dict[int, list[int]]
    distance: int

    def weight(self, selection: Sequence[int]) -> int:
        return self.const + sum(values[selection[f]] for f, values in self.by_family.items())

    def change(self, before: Sequence[int], after: Sequence[int], changed: Sequence[int]) -> int:
        have = self.by_family
        return sum(have[f][after[f]] - have[f][before[f]] for f in changed if f in have)


@dataclass
class Exchange:
    """One search from `best` on, which fits, and its `period`. `time_limit`: deterministic seconds. `seed`: of its dice."""

    graph: EventGraph
    rows: Sequence[MemoryRow]
    best: tuple[int, ...]
    period: int
    time_limit: float
    seed: int = 0
    known: list[Known] = field(default_factory=list)

    def __post_init__(self) -> None:
        families = self.graph.choices.families
        self.partners = partners_of(self.graph)
        layers: dict[str, list[int]] = defaultdict(list)
        for i, f in enumerate(families):
            layers[f.group].append(i)
        alike: dict[str, list[list[int]]] = defaultdict(list)
        for group, members in layers.items():
            if layer_index(group) is not None:
                alike[str([(families[i].name, families[i].options) for i in members])].append(members)
        self.kind_of = {families[members[0]].group: kind for kind in alike.values() for members in kind}
        self.members = layers
        self.random = Random(self.seed)
        self.weights: dict[int, int] = {}
        self.prefixes = [ZERO]
        for work in self.graph.works:
            self.prefixes.append(self.prefixes[-1] + work.duration)
        self.now, self.now_period = self.best, self.period
        self.touched: list[int] = []
        self.work = 0.0

    def run(self, target: int) -> None:
        """Until `best` takes `target` units at most, or there are no tries left."""
        self.learn(max_cycle_ratio(self.graph, self.best).edges)
        self.look(self.known[0])
        stale = 0
        while self.period > target and self.work < self.time_limit and stale < MAX_STALE:
            before = self.now
            self.try_(self.proposal(), self.now_period - 1)
            stale = stale + 1 if self.now is before else 0
        began = self.work
        while self.period > target and self.work < self.time_limit:
            left = (self.time_limit - self.work) / (self.time_limit - began)
            self.try_(self.proposal(), int(self.now_period * (1 + SLACK * left * self.random.random())) - 1)

    def try_(self, trial: tuple[int, ...], limit: int) -> None:
        """Goes on from `trial` if it takes `limit` at most."""
        self.work += LOOK
        changed = [i for i in self.touched if self.now[i] != trial[i]]
        if not changed or self.too_long(trial, changed, limit) or not feasible(self.rows, trial):
            return
        self.work += TRY * len(self.graph.edges) ** 2
        found = positive_cycle(self.graph, trial, Fraction(limit))
        if found:
            self.learn(found)
            return
        self.now = trial
        self.weights = {id(k): k.weight(trial) for k in self.known}
        least = max(Fraction(self.weights[id(k)], k.distance) for k in self.known)
        cycle = max_cycle_ratio(self.graph, trial, int(least) - 1)
        self.now_period = -(-cycle.ratio.numerator // cycle.ratio.denominator)
        self.learn(cycle.edges)
        self.look(self.known[0])
        if self.now_period < self.period:
            self.best, self.period = self.now, self.now_period

    def too_long(self, trial: tuple[int, ...], changed: Sequence[int], limit: int) -> bool:
        """True if a cycle known takes longer than `limit`."""
        for at, k in enumerate(self.known):
            if self.weights[id(k)] + k.change(self.now, trial, changed) > limit * k.distance:
                if at:
                    self.known.insert(at // 2, self.known.pop(at))
                return True
        return False

    def learn(self, cycle: Sequence[TimedEdge]) -> None:
        by_family: dict[int, list[int]] = {}
        const = 0
        for e in cycle:
            for linear in (e.weight, self.prefixes[e.num_works]) if e.num_works else (e.weight,):
                const += linear.const
                for f, values in linear.terms:
                    have = by_family.get(f)
                    by_family[f] = [a + b for a, b in zip(have, values, strict=True)] if have else list(values)
        new = Known(const, by_family, sum(e.distance for e in cycle))
        self.known.insert(0, new)
        self.weights[id(new)] = new.weight(self.now)
        for old in self.known[MAX_KNOWN:]:
            del self.weights[id(old)]
        del self.known[MAX_KNOWN:]

    def look(self, critical: Known) -> None:
        """What would make the critical cycle shorter."""
        at, tables = self.now, critical.by_family
        self.shorter = [(f, o) for f, values in tables.items() for o, v in enumerate(values) if v < values[at[f]]]
        groups = dict.fromkeys(self.graph.choices.families[f].group for f, _ in self.shorter)
        self.on_cycle = [g for g in groups if g in self.kind_of]

    def proposal(self) -> tuple[int, ...]:
        """A change that may shorten the critical cycle: one family's option; a layer that takes over another's; two that swap."""
        trial, dice = list(self.now), self.random
        what = dice.random()
        if self.shorter and (what < ONE_FAMILY or not self.on_cycle):
            family, option = dice.choice(self.shorter)
            choose(trial, family, option, self.partners)
            self.touched = self.members[self.graph.choices.families[family].group]
            return tuple(trial)
        if not self.kind_of:
            return self.now
        group = dice.choice(self.on_cycle or list(self.kind_of))
        mine, other = self.members[group], dice.choice(self.kind_of[group])
        self.touched = [*mine, *other]
        for i, j in zip(mine, other, strict=True):
            trial[i] = self.now[j]
            if what > 1 - SWAP:
                trial[j] = self.now[i]
        return tuple(trial)


def exchange(graph: EventGraph, rows: Sequence[MemoryRow], start: tuple[int, ...], period: int, target: int,
             time_limit: float, seed: int = 0) -> tuple[tuple[int, ...], int, float]:  # fmt: skip
    """(selection, its period, deterministic seconds), from `start` and its `period` on, until `target` is reached.

    Searches of half a second, each with other dice: for 36 layers on one H200 two of four found it in 0.4 s, two not in 2.2.
    """
    best, work = start, 0.0
    each = max(ONE_SEARCH, time_limit / MOST_SEARCHES)
    while period > target and work < time_limit:
        search = Exchange(graph, rows, best, period, min(each, time_limit - work), seed)
        search.run(target)
        best, period, work, seed = search.best, search.period, work + search.work, seed + 1
    return best, period, work
