"""Lowers stages to compute ops: the forwards, the loss, then each layer's backward in reverse order, preceded by its recompute.

A layer that has kept its activations has no recompute. Each stage runs for all micro-batches (lanes) of the step in turn, so
that its weights are delivered once for all of them.

The result has no transfers yet: weights (`W`) and gradients (`G`) have names, but no source or destination. Gradients are
summed over the lanes in their order: in `G` itself if that is FP32, else in an FP32 sum of the stage (`A`), which the last
lane rounds. Where several stages add to a gradient (a tied embedding), it is summed stage by stage, so its last bits differ
from those of one lane after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.decisions import Activation
from slidedp.compiler.footprint.memory import sums_apart
from slidedp.compiler.layergraph import Group, Stage, StageKind
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, Stream, in_lane
from slidedp.compiler.residency import is_resident, is_windowed
from slidedp.passes.base import Pass, weights


@dataclass(frozen=True)
class Compute(Pass):
    """One op a stage, phase and lane, on the `gpu` stream, with the values it reads and writes."""

    name: ClassVar[str] = "compute"
    provides: ClassVar[frozenset[str]] = frozenset({"compute"})

    def run(self, graph: OpGraph) -> OpGraph:
        lanes, last = range(self.layers.num_lanes), len(self.layers.stages) - 1
        ops = [self.forward(i, lane) for i in range(last) for lane in lanes]
        ops += [self.epilogue(lane) for lane in lanes]
        if self.training:
            for i in reversed(range(1, last)):
                for lane in lanes:
                    ops += [] if self.keeps(self.layers.stages[i]) else [self.recompute(i, lane)]
                    ops.append(self.backward(i, lane))
            if any(g.trainable for g in self.groups(self.layers.stages[0])):
                ops += [self.prologue_backward(lane) for lane in lanes]
        groups = tuple(replace(g, params=()) for g in self.layers.groups)  # the ops need sizes; names stay in the LayerGraph
        return graph.with_(ops=self.number_gradients(ops), groups=groups, world_size=self.layers.world_size)

    def keeps(self, stage: Stage) -> bool:
        """True if what the stage's forward saves is not dropped."""
        return self.training and self.decisions.activation(stage) in (Activation.RETAIN, Activation.OFFLOAD)

    def selects(self, stage: Stage) -> bool:
        """True if the stage's forward keeps some results for its recompute."""
        return self.training and self.decisions.activation(stage) is Activation.SELECTIVE

    def groups(self, stage: Stage) -> list[Group]:
        return [self.layers.group(name) for name in stage.groups]

    def weight_refs(self, stage: Stage, use: str) -> tuple[Ref, ...]:
        return tuple(Ref(weights(self.use_of(g, use), g.name)) for g in self.groups(stage))

    def use_of(self, group: Group, use: str) -> str:
        if is_windowed(self.layers, self.decisions, group):
            return use
        return "resident" if is_resident(group, self.decisions.of(group.name)) else "step"

    def gradient_refs(self, stage: Stage, lane: int) -> tuple[Ref, ...]:
        """What the lane adds to: the gradients, or FP32 sums of them, which the last lane rounds into the gradients."""
        trained = [g.name for g in self.groups(stage) if g.trainable]
        gradients = tuple(Ref(f"G.{name}", version=1) for name in trained)
        if not sums_apart(self.layers):
            return gradients
        sums = tuple(Ref(f"A.{stage.name}.{name}", lane + 1) for name in trained)
        return sums + gradients * (lane == self.layers.num_lanes - 1)

    def sum_refs(self, stage: Stage, lane: int) -> tuple[Ref, ...]:
        """Sums over the lanes before this one."""
        if not sums_apart(self.layers) or not lane:
            return ()
        return tuple(Ref(f"A.{stage.name}.{g.name}", lane) for g in self.groups(stage) if g.trainable)

    def value(self, name: str, lane: int) -> Ref:
        return Ref(in_lane(name, lane, self.layers.num_lanes))

    def op(self, name: str, kind: OpKind, stage: Stage, lane: int, reads: tuple[Ref, ...], writes: tuple[Ref, ...],
           num_bytes: int = 0, flops: int = 0) -> Op:
        return Op(in_lane(name, lane, self.layers.num_lanes), kind, Stream.GPU, stage.name, None, reads, writes, bytes=num_bytes,
                  flops=flops)

    def forward(self, i: int, lane: int) -> Op:
        stage, after = self.layers.each_lane[lane][i : i + 2]
        const, out = self.value("const", lane), [self.value(f"h.{after.name}", lane)]
        if stage.kind is StageKind.PROLOGUE:
            reads: tuple[Ref, ...] = (Ref("batch"),)
            name, kind = stage.name, OpKind.PROLOGUE
            out.append(const)
        else:
            reads = (self.value(f"h.{stage.name}", lane), const)
            name, kind = f"fwd.{stage.name}", OpKind.FORWARD
            out += [self.value(f"act.{stage.name}", lane)] * self.keeps(stage)
            out += [self.value(f"sel.{stage.name}", lane)] * self.selects(stage)
        reads += self.weight_refs(stage, "fwd")
        return self.op(name, kind, stage, lane, reads, tuple(out), after.boundary_bytes, stage.flops)

    def epilogue(self, lane: int) -> Op:
        stage = self.layers.each_lane[lane][-1]
        reads = (self.value(f"h.{stage.name}", lane), self.value("const", lane), *self.weight_refs(stage, "fwd"))
        writes = [self.value("loss", lane)]
        if self.training:
            reads += self.sum_refs(stage, lane)
            writes += [self.value(f"d.{stage.name}", lane), *self.gradient_refs(stage, lane)]
        return self.op(stage.name, OpKind.EPILOGUE, stage, lane, reads, tuple(writes), stage.activation_bytes,
                       stage.flops * (3 if self.training else 1))

    def recompute(self, i: int, lane: int) -> Op:
        stage = self.layers.each_lane[lane][i]
        selected = (self.value(f"sel.{stage.name}", lane),) * self.selects(stage)
        reads = (self.value(f"h.{stage.name}", lane), self.value("const", lane), *selected, *self.weight_refs(stage, "bwd"))
        return self.op(f"recompute.{stage.name}", OpKind.RECOMPUTE, stage, lane, reads, (self.value(f"act.{stage.name}", lane),),
                       stage.activation_bytes, stage.flops)

    def backward(self, i: int, lane: int) -> Op:
        stage, following = self.layers.each_lane[lane][i : i + 2]
        reads = (self.value(f"act.{stage.name}", lane), self.value(f"d.{following.name}", lane), *self.weight_refs(stage, "bwd"),
                 *self.sum_refs(stage, lane))
        writes = (self.value(f"d.{stage.name}", lane), *self.gradient_refs(stage, lane))
        return self.op(f"bwd.{stage.name}", OpKind.BACKWARD, stage, lane, reads, writes, stage.boundary_bytes, 2 * stage.flops)

    def prologue_backward(self, lane: int) -> Op:
        stage, following = self.layers.each_lane[lane][:2]
        reads = (self.value(f"d.{following.name}", lane), *self.weight_refs(stage, "fwd"), *self.sum_refs(stage, lane))
        return self.op(f"bwd.{stage.name}", OpKind.BACKWARD, stage, lane, reads, self.gradient_refs(stage, lane),
                       flops=2 * stage.flops)

    def number_gradients(self, ops: list[Op]) -> tuple[Op, ...]:
        """A gradient with several contributions is ``G@1``, ``G@2``…: each after the first reads what it adds to."""
        seen: dict[str, int] = {}
        out = []
        for op in ops:
            reads, writes = list(op.reads), []
            for ref in op.writes:
                if ref.value.startswith("G."):
                    version = seen[ref.value] = seen.get(ref.value, 0) + 1
                    if version > 1:
                        reads.append(Ref(ref.value, version - 1))
                    ref = Ref(ref.value, version)
                writes.append(ref)
            out.append(replace(op, reads=tuple(reads), writes=tuple(writes)))
        return tuple(out)
