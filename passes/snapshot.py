"""Makes a step read the state for a checkpoint: each part before the update that overwrites it.

A save beside training is of the state between two steps. The step after it, which would overwrite that state, is lowered with
a `snapshot` op for every part that is updated. The op reads that part of ``P`` at version 0, after the previous step's update
has made it, and this step's update waits for the op. Each rank reads its own parts, so that none waits for another's.

The pass runs on a graph that has been lowered and verified. It adds only reads, each with the two edges that the laws of
:mod:`slidedp.passes.requirements` ask for, so a sound graph stays sound (tests/test_snapshot.py has the verifier check it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.ops import Edge, Op, OpGraph, OpKind, Reason, Ref, RowSet, Stream
from slidedp.passes.base import Pass


@dataclass(frozen=True)
class Snapshot(Pass):
    """Every part of `P` that the step overwrites is read first. The reads stand at the start, those of early updates first."""

    name: ClassVar[str] = "snapshot"
    requires: ClassVar[frozenset[str]] = frozenset({"updates", "resident updates", "edges"})
    provides: ClassVar[frozenset[str]] = frozenset({"snapshot"})

    def run(self, graph: OpGraph) -> OpGraph:
        reads: list[Op] = []
        edges = list(graph.edges)
        for state, updates in overwrites(graph).items():
            op = self.read(state, len(reads))
            reads.append(op)
            for update in updates:
                edges.append(Edge(update.name, op.name, Reason.VERSION, distance=1))
                edges.append(Edge(op.name, update.name, Reason.REUSE, slot=state.location))
        return graph.with_(ops=(*reads, *graph.ops), edges=tuple(edges))

    def read(self, state: Ref, position: int) -> Op:
        group, chunk, world = self.layers.group(state.group), state.chunk, self.layers.world_size
        assert chunk is not None, f"{state} is not a part of its group"
        lo, hi = chunk.bounds(group, world)
        return Op(f"snapshot.{group.name}.c{chunk.index}", OpKind.SNAPSHOT, Stream.CPU, group.name, chunk,
                  (replace(state, version=0),), bytes=(hi - lo) // world * 12, deadline=position)


def overwrites(graph: OpGraph) -> dict[Ref, list[Op]]:
    """Each part of persistent master weights and moments of which a new version is made, and the ops that make it: one, or two of
    a table whose rows are split.
    """
    found: dict[Ref, list[Op]] = {}
    for op in graph.ops:
        for ref in op.writes:
            if ref.value.startswith("P.") and ref.version == 1:
                found.setdefault(replace(ref, rows=RowSet.ALL), []).append(op)
    return found
