"""What the GPU has to wait for, as inequalities over its idle time: all that a bound needs to know of an event graph's times.

The GPU's ops follow one another in one order, around the step. Between two neighbours there is a gap, and a step is all ops and
all gaps. Everything else that the event graph says is a detour: a path from one op to another by way of other streams. It takes
so long, and what of that the ops in between do not cover is gap:

    gaps from a to b  >=  the detour's weight  -  the ops between a and b

Both sides depend on choices. An option that switches a detour off, or makes it short, asks for no gap at all, so that no
option's part needs to be less than what turns the right side to 0: that makes the inequality tight also for fractions of
options.

Stalls are detours that add up. Transfers of one kind on one stream, of which each may begin when one op has ended and has to be
there when a later one begins (the reloads of activations), have a window each. Take transfers whose windows overlap with those
of their neighbours at most. In a run of such that are all chosen, and overlap one by one, they follow one another between the
begin of the first window and the end of the last, where there is no more time than the ops inside of all windows and the gaps;
and no two runs have a gap in common. So all gaps together are no less than the sum of what each transfer chosen has over the ops
in its own window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO, EventGraph, Linear, TimedEdge
from slidedp.compiler.ops import Stream
from slidedp.compiler.runlength import layer_index

Path = tuple[TimedEdge, ...]

MAX_LAPS = 6
FAR = 1 << 60
MAX_EVENTS = 3
"""Events of other streams on a detour that is looked for without a reason: a transfer's start and end, and one more."""


@dataclass(frozen=True, slots=True)
class Inequality:
    """``sum of gap[k] over links + laps * T >= need``. `links`: gaps by number, as often as they count."""

    links: tuple[int, ...]
    laps: int
    need: Linear


@dataclass(frozen=True, slots=True)
class Stall:
    """The excess of a transfer that takes `busy` over the ops in its window is at least each of `needs`.

    The window: behind GPU op `begin`, before GPU op `end`, by their places counted on around the step.
    """

    needs: tuple[Linear, ...]
    busy: Linear
    begin: int
    end: int


