"""Makes updates wait for the norm of all gradients, so that they can be clipped by it, or left out.

The norm is taken where each gradient is, in the order in which gradients are completed: on one rank, on the GPU, once the last
stage has added to a group's gradient; on several ranks, of each reduced chunk, on the stream that has made it, so that no
buffer is held up.

    grad_norm.L03    norms of the parts of a gradient, where it is                        norm.L03
    norms            those of all groups, on the host                                     norms
    norm             several ranks: this rank's sum of squares, visible to all            norm
    clip             the factor for every gradient, the same on every rank                clip

Deferred updates read `clip` and therefore run after it, those first that the next step needs first. Nothing else waits for it.
Updates of a group that speculates run as its gradient arrives, and make a candidate instead of the next version of the state:

    cpu_update.L03.c0    H.L03, P.L03@0 -> C.L03            during the backward, unclipped
    settle.L03.c0        C.L03, H.L03, P.L03@0, clip -> P.L03@1, S.L03@1

If there is nothing to clip, `settle` accepts the candidate: its buffer becomes the state's, and no byte moves. If there is,
the update is done again, from the old state, which is still there, and from the gradient, for which every group has a host
buffer of its own. If the step is left out, nothing is done. A candidate made from a gradient that is not finite is never
accepted.

Which groups should speculate? The second set of buffers pays where a gradient is complete early, so that the cores would
otherwise wait for the norm: in the last layers. In the first layers, the update could hardly begin before the norm is known.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.decisions import Update
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, Stream
from slidedp.compiler.residency import speculates
from slidedp.passes.base import Pass, insert_after

UPDATES = (OpKind.CPU_UPDATE, OpKind.GPU_UPDATE)
CANDIDATE = "C."


@dataclass(frozen=True)
class Clipping(Pass):
    """No state changes before the norm of every gradient that the step updates from is known."""

    name: ClassVar[str] = "clipping"
    requires: ClassVar[frozenset[str]] = frozenset({"updates", "resident updates"})
    provides: ClassVar[frozenset[str]] = frozenset({"clipping"})

    def run(self, graph: OpGraph) -> OpGraph:
        if not self.training or self.decisions.update is not Update.DEFERRED:
            return graph
        ahead = {op.name: op for op in graph.ops if op.kind is OpKind.CPU_UPDATE and self.speculates(op)}
        late = [settle(op) if op.name in ahead else op for op in graph.ops
                if op.kind in UPDATES or any(ref.value.startswith("W.resident.") for ref in op.writes)]
        early = [candidate(op) if op.name in ahead else op for op in graph.ops if op.name in ahead or op not in late]
        after: dict[str, list[Op]] = defaultdict(list)
        for producer, gradient in self.gradients(early):
            after[producer.name].append(self.partial(producer, gradient))
        partials = [op for ops in after.values() for op in ops]
        needed = first_use(graph)
        updates = sorted(late, key=lambda op: needed[op.layer])  # stable: a group's chunks stay in order
        ops = (*insert_after(early, after), *self.combined(partials), *map(self.clipped, updates))
        return graph.with_(ops=ops)

    def speculates(self, op: Op) -> bool:
        return speculates(self.decisions, self.layers.group(op.layer))

    def gradients(self, ops: list[Op]) -> list[tuple[Op, Ref]]:
        """What updates read, but for copies: each gradient, or chunk of its sum over the ranks, and the op that completes it."""
        made: dict[tuple[object, ...], tuple[Op, Ref]] = {}
        for op in ops:
            for ref in op.writes:
                if ref.value.startswith("G.") if self.layers.world_size == 1 else is_sum(op, ref):
                    made[ref.value, ref.chunk] = op, ref  # the last of several contributions
        return list(made.values())

    def partial(self, producer: Op, gradient: Ref) -> Op:
        group, chunk, world = self.layers.group(gradient.group), gradient.chunk, self.layers.world_size
        lo, hi = chunk.bounds(group, world) if chunk else (0, group.num_trainable)
        tag = f"{group.name}.c{chunk.index}" if chunk else group.name
        return Op(f"grad_norm.{tag}", OpKind.GRAD_NORM, producer.stream, group.name, chunk, (gradient,), (Ref(f"norm.{tag}"),),
                  bytes=(hi - lo) // world * self.layers.grad_itemsize)

    def combined(self, partials: list[Op]) -> list[Op]:
        reads = tuple(ref for op in partials for ref in op.writes)
        ops = [Op("norms", OpKind.GRAD_NORM, Stream.UPDATE, "norms", None, reads, (Ref("norms"),))]
        if self.layers.world_size > 1:
            ops.append(Op("norm", OpKind.GRAD_NORM, Stream.HOST, "norm", None, (Ref("norms"),), (Ref("norm"),)))
        all_ranks = Ref("norm", peers=True) if self.layers.world_size > 1 else Ref("norms")
        return [*ops, Op("clip", OpKind.GRAD_NORM, Stream.HOST, "clip", None, (all_ranks,), (Ref("clip"),))]

    @staticmethod
    def clipped(op: Op) -> Op:
        return replace(op, reads=(*op.reads, Ref("clip"))) if op.kind in (*UPDATES, OpKind.SETTLE) else op


def candidate(update: Op) -> Op:
    """`update` of a group that speculates: what it makes is not the state yet. It moves the same bytes."""
    return replace(update, writes=(made_by(update),))


def settle(update: Op) -> Op:
    """Makes the candidate of `update` the state's next version, or does the update again.

    It is due just before the group's other candidates, so that it does not wait for those of them that are still to be made.
    """
    return replace(update, name=update.name.replace("cpu_update.", "settle."), kind=OpKind.SETTLE, bytes=0,
                   deadline=update.deadline - 1, reads=(made_by(update), *update.reads))


def made_by(update: Op) -> Ref:
    return replace(update.writes[0], value=f"{CANDIDATE}{update.layer}", version=0)


def is_sum(op: Op, ref: Ref) -> bool:
    """True for a chunk's sum over several ranks: in HBM, or on the host where the host has added it up."""
    return ref.value.startswith("R.") or op.kind is OpKind.HOST_REDUCE


def first_use(graph: OpGraph) -> dict[str, int]:
    """Group -> position of the first op of a step that reads its state or weights of the step before."""
    first: dict[str, int] = {}
    for i, op in enumerate(graph.ops):
        for ref in op.reads:
            if ref.persistent and ref.version == 0 and op.kind not in UPDATES:
                first.setdefault(ref.group, i)
    return first
