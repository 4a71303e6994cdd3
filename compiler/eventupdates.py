"""The updates of an event graph, and the rates that its streams share: constraints that are sums.

Why no update is an event is told in eventgraph.py. By chunks, for a group i whose gradient comes home in chunks of which the
last arrives at `last`, and whose next delivery starts at `start` and ends one chunk after its last has been updated:

    end   + T >= last  + one chunk of i   + all that is due before i     the last chunk, and what overtakes it
    end   + T >= first + all chunks of i  + all that is due before i
    start + T >= first + the chunks of i that the first delivered chunk needs + all that is due before i

Of a table whose rows are split, the untouched rows' updates are works of their own, which arrive earlier and are due as soon.

Deferred updates all may begin at once: at the end of compute and reductions, when the norm is known. They then have no arrival
of their own, and are inside the interval of whatever arrives. Those that speculate arrive as they would without a norm; only
what they have made is not taken before it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slidedp.compiler.choices import Values
from slidedp.compiler.contention import Resource
from slidedp.compiler.decisions import Update
from slidedp.compiler.eventcosts import Chunked
from slidedp.compiler.eventgraph import OFF, ZERO, Linear, Work
from slidedp.compiler.eventparts import Delivered, Parts, Point, Returned, Weights, owner
from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import OpKind, Stream

MOVES = OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD


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
    due: dict[str, Delivered] = {}
    for w in uses:
        if w[1] in parts.returns:
            due.setdefault(w[1], parts.deliveries[w])
    homes = sorted((home for home in arrived if home.group in due), key=lambda home: due[home.group].start)
    early = [home for home in arrived if not _deferred(parts, home.group)]
    arrival = {home: early.index(home) if home in early else len(arrived) for home in arrived}
    works = tuple(Work(home.group, _duration(parts, home)) for home in homes)

    def before(j: int, than: Home) -> Linear:
        """Less the works due before `j` whose gradients come home before `than`: those are not inside its interval."""
        outside = ZERO
        for k in range(j):
            if arrival[homes[k]] < arrival[than]:
                outside = outside + works[k].duration.map(lambda v: -v)
        return outside

    if parts.choices.defaults.update is Update.DEFERRED:
        _behind_the_norm(parts, due, homes, works, early)
    for j, home in enumerate(homes):
        delivery, what = due[home.group], f"updates up to {home.group}"
        if home in early:
            inside = parts.each(home.group, "gradients", lambda o: 0 if o else OFF) + before(j, home)
            one, some = _chunk(parts, home), _first_chunk(parts, home)
            parts.wait(delivery.end, home.at.last + inside + one + delivery.chunk, what, 1, j)
            parts.wait(delivery.end, home.at.first + inside + delivery.chunk, what, 1, j + 1)
            parts.wait(delivery.start, home.at.first + inside + one, what, 1, j)
            parts.wait(delivery.start, home.at.first + inside + some, what, 1, j)
        for k in range(j):  # from an earlier arrival on, all that is due up to this
            if arrival[homes[k]] < arrival[home]:
                there = parts.each(homes[k].group, "gradients", lambda o: 0 if o else OFF) + before(j, homes[k])
                parts.wait(delivery.end, homes[k].at.first + there + delivery.chunk, what, 1, j + 1)
    return works


def _deferred(parts: Parts, name: str) -> bool:
    decision, group = parts.choices.defaults.of(name), parts.layers.group(name)
    speculative = decision.update is Update.SPECULATIVE and group.num_trainable == group.numel
    return parts.choices.defaults.update is Update.DEFERRED and not speculative


def _behind_the_norm(parts: Parts, due: dict[str, Delivered], homes: Sequence[Home], works: Sequence[Work],
                     early: list[Home]) -> None:
    """The last two constraints above, for updates that wait until all gradients, and their sums, are there."""
    ends = [parts.on[stream][-1][1] for stream in (Stream.GPU, Stream.COMM, Stream.HOST) if parts.on.get(stream)]
    for end in ends:
        done = ZERO  # of the works due so far, those that need not be behind the norm
        for j, (home, work) in enumerate(zip(homes, works, strict=True)):
            delivery, what = due[home.group], f"deferred updates up to {home.group}"
            norm = end + parts.each(home.group, "gradients", lambda o: 0 if o else OFF) + done
            if home in early:
                parts.wait(delivery.start, norm, what, 1, j)
                done = done + work.duration.map(lambda v: -v)
                continue
            parts.wait(delivery.end, norm + delivery.chunk, what, 1, j + 1)
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
    whole = _update(parts, home, _typical(parts, home.group), _source(parts, home.group)).total_us
    return parts.each(home.group, "weights", lambda o: whole // int(o["delivery_chunks"]) if o else 0)


def _typical(parts: Parts, name: str) -> Values:
    """The rule's option for the gradients of a group."""
    return parts.options(name, "gradients")[0]


def _source(parts: Parts, name: str) -> str:
    return str(parts.choices.defaults.of(name).source)


def add_shared_rates(parts: Parts, uses: list[Weights]) -> None:
    """For each resource that ops of several streams draw on: a step is as long as all that work keeps it busy (contention.py)."""
    for resource in parts.costs.contention.shared if parts.costs.contention else ():

        def us(*ops: Chunked, resource: Resource = resource) -> int:
            return sum(op.work_us.get(resource, 0) for op in ops)

        total = ZERO
        for use, name in uses:
            total = total + parts.each(name, "weights", _delivering(parts, use, parts.layers.group(name), us))
        for name in parts.returns:
            group = parts.layers.group(name)
            total = total + parts.each(name, "gradients", _returning(parts, group, us))
            total = total + parts.each(name, "weights", _shadowing(parts, group, us))
            collectives = parts.costs.share_resident(group, parts.choices.defaults.of(name).return_chunks)
            total = total + parts.resident(name, us(*collectives))
        for i, stage in enumerate(parts.layers.stages):
            total = total + parts.each(owner(stage), "act", _moving(parts, i, us))
        if total != ZERO:
            parts.wait(0, Point(0, total), str(resource), 1)


Microseconds = Callable[..., int]


def _delivering(parts: Parts, use: str, group: Group, us: Microseconds) -> Callable[[Values], int]:
    c = parts.costs
    return lambda o: us(c.cast(group, use, o), c.h2d(group, use, o), c.all_gather(group, use, o))


def _returning(parts: Parts, group: Group, us: Microseconds) -> Callable[[Values], int]:
    c, source = parts.costs, _source(parts, group.name)
    split = parts.splits.get(group.name)
    times = 2 if split is not None and split.tied else 1
    return lambda o: (times * us(c.reduce(group, o), c.d2h(group, o), c.host_reduce(group, o))
                      + us(*_updates(parts, group, o, source)))  # fmt: skip


def _shadowing(parts: Parts, group: Group, us: Microseconds) -> Callable[[Values], int]:
    """What another source than the rule's adds to the updates."""
    typical = _typical(parts, group.name)
    standard = us(*_updates(parts, group, typical, _source(parts, group.name)))
    return lambda o: us(*_updates(parts, group, typical, str(o["source"]))) - standard if o else 0


def _updates(parts: Parts, group: Group, o: Values, source: str) -> list[Chunked]:
    """Of a table whose rows are split, those of its touched and of its other rows."""
    split = parts.splits.get(group.name)
    return [parts.costs.update(group, o, source, split, early=early) for early in ((False,) if split is None else (True, False))]


def _moving(parts: Parts, i: int, us: Microseconds) -> Callable[[Values], int]:
    c = parts.costs
    return lambda o: us(*(c.offload(i, kind) for kind in MOVES)) if o["act"] == "offload" else 0
