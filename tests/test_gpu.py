"""On a CUDA device: the same recipe as a GPU-resident trainer, the same bits under delays, two ranks sharing the GPU."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import rank_cases
import torch
from delays import options_late_on_gpu
from tiny_models import PlainGPT, family, lm_batch
from training import norm_wise, rounded, train_resident

import slidedp
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


def qwen3(size):
    """The shape with random BF16 weights, on the GPU, in a second."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{k: v for k, v in PRESETS[f"qwen3-{size}"].items() if k != "model_type"}, use_cache=False)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    return model


def token_batches(num_steps, batch=4, seq=512):
    ids = [torch.randint(0, 151936, (batch, seq)) for _ in range(4)]
    return [{"input_ids": ids[i % 4], "labels": ids[i % 4]} for i in range(num_steps)]


def stream(model, batches, optimizer, **options):
    """Losses and the plan's own weights at the end, on the host."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with slidedp.compile(model, optimizer=optimizer, device="cuda", **options) as plan:
        losses = [plan.run(batch).loss for batch in batches]
        plan.synchronize()
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        print(f"\nlosses {losses[0]:.4f} .. {losses[-1]:.4f}; GiB reserved {reserved / 2**30:.1f}, "
              f"allocated {allocated / 2**30:.1f}, planned {plan.memory().hbm_bytes / 2**30:.1f}")
    return losses, dict(model.named_parameters())


@pytest.fixture
def deterministic():
    """Attention's backward and the embedding's otherwise add in whatever order their threads come."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # or every allocation is filled, gigabytes of them
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_qwen3_06b_equals_the_resident_trainer_bit_for_bit():
    """20 steps with deterministic kernels: whatever streams where, not one bit of losses or weights differs.

    The reference keeps BF16 weights on the GPU and its FP32 state on the host, as the plan must, so that both use torch's AdamW
    there: the update in HBM rounds elsewhere.
    """
    batches = token_batches(20)
    want = train_resident(qwen3("0.6b"), batches, OPTIMIZER, "cuda", state_device="cpu")
    losses, params = stream(qwen3("0.6b").to("cpu", torch.float32), batches, OPTIMIZER, update_kernel="torch",
                            policy={"state": "host", "return_chunks": 1, "delivery_chunks": 3, "window": 3,
                                    "head_chunks": 1})
    assert losses == want.losses
    assert [n for n, p in want.params.items() if not torch.equal(p, params[n])] == []


@pytest.mark.usefixtures("deterministic")
def test_qwen3_4b_follows_the_resident_trainer():
    """20 steps, everything of the reference on the GPU, our native update on the host: only the update's rounding differs.

    What rounding alone does to a trajectory that falls from 12 to 2 says the reference itself, under torch's fused AdamW.
    """
    optimizer, batches = slidedp.AdamW(lr=5e-5), token_batches(20)
    want = train_resident(qwen3("4b"), batches, optimizer, "cuda").losses
    other = train_resident(qwen3("4b"), batches, optimizer, "cuda", fused=True).losses
    got, _ = stream(qwen3("4b").to("cpu", torch.float32), batches, optimizer, policy={"state": "host", "head_chunks": 1})
    by_rounding, ours = apart(other, want), apart(got, want)
    print(f"resident {want[0]:.4f} .. {want[-1]:.4f}; relative differences, ours {ours}, torch's fused AdamW {by_rounding}")
    assert got[0] == want[0]
    assert max(ours[:4]) < 1e-4
    assert max(ours) < 3 * max(by_rounding)
    assert want[-1] < want[0] - 0.1


def apart(got, want):
    return [round(abs(a - b) / b, 7) for a, b in zip(got, want, strict=True)]


