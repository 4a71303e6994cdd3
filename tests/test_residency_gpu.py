"""Residency on a CUDA device: the fused update, which never waits, copies to and from the masters, memory as planned."""

from __future__ import annotations

import copy

import pytest
import torch
from delays import options_late_on_gpu
from test_bad_input import Exploding, squared_error
from test_gpu import qwen3, stream, token_batches
from tiny_models import PlainGPT, lm_batch
from torch import nn
from training import norm_wise, rounded, train_resident

import slidedp
from slidedp.executor.optim.adam import NonFiniteGradient
from slidedp.executor.options import MachineOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIMIZER = slidedp.AdamW(lr=1e-3)
HBM = {"state": "hbm"}
MIXED = {"weights": "hold", "layers": {"L00": HBM, "L02": {"weights": "stream"}}}


def train(model, batches, policy, options=MachineOptions(), **kwargs):  # noqa: B008  (frozen)
    plan = slidedp.compile(copy.deepcopy(model), optimizer=OPTIMIZER, device="cuda", policy=policy, **kwargs)
    plan._options = options
    losses = [plan.run(batch).loss for batch in batches]
    params = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    plan.close()
    return losses, params


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_fp32_losses_over_twenty_steps():
    """The same losses within 1e-6 with the state on the host, in HBM, and some of each; weights but for rounding."""
    model, batches = PlainGPT(width=64), [lm_batch(seed=i, batch=4, seq=32) for i in range(20)]
    for block in model.blocks:
        block.qkv.bias.requires_grad_(False)
    want, want_params = train(model, batches, {}, compute_dtype=torch.float32)
    for policy in (HBM | {"chunks": 3}, MIXED | {"chunks": 2}, {"weights": "hold"}):
        got, params = train(model, batches, policy, compute_dtype=torch.float32)
        assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-6, policy
        for name, start in model.named_parameters():
            if start.requires_grad:
                assert norm_wise(params[name] - start.detach(), want_params[name] - start.detach()) < 1e-3, (policy, name)


@pytest.mark.usefixtures("deterministic")
def test_delays_and_poison_change_no_bit():
    model, batches = rounded(PlainGPT(width=64)), [lm_batch(seed=i, batch=4, seq=32) for i in range(3)]
    for policy in (HBM | {"chunks": 2}, MIXED | {"chunks": 3, "window": 1, "grad_slots": 1}):
        want = train(model, batches, policy)
        for seed in range(10):
            got = train(model, batches, policy, options_late_on_gpu(seed))
            assert got[0] == want[0], (policy, seed)
            assert all(torch.equal(got[1][n], p) for n, p in want[1].items()), (policy, seed)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite(bad, monkeypatch):
    """Noticed by the fused path's norms, without waiting for the device; nothing of that layer has moved."""
    monkeypatch.setattr("test_bad_input.Explodes.backward", staticmethod(lambda ctx, grad: grad * bad))
    model = nn.Sequential(nn.Linear(4, 8), Exploding(), nn.Linear(8, 8), nn.Linear(8, 1))
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 1)}
    plan = slidedp.compile(model, loss_fn=squared_error, policy=HBM | {"chunks": 1}, device="cuda")
    plan.run(batch)
    before = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    model[1].armed = True
    plan.run(batch)
    with pytest.raises(NonFiniteGradient, match=r"1\.linear"):
        plan.synchronize()
    plan.close()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {"3.weight", "3.bias"} <= moved
    assert not {n for n in moved if n.startswith("1.")}


def test_reading_and_writing_the_model():
    model, batches = rounded(PlainGPT(width=64)), [lm_batch(seed=i, batch=4, seq=32) for i in range(3)]
    initial = copy.deepcopy(model.state_dict())
    with slidedp.compile(model, optimizer=OPTIMIZER, device="cuda", policy=HBM) as plan:
        first = plan.run(batches[0]).loss
        plan.run(batches[1])
        plan.model.load_state_dict(initial)
        assert plan.evaluate(batches[0]) == pytest.approx(first, rel=1e-5)
        plan.run(batches[2])
        last = copy.deepcopy(plan.model.state_dict())
    assert all(torch.equal(p, last[n]) for n, p in model.state_dict().items())
    assert not torch.equal(last["tok.weight"], initial["tok.weight"])


def test_qwen3_06b_all_in_hbm_follows_the_resident_trainer():
    """20 steps, BF16: only atomics' order and the update's rounding differ. Nothing crosses the link; memory is as planned."""
    batches = token_batches(20)
    want = train_resident(qwen3("0.6b"), batches, slidedp.AdamW(lr=5e-5), "cuda").losses
    got, _ = stream(qwen3("0.6b").to("cpu", torch.float32), batches, slidedp.AdamW(lr=5e-5), policy=HBM)
    worst = max(abs(a - b) / b for a, b in zip(got, want, strict=True))
    print(f"resident {want[0]:.4f} .. {want[-1]:.4f}; largest relative difference {worst:.1e}")
    assert worst < 2e-3
