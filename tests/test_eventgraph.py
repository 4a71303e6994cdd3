"""The timed event graph: it says what the lowered graph does, and running it and its critical cycle say the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from stacks import looking_up, qwen3_4b, stack

from slidedp.compiler.costmodel.contention import Contention, work_us
from slidedp.compiler.costmodel.costs import AnalyticCostModel, WithFallback, resolve
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Activation, Decisions, Reduction, Route, Source, StateHome
from slidedp.compiler.eventgraph.choices import OFFERED, Choices, Family, Link, find_choices, pinned_fields
from slidedp.compiler.eventgraph.eventbuild import build_event_graph
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.eventgraph import EventGraph
from slidedp.compiler.eventgraph.maxplus import Cycle, is_period, max_cycle_ratio, simulate_events, start_times
from slidedp.compiler.eventgraph.memoryrows import memory_rows
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import Group, LayerGraph, recut
from slidedp.compiler.ops import Stream
from slidedp.compiler.residency import update_chunks, windowed_groups
from slidedp.compiler.simulation.simulate import Timeline, simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null


PLAIN = {"state": "host", "act": "recompute", "weights": "stream"}
"""Everything travels: what is left to choose are routes, sources and chunks."""


def costs_of(layers: LayerGraph, hw: HardwareProfile, *, shared: bool = False) -> OptionCosts:
    contention = Contention(hw, layers.world_size) if shared else None
    return OptionCosts(layers, hw, WithFallback(AnalyticCostModel(layers.world_size, layers.compute_dtype)), contention)


def event_graph(layers: LayerGraph, hw: HardwareProfile, policy: Mapping[str, Any] | None = None, *,
                shared: bool = False) -> EventGraph:  # fmt: skip
    policy = {**PLAIN, **(policy or {})}
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy)
    return build_event_graph(layers, choices, costs_of(layers, hw, shared=shared))


def timeline(layers: LayerGraph, hw: HardwareProfile, decisions: Decisions) -> Timeline:
    graph = lower(layers, decisions)
    return simulate(graph, resolve(graph.ops, hw, AnalyticCostModel(layers.world_size, layers.compute_dtype)).duration_us, 10)


def tied(layers: LayerGraph) -> LayerGraph:
    """`layers` with one table for embedding and head."""
    table = layers.group("prologue")
    groups = (Group("tied", table.numel, table.num_trainable, ("prologue", "epilogue")), *layers.groups[1:-1])
    ends = {"prologue": ("tied",), "epilogue": ("tied",)}
    return replace(layers, groups=groups, stages=tuple(replace(s, groups=ends.get(s.name, s.groups)) for s in layers.stages))


def shared_block(layers: LayerGraph) -> LayerGraph:
    """`layers` with L01 also run as the last layer but one."""
    first, last = layers.layers[1], layers.layers[-2]
    kept = [g for g in layers.groups if g.name != last.name]
    groups = tuple(replace(g, uses=(first.name, last.name)) if g.name == first.name else g for g in kept)
    stages = tuple(replace(s, groups=(first.name,)) if s.name == last.name else s for s in layers.stages)
    return replace(layers, groups=groups, stages=stages)


def medium(layers: int = 6, world_size: int = 1, **kw: Any) -> LayerGraph:
    return stack(layers, 60_000_000, 90_000_000, world_size=world_size, tokens=4096, width=2048, **kw)


MODELS = [
    (medium(), "h200x1", None),
    (medium(frozen=(0, 3)), "h200x1", {"source": "cast"}),
    (tied(medium()), "h200x1", {"window": 2, "grad_slots": 1}),
    (shared_block(medium()), "h200x1", {"chunks": 3}),
    (medium(2), "h200x1", {"window": 2}),
    (medium(world_size=4), "h200x4", None),
    (medium(world_size=4), "h200x4", {"reduction": "cpu", "delivery": "sharded", "source": "cast"}),
    (tied(medium(world_size=4)), "a800x4-pcie", {"delivery": "replicated", "chunks": 5}),
    (medium(world_size=2, dtype="float32"), "cpu", {"delivery_chunks": 1, "return_chunks": 4}),
    (looking_up(medium(), 4096, 40000), "h200x1", None),
    (looking_up(tied(medium(world_size=4)), 4096, 40000), "h200x4", {"reduction": "cpu"}),
    (recut(medium(), 3), "h200x1", {"slices": 3}),
]


@pytest.mark.parametrize(("layers", "hw_name", "policy"), MODELS)
def test_busy_times_are_those_of_the_ops(layers: LayerGraph, hw_name: str, policy: dict[str, Any] | None) -> None:
    """Every option's durations add up to those of the ops that it lowers to, stream by stream, to the microsecond."""
    hw = load_profile(hw_name)
    graph = event_graph(layers, hw, policy)
    rng = random.Random(0)
    for _ in range(4):
        selection = [rng.randrange(len(f.options)) for f in graph.choices.families]
        ops = lower(layers, graph.choices.decode(selection))
        costs = resolve(ops.ops, hw, AnalyticCostModel(layers.world_size, layers.compute_dtype))
        busy = {s: sum(costs.duration_us(op) for op in ops.on(s)) for s in Stream}
        assert graph.busy_us(selection) == pytest.approx({s: us for s, us in busy.items() if us}, abs=20)


