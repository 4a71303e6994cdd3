"""From a model and a batch to a verified OpGraph: trace, group, decide, lower. Pure planning; nothing runs here.

One :class:`Planner` serves one plan. The first batch fixes the parameter groups and the decisions; every further shape
(or other value that steers the model's Python) gets its own specialisation, which keeps both.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slidedp.autopolicy import AutoPlan
from slidedp.batch import Batches, micro_batches
from slidedp.candidate import Candidate
from slidedp.compiler.choices import pinned_fields
from slidedp.compiler.costs import CostModel, ResolvedCosts, WithFallback
from slidedp.compiler.decisions import Activation, Boundary, Decisions, Rows
from slidedp.compiler.defaults import HEAD_ROWS, check_budgets, check_head, num_head_chunks
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.hardware import HardwareProfile
from slidedp.compiler.layergraph import Group, LayerGraph, chunk_rows, in_lanes, recut
from slidedp.compiler.measured import Measurement
from slidedp.compiler.memory import estimate_memory
from slidedp.compiler.ops import OpGraph, OpKind, split_lane
from slidedp.compiler.planfile import PlanFile, SolverRecord
from slidedp.compiler.policy import plan_fields
from slidedp.compiler.predict import cost_model_of, predict, price
from slidedp.compiler.rows import possible_split
from slidedp.compiler.timeline import Timeline
from slidedp.compiler.tracer import Trace, guards_hold, specialisation_key, trace, with_head_chunks
from slidedp.compiler.verdict import Verdict
from slidedp.decide import by_the_rule, decide, head_chunks_before_costs
from slidedp.executor.fallback import Expected, Fallback
from slidedp.executor.switching import Lowered
from slidedp.passes.compute import Compute
from slidedp.passes.pipeline import lower
from slidedp.passes.snapshot import Snapshot

OWN_BUSINESS = frozenset({OpKind.RECOMPUTE, OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD})

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Settings:
    """What `slidedp.compile` was asked for, checked. Budgets in bytes.

    `measure`: measure stages (True), take what is in the cache and else measure ("cached"), or neither (False).
    `update_threads`: of each rank, where they are known. `solver`, `hint`: see slidedp/decide.py. `cache_dir`: None for no cache.
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

    def cost_model_of(self, layers: LayerGraph, measurement: Measurement) -> WithFallback:
        """What ops of a plan of `layers` cost, each alone."""
        threads = None if self.update_threads is None else self.update_threads * self.world_size
        return cost_model_of(layers, cost_model=self.cost_model, measurement=measurement, update_threads=threads)


