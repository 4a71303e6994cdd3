"""What the host's updates make the GPU wait for: all that are due by one of its ops, in one window of the step.

An update begins when its gradient is home and is done when the next step's weights leave: behind one GPU op and before another,
which is its window. Gradients come home in the order in which the next step is last to need them, so that the windows of
updates 1..k, by deadline, are all inside that of k, or are widened until they are, and

    start of the GPU op before  +  T  >=  end of the GPU op behind  +  the time of updates 1..k

whatever is chosen. Updates of state in HBM take no time of the host, and ask for nothing: let h be the last of 1..k that takes
some. The event graph's own edge for h says this of 1..h, which are all of 1..k that take time, and of h's window, which is
inside. Unlike that edge no term of this is switched off where k is resident: it is as tight for fractions of options as for whole
ones. All that is left to the host has a step less the turn around its last layer. (Demand criterion, as in eventgraph.py.)

A table whose rows are split has two updates, of which one may begin long before. It is outside of the windows of the layers: the
same is said of all updates but those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from slidedp.compiler.eventgraph.eventgraph import ZERO, Linear, TimedEdge
from slidedp.compiler.solver.detours import Detours, Inequality, add, always
from slidedp.compiler.solver.queues import ANYTHING, FAR, MAX_HOPS, Queues
from slidedp.compiler.solver.search import Partners, choose, partners_of


@dataclass(frozen=True, slots=True)
class Window:
    """Updates up to number `last`, but those `outside`, are done between the end of GPU op `behind` and the start of `before`.

    GPU ops by their place in the chain, counted on around the step.
    """

    last: int
    behind: int
    before: int
    outside: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nested:
    """The windows of the updates in the graph of `detours`."""

    detours: Detours

    def windows(self) -> Iterator[Window]:
        """Of every prefix of the updates, as far as windows are known of all of it: of all, and of all but the early ones."""
        groups = [work.group for work in self.detours.graph.works]
        early = tuple(k for k, group in enumerate(groups) if group in groups[k + 1 :])
        for outside in dict.fromkeys(((), early)):
            yield from self._windows(outside)

    def _windows(self, outside: tuple[int, ...]) -> Iterator[Window]:
        works = self.detours.graph.works
        behind, before = FAR, -FAR
        for k in range(len(works)):
            if k in outside:
                continue
            more = [works[i].duration for i in outside if i <= k]  # what an edge may leave out
            taken = self.taken(k)
            ends = [(self.begin(e, add([e.weight, *more]), taken), self.end(e, taken)) for e in self.detours.graph.edges
                    if e.num_works == k + 1]  # fmt: skip
            found = [(a, b) for a, b in ends if a > -FAR and b < FAR]
            if not found:
                return
            a, b = max(found, key=lambda window: (window[0] - window[1], window))
            behind, before = min(behind, a), max(before, b)
            if behind < before:
                yield Window(k, behind, before, outside)

    @cached_property
    def queues(self) -> Queues:
        return Queues(self.detours)

    @cached_property
    def partners(self) -> Partners:
        return partners_of(self.detours.graph)

    def taken(self, k: int) -> Linear:
        """Some time under every option, of one family if that is enough, under which work `k` takes time."""
        families, duration = self.detours.graph.choices.families, self.detours.graph.works[k].duration
        for f, values in duration.terms:
            resident = families[f].resident
            if resident is not None:
                trial = list(self.detours.graph.choices.default)
                choose(trial, f, resident, self.partners)
                if all(trial[g] == families[g].resident for g, _ in duration.terms) and duration.at(trial) == 0:
                    return Linear(0, ((f, tuple(int(o != resident) for o in range(len(values)))),))
        return ANYTHING

    def begin(self, e: TimedEdge, weight: Linear, taken: Linear) -> int:
        """The last GPU op over when `e` of `weight` begins, whenever `taken` is some time; -FAR if none, or `e` may be off."""
        at = self.detours.place.get(e.src)
        if not always(taken, weight, ZERO if at is None else self.detours.busy(at)):
            return -FAR
        return self.queues.behind(e.src, taken, MAX_HOPS) if at is None else at

    def end(self, e: TimedEdge, taken: Linear) -> int:
        """The first GPU op that starts no earlier than `e` ends; FAR if there is none."""
        at = self.detours.place.get(e.dst)
        first = min(self.queues.surely_before[e.dst], self.queues.before(e.dst, taken, ZERO, MAX_HOPS)) if at is None else at
        return first + e.distance * len(self.detours.chain)

    def inequalities(self) -> Iterator[Inequality]:
        """That the gaps inside a window are no less than the updates that the GPU's ops there do not cover."""
        d, n = self.detours, len(self.detours.chain)
        for w in self.windows():
            links = tuple(k % n for k in range(w.behind, w.before))
            covered = [d.busy(k) for k in range(w.behind + 1, w.before)]
            need = add([work.duration for k, work in enumerate(d.graph.works[: w.last + 1]) if k not in w.outside], covered)
            if need.const + sum(max(values) for _, values in need.terms) > 0:
                yield Inequality(links, 0, need)
