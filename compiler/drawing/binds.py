"""What bounds a step, in few words: the critical cycle of a Timeline as a handful of links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slidedp.compiler.ops import OpKind
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.simulation.timeline import Timeline

T = TypeVar("T")

MAX_LINKS = 6
MAX_RUNS = 3
NEGLIGIBLE = 0.01
"""Share of the cycle; shorter links are left out before neighbours are merged into one."""


@dataclass(frozen=True, slots=True)
class Link:
    """Consecutive ops of the critical cycle that do alike work: their kinds, their layers in order, and microseconds."""

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


def links(timeline: Timeline, at_most: int = MAX_LINKS) -> tuple[Link, ...]:
    """The critical cycle in order of time, in `at_most` links; as long together as `timeline.cycle_steps` steps.

    The shortest go first: one of next to no time is left out, any other becomes one with its shorter neighbour, so that copies
    and compute that alternate layer by layer are one link of both kinds. Empty for a measured timeline, which has no cycle.
    """
    out = joined([Link((leg.kind,), leg.layers, leg.us) for leg in timeline.cycle])
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
        if out and (set(out[-1].kinds) <= set(link.kinds) or set(out[-1].kinds) >= set(link.kinds)):
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


def longest(chain: Sequence[Link]) -> Link | None:
    """The link that most of the step goes by in."""
    return max(chain, key=lambda link: link.time_us, default=None)
