"""From a model and a batch to a verified OpGraph: trace, group, decide, lower. Pure planning; nothing runs here.

One :class:`Planner` serves one plan. The first batch fixes the parameter groups and the decisions; every further shape
(or other value that steers the model's Python) gets its own specialisation, which keeps both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from slidedp.batch import Batches, micro_batches
from slidedp.compiler.costmodel.measured import Measurement
from slidedp.compiler.decisions import Activation, Boundary, Decisions, Rows
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.eventgraph.choices import pinned_fields
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import Group, LayerGraph, chunk_rows, in_lanes, recut
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.planfile.verdict import Verdict
from slidedp.compiler.policy import plan_fields
from slidedp.compiler.rows import possible_split
from slidedp.compiler.solver.defaults import HEAD_ROWS, check_budgets, check_head, num_head_chunks, with_fewest_away
from slidedp.compiler.tracing.tracer import Trace, guards_hold, specialisation_key, trace, with_head_chunks
from slidedp.executor.stages.fallback import Expected, Fallback
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.candidate import Candidate
from slidedp.planning.decide import decide, head_chunks_before_costs
from slidedp.planning.recheck import Recheck
from slidedp.planning.slicing import COUNTS, Slicing, choose_slices, most_slices, plan_of, why_whole
from slidedp.planning.specialisation import Draft, Specialisation
from slidedp.settings import DTYPE_NAMES, Settings


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
        self.slicing = Slicing()
        self.chosen: AutoPlan | None = None
        self.trainable: tuple[bool, ...] = ()
        self.measurement = Measurement()
        self.traced: dict[tuple[Any, ...], list[Trace]] = {}
        self.cut_traces: dict[tuple[int, int], tuple[Trace, Trace]] = {}  # with the whole one, which it is known by
        self.known: dict[tuple[int, ...], Specialisation] = {}
        self.verdict: Verdict | None = None
        self.recheck: Recheck | None = None

    @property
    def slices(self) -> int:
        """Pieces that a batch is cut into: as the plan decides, or before there is one, as is pinned, or else as was settled."""
        policy = self.settings.policy
        if self.decisions is not None or isinstance(policy, PlanFile):
            return (self.decisions or policy.decisions).slices  # type: ignore[union-attr]
        if not self.pins_slices:
            return self.slicing.slices
        return Decisions(**plan_fields({"slices": policy["slices"]}, "policy")).slices  # type: ignore[index]

    @property
    def pins_slices(self) -> bool:
        policy = self.settings.policy
        return isinstance(policy, PlanFile) or "slices" in (policy or {})

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

    def first_draft(self, batches: Batches) -> tuple[list[dict[str, Tensor]], Draft]:
        """The lanes of the first step and their draft, once it is settled into how many slices its batches are cut.

        Raises as :meth:`lanes` and :meth:`draft`.
        """
        self.slicing = Slicing()
        lanes = self.lanes(batches)
        draft = self.draft(lanes)
        if self.pins_slices or why_whole(self.model, self.settings.loss_fn) or (most := most_slices(batches)) == 1:
            return lanes, draft

        def cut(slices: int) -> LayerGraph:
            return self.in_slices(batches, Slicing(slices))[1].layers

        self.slicing = choose_slices(draft.layers, most, draft.num_tokens, self.settings, cut)
        return (lanes, draft) if self.slicing.slices == 1 else self.in_slices(batches, self.slicing)

    def in_slices(self, batches: Batches, slicing: Slicing) -> tuple[list[dict[str, Tensor]], Draft]:
        """The first step's lanes and draft in so many slices, whatever has been settled before."""
        self.slicing = slicing
        lanes = self.lanes(batches)
        return lanes, self.draft(lanes)

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
            check_budgets(layers, decisions, s.hbm_bytes, s.host_bytes)
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
        rows = min((shape[0] for shape in draft.shapes.values() if shape), default=1)
        why = why_whole(self.model, self.settings.loss_fn)
        for slices in COUNTS if why and not self.pins_slices else ():
            if slices <= rows and plan_of(recut(draft.layers, slices), self.settings) is not None:
                return f"; or pin slices={slices} (never chosen for this model, since {why})"
        return ""

    def finish(self, draft: Draft, decisions: Decisions) -> Specialisation:
        """The first specialisation's groups and `decisions` become those of the plan. Its graphs are lowered when asked for."""
        record = self.chosen.record if self.chosen and self.chosen.decisions == decisions else None
        if self.groups is None:
            decisions = with_possible_rows(draft.layers, decisions)
        agreed, decisions = decisions, self.for_shape(decisions, draft.layers)  # each rank's own: its batch may be longer
        traces = tuple(self.with_head_chunks(t, decisions.head_chunks) for t in draft.traces)
        spec = Specialisation(traces, draft.layers, decisions, draft.num_tokens, draft.shapes, self.settings, self.measurement,
                              record, self.alike(draft.layers, decisions), Fallback(self.expected(draft, decisions)),
                              self.slicing.why)
        if self.groups is None:
            _ = spec.graph  # verified before anything is pinned
            self.groups, self.decisions, self.trainable = draft.layers.groups, agreed, requires_grad(self.model)
        self.known[draft.key] = spec
        return spec

    def forget(self) -> None:
        """A start has failed, on some rank: the next first batch settles groups and decisions anew, on every rank."""
        self.groups = self.decisions = self.verdict = self.recheck = None
        self.known.clear()

    def expected(self, draft: Draft, decisions: Decisions) -> Expected:
        rows = min((shape[0] for shape in draft.shapes.values() if shape), default=1)
        return Expected(estimate_memory(draft.layers, decisions).hbm_bytes, self.settings.hbm_bytes, rows,
                        named=self.settings.hbm_budget is not None)

    def candidates(self, draft: Draft, spec: Specialisation, rival: Decisions) -> tuple[Candidate, Candidate]:
        """The plan, whose first specialisation `spec` is, and one with other decisions, for the same batch."""
        assert self.decisions is not None
        rival = with_possible_rows(draft.layers, rival)
        decisions = self.for_shape(rival, draft.layers)
        other = replace(spec, decisions=decisions, solver=None, same=None, fallback=Fallback(self.expected(draft, decisions)))
        _ = other.graph  # verified
        return Candidate(self.decisions, spec, self.known), Candidate(rival, other, {draft.key: other})

    def use(self, candidate: Candidate) -> None:
        """Makes this candidate's plan the one that following calls refer to."""
        self.decisions, self.known = candidate.decisions, candidate.known

    def for_shape(self, decisions: Decisions, layers: LayerGraph) -> Decisions:
        """The plan's `decisions` for a batch of another shape than they were made for, as far as nothing allocated depends on it.

        The logits are made in chunks of the same size. Where HBM has no room for what layers retain of a longer batch, those
        from the first on recompute instead, as many as must; where it has none for the boundaries of many micro-batches, those of
        the first layers wait on the host, as many as must. What the user pinned stays.
        """
        policy = self.settings.policy
        if isinstance(policy, PlanFile):
            return decisions
        if "head_chunks" not in (policy or {}):
            decisions = replace(decisions, head_chunks=num_head_chunks(layers, self.head_rows))
        budget = self.settings.hbm_bytes
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
        movable = [name for stage in layers.layers for name in stage.groups[:1] if "boundary" not in pinned[name]]

        def with_away(num: int) -> Decisions:
            away = {name: replace(decisions.of(name), boundary=Boundary.HOST) for name in movable[:num]}
            return replace(decisions, groups=decisions.groups | away)

        return with_fewest_away(layers, with_away, budget)

    def alike(self, layers: LayerGraph, decisions: Decisions) -> Specialisation | None:
        """A lowered specialisation with the same stages, groups and decisions: another batch shape changes no op and no edge."""
        for spec in self.known.values():
            lowered = "graph" in spec.__dict__ and spec.same is None
            if lowered and structure(layers, decisions) == structure(spec.layers, spec.decisions):
                return spec
        return None


def structure(layers: LayerGraph, decisions: Decisions) -> tuple[object, ...]:
    """What ops and edges depend on, apart from their sizes."""
    stages = [(s.name, s.groups, *((x.group, x.keys) for x in s.lookups)) for s in layers.stages]
    return stages, layers.groups, layers.num_lanes, decisions.groups


def together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The rows of all; the first, where they differ in more than that."""
    first = shapes[0]
    alike = first and all(shape[1:] == first[1:] for shape in shapes)
    return (sum(shape[0] for shape in shapes), *first[1:]) if alike else first


def requires_grad(model: nn.Module) -> tuple[bool, ...]:
    return tuple(p.requires_grad for p in model.parameters())


def with_possible_rows(layers: LayerGraph, decisions: Decisions) -> Decisions:
    """`decisions` with rows split only where that can be: what a plan says of its first step holds for all later ones."""
    whole = {g.name: replace(decisions.of(g.name), rows=Rows.WHOLE) for g in layers.groups
             if decisions.of(g.name).rows is Rows.SPLIT and possible_split(layers, g) is None}
    return replace(decisions, groups=decisions.groups | whole) if whole else decisions
