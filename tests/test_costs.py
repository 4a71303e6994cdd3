"""Cost models: the analytic arithmetic, a user's model over it, and the memory and decisions that follow."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from stacks import qwen3_4b, stack

from slidedp.compiler.costmodel.costs import AnalyticCostModel, CostModel, resolve
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.measured import LONGEST_US
from slidedp.compiler.decisions import Boundary, Decisions, GroupDecision, Reduction, Route, Source
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.footprint.budgets import WHOLE, host_room, room_to_fill
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpKind, Ref, Stream
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null
ROUND = replace(load_profile("h200x4"), h2d_gbps=50.0, h2d_all_gbps=40.0, d2h_gbps=50.0, d2h_all_gbps=25.0, duplex_gbps=20.0,
                link_latency_us=5.0, gpu_link_gbps=200.0, collective_latency_us=50.0, host_dram_gbps=140.0, cpu_adam_gparams=5.0,
                host_task_us=0.0, cast_gbps=20.0, cast_total_gbps=40.0, gpu_bf16_tflops=500.0, gpu_fp32_tflops=50.0,
                gpu_launch_us=10.0, hbm_gbps=1000.0)  # fmt: skip
"""A profile whose figures make whole microseconds."""


def op(kind: OpKind, stream: Stream = Stream.GPU, **fields: object) -> Op:
    return Op(f"{kind}.L00.c0", kind, stream, "L00", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("world_size", "what", "expected_us"),
    [
        (1, op(OpKind.H2D, bytes=10**8), 5 + 2000),  # one GPU of four: alone
        (4, op(OpKind.H2D, bytes=10**8), 5 + 2500),  # all at once
        (4, op(OpKind.H2D, bytes=10**8, writes=(Ref("W.bwd.L00"),)), 5 + 5000),  # beside the gradients
        (1, op(OpKind.D2H, bytes=10**8), 5 + 2000),
        (4, op(OpKind.D2H, bytes=10**8), 5 + 5000),
        (4, op(OpKind.ALL_GATHER, bytes=10**8), 50 + 500),
        (4, op(OpKind.REDUCE, bytes=10**8), 50 + 500),
        (4, op(OpKind.BARRIER), 50),
        (1, op(OpKind.CPU_UPDATE, bytes=28 * 10**6), 200),  # 1 M parameters at 5 G/s
        (4, op(OpKind.CPU_UPDATE, bytes=7 * 10**6), 200),  # a quarter each: the host is the same
        (1, op(OpKind.HOST_CAST, bytes=6 * 10**6), 100),  # 2 MB written at 20 GB/s
        (4, op(OpKind.HOST_CAST, bytes=6 * 10**6), 200),  # four at once share 40 GB/s
        (4, op(OpKind.HOST_REDUCE, bytes=14 * 10**6), 400),
        (1, op(OpKind.FORWARD, flops=5 * 10**11, bytes=10**6), 10 + 1000),
        (1, op(OpKind.FORWARD, flops=10**6, bytes=10**9), 10 + 1000),  # the bandwidth floor
    ],
)
def test_analytic_durations(world_size: int, what: Op, expected_us: int) -> None:
    model = AnalyticCostModel(world_size)
    assert model.duration_us(what, ROUND) == expected_us
    assert model.bytes(what, ROUND) == what.bytes


def test_analytic_float32() -> None:
    model = AnalyticCostModel(1, "float32")
    assert model.duration_us(op(OpKind.FORWARD, flops=5 * 10**10), ROUND) == 10 + 1000
    assert model.duration_us(op(OpKind.HOST_CAST, bytes=8 * 10**6), ROUND) == 100  # 1 M parameters, as many as for BF16


def test_no_gpu_link_crosses_the_host() -> None:
    hw = replace(ROUND, gpu_link_gbps=0.0)
    assert AnalyticCostModel(4).duration_us(op(OpKind.ALL_GATHER, bytes=10**8), hw) == 50 + 5000


@pytest.mark.parametrize("kind", list(OpKind))
def test_every_kind_has_a_cost(kind: OpKind) -> None:
    assert AnalyticCostModel(4).duration_us(op(kind, bytes=1, flops=1), ROUND) >= 0


class SlowGather:
    """All-gathers a hundred times slower; nothing to say about anything else."""

    def duration_us(self, op: Op, hw: HardwareProfile) -> int | None:
        return 100 * AnalyticCostModel(4).duration_us(op, hw) if op.kind is OpKind.ALL_GATHER else None

    def bytes(self, op: Op, hw: HardwareProfile) -> int:
        raise NotImplementedError


class Returns:
    def __init__(self, cost: object) -> None:
        self.cost = cost

    def duration_us(self, op: Op, hw: HardwareProfile) -> object:
        return self.cost

    def bytes(self, op: Op, hw: HardwareProfile) -> None:
        return None


def test_user_model_over_analytic() -> None:
    analytic = AnalyticCostModel(4)
    gather, copy = op(OpKind.ALL_GATHER, bytes=10**8), op(OpKind.H2D, bytes=10**8)
    costs = resolve([gather, copy], ROUND, analytic, SlowGather())  # type: ignore[arg-type]
    assert costs.duration_us(gather) == 55000
    assert costs.duration_us(copy) == analytic.duration_us(copy, ROUND)
    assert (costs.source(gather), costs.source(copy)) == ("user", "analytic")
    assert costs.num_bytes == {gather.name: 10**8, copy.name: 10**8}
    assert costs.name.endswith("SlowGather")
    assert costs.hash != resolve([gather, copy], ROUND, analytic).hash
    assert costs.hash == resolve([copy], ROUND, analytic, SlowGather()).hash  # type: ignore[arg-type]  # not of the plan
    assert resolve([], ROUND, analytic, Returns(3)).hash != resolve([], ROUND, analytic, Returns(4)).hash  # type: ignore[arg-type]
    assert resolve([gather, copy], ROUND, analytic).name == "analytic"
    assert isinstance(SlowGather(), CostModel)


@pytest.mark.parametrize("cost", [-1, 1.5, "3", True, float("nan")])
def test_bad_costs_name_class_and_op(cost: object) -> None:
    with pytest.raises(ValueError, match=r"cost model Returns: duration_us of h2d\.L00\.c0 is"):
        resolve([op(OpKind.H2D)], ROUND, AnalyticCostModel(), Returns(cost))  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [LONGEST_US + 1, sys.maxsize, 10**30, 10**400])
def test_what_takes_longer_than_can_be_added_up_is_refused(cost: int) -> None:
    message = r"^h2d\.L00\.c0 takes more than 1\d+ microseconds, the most that an op may \(user cost\)$"
    with pytest.raises(ValueError, match=message):
        resolve([op(OpKind.H2D)], ROUND, AnalyticCostModel(), Returns(cost))  # type: ignore[arg-type]
    assert resolve([op(OpKind.H2D)], ROUND, AnalyticCostModel(), Returns(LONGEST_US)).durations_us  # type: ignore[arg-type]


def test_numpy_integers_are_whole_numbers() -> None:
    import numpy as np

    costs = resolve([op(OpKind.H2D)], ROUND, AnalyticCostModel(), Returns(np.int64(7)))  # type: ignore[arg-type]
    assert costs.durations_us == {"h2d.L00.c0": 7}
    assert type(costs.durations_us["h2d.L00.c0"]) is int


def test_model_without_methods() -> None:
    with pytest.raises(ValueError, match="object has no method duration_us"):
        resolve([], ROUND, AnalyticCostModel(), object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SlowGather is a class; pass an instance: SlowGather\(\)"):
        resolve([], ROUND, AnalyticCostModel(), SlowGather)  # type: ignore[arg-type]


# ---- the rule that decides ----


@pytest.mark.parametrize(
    ("hw", "world_size", "route"),
    [("h200x1", 1, "replicated"), ("h200x4", 4, "sharded"), ("h200x4", 1, "replicated"), ("a800x4-nvlink", 4, "sharded"),
     ("a800x4-pcie", 4, "replicated"), ("a800x8-nvlink", 8, "sharded"), ("rtx4090x4", 4, "replicated"), ("cpu", 2, "replicated")],
)  # fmt: skip
def test_default_route(hw: str, world_size: int, route: str) -> None:
    decisions = default_decisions(qwen3_4b(1, world_size=world_size), load_profile(hw), hbm_budget=2**40, host_budget=2**40)
    assert decisions.of("L00") == GroupDecision(Route(route), Source.SHADOW, 6, Reduction.GPU, 6)
    assert decisions.of("prologue").delivery_chunks == 8
    assert (decisions.window, decisions.grad_slots) == (4, 2)


def test_cost_model_turns_the_route() -> None:
    graph, hw = qwen3_4b(1, world_size=4), load_profile("h200x4")
    decisions = default_decisions(graph, hw, cost_model=SlowGather())  # type: ignore[arg-type]
    assert {d.delivery for d in decisions.groups.values()} == {Route.REPLICATED}


def test_source_falls_back_to_cast_when_the_host_is_full() -> None:
    graph, hw = qwen3_4b(1), load_profile("h200x1")
    roomy = default_decisions(graph, hw)
    needed = estimate_memory(graph, roomy).host_bytes
    assert default_decisions(graph, hw, host_budget=needed) == roomy
    assert default_decisions(graph, hw, host_budget=needed - 1).of("L00").source is Source.CAST
    message = r"needs 57\.9 GiB of host memory, 47\.9 GiB more than the budget of 10\.0 GiB .*host_budget"
    with pytest.raises(ValueError, match=message):
        default_decisions(graph, hw, host_budget=10 * 2**30)


def with_room(hw: HardwareProfile, num_bytes: int) -> int:
    """The least budget of which the rule fills `num_bytes`."""
    budget = num_bytes
    while room_to_fill(hw, budget) < num_bytes:
        budget += max(1, num_bytes - room_to_fill(hw, budget))
    return budget


def test_what_may_be_filled() -> None:
    """92 % of a whole machine; of a user's budget all but 3 % and 1 GiB at least, but never less than that; all without a GPU."""
    hw, cpu = load_profile("h200x1"), load_profile("cpu")
    gib = 2**30
    assert room_to_fill(hw, None) == room_to_fill(hw, 200 * gib) * 139 // 200 == int(0.92 * 139 * gib)
    assert room_to_fill(hw, 100 * gib) == 97 * gib
    assert room_to_fill(hw, 20 * gib) == 19 * gib
    assert room_to_fill(hw, 5 * gib) == int(0.92 * 5 * gib)
    assert room_to_fill(cpu, 5 * gib) == 5 * gib


