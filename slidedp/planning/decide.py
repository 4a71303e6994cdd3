"""Decides what nobody has pinned: by a loaded plan, the rule, or the solver on top of the rule. Called once a plan, by rank 0.

`solver="cp-sat"`, the default, starts from the rule's decisions. They are also the result when solving finds nothing better in
simulation, when the step is tiny (autopolicy.py), and, with one warning, where ortools is not installed. Solved decisions are
cached under everything that they depend on. Which groups speculate is decided around that: see speculation.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slidedp.compiler.costmodel.costs import WithFallback
from slidedp.compiler.costmodel.measured import Measurement
from slidedp.compiler.decisions import Activation, Boundary, Decisions, Update
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.eventgraph.choices import find_choices, pinned_slots
from slidedp.compiler.eventgraph.frames import find_frames, smallest_frame
from slidedp.compiler.eventgraph.memoryrows import memory_rows
from slidedp.compiler.footprint.budgets import room_to_fill
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.policy import apply_policy
from slidedp.compiler.simulation.predict import predict, price
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.compiler.solver.defaults import HEAD_ROWS, check_budgets, default_decisions, num_head_chunks
from slidedp.compiler.solver.infeasible import explain, fitting_start, least
from slidedp.compiler.solver.proven import Proven
from slidedp.passes.pipeline import lower
from slidedp.planning.autopolicy import AutoPlan, Problem, auto_plan, is_tiny
from slidedp.planning.plancache import fingerprint, load_plan_for, store_plan
from slidedp.planning.speculation import with_fewest, with_most

if TYPE_CHECKING:
    from slidedp.settings import Settings

SOLVERS = ("cp-sat", "rule")
NO_BUDGET = 1 << 60


def decide(layers: LayerGraph, settings: Settings, measurement: Measurement | None = None) -> AutoPlan:
    """Decisions for all groups of `layers`, pins kept; a loaded plan must be of this model and rank count.

    Raises BudgetError (a ValueError), naming budgets, missing bytes and the cheapest way out, when no plan fits.
    """
    policy = settings.policy
    if isinstance(policy, PlanFile):
        policy.require(layers)
        return AutoPlan(policy.decisions)
    problem, rule = problem_and_rule(layers, settings, measurement)
    speculates = settings.may_speculate and rule.update is Update.DEFERRED
    if (settings.solver == "rule" and not speculates) or is_tiny(problem, rule):
        return AutoPlan(rule)
    if speculates:
        plan = with_fewest(problem, solved(problem, with_most(problem, rule), layers, settings))
    else:
        plan = solved(problem, rule, layers, settings)
    return replace(plan, rule=rule)


def solved(problem: Problem, rule: Decisions, layers: LayerGraph, settings: Settings) -> AutoPlan:
    """What the solver makes of the rule's decisions; these themselves, where there is no solver or it is not asked for."""
    if settings.solver == "rule":
        return AutoPlan(rule)
    if find_spec("ortools") is None:
        warnings.warn("ortools is not installed: the plan is the default rule's, not a solved one (pip install 'ortools>=9.15')",
                      stacklevel=2)  # fmt: skip
        return AutoPlan(rule)
    hint = settings.hint if settings.hint is not None and fits_groups(settings.hint, layers) else None
    return solve_or_recall(problem, rule, hint, settings.cache_dir)


def problem_and_rule(layers: LayerGraph, settings: Settings, measurement: Measurement | None = None) -> tuple[Problem, Decisions]:
    """The problem to solve, and the rule's decisions for it, which fit. Raises BudgetError as :func:`decide` does."""
    problem = problem_of(layers, settings, measurement)
    try:
        return problem, rule_that_fits(layers, settings, problem)
    except BudgetError:  # no plan leaves the reserve of budgets.py free; some plan may do without
        problem = replace(problem, hbm_budget=settings.hbm_bytes)
        return problem, rule_that_fits(layers, settings, problem)


def least_bytes(layers: LayerGraph, settings: Settings) -> dict[str, int]:
    """The least that any plan needs of each place, ``hbm`` and ``host``, whatever the other one takes."""
    policy = settings.policy.policy() if isinstance(settings.policy, PlanFile) else settings.policy
    boundless = by_the_rule(layers, replace(settings, hbm_budget=NO_BUDGET, host_budget=NO_BUDGET))
    each: list[dict[str, int]] = []
    for start in smaller(layers, boundless, policy):
        choices = find_choices(layers, smallest_frame(start, pinned_slots(policy)), policy)
        rows = memory_rows(layers, choices, NO_BUDGET, NO_BUDGET)
        each.append({row.place: row.needed(least(row, rows, choices)) for row in rows})
    return {place: min(needs[place] for needs in each) for place in each[0]}


def by_the_rule(layers: LayerGraph, settings: Settings) -> Decisions:
    """The rule's decisions with the user's pins; a loaded plan pins all of them."""
    policy = settings.policy.policy() if isinstance(settings.policy, PlanFile) else settings.policy
    return default_decisions(layers, settings.hw, policy=policy, cost_model=settings.cost_model, hbm_budget=settings.hbm_budget,
                             host_budget=settings.host_budget)


