"""Residency: weights held in HBM between their uses, and optimizer state that lives there, are the same training."""

from __future__ import annotations

import copy
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from delays import Delays
from test_bad_input import Exploding, regression, squared_error
from test_bitwise import Odd, frozen_gpt
from tiny_models import PlainGPT, family, lm_batch
from torch import nn
from training import loss_of_output, norm_wise, rounded, state_of, train_plainly

import slidedp
from slidedp.compiler import residency
from slidedp.compiler.decisions import Decisions, GroupDecision, StateHome
from slidedp.compiler.layergraph import Group, Param, cut_chunks
from slidedp.compiler.ops import OpKind
from slidedp.executor.devices.backend import CpuBackend
from slidedp.executor.machine.step import NonFiniteLoss
from slidedp.executor.optim.adam import CpuAdam, NonFiniteGradient
from slidedp.executor.optim.gpu_adam import DeviceChunk, DeviceState, GpuAdam
from slidedp.executor.options import MachineOptions
from slidedp.executor.state.host_state import HostState

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)
HBM = {"state": "hbm"}
PLACES = {
    "all": HBM,
    "some": {"layers": {"L01": HBM, "prologue": HBM}},
    "held": {"weights": "hold"},
    "mixed": {"weights": "hold", "layers": {"L00": HBM, "L02": {"weights": "stream"}}},
}


def train(model, batches, after=None, run=MachineOptions(update_kernel="torch"), **options):  # noqa: B008  (frozen)
    """As train_planned, with nothing between the steps that waits."""
    plan = slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, **options)
    plan._options = run
    losses = []
    with plan:
        for batch in batches:
            losses.append(plan.run(batch).loss)
            if after is not None:
                after(plan)
        return replace(state_of(plan), losses=losses, grads=[])


@pytest.fixture(autouse=True)
def cut_updates(monkeypatch):
    """As of groups so large that one rank cuts their updates, into as many chunks as the policy says."""
    monkeypatch.setattr(residency, "WHOLE_UPDATE", 1)


def test_small_updates_are_not_cut(monkeypatch):
    monkeypatch.undo()
    group, cut = Group("L00", 2000, 2000, ("L00",), ()), GroupDecision(return_chunks=4)
    at_home, in_hbm = cut, replace(cut, state=StateHome.HBM)
    assert [len(residency.update_chunks(group, d, world)) for d in (at_home, in_hbm) for world in (1, 2)] == [4, 4, 1, 4]
    monkeypatch.setattr(residency, "WHOLE_UPDATE", 700)
    assert residency.update_chunks(group, in_hbm, 1) == cut_chunks(2000, 3, 1)


@pytest.fixture(scope="module")
def on_host():
    """Digest of four steps with all state on the host."""
    torch.manual_seed(0)
    return train(PlainGPT(), four_batches()).digest()


def four_batches():
    return [lm_batch(seed=i) for i in range(4)]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("route", [{"chunks": 1}, {"chunks": 5, "window": 1, "source": "cast"}], ids=["whole", "chunks"])
def test_the_same_bits_with_torch_arithmetic(on_host, places, route):
    """Losses, weights and moments equal those of state on the host, bit for bit, whichever groups are where."""
    assert train(PlainGPT(), four_batches(), policy=route | PLACES[places]).digest() == on_host


def odd():
    torch.manual_seed(0)
    return Odd(), [{"x": torch.randn(4, 5), "target": torch.randn(4, 3)} for _ in range(4)]


MODELS = {
    "frozen": lambda: (frozen_gpt(), four_batches()),
    "odd": odd,
    "experts": lambda: (family("qwen3_moe"), [lm_batch("padded", seed=i, batch=1, seq=6) for i in range(4)]),
}


@pytest.mark.parametrize("name", MODELS)
def test_frozen_unused_and_shared_parameters(name):
    """And experts that get no token in some step: their step counts stand still."""
    model, batches = MODELS[name]()
    assert train(model, batches, policy=HBM | {"chunks": 2}).digest() == train(model, batches, policy={"chunks": 2}).digest()


def test_bf16_weights_and_gradients():
    model, batches = rounded(PlainGPT()), four_batches()
    want = train(model, batches, compute_dtype=torch.bfloat16)
    assert train(model, batches, compute_dtype=torch.bfloat16, policy=HBM).digest() == want.digest()


