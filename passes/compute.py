"""Lowers stages to compute ops: forward in order, the loss, then each layer's backward in reverse, after its recompute if
it has kept nothing.

The result has no transfers yet: weights (`W`) and gradients (`G`) are named but come from and go to nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.decisions import Activation
from slidedp.compiler.layergraph import Group, Stage, StageKind
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, Stream
from slidedp.compiler.residency import is_resident, is_windowed
from slidedp.passes.base import Pass, weights


@dataclass(frozen=True)
class Compute(Pass):
    """One op a stage and phase, on the `gpu` stream, with the values it reads and writes."""

    name: ClassVar[str] = "compute"
    provides: ClassVar[frozenset[str]] = frozenset({"compute"})

    def run(self, graph: OpGraph) -> OpGraph:
        ops = [self.forward(i) for i in range(len(self.layers.stages) - 1)]
        ops.append(self.epilogue())
        if self.training:
            for stage in reversed(self.layers.layers):
                ops += [] if self.keeps(stage) else [self.recompute(stage)]
                ops.append(self.backward(stage))
            prologue = self.layers.stages[0]
            if any(g.trainable for g in self.groups(prologue)):
                ops.append(self.prologue_backward(prologue))
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

    def gradient_refs(self, stage: Stage) -> tuple[Ref, ...]:
        return tuple(Ref(f"G.{g.name}", version=1) for g in self.groups(stage) if g.trainable)

    def forward(self, i: int) -> Op:
        stage, after = self.layers.stages[i], self.layers.stages[i + 1]
        out: tuple[Ref, ...] = (Ref(f"h.{after.name}"),)
        if stage.kind is StageKind.PROLOGUE:
            reads: tuple[Ref, ...] = (Ref("batch"),)
            name, kind = stage.name, OpKind.PROLOGUE
            out += (Ref("const"),)
        else:
            reads = (Ref(f"h.{stage.name}"), Ref("const"))
            name, kind = f"fwd.{stage.name}", OpKind.FORWARD
            out += (Ref(f"act.{stage.name}"),) * self.keeps(stage) + (Ref(f"sel.{stage.name}"),) * self.selects(stage)
        return Op(name, kind, Stream.GPU, stage.name, None, reads + self.weight_refs(stage, "fwd"), out,
                  bytes=after.boundary_bytes, flops=stage.flops)

    def epilogue(self) -> Op:
        stage = self.layers.stages[-1]
        reads = (Ref(f"h.{stage.name}"), Ref("const"), *self.weight_refs(stage, "fwd"))
        grads = (Ref(f"d.{stage.name}"), *self.gradient_refs(stage)) if self.training else ()
        return Op(stage.name, OpKind.EPILOGUE, Stream.GPU, stage.name, None, reads, (Ref("loss"), *grads),
                  bytes=stage.activation_bytes, flops=stage.flops * (3 if self.training else 1))

    def recompute(self, stage: Stage) -> Op:
        selected = (Ref(f"sel.{stage.name}"),) * self.selects(stage)
        reads = (Ref(f"h.{stage.name}"), Ref("const"), *selected, *self.weight_refs(stage, "bwd"))
        return Op(f"recompute.{stage.name}", OpKind.RECOMPUTE, Stream.GPU, stage.name, None, reads,
                  (Ref(f"act.{stage.name}"),), bytes=stage.activation_bytes, flops=stage.flops)

    def backward(self, stage: Stage) -> Op:
        following = self.layers.stages[self.layers.stages.index(stage) + 1]
        reads = (Ref(f"act.{stage.name}"), Ref(f"d.{following.name}"), *self.weight_refs(stage, "bwd"))
        return Op(f"bwd.{stage.name}", OpKind.BACKWARD, Stream.GPU, stage.name, None, reads,
                  (Ref(f"d.{stage.name}"), *self.gradient_refs(stage)), bytes=stage.boundary_bytes, flops=2 * stage.flops)

    def prologue_backward(self, stage: Stage) -> Op:
        reads = (Ref(f"d.{self.layers.stages[1].name}"), *self.weight_refs(stage, "fwd"))
        return Op(f"bwd.{stage.name}", OpKind.BACKWARD, Stream.GPU, stage.name, None, reads, self.gradient_refs(stage),
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
