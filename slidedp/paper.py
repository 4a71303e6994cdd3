"""Planning on paper: what a model would do on a machine that need not be here. No GPU, no weights, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidedp.api import Policy, check_solver, deferred, load_hint, load_policy, pins_updates
from slidedp.cache import cache_folder
from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.units import parse_bytes
from slidedp.hardware import load_profile
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.planner import Planner
from slidedp.planning.specialisation import Draft
from slidedp.presets import build_meta_model
from slidedp.reports.report import planfile_of
from slidedp.settings import Settings


def plan_on_paper(
    model: str | Path | nn.Module,
    hw_profile: str | Path | HardwareProfile,
    *,
    batch: int,
    seq: int,
    ranks: int | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    hbm_budget: int | str | None = None,
    host_budget: int | str | None = None,
    max_grad_norm: float | None = None,
    policy: Policy = None,
    cost_model: CostModel | None = None,
    solver: str = "cp-sat",
    hint: PlanFile | str | Path | None = None,
    cache_dir: str | Path | None = None,
    on_choice: Callable[[AutoPlan], None] | None = None,
) -> PlanFile:
    """The plan of `model` on `hw_profile`, for a batch of `batch` full sequences of `seq` tokens per rank.

    Args:
        model: the name of a preset, a Hugging Face config (directory or file), or a causal language model that takes
            `input_ids` and `labels`, on any device, `meta` too.
        hw_profile: built-in name, YAML path, HardwareProfile, or "auto".
        ranks: default: the machine's number of GPUs.
        compute_dtype: default: bfloat16, float32 on a machine without a GPU.
        grad_dtype: of returned gradients; default `compute_dtype`.
        max_grad_norm: if given, updates wait for the norm, whatever the limit, and which of them speculate is decided.
        hbm_budget, host_budget, policy, cost_model, solver, hint, cache_dir: as for `slidedp.compile`.
        on_choice: is told what was chosen and how long it took, which is no part of the plan.

    Raises:
        ValueError: names what does not fit and the remedy. TraceError (a ValueError): the model cannot be traced.
    """
    pins = load_policy(policy)
    settings = settings_on_paper(
        load_profile(hw_profile), ranks, compute_dtype=compute_dtype, grad_dtype=grad_dtype,
        policy=pins if max_grad_norm is None else deferred(pins), may_speculate=not pins_updates(pins), cost_model=cost_model,
        hbm_budget=None if hbm_budget is None else parse_bytes(hbm_budget),
        host_budget=None if host_budget is None else parse_bytes(host_budget),
        solver=check_solver(solver), hint=load_hint(hint), cache_dir=cache_folder(cache_dir))
    planner, draft = draft_on_paper(model, settings, batch, seq)
    decisions = planner.decide(draft)
    if on_choice and planner.chosen:
        on_choice(planner.chosen)
    return planfile_of(planner.finish(draft, decisions))


def settings_on_paper(hw: HardwareProfile, ranks: int | None, *, compute_dtype: torch.dtype | None = None,
                      grad_dtype: torch.dtype | None = None, **more: Any) -> Settings:
    """What a machine of `hw` would plan with; `more`: other fields of Settings, checked. ValueError for less than one rank."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks={ranks!r} must be 1 or more")
    compute = compute_dtype or (torch.float32 if hw.gpu_name == "cpu" else torch.bfloat16)
    return Settings(hw=hw, compute_dtype=compute, grad_dtype=grad_dtype or compute, world_size=ranks or hw.num_gpus, **more)


def draft_on_paper(model: str | Path | nn.Module, settings: Settings, batch: int, seq: int) -> tuple[Planner, Draft]:
    """The model traced on full sequences. ValueError for an empty batch, or a model that there is not."""
    for name, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be 1 or more")
    planner = Planner(model if isinstance(model, nn.Module) else build_meta_model(model), settings)
    tokens = torch.zeros(batch, seq, dtype=torch.long)  # only the shape matters
    _, draft = planner.first_draft({"input_ids": tokens, "labels": tokens})
    return planner, draft
