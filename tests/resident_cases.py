"""What the ranks of tests/test_residency_ranks.py run."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from delays import Delays
from rank_cases import OPTIMIZER, build, model, race, reference, shares, start, started
from training import Trained, begin_again, norm_wise, state_of

import slidedp
from slidedp.executor.options import MachineOptions

HBM = {"state": "hbm"}
EXACT = MachineOptions(update_kernel="torch")
POLICIES = [
    HBM | {"chunks": 1},
    HBM | {"chunks": 3, "reduce_slots": 1, "reduction": "cpu"},
    {"weights": "hold", "delivery": "sharded", "chunks": 2},
    {"chunks": 2, "delivery": "sharded", "window": 1, "layers": {"L01": HBM, "shared0": HBM}},
    {"chunks": 5, "reduction": "cpu", "source": "cast", "layers": {"L00": HBM, "L02": {"weights": "hold"}}},
]


def train(rank: int, world: int, policy: dict[str, Any], options: MachineOptions) -> tuple[Trained, dict[str, Any]]:
    """Three steps with nothing between them that waits."""
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, policy=policy)
    plan._options = options
    losses = [plan.run(shares(world, step)[rank]).loss for step in range(3)]
    done = state_of(plan)
    about = {"counters": plan.counters(), "kinds": {op.name: op.kind for op in plan._spec.graph}}
    plan.close()
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, []), about


def bits() -> dict[str, Any]:
    """Digests of the same steps with the state on the host and in HBM, undisturbed and with other delays on every rank."""
    rank, world = start()
    weights = dict(model().named_parameters())
    want = train(rank, world, {"chunks": 2}, EXACT)[0].digest()
    odd, slowed, kinds_seen = [], set(), set()
    for i, policy in enumerate(POLICIES):
        got, about = train(rank, world, policy, EXACT)
        odd += [str(policy)] * (got.digest() != want)
        kinds_seen |= set(about["kinds"].values())
        with started(rank, world, policy, MachineOptions("torch", delay=lambda op: 0.0, poison=True)) as plan:
            for turn in range(4):
                delays = Delays(about["kinds"], 4 * i + turn + 5 * rank, f"{i} {turn} {rank}")
                begin_again(plan, weights)
                plan._machine.streams.delay = delays
                odd += [f"{policy} slow {delays.slow}"] * (race(plan, rank, world) != want)
                slowed |= delays.slowed
    return {"odd": odd, "digest": want, "slowed": sorted(slowed), "kinds": sorted(kinds_seen)}


def fused_and_model() -> dict[str, Any]:
    rank, world = start()
    return {"fused": against_plain_pytorch(rank, world), "model": one_rank_reads_and_writes(rank, world)}


def against_plain_pytorch(rank: int, world: int) -> dict[str, Any]:
    """The fused update, sharded: worst norm-wise differences; what this rank moved and updated."""
    initial = {n: p.detach().clone() for n, p in model().named_parameters()}
    want = reference(world, 3)
    got, about = train(rank, world, HBM | {"chunks": 3}, MachineOptions())
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True)),
        "moments": max(norm_wise(getattr(got, m)[n], getattr(want, m)[n])
                       for m, n in product(("exp_avg", "exp_avg_sq"), want.exp_avg)),
        "weight_change": max(norm_wise(got.params[n] - initial[n], want.params[n] - initial[n]) for n in want.exp_avg),
        "counters": about["counters"],
    }


def one_rank_reads_and_writes(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 looks at the model, and changes it, while rank 1 waits for it elsewhere, or goes on to its next step."""
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, policy=HBM, update_kernel="torch")
    first = plan.run(shares(world, 0)[rank]).loss
    seen: dict[str, Any] = {"first": first}
    initial = {n: p.detach().clone() for n, p in model().named_parameters()}
    if rank == 0:
        state = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
        seen["moved"] = all(not torch.equal(state[n], initial[n]) for n in ("tok.weight", "blocks.0.out.weight", "norm.bias"))
    dist.barrier()
    plan.run(shares(world, 1)[rank])
    if rank == 0:
        plan.model.load_state_dict(initial, strict=False)
    seen["again"] = plan.run(shares(world, 0)[rank]).loss
    seen["evaluated"] = plan.evaluate(shares(world, 2)[rank])
    if rank == 0:
        state = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    plan.close()
    if rank == 0:
        seen["closed"] = all(torch.equal(p, state[n]) for n, p in plan._model.named_parameters())
    return seen
