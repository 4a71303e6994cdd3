"""The updates of an event graph, and the rates that its streams share: constraints that are sums.

Why no update is an event is told in eventgraph.py. By chunks, for a group i whose gradient comes home in chunks of which the
last arrives at `last`, and whose next delivery starts at `start` and ends one chunk after its last has been updated:

    end   + T >= last  + one chunk of i   + all that is due before i     the last chunk, and what overtakes it
    end   + T >= first + all chunks of i  + all that is due before i
    start + T >= first + the chunks of i that the first delivered chunk needs + all that is due before i

Deferred updates all may begin at once: at the end of compute and reductions, when the norm is known. They then have no arrival
of their own, and are inside the interval of whatever arrives. Those that speculate arrive as they would without a norm; only
what they have made is not taken before it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slidedp.compiler.choices import Values
from slidedp.compiler.decisions import Update
from slidedp.compiler.eventcosts import NOTHING, Chunked
from slidedp.compiler.eventgraph import OFF, ZERO, Linear, Work
from slidedp.compiler.eventparts import Delivered, Parts, Point, Weights
from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Stream


def add_updates(parts: Parts, uses: list[Weights]) -> tuple[Work, ...]:
    """Adds the constraints, and returns the works in order of deadline: that of the first delivery of each group."""
    due: dict[str, Delivered] = {}
    for w in uses:
        if w[1] in parts.returns:
            due.setdefault(w[1], parts.deliveries[w])
    names = sorted(due, key=lambda name: due[name].start)
    early = [name for name in parts.returns if not _deferred(parts, name)]
    arrival = {name: early.index(name) if name in early else len(parts.returns) for name in parts.returns}
    works = tuple(Work(name, _duration(parts, name)) for name in names)

    def before(j: int, name: str) -> Linear:
        """Less the works due before `j` whose gradients come home before that of `name`: those are not inside its interval."""
        outside = ZERO
        for k in range(j):
            if arrival[names[k]] < arrival[name]:
                outside = outside + works[k].duration.map(lambda v: -v)
        return outside

    if parts.choices.defaults.update is Update.DEFERRED:
        _behind_the_norm(parts, due, works, early)
    for j, name in enumerate(names):
        home, delivery, what = parts.returns[name], due[name], f"updates up to {name}"
        if name in early:
            inside = parts.each(name, "gradients", lambda o: 0 if o else OFF) + before(j, name)
            one, some = _chunk(parts, name), _first_chunk(parts, name)
            parts.wait(delivery.end, home.last + inside + one + delivery.chunk, what, 1, j)
            parts.wait(delivery.end, home.first + inside + delivery.chunk, what, 1, j + 1)
            parts.wait(delivery.start, home.first + inside + one, what, 1, j)
            parts.wait(delivery.start, home.first + inside + some, what, 1, j)
        for k in range(j):  # from an earlier arrival on, all that is due up to this
            if arrival[names[k]] < arrival[name]:
                there = parts.each(names[k], "gradients", lambda o: 0 if o else OFF) + before(j, names[k])
                parts.wait(delivery.end, parts.returns[names[k]].first + there + delivery.chunk, what, 1, j + 1)
    return works


def _deferred(parts: Parts, name: str) -> bool:
    decision, group = parts.choices.defaults.of(name), parts.layers.group(name)
    speculative = decision.update is Update.SPECULATIVE and group.num_trainable == group.numel
    return parts.choices.defaults.update is Update.DEFERRED and not speculative


def _behind_the_norm(parts: Parts, due: dict[str, Delivered], works: Sequence[Work], early: list[str]) -> None:
    """The last two constraints above, for updates that wait until all gradients, and their sums, are there."""
    ends = [parts.on[stream][-1][1] for stream in (Stream.GPU, Stream.COMM, Stream.HOST) if parts.on.get(stream)]
    for end in ends:
        done = ZERO  # of the works due so far, those that need not be behind the norm
        for j, (name, work) in enumerate((work.group, work) for work in works):
            delivery, what = due[name], f"deferred updates up to {name}"
            norm = end + parts.each(name, "gradients", lambda o: 0 if o else OFF) + done
            if name in early:
                parts.wait(delivery.start, norm, what, 1, j)
                done = done + work.duration.map(lambda v: -v)
                continue
            parts.wait(delivery.end, norm + delivery.chunk, what, 1, j + 1)
            parts.wait(delivery.start, norm + _chunk(parts, name), what, 1, j)
            parts.wait(delivery.start, norm + _first_chunk(parts, name), what, 1, j)


def _duration(parts: Parts, name: str) -> Linear:
    """Of all updates of a group: by the chunks of its return, and by what writing a shadow adds or saves."""
    group, source, typical = parts.layers.group(name), _source(parts, name), _typical(parts, name)
    standard = parts.costs.update(group, typical, source).total_us

    def by_source(o: Values) -> int:
        return parts.costs.update(group, typical, str(o["source"])).total_us - standard if o else 0

    by_chunks = parts.each(name, "gradients", lambda o: parts.costs.update(group, o, source).total_us)
    return by_chunks + parts.each(name, "weights", by_source)


def _chunk(parts: Parts, name: str) -> Linear:
    group, source = parts.layers.group(name), _source(parts, name)
    return parts.each(name, "gradients", lambda o: parts.costs.update(group, o, source).chunk_us)


def _first_chunk(parts: Parts, name: str) -> Linear:
    """The part of a group's updates that the first chunk of its delivery waits for."""
    whole = parts.costs.update(parts.layers.group(name), _typical(parts, name), _source(parts, name)).total_us
    return parts.each(name, "weights", lambda o: whole // int(o["delivery_chunks"]) if o else 0)


def _typical(parts: Parts, name: str) -> Values:
    """The rule's option for the gradients of a group."""
    return parts.options(name, "gradients")[0]


def _source(parts: Parts, name: str) -> str:
    return str(parts.choices.defaults.of(name).source)


def add_shared_rates(parts: Parts, uses: list[Weights]) -> None:
    """For each resource that several streams, or all ranks, share: a step takes as long as all its work takes there.

    `host memory`: the bytes of copies and host tasks of all ranks. `host cores`: casts, sums and updates, whose rates are
    all those of a host with nothing else to do; a task's fixed cost is idle time, and not in it.
    """
    world, hw = parts.layers.world_size, parts.costs.hw

    def memory_us(*transfers: Chunked) -> int:
        return round(sum(t.num_bytes for t in transfers) * world / hw.host_dram_gbps / 1e3)

    def cores_us(*transfers: Chunked) -> int:
        return sum(max(0, t.total_us - round(t.num * hw.host_task_us)) for t in transfers if t is not NOTHING)

    for name, us, copies in (("host memory", memory_us, True), ("host cores", cores_us, False)):
        total = ZERO
        for use, group in uses:
            total = total + parts.each(group, "weights", _delivering(parts, use, parts.layers.group(group), us, copies))
        for group in parts.returns:
            total = total + parts.each(group, "gradients", _returning(parts, parts.layers.group(group), us, copies))
            total = total + parts.each(group, "weights", _shadowing(parts, parts.layers.group(group), us))
        parts.wait(0, Point(0, total), name, 1)


Microseconds = Callable[..., int]


def _delivering(parts: Parts, use: str, group: Group, us: Microseconds, copies: bool) -> Callable[[Values], int]:
    c = parts.costs
    return lambda o: us(c.cast(group, use, o), c.h2d(group, use, o) if copies else NOTHING)


def _returning(parts: Parts, group: Group, us: Microseconds, copies: bool) -> Callable[[Values], int]:
    c, source = parts.costs, _source(parts, group.name)
    return lambda o: us(c.d2h(group, o) if copies else NOTHING, c.host_reduce(group, o), c.update(group, o, source))


def _shadowing(parts: Parts, group: Group, us: Microseconds) -> Callable[[Values], int]:
    """What another source than the rule's adds to the updates."""
    c, typical = parts.costs, _typical(parts, group.name)
    standard = us(c.update(group, typical, _source(parts, group.name)))
    return lambda o: us(c.update(group, typical, str(o["source"]))) - standard if o else 0
