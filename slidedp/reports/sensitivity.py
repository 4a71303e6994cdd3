"""How a plan's step would be with other batches and other budgets: planned anew for each, on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from slidedp.compiler.decisions import Update
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.units import format_bytes
from slidedp.paper import plan_on_paper
from slidedp.planning.decide import decide
from slidedp.presets import PRESETS
from slidedp.progress import progress_bar
from slidedp.reports.what_if import WhatIf
from slidedp.settings import DTYPE_NAMES, Settings

BATCH_FACTORS = (0.25, 0.5, 1, 2, 4)
BUDGET_PARTS = (0.5, 0.7, 0.85, 0.95, 1, 2, 4)
"""HBM budgets to try, as shares of the device memory that the plan needs."""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan: what it was made for, or why there is none (`why`)."""

    label: str
    step_us: int = 0
    tokens_per_s: float = 0.0
    hbm_bytes: int = 0
    host_bytes: int = 0
    bottleneck: str = ""
    why: str = ""


def over_budgets(plan: PlanFile, world: WhatIf) -> tuple[Point, ...]:
    """The plan's model and batch under other device budgets, up to all that a device has; every decision made anew, which takes
    seconds each: a terminal sees how far it is.
    """
    most = world.hw.hbm_bytes
    sizes = sorted({min(most, round(part * plan.predictions.hbm_bytes)) for part in BUDGET_PARTS} | {most})
    tokens = plan.predictions.tokens_per_s * plan.predictions.step_us
    out = []
    for label, size in counted("planning for other budgets", {format_bytes(size): size for size in sizes}):
        there = replace(world, budgets=replace(world.budgets, hbm_bytes=size))
        try:
            outcome = there.outcome(decide(plan.layers, settings_of(plan, there), world.measurement).decisions)
        except ValueError as e:
            out.append(Point(label, why=str(e)))
            continue
        line, memory = outcome.timeline, outcome.memory
        rate = tokens / max(line.step_us, 1)
        out.append(Point(label, line.step_us, rate, memory.hbm_bytes, memory.host_bytes, str(line.bottleneck)))
    return tuple(out)


def counted(title: str, cases: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Each of `cases`, on a progress bar."""
    with progress_bar(title) as report:
        for done, (label, size) in enumerate(cases.items()):
            report(label, done, len(cases))
            yield label, size


def settings_of(plan: PlanFile, world: WhatIf) -> Settings:
    """What `compile` would be asked to plan such a step with, by the same solver as `plan`."""
    compute, grad = dtypes_of(plan)
    waits = plan.decisions.update is Update.DEFERRED
    return Settings(world.hw, compute, grad, plan.world_size, cost_model=world.cost_model, hbm_budget=world.budgets.hbm_bytes,
                    host_budget=world.budgets.host_bytes, solver=solver_of(plan), may_speculate=waits,
                    policy={"update": "deferred"} if waits else None)  # fmt: skip


def solver_of(plan: PlanFile) -> str:
    """The rule for a plan of the rule's: what differs in the points is then the batch or the budget alone."""
    return "cp-sat" if plan.solver else "rule"


def dtypes_of(plan: PlanFile) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of compute and of gradients."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return dtypes[plan.layers.compute_dtype], dtypes[plan.layers.grad_dtype]


def over_batches(plan: PlanFile, world: WhatIf, model: str | None = None) -> tuple[Point, ...]:
    """The plan's machine and budgets with fewer and more sequences a rank; every decision made anew.

    `model`: preset or config; default: the preset that the plan is of. ValueError, saying so, if it is of none.
    """
    batch, seq = batch_of(plan)
    model, same = model_of(plan, world, model)
    out = []
    sizes = sorted({max(1, round(batch * factor)) for factor in BATCH_FACTORS})
    for label, num in counted("planning for other batches", {f"{num} x {seq}": num for num in sizes}):
        try:
            p = (same if num == batch else replanned(plan, world, model, num, seq)).predictions
        except ValueError as e:
            out.append(Point(label, why=str(e)))
            continue
        out.append(Point(label, p.step_us, p.tokens_per_s, p.hbm_bytes, p.host_bytes, p.bottleneck))
    return tuple(out)


def replanned(plan: PlanFile, world: WhatIf, model: str, batch: int, seq: int) -> PlanFile:
    compute, grad = dtypes_of(plan)
    return plan_on_paper(
        model, world.hw, batch=batch, seq=seq, ranks=plan.world_size, compute_dtype=compute, grad_dtype=grad,
        hbm_budget=world.budgets.hbm_bytes, host_budget=world.budgets.host_bytes, cost_model=world.cost_model,
        solver=solver_of(plan), max_grad_norm=math.inf if plan.decisions.update is Update.DEFERRED else None)


def batch_of(plan: PlanFile) -> tuple[int, int]:
    """Sequences a rank, and tokens of each."""
    match = re.fullmatch(r"(\d+)x(\d+)", str(plan.specialisation.get("input_ids", "")))
    if not match:
        raise ValueError("the plan's batch has no input_ids of sequences and tokens")
    return int(match[1]), int(match[2])


def model_of(plan: PlanFile, world: WhatIf, model: str | None = None) -> tuple[str, PlanFile]:
    """`model`, or the preset that the plan is of, and what it is planned like for the plan's own batch."""
    batch, seq = batch_of(plan)
    for name in [model] if model else candidates(plan):
        again = replanned(plan, world, name, batch, seq)
        if again.model_hash == plan.model_hash:
            return name, again
    if model:
        raise ValueError(f"the plan is not of the model {model}: their structures differ")
    raise ValueError(f"the plan's model ({plan.layers.model or 'unnamed'}) is none of the presets: name it with --model")


def candidates(plan: PlanFile) -> Iterator[str]:
    """Presets with the plan's class of model and number of layers."""
    for name, config in PRESETS.items():
        same_class = plan.layers.model.lower().startswith(config["model_type"])
        if same_class and config["num_hidden_layers"] == len(plan.layers.layers):
            yield name
