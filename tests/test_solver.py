"""The solver: it agrees with two other computations and with brute force, and one cost flips each of its decisions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from stacks import stack
from test_eventgraph import PLAIN, by_hand, costs_of, medium

from slidedp.compiler.costmodel.contention import Contention
from slidedp.compiler.costmodel.costs import AnalyticCostModel, CostModel, WithFallback
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.eventgraph.choices import Choices, find_choices
from slidedp.compiler.eventgraph.eventbuild import build_event_graph
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.eventgraph import EventGraph
from slidedp.compiler.eventgraph.maxplus import is_period, max_cycle_ratio, simulate_events
from slidedp.compiler.eventgraph.memoryrows import MemoryRow, memory_rows
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpKind
from slidedp.compiler.solver.cyclebound import cycle_bound
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.compiler.solver.infeasible import explain, fitting_start
from slidedp.compiler.solver.search import feasible
from slidedp.compiler.solver.solver import Solution, solve
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null


def problem(layers: LayerGraph, hw: HardwareProfile, *, user: CostModel | None = None, policy: dict[str, Any] | None = None,
            chunk_counts: Sequence[int] = (1, 4), host_budget: int | None = None,
            hbm_budget: int | None = None) -> tuple[EventGraph, tuple[MemoryRow, ...]]:  # fmt: skip
    """Of routes, sources and chunks, unless `policy` opens more: what the decisions under test are."""
    costs = WithFallback(AnalyticCostModel(layers.world_size, layers.compute_dtype), user)
    policy = {**PLAIN, **(policy or {})}
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy, chunk_counts=chunk_counts)
    graph = build_event_graph(layers, choices, OptionCosts(layers, hw, costs, Contention(hw, layers.world_size)))
    return graph, memory_rows(layers, choices, hbm_budget or hw.hbm_bytes, host_budget or hw.host_bytes)


CASES = [
    (medium(4), "h200x1"),
    (medium(3, world_size=4), "h200x4"),
    (medium(3, world_size=4), "a800x4-pcie"),
    (stack(3, 60_000_000, 90_000_000, tokens=60_000, width=2048), "h200x1"),
]


@cache
def solved(case: int) -> tuple[EventGraph, tuple[MemoryRow, ...], Solution]:
    layers, hw = CASES[case]
    graph, rows = problem(layers, load_profile(hw))
    return graph, rows, solve(graph, rows)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_three_computations_agree(case: int) -> None:
    """CP-SAT's objective, a max-plus run and the maximum cycle ratio, within 0.1 %; the bound is below, the gap is small."""
    graph, rows, solution = solved(case)
    assert max_cycle_ratio(graph, solution.selection).ratio == pytest.approx(solution.objective_us, rel=1e-3)
    assert simulate_events(graph, solution.selection, 60) == pytest.approx(solution.objective_us, rel=1e-3)
    assert solution.bound_us <= solution.step_us <= max_cycle_ratio(graph, graph.choices.default).ratio + 1
    assert solution.gap <= 5e-3
    assert feasible(rows, solution.selection)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_solved_plans_lower(case: int) -> None:
    layers, hw = CASES[case]
    decisions = solved(case)[2].decisions
    lower(layers, decisions, hbm_budget=load_profile(hw).hbm_bytes)


@pytest.mark.parametrize(("world_size", "hw_name", "room"), [(1, "h200x1", 1.0), (1, "h200x1", 0.0), (4, "a800x4-pcie", 1.0)])
def test_brute_force_finds_nothing_better(world_size: int, hw_name: str, room: float) -> None:
    """All choices of a model of two layers; `room` 0: the host has no room for one group's shadow."""
    layers, hw = medium(2, world_size), replace(load_profile(hw_name), host_dram_gbps=60.0)
    ends: dict[str, Any] = {"chunks": 1} | ({"delivery": "sharded", "reduction": "gpu"} if world_size > 1 else {})
    policy = {"staging_slots": 1, "layers": {"prologue": ends, "epilogue": ends | {"source": "shadow"}}}
    graph, rows = problem(layers, hw, policy=policy)
    if not room:
        budget = rows[1].needed(graph.choices.default) - 1
        rows = (rows[0], replace(rows[1], budget=budget))
    solution = solve(graph, rows, gap=0.0)
    target = int(solution.step_us * (1 - 2e-4)) - 1
    tried = 0
    for selection in product(*(range(len(f.options)) for f in graph.choices.families)):
        if feasible(rows, selection) and graph.floor(selection) <= target:
            tried += 1
            assert not is_period(graph, selection, target), graph.choices.decode(selection)
    assert tried or graph.floor(solution.selection) >= target
    assert feasible(rows, solution.selection)
    assert solution.gap <= 1e-3


