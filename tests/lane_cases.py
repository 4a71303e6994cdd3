"""What the ranks of the multi-rank tests of micro-batches run; results as JSON."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from delays import Delays
from rank_cases import OPTIMIZER, build, mean_over_all, model, start
from tiny_models import lm_batch
from training import Trained, norm_wise, state_of, train_plainly

import slidedp
from slidedp.executor.options import MachineOptions

Batch = dict[str, torch.Tensor]
NUM_STEPS = 3


def step_of(rank: int, step: int) -> list[Batch]:
    """Two micro-batches of unlike sizes, of which some have few valid tokens and some none: on step 1 all of one rank's."""
    out = []
    for i in range(2):
        batch = lm_batch(seed=100 * step + 10 * rank + i, batch=1 + (rank + i) % 3, seq=10)
        batch["labels"][:, : 1 + 2 * rank] = -100
        if (step == 1 and rank == 1) or (step == 2 and rank == 0 and i == 0):
            batch["labels"][:] = -100
        out.append(batch)
    return out


def reference(world: int) -> Trained:
    """Plain PyTorch on all that the ranks have, at once."""
    batches = []
    for t in range(NUM_STEPS):
        parts = [b for rank in range(world) for b in step_of(rank, t)]
        batches.append({k: torch.cat([p[k] for p in parts]) for k in parts[0]})
    return train_plainly(model(), batches, OPTIMIZER, mean_over_all)


def train(rank: int, options: MachineOptions, **how: Any) -> Trained:
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, **how)
    plan._options = options
    losses, grads = [], []
    for t in range(NUM_STEPS):
        losses.append(plan.run(step_of(rank, t)).loss)
        grads = grads or state_of(plan).grads
    done = state_of(plan)
    plan.close()
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, grads)


def micro_batches() -> dict[str, Any]:
    """Against plain PyTorch; digests of other routes and of delays; and slices, of which the ranks have unlike numbers."""
    rank, world = start()
    initial = {n: p.detach().clone() for n, p in model().named_parameters()}
    want, names = reference(world), None
    digests = []
    for d, r, chunks in (("sharded", "gpu", 3), ("replicated", "cpu", 2)):
        got = train(rank, MachineOptions(), policy={"delivery": d, "reduction": r, "chunks": chunks, "window": 2})
        digests.append(got.digest())
        names = list(want.exp_avg)
        worst = {
            "losses": max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True)),
            "grads": max(norm_wise(got.grads[0][n], want.grads[0][n]) for n in names),
            "moments": max(norm_wise(getattr(got, m)[n], getattr(want, m)[n]) for n in names for m in ("exp_avg", "exp_avg_sq")),
            "weight_change": max(norm_wise(got.params[n] - initial[n], want.params[n] - initial[n]) for n in names),
        }
    late = {"act": "offload", "act_slots": 1, "delivery": "sharded", "window": 1}
    plan = slidedp.compile(build(rank), "cpu", example=step_of(rank, 0), policy=late)
    kinds = {op.name: op.kind for op in plan._spec.graph}
    plan.close()
    for turn in range(0, len(set(kinds.values())), 3):
        options = MachineOptions(delay=Delays(kinds, turn, seed=turn + rank), poison=True)
        digests.append(train(rank, options, policy=late).digest())
    sliced = train(rank, MachineOptions(), policy={"slices": 3})
    dist.barrier()
    return {"worst": worst, "digests": digests,
            "sliced": max(abs(a - b) / abs(b) for a, b in zip(sliced.losses, want.losses, strict=True))}


def unlike_numbers() -> dict[str, Any]:
    """Ranks that are given unlike numbers of micro-batches are told so, and go on; single batches first, then more."""
    rank, _ = start()
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, max_grad_norm=1.0)
    plan.run(lm_batch(seed=rank))
    try:
        plan.run(step_of(rank, 0)[: 1 + rank])
        told = ""
    except ValueError as e:
        told = str(e)
    result = plan.run(step_of(rank, 0))
    out = {"told": told, "step": result.step, "norm": result.grad_norm, "loss": plan.evaluate(step_of(rank, 0))}
    plan.close()
    return out
