"""A bound of the period that counts layers: how many have each option, not which.

In the program of relaxation.py every layer has its own choices. Of 80 layers that are alike, whatever adds up over a step (what
keeps a stream busy, a memory row, a shared rate) is the same for all plans in which as many have an option, and a search that
proves a bound meets each of these plans in turn. Here a variable says how many layers of a kind have an option: some hundred
integers, whose best values are mostly proven in a tenth of a second. What is known of waiting holds here too, if it is said of
all layers of a kind:

    sums      over layers are no less than the count of each option times the least that any of them has for it, which for sums
              over the step is what each has
    maxima    a buffer as large as the largest asks for is paid for in full by the first layer that needs it
    gaps      of the GPU's gaps, the sum behind consecutive ops of layers of one kind is a variable. What has to wait inside
              some ops waits no longer than all the gaps that theirs are of

Every plan has counts, and all of this holds for them: no plan has a shorter step than the program's optimum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

from slidedp.compiler.eventgraph.eventgraph import EventGraph, Linear
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.ops import Stream
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.solver.detours import Detours, Stall, add
from slidedp.compiler.solver.nested import Nested
from slidedp.compiler.solver.relaxation import beats

NEAR = 0.1
"""Share of the gap asked for that may be left between the program's best counts and its bound."""


@dataclass(frozen=True, slots=True)
class Demand:
    """``steps * T + sum of gaps >= need``: `gaps` as (block, how often it counts), `need` in counts."""

    steps: int
    gaps: tuple[tuple[int, int], ...]
    need: Linear


