"""Places weights and gradients in HBM: a bounded window of slots for layers, a buffer of its own for each held group.

Held are groups that several stages use, and those that the decisions keep in HBM. The gradient of a held group still goes
through the gradient slots if only one layer uses the group. A use takes the slot that has been free for longest, so deliveries
are issued in the order in which the GPU needs them. Layers still in the window when the forward ends stay there for their
backward: they are not delivered twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from slidedp.compiler.footprint.memory import num_window_slots, sum_places, sum_slots
from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Op, OpGraph, Ref, Slot
from slidedp.compiler.residency import held_groups, is_windowed, resident_groups, state_bytes, waits_in_hbm, windowed_groups
from slidedp.passes.base import Pass, weights


@dataclass(frozen=True)
class Slots(Pass):
    """Every `W` and `G` gets a place; backward reads of layers that the window still holds become reads of `W.fwd`."""

    name: ClassVar[str] = "slots"
    requires: ClassVar[frozenset[str]] = frozenset({"compute"})
    provides: ClassVar[frozenset[str]] = frozenset({"slots"})

    def run(self, graph: OpGraph) -> OpGraph:
        windowed = windowed_groups(self.layers, self.decisions)
        kept = self.kept_at_the_turn(windowed)
        ops = [replace(op, reads=tuple(self.rename(ref, kept) for ref in op.reads)) for op in graph.ops]
        place = self.weight_places(ops) | self.gradient_places(ops) | sum_places(self.layers)
        ops = [replace(op, reads=tuple(locate(r, place) for r in op.reads), writes=tuple(locate(r, place) for r in op.writes))
               for op in ops]
        return graph.with_(ops=tuple(ops), slots=graph.slots + self.pools(windowed))

    @property
    def num_slots(self) -> int:
        return num_window_slots(self.layers, self.decisions)

    def kept_at_the_turn(self, windowed: list[Group]) -> frozenset[str]:
        if not self.training:
            return frozenset()
        return frozenset(g.name for g in windowed[-self.num_slots:])

    def rename(self, ref: Ref, kept: frozenset[str]) -> Ref:
        return replace(ref, value=weights("fwd", ref.group)) if ref.value.startswith("W.bwd.") and ref.group in kept else ref

    def weight_places(self, ops: list[Op]) -> dict[str, str]:
        """Value -> place of every `W`. Slots are taken in the order in which their last readers end."""
        last_read = {ref.value: i for i, op in enumerate(ops) for ref in op.reads if ref.value.startswith("W.")}
        free_at = [-1] * self.num_slots
        place: dict[str, str] = {}
        for op in ops:
            for ref in op.reads:
                if not ref.value.startswith("W.") or ref.value in place:
                    continue
                if is_windowed(self.layers, self.decisions, self.layers.group(ref.group)):
                    k = min(range(len(free_at)), key=lambda s: (free_at[s], s))
                    place[ref.value], free_at[k] = f"w[{k}]", last_read[ref.value]
                else:
                    place[ref.value] = f"held.{ref.group}"
        return place

    def gradient_places(self, ops: list[Op]) -> dict[str, str]:
        place: dict[str, str] = {}
        used = 0
        for op in ops:
            for ref in op.writes:
                if not ref.value.startswith("G.") or ref.value in place:
                    continue
                if self.shares_gradient_slots(self.layers.group(ref.group)):
                    place[ref.value], used = f"g[{used % self.decisions.grad_slots}]", used + 1
                else:
                    place[ref.value] = f"gheld.{ref.group}"
        return place

    def shares_gradient_slots(self, group: Group) -> bool:
        """False if the gradient has a buffer of its own: several stages add to it, or it waits there for a deferred update."""
        return self.layers.streams(group) and (self.layers.world_size > 1 or not waits_in_hbm(self.decisions, group))

    def pools(self, windowed: list[Group]) -> tuple[Slot, ...]:
        size, grad_size = self.layers.compute_itemsize, self.layers.grad_itemsize
        out = []
        if windowed:
            out.append(Slot("w", self.num_slots, size * max(g.numel for g in windowed)))
        own = [g.num_trainable for g in self.layers.groups if self.layers.streams(g)]
        if self.training and (largest := max(own, default=0)):
            out.append(Slot("g", self.decisions.grad_slots, grad_size * largest))
        for g in held_groups(self.layers, self.decisions):
            out.append(Slot(f"held.{g.name}", 1, size * g.numel))
            if self.training and g.trainable and not self.shares_gradient_slots(g):
                out.append(Slot(f"gheld.{g.name}", 1, grad_size * g.num_trainable))
        if self.training:
            out += sum_slots(self.layers)
            resident = [g for g in resident_groups(self.layers, self.decisions) if g.trainable]
            out += [Slot(f"state.{g.name}", 1, state_bytes(g, self.layers.world_size)) for g in resident]
        return tuple(out)


def locate(ref: Ref, place: dict[str, str]) -> Ref:
    return replace(ref, place=place[ref.value]) if ref.value in place else ref