def test_brute_force_finds_nothing_better_in_memory() -> None:
    """The same of what is kept, held and resident, in HBM that has room for some of it."""
    layers, hw = medium(2), load_profile("h200x1")
    choices = find_choices(layers, default_decisions(layers, hw), {"chunks": 4, "source": "shadow"})
    graph = build_event_graph(layers, choices, costs_of(layers, hw))
    rows = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    least = rows[0].needed(fitting_start((replace(rows[0], budget=0), rows[1]), choices) or choices.default)
    for room in (0, 16 * layers.group("L00").numel, 2**40):
        some = (replace(rows[0], budget=least + room), rows[1])
        solution = solve(graph, some, gap=0.0)
        target = int(solution.step_us * (1 - 2e-4)) - 1
        tried = 0
        for selection in product(*(range(len(f.options)) for f in choices.families)):
            linked = all((selection[k.a] == k.a_option) == (selection[k.b] == k.b_option) for k in choices.links)
            if linked and feasible(some, selection):
                tried += 1
                assert not is_period(graph, selection, target), choices.decode(selection)
        assert tried
        assert feasible(some, solution.selection)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_cycles_bound_every_plan(case: int) -> None:
    """The bound from critical cycles alone is no more than any plan's period, and not far below the best."""
    graph, rows, solution = solved(case)
    bound = cycle_bound(graph, rows, graph.choices.default)
    assert bound <= solution.step_us
    assert bound >= 0.6 * solution.step_us
    rng = random.Random(4)
    for _ in range(10):
        selection = [rng.randrange(len(f.options)) for f in graph.choices.families]
        assert bound <= max_cycle_ratio(graph, selection).ratio


# ---- deterministic, and stable under hints ----


def test_twice_the_same() -> None:
    graph, rows, solution = solved(2)
    again = solve(graph, rows)
    assert replace(again, work=0) == replace(solution, work=0)


def test_previous_plan_is_kept() -> None:
    """A hint within the gap stays as it is, whatever the solver would have chosen among equals; a bad one is left behind."""
    graph, rows, solution = solved(1)
    assert solve(graph, rows, hint=solution.decisions, time_limit=1.0).selection == solution.selection
    layers = CASES[1][0]
    bad = default_decisions(layers, load_profile("h200x4"), policy={"delivery": "replicated", "reduction": "cpu"})
    assert solve(graph, rows, hint=bad).step_us == pytest.approx(solution.step_us, rel=2e-3)


def test_a_sealed_bound_is_not_proven_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound of an earlier solve of the very same problem, its plan is kept without any search or proof."""
    graph, rows, solution = solved(0)
    for name in ("cycle_bound", "count_bound", "tighten", "StructuredSearch"):
        monkeypatch.setattr(f"slidedp.compiler.solver.solver.{name}", None)
    again = solve(graph, rows, hint=solution.decisions, proven=solution.proven, gap=max(solution.gap * 1.1, 1e-3))
    assert (again.selection, again.bound_us, again.work) == (solution.selection, solution.bound_us, 0.0)
    assert again.proven == solution.proven


def test_a_bound_of_another_problem_is_proven_anew() -> None:
    """One microsecond of one option, one byte of a budget, or the bound itself changed: the seal is no longer its own."""
    graph, rows, solution = solved(0)
    proven, first = solution.proven, graph.edges[0]
    slower = replace(graph, edges=(replace(first, weight=first.weight + 1), *graph.edges[1:]))
    assert proven.holds(graph, rows)
    assert not proven.holds(slower, rows)
    assert not proven.holds(graph, (replace(rows[0], budget=rows[0].budget - 1), *rows[1:]))
    assert not replace(proven, bound_us=proven.bound_us + 1).holds(graph, rows)
    wrong = replace(proven, bound_us=solution.step_us)
    assert solve(graph, rows, hint=solution.decisions, proven=wrong).bound_us == solution.bound_us


def test_ties_go_to_the_rule() -> None:
    """Where the GPU binds, nothing else matters: the rule's plan as it stands, one line for all layers."""
    layers, hw = stack(5, 60_000_000, 90_000_000, tokens=200_000, width=2048), load_profile("h200x1")
    graph, rows = problem(layers, hw)
    inner = [solve(graph, rows).decisions.of(f"L{i:02}") for i in range(1, 5)]
    assert inner == [graph.choices.defaults.of("L01")] * 4