@dataclass(frozen=True)
class Counts:
    """The counting program of `graph` under `rows`."""

    graph: EventGraph
    rows: Sequence[MemoryRow]

    # ---- what is counted together ----

    @cached_property
    def detours(self) -> Detours:
        return Detours(self.graph)

    @cached_property
    def sums(self) -> list[tuple[int, Linear]]:
        """(steps, what they are no shorter than): every stream but the GPU, the updates, the shared rates."""
        graph = self.graph
        found = [(1, add([e.busy for e in graph.events if e.stream is s])) for s in graph.streams if s is not Stream.GPU]
        found.append((1, add([w.duration for w in graph.works])))
        return found + [(e.distance, e.weight) for e in graph.edges if e.src == e.dst]

    @cached_property
    def busy(self) -> Linear:
        """Of the GPU."""
        return add([e.busy for e in self.graph.events if e.stream is Stream.GPU])

    @cached_property
    def kinds(self) -> list[list[list[int]]]:
        """Layers that are alike in all that is a sum or a maximum over the step, each as its families, in one order."""
        families = self.graph.choices.families
        members: dict[str, list[int]] = defaultdict(list)
        for i, f in enumerate(families):
            members[f.group].append(i)
        tables: dict[int, list[str]] = defaultdict(list)
        sums = [self.busy, *(linear for _, linear in self.sums), *(row.total for row in self.rows)]
        maxima = [each for row in self.rows for each in row.maxima]
        for at, linears in enumerate([*([linear + -linear.const] for linear in sums), *maxima]):
            for linear in linears:
                for i, values in linear.terms:
                    tables[i].append(f"{at} {linear.const} {values}")
        alike: dict[str, list[list[int]]] = defaultdict(list)
        for group, own in members.items():
            what = [(families[i].name, families[i].options, sorted(tables[i])) for i in own]
            alike[group if layer_index(group) is None else str(what)].append(own)
        return list(alike.values())

    @cached_property
    def first(self) -> dict[int, int]:
        """Family -> that of the first layer of its kind, which stands for it."""
        return {i: first for kind in self.kinds for own in kind for i, first in zip(own, kind[0], strict=True)}

    @cached_property
    def size(self) -> dict[int, int]:
        """How many a first family stands for."""
        return {i: len(kind) for kind in self.kinds for i in kind[0]}

    @cached_property
    def block(self) -> list[int]:
        """Of every GPU op: the number of the block of consecutive ops, all of layers of one kind, that it is in."""
        kind_of = {self.graph.choices.families[own[0]].group: k for k, kind in enumerate(self.kinds) for own in kind}
        events = self.graph.events
        kinds = [next((kind_of[part] for part in events[i].name.split(".") if part in kind_of), -1) for i in self.detours.chain]
        return [*accumulate((int(a != b) for a, b in pairwise(kinds)), initial=0)] if kinds else []

    def counted(self, linear: Linear) -> Linear:
        """No more than `linear`, whichever layers have an option, in counts: its families stand for kinds."""
        by_first: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for f, values in add([linear]).terms:
            by_first[self.first[f]].append(values)
        terms = []
        for f, tables in by_first.items():
            if len(tables) < self.size[f]:
                tables.append((0,) * len(tables[0]))
            terms.append((f, tuple(map(min, zip(*tables, strict=True)))))
        return Linear(linear.const, tuple(terms))

    # ---- what has to be waited for ----

    def demands(self) -> list[Demand]:
        """All that some counts may not have for nothing."""
        d = self.detours
        found = [Demand(steps, (), self.counted(need)) for steps, need in self.sums]
        for i in (*d.short(), *Nested(d).inequalities()):
            found.append(Demand(i.laps, self.blocks(i.links), self.counted(i.need)))
        for stalls in d.stalls():
            of: dict[int, list[Stall]] = defaultdict(list)
            for stall in stalls:
                of[self.first[stall.busy.terms[0][0]] if stall.busy.terms else -1].append(stall)
            for each in (stalls, *of.values()):
                gaps = self.blocks({k % len(d.chain) for stall in each for k in range(stall.begin, stall.end)})
                for excess in self.excesses(each):
                    found.append(Demand(0, gaps, self.counted(excess)))
        return [demand for demand in dict.fromkeys(found) if self.most(demand.need) > 0]

    def most(self, need: Linear) -> int:
        return need.const + sum(max(values) * self.size[f] for f, values in need.terms)

    def excesses(self, stalls: Sequence[Stall]) -> Iterator[Linear]:
        """What `stalls` make the GPU wait for together, no term of which depends on more than one family.

        One that is chosen makes it wait for what it takes longer than the ops in its window. Of an op whose time depends on a
        choice, either the most that any option takes is off that, or the least, and what the option chosen takes longer is off
        the sum, whether the transfer is chosen or not. One sum for each way to say this of the families called the same.
        """
        d, families = self.detours, self.graph.choices.families
        stalls = [s for s in stalls if not s.busy.const and len(s.busy.terms) == 1]
        inside = [[d.busy(k) for k in range(s.begin + 1, s.end)] for s in stalls]
        names = sorted({families[f].name for ops in inside for op in ops for f, _ in op.terms})
        for most in product((True, False), repeat=len(names)):
            at_most = {name for name, yes in zip(names, most, strict=True) if yes}
            plus, minus = list[Linear](), list[Linear]()
            for stall, ops in zip(stalls, inside, strict=True):
                covered = 0
                for op in ops:
                    covered += op.const
                    for f, values in op.terms:
                        covered += max(values) if families[f].name in at_most else min(values)
                        if families[f].name not in at_most:
                            minus.append(Linear(0, ((f, tuple(v - min(values) for v in values)),)))
                ((own, times),) = stall.busy.terms
                plus.append(Linear(0, ((own, tuple(max(0, us - covered) for us in times)),)))
            yield add(plus, minus)

    def blocks(self, gaps: Iterable[int]) -> tuple[tuple[int, int], ...]:
        most: Counter[int] = Counter()
        for k, times in Counter(gaps).items():
            most[self.block[k]] = max(most[self.block[k]], times)
        return tuple(sorted(most.items()))