def test_fused_update_over_twenty_steps():
    """The kernel that runs on a GPU: losses within 1e-6 of those of state on the host, and the same weights but for rounding."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(20)]
    for block in model.blocks:
        block.qkv.bias.requires_grad_(False)  # those of keys have no gradient but rounding noise, which Adam blows up
    native = MachineOptions(update_kernel="native")
    host, hbm = (train(model, batches, run=native, policy=policy) for policy in ({}, HBM))
    assert host.digest() != hbm.digest()
    assert max(abs(a - b) / b for a, b in zip(hbm.losses, host.losses, strict=True)) < 1e-6
    for name, start in model.named_parameters():
        assert norm_wise(hbm.params[name] - start, host.params[name] - start) < 1e-3, name


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_fused_updates_of_parameters_that_come_and_go(grad_dtype):
    """Each is at its own step, and one without a gradient stays what it is; a gradient that is not finite changes none."""
    shapes = {"a.weight": (4, 16), "a.norm": (64,), "b.weight": (8, 8), "b.norm": (64,)}
    params = tuple(Param((name,), shape, 64 * i) for i, (name, shape) in enumerate(shapes.items()))
    group, optimizer = Group("L00", 256, 256, ("L00",), params), slidedp.AdamW(lr=1e-2, no_decay=("norm",))
    decisions = Decisions({"L00": GroupDecision(state=StateHome.HBM)})
    state = HostState((group,), decisions, rank=0, world_size=1, compute_dtype=torch.float32, grad_dtype=grad_dtype, num_words=1,
                      exchange=lambda x: [x], barrier=lambda: None)  # fmt: skip
    with closing(state):
        cpu = CpuAdam(state, (group,), optimizer, kernel="torch")
        generator = torch.Generator().manual_seed(0)
        own = DeviceState(torch.randn(256, generator=generator), torch.zeros(256), torch.zeros(256))
        plain = {name: nn.Parameter(own.master[64 * i : 64 * i + 64].clone()) for i, name in enumerate(shapes)}
        reference = torch.optim.AdamW([{"params": [p], "weight_decay": 0.0 if "norm" in name else optimizer.weight_decay}
                                       for name, p in plain.items()], lr=1e-2, betas=optimizer.betas, eps=optimizer.eps)
        fused = GpuAdam(cpu, [DeviceChunk("L00", 0, 256, own)], CpuBackend(), exact=False,
                        workspace=0 if grad_dtype is torch.float32 else 256)
        weights = torch.empty(256)
        for step in range(1, 9):
            gradient = torch.randn(256, generator=generator).to(grad_dtype)
            present = np.array([True, step % 2 == 0, step != 3, step > 4])
            for i, p in enumerate(plain.values()):
                p.grad = gradient[64 * i : 64 * i + 64].float() if present[i] else None
            reference.step()
            fused.update("L00", 0, gradient, weights, step, present)
            torch.testing.assert_close(own.master, torch.cat([p.detach() for p in plain.values()]), rtol=1e-6, atol=1e-7)
            assert torch.equal(weights, own.master)
        before, gradient[130] = own.master.clone(), math.inf
        fused.update("L00", 0, gradient, weights, 9, np.ones(4, dtype=bool))
        assert torch.equal(own.master, before)
        with pytest.raises(NonFiniteGradient, match=r"b\.weight"):
            fused.require_finite(fused.norms(), 9)


def test_what_moves():
    """Nothing of resident groups crosses the link; held ones are delivered once a step and return as ever."""
    counts = {}
    for name, policy in {"host": {}, "hbm": HBM, "hold": {"weights": "hold"}}.items():
        plan = slidedp.compile(PlainGPT(layers=6), "cpu", example=lm_batch(), policy=policy | {"window": 2})
        with plan:
            plan.run(lm_batch())
            plan.synchronize()
            counts[name] = plan.counters()
            host, planned = plan._machine.state.bytes_by_place(), plan.memory().host
            assert [host[k] for k in ("master", "moments", "shadow", "grads")] == [
                planned[k] for k in ("master weights", "moments", "shadow", "gradients")]
            assert (host["moments"] == 0) is (name == "hbm")
            weights = sum(4 * g.numel for g in plan._spec.layers.groups)
    assert set(counts["hbm"]) == {"gpu_update"}
    assert counts["hbm"]["gpu_update"] == counts["host"]["cpu_update"] == counts["hold"]["cpu_update"]
    assert counts["hold"]["h2d"] == weights < counts["host"]["h2d"]
    assert counts["hold"]["d2h"] == counts["host"]["d2h"]


def test_random_delays_change_no_bit(on_host):
    """Released slots hold NaN; every kind of op is the slow one in some run."""
    policies = [HBM | {"chunks": 2}, PLACES["mixed"] | {"chunks": 3, "window": 1, "grad_slots": 1}]
    model = PlainGPT()
    for policy in policies:
        with slidedp.compile(copy.deepcopy(model), "cpu", example=lm_batch(), policy=policy) as plan:
            kinds = {op.name: op.kind for op in plan._spec.graph}
        slowed = set()
        for turn in range(len(set(kinds.values()))):
            delays = Delays(kinds, turn, seed=turn)
            got = train(model, four_batches(), run=MachineOptions("torch", delay=delays, poison=True), policy=policy)
            assert got.digest() == on_host, (policy, delays.slow)
            slowed |= delays.slowed
        assert slowed == set(kinds.values())
        assert OpKind.GPU_UPDATE in slowed


# ---- reading and writing the model ----


@pytest.mark.parametrize("name", ["torch", "native"])
def test_weights_written_between_steps_count(name):
    model = PlainGPT()
    initial = copy.deepcopy(model.state_dict())
    with slidedp.compile(model, "cpu", optimizer=OPTIMIZER, policy=PLACES["mixed"], update_kernel=name) as plan:
        first = plan.run(lm_batch()).loss
        plan.run(lm_batch())
        plan.model.load_state_dict(initial)
        assert plan.evaluate(lm_batch()) == first
        assert plan.run(lm_batch()).loss == first
        assert plan.run(lm_batch()).loss != first


def test_evaluation_and_other_shapes_between_steps():
    """Specialisations and evaluations, in turns, with and without reading the model."""
    shapes = [("none", 2), ("padded", 2), ("none", 2), ("padded", 2)]
    model, batches = family("qwen3"), [lm_batch(padding, i, batch) for i, (padding, batch) in enumerate(shapes)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    evals = {}
    for name, policy in {"host": {}, "hbm": HBM}.items():
        seen = evals[name] = []
        got = train(model, batches, policy=policy, after=lambda plan, seen=seen: seen.append(plan.evaluate(batches[1])))
        assert got.losses == want.losses
        assert all(torch.equal(p, got.params[n]) for n, p in want.params.items())
    assert evals["hbm"] == evals["host"]


def test_the_model_is_current_whenever_it_is_read():
    """state_dict after every step, after a pause in which nothing was read, and of the closed model."""
    model, batches = family("qwen3"), four_batches()
    want, got = [], []
    train_plainly(model, batches, OPTIMIZER, loss_of_output, after=lambda m: want.append(copy.deepcopy(m.state_dict())))
    with slidedp.compile(model, "cpu", optimizer=OPTIMIZER, policy=HBM, update_kernel="torch") as plan:
        for i, batch in enumerate(batches):
            plan.run(batch)
            if i != 1:
                got.append(copy.deepcopy(plan.model.state_dict()))
        plan.run(batches[0])
    for i, mine in zip((0, 2, 3), got, strict=True):
        assert list(mine) == list(want[i])
        assert all(torch.equal(mine[n], want[i][n]) for n in mine), i
    assert not torch.equal(model.state_dict()["lm_head.weight"], got[-1]["lm_head.weight"]), "close shows the last step"


def test_moments_go_out_and_come_back():
    """Read into the host's layout and written into another plan's HBM, however that one cuts its chunks."""
    model, batches = PlainGPT(), four_batches()
    want = train(model, batches, policy=HBM)
    start = slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, policy=HBM, update_kernel="torch")
    with start as plan:
        for batch in batches[:2]:
            plan.run(batch)
        half, machine = state_of(plan), plan._machine
        saved = {name: [torch.zeros(g.num_trainable) for _ in range(2)] for name, g in machine.resident.groups.items()}
        for name, moments in saved.items():
            machine.resident.read_moments(name, *moments)
        steps = machine.adam.steps
    again = slidedp.compile(plan._model, "cpu", optimizer=OPTIMIZER, policy=HBM | {"chunks": 3}, example=batches[0],
                            update_kernel="torch")
    with again as plan:
        for name, moments in saved.items():
            plan._machine.resident.write_moments(name, *moments)
        plan._machine.adam.load_steps(steps)
        assert state_of(plan).digest() == half.digest()
        for batch in batches[2:]:
            plan.run(batch)
        assert replace(state_of(plan), losses=want.losses).digest() == want.digest()


# ---- what is not finite ----


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_a_loss_that_is_not_finite_changes_nothing(kernel):
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 1)}
    with slidedp.compile(regression(), "cpu", loss_fn=squared_error, policy=HBM, update_kernel=kernel) as plan:
        plan.run(batch)
        before = state_of(plan).digest()
        with pytest.raises(NonFiniteLoss, match="nothing has been updated"):
            plan.run({**batch, "x": batch["x"] * float("nan")})
        assert state_of(plan).digest() == before
        plan.run(batch)
        assert state_of(plan).digest() != before


@pytest.mark.parametrize("kernel", ["torch", "native"])
@pytest.mark.parametrize("how", ["synchronize", "close"])
def test_a_gradient_that_is_not_finite(kernel, how):
    """It is named, also when it is the last step's and nobody asks but close; what is not finite has moved nothing."""
    model = nn.Sequential(nn.Linear(4, 8), Exploding(), nn.Linear(8, 8), nn.Linear(8, 1))
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 1)}
    plan = slidedp.compile(model, "cpu", loss_fn=squared_error, policy=HBM | {"chunks": 1}, update_kernel=kernel)
    plan.run(batch)
    before = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    model[1].armed = True
    plan.run(batch)  # its loss is finite
    with pytest.raises(NonFiniteGradient) as caught:
        getattr(plan, how)()
    assert "1.linear" in str(caught.value)
    assert "updated before" in " ".join(caught.value.__notes__)
    plan.close()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert {"3.weight", "3.bias"} <= moved, "what was updated in HBM is in the closed model"
    assert not {n for n in moved if n.startswith("1.")}
