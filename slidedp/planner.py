"""From a model and a batch to a verified OpGraph: trace, group, decide, lower. Pure planning; nothing runs here.

One :class:`Planner` serves one plan. The first batch fixes the parameter groups and the decisions; every further shape
(or other value that steers the model's Python) gets its own specialisation, which keeps both.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slidedp.autopolicy import AutoPlan
from slidedp.compiler.choices import pinned_fields
from slidedp.compiler.costs import CostModel, ResolvedCosts, WithFallback
from slidedp.compiler.decisions import Activation, Decisions
from slidedp.compiler.defaults import HEAD_ROWS, check_budgets, check_head, num_head_chunks
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.hardware import HardwareProfile
from slidedp.compiler.layergraph import Group, LayerGraph, chunk_rows
from slidedp.compiler.measured import Measurement
from slidedp.compiler.memory import estimate_memory
from slidedp.compiler.ops import OpGraph, OpKind
from slidedp.compiler.planfile import PlanFile, SolverRecord
from slidedp.compiler.predict import cost_model_of, predict, price
from slidedp.compiler.timeline import Timeline
from slidedp.compiler.tracer import Trace, guards_hold, specialisation_key, trace, with_head_chunks
from slidedp.decide import by_the_rule, decide, head_chunks_before_costs
from slidedp.passes.compute import Compute
from slidedp.passes.pipeline import lower

OWN_BUSINESS = frozenset({OpKind.RECOMPUTE, OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD})

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """What `slidedp.compile` was asked for, checked. Budgets in bytes.

    `measure`: measure stages (True), take what is in the cache and else measure ("cached"), or neither (False).
    `update_threads`: of each rank, where they are known. `solver`, `hint`: see slidedp/decide.py. `cache_dir`: None for no cache.
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

    def cost_model_of(self, layers: LayerGraph, measurement: Measurement) -> WithFallback:
        """What ops of a plan of `layers` cost, each alone."""
        threads = None if self.update_threads is None else self.update_threads * self.world_size
        return cost_model_of(layers, cost_model=self.cost_model, measurement=measurement, update_threads=threads)


@dataclass(frozen=True, eq=False)
class Specialisation:
    """One shape (and guard values) of a plan: its trace and its graphs. `num_tokens`: valid ones of the batch it was made for."""

    trace: Trace
    layers: LayerGraph
    decisions: Decisions
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]
    settings: Settings
    measurement: Measurement = field(default_factory=Measurement)
    solver: SolverRecord | None = None

    @cached_property
    def graph(self) -> OpGraph:
        """The graph of a training step."""
        return lower(self.layers, self.decisions, hbm_budget=self.settings.hbm_budget)

    @cached_property
    def forward_graph(self) -> OpGraph:
        """The graph of `evaluate`: deliveries, forward and loss."""
        return lower(self.layers, self.decisions, hbm_budget=self.settings.hbm_budget, training=False)

    @cached_property
    def costs(self) -> ResolvedCosts:
        """Of every op alone, from the user's cost model where it speaks, else as measured, else analytic."""
        return self.costs_of(self.graph)

    def costs_of(self, graph: OpGraph) -> ResolvedCosts:
        return price(graph, self.settings.cost_model_of(self.layers, self.measurement), self.settings.hw)

    @cached_property
    def default_step_us(self) -> int | None:
        """The predicted step of the default rule's plan, under the same costs; None if that plan does not fit."""
        try:
            defaults = by_the_rule(self.layers, self.settings)
        except ValueError:
            return None
        if defaults == self.decisions:
            return self.timeline.step_us
        graph = lower(self.layers, defaults, hbm_budget=self.settings.hbm_budget)
        return predict(graph, self.costs_of(graph), self.settings.hw).step_us

    @cached_property
    def timeline(self) -> Timeline:
        """Of a training step."""
        return predict(self.graph, self.costs, self.settings.hw)

    def signature(self, *, training: bool) -> int:
        """Of the ops in order that concern other ranks: those whose signatures differ would issue different collectives.

        What a rank keeps of its activations is its own business: a longer batch may have to keep less.
        """
        graph = self.graph if training else self.forward_graph
        return zlib.crc32("\n".join(op.name for op in graph.ops if op.kind not in OWN_BUSINESS).encode())


