"""The plan with the shortest step: a structured search finds one that reads well, and OR-Tools prove how good it is, or beat it.

    structured    structured.py: all layers of a kind alike but for a few counts, by the period of the event graph
    bound         cyclebound.py: a linear program over critical cycles, which no plan's period can be less than; and
                  counts.py, an integer program over how many layers have each option
    tightening    relaxation.py, where the two are further apart than the gap asked for: an integer program that proves a better
                  bound, and proposes better plans
    CP-SAT        where they still are: all of the event graph, from the best plan so far on

CP-SAT's model: one time an event, the period, one-hot choices a family; the timed event graph, the streams' totals, the memory
rows, the links between families; the objective is the period, and then, at that period, fewest departures from the rule and
fewest changes along the depth. Deterministic: one worker, a fixed seed, limits in deterministic time. ortools is imported when a
plan is solved. Source: DESIGN §6; the formulation is that of periodic event scheduling, with the periods' multiples fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.eventgraph.choices import RESIDENT
from slidedp.compiler.eventgraph.eventgraph import OFF, EventGraph, Linear
from slidedp.compiler.eventgraph.maxplus import Cycle, max_cycle_ratio, start_times
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.solver.counts import count_bound
from slidedp.compiler.solver.cyclebound import cycle_bound
from slidedp.compiler.solver.proven import Proven, prove
from slidedp.compiler.solver.relaxation import Bounded, tighten
from slidedp.compiler.solver.search import descend, feasible, period_of, simplify
from slidedp.compiler.solver.structured import StructuredSearch

RESOLUTION = 1_000_000
"""Units that a step is cut into, about. Times are rounded down to whole ones, so that what is proven for them is for the true
ones; a critical cycle of a thousand of them is 0.1 % of a step too short at worst."""
GAP = 1e-3
TIME_LIMIT = 4.0
"""Deterministic seconds for the shortest step, each two or three real ones. A fraction of it goes to the second phase."""
SECOND_PHASE = 0.05
AGAIN = 0.4
"""Share of the time for an earlier plan of the very same problem, which is not within the gap asked for."""
TO_COUNT = 0.2
"""Share of the time for the bound of counts.py."""
SHORTEST_RUN = 0.1
"""Deterministic seconds with which CP-SAT is worth starting."""
CHANGE_COST = 2
"""What a change from one layer to the next counts, in departures from the rule."""


@dataclass(frozen=True)
class Solution:
    """A plan and its proof. Times in microseconds; `step_us` is that of the event graph without rounding.

    `objective_us`: the solver's own period for it, in whole units. `bound_us`: no plan with these slots has a shorter step.
    `cycle`: what the step waits for. `work`: deterministic seconds. `proven`: the bound, for whoever solves the same again.
    """

    selection: tuple[int, ...]
    decisions: Decisions
    step_us: int
    objective_us: int
    bound_us: int
    cycle: Cycle
    status: str
    work: float
    proven: Proven

    @property
    def gap(self) -> float:
        """How much shorter a better plan could be, as a share of the step: 0 is proven best."""
        return max(0.0, (self.step_us - self.bound_us) / self.step_us) if self.step_us else 0.0


def solve(
    graph: EventGraph,
    rows: Sequence[MemoryRow],
    *,
    hint: Decisions | None = None,
    proven: Proven | None = None,
    gap: float = GAP,
    time_limit: float = TIME_LIMIT,
    near: bool = False,
) -> Solution:
    """A selection of `graph` under `rows` within `gap` of the best, or the best that is found. `graph` is in microseconds.

    `gap`: share of a step that more search must save. `hint`: an earlier plan; if it is within `gap` of the bound, it is kept as
    it is. `proven`: the bound that was proven for it, taken over if the problem is the very same; where the hint is not within
    `gap` of it, `AGAIN` of the time is left. `time_limit`: deterministic seconds. `near`: CP-SAT looks around the structured
    plan only, at what is kept, held and resident of each layer, but at no other route or chunks; the bound holds for all plans.

    Raises:
        ValueError: ortools is not installed, or no selection fits the memory rows (infeasible.py says why).
    """
    import_cp_model()
    hinted = graph.choices.encode(hint) if hint is not None else None
    if hinted is not None and not feasible(rows, hinted):
        hinted = None
    known = proven.bound_us if proven is not None and proven.holds(graph, rows) else 0
    if known and hinted is not None:
        time_limit *= AGAIN
    start = find_start(graph, rows, hinted, gap, time_limit, known)
    proof = shortest_step(graph, rows, start, gap, time_limit - start.work, near)
    best, work = proof.selection, start.work + proof.work
    if best not in (start.selection, hinted):
        around = neighbourhood(graph, best) if near else None
        best, more = nearest_to_rule(graph, rows, proof, gap, time_limit * SECOND_PHASE, around)
        work += more
    cycle = max_cycle_ratio(graph, best)
    step_us = -(-cycle.ratio.numerator // cycle.ratio.denominator)
    unit_us = unit_of(step_us)
    bound_us = min(proof.bound, step_us)
    return Solution(best, graph.choices.decode(best), step_us, period_of(graph.in_units_of(unit_us), best) * unit_us,
                    bound_us, cycle, proof.status, work, prove(graph, rows, bound_us))  # fmt: skip


def unit_of(step_us: int) -> int:
    """Microseconds of CP-SAT's unit of time."""
    return max(1, step_us // RESOLUTION)


def find_start(graph: EventGraph, rows: Sequence[MemoryRow], hinted: tuple[int, ...] | None, gap: float,
               time_limit: float, known: int = 0) -> Bounded:  # fmt: skip
    """The earlier plan if that is good enough, else the structured one or what comes of tightening, whose bound it has.

    `known`: a bound that needs no proof.
    """
    bound, work, counted = known, 0.0, None
    if hinted is not None:
        period = period_of(graph, hinted)
        if period <= known * (1 + gap):
            return Bounded(hinted, period, known, 0.0)
        bound, work, counted = prove_at_once(graph, rows, hinted, period, known, gap, time_limit)
        start = tighten(graph, rows, hinted, period, bound, gap, time_limit - work, rounds=1)
        bound, work = start.bound, work + start.work
        if period <= bound * (1 + gap):
            return Bounded(hinted, period, bound, work)
    search = StructuredSearch(graph, rows)
    shape = search.run()
    found, period = (search.selection(shape), search.period(shape)) if shape else descend(graph, rows, graph.choices.default)
    if hinted is None:
        bound, work, counted = prove_at_once(graph, rows, found, period, known, gap, time_limit)
    target = int(bound * (1 + gap))
    if shape and period > target:
        shape = search.nearby(shape, target)
        others = search.other_starts(counted)
        while search.period(shape) > target and (other := next(others, None)):
            shape = min(shape, search.nearby(other, target), key=search.period)
        found, period = search.selection(shape), search.period(shape)
    if hinted is not None:
        if start.period < period * (1 - gap):
            found, period = start.selection, start.period
        if (earlier := period_of(graph, hinted)) <= period * (1 + gap):
            found, period = hinted, earlier  # what is to be proven is that this is good enough
    if not feasible(rows, found):
        return Bounded(found, period, bound, work)
    end = tighten(graph, rows, found, period, bound, gap, time_limit - work)
    if hinted is not None and (period := period_of(graph, hinted)) <= end.bound * (1 + gap):
        end = replace(end, selection=hinted, period=period)  # good enough after all
    return replace(end, work=end.work + work)


def prove_at_once(graph: EventGraph, rows: Sequence[MemoryRow], selection: Sequence[int], period: int, known: int, gap: float,
                  time_limit: float) -> tuple[int, float, tuple[int, ...] | None]:  # fmt: skip
    """(a bound, deterministic seconds, a selection with the counts that it is of): without a search for plans, and no more than
    `selection` of `period` asks for.
    """
    bound = max(known, cycle_bound(graph, rows, selection))
    if period <= bound * (1 + gap) or not feasible(rows, selection):
        return bound, 0.0, None
    return count_bound(graph, rows, bound, int(period / (1 + gap)), gap, time_limit * TO_COUNT)


@dataclass(frozen=True, slots=True)
class Proof:
    """A selection, its period, and what none can be less than, in microseconds."""

    selection: tuple[int, ...]
    period: int
    bound: int
    status: str
    work: float


def shortest_step(graph: EventGraph, rows: Sequence[MemoryRow], start: Bounded, gap: float, time_limit: float,
                  near: bool = False) -> Proof:  # fmt: skip
    """CP-SAT from `start` on, whose selection is returned if nothing shorter by more than `gap` is found."""
    best, period, bound = start.selection, start.period, start.bound
    fits, proven = feasible(rows, best), period <= bound * (1 + gap)
    if fits and (proven or time_limit < SHORTEST_RUN):
        return Proof(best, period, bound, "OPTIMAL" if proven else "FEASIBLE", 0.0)
    around = neighbourhood(graph, best) if near and fits else None
    unit_us = unit_of(period)
    scaled = graph.in_units_of(unit_us)
    scaled_period = period_of(scaled, best)
    model = _Model(scaled, rows, 2 * max(scaled_period, bound // unit_us), 0 if around else bound // unit_us, around)
    model.minimise_period(best, scaled_period if fits else None)
    status, work = model.run(time_limit, gap)
    if status not in ("OPTIMAL", "FEASIBLE"):
        if not fits:
            raise ValueError(f"no plan fits the memory rows ({status.lower()})")
        return Proof(best, period, bound, "FEASIBLE", work)
    if around is None:
        bound = max(bound, model.bound * unit_us)
    found = period_of(graph, model.selection())
    if not fits or found < period:
        best, period = model.selection(), found
    return Proof(best, period, bound, "OPTIMAL" if period <= bound * (1 + gap) else "FEASIBLE", work)


def neighbourhood(graph: EventGraph, selection: Sequence[int]) -> list[set[int]]:
    """For each family the options that differ from the chosen one in where things are, not in how they move."""
    allowed = []
    for family, chosen in zip(graph.choices.families, selection, strict=True):
        every = range(len(family.options))
        if family.name in ("weights", "gradients"):
            base = family.options[chosen] or family.options[0]
            allowed.append({o for o in every if all(base.get(k) == v for k, v in family.options[o].items() if k != "weights")})
        else:
            allowed.append(set(every))
    return allowed


def nearest_to_rule(graph: EventGraph, rows: Sequence[MemoryRow], proof: Proof, gap: float, time_limit: float,
                    around: Sequence[set[int]] | None = None) -> tuple[tuple[int, ...], float]:
    """The second phase: of all plans within the gap, which are equally good as far as is proven, the plainest."""
    allowed = max(proof.period, int(proof.bound * (1 + gap)))
    best = simplify(graph, rows, proof.selection, allowed)
    if around is not None:
        around = [options | {chosen} for options, chosen in zip(around, best, strict=True)]
    unit_us = unit_of(allowed)
    scaled = graph.in_units_of(unit_us)
    model = _Model(scaled, rows, allowed // unit_us, min(proof.bound, allowed) // unit_us, around)
    model.minimise_departures(best, period_of(scaled, best))
    status, work = model.run(time_limit, 0.05)
    if status not in ("OPTIMAL", "FEASIBLE") or period_of(graph, model.selection()) > allowed:
        return best, work
    return model.selection(), work


def import_cp_model() -> Any:
    """OR-Tools' CP-SAT. ValueError with the remedy where it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as e:
        raise ValueError("solving a plan needs OR-Tools: pip install 'ortools>=9.15', or choose solver='rule'") from e
    return cp_model


@dataclass
class _Model:
    """One CP-SAT model. `horizon`: the longest period worth a look, in the graph's units; `bound_before`: none is shorter.

    `around`: of each family the options that are offered; None: all.
    """

    graph: EventGraph
    rows: Sequence[MemoryRow]
    horizon: int
    bound_before: int
    around: Sequence[set[int]] | None = None
    changes: list[tuple[Any, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cp = import_cp_model()
        self.m = self.cp.CpModel()
        self.solver = self.cp.CpSolver()
        self.variables()
        self.timing()
        self.memory()
        self.links()

    # ---- variables ----

    def variables(self) -> None:
        self.latest = 2 * self.horizon  # no event of a step starts later than the step after next
        self.T = self.m.new_int_var(self.bound_before, self.horizon, "T")
        self.time = [self.m.new_int_var(0, self.latest, e.name) for e in self.graph.events]
        self.chosen: list[list[Any]] = []
        for i, family in enumerate(self.graph.choices.families):
            offered = self.around[i] if self.around else set(range(len(family.options)))
            names = [f"{family.group}.{family.name}={describe(option)}" for option in family.options]
            if len(offered) == 1:
                bools: list[Any] = [int(o in offered) for o in range(len(names))]
            else:
                bools = [self.m.new_bool_var(name) if o in offered else 0 for o, name in enumerate(names)]
                self.m.add_exactly_one([b for o, b in enumerate(bools) if o in offered])
            self.chosen.append(bools)

    def expression(self, linear: Linear) -> Any:
        """`linear` over the one-hot choices; what is switched off is so early that it binds nothing."""
        total, off = linear.const, -2 * self.latest
        for family, values in linear.terms:
            clipped = [off if value <= OFF // 2 else value for value in values]
            least = min(clipped)
            total = total + least + sum((v - least) * b for v, b in zip(clipped, self.chosen[family], strict=True) if v > least)
        return total

    # ---- constraints ----

    def timing(self) -> None:
        """The event graph, and for each stream and the updates that a step is as long as they are busy."""
        self.sums = [0]
        for k, work in enumerate(self.graph.works):
            total = self.m.new_int_var(0, self.horizon, f"updates.{k}")
            self.m.add(total == self.sums[-1] + self.expression(work.duration)).with_name(f"updates up to {work.group}")
            self.sums.append(total)
        for e in self.graph.edges:
            period = e.distance * self.T
            weight = self.expression(e.weight)
            self.m.add(self.time[e.dst] + period >= self.time[e.src] + weight + self.sums[e.num_works]).with_name(e.name)
        for stream in self.graph.streams:
            busy = [self.expression(e.busy) for e in self.graph.events if e.stream is stream]
            self.m.add(sum(busy) <= self.T).with_name(f"busy {stream}")
        self.m.add(self.sums[-1] <= self.T).with_name("busy cpu")

    def memory(self) -> None:
        for row in self.rows:
            total = self.expression(row.total)
            for k, each in enumerate(row.largest):
                largest = self.m.new_int_var(0, 1 << 50, f"{row.place} shared buffer {k}")
                for linear in each:
                    self.m.add(largest >= self.expression(linear)).with_name(f"{row.place} shared buffer {k}")
                total = total + largest
            self.m.add(total <= row.budget).with_name(f"{row.place} budget")

    def links(self) -> None:
        for link in self.graph.choices.links:
            a, b = self.chosen[link.a][link.a_option], self.chosen[link.b][link.b_option]
            self.m.add(a == b).with_name(f"state of {self.graph.choices.families[link.a].group}")

    # ---- objectives ----

    def minimise_period(self, start: Sequence[int], period: int | None) -> None:
        self.hint(start, period)
        self.m.minimize(self.T)

    def minimise_departures(self, start: Sequence[int], period: int) -> None:
        """Of the plans up to the horizon the one nearest to the rule's that reads best. `period`: that of `start`."""
        self.hint(start, period)
        cost: list[Any] = []
        families = self.graph.choices.families
        before: dict[str, int] = {}
        for i, family in enumerate(families):
            bools = self.chosen[i]
            cost += [_departures(family.options[0], option) * b for option, b in zip(family.options[1:], bools[1:], strict=True)]
            if layer_index(family.group) is None:
                continue
            neighbour = before.get(family.name)
            before[family.name] = i
            if neighbour is not None and families[neighbour].options == family.options and len(bools) > 1:
                cost.append(CHANGE_COST * self.change(neighbour, i))
        for differs, a, b in self.changes:
            self.m.add_hint(differs, int(start[a] != start[b]))
        self.m.minimize(sum(cost))

    def change(self, a: int, b: int) -> Any:
        """1 if neighbouring layers differ."""
        differs = self.m.new_bool_var(f"change {b}")
        for here, there in zip(self.chosen[a], self.chosen[b], strict=True):
            if not (isinstance(here, int) and isinstance(there, int)):
                self.m.add(differs >= here - there)
        self.changes.append((differs, a, b))
        return differs

    def hint(self, selection: Sequence[int], period: int | None) -> None:
        """A start: the choices, and the times that go with them where the period is known."""
        for bools, chosen in zip(self.chosen, selection, strict=True):
            for o, b in enumerate(bools):
                if not isinstance(b, int):
                    self.m.add_hint(b, int(o == chosen))
        if period is not None:
            self.m.add_hint(self.T, period)
            for variable, at in zip(self.time, start_times(self.graph, selection, period), strict=True):
                self.m.add_hint(variable, at)
            total = 0
            for variable, work in zip(self.sums[1:], self.graph.works, strict=True):
                total += work.duration.at(selection)
                self.m.add_hint(variable, total)

    # ---- the run ----

    def run(self, time_limit: float, gap: float) -> tuple[str, float]:
        """(status, deterministic seconds)."""
        p = self.solver.parameters
        p.num_workers, p.random_seed = 1, 0
        p.catch_sigint_signal = False  # it would leave Ctrl-C to end the process without a KeyboardInterrupt
        p.max_deterministic_time, p.relative_gap_limit = time_limit, gap
        status = self.solver.solve(self.m)
        return self.solver.status_name(status), float(self.solver.response_proto.deterministic_time)

    @property
    def period(self) -> int:
        return int(self.solver.value(self.T))

    @property
    def bound(self) -> int:
        bound: float = self.solver.best_objective_bound
        return round(bound)

    def selection(self) -> tuple[int, ...]:
        value = self.solver.value
        return tuple(o for bools in self.chosen for o, b in enumerate(bools) if int(value(b)))


def describe(option: Any) -> str:
    return "/".join(str(v) for v in option.values()) if option != RESIDENT else "resident"


def _departures(default: Any, option: Any) -> int:
    """Fields that differ from the rule's choice."""
    return sum(default.get(key) != value for key, value in option.items()) or 1