def test_window_shrinks_with_the_budget_then_says_what_is_missing() -> None:
    graph, hw = qwen3_4b(1), load_profile("h200x1")
    sizes = {w: estimate_memory(graph, replace(default_decisions(graph, hw), window=w)).hbm_bytes for w in (2, 3, 4)}
    for window, size in sizes.items():
        assert default_decisions(graph, hw, hbm_budget=with_room(hw, size)).window == window
    smallest = {"act": "recompute", "window": 2, "boundary": "host"}
    least = estimate_memory(graph, default_decisions(graph, hw, policy=smallest)).hbm_bytes
    message = (r"^Qwen3-4B: a step needs .* of GPU memory, 1 B more than the .* that it may use .*what helps: fewer or shorter "
               r"sequences, the batch cut into more slices \(policy: slices=2\), a larger hbm_budget$")
    with pytest.raises(ValueError, match=message):
        default_decisions(graph, hw, hbm_budget=least - 1)


def test_as_many_boundaries_go_to_the_host_as_must() -> None:
    """HBM has no room for those of all layers, nor has the host. Those of the first layers go, and no more than must."""
    graph, hw = qwen3_4b(1, seq=800_000, world_size=4), load_profile("h200x4")
    for pinned in ("hbm", "host"):
        with pytest.raises(BudgetError):
            default_decisions(graph, hw, policy={"boundary": pinned})
    chosen, room = default_decisions(graph, hw), room_to_fill(hw, None)
    away = [stage.name for stage in graph.layers if chosen.moves_boundary(stage)]
    assert away == [f"L{i:02}" for i in range(len(away))]
    memory = estimate_memory(graph, chosen)
    assert memory.hbm_bytes <= room
    assert memory.host_bytes <= host_room(hw.host_bytes)
    last = replace(chosen.of(away[-1]), boundary=Boundary.HBM)
    assert estimate_memory(graph, replace(chosen, groups=chosen.groups | {away[-1]: last})).hbm_bytes > room


