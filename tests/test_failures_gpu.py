"""Failures on CUDA devices: in the middle of a step, of the device itself, and of one rank while others are in collectives."""

from __future__ import annotations

import gc

import failure_cases
import pytest
import torch
from tiny_models import PlainGPT, lm_batch

import slidedp
from slidedp.executor.stages.stages import StageRunner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIMIZER = slidedp.AdamW(lr=1e-3)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_failed_plan_that_is_closed_keeps_nothing_on_the_device(monkeypatch, stage):
    """Whoever keeps it, its results or its error."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    plan = slidedp.compile(PlainGPT(width=256), device="cuda", optimizer=OPTIMIZER, policy={"act": "retain"}, measure=False)
    kept = [plan, plan.run(lm_batch())]
    whole = getattr(StageRunner, stage)

    def fail(self, name, *args):
        if name == "L01":
            del self, args  # this frame is not the plan's
            raise RuntimeError("this layer is broken")
        return whole(self, name, *args)

    monkeypatch.setattr(StageRunner, stage, fail)
    with pytest.raises(RuntimeError, match="this layer is broken") as raised:
        kept.append((plan.run(lm_batch()), plan.synchronize()))
    kept.append(raised.value)
    plan.close()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    assert len(kept) == 3


def test_two_plans_with_budgets_in_turns():
    """Each goes on as it would alone, also when the other one has been closed; the limit is the sum, and goes with the last."""
    def compiled(seed):
        torch.manual_seed(seed)
        return slidedp.compile(PlainGPT(), device="cuda", optimizer=OPTIMIZER, measure=False, hbm_budget="4GiB")

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.empty_cache()  # the limit is for all that the process has
    want = []
    for seed in range(2):
        with compiled(seed) as plan:
            want.append([plan.run(lm_batch(seed=step)).loss for step in range(4)])
    first, second = (compiled(seed) for seed in range(2))
    got = [[], []]
    for step in range(2):
        got[0].append(first.run(lm_batch(seed=step)).loss)
        got[1].append(second.run(lm_batch(seed=step)).loss)
    total = torch.cuda.mem_get_info()[1]
    assert torch.cuda.get_per_process_memory_fraction() * total == pytest.approx(8 << 30, rel=1e-3)
    got[0] += [first.run(lm_batch(seed=step)).loss for step in range(2, 4)]
    first.close()
    assert torch.cuda.get_per_process_memory_fraction() * total == pytest.approx(4 << 30, rel=1e-3)
    got[1] += [second.run(lm_batch(seed=step)).loss for step in range(2, 4)]
    second.close()
    assert torch.cuda.get_per_process_memory_fraction() == 1
    assert got == want


def test_a_failed_plan_that_is_still_open_changes_no_bit_of_another(monkeypatch):
    torch.use_deterministic_algorithms(True, warn_only=True)

    def compiled():
        torch.manual_seed(0)
        return slidedp.compile(PlainGPT(width=256, layers=6, dropout=0.2), device="cuda", optimizer=OPTIMIZER,
                               policy={"act": "offload", "boundary": "host"}, solver="rule")

    def trained():
        with compiled() as plan:
            losses = [plan.run(lm_batch(seed=step)).loss for step in range(4)]
            return losses, [p.detach().clone() for p in plan.model.parameters()]

    want, left = trained(), compiled()
    with monkeypatch.context() as patch:
        patch.setattr(StageRunner, "backward", None)
        with pytest.raises(TypeError):
            left.run(lm_batch()).wall_s.hex()  # which waits for the backward
    got = trained()
    left.close()
    assert got[0] == want[0]
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


def test_an_assertion_on_the_device(start_ranks):
    """In a process of its own, whose device fails in every call after it: what Python's end makes of that is not ours."""
    (ended,) = start_ranks(failure_cases.an_assertion_fails_on_the_gpu, 1).wait(200, check=False)
    assert ended.value is not None, ended.output
    step, again, *closed = ended.value["told"]
    assert "device-side assert" in step
    assert again == step
    assert closed == ["no error"] * 2
    assert ended.value["whole"]
    assert ended.value["left"] == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("delivery", ["sharded", "replicated"])
def test_a_rank_that_fails_leaves_no_other_in_a_collective_of_nccl(run_ranks, tmp_path, delivery):
    """Its kernel would wait on the device for half an hour, and who closes the plan for the device."""
    args = delivery, str(tmp_path / "told"), "cuda"
    other, fails = (r.value for r in run_ranks(failure_cases.one_fails_and_lives, 2, *args, timeout=150))
    assert "this layer is broken" in fails["message"]
    assert other["kind"] == "PeerError"
    assert "this layer is broken" in other["message"]