def head_chunks_before_costs(layers: LayerGraph, settings: Settings) -> int:
    """The number of chunks of logits, which is settled before costs are known: as pinned, or by the rule."""
    if isinstance(settings.policy, PlanFile):
        return settings.policy.decisions.head_chunks
    try:
        return by_the_rule(layers, settings).head_chunks
    except BudgetError:  # the solver starts from there, too
        return by_the_rule(layers, replace(settings, hbm_budget=NO_BUDGET, host_budget=NO_BUDGET)).head_chunks


def problem_of(layers: LayerGraph, settings: Settings, measurement: Measurement | None = None) -> Problem:
    s = settings
    assert not isinstance(s.policy, PlanFile)
    costs = s.cost_model_of(layers, measurement or Measurement())
    return Problem(
        layers, s.hw, costs, lambda decisions: simulate_decisions(layers, s, costs, decisions),
        room_to_fill(s.hw, s.hbm_budget), s.host_bytes, s.policy)  # fmt: skip


def simulate_decisions(layers: LayerGraph, settings: Settings, costs: WithFallback, decisions: Decisions) -> Timeline:
    """The predicted step of `decisions`, from ops that are neither verified nor pruned: quick, and the same in time."""
    graph = lower(layers, decisions, verified=False)
    return predict(graph, price(graph, costs, settings.hw), settings.hw)


def solve_or_recall(problem: Problem, rule: Decisions, earlier: PlanFile | None, cache_dir: Path | None) -> AutoPlan:
    """The solved plan, from the cache if the very same problem has been solved before. `earlier`: a plan to start from."""
    hint = earlier.decisions if earlier else None
    record = earlier.solver if earlier else None
    proven = Proven(record.bound_us, record.seal) if record else None
    if cache_dir is None:
        return auto_plan(problem, rule, hint=hint, proven=proven)
    choices = problem.choices(rule)
    key = fingerprint(problem.graph(choices), problem.rows(choices), problem.costs.measured, hint, proven)
    known = load_plan_for(cache_dir, key, problem.layers)
    if known is not None:
        return known
    plan = auto_plan(problem, rule, hint=hint, proven=proven)
    store_plan(cache_dir, key, plan)
    return plan


def rule_that_fits(layers: LayerGraph, settings: Settings, problem: Problem) -> Decisions:
    """The rule's decisions; where those have no room, the choice that takes least memory, if that has."""
    policy = problem.policy

    def rule(hbm_budget: int | None, host_budget: int) -> Decisions:
        return default_decisions(layers, settings.hw, policy=policy, cost_model=settings.cost_model, hbm_budget=hbm_budget,
                                 host_budget=host_budget)  # fmt: skip

    try:
        decisions = rule(settings.hbm_budget, problem.host_budget)
        check_budgets(layers, decisions, problem.hbm_budget, problem.host_budget)
        return decisions
    except BudgetError as error:
        if settings.solver == "rule":
            raise
        boundless = rule(NO_BUDGET, NO_BUDGET)
        starts = boundless, *smaller(layers, boundless, policy)
        for start in starts:
            if (small := smallest_that_fits(problem, start, policy)) is not None:
                return small

        def without_pins() -> bool:
            return bool(policy) and any(smallest_that_fits(problem, start, None) is not None for start in starts)

        raise least_short(problem, starts[1:], without_pins) from error


def least_short(problem: Problem, starts: Sequence[Decisions], without_pins: Callable[[], bool]) -> BudgetError:
    """Why nothing fits, explained for the starting point that exceeds its budgets by the fewest bytes."""
    layers, policy = problem.layers, problem.policy
    found = []
    for start in starts:
        choices = find_choices(layers, smallest_frame(start, pinned_slots(policy)), policy)
        rows = problem.rows(choices)
        found.append((sum(max(0, row.needed(least(row, rows, choices)) - row.budget) for row in rows), choices, rows))
    _, choices, rows = min(found, key=lambda each: each[0])
    return explain(layers, choices, rows, without_pins)


def smaller(layers: LayerGraph, decisions: Decisions, policy: Mapping[str, Any] | None) -> tuple[Decisions, ...]:
    """`decisions` with logits in the smallest chunks that the rule makes, where they can be cut; and so with boundaries on the
    host. What is pinned stays.
    """
    if "head_chunks" not in (policy or {}) and not (layers.head and layers.head.whole):
        decisions = replace(decisions, head_chunks=num_head_chunks(layers, HEAD_ROWS[-1]))
    away = {name: replace(d, boundary=Boundary.HOST, act=Activation.RECOMPUTE) for name, d in decisions.groups.items()}
    return decisions, apply_policy(replace(decisions, groups=away), policy, layers)


def smallest_that_fits(problem: Problem, rule: Decisions, policy: object) -> Decisions | None:
    """The first frame, from the rule's to the smallest, in which the least of some budget fits both."""
    layers = problem.layers
    pins = problem.policy if policy else None
    pinned = pinned_slots(pins)
    for frame in (*find_frames(layers, rule, pinned), smallest_frame(rule, pinned)):
        choices = find_choices(layers, frame, pins)
        start = fitting_start(memory_rows(layers, choices, problem.hbm_budget, problem.host_budget), choices)
        if start is not None:
            return choices.decode(start)
    return None


def fits_groups(hint: PlanFile, layers: LayerGraph) -> bool:
    """True if `hint` decides these groups; a plan of another model is no help."""
    return set(hint.decisions.groups) == set(layers.group_by_name)
