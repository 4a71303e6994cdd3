"""Activation choices of whole plans: any mix of them gives eager's bits, whatever the timing; and what their graphs say."""

from __future__ import annotations

import random

import pytest
import torch
from delays import each_kind_slow
from test_passes import tiny, uniform
from test_saved import DROPOUT
from tiny_models import FAMILIES, PlainGPT, family, lm_batch
from training import assert_same_bits, loss_of_output, state_of, train_plainly, train_planned

import slidedp
from slidedp.compiler.decisions import Activation, Boundary, Decisions, GroupDecision
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.ops import OpKind
from slidedp.compiler.text import parse_graph, print_graph
from slidedp.executor.devices.parcels import Parcel
from slidedp.executor.options import MachineOptions
from slidedp.passes.pipeline import lower
from slidedp.passes.verify import check

OPTIMIZER = slidedp.AdamW(lr=1e-2)
CHOICES = [(act, boundary) for act in Activation for boundary in Boundary]


pytestmark = pytest.mark.usefixtures("one_thread")


def mixed(seed, num_layers):
    """A choice for every layer, drawn at random, and two other counts that decide where things are."""
    draw = random.Random(seed)
    layers = {f"L{i}": dict(zip(("act", "boundary"), map(str, draw.choice(CHOICES)), strict=True)) for i in range(num_layers)}
    return {"layers": layers, "window": draw.choice([1, 2, 9]), "act_slots": draw.choice([1, 2])}


@pytest.mark.cpu
@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_choices_give_eagers_bits(name):
    """Two steps of a random mix, with dropout where the family has it."""
    torch.manual_seed(5)
    model, batches = family(name, **DROPOUT.get(name, {})), [lm_batch("padded", seed=i) for i in (1, 2)]
    rng = torch.get_rng_state()
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    torch.set_rng_state(rng)
    assert_same_bits(train_planned(model, batches, OPTIMIZER, update_kernel="torch", policy=mixed(name, 4)), want)


EVERYWHERE = [{"act": str(act), "boundary": str(boundary), "act_slots": 1 + i % 2} for i, (act, boundary) in enumerate(CHOICES)]


@pytest.mark.cpu
def test_each_choice_everywhere_gives_eagers_bits():
    """On a stack that is deep enough for every place to be used twice, with dropout, and a step whose batch is larger."""
    model, batches = PlainGPT(width=16, layers=5, dropout=0.3), [lm_batch(seed=1), lm_batch(seed=2, batch=3), lm_batch(seed=3)]
    torch.manual_seed(5)
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    for policy in EVERYWHERE:
        torch.manual_seed(5)
        assert_same_bits(train_planned(model, batches, OPTIMIZER, update_kernel="torch", policy={"window": 2, **policy}), want)


def plan_of(policy, options=MachineOptions()):  # noqa: B008  (frozen)
    torch.manual_seed(0)
    plan = slidedp.compile(PlainGPT(width=16, layers=5, dropout=0.2), "cpu", optimizer=OPTIMIZER, policy=policy)
    plan._options = options
    return plan


def digest_of(plan):
    torch.manual_seed(1)
    losses = [plan.run(lm_batch(seed=t)).loss for t in range(3)]
    trained = state_of(plan)
    trained.losses = losses
    return trained.digest()


def train(plan):
    with plan:
        return digest_of(plan)


RACES = [
    {"act": "offload", "act_slots": 1, "window": 2},
    {"act": "offload", "boundary": "host", "window": 1},
    {"boundary": "host", "layers": {"L1": {"act": "offload"}, "L3": {"act": "retain"}, "L4": {"act": "recompute"}}},
]


@pytest.mark.cpu
@pytest.mark.parametrize("policy", RACES, ids=str)
def test_delays_change_no_bit(policy):
    """Copies out or back, or any other kind of op, always late; what has been freed or is free is filled with NaN."""
    undisturbed = plan_of({"act": "recompute", "window": 2})
    digest = train(undisturbed)
    assert train(plan_of(policy)) == digest
    with plan_of(policy) as plan:
        got = each_kind_slow(plan, lm_batch(seed=0), digest_of)
    assert {OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD} <= set(got)
    assert {kind for kind, of in got.items() if of != digest} == set()


