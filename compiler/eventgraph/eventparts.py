"""Parts of a timed event graph: deliveries, gradients' ways home, each with what it waits for inside itself.

A transfer in n chunks is a start and an end; the next transfer of the same chunks starts when the first has arrived, and ends
one chunk after the last has. What an option does not have (a cast of a shadow, a gather of a whole copy) lasts nothing, and the
waits for it are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slidedp.compiler.decisions import Residence, Update
from slidedp.compiler.eventgraph.choices import Choices, Values
from slidedp.compiler.eventgraph.eventcosts import NOTHING, Chunked, OptionCosts
from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO, Event, Linear, TimedEdge
from slidedp.compiler.eventgraph.eventrings import Ring
from slidedp.compiler.layergraph import Group, LayerGraph, Stage
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.rows import split_on_host

Weights = tuple[str, str]
"""A delivery: (use, group), use being fwd, bwd or step."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment: `after` behind event number `event`."""

    event: int
    after: Linear = ZERO

    def __add__(self, more: Linear | int) -> Point:
        return Point(self.event, self.after + more)


@dataclass(frozen=True, slots=True)
class Delivered:
    """Events of a delivery: its first transfer's start and end, when its copy starts, the moments that all has arrived.

    `transfers`: the events of their ends, and what they are, the first being a copy where nothing is cast.
    """

    start: int
    end: int
    copy_start: int
    arrived: tuple[Point, ...]
    transfers: tuple[tuple[int, Transfer], ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """Moments of a gradient's way home: its first and last chunk can be updated.

    `transfers`: when the first chunk is home as each of them says for itself, and how far apart it sets the next ones.
    """

    first: Point
    last: Point
    transfers: tuple[tuple[Point, Transfer], ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a group under every option of `family` (None: there is nothing to choose)."""

    family: int | None
    each: tuple[Chunked, ...]

    def linear(self, values: Sequence[int]) -> Linear:
        return as_linear(self.family, values)

    @property
    def total(self) -> Linear:
        return self.linear([c.total_us for c in self.each])

    @property
    def chunk(self) -> Linear:
        return self.linear([c.chunk_us for c in self.each])

    @property
    def ever(self) -> bool:
        return any(c is not NOTHING for c in self.each)

    def only(self, values: Sequence[int] | None = None) -> Linear:
        """`values` (default 0) where the option has this transfer, switched off elsewhere."""
        values = [0] * len(self.each) if values is None else values
        return self.linear([OFF if c is NOTHING else v for c, v in zip(self.each, values, strict=True)])

    def only_chunk(self, of: Transfer) -> Linear:
        """One chunk of `of`, where the option has this transfer."""
        return self.only([c.chunk_us for c in of.each])

    def stalled_by(self, then: Transfer, slots: int) -> Linear:
        """From the start of `then` to the end of this, which may be at most `slots` chunks ahead of it."""
        pairs = zip(self.each, then.each, strict=True)
        return self.only([(a.num - slots) * b.chunk_us + a.chunk_us if a.num > slots else OFF for a, b in pairs])

    def freed_by(self, then: Transfer, slots: int) -> Linear:
        """From the start of `then` until one of `slots` buffers is free for whoever comes behind this."""
        return self.only([(b.num - slots + 1) * b.chunk_us if b.num >= slots else OFF for b in then.each])


def owner(stage: Stage) -> str:
    """The group whose decision says what `stage` keeps: its own; '' for a stage without parameters."""
    return stage.groups[0] if stage.groups else ""


def as_linear(family: int | None, values: Sequence[int]) -> Linear:
    """One value an option; a constant where all are equal."""
    if family is None or len(set(values)) == 1:
        return Linear(values[0])
    return Linear(0, ((family, tuple(values)),))


@dataclass
class Parts:
    """What has been made so far. `on`: for each stream the start and the end of all that runs there, in order."""

    layers: LayerGraph
    choices: Choices
    costs: OptionCosts
    events: list[Event] = field(default_factory=list)
    edges: list[TimedEdge] = field(default_factory=list)
    on: dict[Stream, list[tuple[int, Point]]] = field(default_factory=dict)
    deliveries: dict[Weights, Delivered] = field(default_factory=dict)
    returns: dict[str, Returned] = field(default_factory=dict)
    ends: dict[str, Point] = field(default_factory=dict)  # of compute and offloads, by name
    freed: dict[str, tuple[Point, ...]] = field(default_factory=dict)  # when a group's gradient has left its slot
    norms: list[Point] = field(default_factory=list)  # of deferred steps: the moments that gradients' norms are known
    clip: Point | None = None  # behind all norms

    def __post_init__(self) -> None:
        self.families = {f.key: i for i, f in enumerate(self.choices.families)}
        self.splits = split_on_host(self.layers, self.choices.defaults)
        self.early: dict[str, Returned] = {}
        self.deferred = self.choices.defaults.update is Update.DEFERRED
        self.staging = Ring(self, self.choices.defaults.staging_slots, "staging slots")
        self.sums = Ring(self, self.choices.defaults.reduce_slots, "reduce slots")

    # ---- one by one ----

    def options(self, group: str, family: str) -> tuple[Values, ...]:
        index = self.families.get((group, family))
        return () if index is None else self.choices.families[index].options

    def each(self, group: str, family: str, value: Callable[[Values], int]) -> Linear:
        """`value` of every option of a family; zero if the group has no such family."""
        options = self.options(group, family)
        return as_linear(self.families[group, family], [value(o) for o in options]) if options else ZERO

    def resident(self, group: str, value: int, otherwise: int = 0) -> Linear:
        """`value` where the state of a trainable group is in HBM."""
        return self.each(group, "gradients", lambda o: otherwise if o else value)

    def stays(self, group: Group) -> bool:
        """True if nothing is ever delivered: state in HBM is all that is offered."""
        return all(not o for o in self.options(group.name, "weights"))

    def streams(self, group: Group) -> bool:
        """True if some option delivers the group through the window of weight slots."""
        offered = self.options(group.name, "weights")
        return self.layers.streams(group) and any(o and o.get("weights") != Residence.HOLD for o in offered)

    def transfer(self, group: str, family: str, costs: Callable[[Values], Chunked]) -> Transfer:
        return Transfer(self.families.get((group, family)), tuple(costs(o) for o in self.options(group, family)))

    def event(self, name: str, stream: Stream, busy: Linear = ZERO) -> int:
        self.events.append(Event(name, stream, busy))
        return len(self.events) - 1

    def wait(self, dst: int, src: Point, name: str, distance: int = 0, num_works: int = 0) -> None:
        self.edges.append(TimedEdge(src.event, dst, distance, src.after, name, num_works))

    def run(self, name: str, stream: Stream, duration: Linear) -> Point:
        """Something in one piece; its end."""
        start = self.event(name, stream, duration)
        self.on.setdefault(stream, []).append((start, Point(start, duration)))
        self.ends[name] = Point(start, duration)
        return self.ends[name]

    def start(self, name: str, stream: Stream, transfer: Transfer) -> int:
        """The start of a transfer that some option has; -1 for one that none has."""
        return self.event(name, stream, transfer.total) if transfer.ever else -1

    def end(self, name: str, stream: Stream, transfer: Transfer, start: int) -> int:
        if start < 0:
            return -1
        end = self.event(f"{name}.end", stream)
        self.wait(end, Point(start, transfer.total), name)
        self.on.setdefault(stream, []).append((start, Point(end)))
        return end

    # ---- chains ----

    def deliver(self, weights: Weights) -> None:
        """cast -> copy -> gather. Who uses the slot, and which update comes before, is added by whoever knows."""
        use, name = weights
        group, tag = self.layers.group(name), f"{use}.{name}"
        cast = self.transfer(name, "weights", lambda o: self.costs.cast(group, use, o))
        copy = self.transfer(name, "weights", lambda o: self.costs.h2d(group, use, o))
        gather = self.transfer(name, "weights", lambda o: self.costs.all_gather(group, use, o))
        cast_start = self.start(f"host_cast.{tag}", Stream.CAST, cast)
        copy_start = self.event(f"h2d.{tag}", Stream.H2D, copy.total)
        gather_start = self.start(f"all_gather.{tag}", Stream.COMM, gather)
        cast_end = self.end(f"host_cast.{tag}", Stream.CAST, cast, cast_start)
        copy_end = self.end(f"h2d.{tag}", Stream.H2D, copy, copy_start)
        gather_end = self.end(f"all_gather.{tag}", Stream.COMM, gather, gather_start)
        arrived = [Point(copy_end)]
        if cast.ever:
            self.wait(copy_start, Point(cast_start, cast.chunk), f"cast before copy of {tag}")
            self.wait(copy_end, Point(cast_end, copy.chunk), f"cast before copy of {tag}")
            self.staging.fill(tag, cast, copy, (cast_start, cast_end), (Point(copy_start), Point(copy_end)))
        if gather.ever:
            self.wait(gather_start, Point(copy_start, gather.only_chunk(copy)), f"copy before gather of {tag}")
            self.wait(gather_end, Point(copy_end, gather.only_chunk(gather)), f"copy before gather of {tag}")
            arrived.append(Point(gather_end))
        first = (cast_start, cast_end) if cast.ever else (copy_start, copy_end)
        transfers = [(cast_end, cast)] * cast.ever + [(copy_end, copy)] + [(gather_end, gather)] * gather.ever
        self.deliveries[weights] = Delivered(*first, copy_start, tuple(arrived), tuple(transfers))

    def take_home(self, name: str, produced: Point) -> None:
        """reduce -> copy back, or copy back -> host reduce, of the gradient that is complete at `produced`."""
        group = self.layers.group(name)
        reduce = self.transfer(name, "gradients", lambda o: self.costs.reduce(group, o, self.deferred))
        back = self.transfer(name, "gradients", lambda o: self.costs.d2h(group, o))
        on_host = self.transfer(name, "gradients", lambda o: self.costs.host_reduce(group, o, self.deferred))
        norm = self.each(name, "gradients", lambda o: -self.costs.norm_of_sum(group, o).chunk_us if self.deferred and o else 0)
        reduce_start = self.start(f"reduce.{name}", Stream.COMM, reduce)
        back_start = self.event(f"d2h.{name}", Stream.D2H, back.total)
        host_start = self.start(f"host_reduce.{name}", Stream.HOST, on_host)
        reduce_end = self.end(f"reduce.{name}", Stream.COMM, reduce, reduce_start)
        back_end = self.end(f"d2h.{name}", Stream.D2H, back, back_start)
        host_end = self.end(f"host_reduce.{name}", Stream.HOST, on_host, host_start)
        self.wait(back_start, produced, f"gradient of {name}")
        first, last = Point(back_start, back.chunk), Point(back_end)
        freed = [Point(back_end, on_host.only() if reduce.ever else ZERO)]  # between GPUs, the reduction frees it
        if reduce.ever:
            self.wait(reduce_start, produced + reduce.only(), f"gradient of {name}")
            self.wait(back_start, Point(reduce_start, reduce.only_chunk(reduce) + norm), f"reduce before return of {name}")
            self.wait(back_end, Point(reduce_end, reduce.only_chunk(back) + norm), f"reduce before return of {name}")
            self.sums.fill(name, reduce, back, (reduce_start, reduce_end), (Point(back_start), Point(back_end)))
            freed.append(Point(reduce_end))
        if on_host.ever:
            self.wait(host_start, first, f"return before sum of {name}")
            self.wait(host_end, last + on_host.chunk, f"return before sum of {name}")
            first, last = Point(host_start, on_host.chunk + norm), Point(host_end, norm)
            self.norms.append(Point(host_end, on_host.only()))
        if reduce.ever:
            self.norms.append(Point(reduce_end, reduce.only()))
        behind = on_host.chunk + norm if on_host.ever else ZERO  # the copy back
        transfers = [(Point(back_start, back.chunk + behind), back)]
        transfers += [(Point(reduce_start, reduce.chunk + norm + back.chunk + behind), reduce)] * reduce.ever
        transfers += [(first, on_host)] * on_host.ever
        self.returns[name], self.freed[name] = Returned(first, last, tuple(transfers)), tuple(freed)

    def take_home_early(self, name: str, produced: Point) -> None:
        """The head's part of the gradient of a table whose rows are split; nothing where it is no head's: then it is zero."""
        group = self.layers.group(name)
        first = last = produced
        steps: tuple[tuple[OpKind, Stream, Callable[[Group, Values], Chunked]], ...] = (
            (OpKind.REDUCE, Stream.COMM, self.costs.reduce), (OpKind.D2H, Stream.D2H, self.costs.d2h),
            (OpKind.HOST_REDUCE, Stream.HOST, self.costs.host_reduce))  # fmt: skip
        for kind, stream, costs in steps if self.splits[name].tied else ():
            transfer = self.transfer(name, "gradients", lambda o, costs=costs: costs(group, o))  # type: ignore[misc]
            if transfer.ever:
                last = self.run(f"{kind}.early.{name}", stream, transfer.total)
                self.wait(last.event, first, f"early gradient of {name}")
                first = Point(last.event, transfer.chunk)
        self.early[name] = Returned(first, last)
