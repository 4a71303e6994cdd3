"""A model whose gradients can be made anything, and what the ranks of tests/test_clipping.py run."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from rank_cases import OPTIMIZER, build, mean_over_all, model, shares, start
from tiny_models import GPTBlock, PlainGPT, lm_batch
from torch import Tensor
from training import Trained, norm_wise, state_of, train_plainly

import slidedp


class Fused(torch.autograd.Function):
    """The identity, until the fuse is set: then values, or gradients, are multiplied by something."""

    factor: ClassVar[list[float]] = [1.0]
    forward_factor: ClassVar[list[float]] = [1.0]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Fused.forward_factor[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Fused.factor[0]

    @classmethod
    def set(cls, how: str) -> None:
        """`how`: such as ``inf backward``; '' for neither."""
        cls.reset()
        value, _, phase = how.partition(" ")
        if phase:
            (cls.factor if phase == "backward" else cls.forward_factor)[0] = float(value)

    @classmethod
    def reset(cls) -> None:
        cls.factor[0] = cls.forward_factor[0] = 1.0


class FusedBlock(GPTBlock):
    """A block with the fuse behind it: its own gradients, and those of what comes before, are those that go bad."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Fused.apply(super().forward(x))
        return out


def fused_gpt() -> PlainGPT:
    """The fuse is behind the first block: all other layers' gradients are there, and finite, before it is seen to have blown."""
    torch.manual_seed(0)
    gpt = PlainGPT()
    gpt.blocks[0].__class__ = FusedBlock
    return gpt


MAX_NORM = 0.05
POLICIES: list[dict[str, Any]] = [
    {"delivery": "sharded", "chunks": 3}, {"reduction": "cpu", "return_chunks": 2},
    {"state": "hbm", "chunks": 2}, {"layers": {"L01": {"state": "hbm"}, "L02": {"reduction": "cpu"}}},
]  # fmt: skip


def two_ranks() -> dict[str, Any]:
    rank, world = start()
    names = [n for n, p in model().named_parameters() if p.requires_grad]
    initial = {n: p.detach().clone() for n, p in model().named_parameters()}
    batches = [{k: torch.cat([s[k] for s in shares(world, t)]) for k in ("input_ids", "labels")} for t in range(3)]
    want = train_plainly(model(), batches, OPTIMIZER, mean_over_all, max_grad_norm=MAX_NORM)
    assert min(want.norms) > MAX_NORM
    refused = unlike(rank)
    runs = [train(rank, world, policy) for policy in POLICIES]
    got = runs[0]
    worst = {
        "norms": max(abs(a - b) / b for a, b in zip(got.norms, want.norms, strict=True)),
        "moments": max(norm_wise(getattr(got, m)[n], getattr(want, m)[n]) for n in names for m in ("exp_avg", "exp_avg_sq")),
        "weight_change": max(norm_wise(got.params[n] - initial[n], want.params[n] - initial[n]) for n in names),
    }
    return {"worst": worst, "digests": [run.digest() + repr(run.norms) for run in runs], "skipped": bad_on_one_rank(rank, world),
            "refused": refused}


def train(rank: int, world: int, policy: dict[str, Any]) -> Trained:
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, policy=policy, max_grad_norm=MAX_NORM,
                           update_kernel="torch", solver="rule")
    results = [plan.run(shares(world, step)[rank]) for step in range(3)]
    done = state_of(plan)
    done.losses, done.norms, done.grads = [r.loss for r in results], [r.grad_norm for r in results], []
    plan.close()
    return done


DEFERRED = {"update": "deferred"}
SPECULATIVE: list[dict[str, Any]] = [
    {"update": "speculative"}, {"update": "speculative", "chunks": 3, "source": "cast", "reduction": "cpu", "window": 1},
    {"update": "speculative", "delivery": "sharded", "delivery_chunks": 2, "layers": {"L01": DEFERRED}},
    DEFERRED | {"return_chunks": 2, "layers": {"L02": {"update": "speculative"}, "L00": {"state": "hbm"}}},
]  # fmt: skip


def two_ranks_speculate() -> dict[str, Any]:
    """Four steps, some of them clipped, on every route; then with a bad step, a save and a look by one rank; then a failure."""
    rank, world = start()

    def run(policy: dict[str, Any], limit: float, looks: bool = False) -> tuple[str, list[float], dict[str, int]]:
        plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, policy=policy, max_grad_norm=limit, update_kernel="torch",
                               solver="rule")
        norms = []
        for step in range(4):
            norms.append(plan.run(shares(world, step)[rank]).grad_norm)
            if looks and rank == step % world:
                assert all(torch.isfinite(p).all() for p in plan.model.parameters())
        digest, counters = state_of(plan).digest(), plan.counters()
        plan.close()
        return digest, norms, counters

    limit = sorted(run(DEFERRED, math.inf)[1])[1]
    want, _, counters = run(DEFERRED, limit)
    odd = [str(policy) for i, policy in enumerate(SPECULATIVE) if run(policy, limit, looks=bool(i % 2))[0] != want]
    return {"odd": odd, "clipped": counters["clipped_steps"], "skipped": bad_steps_speculate(rank, world),
            "after_a_failure": [one_fails(rank, world, num_good) for num_good in (1, 2)]}


def bad_steps_speculate(rank: int, world: int) -> list[bool]:
    """As without the bad step, whose gradient is bad on the last rank only."""
    digests = []
    for bad_step in (2, None):
        with slidedp.compile(fused_gpt(), "cpu", optimizer=OPTIMIZER, max_grad_norm=math.inf, policy=SPECULATIVE[0],
                             update_kernel="torch") as plan, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skipped = []
            for step in range(4) if bad_step else (0, 1, 3):
                Fused.set("inf backward" if step == bad_step and rank == world - 1 else "")
                skipped.append(plan.run(lm_batch(seed=10 * step + rank)).skipped)
            digests.append((state_of(plan).digest(), skipped))
    assert digests[0][0] == digests[1][0]
    return digests[0][1]


def one_fails(rank: int, world: int, num_good: int) -> bool:
    """A rank leaves after some good steps: do both keep the weights of the last one?"""
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, max_grad_norm=math.inf, policy=SPECULATIVE[0])
    for step in range(num_good):
        plan.run(shares(world, step)[rank])
    before = state_of(plan).params
    dist.barrier()
    try:
        if rank:
            plan._machine.abandon(RuntimeError("this rank gives up"))
        else:
            plan.run(shares(world, 0)[rank])
    except Exception:  # whatever the other rank is told
        assert not rank
    plan.close()
    after = {n: p.detach() for n, p in plan._model.named_parameters()}
    return all(torch.equal(after[name], before[name]) for name in before)


def bad_on_one_rank(rank: int, world: int) -> list[bool]:
    """What each step says of itself; the second one has a bad gradient on the last rank only."""
    with slidedp.compile(fused_gpt(), "cpu", optimizer=OPTIMIZER, max_grad_norm=1.0) as plan, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = []
        for step in range(3):
            Fused.set("inf backward" if step == 1 and rank == world - 1 else "")
            skipped.append(plan.run(lm_batch(seed=10 * step + rank)).skipped)
            assert all(torch.isfinite(p).all() for p in plan.model.parameters())
            dist.barrier()  # who still looks at the model must not see the next step
    return skipped


def unlike(rank: int) -> str:
    with pytest.raises(ValueError, match="rank 1") as caught:
        slidedp.compile(build(rank), "cpu", max_grad_norm=1.0 + rank, example=lm_batch())
    return str(caught.value)
