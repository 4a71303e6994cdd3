"""A plan for batches of one shape: what was traced, what was decided, and the graphs and predictions that follow from it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property

from slidedp.compiler.costmodel.costs import ResolvedCosts
from slidedp.compiler.costmodel.measured import Measurement
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import OpGraph, OpKind, split_lane
from slidedp.compiler.planfile.planfile import SolverRecord
from slidedp.compiler.simulation.predict import predict, price
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.compiler.tracing.tracer import Trace
from slidedp.executor.machine.switching import Lowered
from slidedp.executor.stages.fallback import Fallback
from slidedp.passes.compute import Compute
from slidedp.passes.pipeline import lower
from slidedp.passes.snapshot import Snapshot
from slidedp.planning.decide import by_the_rule
from slidedp.settings import Settings

OWN_BUSINESS = frozenset({OpKind.RECOMPUTE, OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD})


@dataclass(frozen=True, eq=False)
class Specialisation:
    """The shapes (and guard values) of a step: its traces, one a micro-batch, and its graphs.

    `num_tokens`: valid ones of the batch it was made for; `shapes`: of that, its micro-batches together. `same`: an earlier one
    whose ops these are, but for sizes: it is what runs. `fallback`: what its layers keep less of by now, for want of memory.
    `sliced`: why in slices, if nobody has pinned them.
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
    sliced: str = ""

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
        """Costs of every op alone: from the user's cost model where it answers, else as measured, else analytic."""
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
        """The predicted timeline of a training step."""
        return predict(self.graph, self.costs, self.settings.hw)

    def signature(self, *, training: bool) -> int:
        """A hash of the ops, in order, that concern other ranks: ranks whose signatures differ would issue different collectives.

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
        """Identifies the specialisation: by its traces' identity, since traces are kept."""
        return tuple(map(id, self.traces))

    @property
    def signature(self) -> int:
        """A hash of the parameter groups, which decisions refer to: the same on all ranks."""
        return zlib.crc32("\n".join(f"{g.name} {g.numel}" for g in self.layers.groups).encode())


def with_costs_of(graph: OpGraph, spec: Specialisation) -> OpGraph:
    """`graph`, lowered for another batch shape, with the bytes and flops of compute ops for this one."""
    fresh = {op.name: op for op in Compute(spec.layers, spec.decisions).run(OpGraph()).ops}
    ops = (replace(op, bytes=fresh[op.name].bytes, flops=fresh[op.name].flops) if op.name in fresh else op for op in graph.ops)
    return graph.with_(ops=tuple(ops))
