"""A good plan that reads well: all layers of a kind alike, but for a few counts. What is searched is a handful of whole numbers.

    alike      one option for the deliveries of all groups of a kind, and one for the returns of their gradients
    resident   layers whose state is in HBM, in the order in which the next step needs them: their updates sit between two steps
    scattered  of the layers above those, so many that are resident as well: evenly spread, so that every update of the host has
               the compute of the layers around it to hide behind
    ends       which groups of prologue and epilogue are resident, a bit each: they are larger than layers, and sit at the turns
    retained   layers that keep their activations, from the last down, whose backwards come first
    offloaded  of the layers below those, so many whose activations wait on the host: evenly spread, since a link carries one away
               in the time of several forwards
    held       layers from the last down whose weights stay between forward and backward
    other_source
               layers whose weights come from the other source than `alike` says, cast or shadow: evenly spread, since a cast
               takes the time of several layers, and spares the update a part of its own

Coordinate descent: a count takes its best value on a grid, then around it; whenever the others change, as many layers retain as
memory has room for. In the end every count is taken back as far as that costs nothing. For a plan near a bound, two counts are
changed together, from there and from the counts of counts.py. A step is the period of the event graph,
memory is the rows'; a thousand of either take a few seconds. It proves nothing: the bound comes from elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import compress, permutations, product

from slidedp.compiler.decisions import Source
from slidedp.compiler.eventgraph.choices import Family
from slidedp.compiler.eventgraph.eventgraph import EventGraph, TimedEdge
from slidedp.compiler.eventgraph.maxplus import is_period, max_cycle_ratio, positive_cycle
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.ops import Stream
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.solver.search import choose, feasible, is_longer, partners_of, period_of

OTHER_SOURCE: dict[object, Source] = {Source.CAST: Source.SHADOW, Source.SHADOW: Source.CAST}
MAX_SWEEPS = 4
GRID = 8
"""Parts that the range of a count is cut into at first."""
FREE = 5e-4
"""Share of a step that a plainer plan may cost."""
NEARBY = (1, -1, 2, -2)
"""Small changes of a count, the smallest first."""
COUNTS = ("ends", "resident", "scattered", "held", "offloaded", "other_source")
"""Counts that are searched; `retained` follows from the room that they leave."""
GIVEN_UP = ("held", "scattered", "resident", "ends")
"""What makes room for another count, in this order, where it has none."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts as in the module's docstring. `alike`: for every kind of family the option, by its position."""

    alike: tuple[int, ...]
    resident: int = 0
    scattered: int = 0
    ends: int = 0
    retained: int = 0
    offloaded: int = 0
    held: int = 0
    other_source: int = 0