@pytest.mark.parametrize(("layers", "hw_name", "policy"), MODELS)
def test_period_is_that_of_the_simulated_ops(layers: LayerGraph, hw_name: str, policy: dict[str, Any] | None) -> None:
    """A layer at a time instead of a chunk costs little: the rule's plan within 1 %, mixed plans within 6 %."""
    hw = load_profile(hw_name)
    graph = event_graph(layers, hw, policy)
    default = graph.choices.default
    simulated = timeline(layers, hw, graph.choices.defaults).step_us
    assert float(max_cycle_ratio(graph, default).ratio) == pytest.approx(simulated, rel=0.01)
    rng = random.Random(1)
    for _ in range(3):
        selection = [rng.randrange(len(f.options)) for f in graph.choices.families]
        simulated = timeline(layers, hw, graph.choices.decode(selection)).step_us
        assert float(max_cycle_ratio(graph, selection).ratio) == pytest.approx(simulated, rel=0.06)


@pytest.mark.parametrize(("layers", "hw_name", "policy"), [MODELS[0], MODELS[2], MODELS[5]])
def test_period_of_deferred_updates(layers: LayerGraph, hw_name: str, policy: dict[str, Any] | None) -> None:
    """They wait for the end of compute, which costs time where the host binds; of layers that speculate, nothing."""
    hw, periods = load_profile(hw_name), []
    late = {"update": "deferred", "layers": {layers.layers[-1].groups[0]: {"update": "speculative"}}}
    for update in ({"update": "in_backward"}, {"update": "deferred"}, {"update": "speculative"}, late):
        graph = event_graph(layers, hw, {**(policy or {}), **update})
        periods.append(float(max_cycle_ratio(graph, graph.choices.default).ratio))
        assert periods[-1] == pytest.approx(timeline(layers, hw, graph.choices.defaults).step_us, rel=0.03)
    in_backward, deferred, speculative, one_layer = periods
    assert deferred > 1.05 * in_backward
    assert speculative <= 1.02 * in_backward
    assert speculative <= one_layer <= deferred


@pytest.mark.parametrize("batch", [4, 16, 64])
def test_a_real_model(batch: int) -> None:
    layers, hw = qwen3_4b(batch), load_profile("h200x1")
    graph = event_graph(layers, hw)
    ratio = float(max_cycle_ratio(graph, graph.choices.default).ratio)
    assert ratio == pytest.approx(timeline(layers, hw, graph.choices.defaults).step_us, rel=1e-3)


