"""Inserts the optimizer of groups whose state lives in HBM: each rank's GPU updates its part, then an all-gather follows.

The update reads the gradient where the backward or the reduction has left it, and writes the next version of master and
weights in place. On several ranks each updates its shard and gathers the others' weights over the GPU links, after the
reductions of the next group: those free gradient slots, while the weights are not needed before the next step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Chunk, Op, OpGraph, OpKind, Ref, Scope, Stream
from slidedp.compiler.residency import is_resident
from slidedp.passes.base import Pass, insert_after, weights
from slidedp.passes.gradients import chunks_of_return


@dataclass(frozen=True)
class ResidentUpdates(Pass):
    """Every gradient of a resident group is consumed by the update of the same part of its `P` and its weights."""

    name: ClassVar[str] = "residency"
    requires: ClassVar[frozenset[str]] = frozenset({"gradients"})
    provides: ClassVar[frozenset[str]] = frozenset({"resident updates"})

    def run(self, graph: OpGraph) -> OpGraph:
        after: dict[str, list[Op]] = defaultdict(list)
        gathers: list[Op] = []
        for group, arrivals in self.arrivals(graph).items():
            for gradient, producer in arrivals:
                after[producer].append(self.update(group, gradient))
            after[arrivals[-1][1]] += gathers
            gathers = [self.all_gather(group, gradient.chunk) for gradient, _ in arrivals] if self.layers.world_size > 1 else []
        if gathers:
            after[graph.ops[-1].name] += gathers
        return graph.with_(ops=insert_after(graph.ops, after))

    def arrivals(self, graph: OpGraph) -> dict[Group, list[tuple[Ref, str]]]:
        """Each resident group's gradient chunks, in order of arrival, and the op that completes each."""
        head = "R." if self.layers.world_size > 1 else "G."
        last: dict[tuple[str, Chunk | None], tuple[Ref, str]] = {}
        for op in graph.ops:
            for ref in op.writes:
                if ref.value.startswith(head) and is_resident(self.layers.group(ref.group), self.decisions.of(ref.group)):
                    last.pop((ref.value, ref.chunk), None)  # of several contributions the last counts, and its place in line
                    last[ref.value, ref.chunk] = ref, op.name
        out: dict[Group, list[tuple[Ref, str]]] = defaultdict(list)
        for ref, producer in last.values():
            group = self.layers.group(ref.group)
            whole = ref.chunk is None  # a gradient slot: cut as it would be for its return
            parts = [replace(ref, chunk=c) for c in chunks_of_return(self.layers, self.decisions, group)] if whole else [ref]
            out[group] += [(part, producer) for part in parts]
        return out

    def update(self, group: Group, gradient: Ref) -> Op:
        chunk, world = gradient.chunk, self.layers.world_size
        assert chunk is not None
        lo, hi = chunk.bounds(group, world)
        state = Ref(f"P.{group.name}", 0, chunk, Scope.OWN, f"state.{group.name}")
        copy = Ref(weights("resident", group.name), 1, chunk, Scope.OWN, f"held.{group.name}")
        per_param = 24 + self.layers.grad_itemsize + self.layers.compute_itemsize  # master and two moments read and written
        return Op(f"gpu_update.{group.name}.c{chunk.index}", OpKind.GPU_UPDATE, Stream.UPDATE, group.name, chunk,
                  (gradient, state), (replace(state, version=1), copy), bytes=(hi - lo) // world * per_param)

    def all_gather(self, group: Group, chunk: Chunk | None) -> Op:
        assert chunk is not None
        (lo, hi), world = chunk.bounds(group, self.layers.world_size), self.layers.world_size
        own = Ref(weights("resident", group.name), 1, chunk, Scope.OWN, f"held.{group.name}")
        received = (hi - lo) // world * (world - 1) * self.layers.compute_itemsize
        return Op(f"all_gather.resident.{group.name}.c{chunk.index}", OpKind.ALL_GATHER, Stream.COMM, group.name, chunk,
                  (own,), (replace(own, scope=Scope.OTHERS),), bytes=received)
