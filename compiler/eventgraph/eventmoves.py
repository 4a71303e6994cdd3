"""Parts of a timed event graph: activations and boundaries that go to the host and come back, as passes/activations.py.

A value leaves behind the op that makes it, and its place of the window out is free for a later one's when it has left. It comes
back when a place of the window back is free. The last that go stay: their places are theirs until the backward. Which these are
is known if nothing is to choose of what goes; else all go that may, whenever they may, and come back as if that were two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slidedp.compiler.costmodel.contention import Resource
from slidedp.compiler.eventgraph.choices import Values
from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO, Linear
from slidedp.compiler.eventgraph.eventparts import Parts, Point, owner
from slidedp.compiler.footprint.memory import num_places, num_places_back
from slidedp.compiler.layergraph import StageKind
from slidedp.compiler.ops import OpKind, Stream


@dataclass
class Window:
    """What goes of `head` (act or h), by stage. `values`: stages in forward order; `leaving`: all of them but the last, if
    those are known.
    """

    parts: Parts
    head: str
    values: list[int]
    leaving: list[int]
    places: int
    places_back: int
    known: bool
    out: dict[int, Point] = field(default_factory=dict)
    back: dict[int, Point] = field(default_factory=dict)

    def goes(self, i: int, value: int, otherwise: int = 0) -> Linear:
        """`value` where the value of stage `i` goes to the host."""
        family, moves = owner(self.parts.layers.stages[i]), goes(self.parts, self.head)
        if not self.parts.options(family, "act"):
            return ZERO + value
        return self.parts.each(family, "act", lambda o: value if moves(family, o) else otherwise)

    def there(self, i: int) -> Linear:
        return self.goes(i, 0, OFF)

    def event(self, kind: OpKind, name: str) -> str:
        return f"{kind}.{name}" if self.head == "act" else f"{kind}.{self.head}.{name}"

    def make(self, i: int, end: Point) -> None:
        """Behind the op, ended at `end`, that makes the value of stage `i`."""
        if i not in self.values:
            return
        parts, at, name = self.parts, self.values.index(i), self.parts.layers.stages[i].name
        before = self.values[at - self.places] if at >= self.places else -1
        if self.known and before in self.out:
            parts.wait(end.event, self.out[before] + self.there(i), f"place of {self.head}.{name}")
        if i in self.leaving:
            left = parts.run(self.event(OpKind.ACT_OFFLOAD, name), Stream.D2H,
                             self.goes(i, parts.costs.move(i, OpKind.ACT_OFFLOAD, self.head).total_us))  # fmt: skip
            parts.wait(left.event, end + self.there(i), f"{OpKind.ACT_OFFLOAD} of {name}")
            self.out[i] = left + self.there(i)

    def bring_back(self, first: int, num: int, after: Point | None = None) -> None:
        """Issues those that come back at `first` and up to `num` behind it, once a place is free: `after`."""
        parts, returning = self.parts, self.leaving[::-1]
        for i in returning[first : first + num]:
            name = parts.layers.stages[i].name
            back = parts.run(self.event(OpKind.ACT_RELOAD, name), Stream.H2D,
                             self.goes(i, parts.costs.move(i, OpKind.ACT_RELOAD, self.head).total_us))  # fmt: skip
            parts.wait(back.event, self.out[i], f"offload before reload of {name}")
            if after:
                parts.wait(back.event, after + self.there(i), f"{OpKind.ACT_RELOAD} of {name}")
            self.back[i] = back + self.there(i)


    def work_us(self, resource: Resource) -> Linear:
        """For how long all that goes and comes back keeps `resource` busy."""
        total = ZERO
        for i in self.leaving:
            each = [self.parts.costs.move(i, kind, self.head) for kind in (OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD)]
            total = total + self.goes(i, sum(moved.work_us.get(resource, 0) for moved in each))
        return total


@dataclass
class Moves:
    """All windows of a step."""

    parts: Parts
    windows: tuple[Window, ...]

    @staticmethod
    def of(parts: Parts) -> Moves:
        windows, lanes = [], parts.layers.num_lanes
        for head in ("h", "act"):  # behind one op, what was inserted last comes first
            moves = goes(parts, head)
            values = [i for i, s in enumerate(parts.layers.stages) if s.kind is StageKind.LAYER
                      and any(moves(owner(s), o) for o in parts.options(owner(s), "act") or ({},))]  # fmt: skip
            places = -(-num_places(parts.layers, parts.choices.defaults, head) // lanes)
            back = -(-num_places_back(parts.choices.defaults, head) // lanes)
            known = all(len(parts.options(owner(s), "act")) < 2 for s in parts.layers.layers)
            leaving = values[:-places] if known else values
            windows.append(Window(parts, head, values, leaving, places, back if known else 2, known))
        return Moves(parts, tuple(windows))

    def before(self, kind: OpKind, stage: int, end: Point) -> None:
        """What the op that ends at `end` needs back."""
        for window in self.windows if kind is OpKind.RECOMPUTE else ():
            if stage in window.back:
                name = self.parts.layers.stages[stage].name
                self.parts.wait(end.event, window.back[stage], f"reload of {window.head} for {name}")

    def behind(self, kind: OpKind, stage: int, end: Point) -> None:
        """What moves when it has ended."""
        layers = self.parts.layers
        for window in self.windows:
            made = stage + (window.head == "h")
            if kind in (OpKind.PROLOGUE, OpKind.FORWARD) and (window.head == "h" or kind is OpKind.FORWARD):
                window.make(made, end)
            if window.known and kind is OpKind.FORWARD and layers.stages[stage + 1].kind is StageKind.EPILOGUE:
                window.bring_back(0, window.places_back)
            if not window.known and kind is OpKind.EPILOGUE:
                window.bring_back(0, window.places_back, end)
            if kind is OpKind.BACKWARD and stage in window.leaving:
                window.bring_back(window.leaving[::-1].index(stage) + window.places_back, 1, end)


def goes(parts: Parts, head: str) -> Callable[[str, Values], bool]:
    """Whether the value of a layer goes to the host, by the layer's group and its option of `act`."""
    defaults = parts.choices.defaults

    def moves(group: str, o: Values) -> bool:
        if not group:
            return False
        act = o.get("act", defaults.of(group).act)
        return act == "offload" if head == "act" else act != "retain" and defaults.of(group).boundary == "host"

    return moves