@pytest.mark.parametrize(("layers", "hw_name", "policy"), MODELS)
def test_cycle_and_run_agree(layers: LayerGraph, hw_name: str, policy: dict[str, Any] | None) -> None:
    """Maximum cycle ratio and max-plus simulation, with shared rates as loops; the ratio is feasible, and less is not."""
    graph = event_graph(layers, load_profile(hw_name), policy, shared=True)
    rng = random.Random(2)
    for _ in range(5):
        selection = [rng.randrange(len(f.options)) for f in graph.choices.families]
        cycle = max_cycle_ratio(graph, selection)
        assert simulate_events(graph, selection, 40) == pytest.approx(float(cycle.ratio), rel=1e-3)
        whole = -(-cycle.ratio.numerator // cycle.ratio.denominator)
        assert is_period(graph, selection, whole)
        assert not is_period(graph, selection, whole - 1)
        times, weights = start_times(graph, selection, whole), graph.weights(selection)
        assert all(times[e.dst] + e.distance * whole >= times[e.src] + w for e, w in zip(graph.edges, weights, strict=True))
        assert graph.floor(selection) <= whole


def test_cycle_is_a_cycle() -> None:
    graph = event_graph(medium(), load_profile("h200x1"))
    cycle = max_cycle_ratio(graph, graph.choices.default)
    assert all(a.dst == b.src for a, b in zip(cycle.edges, (*cycle.edges[1:], cycle.edges[0]), strict=True))
    weight = dict(zip(graph.edges, graph.weights(graph.choices.default), strict=True))
    assert sum(weight[e] for e in cycle.edges) == cycle.ratio * sum(e.distance for e in cycle.edges)


def test_shared_rates_bind() -> None:
    """Slow host memory, which updates and copies share, is what the step waits for; fast memory is nobody's limit."""
    layers, fast = medium(), replace(load_profile("h200x1"), host_dram_gbps=1500.0)
    slow = replace(fast, host_dram_gbps=60.0)
    choices = find_choices(layers, default_decisions(layers, fast))

    def cycle(hw: HardwareProfile, *, shared: bool) -> Cycle:
        return max_cycle_ratio(build_event_graph(layers, choices, costs_of(layers, hw, shared=shared)), choices.default)

    alone, bound = cycle(slow, shared=False), cycle(slow, shared=True)
    assert [e.name for e in bound.edges] == ["host memory"]
    assert bound.ratio > 1.1 * alone.ratio
    assert cycle(fast, shared=True).ratio == cycle(fast, shared=False).ratio


RESIDENT = {"layers": {name: {"state": "hbm"} for name in ("L01", "L04", "epilogue")}}
"""Whose collectives go through host memory where there is no link."""


@pytest.mark.parametrize(("layers", "hw_name", "policy"), [*MODELS, (medium(world_size=4), "a800x4-pcie", RESIDENT)])
def test_shared_rates_are_those_of_the_simulation(layers: LayerGraph, hw_name: str, policy: dict[str, Any] | None) -> None:
    """For every plan: what its ops keep busy in one step, and no step is simulated to be shorter than the graph says."""
    hw = load_profile(hw_name)
    policy = {**PLAIN, **(policy or {})}
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy)
    model = AnalyticCostModel(layers.world_size, layers.compute_dtype, alone=True)
    contention = Contention(hw, layers.world_size)
    graph = build_event_graph(layers, choices, OptionCosts(layers, hw, WithFallback(model), contention))
    assert {e.name for e in graph.edges if e.src == e.dst} <= {str(r) for r in contention.shared}
    rng = random.Random(3)
    for number in range(4):
        decisions = choices.decode([rng.randrange(len(f.options)) if number else 0 for f in choices.families])
        selection, ops = choices.encode(decisions), lower(layers, decisions)
        duration_us = resolve(ops.ops, hw, model).duration_us
        line = simulate(ops, duration_us, contention=contention)
        loops = {e.name: us for e, us in zip(graph.edges, graph.weights(selection), strict=True) if e.src == e.dst}
        least = work_us([contention.draw(op, duration_us(op)).least for op in ops], map(duration_us, ops))
        assert loops == pytest.approx({str(r): us for r, us in least.items() if str(r) in loops}, abs=len(ops.ops))
        used_us = {str(r): part * line.step_us for r, part in line.resources.items()}
        assert all(0.8 * used_us[name] <= us <= 1.001 * used_us[name] + len(ops.ops) for name, us in loops.items())
        assert float(max_cycle_ratio(graph, selection).ratio) <= 1.04 * line.step_us


# ---- choices ----


