"""On a CUDA device: the same recipe as a GPU-resident trainer, the same bits under delays, two ranks sharing the GPU."""

from __future__ import annotations

import copy
import random

import pytest
import rank_cases
import torch
from tiny_models import PlainGPT, family, lm_batch
from training import norm_wise

import slidedp
from slidedp.executor.machine import MachineOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIMIZER = slidedp.AdamW(lr=1e-3)


def train_resident(model, batches):
    """BF16 weights and gradients, FP32 masters and moments, all on the GPU: the recipe that a plan streams."""
    model = copy.deepcopy(model).cuda().to(torch.bfloat16)
    params = list(model.parameters())
    masters = [p.detach().float().clone() for p in params]
    names = [n for n, _ in model.named_parameters()]
    groups = [{"params": [m], "weight_decay": OPTIMIZER.weight_decay if OPTIMIZER.decays(n) else 0.0}
              for n, m in zip(names, masters, strict=True)]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)
    losses = []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        out = model(**{k: v.cuda() for k, v in batch.items()})
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        losses.append(loss.item())
        for p, m in zip(params, masters, strict=True):
            m.grad = p.grad.float()
        adam.step()
        with torch.no_grad():
            for p, m in zip(params, masters, strict=True):
                p.copy_(m)
    return losses, {n: m.cpu() for n, m in zip(names, masters, strict=True)}


def train_streamed(model, batches, options=None, **kwargs):
    plan = slidedp.compile(copy.deepcopy(model), optimizer=OPTIMIZER, device="cuda", **kwargs)
    if options:
        plan._options = options
    losses = [plan.run(batch).loss for batch in batches]
    params = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    plan.close()
    return losses, params


def rounded(model):
    """Weights that BF16 holds exactly, so that both trainers start from the same ones."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    return model


@pytest.mark.parametrize("make", [PlainGPT, lambda: family("qwen3")], ids=["gpt", "qwen3"])
def test_trajectory_of_the_resident_trainer(make):
    model, batches = rounded(make()), [lm_batch(seed=i % 4, batch=8, seq=32) for i in range(20)]
    want, want_params = train_resident(model, batches)
    got, got_params = train_streamed(model, batches)
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-2
    assert abs(got[0] - want[0]) < 1e-3 * want[0]
    start = dict(model.named_parameters())
    change = [(n, norm_wise(got_params[n] - start[n].detach(), want_params[n] - start[n].detach())) for n in want_params]
    assert sorted(c for _, c in change)[len(change) // 2] < 0.05, change


def test_delays_and_poison_change_no_bit():
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batches = rounded(PlainGPT(width=64)), [lm_batch(seed=i, batch=4, seq=32) for i in range(3)]
    want = train_streamed(model, batches, policy={"window": 2, "chunks": 3})
    for seed in range(20):
        rng = random.Random(seed)
        options = MachineOptions(delay=lambda name, rng=rng: rng.random() * 2e-3 * (rng.random() < 0.3), poison=True)
        policy = {"window": 2, "chunks": 3, "source": "cast" if seed % 2 else "shadow"}
        got = train_streamed(model, batches, options, policy=policy)
        assert got[0] == want[0]
        assert all(torch.equal(got[1][n], p) for n, p in want[1].items())
    torch.use_deterministic_algorithms(False)


def test_two_ranks_share_the_gpu(run_ranks):
    """Over gloo, staged: NCCL refuses two ranks on one device."""
    one = run_ranks(rank_cases.on_the_gpu, 1, timeout=200)[0].value
    two = [r.value for r in run_ranks(rank_cases.on_the_gpu, 2, timeout=200)]
    for value in two:
        assert value["losses"] == pytest.approx(one["losses"], rel=2e-3)
    assert two[0]["digests"] == two[1]["digests"]
    assert len(set(two[0]["digests"])) == 1
