"""On machines and plans drawn at random: the event graph and the simulated ops say the same, of the plans that are kept, too.

Without contention three computations agree to 0.1 %: the maximum cycle ratio of a plan's event graph, a max-plus run of it, and
the simulation of the ops that the plan lowers to, chunk by chunk. With contention the simulation is the judge, and the graph of
what AutoPolicy keeps (solve, lower, simulate, correct) is within 2 % of it once each transfer takes as long as there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from stacks import stack
from test_eventgraph import PLAIN, costs_of, tied

from slidedp.compiler.costmodel.costs import AnalyticCostModel, resolve
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.eventgraph.choices import MIN_CHUNK_BYTES, Choices, find_choices
from slidedp.compiler.eventgraph.eventbuild import build_event_graph
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio, simulate_events
from slidedp.compiler.footprint.budgets import room_to_fill
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.simulation.predict import cost_model_of, predict, price
from slidedp.compiler.simulation.simulate import Timeline, simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.compiler.solver.solver import solve
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower
from slidedp.planning.autopolicy import Problem, auto_plan

pytestmark = pytest.mark.null

POLICIES: list[dict[str, Any]] = [
    {}, {}, {}, PLAIN, PLAIN, PLAIN | {"chunks": 1}, PLAIN | {"chunks": 8}, PLAIN | {"window": 2, "grad_slots": 1},
    {"act": "retain"}, {"act": "offload"}, {"act": "offload", "state": "host", "weights": "stream"}, {"state": "hbm"},
    {"weights": "hold"},
]  # fmt: skip
"""What is pinned; everything else is drawn, for each layer."""
UPDATES = ("in_backward", "in_backward", "deferred", "speculative")


def any_machine(rng: random.Random, name: str, factor: float = 3.0) -> HardwareProfile:
    """The shipped one with its rates changed by up to `factor`: the update, host memory and casts, the links, the GPU."""
    hw = load_profile(name)
    update, memory, link, gpu = (factor ** rng.uniform(-1, 1) for _ in range(4))
    rates = {"cpu_adam_gparams": update, "host_dram_gbps": memory, "cast_gbps": memory, "cast_total_gbps": memory,
             "gpu_bf16_tflops": gpu, "hbm_gbps": gpu,
             **dict.fromkeys(("h2d_gbps", "d2h_gbps", "h2d_all_gbps", "d2h_all_gbps", "duplex_gbps"), link)}  # fmt: skip
    return replace(hw, **{key: getattr(hw, key) * by for key, by in rates.items()})


@dataclass(frozen=True)
class Drawn:
    """A model, a machine, and a plan for them. `several`: more than one rank."""

    layers: LayerGraph
    hw: HardwareProfile
    choices: Choices

    @property
    def plan(self) -> Decisions:
        return self.choices.defaults


FINEST = 8 * 2**20
"""Bytes of chunks that are drawn, at least: finer than any that the solver would take."""


def drawn(seed: int, world_size: int, *, alike: bool = True, finest: int = FINEST) -> Drawn:
    """The rule's plan, or one with every open choice drawn. `alike`: one source and one route for all layers."""
    rng = random.Random(seed)
    layers = stack(rng.choice([2, 3, 4, 6, 8]), 60_000_000, 90_000_000, world_size=world_size, width=2048,
                   tokens=rng.choice([1024, 4096, 16384, 65536]))  # fmt: skip
    layers = tied(layers) if rng.random() < 0.2 else layers
    hw = any_machine(rng, "h200x1" if world_size == 1 else rng.choice(["h200x4", "a800x4-pcie"]))
    policy = {**rng.choice(POLICIES), "update": rng.choice(UPDATES)}
    if alike:
        policy |= {"source": rng.choice(["cast", "shadow"]), "reduction": rng.choice(["gpu", "cpu"]),
                   "delivery": rng.choice(["replicated", "sharded"])}  # fmt: skip
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy, min_chunk_bytes=finest)
    selection = [rng.randrange(len(f.options)) if seed % 3 else 0 for f in choices.families]
    decisions = choices.decode(choices.encode(choices.decode(selection)))
    kept = zip(choices.families, choices.encode(decisions), strict=True)
    return Drawn(layers, hw, Choices(tuple(replace(f, options=(f.options[o],)) for f, o in kept), (), decisions))


