"""What binds a step: the critical chain in few words, and whose work the GPU waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from slidedp.compiler.ops import OpGraph, OpKind, Stream
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.simulate import Timeline

T = TypeVar("T")

TOGETHER = {OpKind.RECOMPUTE: OpKind.BACKWARD}
"""Kinds that alternate, layer by layer, and are one link of a chain."""

MAX_LINKS = 6
MAX_RUNS = 3
NEGLIGIBLE = 0.01
"""Of the chain: a link shorter than that is left out before others become one."""


@dataclass(frozen=True, slots=True)
class Link:
    """Consecutive ops of the critical chain that do alike work: their kinds, their layers in order, and microseconds."""

    kinds: tuple[OpKind, ...]
    layers: tuple[str, ...]
    time_us: int

    def __str__(self) -> str:
        kinds = " + ".join(self.kinds)
        return kinds if kinds == self.where else f"{kinds} {self.where}".rstrip()

    @property
    def where(self) -> str:
        """``epilogue, L35…L00``: neighbouring layers, up or down, as one; only the ends and a count of a longer tale."""
        runs = list(stretches(self.layers))
        if len(runs) <= MAX_RUNS:
            return ", ".join(a if a == b else f"{a}…{b}" for a, b in runs)
        return f"{self.layers[0]} to {self.layers[-1]} ({len(self.layers)} groups)"


def links(graph: OpGraph, timeline: Timeline, at_most: int = MAX_LINKS) -> tuple[Link, ...]:
    """The critical chain in order of time, in `at_most` links.

    The shortest go first: one of next to no time is left out, any other becomes one with its shorter neighbour, so that copies
    and compute that alternate layer by layer are one link of both kinds. Empty for a measured timeline, which has no chain.
    """
    duration = {s.op: s.end_us - s.start_us for s in timeline.spans}
    chain = [graph[name] for name in timeline.critical]
    out = joined([Link((op.kind,), (op.layer,), duration[op.name]) for op in chain])
    total = sum(link.time_us for link in out)
    while len(out) > at_most:
        i = min(range(len(out)), key=lambda k: out[k].time_us)
        short = out.pop(i)
        if short.time_us >= NEGLIGIBLE * total:
            j = min((k for k in (i - 1, i) if 0 <= k < len(out)), key=lambda k: out[k].time_us)
            out[j] = both(out[j], short) if j < i else both(short, out[j])
        out = joined(out)
    return tuple(out)


def joined(parts: Sequence[Link]) -> list[Link]:
    """Neighbours made one where the kinds of the one are among those of the other."""
    out: list[Link] = []
    for link in parts:
        if out and (families(out[-1]) <= families(link) or families(out[-1]) >= families(link)):
            out[-1] = both(out[-1], link)
        else:
            out.append(link)
    return out


def both(a: Link, b: Link) -> Link:
    return Link(distinct(a.kinds, b.kinds), distinct(a.layers, b.layers), a.time_us + b.time_us)


def stretches(layers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """First and last of each run of layers whose numbers go up, or down, by one."""
    first, last, step = layers[0], layers[0], 0
    for name in layers[1:]:
        a, b = layer_index(last), layer_index(name)
        if a is not None and b is not None and abs(b - a) == 1 and step in (0, b - a):
            last, step = name, b - a
            continue
        yield first, last
        first, last, step = name, name, 0
    yield first, last


def distinct(a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys([*a, *b]))


def families(link: Link) -> frozenset[OpKind]:
    return frozenset(TOGETHER.get(kind, kind) for kind in link.kinds)


def longest(chain: Sequence[Link]) -> Link | None:
    """The link that most of the step goes by in."""
    return max(chain, key=lambda link: link.time_us, default=None)


def waits(graph: OpGraph, timeline: Timeline) -> dict[OpKind, int]:
    """Microseconds of a predicted step in which the GPU waits, by the kind that works meanwhile on what it waits for.

    From the start of each GPU op that did not start when the one before it ended, back in time: the op whose end it waited
    for has the time it ran, what that one waited for the time before, and so on until the GPU was last busy.
    """
    walk = _Walk(graph, timeline)
    out: Counter[OpKind] = Counter()
    gpu = sorted((s for s in timeline.spans if s.stream is Stream.GPU), key=lambda s: s.start_us)
    if not gpu:
        return {}
    ends = [gpu[-1].end_us - timeline.step_us, *(s.end_us for s in gpu)]
    for idle_from, span in zip(ends, gpu, strict=False):
        for kind, time in walk.back(span.op, idle_from):
            out[kind] += time
    return {kind: out[kind] for kind in sorted(out, key=lambda k: (-out[k], k))}


class _Walk:
    """Predecessors of each op, and when all of them ran in the steady state."""

    def __init__(self, graph: OpGraph, timeline: Timeline) -> None:
        self.graph, self.period = graph, timeline.step_us
        self.span = {s.op: s for s in timeline.spans}
        self.before: dict[str, list[tuple[str, int]]] = {op.name: [] for op in graph.ops}
        for edge in graph.edges:
            self.before[edge.dst].append((edge.src, edge.distance))
        for stream in Stream:
            # whatever order they were issued in, this is the order in which they ran
            ops = sorted((s for s in timeline.spans if s.stream is stream), key=lambda s: (s.start_us, s.end_us))
            for a, b in pairwise(ops):
                self.before[b.op].append((a.op, 0))
            if ops:
                self.before[ops[0].op].append((ops[-1].op, 1))

    def back(self, name: str, until_us: int) -> Iterator[tuple[OpKind, int]]:
        """(kind, microseconds) of what ran between `until_us` and the start of op `name`, latest first."""
        at, shift = self.span[name].start_us, 0
        while at > until_us:
            if not self.before[name]:
                return
            name, distance = max(self.before[name], key=lambda edge: self.span[edge[0]].end_us - edge[1] * self.period)
            shift -= distance * self.period
            start = max(self.span[name].start_us + shift, until_us)
            if start < at:
                yield self.graph[name].kind, at - start
            at = min(at, start)