def test_no_boundary_goes_to_a_host_without_room_where_a_budget_has_just_room_for_all() -> None:
    """More HBM than plans fill of their own accord, and no more than the budget."""
    graph, hw = qwen3_4b(1), load_profile("h200x1")
    smallest = default_decisions(graph, hw, policy={"act": "recompute", "window": 2, "boundary": "hbm", "source": "cast"})
    need = estimate_memory(graph, smallest)
    chosen = default_decisions(graph, hw, hbm_budget=need.hbm_bytes, host_budget=need.host_bytes)
    assert not any(chosen.moves_boundary(stage) for stage in graph.layers)
    assert estimate_memory(graph, chosen).host_bytes == need.host_bytes


def test_boundaries_that_leave_the_host_no_room_for_shadows() -> None:
    graph, hw, policy = qwen3_4b(1, seq=800_000, world_size=4), load_profile("h200x4"), {"act": "recompute", "window": 2}
    plan = default_decisions(graph, hw, policy=policy)
    assert {d.source for d in plan.groups.values()} == {Source.SHADOW}
    need = estimate_memory(graph, plan).host_bytes
    chosen = default_decisions(graph, replace(hw, host_bytes=int(need / WHOLE) - 2**30), policy=policy)
    assert chosen == replace(plan, groups={name: replace(d, source=Source.CAST) for name, d in plan.groups.items()})


