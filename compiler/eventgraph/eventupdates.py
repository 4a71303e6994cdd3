"""The updates of an event graph, and the rates that its streams share: constraints that are sums.

Why no update is an event is told in eventgraph.py. By chunks, for a group i whose gradient comes home in chunks of which the
last arrives at `last`, and whose next delivery starts at `start` and ends one chunk after its last has been updated:

    end   + T >= last  + one chunk of i   + all that is due before i     the last chunk, and what overtakes it
    end   + T >= first + all chunks of i  + all that is due before i
    start + T >= first + the chunks of i that the first delivered chunk needs + all that is due before i
    start + T >= when the last of these is home + one chunk of i + all that is due before i

Of a table whose rows are split, the untouched rows' updates are works of their own, which arrive earlier and are due as soon.

Deferred updates do not begin before the norm is known, nor before their gradient is home; they are inside the interval of
whatever arrives that is not deferred. Those that speculate arrive as they would without a norm; only what they have made is not
taken before it is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slidedp.compiler.costmodel.contention import Resource
from slidedp.compiler.decisions import Update
from slidedp.compiler.eventgraph.choices import Values
from slidedp.compiler.eventgraph.eventcosts import Chunked
from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO, Linear, Work
from slidedp.compiler.eventgraph.eventparts import Delivered, Parts, Point, Returned, Weights
from slidedp.compiler.layergraph import Group


@dataclass(frozen=True, slots=True)
class Home:
    """A gradient that has come home; of a table whose rows are split that of the touched rows, or (`early`) of the others."""

    group: str
    at: Returned
    early: bool = False


def add_updates(parts: Parts, uses: list[Weights]) -> tuple[Work, ...]:
    """Adds the constraints, and returns the works in order of deadline: that of the first delivery of each group."""
    arrived = [*(Home(name, at, early=True) for name, at in parts.early.items()),
               *(Home(name, at) for name, at in parts.returns.items())]  # fmt: skip
    times = _earliest(parts)
    arrived.sort(key=lambda home: times[home.at.first.event] + home.at.first.after.at(parts.choices.default))
    due: dict[str, Delivered] = {}
    for w in uses:
        if w[1] in parts.returns:
            due.setdefault(w[1], parts.deliveries[w])
    homes = sorted((home for home in arrived if home.group in due), key=lambda home: due[home.group].start)
    early = [home for home in arrived if not _deferred(parts, home.group)]
    works = tuple(Work(home.group, _duration(parts, home)) for home in homes)

    def precedes(home: Home, than: Home) -> bool:
        """True if the updates of `home` may all be done when the gradient of `than` comes home."""
        return arrived.index(home) < arrived.index(than) and (home in early or than not in early)

    def before(j: int, than: Home) -> Linear:
        """Less the works due before `j` that precede `than`: those are not inside its interval."""
        outside = ZERO
        for k in range(j):
            if precedes(homes[k], than):
                outside = outside + works[k].duration.map(lambda v: -v)
        return outside

    if parts.clip is not None:
        _behind_the_norm(parts, due, homes, works, early)
    for j, home in enumerate(homes):
        delivery, what = due[home.group], f"updates up to {home.group}"
        inside = parts.each(home.group, "gradients", lambda o: 0 if o else OFF) + before(j, home)
        one, some, ends = _chunk(parts, home), _first_chunk(parts, home), _last_chunks(parts, home, delivery)
        for end, rest in ends:
            parts.wait(end, home.at.last + inside + one + rest, what, 1, j)
            parts.wait(end, home.at.first + inside + rest, what, 1, j + 1)
        parts.wait(delivery.start, home.at.first + inside + one, what, 1, j)
        parts.wait(delivery.start, home.at.first + inside + some, what, 1, j)
        for arrival in _first_chunks_home(parts, home):
            parts.wait(delivery.start, arrival + inside + one, what, 1, j)
        for k in range(j):  # from an earlier arrival on, all that is due up to this
            if precedes(homes[k], home):
                there = parts.each(homes[k].group, "gradients", lambda o: 0 if o else OFF) + before(j, homes[k])
                for end, rest in ends:
                    parts.wait(end, homes[k].at.first + there + rest, what, 1, j + 1)
    return works


def _earliest(parts: Parts) -> list[int]:
    """When each event of a step can be at the earliest, if nothing is chosen and no step came before."""
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for e in parts.edges:
        if not e.distance and (weight := e.weight.at(parts.choices.default)) > OFF // 2:
            into[e.dst].append((e.src, weight))
    times: list[int] = []
    for v in range(len(parts.events)):
        times.append(max((times[u] + weight for u, weight in into[v]), default=0))
    return times


def _deferred(parts: Parts, name: str) -> bool:
    decision, group = parts.choices.defaults.of(name), parts.layers.group(name)
    speculative = decision.update is Update.SPECULATIVE and group.num_trainable == group.numel
    return parts.choices.defaults.update is Update.DEFERRED and not speculative


def _behind_the_norm(parts: Parts, due: dict[str, Delivered], homes: Sequence[Home], works: Sequence[Work],
                     early: list[Home]) -> None:
    """The last two constraints above, for updates that wait until the norm of all gradients is known."""
    assert parts.clip is not None
    done = ZERO  # of the works due so far, those that need not be behind the norm
    for j, (home, work) in enumerate(zip(homes, works, strict=True)):
        delivery, what = due[home.group], f"deferred updates up to {home.group}"
        norm = parts.clip + parts.each(home.group, "gradients", lambda o: 0 if o else OFF) + done
        if home in early:
            parts.wait(delivery.start, norm, what, 1, j)
            done = done + work.duration.map(lambda v: -v)
            continue
        for end, rest in _last_chunks(parts, home, delivery):
            parts.wait(end, norm + rest, what, 1, j + 1)
        parts.wait(delivery.start, norm + _chunk(parts, home), what, 1, j)
        parts.wait(delivery.start, norm + _first_chunk(parts, home), what, 1, j)


def _update(parts: Parts, home: Home, o: Values, source: str) -> Chunked:
    return parts.costs.update(parts.layers.group(home.group), o, source, parts.splits.get(home.group), early=home.early)


def _duration(parts: Parts, home: Home) -> Linear:
    """Of all updates of a group: by the chunks of its return, and by what writing a shadow adds or saves."""
    source, typical = _source(parts, home.group), _typical(parts, home.group)
    standard = _update(parts, home, typical, source).total_us

    def by_source(o: Values) -> int:
        return _update(parts, home, typical, str(o["source"])).total_us - standard if o else 0

    by_chunks = parts.each(home.group, "gradients", lambda o: _update(parts, home, o, source).total_us)
    return by_chunks + parts.each(home.group, "weights", by_source)


def _chunk(parts: Parts, home: Home) -> Linear:
    source = _source(parts, home.group)
    return parts.each(home.group, "gradients", lambda o: _update(parts, home, o, source).chunk_us)


def _first_chunk(parts: Parts, home: Home) -> Linear:
    """The part of a group's updates that the first chunk of its delivery waits for."""
    whole = _update(parts, home, _typical(parts, home.group), _source(parts, home.group))
    offered = [o for o in parts.options(home.group, "gradients") if o]

    def first(o: Values) -> int:
        if not o:
            return 0
        num = int(o["delivery_chunks"])
        return -(-whole.num // num) * whole.chunk_us if len(offered) == 1 else whole.total_us // num

    return parts.each(home.group, "weights", first)


def _first_chunks_home(parts: Parts, home: Home) -> list[Point]:
    """When the gradient that the first chunk of the delivery waits for is home, by each of its transfers.

    Where the return's chunks are still open it is said to be there with its first chunk: how many more it takes is not linear.
    """
    if len([o for o in parts.options(home.group, "gradients") if o]) != 1:
        return []
    whole = _update(parts, home, _typical(parts, home.group), _source(parts, home.group))
    points = []
    for first, transfer in home.at.transfers:
        chunk = max(c.chunk_us for c in transfer.each)

        def ahead(o: Values, chunk: int = chunk) -> int:
            return (-(-whole.num // int(o["delivery_chunks"])) - 1) * chunk if o else 0

        points.append(first + parts.each(home.group, "weights", ahead))
    return points


def _last_chunks(parts: Parts, home: Home, delivery: Delivered) -> list[tuple[int, Linear]]:
    """(an event of the delivery, how long it is at least behind the last chunk of the updates): what is left of each transfer."""
    num = max(_update(parts, home, o, _source(parts, home.group)).num for o in parts.options(home.group, "gradients"))
    out, behind = list[tuple[int, Linear]](), ZERO
    for end, transfer in delivery.transfers:
        left = [-(-chunks.num // num) for chunks in transfer.each]
        if not out or max(left) > 1:  # else the pipeline says so itself
            out.append((end, behind + transfer.linear([n * c.chunk_us for n, c in zip(left, transfer.each, strict=True)])))
        behind = behind + transfer.chunk
    return out


def _typical(parts: Parts, name: str) -> Values:
    """The rule's option for the gradients of a group."""
    return parts.options(name, "gradients")[0]


def _source(parts: Parts, name: str) -> str:
    return str(parts.choices.defaults.of(name).source)


def add_shared_rate(parts: Parts, uses: list[Weights], resource: Resource, more: Linear) -> None:
    """A step is as long as all its work keeps busy what ops of several streams draw on (contention.py), however it is ordered.

    `more`: that of activations. What sharing adds to durations (`scale`) is not in it: it would be counted twice.
    """

    def us(*ops: Chunked) -> int:
        return sum(op.work_us.get(resource, 0) for op in ops)

    total = more
    for use, name in uses:
        total = total + parts.each(name, "weights", _delivering(parts, use, parts.layers.group(name), us))
    for group in (g for g in parts.layers.groups if g.uses and g.trainable):
        total = total + parts.each(group.name, "gradients", _returning(parts, group, us))
        if group.name in parts.returns:
            total = total + parts.each(group.name, "weights", _shadowing(parts, group, us))
    if total != ZERO:
        parts.wait(0, Point(0, total), str(resource), 1)


Microseconds = Callable[..., int]


def _delivering(parts: Parts, use: str, group: Group, us: Microseconds) -> Callable[[Values], int]:
    c = parts.costs
    return lambda o: us(c.cast(group, use, o), c.h2d(group, use, o), c.all_gather(group, use, o))


def _returning(parts: Parts, group: Group, us: Microseconds) -> Callable[[Values], int]:
    """The way home and the update, or the collectives of state in HBM."""
    c, source = parts.costs, _source(parts, group.name)
    split, num = parts.splits.get(group.name), parts.choices.defaults.of(group.name).return_chunks
    times = 2 if split is not None and split.tied else 1
    shares = parts.layers.world_size > 1
    resident = us(c.reduce_resident(group, num, False), c.gather_resident(group, num)) if shares else 0

    def cost(o: Values) -> int:
        if not o:
            return resident
        home = us(c.reduce(group, o), c.d2h(group, o), c.host_reduce(group, o))
        return times * home + us(*_updates(parts, group, o, source))

    return cost


def _shadowing(parts: Parts, group: Group, us: Microseconds) -> Callable[[Values], int]:
    """What another source than the rule's adds to the updates."""
    typical = _typical(parts, group.name)
    standard = us(*_updates(parts, group, typical, _source(parts, group.name)))
    return lambda o: us(*_updates(parts, group, typical, str(o["source"]))) - standard if o else 0


def _updates(parts: Parts, group: Group, o: Values, source: str) -> list[Chunked]:
    """Of a table whose rows are split, those of its touched and of its other rows."""
    split = parts.splits.get(group.name)
    return [parts.costs.update(group, o, source, split, early=early) for early in ((False,) if split is None else (True, False))]
