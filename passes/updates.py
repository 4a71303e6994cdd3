"""Inserts the optimizer: a CPU update for each returned chunk, which makes the version that the next step delivers.

Each rank updates its own part of every chunk. Updates have no order among themselves but their deadlines: the `cpu` stream
takes, of those that can run, the one whose group the next forward needs first (DESIGN §5). A group that speculates gets a
second op after the norm of all gradients: see clipping.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.decisions import Source
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, Scope, Stream
from slidedp.passes.base import Pass, insert_after


@dataclass(frozen=True)
class Updates(Pass):
    """Every `H` chunk is consumed by the update of the same part of `P` (and of the shadow, where there is one)."""

    name: ClassVar[str] = "updates"
    requires: ClassVar[frozenset[str]] = frozenset({"gradients", "delivery"})
    provides: ClassVar[frozenset[str]] = frozenset({"updates"})

    def run(self, graph: OpGraph) -> OpGraph:
        after: dict[str, list[Op]] = {}
        for op in graph.ops:
            for ref in op.writes:
                if ref.value.startswith("H."):
                    after[op.name] = [self.update(ref)]
        ops = insert_after(graph.ops, after)
        needed: dict[str, int] = {}
        for i, op in enumerate(ops):
            for ref in op.reads:
                if ref.persistent and op.kind is not OpKind.CPU_UPDATE:
                    needed.setdefault(ref.group, i)
        timed = (replace(op, deadline=needed[op.layer]) if op.kind is OpKind.CPU_UPDATE else op for op in ops)
        return graph.with_(ops=tuple(timed))

    def update(self, gradient: Ref) -> Op:
        group, chunk, world = self.layers.group(gradient.group), gradient.chunk, self.layers.world_size
        assert chunk is not None
        lo, hi = chunk.bounds(group, world)
        state = Ref(f"P.{group.name}", 0, chunk, Scope.OWN)
        writes = [replace(state, version=1)]
        shadow_bytes = 0
        if self.decisions.of(group.name).source is Source.SHADOW:
            writes.append(Ref(f"S.{group.name}", 1, chunk, Scope.OWN))
            shadow_bytes = self.layers.compute_itemsize
        per_param = 24 + self.layers.grad_itemsize + shadow_bytes  # master and two moments read and written
        return Op(f"cpu_update.{group.name}.c{chunk.index}", OpKind.CPU_UPDATE, Stream.CPU, group.name, chunk,
                  (gradient, state), tuple(writes), bytes=(hi - lo) // world * per_param)