def test_policy_is_kept_while_the_rule_fits_the_budget() -> None:
    graph, hw = qwen3_4b(1), load_profile("h200x1")
    small = default_decisions(graph, hw, policy={"window": 1, "grad_slots": 1})
    budget = with_room(hw, estimate_memory(graph, small).hbm_bytes)
    assert default_decisions(graph, hw, policy={"window": 1, "grad_slots": 1}, hbm_budget=budget) == small
    with pytest.raises(ValueError, match=r"fewer weight buffers \(policy: window=2, now 4\)"):
        default_decisions(graph, hw, policy={"window": 4}, hbm_budget=budget)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("source", list(Source))
@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("reduction", list(Reduction))
def test_memory_equals_the_slots_that_passes_make(world_size: int, source: Source, route: Route, reduction: Reduction) -> None:
    graph: LayerGraph = stack(5, world_size=world_size, frozen=(1,))
    choice = GroupDecision(route, source, 3, reduction, 2)
    decisions = Decisions({g.name: choice for g in graph.groups}, window=3)
    memory, slots = estimate_memory(graph, decisions), lower(graph, decisions).slots
    activations = memory.hbm["boundary activations"] + memory.hbm["running stage's activations"]
    assert memory.hbm_bytes - activations == sum(s.count * s.bytes for s in slots if s.memory == "hbm")
    assert memory.host["cast staging"] == world_size * sum(s.count * s.bytes for s in slots if s.memory == "pinned")


def test_costs_follow_the_bytes_that_passes_state() -> None:
    """The update of all parameters takes as long with one rank as with four: the host is shared, the work divided."""
    total = {}
    for world_size in (1, 4):
        graph = qwen3_4b(1, world_size=world_size)
        decisions = Decisions({g.name: GroupDecision(delivery_chunks=4, return_chunks=4) for g in graph.groups})
        ops = [o for o in lower(graph, decisions) if o.kind is OpKind.CPU_UPDATE]
        total[world_size] = sum(resolve(ops, ROUND, AnalyticCostModel(world_size)).durations_us.values())
    params = sum(g.num_trainable for g in qwen3_4b(1).groups)
    assert total[1] == pytest.approx(total[4], rel=1e-3)
    assert total[1] == pytest.approx(params / ROUND.cpu_adam_gparams / 1e3, rel=1e-3)


def test_casting_on_a_full_host_is_worth_dividing() -> None:
    """Without GPU links the shadow is copied whole by every rank, but four times the cast is too much for the host."""
    graph, hw = qwen3_4b(1, world_size=4), load_profile("rtx4090x4")
    assert default_decisions(graph, hw).of("L00") == GroupDecision(Route.REPLICATED, Source.SHADOW, 6, Reduction.GPU, 6)
    cast = GroupDecision(Route.SHARDED, Source.CAST, 6, Reduction.GPU, 6)
    assert default_decisions(graph, hw, policy={"source": "cast"}).of("L00") == cast
    assert default_decisions(graph, hw, host_budget=60 * 2**30).of("L00") == cast
