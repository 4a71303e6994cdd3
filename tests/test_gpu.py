"""On a CUDA device: the same recipe as a GPU-resident trainer, the same bits under delays, two ranks sharing the GPU."""

from __future__ import annotations

import copy
import random

import pytest
import rank_cases
import torch
from tiny_models import PlainGPT, family, lm_batch
from training import norm_wise, rounded, train_resident

import slidedp
from slidedp.executor.machine import MachineOptions
from slidedp.presets import PRESETS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIMIZER = slidedp.AdamW(lr=1e-3)


def train_streamed(model, batches, options=None, **kwargs):
    plan = slidedp.compile(copy.deepcopy(model), optimizer=OPTIMIZER, device="cuda", **kwargs)
    if options:
        plan._options = options
    losses = [plan.run(batch).loss for batch in batches]
    params = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    plan.close()
    return losses, params


@pytest.mark.parametrize("make", [PlainGPT, lambda: family("qwen3")], ids=["gpt", "qwen3"])
def test_trajectory_of_the_resident_trainer(make):
    model, batches = rounded(make()), [lm_batch(seed=i % 4, batch=8, seq=32) for i in range(20)]
    assert_same_trajectory(model, batches, train_resident(model, batches, OPTIMIZER, "cuda"))


def assert_same_trajectory(model, batches, want):
    """Losses, and half of the parameters' changes, as the resident trainer's; its own repeats differ by atomics' order."""
    got, got_params = train_streamed(model, batches)
    assert abs(got[0] - want.losses[0]) < 1e-3 * want.losses[0]
    assert max(abs(a - b) / b for a, b in zip(got, want.losses, strict=True)) < 1e-2
    start = {n: p.detach().cpu() for n, p in model.named_parameters()}
    change = [norm_wise(got_params[n] - start[n], p.cpu() - start[n]) for n, p in want.params.items()]
    assert sorted(change)[len(change) // 2] < 0.05, change


@pytest.mark.parametrize("size", ["0.6b", "4b"])
def test_qwen3_shapes_follow_the_resident_trainer(size):
    """20 steps of a real shape with random weights; host state and HBM are what the plan said."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{k: v for k, v in PRESETS[f"qwen3-{size}"].items() if k != "model_type"}, use_cache=False)
    config._attn_implementation = "sdpa"

    def build():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config).train()
        torch.set_default_dtype(torch.float32)
        return model

    ids = [torch.randint(0, config.vocab_size, (4, 512)) for _ in range(4)]
    batches = [{"input_ids": ids[i % 4], "labels": ids[i % 4]} for i in range(20)]
    want = train_resident(build(), batches, OPTIMIZER, "cuda").losses
    model = build().to("cpu", torch.float32)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with slidedp.compile(model, optimizer=OPTIMIZER, device="cuda") as plan:
        got = [plan.run(batch).loss for batch in batches]
        plan.synchronize()
        predicted, reserved = plan.memory().hbm_bytes, torch.cuda.max_memory_reserved()
    print(f"\n{size}: losses {want[0]:.4f} .. {want[-1]:.4f} resident, {got[0]:.4f} .. {got[-1]:.4f} streamed; "
          f"reserved {reserved / 2**30:.1f} GiB, predicted {predicted / 2**30:.1f} GiB")
    assert abs(got[0] - want[0]) < 1e-3 * want[0]
    assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-2
    assert want[-1] < 0.9 * want[0]


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
        assert value["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two[0]["digests"] == two[1]["digests"]
    assert len(set(two[0]["digests"])) == 1
