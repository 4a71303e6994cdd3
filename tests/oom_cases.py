"""Training under a limit, and what the ranks of the multi-rank test run."""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import Limit, beyond
from rank_cases import build, shares, start
from training import state_of

import slidedp
from slidedp.compiler.ops import OpKind
from slidedp.executor.devices.backend import CpuBackend

NUM_STEPS = 3
OPTIMIZER = slidedp.AdamW(lr=1e-2)


@dataclass
class Run:
    """`digest`: of losses, weights, moments, the model's buffers and the generator. `refused`: allocations, by step."""

    losses: list[float]
    digest: str
    refused: list[int]
    refused_in: list[str]
    peak: int
    recomputed: dict[tuple[int, str], Any]
    memory: Any
    described: str
    warnings: list[warnings.WarningMessage] = field(default_factory=list)


def train(model: torch.nn.Module, batches: Sequence[Any], limit: Limit, *, before: Callable[[int], None] = lambda step: None,
          after: Callable[[slidedp.Plan], None] = lambda plan: None, **how: Any) -> Run:
    """Losses are read, and the plan drained, after every step: shortages are told of by then."""
    torch.manual_seed(1)
    limit.live, limit.peak, limit.num_refused, limit.refused_in = {}, 0, 0, []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses, refused = [], []
        with slidedp.compile(model, "cpu", optimizer=OPTIMIZER, **how) as plan:
            for step, batch in enumerate(batches):
                before(step)
                num = limit.num_refused
                losses.append(plan.run(batch).loss)
                plan.synchronize()
                refused.append(limit.num_refused - num)
                after(plan)
            done = state_of(plan)
            done.losses = losses
            run = Run(losses, "", refused, list(limit.refused_in), limit.peak, dict(plan._current.fallback.recomputed),
                      plan.memory(), str(plan))
    rest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for _, buffer in sorted(model.named_buffers()):
        rest.update(buffer.numpy().tobytes())
    run.digest, run.warnings = done.digest() + rest.hexdigest(), [w for w in told if issubclass(w.category, RuntimeWarning)]
    return run


def one_rank() -> dict[str, Any]:
    """Rank 1 has a device half as large as the plan needs; then one on which nothing can be allocated."""
    rank, world = start()
    batches = [shares(world, t)[rank] for t in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        limit = Limit().install(patch)
        policy = {"act": "retain", "delivery": "sharded"}
        undisturbed = train(build(rank), batches, limit, policy=policy)
        limit.refuse = beyond(limit.peak * 2 // 3 if rank == 1 else 10**9)
        run = train(build(rank), batches, limit, policy=policy)
    told = ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(CpuBackend, "empty", nothing)
        try:
            slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, example=batches[0])
        except ValueError as e:
            told = str(e)
    return {"undisturbed": undisturbed.digest, "digest": run.digest, "refused": sum(run.refused), "told": told,
            "warnings": [str(w.message) for w in run.warnings]}


def fatal_on_one(delivery: str, done: str) -> dict[str, Any]:
    """Rank 1 has no memory at all in its second step. It lives until rank 0 has closed its plan, which waits for it in a
    collective meanwhile."""
    rank, world = start()
    with pytest.MonkeyPatch.context() as patch:
        limit = Limit().install(patch)
        plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, policy={"act": "recompute", "delivery": delivery})
        plan.run(shares(world, 0)[rank])
        plan.synchronize()
        limit.refuse = beyond(0 if rank == 1 else 10**9, OpKind.BACKWARD)
        try:
            for step in range(1, 4):
                plan.run(shares(world, step)[rank])
            told = "no error"
        except Exception as e:
            told = f"{type(e).__name__}: {e}"
        plan.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("slidedp")]
    if rank == 0:
        Path(done).touch()
    while not Path(done).exists():
        time.sleep(0.05)
    return {"told": told, "left": left}


def nothing(self: CpuBackend, numel: int, dtype: torch.dtype) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