class _Program:
    """The CP-SAT model."""

    def __init__(self, of: Counts, m: Any, lower: int, horizon: int) -> None:
        self.of, self.m = of, m
        self.T = m.new_int_var(min(lower, horizon), horizon, "T")
        self.gaps = [m.new_int_var(0, horizon, "") for _ in range(max(of.block, default=-1) + 1)]
        self.busy, self.demands = of.counted(of.busy), of.demands()
        self.totals = [of.counted(row.total) for row in of.rows]
        self.peaks = [list(dict.fromkeys(map(of.counted, row.peaks))) for row in of.rows]
        self.maxima = [[list(dict.fromkeys(map(self.one, each))) for each in row.maxima] for row in of.rows]
        self.count()
        if self.gaps:
            m.add(self.expression(self.busy) + sum(self.gaps) == self.T)
        for demand in self.demands:
            idle = sum(times * self.gaps[k] for k, times in demand.gaps)
            m.add(idle + demand.steps * self.T >= self.expression(demand.need))
        self.memory()
        m.minimize(self.T)

    def one(self, linear: Linear) -> Linear:
        """Of one layer: in terms of the family that stands for its own."""
        return Linear(linear.const, tuple((self.of.first[f], values) for f, values in linear.terms))

    def count(self) -> None:
        """How many layers have each option, of those that are best in something."""
        tables: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        needs = [*(demand.need for demand in self.demands), self.busy, *self.totals, *(x for each in self.peaks for x in each)]
        for linear in (*needs, *(x for row in self.maxima for each in row for x in each)):
            for f, values in linear.terms:
                tables[f].add(values)
        for f, values in self.busy.terms:
            tables[f].add(tuple(-v for v in values))  # time of the GPU also covers
        links = self.of.graph.choices.links
        linked = {(i, o) for k in links for i, o in ((k.a, k.a_option), (k.b, k.b_option))}
        self.n: dict[int, list[Any]] = {}
        for f, size in self.of.size.items():
            options = range(len(self.of.graph.choices.families[f].options))
            free = [o for o in options if (f, o) not in linked]
            kept = [o for o in options if o not in free or not any(beats(a, o, tables[f]) for a in free)]
            self.n[f] = [self.m.new_int_var(0, size, "") if o in kept else 0 for o in options]
            self.m.add(sum(self.n[f][o] for o in kept) == size)
        for link in links:
            if link.a in self.n:
                self.m.add(self.n[link.a][link.a_option] == self.n[link.b][link.b_option])

    def selection(self, solver: Any) -> tuple[int, ...]:
        """One that has the counts found. The options that are linked come first, so that the same layers have all of them."""
        families = self.of.graph.choices.families
        chosen = [0] * len(families)
        for kind in self.of.kinds:
            for place, first in enumerate(kind[0]):
                linked = families[first].resident or 0
                order = [linked, *(o for o in range(len(families[first].options)) if o != linked)]
                having = [o for o in order for _ in range(int(solver.value(self.n[first][o])))]
                for own, o in zip(kind, having, strict=True):
                    chosen[own[place]] = o
        return tuple(chosen)

    def expression(self, linear: Linear) -> Any:
        return linear.const + sum(v * n for f, values in linear.terms for v, n in zip(values, self.n[f], strict=True) if v)

    def memory(self) -> None:
        for row, total, maxima, peaks in zip(self.of.rows, self.totals, self.maxima, self.peaks, strict=True):
            largest = [self.largest(each) for each in maxima]
            if peaks:
                largest.append(self.m.new_int_var(0, row.budget, ""))
                for peak in peaks:
                    self.m.add(largest[-1] >= self.expression(peak))
            self.m.add(self.expression(total) + sum(largest) <= row.budget)

    def largest(self, each: Sequence[Linear]) -> Any:
        """As large as any layer asks for that is counted somewhere."""
        largest = self.m.new_int_var(0, 1 << 50, "")
        for linear in each:
            if not linear.terms:
                self.m.add(largest >= linear.const)
                continue
            ((f, values),) = linear.terms
            for size in sorted({linear.const + v for v in values} - {0}):
                having = sum(n for v, n in zip(values, self.n[f], strict=True) if linear.const + v == size)
                some = self.m.new_bool_var("")
                self.m.add(having <= self.of.size[f] * some)
                self.m.add(largest >= size * some)
        return largest


def count_bound(graph: EventGraph, rows: Sequence[MemoryRow], lower: int, horizon: int, gap: float,
                time_limit: float) -> tuple[int, float, tuple[int, ...] | None]:  # fmt: skip
    """(a period between `lower` and ``horizon + 1`` that no selection's is less than, deterministic seconds, a selection that
    has the best counts found, which tells nothing of where).
    """
    from ortools.sat.python import cp_model

    model = _Program(Counts(graph, rows), cp_model.CpModel(), lower, horizon)
    solver = cp_model.CpSolver()
    p = solver.parameters
    p.num_workers, p.random_seed, p.catch_sigint_signal = 1, 0, False
    p.linearization_level, p.keep_all_feasible_solutions_in_presolve = 2, True  # without, 9.15 cuts off optima: NOTES.md
    p.max_deterministic_time, p.relative_gap_limit = time_limit, gap * NEAR
    status = solver.status_name(solver.solve(model.m))
    work = float(solver.response_proto.deterministic_time)
    if status == "INFEASIBLE":
        return horizon + 1, work, None
    bound = max(lower, int(solver.best_objective_bound))
    return bound, work, model.selection(solver) if status in ("OPTIMAL", "FEASIBLE") else None