@dataclass(frozen=True)
class Detours:
    """The chain of GPU ops of `graph` and what bypasses it. Gap k is behind GPU op k, the last one is at the turn of the step."""

    graph: EventGraph

    @cached_property
    def chain(self) -> tuple[int, ...]:
        return tuple(i for i, e in enumerate(self.graph.events) if e.stream is Stream.GPU)

    @cached_property
    def place(self) -> dict[int, int]:
        return {event: k for k, event in enumerate(self.chain)}

    @cached_property
    def prefixes(self) -> tuple[Linear, ...]:
        sums = [ZERO]
        for work in self.graph.works:
            sums.append(sums[-1] + work.duration)
        return tuple(sums)

    @cached_property
    def leaving(self) -> dict[int, list[TimedEdge]]:
        out = defaultdict(list)
        for e in self.graph.edges:
            if e.src != e.dst:
                out[e.src].append(e)
        return out

    @cached_property
    def arriving(self) -> dict[int, list[TimedEdge]]:
        into = defaultdict(list)
        for e in self.graph.edges:
            if e.src != e.dst:
                into[e.dst].append(e)
        return into

    def busy(self, k: int) -> Linear:
        """Of GPU op `k`, counted on around the step."""
        return self.graph.events[self.chain[k % len(self.chain)]].busy

    # ---- detours ----

    def inequality(self, path: Path, at_least: int = 0) -> Inequality | None:
        """What `path`, between two GPU ops or around a cycle without any, asks for; None if that is nothing under any choice.

        `at_least`: a period known to be too small or right.
        """
        weight = add([*(e.weight for e in path), *(self.prefixes[e.num_works] for e in path if e.num_works)])
        laps, links = sum(e.distance for e in path), ()
        if path[0].src in self.place:
            n = len(self.chain)
            first, last = self.place[path[0].src], self.place[path[-1].dst] + laps * n
            links = tuple(k % n for k in range(first, last))  # type: ignore[assignment]
            if not links:
                return None
            weight = add([weight], [self.busy(k) for k in range(first, last)])
            base, laps = 0, 0
        else:
            base = laps * at_least
        need = tightened(weight, base)
        return Inequality(links, laps, need) if need else None

    def short(self) -> Iterator[Inequality]:
        """Of all detours by way of at most `MAX_EVENTS` events, without the order of other streams."""
        seen = set()
        for start in self.chain:
            for path in self._from((), start):
                if sum(e.distance for e in path) <= 1 and (found := self.inequality(path)) and found not in seen:
                    seen.add(found)
                    yield found

    def _from(self, path: Path, event: int) -> Iterator[Path]:
        for e in self.leaving[event]:
            if e.dst in self.place:
                if path:
                    yield (*path, e)
            elif len(path) < MAX_EVENTS and not e.name.startswith("order on") and all(e.dst != p.dst for p in path):
                yield from self._from((*path, e), e.dst)

    def along(self, cycle: Path) -> Iterator[Path]:
        """The detours of a cycle, which is all of it if it passes no GPU op."""
        at = next((i for i, e in enumerate(cycle) if e.src in self.place), None)
        if at is None:
            yield cycle
            return
        path: Path = ()
        for e in (*cycle[at:], *cycle[:at]):
            path = (*path, e)
            if e.dst in self.place:
                if len(path) > 1 or not e.name.startswith("order on"):
                    yield path
                path = ()

    def missed(self, selection: Sequence[int], starts: Sequence[int], period: int) -> list[Path]:
        """The longest detours to GPU ops that start too early, if these start at `starts` in every step of `period`."""
        weights = self.graph.weights(selection)
        index = {id(e): i for i, e in enumerate(self.graph.edges)}
        at = [-FAR] * len(self.graph.events)
        for event, start in zip(self.chain, starts, strict=True):
            at[event] = start
        cause: dict[int, TimedEdge] = {}
        others = [v for v in range(len(at)) if v not in self.place]
        into = {v: [(e, weights[index[id(e)]] - e.distance * period) for e in self.arriving[v]] for v in range(len(at))}
        for _ in range(MAX_LAPS):
            changed = False
            for v in others:
                for e, more in into[v]:
                    if at[e.src] + more > at[v]:
                        at[v], cause[v], changed = at[e.src] + more, e, True
            if not changed:
                break
        paths = []
        for v in self.chain:
            late = [(at[e.src] + more, k) for k, (e, more) in enumerate(into[v]) if e.src not in self.place]
            if late and max(late)[0] > at[v]:
                path, seen = [into[v][max(late)[1]][0]], set[int]()
                while (src := path[-1].src) not in self.place and src in cause and src not in seen:
                    seen.add(src)
                    path.append(cause[src])
                if path[-1].src in self.place:
                    paths.append(tuple(reversed(path)))
        return paths

    @cached_property
    def by_ends(self) -> dict[tuple[str, str, int], list[TimedEdge]]:
        edges = defaultdict(list)
        for e in self.graph.edges:
            edges[self.graph.events[e.src].name, self.graph.events[e.dst].name, e.distance].append(e)
        return edges

    @cached_property
    def layers(self) -> list[str]:
        groups = dict.fromkeys(f.group for f in self.graph.choices.families)
        return [g for g in groups if layer_index(g) is not None]

    def twins(self, path: Path) -> Iterator[Path]:
        """The same detour of every other layer, if all of it is of one: plans that differ in which layer is chosen wait alike."""
        ends = [(self.graph.events[e.src].name, self.graph.events[e.dst].name, e.distance) for e in path]
        owners = {g for g in self.layers for names in ends for name in names[:2] if g in name.split(".")}
        if len(owners) != 1:
            return
        (own,) = owners
        which = [self.by_ends[key].index(e) for key, e in zip(ends, path, strict=True)]

        def renamed(name: str, other: str) -> str:
            return ".".join(other if part == own else part for part in name.split("."))

        for other in self.layers:
            found = [self.by_ends.get((renamed(a, other), renamed(b, other), d), []) for a, b, d in ends]
            if other != own and all(len(each) > k for each, k in zip(found, which, strict=True)):
                yield tuple(each[k] for each, k in zip(found, which, strict=True))

    # ---- stalls ----

    def stalls(self) -> list[list[Stall]]:
        """Lists of transfers of one kind whose excesses add up to no more than all gaps."""
        windows = defaultdict(list)
        for event, e in enumerate(self.graph.events):
            if event not in self.place and e.busy != ZERO and (window := self.window(event)):
                windows[e.stream, e.name.split(".")[0]].append((*window, event))
        return [found for each in windows.values() if (found := self._adding_up(sorted(each)))]

    def _adding_up(self, windows: Sequence[tuple[int, int, int]]) -> list[Stall]:
        stalls: list[Stall] = []
        ends = [windows[0][0], windows[0][0]]  # of the last two windows taken
        for begin, end, event in windows:
            if begin < ends[-2] or end < ends[-1] or end > windows[0][0] + len(self.chain):
                continue
            inside, busy = [self.busy(k) for k in range(begin + 1, end)], self.graph.events[event].busy
            covered = sum(x.const + sum(max(values) for _, values in x.terms) for x in inside)
            own, ahead = off_where_zero(busy), self.ahead(event, begin)
            exact = tightened(add([own, *ahead], inside))
            if exact:
                least = add([own, *map(at_least, ahead)]) + -covered
                stalls.append(Stall((exact, tightened(least) or ZERO), busy, begin, end))
                ends.append(end)
        return stalls

    def ahead(self, event: int, begin: int) -> list[Linear]:
        """The time of what is in front of `event` on its stream, and starts no earlier than GPU op `begin` has ended either."""
        on = self.on[self.graph.events[event].stream]
        found, at, kind = list[Linear](), on.index(event), self.graph.events[event].name.split(".")[0]
        while at and not self.graph.events[on[at - 1]].name.startswith(f"{kind}.") and self.starts_behind(on[at - 1], begin):
            at -= 1
            found.append(self.graph.events[on[at]].busy)
        return found

    def starts_behind(self, event: int, begin: int) -> bool:
        """True if `event` starts no earlier than GPU op `begin` of this step has ended, whenever it takes time."""
        busy = self.graph.events[event].busy
        return any(e.src in self.place and self.place[e.src] - e.distance * len(self.chain) >= begin
                   and always(busy, e.weight, self.busy(self.place[e.src])) for e in self.arriving[event])

    @cached_property
    def on(self) -> dict[Stream, list[int]]:
        """Events that take time, by stream, in order."""
        found = defaultdict(list)
        for event, e in enumerate(self.graph.events):
            if e.busy != ZERO:
                found[e.stream].append(event)
        return found

    def window(self, event: int) -> tuple[int, int] | None:
        """(begin, end): a transfer that takes time starts when GPU op `begin` has ended, and has ended when `end` starts."""
        busy, n = self.graph.events[event].busy, len(self.chain)
        begin = [self.place[e.src] - e.distance * n for e in self.arriving[event]
                 if e.src in self.place and always(busy, e.weight, self.busy(self.place[e.src]))]  # fmt: skip
        end = [self.place[e.dst] + e.distance * n for e in self.leaving[event]
               if e.dst in self.place and always(busy, e.weight, busy)]  # fmt: skip
        for first in self.leaving[event]:
            if first.dst not in self.place and first.distance == 0 and first.weight == busy:
                end += [self.place[e.dst] + e.distance * n for e in self.leaving[first.dst]
                        if e.dst in self.place and always(busy, e.weight, ZERO)]  # fmt: skip
        return (max(begin), min(end)) if begin and end and min(end) > max(begin) + 1 else None