# ---- one cost flips each decision ----


class Slow:
    """One kind of op, `factor` times as long as the profile says."""

    def __init__(self, kind: OpKind, factor: float, world_size: int) -> None:
        self.kind, self.factor, self.analytic = kind, factor, AnalyticCostModel(world_size)

    def duration_us(self, op: Op, hw: HardwareProfile) -> int | None:
        return round(self.factor * self.analytic.exact_us(op, hw)) if op.kind is self.kind else None

    def bytes(self, op: Op, hw: HardwareProfile) -> int | None:
        return None


def mostly(field: str, value: str) -> Callable[[Decisions], bool]:
    """True of a plan in which most layers have this value."""


    def holds(decisions: Decisions) -> bool:
        values = [str(getattr(d, field)) for name, d in decisions.groups.items() if name.startswith("L")]
        return values.count(value) > len(values) / 2

    return holds


FLIPS: list[tuple[str, dict[str, float], str, str, OpKind, float, str]] = [
    # machine, changes of it, field, mostly this; then one kind so many times as slow, mostly that
    ("h200x4", {}, "delivery", "sharded", OpKind.ALL_GATHER, 400, "replicated"),
    ("h200x4", {"h2d_all_gbps": 400, "duplex_gbps": 400, "gpu_link_gbps": 3, "host_dram_gbps": 2000},
     "delivery", "replicated", OpKind.H2D, 100, "sharded"),
    ("h200x4", {}, "reduction", "gpu", OpKind.REDUCE, 800, "cpu"),
    ("h200x4", {"gpu_link_gbps": 0.5, "host_dram_gbps": 2000, "d2h_all_gbps": 400, "duplex_gbps": 400},
     "reduction", "cpu", OpKind.HOST_REDUCE, 3000, "gpu"),
    ("h200x1", {"cast_gbps": 6}, "source", "shadow", OpKind.HOST_CAST, 0, "cast"),
    ("h200x1", {"cast_gbps": 1000, "cast_total_gbps": 1000, "host_dram_gbps": 1000}, "source", "cast",
     OpKind.HOST_CAST, 400, "shadow"),
]  # fmt: skip


@pytest.mark.parametrize("flip", FLIPS, ids=[f"{f[2]}-{f[4]}" for f in FLIPS])
def test_one_cost_flips_a_decision(flip: Any) -> None:
    machine, changes, field, before, kind, factor, after = flip
    hw = replace(load_profile(machine), **changes)
    layers = medium(3, hw.num_gpus)
    usual = solve(*problem(layers, hw, chunk_counts=(1,))).decisions
    slow = solve(*problem(layers, hw, chunk_counts=(1,), user=Slow(kind, factor, hw.num_gpus))).decisions
    assert mostly(field, before)(usual), usual
    assert mostly(field, after)(slow), slow
    for decisions in (usual, slow):
        lower(layers, decisions)


def test_fixed_costs_flip_chunks() -> None:
    """A task's fixed cost wants few chunks; without one, the pipeline wants many. Nothing here asks for the last percent."""
    layers = medium(3)
    cheap, dear = (replace(load_profile("h200x1"), host_task_us=us, link_latency_us=us) for us in (0.0, 20_000.0))
    few, many = (solve(*problem(layers, hw, policy={"source": "shadow"}, chunk_counts=(1, 8)), time_limit=1.0).decisions
                 for hw in (dear, cheap))
    for field in ("delivery_chunks", "return_chunks"):
        assert min(getattr(d, field) for d in few.groups.values()) == 1
        assert max(getattr(d, field) for d in many.groups.values()) == 8
    for decisions in (few, many):
        lower(layers, decisions)


# ---- decisions that may come later, in the event graph ----


def solve_by_hand(layers: LayerGraph, choices: Choices, hw: HardwareProfile, hbm_budget: int) -> tuple[Solution, EventGraph]:
    graph = build_event_graph(layers, choices, costs_of(layers, hw))
    return solve(graph, memory_rows(layers, choices, hbm_budget, hw.host_bytes)), graph