@pytest.mark.cpu
@pytest.mark.parametrize(("src", "dst"), [("act_offload", "fwd"), ("act_reload", "bwd"), ("act_offload", "act_reload"),
                                          ("bwd", "act_reload")])  # fmt: skip
def test_a_missing_edge_is_found_by_delays(src, dst):
    """The test above can fail: without one sort of edge, and the op that it waits for late, the bits are others."""
    late = MachineOptions(delay=lambda name: 0.02 * name.startswith(src), poison=True)
    policy = {"act": "offload", "act_slots": 1, "window": 2}
    digest = train(plan_of(policy))
    plan = plan_of(policy, late)
    plan._start(lm_batch(seed=0))
    spec = plan._current
    cut = tuple(e for e in spec.graph.edges if not (e.src.startswith(src) and e.dst.startswith(dst)))
    assert len(cut) < len(spec.graph.edges)
    assert check(spec.graph.with_(edges=cut))
    object.__setattr__(spec, "graph", spec.graph.with_(edges=cut))
    try:
        outcome = train(plan)
    except Exception as e:  # the backward has found nothing, or NaN
        outcome = repr(e)
    assert outcome != digest


@pytest.mark.cpu
def test_only_the_smallest_stays_where_a_little_is_missing():
    """A kernel may save a few bytes more than the tracer knew of: attention's statistics, say. The views are of one storage."""
    small, large, middle = torch.randn(3), torch.randn(1000), torch.randn(200)
    device, size = torch.device("cpu"), 4096 + 1024
    parcel, buffer = Parcel([small, large[:10], middle, large], device, size), torch.empty(size, dtype=torch.uint8)
    parcel.pack(buffer, lambda target, source: target.copy_(source))
    assert [parcel.start(t) for t in (small, large, middle)] == [None, 0, 4096]
    assert parcel.num_bytes == size
    assert torch.equal(buffer[:4000].view(torch.float32), large)
    assert torch.equal(buffer[4096:4896].view(torch.float32), middle)


# ---- graphs ----


@pytest.mark.null
@pytest.mark.parametrize("seed", range(6))
def test_every_mix_is_sound_and_every_edge_is_needed(seed):
    layers = tiny(6, 1 + seed % 2)
    draw = random.Random(seed)
    choices = {g.name: draw.choice(CHOICES) for g in layers.groups}
    groups = {name: GroupDecision(act=act, boundary=boundary) for name, (act, boundary) in choices.items()}
    decisions = Decisions(groups, window=draw.choice([1, 2, 4]))
    graph = lower(layers, decisions)
    assert parse_graph(print_graph(graph)) == graph
    for edge in graph.edges:
        if "act_" in edge.src + edge.dst:
            assert check(graph.with_(edges=tuple(e for e in graph.edges if e is not edge))), f"{edge} is not needed"


@pytest.mark.null
def test_bytes_that_move_and_memory_that_waits():
    layers = tiny(6, 1)
    graph = lower(layers, uniform(layers, act=Activation.OFFLOAD, boundary=Boundary.HOST))
    moved = {kind: sum(op.bytes for op in graph if op.kind is kind) for kind in (OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD)}
    assert set(moved.values()) == {4 * (512 + 512)}  # the last two layers' stay; 256 and 64 bytes, rounded up
    memory = estimate_memory(layers, uniform(layers, act=Activation.OFFLOAD, boundary=Boundary.HOST))
    assert memory.host["offloaded activations"] == 4 * (512 + 512)
    assert memory.hbm["activations on their way"] == 2 * 2 * (512 + 512)
    assert memory.hbm["boundary activations"] == 2 * 64, "the gradients that the last layer's backward reads and writes"
    retained = estimate_memory(layers, uniform(layers, act=Activation.RETAIN))
    assert retained.hbm["retained activations"] == 6 * 256
    assert not any(op.kind is OpKind.RECOMPUTE for op in lower(layers, uniform(layers, act=Activation.RETAIN)))
