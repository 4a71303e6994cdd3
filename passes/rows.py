"""Splits the update of an embedding: rows that no batch of the step looks up are updated right after the head and the loss.

The prologue's backward, the last op of a step, adds nothing to the gradient of those rows, so they need not wait for it:

    tied     d2h.early.E.c0          G.E@1, the head's part -> H.E      then reduced over the ranks as usual
             cpu_update.early.E.c0   H.E[untouched] -> P.E[untouched]
             d2h.E.c0                G.E@2, all of it -> H.E@1
             cpu_update.E.c0         H.E@1[touched] -> P.E[touched]
    untied   cpu_update.early.E.c0   no gradient, since it is zero -> P.E[untouched], once the loss is known
             cpu_update.E.c0         H.E[touched] -> P.E[touched]

The host knows these rows when the step begins, from the batches of all ranks: both updates read `batch`. The gradient is
copied to the host as a whole, twice where the table is tied; the second copy waits until the early updates have read the
first. The result has the bits of one update, since an element's bits depend on its own gradient, state and step only, however
a chunk is cut. (A head's gradient of -0.0 is 0.0 once the prologue has added 0.0; AdamW makes the same of both as long as its
moments are not -0.0, which they never are with a beta1 above 0.5.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, RowSet
from slidedp.compiler.rows import Split, find_splits
from slidedp.passes.base import Pass, insert_after

HOME = ("R.", "Q.", "H.")
"""Values of a gradient on its way to the host's update."""


@dataclass(frozen=True)
class RowUpdates(Pass):
    """Every update of a group whose rows are split is of the touched rows, and one of the untouched comes before it."""

    name: ClassVar[str] = "rows"
    requires: ClassVar[frozenset[str]] = frozenset({"updates"})
    provides: ClassVar[frozenset[str]] = frozenset({"rows"})

    def run(self, graph: OpGraph) -> OpGraph:
        splits = find_splits(self.layers, self.decisions) if self.training else {}
        ops, early = list(graph.ops), []
        for name, split in splits.items():
            for i, op in enumerate(ops):
                if op.layer == name and self.is_on_its_way(op):
                    before, ops[i] = self.halves(op, self.layers.group(name), split)
                    early += [] if before is None else [before]
        return graph.with_(ops=insert_after(ops, {self.layers.stages[-1].name: early})) if splits else graph

    @staticmethod
    def is_on_its_way(op: Op) -> bool:
        """True for the update of a chunk and what brings its gradient there."""
        return op.kind is OpKind.CPU_UPDATE or any(ref.value.startswith(HOME) for ref in op.writes)

    def halves(self, op: Op, group: Group, split: Split) -> tuple[Op | None, Op]:
        """(the op for the untouched rows, None if there is none; the op for when the gradient is complete)."""
        name = op.name.replace(f".{group.name}.", f".early.{group.name}.")
        if op.kind is not OpKind.CPU_UPDATE:
            before = replace(op, name=name, reads=select(op.reads, RowSet.UNTOUCHED), writes=select(op.writes, RowSet.UNTOUCHED))
            return (before, replace(op, reads=later(op.reads), writes=later(op.writes))) if split.tied else (None, op)
        gradient, state = op.reads
        early_bytes, late_bytes = split.update_bytes(op.bytes, self.gradient_bytes(op, group))
        known = gradient if split.tied else Ref("loss")
        before = replace(op, name=name, reads=(*select((known, state), RowSet.UNTOUCHED), Ref("batch")),
                         writes=select(op.writes, RowSet.UNTOUCHED), bytes=early_bytes)
        if split.tied:
            (gradient,) = later((gradient,))
        return before, replace(op, reads=(*select((gradient, state), RowSet.TOUCHED), Ref("batch")),
                               writes=select(op.writes, RowSet.TOUCHED), bytes=late_bytes)

    def gradient_bytes(self, op: Op, group: Group) -> int:
        """What the update of a chunk reads of its gradient."""
        assert op.chunk is not None
        lo, hi = op.chunk.bounds(group, self.layers.world_size)
        return (hi - lo) // self.layers.world_size * self.layers.grad_itemsize


def select(refs: tuple[Ref, ...], rows: RowSet) -> tuple[Ref, ...]:
    """`refs`, with those of chunks restricted to `rows`; for untouched rows of a gradient, the contribution before the last."""

    def of(ref: Ref) -> Ref:
        before = ref.value.startswith("G.") and rows is RowSet.UNTOUCHED
        return replace(ref, rows=rows, version=ref.version - before) if ref.chunk else ref

    return tuple(map(of, refs))


def later(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """`refs`, those of values on their way to the host as version 1: the second return."""
    return tuple(replace(ref, version=1) if ref.value.startswith(HOME) else ref for ref in refs)
