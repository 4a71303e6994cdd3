"""Several ranks against plain PyTorch for every Hugging Face family: what the ranks run (see rank_cases.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rank_cases import start
from tiny_models import FAMILIES, family, lm_batch
from torch import Tensor, nn
from training import Trained, loss_of_output, norm_wise, state_of, train_plainly

import slidedp

OPTIMIZER = slidedp.AdamW(lr=3e-4)
"""At 1e-2, elements whose gradient is near rounding drift so far in a step that plain PyTorch with the batch in parts is 2e-5
(moments of llama) from plain PyTorch with the batch in one, which is as far from its own FP64 run.
"""

NUM_STEPS = 3

NOISE_ONLY = {"qwen2": "k_proj.bias", "gpt2": "c_attn.bias"}
"""Frozen in both runs: a key bias moves all scores of a query alike, which softmax ignores, so that its true gradient is
zero and the computed one nothing but rounding, which Adam divides by its own size: full steps in random directions. GPT-2
has query, key and value biases in one parameter.
"""


def make(name: str) -> nn.Module:
    model = family(name)
    for parameter, p in model.named_parameters():
        p.requires_grad_(not (name in NOISE_ONLY and parameter.endswith(NOISE_ONLY[name])))
    return model


def shares(name: str, world: int, step: int) -> list[dict[str, Tensor]]:
    """Every rank's batch: padded and not in turns, uneven valid tokens, and in one of the steps (which one differs by family,
    the first included) a rank with none.
    """
    place = list(FAMILIES).index(name)
    out = []
    for rank in range(world):
        batch = lm_batch(("padded", "none")[(rank + step + place) % 2], seed=100 * step + 10 * place + rank)
        batch["labels"][:, : 1 + rank] = -100
        if step == place % NUM_STEPS and rank == (place // NUM_STEPS + 1) % world:
            batch["labels"][:] = -100
        out.append(batch)
    return out


def concatenated(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    masked = [{"attention_mask": torch.ones_like(b["input_ids"]), **b} for b in batches]
    return {k: torch.cat([b[k] for b in masked]) for k in ("input_ids", "labels", "attention_mask")}


def planned(name: str, rank: int, world: int) -> Trained:
    """On the ranks, the logits in three chunks; ranks other than 0 build the model without weights."""
    with torch.device("cpu" if rank == 0 else "meta"):
        model = make(name)
    policy = {"delivery": "sharded", "chunks": 3, "head_chunks": 3}
    with slidedp.compile(model, "cpu", optimizer=OPTIMIZER, policy=policy) as plan:
        losses, grads = [], []
        for step in range(NUM_STEPS):
            losses.append(plan.run(shares(name, world, step)[rank]).loss)
            grads = grads or state_of(plan).grads
        done = state_of(plan)
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, grads)


def families() -> dict[str, dict[str, Any]]:
    """By family, on rank 0 the worst norm-wise differences from plain PyTorch and where; on all ranks a digest and losses."""
    rank, world = start()
    out = {}
    for name in FAMILIES:
        got = planned(name, rank, world)
        out[name] = {"digest": got.digest(), "losses": got.losses}
        if rank == 0:
            out[name] |= {"worst": compare(name, world, got)}
        dist.barrier()
    return out


def compare(name: str, world: int, got: Trained) -> dict[str, tuple[float, str]]:
    model = make(name)
    want = train_plainly(model, [concatenated(shares(name, world, t)) for t in range(NUM_STEPS)], OPTIMIZER, loss_of_output)
    initial = dict(model.named_parameters())
    names = list(want.exp_avg)
    assert len(names) == sum(p.requires_grad for p in model.parameters()), "a parameter without a gradient"
    assert all(torch.equal(got.params[n], p) for n, p in initial.items() if not p.requires_grad)
    losses = enumerate(zip(got.losses, want.losses, strict=True), 1)
    return {
        "losses": max((abs(a - b) / abs(b), f"step {step}") for step, (a, b) in losses),
        "grads": max((norm_wise(got.grads[0][n], want.grads[0][n]), n) for n in names),
        "moments": max((norm_wise(getattr(got, m)[n], getattr(want, m)[n]), f"{m} of {n}")
                       for n in names for m in ("exp_avg", "exp_avg_sq")),
        "weight_change": max((norm_wise(got.params[n] - initial[n], want.params[n] - initial[n]), n) for n in names),
    }
