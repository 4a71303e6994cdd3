"""AutoPolicy on paper: solve, lower, simulate, correct, solve again, and keep the plan that simulates fastest.

    frames      weight and gradient slots, from few to many, judged by the period of a good plan in each
    solve       compiler/solver/: the shortest step of the event graph, with a proven bound
    simulate    the ops that the plan lowers to, chunk by chunk
    correct     what took longer than its durations say is given longer ones: each transfer, collective and host task of the plan
                by its own factor, for what runs beside it differs along the step; others by that of their stream; as far as
                makes the two steps equal. At most ROUNDS rounds
    polish      the structured plan, improved by simulating what is near it; kept unless another is faster by TOLERANCE

The result is never slower than the rule's plan, in simulation: of the two the better one is kept. A step that the rule already
plans in less than `TINY_STEP_US` is left to the rule: it is all fixed costs, which cost models know least, and solving would
take as long as a hundred such steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from slidedp.compiler.costmodel.contention import Contention
from slidedp.compiler.costmodel.costs import WithFallback
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.eventgraph.choices import Choices, find_choices, pinned_slots
from slidedp.compiler.eventgraph.eventbuild import build_event_graph
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.eventgraph import EventGraph
from slidedp.compiler.eventgraph.frames import SLOTS, other_counts
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio
from slidedp.compiler.eventgraph.memoryrows import MemoryRow, memory_rows
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Stream
from slidedp.compiler.planfile.planfile import SolverRecord
from slidedp.compiler.simulation.simulate import Timeline
from slidedp.compiler.solver.proven import Proven, prove
from slidedp.compiler.solver.search import feasible
from slidedp.compiler.solver.solver import GAP, Solution, solve
from slidedp.compiler.solver.structured import Shape, StructuredSearch, search_structured

TINY_STEP_US = 100_000
ROUNDS = 3
HALVINGS = 5
"""Of a correction that goes too far, until it is about right."""
CLOSED = 0.01
"""Solved and simulated step this near each other: nothing to correct."""
WORTH = 1e-3
"""Share of a step that more slots must save."""
ASKED_GAP = 5e-3
"""Between a plan and its bound, as a share of the step: what the solver searches and proves until, as far as `LIMIT` goes."""
NEAR = 0.03
"""Share of a step by which a plan may be longer, to the event graph, that is worth simulating."""
TOLERANCE = 0.04
"""Share of a step that is worth a plan that reads worse: measured steps are 5 % from predicted ones."""
LIMIT = 4.0
"""Deterministic seconds of CP-SAT for a plan, all rounds together, each two of the CPU or three; most plans need a tenth."""
POLISH = (4, 2, 1)
"""Steps in which the number of resident groups is brought to where the simulation, not the event graph, is shortest."""


@dataclass(frozen=True)
class AutoPlan:
    """What was chosen, and how (`record`; None if nothing was solved).

    `solve_s`: what solving took on the clock, 0 if it was `cached`; never part of a plan file, which is the same every time.
    `rule`: the rule's decisions, which this was solved from.
    """

    decisions: Decisions
    record: SolverRecord | None = None
    solve_s: float = 0.0
    cached: bool = False
    rule: Decisions | None = None

    @property
    def pays_after(self) -> float | None:
        """Steps after which the choice has paid for itself; None if it saved nothing."""
        saved_us = self.record.rule_us - self.record.simulated_us if self.record else 0
        return self.solve_s * 1e6 / saved_us if saved_us > 0 else None


@dataclass(frozen=True)
class Problem:
    """One planning problem. `simulate`: the timeline of the ops that decisions lower to. Budgets in bytes; of HBM
    what plans may fill (budgets.py).
    """

    layers: LayerGraph
    hw: HardwareProfile
    costs: WithFallback
    simulate: Callable[[Decisions], Timeline]
    hbm_budget: int
    host_budget: int
    policy: Mapping[str, Any] | None = None
    _unscaled: OptionCosts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        contention = Contention(self.hw, self.layers.world_size)
        object.__setattr__(self, "_unscaled", OptionCosts(self.layers, self.hw, self.costs, contention))

    def choices(self, rule: Decisions) -> Choices:
        return find_choices(self.layers, rule, self.policy)

    def fixed(self, decisions: Decisions) -> Choices:
        """Choices that leave nothing open: `decisions` as they are."""
        choices = self.choices(decisions)
        selected = zip(choices.families, choices.encode(decisions), strict=True)
        return Choices(tuple(replace(f, options=(f.options[chosen],)) for f, chosen in selected), (), decisions)

    def graph(self, choices: Choices, scale: Mapping[str, float] | None = None) -> EventGraph:
        """The event graph of `choices`. `scale`: factors of durations, as of OptionCosts; unscaled graphs share the model's
        answers.
        """
        costs = replace(self._unscaled, scale=dict(scale)) if scale else self._unscaled
        return build_event_graph(self.layers, choices, costs)

    def rows(self, choices: Choices) -> tuple[MemoryRow, ...]:
        return memory_rows(self.layers, choices, self.hbm_budget, self.host_budget)


def is_tiny(problem: Problem, rule: Decisions) -> bool:
    """True for a step that is left to the rule."""
    return not problem.layers.layers or problem.simulate(rule).step_us < TINY_STEP_US


def auto_plan(problem: Problem, rule: Decisions, *, hint: Decisions | None = None, proven: Proven | None = None) -> AutoPlan:
    """The best plan that `ROUNDS` rounds find, with one limit for CP-SAT in all of them.

    `rule`: the rule's decisions, pins included, which fit the budgets. `proven`: the bound on record with `hint`.
    """
    began = time.perf_counter()
    choices = choose_frame(problem, rule, hint)
    rule_us = problem.simulate(rule).step_us
    best, best_us, first = rule, rule_us, None
    scale: dict[str, float] = {}
    num_rounds, left = 0, LIMIT
    for num_rounds in range(1, ROUNDS + 1):
        solution = solve(problem.graph(choices, scale), problem.rows(choices), hint=hint if num_rounds == 1 else best,
                         proven=proven, gap=ASKED_GAP, time_limit=left, near=True)  # fmt: skip
        left -= solution.work
        first = first or solution
        timeline = problem.simulate(solution.decisions)
        simulated_us = timeline.step_us
        if simulated_us < best_us:
            best, best_us = solution.decisions, simulated_us
        if abs(solution.step_us / max(simulated_us, 1) - 1) <= CLOSED or not correct(scale, problem, choices, solution, timeline):
            break
    assert first is not None
    tidy = polished(problem, choices, scale, first.bound_us * (1 + ASKED_GAP))
    if tidy is not None and tidy[1] * (1 - TOLERANCE) < best_us and tidy[1] < rule_us:
        best, best_us = tidy
    fixed = problem.fixed(best)
    step_us = math.ceil(max_cycle_ratio(problem.graph(fixed), fixed.default).ratio)  # of the plan that is kept, uncorrected
    bound_us = min(first.bound_us, step_us)
    record = SolverRecord(
        name="cp-sat" if best is not rule else "rule", step_us=step_us, bound_us=bound_us, gap=round(1 - bound_us / step_us, 6),
        simulated_us=best_us, rule_us=rule_us, rounds=num_rounds,
        seal=prove(problem.graph(choices), problem.rows(choices), bound_us).seal)  # fmt: skip
    return AutoPlan(best, record, time.perf_counter() - began)


def polished(problem: Problem, choices: Choices, scale: Mapping[str, float], enough_us: float) -> tuple[Decisions, int] | None:
    """The structured plan under plain or under corrected durations, or that plan with all state in HBM, whichever simulates
    faster, and its simulated step, improved by `descended` unless that is `enough_us`; None if none fits.

    All state in HBM leaves the cores idle, which lets the host issue compute sooner: no durations of ops say that.
    """

    @cache
    def simulated(selection: tuple[int, ...]) -> int:  # many shapes have the same: what all layers do is resident or another's
        return problem.simulate(choices.decode(selection)).step_us

    found = []
    for factors in ({}, scale)[: 1 + bool(scale)]:
        search = StructuredSearch(problem.graph(choices, factors), problem.rows(choices))
        shape = search.run()
        shapes = (shape, None if shape is None else search.all_resident(shape))
        found += [(simulated(search.selection(s)), search, s) for s in shapes if s is not None]
    if not found:
        return None
    best_us, search, shape = min(found, key=lambda start: start[0])
    if best_us > enough_us:
        shape = descended(search, shape, simulated)
    selection = search.selection(shape)
    return choices.decode(selection), simulated(selection)


def descended(search: StructuredSearch, shape: Shape, simulated: Callable[[tuple[int, ...]], int]) -> Shape:
    """`shape`, changed while its `simulated` step gets shorter: no layer with the other source, all held or none, another option
    for all transfers of a kind, a few resident groups more or less; of these what the event graph sees near it.

    To the graph a spared copy is worth nothing where the link has time; in the simulation it leaves host memory to updates.
    """
    near = int(search.period(shape) * (1 + NEAR))

    def tried(best: Shape, trial: Shape | None) -> Shape:
        if trial is None or not search.is_period(trial, near):
            return best
        shorter = simulated(search.selection(trial)) < simulated(search.selection(best)) * (1 - WORTH)
        return trial if shorter else best

    shape = tried(shape, search.filled(replace(shape, other_source=0)))
    for held in (search.most("held"), 0):
        shape = tried(shape, search.filled(replace(shape, held=held)))
    for kind in range(len(search.kinds)):
        for option in search.options(kind):
            shape = tried(shape, search.filled(replace(shape, alike=(*shape.alike[:kind], option, *shape.alike[kind + 1 :]))))
    for step in POLISH:
        for change in (-step, step):
            resident = min(max(0, shape.resident + change), len(search.states))
            shape = tried(shape, search.filled(replace(shape, resident=resident)))
    return shape


def choose_frame(problem: Problem, rule: Decisions, hint: Decisions | None) -> Choices:
    """The choices with the slots in which a good plan is fastest: the rule's unless others save more than `WORTH`."""
    base = problem.choices(rule)
    pinned = pinned_slots(problem.policy)
    best = base.with_frame(hint) if hint is not None else base
    graph, rows = problem.graph(best), problem.rows(best)
    selection = best.encode(hint) if hint is not None else best.default
    if hint is None and (found := search_structured(graph, rows)):
        selection, _ = found
    best_us = float(max_cycle_ratio(graph, selection).ratio)
    for key, counts in SLOTS.items():
        for frame in other_counts(problem.layers, best.defaults, key, counts, pinned):
            choices = base.with_frame(frame)
            if feasible(problem.rows(choices), selection):
                us = float(max_cycle_ratio(problem.graph(choices), selection).ratio)
                if us < best_us * (1 - WORTH):
                    best, best_us = choices, us
    return best


