"""Graphs, memory and plan files of steps with several micro-batches, and batches cut into slices."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from test_accumulation import OPTIMIZER, accumulate_planned, assert_close, untied, valid
from test_activations import CHOICES
from test_passes import tiny, uniform
from tiny_models import PlainGPT, lm_batch

import slidedp
from slidedp.batch import BatchError, micro_batches
from slidedp.compiler.decisions import Activation, Boundary, Decisions, GroupDecision, StateHome, Update
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.eventgraph.choices import find_choices
from slidedp.compiler.eventgraph.memoryrows import memory_rows
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.footprint.memory_over_time import memory_over_time
from slidedp.compiler.layergraph import LayerGraph, in_lanes, recut
from slidedp.compiler.ops import OpKind
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.simulation.simulate import simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.compiler.text import parse_graph, print_graph
from slidedp.hardware import load_profile
from slidedp.paper import plan_on_paper
from slidedp.passes.pipeline import lower
from slidedp.passes.verify import check


def scaled(layers: LayerGraph, factor: int) -> LayerGraph:
    """The same layers on `factor` times as much."""
    return replace(layers, stages=tuple(
        replace(s, flops=factor * s.flops, boundary_bytes=factor * s.boundary_bytes,
                activation_bytes=factor * s.activation_bytes) for s in layers.stages))  # fmt: skip


def laned(num_layers: int = 3, world: int = 1, sizes: tuple[int, ...] = (1, 1, 1)) -> LayerGraph:
    return in_lanes([scaled(tiny(num_layers, world), size) for size in sizes])


@pytest.mark.null
def test_golden(golden):
    """Two micro-batches: an op of each for each, weights and gradients for both, summed in FP32 until the last has added."""
    layers = laned(2, sizes=(1, 2))
    graph = lower(layers, uniform(layers, act=Activation.OFFLOAD, boundary=Boundary.HOST))
    assert parse_graph(print_graph(graph)) == graph
    golden("lanes.txt", print_graph(graph))


@pytest.mark.null
@pytest.mark.parametrize("seed", range(8))
def test_every_mix_is_sound_and_memory_is_as_estimated(seed):
    draw = random.Random(seed)
    sizes = draw.choice([(1, 1), (3, 1, 2), (1, 1, 1, 1)])
    layers = laned(4, 1 + seed % 2, sizes)
    groups = {g.name: GroupDecision(act=act, boundary=boundary, state=draw.choice(list(StateHome)))
              for g in layers.groups for act, boundary in [draw.choice(CHOICES)]}
    update = draw.choice(list(Update))
    decisions = Decisions(groups, window=draw.choice([1, 2, 4]), act_slots=draw.choice([1, 2, 3]), update=update)
    graph = lower(layers, decisions)
    assert parse_graph(print_graph(graph)) == graph
    curve = memory_over_time(layers, decisions, graph, simulate(graph, lambda op: 10))
    assert curve.peak_bytes == estimate_memory(layers, decisions).hbm_bytes
    edges = [e for e in graph.edges if ".s" in e.src or ".s" in e.dst]
    for edge in draw.sample(edges, min(len(edges), 12)):
        assert check(graph.with_(edges=tuple(e for e in graph.edges if e is not edge))), f"{edge} is not needed"


@pytest.mark.null
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 5)])
def test_the_solver_counts_the_same_memory(sizes):
    """Of every option that is retained, recomputed or moved; places of moved values are counted as if all moved that may."""
    layers, hw = laned(4, 1, sizes), load_profile("h200x1")
    policy = {"slices": 3, "weights": "stream", "state": "host", "layers": {"L01": {"boundary": "host"}}}
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy)
    draw = random.Random(1)
    hbm, host = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    for _ in range(60):
        selection = list(choices.encode(choices.decode([draw.randrange(len(f.options)) for f in choices.families])))
        decisions = choices.decode(selection)
        report = estimate_memory(layers, decisions)
        places = report.hbm["activations on their way"]
        at_most = sum(max(x.at(selection) for x in each) for each in hbm.maxima[-2:])
        offloads = any(decisions.activation(s) is Activation.OFFLOAD for s in layers.layers)
        assert places <= at_most
        assert hbm.needed(selection) - at_most == report.hbm_bytes - places
        assert host.needed(selection) >= report.host_bytes
        assert offloads or host.needed(selection) == report.host_bytes


@pytest.mark.null
def test_one_delivery_and_one_return_for_any_number_of_micro_batches():
    one, four = (lower(x, uniform(x)) for x in (tiny(4, 2), laned(4, 2, (1, 1, 1, 1))))
    compute = {OpKind.PROLOGUE, OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.EPILOGUE}
    assert [op.name for op in one if op.kind not in compute] == [op.name for op in four if op.kind not in compute]
    assert sum(op.kind in compute for op in four) == 4 * sum(op.kind in compute for op in one)


@pytest.mark.null
def test_fp32_sums_are_as_large_as_one_stage_and_only_where_gradients_are_rounded():
    layers = laned()
    assert estimate_memory(layers, uniform(layers)).hbm["gradient sums"] == 4 * (3072 + 64)  # the epilogue's two groups
    exact = replace(layers, grad_dtype="float32")
    assert estimate_memory(exact, uniform(exact)).hbm["gradient sums"] == 0
    assert estimate_memory(tiny(3, 1), uniform(layers)).hbm["gradient sums"] == 0


@pytest.mark.null
def test_boundaries_wait_on_the_host_where_those_of_all_micro_batches_do_not_fit():
    layers, hw = laned(8, 1, (9,) * 8), load_profile("h200x1")
    least = default_decisions(layers, hw, policy={"window": 2, "act": "recompute"})
    budget = estimate_memory(layers, least).hbm_bytes - 8 * 9 * 64 * 4
    tight = default_decisions(layers, hw, hbm_budget=budget)
    assert {str(tight.of(s.name).boundary) for s in layers.layers[1:-1]} == {"host"}
    assert estimate_memory(layers, tight).hbm_bytes <= budget
    lower(layers, tight, hbm_budget=budget)
    with pytest.raises(BudgetError):
        default_decisions(layers, hw, hbm_budget=budget, policy={"boundary": "hbm"})
    with pytest.raises(BudgetError):
        default_decisions(layers, hw, hbm_budget=budget // 8)


@pytest.mark.null
def test_micro_batches_must_use_the_same_layers():
    with pytest.raises(ValueError, match="micro-batch 1 uses other layers"):
        in_lanes([tiny(3, 1), tiny(2, 1)])


# ---- slices ----


@pytest.mark.null
def test_a_batch_is_cut_along_its_rows():
    batch = {"x": torch.arange(10).view(5, 2), "shared": torch.zeros(1, 3), "scalar": torch.tensor(1.0)}
    cut = micro_batches(batch, 2)
    assert [part["x"].shape[0] for part in cut] == [3, 2]
    assert torch.equal(torch.cat([part["x"] for part in cut]), batch["x"])
    assert all(part["shared"] is batch["shared"] and part["scalar"] is batch["scalar"] for part in cut)
    assert len(micro_batches(batch, 99)) == 5
    assert len(micro_batches([batch, batch], 2)) == 4
    with pytest.raises(BatchError, match="x 5, y 4; use slices=1"):
        micro_batches({"x": torch.zeros(5, 2), "y": torch.zeros(4)}, 2)


@pytest.mark.cpu
@pytest.mark.parametrize("slices", [2, 3])
def test_slices_give_the_losses_and_gradients_of_the_whole_batch(slices):
    """Uneven ones too, padded, chunked loss, overlapping updates; and less is needed while a layer runs."""
    model, steps = untied(), [lm_batch("padded", seed=i, batch=5) for i in range(3)]
    whole = accumulate_planned(model, steps, policy={"act": "recompute"})
    policy = {"act": "recompute", "slices": slices, "head_chunks": 2}
    first = replace(whole, losses=whole.losses[:1], grads=whole.grads[:1])
    assert_close(accumulate_planned(model, steps[:1], policy=policy), first)
    assert accumulate_planned(model, steps, policy=policy).losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.cpu
def test_slices_are_a_decision_of_the_plan_and_lower_its_peak(tmp_path):
    peaks, counters = [], []
    for slices in (1, 2, 4):
        policy = {"slices": slices, "act": "recompute"}
        with slidedp.compile(PlainGPT(layers=3), "cpu", optimizer=OPTIMIZER, policy=policy) as plan:
            result = plan.run(lm_batch(batch=4, seq=32))
            assert result.num_tokens == valid(lm_batch(batch=4, seq=32))
            plan.synchronize()
            peaks.append(plan.memory().hbm["running stage's activations"] + plan.memory().hbm["head and loss"])
            counters.append(plan.counters())
            assert plan.decisions.slices == slices
            path = tmp_path / f"{slices}.yaml"
            plan.dump(path)
            loaded = slidedp.load_plan(path)
            assert loaded.layers == replace(plan._spec.layers, groups=loaded.layers.groups)
            assert PlanFile.parse(loaded.to_yaml()) == loaded
            assert lower(loaded.layers, loaded.decisions) == plan._spec.graph
    assert peaks[0] > 1.7 * peaks[1] > 2.8 * peaks[2]
    assert counters[0] == counters[1] == counters[2]
    changes = slidedp.diff(tmp_path / "1.yaml", tmp_path / "2.yaml").changes
    assert ("plan", "slices", 1, 2) in [(c.section, c.where, c.before, c.after) for c in changes]
    with slidedp.compile(PlainGPT(layers=3), "cpu", policy=tmp_path / "2.yaml") as plan:
        plan.run(lm_batch(batch=4, seq=32))
        assert plan._spec.layers.num_lanes == 2
        plan.run(lm_batch(batch=1, seq=32))
        plan.run([lm_batch(batch=4, seq=32), lm_batch(batch=3, seq=16)])
        assert plan._spec.layers.num_lanes == 4


@pytest.mark.null
def test_an_edited_number_of_slices_is_planned_for(tmp_path):
    plan = plan_on_paper("qwen3-0.6b", "h200x1", batch=8, seq=512, solver="rule", cache_dir="")
    exact = plan_on_paper("qwen3-0.6b", "h200x1", batch=8, seq=512, solver="rule", cache_dir="",
                          policy={"slices": 4, "head_chunks": plan.decisions.head_chunks})
    assert exact.predictions.hbm_bytes < plan.predictions.hbm_bytes
    edited = PlanFile.parse(plan.to_yaml().replace("plan: {", "plan: {slices: 4, "))
    assert edited.layers.num_lanes == exact.layers.num_lanes == 4
    memory = [estimate_memory(p.layers, p.decisions).hbm_bytes for p in (edited, exact)]
    assert memory[0] == pytest.approx(memory[1], rel=0.1)
    back = recut(exact.layers, 1)
    assert back.num_lanes == 1
    assert [s.flops for s in back.stages] == [s.flops for s in exact.layers.stages]
    report = slidedp.explain(edited, "slices")
    assert {a.value for a in report.alternatives} >= {"1", "2", "4"}


@pytest.mark.cpu
def test_a_wrong_number_of_slices_is_refused():
    for wrong in (0, "two"):
        with pytest.raises(ValueError, match="slices"):
            slidedp.compile(copy.deepcopy(PlainGPT(layers=2)), "cpu", policy={"slices": wrong}, example=lm_batch())
