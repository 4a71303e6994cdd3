"""Inserts the copies of activations and boundaries to the host and back: HBM window -> pinned memory -> HBM window.

A value is copied out right after the op that makes it. Its place in the outgoing window is free for the next value once that
copy is done and the forward has read it. It is copied back as soon as the returning window has a free place, and is used from
there. The last values to leave are still in the outgoing window when the backward needs them: these are not moved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import ClassVar

from slidedp.compiler.footprint.memory import Mover, activation_slots, movers, num_places, num_places_back
from slidedp.compiler.ops import Op, OpGraph, OpKind, Ref, Stream, in_lane
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

    def move(self, graph: OpGraph, head: str, leaving: list[Mover], staying: list[Mover]) -> OpGraph:
        num_out, num_back = num_places(self.layers, self.decisions, head), num_places_back(self.decisions, head)
        position = {s.name: i for i, s in enumerate(self.layers.stages)}
        returning = sorted(leaving, key=lambda m: (-position[m.stage.name], m.lane))  # the order of the backward
        out, back = Moves(head, [*leaving, *staying], num_out), Moves(f"back.{head}", returning, num_back)
        ops = tuple(self.locate(op, head, out.there, back.there) for op in graph.ops)
        maker = {ref.value: op.name for op in ops for ref in op.writes}
        last_user = {ref.value: op.name for op in ops for ref in op.reads}
        after: dict[str, list[Op]] = {}
        for m in leaving:
            after.setdefault(maker[f"{head}.{m.name}"], []).append(self.offload(m, out.there[m.name]))
        for i, m in enumerate(returning):
            before = back.occupant_before(i)
            anchor = last_user[f"back.{head}.{before.name}"] if before else last_forward(ops)
            after.setdefault(anchor, []).append(self.reload(m, back.there[m.name]))
        return graph.with_(ops=insert_after(ops, after))

    def offload(self, m: Mover, here: Ref) -> Op:
        return Op(f"act_offload.{m.head}.{m.name}", OpKind.ACT_OFFLOAD, Stream.D2H, m.stage.name, None, (here,), (on_host(m),),
                  bytes=m.num_bytes)

    def reload(self, m: Mover, there: Ref) -> Op:
        return Op(f"act_reload.{m.head}.{m.name}", OpKind.ACT_RELOAD, Stream.H2D, m.stage.name, None, (on_host(m),), (there,),
                  bytes=m.num_bytes)

    def locate(self, op: Op, head: str, out: dict[str, Ref], back: dict[str, Ref]) -> Op:
        """`op` with the places of its reads and writes. A backward also reads the layer's inputs, which its graph refers to."""
        in_backward = op.kind in (OpKind.RECOMPUTE, OpKind.BACKWARD)
        reads, inputs = op.reads, in_lane(op.layer, op.lane, self.layers.num_lanes)
        if head == "h" and op.kind is OpKind.BACKWARD and inputs in out:
            reads += (Ref(f"h.{inputs}"),)

        def located(ref: Ref, read: bool) -> Ref:
            layer = ref.value.removeprefix(f"{head}.")
            if layer == ref.value:
                return ref
            return (back.get(layer) if read and in_backward else None) or out.get(layer, ref)

        return replace(op, reads=tuple(located(r, True) for r in reads), writes=tuple(located(r, False) for r in op.writes))


@dataclass(frozen=True)
class Moves:
    """`values`, in the order in which they take places of the window `pool` in turn."""

    pool: str
    values: list[Mover]
    num_places: int

    @cached_property
    def there(self) -> dict[str, Ref]:
        """Layer and lane -> the value in its place."""
        places = (f"{self.pool}[{i % self.num_places}]" for i in count())
        return {m.name: Ref(f"{self.pool}.{m.name}", place=place) for m, place in zip(self.values, places, strict=False)}

    def occupant_before(self, i: int) -> Mover | None:
        return self.values[i - self.num_places] if i >= self.num_places else None


def on_host(m: Mover) -> Ref:
    return Ref(f"off.{m.head}.{m.name}", place=f"off.{m.head}.{m.name}")


def last_forward(ops: tuple[Op, ...]) -> str:
    return [op.name for op in ops if op.kind is OpKind.FORWARD][-1]
