"""What `slidedp.compile` was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slidedp.compiler.costmodel.costs import CostModel, WithFallback
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.measured import Measurement
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.simulation.predict import cost_model_of

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """What `slidedp.compile` was asked for, checked. Budgets in bytes.

    `measure`: measure stages (True), take what is in the cache and else measure ("cached"), or neither (False).
    `update_threads`: of each rank, where known. `solver`, `hint`: see planning/decide.py. `cache_dir`: None for no cache.
    `may_speculate`: whether groups do, if updates wait for the norm, is to be decided. `validate`: steps of the plan, and of the
    default's, to be timed (validation.py), 0 for none; `same_bits`: only as far as no bit depends on which of them runs.
    """

    hw: HardwareProfile
    compute_dtype: torch.dtype
    grad_dtype: torch.dtype
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    loss_fn: Callable[..., Any] | None = None
    layers: Any = None
    policy: Mapping[str, Any] | PlanFile | None = None
    cost_model: CostModel | None = None
    hbm_budget: int | None = None
    host_budget: int | None = None
    measure: bool | str = False
    solver: str = "rule"
    hint: PlanFile | None = None
    cache_dir: Path | None = None
    update_threads: int | None = None
    may_speculate: bool = False
    validate: int = 0
    same_bits: bool = True

    @property
    def hbm_bytes(self) -> int:
        """What a plan may take of each GPU: the budget, or all there is."""
        return self.hw.hbm_bytes if self.hbm_budget is None else self.hbm_budget

    @property
    def host_bytes(self) -> int:
        """The same of the host."""
        return self.hw.host_bytes if self.host_budget is None else self.host_budget

    def cost_model_of(self, layers: LayerGraph, measurement: Measurement) -> WithFallback:
        """What ops of a plan of `layers` cost, each alone."""
        threads = None if self.update_threads is None else self.update_threads * self.world_size
        return cost_model_of(layers, cost_model=self.cost_model, measurement=measurement, update_threads=threads)
