"""What the ranks of the multi-rank tests run: module-level functions for the `run_ranks` fixture, results as JSON."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from delays import Delays
from safetensors.torch import load_file
from tiny_models import PlainGPT, lm_batch
from training import Trained, begin_again, norm_wise, state_of, traced_once, train_plainly

import slidedp
from slidedp.executor.checkpoints.checkpoint_files import FileLayer, complete
from slidedp.executor.checkpoints.saving import Saves
from slidedp.executor.errors import CheckpointError
from slidedp.executor.options import MachineOptions

OPTIMIZER = slidedp.AdamW(lr=1e-2)


def start() -> tuple[int, int]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def shares(world: int, step: int) -> list[dict[str, torch.Tensor]]:
    """Every rank's batch of a step: different numbers of valid tokens, and (from the second step on) one rank with none."""
    out = []
    for rank in range(world):
        batch = lm_batch(seed=100 * step + rank, batch=2, seq=10)
        batch["labels"][:, : 1 + 2 * rank] = -100
        if world > 1 and step and rank == step % world:
            batch["labels"][:] = -100
        out.append(batch)
    return out


def mean_over_all(gpt: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return gpt(**batch)


def reference(world: int, num_steps: int) -> Trained:
    """Plain PyTorch on the concatenated batch: its mean is over all valid tokens."""
    batches = [{k: torch.cat([s[k] for s in shares(world, t)]) for k in ("input_ids", "labels")} for t in range(num_steps)]
    return train_plainly(model(), batches, OPTIMIZER, mean_over_all)


def model(width: int = 64, layers: int = 3) -> torch.nn.Module:
    """Without trainable key biases: their gradient is zero but for rounding, which Adam would blow up to full steps."""
    torch.manual_seed(0)
    gpt = PlainGPT(width=width, layers=layers)
    for block in gpt.blocks:
        block.qkv.bias.requires_grad_(False)
    return gpt


def build(rank: int) -> torch.nn.Module:
    """Rank 0 has the weights; the others build on meta, and never hold a copy."""
    with torch.device("cpu" if rank == 0 else "meta"):
        return model()


def train(rank: int, world: int, num_steps: int, keep_grads: bool = False,
          **options: Any) -> tuple[Trained, dict[str, int], torch.nn.Module]:
    """`keep_grads`: the first step's, to read which the plan is drained behind it; else the steps overlap."""
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, **options)
    losses, grads = [], []
    for step in range(num_steps):
        losses.append(plan.run(shares(world, step)[rank]).loss)
        if keep_grads and not grads:
            grads = state_of(plan).grads
    done = state_of(plan)
    counters = plan.counters()
    plan.close()
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, grads), counters, plan._model


def against_plain_pytorch(num_steps: int) -> dict[str, float]:
    """Worst norm-wise differences over all tensors, this rank's view."""
    rank, world = start()
    initial = {n: p.detach().clone() for n, p in model().named_parameters()}
    want = reference(world, num_steps)
    got, _, closed = train(rank, world, num_steps, keep_grads=True, policy={"delivery": "sharded", "chunks": 3})
    names = list(want.exp_avg)
    assert all(torch.equal(p, got.params[n]) for n, p in closed.named_parameters()), "closed model lost its weights"
    dist.barrier()
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True)),
        "grads": max(norm_wise(got.grads[0][n], want.grads[0][n]) for n in names),
        "moments": max(norm_wise(getattr(got, m)[n], getattr(want, m)[n]) for n in names for m in ("exp_avg", "exp_avg_sq")),
        "weight_change": max(norm_wise(got.params[n] - initial[n], want.params[n] - initial[n]) for n in names),
    }


def datapaths(full: bool) -> dict[str, Any]:
    """Digests of the same three steps over every route, source, chunking and window; all must be one."""
    rank, world = start()
    chunks = [(1, 1), (3, 7), (7, 3)] if full else [(3, 7)]
    windows = (2, 3, 99) if full else (2, 99)
    digests: dict[str, list[str]] = {}
    with traced_once():
        for d, r, s, (c, k), w in product(("replicated", "sharded"), ("gpu", "cpu"), ("cast", "shadow"), chunks, windows):
            policy = {"delivery": d, "reduction": r, "source": s, "delivery_chunks": c, "return_chunks": k, "window": w}
            got, _, _ = train(rank, world, 3, policy=policy, solver="rule")
            digests.setdefault(got.digest(), []).append(str(policy))
    return {"digests": list(digests), "runs": sum(map(len, digests.values())), "odd": [v for v in digests.values()][1:]}