def test_delays_and_poison_change_no_bit():
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batches = rounded(PlainGPT(width=64)), [lm_batch(seed=i, batch=4, seq=32) for i in range(3)]
    want = train_streamed(model, batches, policy={"window": 2, "chunks": 3})
    for seed in range(20):
        policy = {"window": 2, "chunks": 3, "source": "cast" if seed // 2 % 2 else "shadow"}
        got = train_streamed(model, batches, options_late_on_gpu(seed), policy=policy)
        assert got[0] == want[0]
        assert all(torch.equal(got[1][n], p) for n, p in want[1].items())
    torch.use_deterministic_algorithms(False)


CHOICES = [
    {"act": "retain"},
    {"act": "recompute", "boundary": "host"},
    {"act": "offload"},
    {"act": "offload", "boundary": "host", "act_slots": 1},
    {"act": "selective"},
    {"layers": {"L0": {"act": "offload"}, "L1": {"boundary": "host"}, "L2": {"act": "selective"}, "L3": {"act": "offload"}}},
]


@pytest.mark.usefixtures("deterministic")
def test_activation_choices_change_no_bit():
    """With dropout, and with copies or anything else late and what is free filled with NaN."""
    model, batches = rounded(PlainGPT(width=64, layers=6, dropout=0.2)), [lm_batch(seed=i, batch=4, seq=32) for i in range(3)]

    def run(policy, options=None):
        torch.manual_seed(3)
        return train_streamed(model, batches, options, policy={"window": 2, **policy})

    want = run({"act": "recompute"})
    for policy in CHOICES:
        rng = random.Random(str(policy))
        late = [options_late_on_gpu(seed, rng.choice(["act_offload", "act_reload", "bwd", ""]), share=0.5) for seed in range(2)]
        for options in (None, *late):
            got = run(policy, options)
            assert got[0] == want[0], policy
            assert all(torch.equal(got[1][n], p) for n, p in want[1].items()), policy


@pytest.mark.usefixtures("deterministic")
def test_qwen3_06b_activation_choices():
    """The bits of recompute at every choice; retaining takes what the plan says it takes, and moving away gives it back."""
    batches, losses, peak, planned = token_batches(3, batch=8), {}, {}, {}
    for policy in ({"act": "recompute"}, *CHOICES[:5]):
        torch.cuda.empty_cache()
        with slidedp.compile(qwen3("0.6b").to("cpu", torch.float32), optimizer=OPTIMIZER, device="cuda", policy=policy,
                             solver="rule") as plan:  # the solver would move the state as well
            name = " ".join(map(str, policy.values()))
            losses[name] = [plan.run(batches[0]).loss]
            plan.synchronize()
            torch.cuda.reset_peak_memory_stats()  # without the model's making, and what measuring takes
            losses[name] += [plan.run(batch).loss for batch in batches[1:]]
            seconds = plan.run(batches[0]).wall_s
            plan.synchronize()
            peak[name], planned[name] = torch.cuda.max_memory_allocated(), plan.memory().hbm_bytes
            print(f"\n{name:<20} {seconds:.3f} s, GiB allocated {peak[name] / 2**30:.2f}, planned {planned[name] / 2**30:.2f}")
        with slidedp.compile(qwen3("0.6b").to("cpu", torch.float32), optimizer=OPTIMIZER, device="cuda", policy=policy,
                             solver="rule") as plan:
            plan._options = replace(options_late_on_gpu(1), poison=False)
            losses[f"{name}, late"] = [plan.run(batch).loss for batch in batches]
    want = losses["recompute"]
    assert {name: found for name, found in losses.items() if found != want} == {}, want
    extra = peak["retain"] - peak["recompute"]
    assert extra == pytest.approx(planned["retain"] - planned["recompute"], rel=0.05)
    assert peak["recompute host"] < peak["recompute"]
    assert peak["offload"] == pytest.approx(planned["offload"], rel=0.05)
    assert peak["offload host 1"] == pytest.approx(planned["offload host 1"], rel=0.05)


def test_two_ranks_share_the_gpu(run_ranks):
    """Over gloo, staged: NCCL refuses two ranks on one device."""
    one = run_ranks(rank_cases.on_the_gpu, 1, timeout=200)[0].value
    two = [r.value for r in run_ranks(rank_cases.on_the_gpu, 2, timeout=200)]
    for value in two:
        assert value["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two[0]["digests"] == two[1]["digests"]
    assert len(set(two[0]["digests"])) == 1