def test_pins_leave_one_value() -> None:
    layers, hw = medium(4, 4), load_profile("h200x4")
    policy = {"delivery": "sharded", "state": "host",
              "layers": {"L01": {"chunks": 3, "source": "cast", "weights": "stream"}, "epilogue": {"reduction": "cpu"}}}
    pinned = pinned_fields(layers, default_decisions(layers, hw), policy)
    assert pinned["L00"] == {"delivery", "state"}
    assert pinned["L01"] == {"delivery", "state", "source", "delivery_chunks", "return_chunks", "weights"}
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy)
    assert all(o["delivery"] == "sharded" for f in choices.families if f.name == "weights" for o in f.options)
    assert len(next(f for f in choices.families if f.key == ("L01", "weights")).options) == 1
    assert {o["reduction"] for f in choices.families if f.key == ("epilogue", "gradients") for o in f.options} == {"cpu"}
    for selection in (choices.default, [len(f.options) - 1 for f in choices.families]):
        decisions = choices.decode(selection)
        assert decisions.of("L01").source is Source.CAST
        assert all(d.delivery is Route.SHARDED for d in decisions.groups.values())
        assert choices.encode(decisions) == tuple(selection)
    assert choices.decode(choices.default) == choices.defaults


def test_one_rank_has_no_routes() -> None:
    choices = find_choices(medium(), default_decisions(medium(), load_profile("h200x1")))
    routes = {(o.get("delivery"), o.get("reduction")) for f in choices.families for o in f.options}
    assert routes <= {("replicated", None), (None, "gpu"), (None, None)}
    frozen = medium(frozen=(2,))
    families = find_choices(frozen, default_decisions(frozen, load_profile("h200x1"))).families
    assert not any(f.key == ("L02", "gradients") for f in families)


# ---- memory ----


@pytest.mark.parametrize(("layers", "hw_name", "policy"), MODELS)
def test_memory_rows_are_estimate_memory(layers: LayerGraph, hw_name: str, policy: dict[str, Any] | None) -> None:
    hw = load_profile(hw_name)
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy)
    graph = build_event_graph(layers, choices, costs_of(layers, hw))
    rows = memory_rows(layers, graph.choices, hw.hbm_bytes, hw.host_bytes)
    rng = random.Random(3)
    families = graph.choices.families
    for trial in range(12):
        selection = graph.choices.encode(graph.choices.decode([rng.randrange(len(f.options)) for f in families]))
        if not trial:
            selection = graph.choices.default
        decisions = graph.choices.decode(selection)
        report = estimate_memory(layers, decisions)
        needed = [row.needed(selection) for row in rows]
        assert needed[0] >= report.hbm_bytes
        assert needed[1] >= report.host_bytes
        moves = {decisions.activation(s) is Activation.OFFLOAD for s in layers.layers if s.groups}
        if len(windowed_groups(layers, decisions)) >= decisions.window and moves == {False}:
            assert needed == [report.hbm_bytes, report.host_bytes]
    for act in OFFERED:  # the same for all layers: the windows are filled
        selection = tuple(next(i for i, o in enumerate(f.options) if o["act"] == act) if f.name == "act" else 0 for f in families)
        report = estimate_memory(layers, graph.choices.decode(selection))
        assert [row.needed(selection) for row in rows] == [report.hbm_bytes, report.host_bytes]


# ---- families of decisions that may come later: here by hand ----


def by_hand(layers: LayerGraph, extra: Mapping[str, tuple[str, ...]]) -> Choices:
    """Choices of the rule's values, and for every layer a family of each field in `extra`."""
    hw = load_profile("h200x1")
    base = find_choices(layers, default_decisions(layers, hw), {"chunks": 4, "source": "shadow"})
    families: list[Family] = []
    links: list[Link] = []
    for family in base.families:
        if family.name in ("act", "state"):
            continue
        resident = "hbm" in extra.get("state", ()) and family.name in ("weights", "gradients") and family.group.startswith("L")
        families.append(replace(family, options=(family.options[0], {}) if resident else family.options[:1]))
        if family.name == "gradients" and family.group.startswith("L"):
            for key, values in extra.items():
                families.append(Family(family.group, key, tuple({key: v} for v in values)))
                if key == "state":
                    here = len(families) - 1
                    mine = [i for i, f in enumerate(families) if f.group == family.group and {} in f.options]
                    links += [Link(here, 1, i, 1) for i in mine]
    return Choices(tuple(families), tuple(links), base.defaults)