def races(num_seeds: int) -> dict[str, Any]:
    """Random delays, other ones on every rank, over the four datapaths, cast and shadow in turns; released slots hold NaN."""
    rank, world = start()
    weights = dict(model().named_parameters())
    results: dict[str, Any] = {"undisturbed": "", "runs": 0, "odd": [], "kinds": {}, "slowed": {}}
    for d, r, s in product(("replicated", "sharded"), ("gpu", "cpu"), ("cast", "shadow")):
        policy = {"delivery": d, "reduction": r, "source": s, "delivery_chunks": 3, "return_chunks": 2, "window": 2}
        with started(rank, world, policy, MachineOptions()) as plan:
            digest, kinds = race(plan, rank, world), {op.name: op.kind for op in plan._spec.graph}
        results["undisturbed"] = results["undisturbed"] or digest
        assert digest == results["undisturbed"], policy
        slowed = results["slowed"].setdefault(f"{d}-{r}", set())
        results["kinds"].setdefault(f"{d}-{r}", set()).update(kinds.values())
        with started(rank, world, policy, MachineOptions(delay=lambda op: 0.0, poison=True)) as plan:
            for turn in range(num_seeds // 2):
                seed = 2 * turn + (s == "shadow")
                delays = Delays(kinds, 2 * turn + seed % 2 + 5 * rank, f"{d} {r} {seed} {rank}")
                begin_again(plan, weights)
                plan._machine.streams.delay = delays
                results["runs"] += 1
                odd = race(plan, rank, world) != results["undisturbed"]
                results["odd"] += [f"{policy} seed {seed} slow {delays.slow}"] * odd
                slowed |= delays.slowed
    for key in ("kinds", "slowed"):
        results[key] = {datapath: sorted(kinds) for datapath, kinds in results[key].items()}
    return results


def started(rank: int, world: int, policy: dict[str, Any], options: MachineOptions) -> slidedp.Plan:
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, policy=policy)
    plan._options = options
    plan._start(shares(world, 0)[rank])
    return plan


def race(plan: slidedp.Plan, rank: int, world: int) -> str:
    """Digest of three steps with nothing between them that waits."""
    losses = [plan.run(shares(world, step)[rank]).loss for step in range(3)]
    done = state_of(plan)
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, []).digest()


def counters() -> dict[str, dict[str, int]]:
    """Bytes this rank moved and parameters it updated, in two steps, sharded and replicated."""
    rank, world = start()
    out = {}
    for delivery in ("sharded", "replicated"):
        _, counts, closed = train(rank, world, 2, policy={"delivery": delivery, "source": "shadow", "window": 99})
        out[delivery] = counts
    out["model"] = {"params": sum(p.numel() for p in closed.parameters() if p.requires_grad)}
    return out


def bad_batch_on_one_rank() -> str:
    """Rank 1 gets an id outside the vocabulary; both say so, nothing changes, and the next step runs."""
    rank, world = start()
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER)
    plan.run(shares(world, 0)[rank])
    before = state_of(plan).digest()
    batch = shares(world, 1)[rank]
    if rank == 1:
        batch["input_ids"][0, 0] = 9999
    try:
        plan.run(batch)
        message = "no error"
    except ValueError as e:
        message = str(e)
    assert state_of(plan).digest() == before
    plan.run(shares(world, 1)[rank])
    assert state_of(plan).digest() != before
    plan.close()
    return message


def until_killed(ready: str) -> str:
    """Train for ever; the test kills one rank."""
    rank, world = start()
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER)
    for step in range(100000):
        plan.run(shares(world, step)[rank])
        if step == 3:
            with open(f"{ready}.{rank}", "w") as f:
                f.write(str(os.getpid()))
    return "not killed"


def on_the_gpu() -> dict[str, Any]:
    """Ten FP32 steps on the CUDA device over all four datapaths; the global batch is the same for any number of ranks."""
    from training import Trained

    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, world = start()
    losses, digests = [], []
    for delivery, reduction in product(("replicated", "sharded"), ("gpu", "cpu")):
        plan = slidedp.compile(model(), optimizer=slidedp.AdamW(lr=1e-3), device="cuda", compute_dtype=torch.float32,
                               policy={"delivery": delivery, "reduction": reduction, "chunks": 3})
        losses = []
        for step in range(10):
            whole = lm_batch(seed=step, batch=4, seq=32)
            losses.append(plan.run({k: v.chunk(world)[rank] for k, v in whole.items()}).loss)
        params = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
        digests.append(Trained(losses, params, {}, {}, {}).digest())
        plan.close()
    return {"losses": losses, "digests": digests}


