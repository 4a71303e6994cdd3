"""Validation on a CUDA device: the same bits, and never two plans' buffers at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from test_gpu import qwen3, token_batches
from tiny_models import PlainGPT, lm_batch
from training import rounded
from validation_cases import on_trial

import slidedp
from slidedp.compiler.planfile.verdict import DEFAULT, PLAN

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIMIZER = slidedp.AdamW(lr=1e-3)
HBM = {"state": "hbm"}


def train(model, batches, **options):
    plan = slidedp.compile(copy.deepcopy(model), optimizer=OPTIMIZER, device="cuda", measure=False, cache_dir="", **options)
    with plan:
        losses = [plan.run(batch).loss for batch in batches]
        params = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    return losses, params, plan.validation


@pytest.mark.parametrize("kept", [PLAN, DEFAULT])
def test_no_bit_depends_on_what_ran_when(kept):
    """Routes, activations and slots differ; of two groups that live in HBM in both plans one stays, one crosses the host."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model, batches = rounded(PlainGPT(width=64)), [lm_batch(seed=i, batch=4, seq=32) for i in range(8)]
        homes = {"layers": {"L00": HBM, "L01": HBM}}
        want = train(model, batches, policy=homes, validate=False)
        plan = {"source": "cast", "delivery_chunks": 3, "act": "offload", "window": 2,
                "layers": {"L00": HBM, "L01": HBM | {"return_chunks": 2}}}
        with on_trial(plan, lambda step, of_plan: 2.0 if of_plan is (kept == DEFAULT) else 1.0):
            got = train(model, batches, policy=homes, validate=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert got[2].kept == kept
    assert got[0] == want[0]
    assert all(torch.equal(got[1][n], p) for n, p in want[1].items())


def test_hbm_of_one_plan_at_a_time():
    """The trial needs no more than the larger of the two plans alone."""
    model, batches = qwen3("0.6b").cpu(), list(token_batches(8, batch=2, seq=256))
    large = HBM | {"weights": "hold", "act": "retain"}
    peaks = []
    for policy in ({}, large):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(model, batches[:3], policy=policy, validate=False)
        peaks.append(torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with on_trial(large, lambda step, of_plan: 1.0):
        _, _, verdict = train(model, batches, validate=2)
    assert verdict.kept == PLAN
    assert torch.cuda.max_memory_allocated() <= max(peaks) * 1.02
