"""Takes activations and boundaries to the host and back: a window of places out, pinned memory, a window of places back.

A value is copied out right behind the op that makes it, and its place is free for the next one's when that is done and the
forward has read it. It is copied back as soon as a place there is free, and used from there. The last values to leave are
still in their places when the backward comes for them: they are not moved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import ClassVar

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import Stage
from slidedp.compiler.memory import activation_slots, moved_bytes, movers, num_places
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, Stream
from slidedp.passes.base import Pass, insert_after


@dataclass(frozen=True)
class Activations(Pass):
    """Every activation or boundary that goes to the host is written there, and read from where it has come back to."""

    name: ClassVar[str] = "activations"
    requires: ClassVar[frozenset[str]] = frozenset({"delivery"})
    provides: ClassVar[frozenset[str]] = frozenset({"activations"})

    def run(self, graph: OpGraph) -> OpGraph:
        if not self.training:
            return graph
        for head, (leaving, staying) in movers(self.layers, self.decisions).items():
            graph = self.move(graph, head, leaving, staying)
        return graph.with_(slots=graph.slots + activation_slots(self.layers, self.decisions))

    def move(self, graph: OpGraph, head: str, leaving: list[Stage], staying: list[Stage]) -> OpGraph:
        out, back = Moves(head, [*leaving, *staying], self.decisions), Moves(f"back.{head}", leaving[::-1], self.decisions)
        ops = tuple(self.locate(op, head, out.there, back.there) for op in graph.ops)
        maker = {ref.value: op.name for op in ops for ref in op.writes}
        last_user = {ref.value: op.name for op in ops for ref in op.reads}
        after: dict[str, list[Op]] = {}
        for s in leaving:
            after.setdefault(maker[f"{head}.{s.name}"], []).append(self.offload(head, s, out.there[s.name]))
        for i, s in enumerate(leaving[::-1]):
            before = back.occupant_before(i)
            anchor = last_user[f"back.{head}.{before.name}"] if before else last_forward(ops)
            after.setdefault(anchor, []).append(self.reload(head, s, back.there[s.name]))
        return graph.with_(ops=insert_after(ops, after))

    def offload(self, head: str, s: Stage, here: Ref) -> Op:
        return Op(f"act_offload.{head}.{s.name}", OpKind.ACT_OFFLOAD, Stream.D2H, s.name, None, (here,), (on_host(head, s),),
                  bytes=moved_bytes(s, head))

    def reload(self, head: str, s: Stage, there: Ref) -> Op:
        return Op(f"act_reload.{head}.{s.name}", OpKind.ACT_RELOAD, Stream.H2D, s.name, None, (on_host(head, s),), (there,),
                  bytes=moved_bytes(s, head))

    def locate(self, op: Op, head: str, out: dict[str, Ref], back: dict[str, Ref]) -> Op:
        """`op` with its reads and writes where they are. A backward also reads the layer's inputs: its graph refers to them."""
        in_backward = op.kind in (OpKind.RECOMPUTE, OpKind.BACKWARD)
        reads = op.reads
        if head == "h" and op.kind is OpKind.BACKWARD and op.layer in out:
            reads += (Ref(f"h.{op.layer}"),)

        def located(ref: Ref, read: bool) -> Ref:
            layer = ref.value.removeprefix(f"{head}.")
            if layer == ref.value:
                return ref
            return (back.get(layer) if read and in_backward else None) or out.get(layer, ref)

        return replace(op, reads=tuple(located(r, True) for r in reads), writes=tuple(located(r, False) for r in op.writes))


@dataclass(frozen=True)
class Moves:
    """Values of `stages`, in the order in which they take places of the window `pool` in turn."""

    pool: str
    stages: list[Stage]
    decisions: Decisions

    @property
    def num_places(self) -> int:
        return num_places(self.decisions, self.pool.removeprefix("back."))

    @cached_property
    def there(self) -> dict[str, Ref]:
        """Layer -> the value in its place."""
        places = (f"{self.pool}[{i % self.num_places}]" for i in count())
        return {s.name: Ref(f"{self.pool}.{s.name}", place=place) for s, place in zip(self.stages, places, strict=False)}

    def occupant_before(self, i: int) -> Stage | None:
        return self.stages[i - self.num_places] if i >= self.num_places else None


def on_host(head: str, s: Stage) -> Ref:
    return Ref(f"off.{head}.{s.name}", place=f"off.{head}.{s.name}")


def last_forward(ops: tuple[Op, ...]) -> str:
    return [op.name for op in ops if op.kind is OpKind.FORWARD][-1]
