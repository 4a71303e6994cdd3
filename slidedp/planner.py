"""From a model and a batch to a verified OpGraph: trace, group, decide, lower. Pure planning; nothing runs here.

One :class:`Planner` serves one plan. The first batch fixes the parameter groups and the decisions; every further shape
(or other value that steers the model's Python) gets its own specialisation, which keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from slidedp.compiler.costs import AnalyticCostModel, CostModel, ResolvedCosts, resolve
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.defaults import default_decisions
from slidedp.compiler.hardware import HardwareProfile
from slidedp.compiler.layergraph import Group, LayerGraph
from slidedp.compiler.ops import OpGraph
from slidedp.compiler.planfile import PlanFile
from slidedp.compiler.simulate import Timeline, simulate
from slidedp.compiler.tracer import Trace, guards_hold, specialisation_key, trace
from slidedp.passes.pipeline import lower

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """What `slidedp.compile` was asked for, checked. Budgets in bytes."""

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

    @property
    def analytic(self) -> AnalyticCostModel:
        return AnalyticCostModel(self.world_size, DTYPE_NAMES[self.compute_dtype])


@dataclass(frozen=True, eq=False)
class Specialisation:
    """One shape (and guard values) of a plan: its trace and its graphs. `num_tokens`: valid ones of the batch it was made for."""

    trace: Trace
    layers: LayerGraph
    decisions: Decisions
    graph: OpGraph
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]
    settings: Settings

    @cached_property
    def costs(self) -> ResolvedCosts:
        """Of every op, from the user's cost model where it speaks, else analytic."""
        return resolve(self.graph.ops, self.settings.hw, self.settings.analytic, self.settings.cost_model)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.graph, self.costs.duration_us)

    @cached_property
    def forward_graph(self) -> OpGraph:
        """The graph of `evaluate`: deliveries, forward and loss."""
        return lower(self.layers, self.decisions, hbm_budget=self.settings.hbm_budget, training=False)


@dataclass(frozen=True, eq=False)
class Draft:
    """What one rank can do alone towards a specialisation: trace and decide."""

    key: tuple[Any, ...]
    trace: Trace
    layers: LayerGraph
    decisions: Decisions
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]


class Planner:
    """Plans `model` under `settings`, one specialisation per shape, dtype and guard values.

    `find` looks up; `draft` and `finish` make a new one. Between the two, ranks agree: the first draft's decisions are
    this rank's own opinion.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.groups: tuple[Group, ...] | None = None
        self.decisions: Decisions | None = None
        self.known: dict[tuple[Any, ...], list[Specialisation]] = {}

    def find(self, batch: Mapping[str, Tensor]) -> Specialisation | None:
        """The specialisation whose shapes and guards fit `batch`, if there is one."""
        for spec in self.known.get(specialisation_key(batch, self.model.training), ()):
            if guards_hold(spec.trace, batch) is None:
                return spec
        return None

    def draft(self, batch: Mapping[str, Tensor]) -> Draft:
        """Trace the model on `batch` and decide. The model must not be running.

        Raises:
            TraceError: the model cannot be traced; ValueError: the batch, policy or budgets do not fit; both say why.
        """
        s = self.settings
        traced = trace(self.model, batch, loss_fn=s.loss_fn, layers=s.layers, world_size=s.world_size,
                       compute_dtype=s.compute_dtype, device=s.device, groups=self.groups)
        layers = replace(traced.graph, grad_dtype=DTYPE_NAMES[s.grad_dtype])
        shapes = {key: tuple(value.shape) for key, value in batch.items()}
        return Draft(specialisation_key(batch, self.model.training), traced, layers, self.decisions or decide(layers, s),
                     traced.num_valid(batch), shapes)

    def finish(self, draft: Draft, decisions: Decisions) -> Specialisation:
        """Lower and verify. The first specialisation's groups and `decisions` become those of the plan."""
        s = self.settings
        graph = lower(draft.layers, decisions, hbm_budget=s.hbm_budget)
        self.groups, self.decisions = draft.layers.groups, decisions  # only now: a failed first batch must not pin anything
        spec = Specialisation(draft.trace, draft.layers, decisions, graph, draft.num_tokens, draft.shapes, s)
        self.known.setdefault(draft.key, []).append(spec)
        return spec


def decide(layers: LayerGraph, settings: Settings) -> Decisions:
    """Defaults for what nobody pinned, the policy for the rest; a loaded plan must be of this model and rank count."""
    policy = settings.policy
    if isinstance(policy, PlanFile):
        policy.require(layers)
        return policy.decisions
    return default_decisions(layers, settings.hw, policy=policy, cost_model=settings.cost_model, hbm_budget=settings.hbm_budget,
                             host_budget=settings.host_budget)