def checkpointed(resident: list[str], **options: Any) -> slidedp.Plan:
    policy = {"layers": {name: {"state": "hbm"} for name in resident}}
    return slidedp.compile(PlainGPT(), "cpu", optimizer=slidedp.AdamW(lr=1e-2), policy=policy, **options)


def saved_digest(directory: str) -> str:
    """Of all weights and moments in the newest checkpoint, whose files differ by the number of ranks."""
    newest = complete(Path(directory))[0]
    tensors = {name: t for file in newest.glob("mo*.safetensors") for name, t in load_file(file).items()}
    return Trained([], {k: v.flatten() for k, v in sorted(tensors.items())}, {}, {}, []).digest()


def save_checkpoint(directory: str, resident: list[str]) -> str:
    """Two steps on any number of ranks, saved; the digest of what was saved."""
    rank, world = start()
    with checkpointed(resident) as plan:
        for step in range(2):
            plan.run(shares(world, step)[rank])
        plan.save(directory)
        return saved_digest(directory)


def resume_checkpoint(directory: str, resident: list[str]) -> str:
    """The digest of what is saved right after a resume; a further step shows that the plan works."""
    rank, world = start()
    with checkpointed(resident, example=shares(world, 0)[rank]) as plan:
        plan.resume(directory)
        plan.save(f"{directory}/again")
        plan.run(shares(world, 2)[rank])
    return saved_digest(f"{directory}/again")


class RankOneIsFull(FileLayer):
    """Rank 1's disk has no room after some writes."""

    num_writes = 0

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self.num_writes += 1
        if dist.get_rank() == 1 and self.num_writes > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write_at(fd, data, offset)


def saves_beside_training(directory: str) -> dict[str, Any]:
    """The same five steps, saved after the second by a save that all wait for and by one that none does; then what goes wrong."""
    rank, world = start()
    digests: list[str] = []
    random = Random(rank)
    for how in ("alone", "beside"):
        torch.manual_seed(7)
        with checkpointed(["L00", "shared0"]) as plan:
            if how == "beside":
                plan._options = MachineOptions(delay=lambda op: random.random() * 4e-3 if random.random() < 0.3 else 0.0)
            for step in range(5):
                plan.run(shares(world, step)[rank])
                if step == 1:
                    plan.save(f"{directory}/{how}", wait=how == "alone", save_buffer="48KiB")
            digests.append(state_of(plan).digest())
            if how == "beside":
                out = {"digests": digests, **saves_that_fail(plan, directory, rank, world)}
    return out


def fails_late(work: Callable[[], object], seconds: float) -> object:
    try:
        return work()
    except BaseException:
        time.sleep(seconds)
        raise


def saves_that_fail(plan: slidedp.Plan, directory: str, rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    try:
        out["misused"] = "no error"
        plan.run(shares(world, 5)[rank]) if rank else plan.save(directory)
    except ValueError as e:
        out["misused"] = str(e)
    begin = Saves.begin
    with patch("slidedp.plan.FileLayer", RankOneIsFull), patch.object(
        Saves, "begin", lambda self, path, snapshot, work: begin(self, path, snapshot, partial(fails_late, work, 0.5 * rank))
    ):  # the other rank's user hears of it first
        handle = plan.save(f"{directory}/beside", wait=False, save_buffer="48KiB")
    try:
        out["full"] = "no error"
        for _ in range(1000):
            plan.run(shares(world, 5)[rank])
            handle._ended.wait(0.1)
    except ValueError as e:
        out["full"] = str(e)
    done = plan._machine.num_steps
    out["after"] = plan.run(shares(world, 6)[rank]).step - done + 6
    for wait in (True, False):
        with pytest.raises(ValueError, match=r"JSON|rank 0") as refused:
            plan.save(directory, wait=wait, extra={} if rank else {"loader": object()})
        out[f"extra {wait}"] = str(refused.value)
    with patch("slidedp.plan.FileLayer", RankOneIsFull):
        handle = plan.save(f"{directory}/beside", wait=False, save_buffer="48KiB")
    if rank == 0:
        with pytest.raises(CheckpointError):
            handle.wait()
    with pytest.raises(CheckpointError) as heard:  # and so rank 0 hears of it once more
        plan.save(f"{directory}/beside")
    out["heard"] = str(heard.value)
    plan.run(shares(world, 7)[rank])
    return out