@dataclass
class StructuredSearch:
    """One search over the shapes of `graph` under `rows`."""

    graph: EventGraph
    rows: Sequence[MemoryRow]
    known: dict[tuple[int, ...], int] = field(default_factory=dict)
    selections: dict[Shape, tuple[int, ...]] = field(default_factory=dict)
    fitting: dict[Shape, bool] = field(default_factory=dict)
    twins: dict[tuple[int, int, str, object], int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        families = self.graph.choices.families
        self.partners = partners_of(self.graph)
        by_kind: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
        for i, f in enumerate(families):
            if f.name in ("weights", "gradients") and len(f.options) > 1:
                by_kind[f.name, str(f.options), layer_index(f.group) is None].append(i)
        self.kinds = list(by_kind.values())
        place = {f.key: i for i, f in enumerate(families) if len(f.options) > 1}
        first_due = [w.group for w in self.graph.works]
        states = [place[name, "state"] for name in dict.fromkeys(first_due) if (name, "state") in place]
        self.states = [i for i in states if layer_index(families[i].group) is not None]
        self.ends = [i for i in states if i not in self.states]
        self.home = {i: next(o for o, option in enumerate(families[i].options) if option["state"] == "host") for i in states}
        self.acts = [i for i, f in reversed(list(enumerate(families))) if f.name == "act" and len(f.options) > 1]
        self.kept = {i: {o["act"]: at for at, o in reversed(list(enumerate(families[i].options)))} for i in self.acts}
        self.holds = [i for i, f in reversed(list(enumerate(families))) if _twin(f, 0, "weights", "hold") is not None]
        self.sources = [i for i, f in enumerate(families) if f.name == "weights" and layer_index(f.group) is not None
                        and len({option["source"] for option in f.options if option}) > 1]  # fmt: skip

    # ---- what a shape means ----

    def selection(self, shape: Shape) -> tuple[int, ...]:
        if shape not in self.selections:
            self.selections[shape] = self._selection(shape)
        return self.selections[shape]

    def _selection(self, shape: Shape) -> tuple[int, ...]:
        families = self.graph.choices.families
        chosen = list(self.graph.choices.default)
        for members, option in zip(self.kinds, shape.alike, strict=True):
            for i in members:
                chosen[i] = option
        for i in self.acts[: shape.retained]:
            chosen[i] = self.kept[i].get("retain", chosen[i])
        below = self.acts[shape.retained :]
        for i, leaves in zip(below, spread_over(shape.offloaded, len(below)), strict=True):
            chosen[i] = self.kept[i].get("offload" if leaves else "recompute", chosen[i])
        for i in self.holds[: shape.held]:
            chosen[i] = self.twin(i, chosen[i], "weights", "hold")
        for i, other in zip(self.sources, spread_over(shape.other_source, len(self.sources)), strict=True):
            if other:
                source = OTHER_SOURCE.get(families[i].options[chosen[i]].get("source"))
                chosen[i] = self.twin(i, chosen[i], "source", source)
        for i in (*self.ends, *self.states):
            if chosen[i] != self.home[i]:
                choose(chosen, i, self.home[i], self.partners)
        for i in self.residents(shape):
            resident = families[i].resident
            assert resident is not None
            choose(chosen, i, resident, self.partners)
        return tuple(chosen)

    def twin(self, family: int, option: int, field: str, wanted: object) -> int:
        """The twin of an option, or itself where it has none."""
        key = family, option, field, wanted
        if key not in self.twins:
            self.twins[key] = _twin(self.graph.choices.families[family], option, field, wanted)
        twin = self.twins[key]
        return option if twin is None else twin

    def residents(self, shape: Shape) -> list[int]:
        above = self.states[shape.resident :]
        return [*(i for bit, i in enumerate(self.ends) if shape.ends >> bit & 1), *self.states[: shape.resident],
                *compress(above, spread_over(shape.scattered, len(above)))]  # fmt: skip

    def most(self, count: str) -> int:
        """`ends` counts in binary."""
        members = {"held": self.holds, "offloaded": self.acts, "retained": self.acts, "other_source": self.sources}
        return (1 << len(self.ends)) - 1 if count == "ends" else len(members.get(count, self.states))

    def fits(self, shape: Shape) -> bool:
        if shape not in self.fitting:
            self.fitting[shape] = feasible(self.rows, self.selection(shape))
        return self.fitting[shape]

    def period(self, shape: Shape) -> int:
        """In units."""
        selection = self.selection(shape)
        if selection not in self.known:
            self.known[selection] = period_of(self.graph, selection)
        return self.known[selection]

    def is_period(self, shape: Shape, period: int) -> bool:
        selection = self.selection(shape)
        if selection in self.known:
            return self.known[selection] <= period
        return self.graph.floor(selection) <= period and is_period(self.graph, selection, period)

    def filled(self, shape: Shape) -> Shape | None:
        """`shape` with as many layers that retain as fit; None if nothing fits."""
        return most_that_holds(replace(shape, retained=0), "retained", self.most("retained"), self.fits)

    def with_room(self, shape: Shape, count: str) -> Shape | None:
        """`shape` filled, or with less of the other counts where it has no room; None if nothing fits."""
        filled, shape = self.filled(shape), replace(shape, retained=0)
        for other in GIVEN_UP:
            if filled is None and other != count and getattr(shape, other):
                filled = most_that_holds(shape, other, getattr(shape, other), self.fits)
                shape = _with(shape, other, 0)
        return filled

    def balanced(self, shape: Shape) -> Iterator[Shape]:
        """`shape` filled, with as few resident layers as keep the host's updates no longer than whatever else a step is busy
        with, and with one less: the room that these took is worth more where it spares the GPU work.
        """

        def is_light(trial: Shape) -> bool:
            filled = self.filled(trial)
            busy = self.graph.busy_us(self.selection(filled)) if filled is not None else {}
            return filled is not None and busy.pop(Stream.CPU, 0) <= max(busy.values(), default=0)

        most = most_that_holds(replace(shape, retained=0), "resident", len(self.states), self.fits)
        if most is not None and is_light(most):
            fewest = fewest_that_holds(most, "resident", is_light)
            for resident in range(max(0, fewest.resident - 1), fewest.resident + 1):
                if (filled := self.filled(replace(fewest, resident=resident))) is not None:
                    yield filled

    def all_resident(self, shape: Shape) -> Shape | None:
        """All state in HBM, with the transfers of `shape` for what all layers have alike, filled; None if it does not fit."""
        return self.filled(Shape(shape.alike, resident=len(self.states), ends=self.most("ends")))

    # ---- the search ----

    def run(self, alike: tuple[int, ...] | None = None) -> Shape | None:
        """The best shape that fits, from the rule's options on, or from `alike`; None if none does."""
        best = next((s for s in map(self.filled, self.starts(alike or (0,) * len(self.kinds))) if s is not None), None)
        if best is None:
            return None
        for _ in range(MAX_SWEEPS):
            before = self.period(best)
            for count in COUNTS:
                best = self.best_count(best, count)
            for kind in range(len(self.kinds)):
                best = self.best_option(best, kind)
            if self.period(best) > before * (1 - FREE):
                break
        return self.plainest(best)

    def starts(self, alike: tuple[int, ...]) -> Iterator[Shape]:
        """Shapes to start from, of which the first that fits is taken: state at home, or the host has no room for it."""
        plain = Shape(alike)
        for ends in (0, self.most("ends")):
            for resident in range(len(self.states) + 1):
                yield replace(plain, ends=ends, resident=resident)

    def other_starts(self, counts: Sequence[int] | None) -> Iterator[Shape]:
        """Good shapes that no small change of another leads to: one with the counts of a selection; one of the other route."""
        if counts is not None and (shape := self.counted(counts)):
            yield shape
        if (alike := self.rerouted()) and (shape := self.run(alike)):
            yield shape

    def counted(self, selection: Sequence[int]) -> Shape | None:
        """The best shape with as many layers resident, offloaded, held and from the other source as in `selection`, and as many
        that retain as there is room for; None if none fits.
        """
        families = self.graph.choices.families
        options = [f.options[o] for f, o in zip(families, selection, strict=True)]
        resident = [selection[i] == families[i].resident for i in self.states]
        ends = sum(1 << bit for bit, i in enumerate(self.ends) if selection[i] == families[i].resident)
        others = [options[i].get("source") == OTHER_SOURCE.get(families[i].options[0]["source"]) for i in self.sources]
        shape = Shape((0,) * len(self.kinds), ends=ends, offloaded=sum(options[i]["act"] == "offload" for i in self.acts),
                      held=sum(options[i].get("weights") == "hold" for i in self.holds), other_source=sum(others))  # fmt: skip
        first = [*range(0, sum(resident), max(1, sum(resident) // GRID)), sum(resident)]
        placed = [self.filled(replace(shape, resident=n, scattered=sum(resident) - n)) for n in first]
        return min((s for s in placed if s is not None), key=self.period, default=None)

    def rerouted(self) -> tuple[int, ...] | None:
        """The rule's options, but that gradients are summed where the rule does not; None if there is no such choice.

        A start of its own: between GPUs the sums take the links, and most state is best resident; on the host they take its
        memory, and half of it may be. No single change leads from one to the other.
        """
        alike = tuple(_rerouted(self.graph.choices.families[members[0]]) for members in self.kinds)
        return alike if any(alike) else None

    def best_count(self, best: Shape, count: str) -> Shape:
        """On a grid over all values, then on finer ones around the best."""
        most = self.most(count)
        step = max(1, -(-most // GRID))
        tried = range(0, most + step, step)
        while True:
            for value in tried:
                trial = _with(best, count, min(value, most))
                for shape in (self.with_room(trial, count), *(self.balanced(trial) if count == "other_source" else ())):
                    if shape is not None and self.better(shape, best):
                        best = shape
            if step == 1:
                return best
            step = -(-step // 2) if step > 2 else 1
            here: int = getattr(best, count)
            tried = range(max(0, here - step), here + step + 1, step)

    def options(self, kind: int) -> list[int]:
        """Those that all families of a kind may have alike: resident and held ones are counts."""
        family = self.graph.choices.families[self.kinds[kind][0]]
        return [o for o, option in enumerate(family.options) if o != family.resident and option.get("weights") != "hold"]

    def best_option(self, best: Shape, kind: int) -> Shape:
        for option in self.options(kind):
            shape = self.filled(replace(best, alike=(*best.alike[:kind], option, *best.alike[kind + 1 :])))
            if shape is not None and self.better(shape, best):
                best = shape
        return best

    def nearby(self, best: Shape, target: int) -> Shape:
        """From `best` on, two counts at a time, one of them by little, until a step takes `target` units at most, or no two
        make it shorter.

        What one count costs another may save: with a resident layer less the GPU has less to do, but the host too much, unless
        more of the weights come from the other source. Neither change is any good alone.
        """
        tried: set[Shape] = set()
        cycles: list[Sequence[TimedEdge]] = []

        def shorter(best: Shape, allowed: int) -> Shape | None:
            for pair in self.pairs(best):
                if pair in tried:
                    continue
                tried.add(pair)
                for shape in (pair, self.filled(pair) if pair.retained == best.retained else None):
                    if shape is None or not self.fits(shape) or self.too_long(shape, allowed, cycles):
                        continue
                    if not (cycle := positive_cycle(self.graph, self.selection(shape), Fraction(allowed))):
                        return shape
                    cycles.insert(0, cycle)
            return None

        while (period := self.period(best)) > target:
            cycles.insert(0, max_cycle_ratio(self.graph, self.selection(best)).edges)
            found = shorter(best, max(target, int(period * (1 - FREE))))
            if found is None:
                break
            best = found
        return best

    def pairs(self, best: Shape) -> Iterator[Shape]:
        """`best` with one count changed by little, and another by little or to any value on a grid."""
        for change, (one, other) in product(NEARBY, permutations((*COUNTS, "retained"), 2)):
            changed, here, most = getattr(best, one) + change, getattr(best, other), self.most(other)
            values = {here, *(here + by for by in NEARBY), *range(0, most, max(1, -(-most // GRID))), most}
            if 0 <= changed <= self.most(one):
                yield from (_with(_with(best, one, changed), other, value) for value in sorted(values) if 0 <= value <= most)

    def too_long(self, shape: Shape, allowed: int, cycles: list[Sequence[TimedEdge]]) -> bool:
        """True if a stream or one of `cycles`, of which the useful ones go to the front, takes longer than `allowed`."""
        selection = self.selection(shape)
        if self.graph.floor(selection) > allowed:
            return True
        for at, cycle in enumerate(cycles):
            if is_longer(self.graph, cycle, selection, allowed):
                cycles.insert(at // 2, cycles.pop(at))
                return True
        return False

    def better(self, shape: Shape, than: Shape) -> bool:
        period = self.period(than)
        return self.is_period(shape, period - 1 - int(period * FREE))

    def plainest(self, best: Shape) -> Shape:
        """Options back to the rule's and counts back to none, as far as the step stays within `FREE` of the best."""
        allowed = int(self.period(best) * (1 + FREE))

        def good(shape: Shape) -> bool:
            return self.is_period(shape, allowed) and self.fits(shape)

        for kind in range(len(self.kinds)):
            plain = replace(best, alike=(*best.alike[:kind], 0, *best.alike[kind + 1 :]))
            if good(plain):
                best = plain
        for count in ("other_source", "held", "offloaded", "scattered", "resident", "retained"):
            best = fewest_that_holds(best, count, good)
        return best


def search_structured(graph: EventGraph, rows: Sequence[MemoryRow]) -> tuple[tuple[int, ...], int] | None:
    """The best structured selection that fits, and its period in units; None if none fits."""
    search = StructuredSearch(graph, rows)
    shape = search.run()
    return (search.selection(shape), search.period(shape)) if shape else None


@cache
def spread_over(count: int, places: int) -> tuple[bool, ...]:
    """True for `count` of so many places (all, if it is more), as evenly as can be."""
    chosen = min(count, places)
    return tuple((place + 1) * chosen // places > place * chosen // places for place in range(places))


def most_that_holds(shape: Shape, count: str, most: int, holds: Callable[[Shape], bool]) -> Shape | None:
    """`shape` with the largest value of `count` for which `holds`, by bisection; None if not even 0 does."""
    if not holds(_with(shape, count, 0)):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(_with(shape, count, middle)) else (low, middle - 1)
    return _with(shape, count, low)


def fewest_that_holds(shape: Shape, count: str, holds: Callable[[Shape], bool]) -> Shape:
    """`shape` with the least value of `count` for which `holds`, by bisection; `shape` itself holds."""
    low, high = 0, getattr(shape, count)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(_with(shape, count, middle)) else (middle + 1, high)
    return _with(shape, count, high)


def _with(shape: Shape, count: str, value: int) -> Shape:
    counts: dict[str, int] = {count: value}
    return replace(shape, **counts)  # type: ignore[arg-type]


def _rerouted(family: Family) -> int:
    """The option that differs from the rule's in where gradients are summed alone; the rule's where there is none."""
    rule = family.options[0]
    others = (o for o, option in enumerate(family.options) if option.get("reduction") not in (None, rule.get("reduction"))
              and {**option, "reduction": rule.get("reduction")} == rule)  # fmt: skip
    return next(others, 0)


def _twin(family: Family, option: int, field: str, wanted: object) -> int | None:
    """The option that differs from `option` of a `weights` family in `field` alone, which is `wanted` there, if any."""
    if family.name != "weights" or field not in family.options[option]:
        return None
    twin = {**family.options[option], field: wanted}
    return next((o for o, other in enumerate(family.options) if other == twin), None)