def add(plus: Sequence[Linear], minus: Sequence[Linear] = ()) -> Linear:
    """A sum in which what one switches off stays switched off."""
    const, merged = 0, dict[int, list[int]]()
    for sign, linears in ((1, plus), (-1, minus)):
        for linear in linears:
            const += sign * linear.const
            for family, values in linear.terms:
                have = merged.setdefault(family, [0] * len(values))
                for o, v in enumerate(values):
                    have[o] = OFF if v <= OFF // 2 or have[o] <= OFF // 2 else have[o] + sign * v
    return Linear(const, tuple((f, tuple(values)) for f, values in merged.items()))


def tightened(linear: Linear, base: int = 0) -> Linear | None:
    """`linear`, no option's part of which makes it less than `base`; None if it is no more than that under any choice."""
    most = linear.const + sum(max(values) for _, values in linear.terms)
    if most <= base:
        return None
    terms = [(f, tuple(max(v - max(values), base - most) for v in values)) for f, values in linear.terms if len(set(values)) > 1]
    return Linear(most, tuple(terms))


def off_where_zero(busy: Linear) -> Linear:
    if busy.const or len(busy.terms) != 1:
        return busy
    ((family, values),) = busy.terms
    return Linear(0, ((family, tuple(v or OFF for v in values)),))


def at_least(busy: Linear) -> Linear:
    """`busy`, or the least time that any option takes if it takes some."""
    if len(busy.terms) != 1:
        return busy
    ((family, values),) = busy.terms
    least = min((busy.const + v for v in values if busy.const + v > 0), default=0)
    return Linear(0, ((family, tuple(min(busy.const + v, least) for v in values)),))


def always(busy: Linear, weight: Linear, least: Linear) -> bool:
    """True if `weight` is at least `least` under every option that gives `busy` some time."""
    own = dict(busy.terms) if len(busy.terms) == 1 else {}
    more = add([weight], [least])
    worst = more.const
    for family, values in more.terms:
        times = own.get(family, (1,) * len(values))
        worst += min((v for v, us in zip(values, times, strict=True) if busy.const + us > 0), default=0)
    return worst >= 0
