"""Clipping on a CUDA device: the norm is torch's, wherever the state lives, and a bad step leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from clipping_cases import Fused, fused_gpt
from delays import options_late_on_gpu
from rank_cases import model as gpt_without_key_biases
from tiny_models import lm_batch
from training import assert_same_tensors, norm_wise, rounded, state_of, train_resident

import slidedp
from slidedp.executor.machine.step import StepResult

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIMIZER = slidedp.AdamW(lr=1e-3)
POLICIES = [{"chunks": 2}, {"state": "hbm", "chunks": 2}, {"layers": {"L01": {"state": "hbm"}}, "grad_slots": 1},
            {"update": "speculative", "chunks": 2}]
MAX_NORM = 0.05


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(model, batches, policy, late=None, **options):
    """Results, and the state after them, of steps with nothing between them that waits."""
    plan = slidedp.compile(copy.deepcopy(model), optimizer=OPTIMIZER, device="cuda", policy=policy, solver="rule", **options)
    if late is not None:
        plan._options = replace(plan._options, delay=late.delay, pause=late.pause, poison=late.poison)
    results: list[StepResult] = [plan.run(batch) for batch in batches]
    state = state_of(plan)
    plan.close()
    return results, state


@pytest.mark.usefixtures("deterministic")
def test_every_home_of_the_state_clips_alike():
    """FP32: the first norm is that of torch on the CPU; norms, losses and weights agree from then on, and all are clipped."""
    model, batches = gpt_without_key_biases(), [lm_batch(seed=i, batch=4, seq=32) for i in range(10)]
    reference = copy.deepcopy(model)
    reference(**batches[0]).backward()
    first = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM).item()
    want, want_state = train(model, batches, {}, compute_dtype=torch.float32, max_grad_norm=MAX_NORM)
    assert want[0].grad_norm == pytest.approx(first, rel=1e-4)
    assert min(r.grad_norm for r in want) > MAX_NORM
    for policy in POLICIES:
        got, state = train(model, batches, policy, compute_dtype=torch.float32, max_grad_norm=MAX_NORM)
        assert [r.loss for r in got] == pytest.approx([r.loss for r in want], rel=1e-5), policy
        assert [r.grad_norm for r in got] == pytest.approx([r.grad_norm for r in want], rel=1e-4), policy
        for name, start in model.named_parameters():
            if start.requires_grad:
                change = want_state.params[name] - start.detach()
                assert norm_wise(state.params[name] - start.detach(), change) < 1e-3, (policy, name)


@pytest.mark.usefixtures("deterministic")
def test_an_unclipped_step_changes_no_bit():
    """A factor of 1, native updates: the bits of no clipping, which needs no norm; BF16 too."""
    model, batches = rounded(gpt_without_key_biases()), [lm_batch(seed=i, batch=4, seq=32) for i in range(4)]
    want, want_state = train(model, batches, {"chunks": 2})
    got, state = train(model, batches, {"chunks": 2}, max_grad_norm=float("inf"))
    assert [r.loss for r in got] == [r.loss for r in want]
    assert_same_tensors(state.params, want_state.params, "params")


@pytest.mark.usefixtures("deterministic")
def test_delays_and_poison_change_no_bit():
    model, batches = rounded(gpt_without_key_biases()), [lm_batch(seed=i, batch=4, seq=32) for i in range(3)]
    for policy in POLICIES:
        _, want = train(model, batches, policy, max_grad_norm=MAX_NORM)
        for seed in range(6):
            _, got = train(model, batches, policy, options_late_on_gpu(seed), max_grad_norm=MAX_NORM)
            assert_same_tensors(got.params, want.params, f"{policy}, seed {seed}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.filterwarnings("ignore:step 3")
def test_a_step_that_is_not_finite_leaves_no_trace(policy):
    plan = slidedp.compile(fused_gpt(), optimizer=OPTIMIZER, device="cuda", policy=policy, solver="rule", max_grad_norm=1.0)
    for seed in range(2):
        plan.run(lm_batch(seed=seed))
    before = state_of(plan)
    try:
        Fused.set("inf backward")
        result = plan.run(lm_batch(seed=2))
        assert result.skipped
        after = state_of(plan)
    finally:
        Fused.reset()
    for part in ("params", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(after, part), getattr(before, part), part)
    assert not plan.run(lm_batch(seed=3)).skipped
    plan.close()


def test_bf16_follows_the_resident_trainer():
    """A recipe of BF16 weights and gradients that clips nothing and one that is only asked for the norm: the same losses."""
    model, batches = rounded(gpt_without_key_biases()), [lm_batch(seed=i, batch=4, seq=32) for i in range(5)]
    want = train_resident(model, batches, OPTIMIZER, "cuda").losses
    got, _ = train(model, batches, {"state": "hbm"}, max_grad_norm=float("inf"))
    assert [r.loss for r in got] == pytest.approx(want, rel=2e-3)
