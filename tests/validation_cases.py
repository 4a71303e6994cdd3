"""A plan on trial beside the default's, for tests: what decides and what the clock says are made up.

Also what a process trains by itself, and what ranks run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from rank_cases import OPTIMIZER, build, shares, start
from tiny_models import PlainGPT, lm_batch
from training import Trained, state_of

import slidedp
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.planfile.planfile import SolverRecord
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.executor.machine import switching
from slidedp.executor.machine.step import Step
from slidedp.executor.options import MachineOptions
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.decide import by_the_rule
from slidedp.settings import Settings
from slidedp.trial import validation

RECORD = SolverRecord("cp-sat", 1000, 900, 0.1, 1100, 2000, 1)
EXACT = MachineOptions(update_kernel="torch", poison=True)
HBM = {"state": "hbm"}
PLANS: dict[str, dict[str, Any]] = {
    "cast": {"chunks": 3, "source": "cast", "window": 2, "act": "retain"},
    "offload": {"chunks": 2, "act": "offload", "boundary": "host", "weights": "hold"},
    "some in HBM": {"layers": {"L01": HBM, "prologue": HBM}},
    "all in HBM": HBM | {"chunks": 2},
}


@contextmanager
def on_trial(policy: Mapping[str, Any], seconds: Callable[[Step, bool], float]) -> Iterator[None]:
    """The "solver" chooses what `policy` says; a step takes ``seconds(step, it is one of the solver's plan)``."""
    chosen: list[Decisions] = []

    def decide(layers: LayerGraph, s: Settings, measurement: object = None) -> AutoPlan:
        pinned = default_decisions(layers, s.hw, policy={**(s.policy or {}), **policy})  # type: ignore[dict-item]
        chosen[:] = [pinned]
        return AutoPlan(pinned, RECORD, rule=by_the_rule(layers, s))

    def seconds_of(step: Step) -> float:
        step.machine.wait_compute(step)
        return seconds(step, step.machine.plan.decisions.groups == chosen[0].groups)

    with patch("slidedp.planning.planner.decide", decide), patch("slidedp.trial.validation.seconds_of", seconds_of):
        yield


def batches(num: int = 6) -> list[dict[str, torch.Tensor]]:
    return [lm_batch(seed=i) for i in range(num)]


def model() -> PlainGPT:
    torch.manual_seed(0)
    return PlainGPT()


def train(after: Any = None, steps: Any = None, **options: Any) -> tuple[str, slidedp.Plan]:
    """Digest of losses, weights and moments, and the plan, closed. `after`: called with plan and number after each step."""
    plan = slidedp.compile(model(), "cpu", optimizer=OPTIMIZER, **options)
    plan._options = replace(EXACT, max_grad_norm=options.get("max_grad_norm"))
    losses = []
    with plan:
        for i, batch in enumerate(steps or batches()):
            losses.append(plan.run(batch).loss)
            if after is not None:
                after(plan, i)
        return replace(state_of(plan), losses=losses, grads=[]).digest(), plan


def slower(plan: bool) -> Any:
    return lambda step, of_plan: 2.0 if of_plan is plan else 1.0


RANKS_PLANS: dict[str, dict[str, Any]] = {
    "replicated": {"delivery": "replicated", "chunks": 3, "reduction": "cpu", "source": "cast", "act": "retain"},
    "resident": {"delivery": "sharded", "chunks": 2, "layers": {"L01": {"state": "hbm"}, "shared0": {"state": "hbm"}}},
}


def train_rank(rank: int, world: int, num_steps: int = 5, **options: Any) -> tuple[Trained, slidedp.Plan]:
    plan = slidedp.compile(build(rank), "cpu", optimizer=OPTIMIZER, **options)
    plan._options = EXACT
    losses = [plan.run(shares(world, step)[rank]).loss for step in range(num_steps)]
    done = state_of(plan)
    plan.close()
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, []), plan


def on_ranks(cache: str) -> dict[str, Any]:
    """Digests with and without a trial; then its verdict from the cache; then a rank that has no room."""
    rank, world = start()
    want, _ = train_rank(rank, world)
    with on_trial(RANKS_PLANS["resident"], lambda step, of_plan: 3.0 if rank == 1 and not of_plan else 2.0):
        got, plan = train_rank(rank, world, validate=1, cache_dir=cache)
        with slidedp.compile(build(rank), "cpu", example=shares(world, 0)[rank], validate=1, cache_dir=cache) as again:
            cached = again._trial is None and again.validation == plan.validation
    assert plan.validation is not None
    return {
        "want": want.digest(), "got": got.digest(), "cached": cached, "kept": plan.validation.kept,
        "measured": [plan.validation.plan_measured_us, plan.validation.default_measured_us],
        "states": sorted({str(d.state) for d in plan.decisions.groups.values()}),
        "no room": failing_on_one_rank(rank, world, want.losses),
    }


def failing_on_one_rank(rank: int, world: int, losses: list[float]) -> dict[str, Any]:
    """Rank 1 has no room for the default's buffers."""
    whole, calls = switching.Buffers, []

    class NoRoom(whole):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            calls.append(args)
            if rank == 1 and len(calls) == 2:
                raise RuntimeError("no memory for this")
            super().__init__(*args)

    with on_trial(RANKS_PLANS["replicated"], lambda step, of_plan: 1.0), patch.object(switching, "Buffers", NoRoom), \
            patch.object(validation.log, "log") as said:
        got, plan = train_rank(rank, world, 4, validate=1)
    return {"losses": got.losses == losses[:4], "calls": len(calls), "validated": plan.validation is not None,
            "act": str(plan.decisions.of("L00").act), "said": said.call_args.args[1]}