@dataclass(frozen=True, eq=False)
class Specialisation:
    """The shapes (and guard values) of a step: its traces, one a micro-batch, and its graphs.

    `num_tokens`: valid ones of the batch it was made for; `shapes`: of that, its micro-batches together. `same`: an earlier one
    whose ops these are, but for sizes: it is what runs. `fallback`: what its layers keep less of by now, for want of memory.
    """

    traces: tuple[Trace, ...]
    layers: LayerGraph
    decisions: Decisions
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]
    settings: Settings
    measurement: Measurement = field(default_factory=Measurement)
    solver: SolverRecord | None = None
    same: Specialisation | None = None
    fallback: Fallback = field(default_factory=Fallback)

    @cached_property
    def graph(self) -> OpGraph:
        """The graph of a training step."""
        if self.same is not None:
            return with_costs_of(self.same.graph, self)
        return lower(self.layers, self.decisions, hbm_budget=self.settings.hbm_budget)

    @property
    def lowered(self) -> Lowered:
        return Lowered(self.layers, self.graph, self.decisions)

    @cached_property
    def saving_graph(self) -> OpGraph:
        """The same, for a step while a save reads the state that it overwrites."""
        return Snapshot(self.layers, self.decisions).run(self.graph)

    @cached_property
    def forward_graph(self) -> OpGraph:
        """The graph of `evaluate`: deliveries, forward and loss."""
        return lower(self.layers, self.decisions, hbm_budget=self.settings.hbm_budget, training=False)

    def program(self, *, training: bool, saving: bool = False) -> OpGraph:
        """What runs: the graph of a step (`saving`: beside a save) or of `evaluate`, whatever sizes it says."""
        runs = self.same or self
        if not training:
            return runs.forward_graph
        return runs.saving_graph if saving else runs.graph

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

        What a rank keeps of its activations is its own business, for a longer batch may have to keep less; so is into how many
        micro-batches it cuts a batch, for a shorter one may have fewer rows.
        """
        ops = self.program(training=training).ops
        names = dict.fromkeys(split_lane(op.name)[0] for op in ops if op.kind not in OWN_BUSINESS)
        return zlib.crc32("\n".join(names).encode())


@dataclass(frozen=True, eq=False)
class Draft:
    """What one rank can do alone towards a specialisation: trace. Then decide, from what was measured meanwhile."""

    traces: tuple[Trace, ...]
    layers: LayerGraph
    num_tokens: int
    shapes: dict[str, tuple[int, ...]]

    @property
    def key(self) -> tuple[int, ...]:
        """Of a specialisation: traces are kept, so they are known by identity."""
        return tuple(map(id, self.traces))

    @property
    def signature(self) -> int:
        """Of the parameter groups, which decisions go by: the same on all ranks."""
        return zlib.crc32("\n".join(f"{g.name} {g.numel}" for g in self.layers.groups).encode())


class Planner:
    """Plans `model` under `settings`: a trace per shape, dtype, mode and guard values, a specialisation per sequence of traces.

    `lanes` cuts what a step runs on into micro-batches. `find` looks up; `draft`, `decide` and `finish` make a new one. Between
    `draft` and `decide`, stages may be measured (`measurement`); between the last two, ranks agree: the first decisions are this
    rank's own opinion.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.groups: tuple[Group, ...] | None = None
        self.decisions: Decisions | None = None
        self.head_rows = HEAD_ROWS[0]
        self.chosen: AutoPlan | None = None
        self.trainable: tuple[bool, ...] = ()
        self.measurement = Measurement()
        self.traced: dict[tuple[Any, ...], list[Trace]] = {}
        self.cut_traces: dict[tuple[int, int], tuple[Trace, Trace]] = {}  # with the whole one, which it is known by
        self.known: dict[tuple[int, ...], Specialisation] = {}
        self.verdict: Verdict | None = None

    @property
    def slices(self) -> int:
        """Pieces that a batch is cut into: as the plan decides, or before there is one, as is pinned."""
        policy = self.settings.policy
        if self.decisions is not None or isinstance(policy, PlanFile):
            return (self.decisions or policy.decisions).slices  # type: ignore[union-attr]
        pinned = {key: value for key, value in (policy or {}).items() if key == "slices"}
        return Decisions(**plan_fields(pinned, "policy")).slices

    def lanes(self, batches: Batches) -> list[dict[str, Tensor]]:
        """The micro-batches of a step on `batches`. Raises BatchError where they cannot be run."""
        return micro_batches(batches, self.slices)

    def key(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Shapes and dtypes, and every module's mode. ValueError if parameters have been frozen or unfrozen since the start."""
        if self.groups is not None and self.trainable != requires_grad(self.model):
            raise ValueError("requires_grad of a parameter has changed since the plan was made: close it and compile anew")
        return specialisation_key(batch, self.model.training), tuple(m.training for m in self.model.modules())

    def trace_for(self, batch: Mapping[str, Tensor]) -> Trace | None:
        """The trace whose shapes and guards fit `batch`, if there is one."""
        return next((t for t in self.traced.get(self.key(batch), ()) if guards_hold(t, batch) is None), None)

    def find(self, lanes: Sequence[Mapping[str, Tensor]]) -> Specialisation | None:
        """The specialisation for these micro-batches, if there is one."""
        return self.known.get(tuple(id(self.trace_for(batch)) for batch in lanes))

    def draft(self, lanes: Sequence[Mapping[str, Tensor]]) -> Draft:
        """Trace the model on each of the micro-batches that has no trace yet; then it must not be running.

        Raises:
            TraceError: the model cannot be traced; ValueError: a batch does not fit; both say why.
        """
        traces: list[Trace] = []
        if self.groups is None:
            self.traced.clear()  # of a start that has failed: the model may be another by now
        for batch in lanes:
            found = self.trace_for(batch)
            if found is None:
                found = self.trace(batch, self.groups or (traces[0].graph.groups if traces else None))
                self.traced.setdefault(self.key(batch), []).append(found)
            traces.append(found)
        layers = in_lanes([t.graph for t in traces], self.slices)
        shapes = {key: together([tuple(batch[key].shape) for batch in lanes if key in batch]) for key in lanes[0]}
        tokens = sum(t.num_valid(batch) for t, batch in zip(traces, lanes, strict=True))
        return Draft(tuple(traces), layers, tokens, shapes)

    def trace(self, batch: Mapping[str, Tensor], groups: tuple[Group, ...] | None) -> Trace:
        s = self.settings
        traced = trace(self.model, batch, loss_fn=s.loss_fn, layers=s.layers, world_size=s.world_size,
                       compute_dtype=s.compute_dtype, device=s.device, groups=groups)
        layers = replace(traced.graph, grad_dtype=DTYPE_NAMES[s.grad_dtype])
        if not any(g.trainable for g in layers.groups):
            raise ValueError(f"{layers.model} has no trainable parameter that its loss depends on: set requires_grad on some")
        return replace(traced, graph=layers)

    def with_head_chunks(self, traced: Trace, num_chunks: int) -> Trace:
        """`traced` with its logits made in so many chunks; the same object for the same question."""
        key = id(traced), num_chunks
        if key not in self.cut_traces:
            self.cut_traces[key] = traced, with_head_chunks(traced, self.model, num_chunks, self.settings.device)
        return self.cut_traces[key][1]

    def to_measure(self, draft: Draft) -> Trace:
        """The trace to measure, the first micro-batch's: logits in the chunks that the plan will have, so that measuring needs
        no more room than a step.

        Raises ValueError where the policy does not fit the model, saying why.
        """
        s, layers = self.settings, draft.layers
        if not s.measure:
            return draft.traces[0]
        if self.decisions is None:
            num_chunks = head_chunks_before_costs(layers, s)
        else:
            num_chunks = self.for_shape(self.decisions, layers).head_chunks
        return self.with_head_chunks(draft.traces[0], num_chunks)

    def decide(self, draft: Draft) -> Decisions:
        """The plan's decisions, made for the first draft. Raises ValueError where policy or budgets do not fit, saying why."""
        s, layers = self.settings, draft.layers
        if self.decisions is None:
            try:
                self.chosen = decide(layers, s, self.measurement)
            except BudgetError as error:
                raise BudgetError(f"{error}{self.slices_that_fit(draft)}") from error
            decisions = self.chosen.decisions
            if layers.head and decisions.head_chunks > 1:
                self.head_rows = chunk_rows(layers.head.rows, decisions.head_chunks)
        else:
            decisions = self.for_shape(self.decisions, layers)
        check_head(layers, decisions)
        try:
            check_budgets(layers, decisions, self.hbm_bytes, s.hw.host_bytes if s.host_budget is None else s.host_budget)
        except BudgetError as error:
            if self.decisions is None:
                raise
            shape = " x ".join(map(str, max(draft.shapes.values(), key=math.prod, default=())))
            num = len(draft.traces)
            what = f"a batch of {shape} does" if num == 1 else f"{num} micro-batches of {shape} do"
            raise BudgetError(
                f"{what} not fit the plan: it was made for less, and what lives in HBM is fixed by now; "
                f"compile with example= the largest batch, or pin act=recompute ({error})") from error
        return decisions

    def slices_that_fit(self, draft: Draft) -> str:
        """The fewest slices with which the rule's plan fits, about, as a further way out; '' if none are enough, or pinned."""
        policy, rows = self.settings.policy, min((shape[0] for shape in draft.shapes.values() if shape), default=1)
        for slices in () if isinstance(policy, PlanFile) or "slices" in (policy or {}) else (2, 4, 8, 16, 32, 64):
            if slices <= rows:
                with suppress(BudgetError):
                    decide(recut(draft.layers, slices), replace(self.settings, solver="rule"))
                    return f"; or pin slices={slices}"
        return ""

    def finish(self, draft: Draft, decisions: Decisions) -> Specialisation:
        """The first specialisation's groups and `decisions` become those of the plan. Its graphs are lowered when asked for."""
        record = self.chosen.record if self.chosen and self.chosen.decisions == decisions else None
        if self.groups is None:
            decisions = with_possible_rows(draft.layers, decisions)
        agreed, decisions = decisions, self.for_shape(decisions, draft.layers)  # each rank's own: its batch may be longer
        traces = tuple(self.with_head_chunks(t, decisions.head_chunks) for t in draft.traces)
        spec = Specialisation(traces, draft.layers, decisions, draft.num_tokens, draft.shapes, self.settings, self.measurement,
                              record, self.alike(draft.layers, decisions), Fallback(self.expected(draft, decisions)))
        if self.groups is None:
            _ = spec.graph  # verified before anything is pinned
            self.groups, self.decisions, self.trainable = draft.layers.groups, agreed, requires_grad(self.model)
        self.known[draft.key] = spec
        return spec

    def expected(self, draft: Draft, decisions: Decisions) -> Expected:
        rows = min((shape[0] for shape in draft.shapes.values() if shape), default=1)
        return Expected(estimate_memory(draft.layers, decisions).hbm_bytes, self.hbm_bytes, rows)

    @property
    def hbm_bytes(self) -> int:
        return self.settings.hw.hbm_bytes if self.settings.hbm_budget is None else self.settings.hbm_budget

    def candidates(self, draft: Draft, spec: Specialisation, rival: Decisions) -> tuple[Candidate, Candidate]:
        """The plan, whose first specialisation `spec` is, and one with other decisions, for the same batch."""
        assert self.decisions is not None
        rival = with_possible_rows(draft.layers, rival)
        decisions = self.for_shape(rival, draft.layers)
        other = replace(spec, decisions=decisions, solver=None, same=None, fallback=Fallback(self.expected(draft, decisions)))
        _ = other.graph  # verified
        return Candidate(self.decisions, spec, self.known), Candidate(rival, other, {draft.key: other})

    def use(self, candidate: Candidate) -> None:
        """What follows is of this plan."""
        self.decisions, self.known = candidate.decisions, candidate.known

    def for_shape(self, decisions: Decisions, layers: LayerGraph) -> Decisions:
        """The plan's `decisions` for a batch of another shape than they were made for, as far as nothing allocated depends on it.

        The logits are made in chunks of the same size. Where HBM has no room for what layers retain of a longer batch, those
        from the first on recompute instead, as many as must; where it has none for the boundaries of many micro-batches, these
        wait on the host. What the user pinned stays.
        """
        policy = self.settings.policy
        if isinstance(policy, PlanFile):
            return decisions
        if "head_chunks" not in (policy or {}):
            decisions = replace(decisions, head_chunks=num_head_chunks(layers, self.head_rows))
        budget = self.hbm_bytes
        pinned = pinned_fields(layers, decisions, policy)
        for stage in layers.layers:
            if estimate_memory(layers, decisions).hbm_bytes <= budget:
                return decisions
            name = stage.groups[0] if stage.groups else ""
            if name and "act" not in pinned[name] and decisions.activation(stage) in (Activation.RETAIN, Activation.SELECTIVE):
                less = replace(decisions.of(name), act=Activation.RECOMPUTE)
                decisions = replace(decisions, groups=decisions.groups | {name: less})
        if layers.num_lanes == 1 or estimate_memory(layers, decisions).hbm_bytes <= budget:
            return decisions
        movable = [name for name in decisions.groups if "boundary" not in pinned[name]]
        away = {name: replace(decisions.of(name), boundary=Boundary.HOST) for name in movable}
        return replace(decisions, groups=decisions.groups | away)

    def alike(self, layers: LayerGraph, decisions: Decisions) -> Specialisation | None:
        """A lowered specialisation with the same stages, groups and decisions: another batch shape changes no op and no edge."""
        for spec in self.known.values():
            lowered = "graph" in spec.__dict__ and spec.same is None
            if lowered and structure(layers, decisions) == structure(spec.layers, spec.decisions):
                return spec
        return None


def structure(layers: LayerGraph, decisions: Decisions) -> tuple[object, ...]:
    """What decides ops and edges, but for their sizes."""
    stages = [(s.name, s.groups, *((x.group, x.keys) for x in s.lookups)) for s in layers.stages]
    return stages, layers.groups, layers.num_lanes, decisions.groups


def together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The rows of all; the first, where they differ in more than that."""
    first = shapes[0]
    alike = first and all(shape[1:] == first[1:] for shape in shapes)
    return (sum(shape[0] for shape in shapes), *first[1:]) if alike else first


def requires_grad(model: nn.Module) -> tuple[bool, ...]:
    return tuple(p.requires_grad for p in model.parameters())


def with_costs_of(graph: OpGraph, spec: Specialisation) -> OpGraph:
    """`graph`, lowered for another batch shape, with the bytes and flops of compute ops for this one."""
    fresh = {op.name: op for op in Compute(spec.layers, spec.decisions).run(OpGraph()).ops}
    ops = (replace(op, bytes=fresh[op.name].bytes, flops=fresh[op.name].flops) if op.name in fresh else op for op in graph.ops)
    return graph.with_(ops=tuple(ops))


def with_possible_rows(layers: LayerGraph, decisions: Decisions) -> Decisions:
    """`decisions` with rows split only where that can be: what a plan says of its first step holds for all later ones.

    Not of a plan with slices: a rank whose batch is of one row would split, and others could not.
    """
    whole = {g.name: replace(decisions.of(g.name), rows=Rows.WHOLE) for g in layers.groups
             if decisions.of(g.name).rows is Rows.SPLIT and (decisions.slices > 1 or possible_split(layers, g) is None)}
    return replace(decisions, groups=decisions.groups | whole) if whole else decisions