def correct(scale: dict[str, float], problem: Problem, choices: Choices, solution: Solution, timeline: Timeline) -> bool:
    """Brings durations towards what was simulated. False if they are there already: the rest is the model's own.

    As far as makes the event graph's step that of the simulation: what shares with others what the step is bound by takes longer,
    too, and that bound is in the graph already. Compute is slowed by updates in HBM, whose time is the graph's as well, and takes
    longer where the host is late to issue it.
    """
    solved = problem.graph(choices, scale).busy_us(solution.selection)
    wanted = {str(stream): scale.get(stream, 1.0) * us / solved[stream] for stream, us in timeline.busy_us.items()
              if stream is not Stream.GPU and solved.get(stream)}  # fmt: skip
    for stream, factors in timeline.stretched.items():
        wanted |= factors if stream not in (Stream.GPU, Stream.UPDATE) else {}
    if compute_us := timeline.busy_us.get(Stream.GPU):  # also where it is not late any more, as it was in the round before
        wanted[str(Stream.GPU)] = compute_us / max(compute_us - timeline.late_us, 1)
    wanted = {name: factor for name, factor in wanted.items() if abs(factor / scale.get(name, 1.0) - 1) > GAP}
    if not wanted:
        return False

    def scaled(part: float) -> dict[str, float]:
        return {**scale, **{name: scale.get(name, 1.0) ** (1 - part) * factor**part for name, factor in wanted.items()}}

    def step_us(part: float) -> float:
        return float(max_cycle_ratio(problem.graph(choices, scaled(part)), solution.selection).ratio)

    low, high = 0.0, 1.0
    if step_us(high) > timeline.step_us:
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if step_us(middle) > timeline.step_us else (middle, high)
    scale.update(scaled(high))
    return True
