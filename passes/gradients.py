"""Inserts the gradients' way to the host: a reduction between the GPUs and one copy, or copies and a reduction on the host.

Both routes sum the ranks' gradients in rank order in FP32 and round once, so they give the same bits for any chunking.
Gradients of resident groups are summed on the GPUs and stay there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from slidedp.compiler.decisions import Decisions, Reduction
from slidedp.compiler.footprint.memory import largest_reduced, waiting_bytes
from slidedp.compiler.layergraph import Group, LayerGraph
from slidedp.compiler.ops import Chunk, Op, OpGraph, OpKind, Ref, Scope, Slot, Stream
from slidedp.compiler.residency import is_resident, update_chunks, waits_in_hbm
from slidedp.passes.base import Pass, insert_after


def chunks_of_return(layers: LayerGraph, decisions: Decisions, group: Group) -> list[Chunk]:
    """How a group's gradient is cut."""
    num = len(update_chunks(group, decisions.of(group.name), layers.world_size))
    return [Chunk(c, num, trainable=True) for c in range(num)]


@dataclass(frozen=True)
class Gradients(Pass):
    """Every gradient, once its last contribution is there, ends as this rank's part of `H` in host memory, or reduced in HBM."""

    name: ClassVar[str] = "gradients"
    requires: ClassVar[frozenset[str]] = frozenset({"slots"})
    provides: ClassVar[frozenset[str]] = frozenset({"gradients"})

    def run(self, graph: OpGraph) -> OpGraph:
        final: dict[str, tuple[Ref, str]] = {}
        for op in graph.ops:
            for ref in op.writes:
                if ref.value.startswith("G."):
                    final.pop(ref.value, None)  # of several contributions the last counts, and its place in line
                    final[ref.value] = ref, op.name
        reduced = count()
        after: dict[str, list[Op]] = {}
        for gradient, producer in final.values():
            after.setdefault(producer, []).extend(self.take_home(gradient, reduced))
        return graph.with_(ops=insert_after(graph.ops, after), slots=graph.slots + self.reduce_buffers())

    def take_home(self, gradient: Ref, reduced: count[int]) -> list[Op]:
        group, world = self.layers.group(gradient.group), self.layers.world_size
        resident = is_resident(group, self.decisions.of(group.name))
        on_host = self.decisions.of(group.name).reduction is Reduction.CPU and world > 1 and not resident
        size = self.layers.grad_itemsize
        ops = []
        for chunk in chunks_of_return(self.layers, self.decisions, group):
            lo, hi = chunk.bounds(group, world)
            suffix, share = f"{group.name}.c{chunk.index}", (hi - lo) // world
            whole = Ref(gradient.value, gradient.version, chunk, Scope.ALL, gradient.place)
            home = Ref(f"H.{group.name}", 0, chunk, Scope.OWN)
            if on_host:
                ops.append(Op(f"d2h.{suffix}", OpKind.D2H, Stream.D2H, group.name, chunk, (whole,),
                                 (Ref(f"Q.{group.name}", 0, chunk),), bytes=(hi - lo) * size))
                ops.append(Op(f"host_reduce.{suffix}", OpKind.HOST_REDUCE, Stream.HOST, group.name, chunk,
                               (Ref(f"Q.{group.name}", 0, chunk, Scope.OWN, peers=True),), (home,),
                               bytes=share * size * (world + 1)))
                continue
            source = whole
            if world > 1:
                waiting = waits_in_hbm(self.decisions, group)
                place = f"rheld.{group.name}[{chunk.index}]" if waiting else f"red[{next(reduced) % self.decisions.reduce_slots}]"
                source = Ref(f"R.{group.name}", 0, chunk, Scope.OWN, place)
                ops.append(Op(f"reduce.{suffix}", OpKind.REDUCE, Stream.COMM, group.name, chunk, (whole,), (source,),
                                bytes=share * size * (world - 1)))
            if not resident:
                ops.append(Op(f"d2h.{suffix}", OpKind.D2H, Stream.D2H, group.name, chunk, (source,), (home,), bytes=share * size))
        return ops

    def reduce_buffers(self) -> tuple[Slot, ...]:
        """Shared by the chunks in turn; of gradients that wait for a deferred update, one for each chunk."""
        if not self.training or self.layers.world_size == 1:
            return ()
        size, largest = self.layers.grad_itemsize, largest_reduced(self.layers, self.decisions)
        slots = [Slot("red", self.decisions.reduce_slots, largest * size)] if largest else []
        for group in (g for g in self.layers.groups if waits_in_hbm(self.decisions, g)):
            num = len(chunks_of_return(self.layers, self.decisions, group))
            slots.append(Slot(f"rheld.{group.name}", num, waiting_bytes(self.layers, self.decisions, group) // num))
        return tuple(slots)