def test_activations_are_kept_where_they_fit() -> None:
    """Compute-bound: as many layers are retained as the HBM budget has room for, and no more.

    The first takes next to nothing: the last layer's activations are there in its backward anyway.
    """
    layers, hw = stack(5, 30_000_000, 40_000_000, tokens=100_000, width=1024), load_profile("h200x1")
    choices = by_hand(layers, {"act": ("recompute", "retain")})
    need = estimate_memory(layers, choices.decode(choices.default)).hbm_bytes
    each = layers.stage("L00").activation_bytes
    at = [i for i, f in enumerate(choices.families) if f.name == "act"]
    for room in (0, 2, 5):
        solution, _ = solve_by_hand(layers, choices, hw, need + room * each + each // 2)
        assert sum(solution.selection[i] for i in at) == min(room + 1, len(at))


def test_state_goes_to_hbm_when_the_update_binds() -> None:
    """Host-bound: state moves into the room there is, the earliest deadlines first or any; the links hold."""
    layers, hw = medium(4), load_profile("h200x1")
    choices = by_hand(layers, {"state": ("host", "hbm")})
    need = estimate_memory(layers, choices.defaults).hbm_bytes
    numel = layers.group("L00").numel
    state = [i for i, f in enumerate(choices.families) if f.name == "state"]
    for room in (0, 2):
        solution, graph = solve_by_hand(layers, choices, hw, need + room * 16 * numel + numel)
        assert sum(solution.selection[i] for i in state) == room
        for link in choices.links:
            assert (solution.selection[link.a] == link.a_option) == (solution.selection[link.b] == link.b_option)
        assert simulate_events(graph, solution.selection, 40) == pytest.approx(solution.step_us, rel=1e-3)


# ---- memory ----


def test_memory_rows_bind() -> None:
    """A host without room for all shadows: groups cast, staging buffers count, and the plan fits."""
    layers, hw = medium(4), load_profile("h200x1")
    graph, rows = problem(layers, hw)
    budget = rows[1].needed(graph.choices.default) - 2 * layers.group("L00").numel
    solution = solve(graph, (rows[0], replace(rows[1], budget=budget)))
    assert estimate_memory(layers, solution.decisions).host_bytes <= budget
    assert any(d.source == "cast" for d in solution.decisions.groups.values())


def test_what_does_not_fit_is_named() -> None:
    layers, hw = medium(4), load_profile("h200x1")
    graph, rows = problem(layers, hw)
    bare = rows[1].needed(fitting_start(rows, graph.choices) or ())
    assert fitting_start((rows[0], replace(rows[1], budget=bare)), graph.choices) is not None
    short = (rows[0], replace(rows[1], budget=bare - 2**20))
    assert fitting_start(short, graph.choices) is None
    error = explain(layers, graph.choices, short, lambda: False)
    assert isinstance(error, BudgetError)
    assert "1.0 MiB more than the budget" in str(error)
    assert "Cheapest way out: raise host_budget to" in str(error)
    with pytest.raises(ValueError, match="no plan fits"):
        solve(graph, short)


def test_pins_are_blamed() -> None:
    layers, hw = medium(4), load_profile("h200x1")
    graph, rows = problem(layers, hw, policy={"source": "shadow"})
    short = (rows[0], replace(rows[1], budget=rows[1].needed(graph.choices.default) - 1))
    assert "drop what the policy pins" in str(explain(layers, graph.choices, short, lambda: True))


def test_fewer_tokens_are_the_way_out_of_a_small_gpu() -> None:
    layers, hw = stack(4, 30_000_000, 40_000_000, tokens=100_000, width=1024), load_profile("h200x1")
    graph, rows = problem(layers, hw)
    need = rows[0].needed(graph.choices.default)
    short = (replace(rows[0], budget=need - layers.stage("L00").activation_bytes // 2), rows[1])
    error = str(explain(layers, graph.choices, short, lambda: False))
    assert "of HBM, " in error
    assert "% of the tokens" in error


def test_conflicting_budgets_are_named() -> None:
    """HBM has room only with state on the host, the host only with state in HBM: both are named, and what they miss."""
    layers, hw = medium(4), load_profile("h200x1")
    choices = by_hand(layers, {"state": ("host", "hbm")})
    rows = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    hbm = replace(rows[0], budget=rows[0].needed(choices.default))
    host = replace(rows[1], budget=rows[1].needed(choices.default) - 1)
    error = str(explain(layers, choices, (hbm, host), lambda: False))
    assert "hbm_budget" in error or "host_budget" in error


def test_missing_ortools_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    graph, rows, _ = solved(0)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match="pip install 'ortools"):
        solve(graph, rows)