@dataclass(frozen=True, eq=False)
class Draft:
    """What one rank can do alone towards a specialisation: trace. Then decide, from what was measured meanwhile."""

    key: tuple[Any, ...]
    trace: Trace
    layers: LayerGraph
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]


class Planner:
    """Plans `model` under `settings`, one specialisation per shape, dtype, mode and guard values.

    `find` looks up; `draft`, `decide` and `finish` make a new one. Between the first two, stages may be measured
    (`measurement`); between the last two, ranks agree: the first decisions are this rank's own opinion.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.groups: tuple[Group, ...] | None = None
        self.decisions: Decisions | None = None
        self.head_rows = HEAD_ROWS[0]
        self.chosen: AutoPlan | None = None
        self.trainable: tuple[bool, ...] = ()
        self.measurement = Measurement()
        self.known: dict[tuple[Any, ...], list[Specialisation]] = {}

    def key(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Shapes and dtypes, and every module's mode. ValueError if parameters have been frozen or unfrozen since the start."""
        if self.groups is not None and self.trainable != requires_grad(self.model):
            raise ValueError("requires_grad of a parameter has changed since the plan was made: close it and compile anew")
        return specialisation_key(batch, self.model.training), tuple(m.training for m in self.model.modules())

    def find(self, batch: Mapping[str, Tensor]) -> Specialisation | None:
        """The specialisation whose shapes and guards fit `batch`, if there is one."""
        for spec in self.known.get(self.key(batch), ()):
            if guards_hold(spec.trace, batch) is None:
                return spec
        return None

    def draft(self, batch: Mapping[str, Tensor]) -> Draft:
        """Trace the model on `batch`. The model must not be running.

        Raises:
            TraceError: the model cannot be traced; ValueError: the batch does not fit; both say why.
        """
        s = self.settings
        traced = trace(self.model, batch, loss_fn=s.loss_fn, layers=s.layers, world_size=s.world_size,
                       compute_dtype=s.compute_dtype, device=s.device, groups=self.groups)
        layers = replace(traced.graph, grad_dtype=DTYPE_NAMES[s.grad_dtype])
        if not any(g.trainable for g in layers.groups):
            raise ValueError(f"{layers.model} has no trainable parameter that its loss depends on: set requires_grad on some")
        shapes = {key: tuple(value.shape) for key, value in batch.items()}
        return Draft(self.key(batch), traced, layers, traced.num_valid(batch), shapes)

    def to_measure(self, draft: Draft) -> Trace:
        """The trace to measure: logits in the chunks that the plan will have, so that measuring needs no more room than a step.

        Raises ValueError where the policy does not fit the model, saying why.
        """
        s, layers = self.settings, draft.layers
        if not s.measure:
            return draft.trace
        if self.decisions is None:
            num_chunks = head_chunks_before_costs(layers, s)
        else:
            num_chunks = self.for_shape(self.decisions, layers).head_chunks
        return with_head_chunks(draft.trace, self.model, num_chunks, s.device)

    def decide(self, draft: Draft) -> Decisions:
        """The plan's decisions, made for the first draft. Raises ValueError where policy or budgets do not fit, saying why."""
        s, layers = self.settings, draft.layers
        if self.decisions is None:
            self.chosen = decide(layers, s, self.measurement)
            decisions = self.chosen.decisions
            if layers.head and decisions.head_chunks > 1:
                self.head_rows = chunk_rows(layers.head.rows, decisions.head_chunks)
        else:
            decisions = self.for_shape(self.decisions, layers)
        check_head(layers, decisions)
        try:
            check_budgets(layers, decisions, s.hw.hbm_bytes if s.hbm_budget is None else s.hbm_budget,
                          s.hw.host_bytes if s.host_budget is None else s.host_budget)
        except BudgetError as error:
            if self.decisions is None:
                raise
            shape = " x ".join(map(str, max(draft.shapes.values(), key=math.prod, default=())))
            raise BudgetError(
                f"a batch of {shape} does not fit the plan: it was made for less, and what lives in HBM is fixed by now; "
                f"compile with example= the largest batch, or pin act=recompute ({error})") from error
        return decisions

    def finish(self, draft: Draft, decisions: Decisions) -> Specialisation:
        """The first specialisation's groups and `decisions` become those of the plan. Its graphs are lowered when asked for."""
        record = self.chosen.record if self.chosen and self.chosen.decisions == decisions else None
        agreed, decisions = decisions, self.for_shape(decisions, draft.layers)  # each rank's own: its batch may be longer
        traced = with_head_chunks(draft.trace, self.model, decisions.head_chunks, self.settings.device)
        spec = Specialisation(traced, draft.layers, decisions, draft.num_tokens, draft.shapes, self.settings, self.measurement,
                              record)
        if self.groups is None:
            _ = spec.graph  # verified before anything is pinned
            self.groups, self.decisions, self.trainable = draft.layers.groups, agreed, requires_grad(self.model)
        elif same := self.alike(draft.layers, decisions):
            spec.__dict__["graph"] = with_costs_of(same.graph, spec)
            if "forward_graph" in same.__dict__:
                spec.__dict__["forward_graph"] = same.forward_graph
        self.known.setdefault(draft.key, []).append(spec)
        return spec

    def for_shape(self, decisions: Decisions, layers: LayerGraph) -> Decisions:
        """The plan's `decisions` for a batch of another shape than they were made for, as far as nothing allocated depends on it.

        The logits are made in chunks of the same size. Where HBM has no room for what layers retain of a longer batch, those
        from the first on recompute instead, as many as must. What the user pinned stays.
        """
        policy = self.settings.policy
        if isinstance(policy, PlanFile):
            return decisions
        if "head_chunks" not in (policy or {}):
            decisions = replace(decisions, head_chunks=num_head_chunks(layers, self.head_rows))
        budget = self.settings.hw.hbm_bytes if self.settings.hbm_budget is None else self.settings.hbm_budget
        pinned = pinned_fields(layers, decisions, policy)
        for stage in layers.layers:
            if estimate_memory(layers, decisions).hbm_bytes <= budget:
                break
            name = stage.groups[0] if stage.groups else ""
            if name and "act" not in pinned[name] and decisions.activation(stage) in (Activation.RETAIN, Activation.SELECTIVE):
                less = replace(decisions.of(name), act=Activation.RECOMPUTE)
                decisions = replace(decisions, groups=decisions.groups | {name: less})
        return decisions

    def alike(self, layers: LayerGraph, decisions: Decisions) -> Specialisation | None:
        """A lowered specialisation with the same stages, groups and decisions: another batch shape changes no op and no edge."""
        shape = stages_of(layers), layers.groups, decisions.groups
        for spec in (spec for specs in self.known.values() for spec in specs if "graph" in spec.__dict__):
            if shape == (stages_of(spec.layers), spec.layers.groups, spec.decisions.groups):
                return spec
        return None


def stages_of(layers: LayerGraph) -> list[tuple[Any, ...]]:
    """What the ops of a graph depend on of its stages, whatever the batch's shape."""
    return [(s.name, s.groups, *((x.group, x.keys) for x in s.lookups)) for s in layers.stages]


def requires_grad(model: nn.Module) -> tuple[bool, ...]:
    return tuple(p.requires_grad for p in model.parameters())


def with_costs_of(graph: OpGraph, spec: Specialisation) -> OpGraph:
    """`graph`, lowered for another batch shape, with the bytes and flops of compute ops for this one."""
    fresh = {op.name: op for op in Compute(spec.layers, spec.decisions).run(OpGraph()).ops}
    ops = (replace(op, bytes=fresh[op.name].bytes, flops=fresh[op.name].flops) if op.name in fresh else op for op in graph.ops)
    return graph.with_(ops=tuple(ops))
