"""A good plan before the proof: all layers of a kind descend together, and return to the rule's choice where nothing is lost.

What the solver gets from here is a start, complete with times. It makes the search short; it proves nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product

from slidedp.compiler.eventgraph.eventgraph import EventGraph, Linear, TimedEdge
from slidedp.compiler.eventgraph.maxplus import is_period, max_cycle_ratio
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.runlength import layer_index

MAX_SWEEPS = 3
MAX_WAYS = 12
"""What one layer may take over from others, of the commonest."""
WORTH_A_SWEEP = 1e-3


def columns(graph: EventGraph, rows: Sequence[MemoryRow]) -> list[list[tuple[int, ...]]]:
    """For each family, every list of numbers that its options contribute somewhere: to a duration, a wait, a memory row."""
    found: list[list[tuple[int, ...]]] = [[] for _ in graph.choices.families]

    def collect(linear: Linear) -> None:
        for family, values in linear.terms:
            found[family].append(values)

    for edge in graph.edges:
        collect(edge.weight)
    for work in graph.works:
        collect(work.duration)
    for row in rows:
        collect(row.total)
        for each in row.largest:
            for linear in each:
                collect(linear)
    return found


def kinds(graph: EventGraph, rows: Sequence[MemoryRow]) -> list[list[int]]:
    """Families whose options mean the same, layer for layer: those of one kind of layer."""
    alike: dict[object, list[int]] = defaultdict(list)
    for i, (family, tables) in enumerate(zip(graph.choices.families, columns(graph, rows), strict=True)):
        if len(family.options) > 1:
            alike[family.name, str(family.options), tuple(sorted(set(tables)))].append(i)
    return list(alike.values())


def feasible(rows: Sequence[MemoryRow], selection: Sequence[int]) -> bool:
    return all(row.fits(selection) for row in rows)


def period_of(graph: EventGraph, selection: Sequence[int]) -> int:
    """The least whole period, in the graph's units."""
    ratio = max_cycle_ratio(graph, selection, graph.floor(selection) * graph.unit_us).ratio / graph.unit_us
    return -(-ratio.numerator // ratio.denominator)


def descend(graph: EventGraph, rows: Sequence[MemoryRow], start: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """From `start`, one option for all layers of a kind at a time, while the period falls. (selection, period in units)."""
    best, period = tuple(start), period_of(graph, start)
    partners = partners_of(graph)
    for _ in range(MAX_SWEEPS):
        before = period
        for members in kinds(graph, rows):
            for option in range(len(graph.choices.families[members[0]].options)):
                trial = list(best)
                for i in members:
                    choose(trial, i, option, partners)
                if tuple(trial) == best or not feasible(rows, trial) or graph.floor(trial) >= period:
                    continue
                if is_period(graph, trial, period - 1):
                    best, period = tuple(trial), period_of(graph, trial)
        if period == before:
            break
    return best, period


def interchange(graph: EventGraph, rows: Sequence[MemoryRow], start: Sequence[int], period: int,
                others: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """From `start` and its `period`, one layer at a time takes over all that some layer has, there or in one of `others`, while
    the period falls. (selection, period in units).
    """
    families, best = graph.choices.families, tuple(start)
    layers: dict[str, list[int]] = defaultdict(list)
    for i, family in enumerate(families):
        if layer_index(family.group) is not None:
            layers[family.group].append(i)
    alike: dict[str, list[list[int]]] = defaultdict(list)
    for members in layers.values():
        alike[str([(families[i].name, families[i].options) for i in members])].append(members)
    cycle = max_cycle_ratio(graph, best).edges
    for _ in range(MAX_SWEEPS):
        before = period
        for kind in alike.values():
            ways = Counter(tuple(s[i] for i in members) for s in (best, *others) for members in kind)
            for members, (way, _) in product(kind, ways.most_common(MAX_WAYS)):
                changed = dict(zip(members, way, strict=True))
                trial = tuple(changed.get(i, o) for i, o in enumerate(best))
                if is_longer(graph, cycle, trial, period - 1) or not feasible(rows, trial):
                    continue
                if is_period(graph, trial, period - 1):
                    best, period, cycle = trial, period_of(graph, trial), max_cycle_ratio(graph, trial).edges
        if period > before * (1 - WORTH_A_SWEEP):
            break
    return best, period


def is_longer(graph: EventGraph, cycle: Sequence[TimedEdge], selection: Sequence[int], period: int) -> bool:
    """True if `cycle` takes longer than `period` units a step under `selection`: then no period is that short."""
    sums = graph.sums(selection)
    return sum(e.weight.at(selection) + sums[e.num_works] for e in cycle) > period * sum(e.distance for e in cycle)


Partners = dict[tuple[int, int], list[tuple[int, int]]]


def partners_of(graph: EventGraph) -> Partners:
    """Options that go together, transitively."""
    together: Partners = defaultdict(list)
    for link in graph.choices.links:
        together[link.a, link.a_option].append((link.b, link.b_option))
        together[link.b, link.b_option].append((link.a, link.a_option))
    return together


def choose(selection: list[int], family: int, option: int, partners: Partners) -> None:
    """Set one family, and what is linked to its new and its old option."""
    if selection[family] == option:
        return
    old = (family, selection[family])
    selection[family] = option
    for other, its in partners.get((family, option), ()):
        choose(selection, other, its, partners)
    for other, its in partners.get(old, ()):
        if selection[other] == its:
            choose(selection, other, 0, partners)


def simplify(graph: EventGraph, rows: Sequence[MemoryRow], selection: Sequence[int], period: int) -> tuple[int, ...]:
    """`selection` with as much of it put back to the rule's choice as a step of `period` units allows: kinds, runs, groups."""
    best, partners = tuple(selection), partners_of(graph)

    def put_back(members: Sequence[int]) -> bool:
        nonlocal best
        trial = list(best)
        for i in members:
            choose(trial, i, 0, partners)
        if tuple(trial) == best:
            return True
        if feasible(rows, trial) and graph.floor(trial) <= period and is_period(graph, trial, period):
            best = tuple(trial)
            return True
        return False

    def halve(members: Sequence[int]) -> None:
        if members and not put_back(members) and len(members) > 1:
            middle = len(members) // 2
            halve(members[:middle])
            halve(members[middle:])

    for members in kinds(graph, rows):
        halve(members)
    return best
