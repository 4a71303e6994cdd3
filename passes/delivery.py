"""Inserts the delivery of weights to the GPU: cast (or shadow) -> host-to-device copy -> all-gather, chunk by chunk.

Resident weights need none: they are in HBM when the step begins.

A delivery is issued as soon as its slot is free: after the last reader of what the slot held before. On several ranks the
route `sharded` copies 1/N of each chunk to each GPU and gathers the rest over the GPU links.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from slidedp.compiler.decisions import Route, Source
from slidedp.compiler.footprint.memory import largest_cast
from slidedp.compiler.layergraph import cut_chunks
from slidedp.compiler.ops import Chunk, Op, OpGraph, OpKind, Ref, Scope, Slot, Stream
from slidedp.passes.base import Pass, insert_after


@dataclass(frozen=True)
class Delivery(Pass):
    """Every `W` that a compute op reads, but for resident ones, is written by transfers, issued when its slot is free."""

    name: ClassVar[str] = "delivery"
    requires: ClassVar[frozenset[str]] = frozenset({"slots"})
    provides: ClassVar[frozenset[str]] = frozenset({"delivery"})

    def run(self, graph: OpGraph) -> OpGraph:
        staged = count()
        after: dict[str, list[Op]] = {}
        for value, anchor in self.anchors(graph).items():
            after.setdefault(anchor, []).extend(self.deliver(value, staged))
        return graph.with_(ops=insert_after(graph.ops, after), slots=graph.slots + self.staging())

    def anchors(self, graph: OpGraph) -> dict[Ref, str]:
        """Weights in order of first use -> the compute op behind which they are issued ('' = at the step's start).

        A held group has no predecessor in its buffer and could always be issued first; it goes with the layer before
        it, so that it does not hold up what is needed sooner.
        """
        last_read: dict[str, str] = {}
        for op in graph.ops:
            last_read |= {ref.value: op.name for ref in op.reads if ref.value.startswith("W.")}
        occupant: dict[str, str] = {}
        anchors: dict[Ref, str] = {}
        previous = ""
        for op in graph.ops:
            for ref in op.reads:
                if ref.value.startswith("W.") and not ref.persistent and ref not in anchors:
                    if not ref.place.startswith("held."):
                        previous = last_read[occupant[ref.place]] if ref.place in occupant else ""
                        occupant[ref.place] = ref.value
                    anchors[ref] = previous
        return anchors

    def deliver(self, weight: Ref, staged: count[int]) -> list[Op]:
        group = self.layers.group(weight.group)
        decision = self.decisions.of(group.name)
        tag = weight.value.removeprefix("W.")
        sharded = decision.delivery is Route.SHARDED and self.layers.world_size > 1
        scope = Scope.OWN if sharded else Scope.ALL
        num = len(cut_chunks(group.numel, decision.delivery_chunks, self.layers.world_size))
        ops = []
        for c in range(num):
            chunk = Chunk(c, num)
            lo, hi = chunk.bounds(group, self.layers.world_size)
            share = (hi - lo) // (self.layers.world_size if sharded else 1)
            moved = share * self.layers.compute_itemsize
            if decision.source is Source.CAST:
                source = Ref(f"T.{tag}", 0, chunk, scope, f"stage[{next(staged) % self.decisions.staging_slots}]")
                ops.append(Op(f"host_cast.{tag}.c{c}", OpKind.HOST_CAST, Stream.CAST, group.name, chunk,
                                (Ref(f"P.{group.name}", 0, chunk, scope),), (source,), bytes=4 * share + moved))
            else:
                source = Ref(f"S.{group.name}", 0, chunk, scope)
            ops.append(Op(f"h2d.{tag}.c{c}", OpKind.H2D, Stream.H2D, group.name, chunk, (source,),
                             (Ref(weight.value, 0, chunk, scope, weight.place),), bytes=moved))
            if sharded:
                ops.append(Op(f"all_gather.{tag}.c{c}", OpKind.ALL_GATHER, Stream.COMM, group.name, chunk,
                                  (Ref(weight.value, 0, chunk, Scope.OWN, weight.place),),
                                  (Ref(weight.value, 0, chunk, Scope.OTHERS, weight.place),),
                                  bytes=moved * (self.layers.world_size - 1)))
        return ops

    def staging(self) -> tuple[Slot, ...]:
        """Pinned buffers for cast chunks, each as large as the largest piece any group casts."""
        largest = largest_cast(self.layers, self.decisions)
        return (Slot("stage", self.decisions.staging_slots, largest * self.layers.compute_itemsize, "pinned"),) if largest else ()