def error_without_contention(case: Drawn) -> float:
    """Of the event graph's period, as a share of the simulated one."""
    graph = build_event_graph(case.layers, case.choices, costs_of(case.layers, case.hw))
    ops = lower(case.layers, case.plan, verified=False)
    costs = resolve(ops.ops, case.hw, AnalyticCostModel(case.layers.world_size, case.layers.compute_dtype))
    line = simulate(ops, costs.duration_us)
    assert line.steady
    period = float(max_cycle_ratio(graph, case.choices.default).ratio)
    assert simulate_events(graph, case.choices.default, 40) == pytest.approx(period, rel=1e-3)
    return period / line.step_us - 1


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_one_rank_without_contention(first: int) -> None:
    errors = {seed: error_without_contention(drawn(seed, 1)) for seed in range(first, first + 40)}
    assert {seed: error for seed, error in errors.items() if abs(error) > 1e-3} == {}


def test_a_delivery_whose_first_chunk_waits_for_several_returned_ones() -> None:
    """Delivered in four, updated in five, which come home more slowly than they are updated."""
    assert abs(error_without_contention(drawn(224, 1, finest=MIN_CHUNK_BYTES))) <= 1e-3


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_four_ranks_without_contention(first: int) -> None:
    errors = {seed: error_without_contention(drawn(seed, 4)) for seed in range(first, first + 40)}
    assert {seed: error for seed, error in errors.items() if abs(error) > 1e-3} == {}


@pytest.mark.parametrize("seed", range(4))
def test_cp_sat_says_the_same(seed: int) -> None:
    """Of a plan with nothing to choose: its objective, in its own units."""
    case = drawn(seed, 1)
    graph = build_event_graph(case.layers, case.choices, costs_of(case.layers, case.hw, shared=True))
    solution = solve(graph, ())
    assert solution.objective_us == pytest.approx(float(max_cycle_ratio(graph, case.choices.default).ratio), rel=1e-3)


def left_open(problem: Problem, decisions: Decisions) -> float:
    """How far the event graph of a plan is from its simulation, as a share of the simulated step, once the time that sharing adds
    in the simulation has been added to every duration.
    """
    timeline, fixed = problem.simulate(decisions), problem.fixed(decisions)
    stretched = {name: factor for factors in timeline.stretched.values() for name, factor in factors.items()}
    costs = OptionCosts(problem.layers, problem.hw, problem.costs, scale=stretched)
    graph = build_event_graph(problem.layers, fixed, costs)
    return float(max_cycle_ratio(graph, fixed.default).ratio) / max(timeline.step_us, 1) - 1


@pytest.mark.parametrize("seed", range(8))
def test_with_contention_kept_plans_take_what_their_graphs_say(seed: int) -> None:
    rng = random.Random(seed)
    world_size = (1, 1, 4)[seed % 3]
    layers = stack(rng.choice([3, 4, 6, 8]), 60_000_000, 90_000_000, world_size=world_size, width=2048,
                   tokens=rng.choice([4096, 16384, 32768, 65536]))  # fmt: skip
    hw = any_machine(rng, "h200x1" if world_size == 1 else rng.choice(["h200x4", "a800x4-pcie"]), 2.0)
    policy = rng.choice([{}, {"state": "host"}, {"state": "host", "act": "recompute"}, {"update": "deferred"},
                         {"source": "cast"}])  # fmt: skip
    model = cost_model_of(layers)

    def simulated(decisions: Decisions) -> Timeline:
        graph = lower(layers, decisions, verified=False)
        return predict(graph, price(graph, model, hw), hw)

    problem = Problem(layers, hw, model, simulated, room_to_fill(hw, None), hw.host_bytes, policy)
    rule = default_decisions(layers, hw, policy=policy)
    for decisions in (auto_plan(problem, rule).decisions, rule):
        assert left_open(problem, decisions) == pytest.approx(0, abs=0.02)