def test_what_is_retained_is_not_recomputed() -> None:
    """Retaining a layer saves its recompute time and takes its activation bytes; offloading moves them twice."""
    layers, hw = medium(), load_profile("h200x1")
    choices = by_hand(layers, {"act": ("recompute", "retain", "offload")})
    costs = costs_of(layers, hw)
    graph = build_event_graph(layers, choices, costs)
    base = graph.busy_us(choices.default)
    recomputed = event_graph(layers, hw, {"act": "recompute"})
    assert base[Stream.GPU] == recomputed.busy_us(recomputed.choices.default)[Stream.GPU]
    at = next(i for i, f in enumerate(choices.families) if f.key == ("L04", "act"))
    stage, number = next((s, i) for i, s in enumerate(layers.stages) if s.name == "L04")
    for option in (1, 2):
        selection = [option if i == at else 0 for i in range(len(choices.families))]
        busy = graph.busy_us(selection)
        assert base[Stream.GPU] - busy[Stream.GPU] == costs.recompute(number, "recompute") > 0
        hbm = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)[0]
        report = estimate_memory(layers, choices.decode(selection))
        windows = sum(max(x.at(selection) for x in each) for each in hbm.maxima[-1:])  # as if all went that may
        assert hbm.needed(selection) - report.hbm_bytes == windows - report.hbm["activations on their way"]
        moved = costs.hw.link_latency_us + stage.activation_bytes / hw.duplex_gbps / 1e3
        for stream in (Stream.D2H, Stream.H2D):
            assert busy[stream] - base[stream] == pytest.approx(moved if option == 2 else 0, rel=0.2)
        assert float(max_cycle_ratio(graph, selection).ratio) == pytest.approx(simulate_events(graph, selection, 40), rel=1e-3)


def test_state_in_hbm_leaves_nothing_on_the_host() -> None:
    layers, hw = medium(), load_profile("h200x1")
    choices = by_hand(layers, {"state": ("host", "hbm")})
    costs = costs_of(layers, hw)
    graph = build_event_graph(layers, choices, costs)
    linked = {link.b for link in choices.links if choices.families[link.b].group == "L00"}
    linked |= {link.a for link in choices.links if choices.families[link.a].group == "L00"}
    assert len(linked) == 3
    selection = [int(i in linked) for i in range(len(choices.families))]
    base, busy = graph.busy_us(choices.default), graph.busy_us(selection)
    group, numel = layers.group("L00"), layers.group("L00").numel
    weights = {"delivery": "replicated", "source": "shadow", "delivery_chunks": 4}
    gradients = {"reduction": "gpu", "return_chunks": 4}
    assert base[Stream.H2D] - busy[Stream.H2D] == sum(costs.h2d(group, use, weights).total_us for use in ("fwd", "bwd"))
    assert base[Stream.D2H] - busy[Stream.D2H] == costs.d2h(group, gradients).total_us
    assert base[Stream.CPU] - busy[Stream.CPU] == costs.update(group, gradients, "shadow").total_us
    num_chunks = len(update_chunks(group, replace(choices.defaults.of("L00"), state=StateHome.HBM), 1))
    assert num_chunks < choices.defaults.of("L00").return_chunks
    assert busy[Stream.UPDATE] == costs.gpu_update(group, num_chunks, Stream.UPDATE).total_us > 0
    assert busy[Stream.GPU] == base[Stream.GPU]
    sharing = build_event_graph(layers, choices, costs_of(layers, hw, shared=True))
    busy, base = sharing.busy_us(selection), sharing.busy_us(choices.default)
    assert busy[Stream.GPU] - base[Stream.GPU] == costs.gpu_update(group, num_chunks, Stream.GPU).total_us
    hbm = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)[0]
    workspace = 4 * numel // num_chunks  # an FP32 copy of a chunk of the gradient
    assert hbm.needed(selection) - hbm.needed(choices.default) == (12 + 2) * numel + workspace
    assert max_cycle_ratio(graph, selection).ratio < max_cycle_ratio(graph, choices.default).ratio  # the update binds here


def test_reduction_routes_differ() -> None:
    """On the host the sums take the host's time and every rank's copy the link; between GPUs the collectives do."""
    layers, hw = medium(world_size=4), load_profile("h200x4")
    on = {}
    for reduction in Reduction:
        graph = event_graph(layers, hw, {"reduction": str(reduction)})
        on[reduction] = graph.busy_us(graph.choices.default)
    assert Stream.HOST not in on[Reduction.GPU]
    assert on[Reduction.CPU][Stream.HOST] > 0
    assert on[Reduction.CPU][Stream.D2H] > 3 * on[Reduction.GPU][Stream.D2H]
