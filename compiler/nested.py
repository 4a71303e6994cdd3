"""What the host's updates make the GPU wait for: all that are due by one of its ops, in one window of the step.

An update begins when its gradient is home and is done when the next step's weights leave: behind one GPU op and before another,
which is its window. Gradients come home in the order in which the next step is last to need them, so that the windows of
updates 1..k, by deadline, are all inside that of k, or are widened until they are, and

    start of the GPU op before  +  T  >=  end of the GPU op behind  +  the time of updates 1..k

whatever is chosen. Updates of state in HBM take no time of the host, and ask for nothing: let h be the last of 1..k that takes
some. The event graph's own edge for h says this of 1..h, which are all of 1..k that take time, and of h's window, which is
inside. Unlike that edge no term of this is switched off where k is resident: it is as tight for fractions of options as for whole
ones. All that is left to the host has a step less the turn around its last layer. (Demand criterion, as in eventgraph.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slidedp.compiler.detours import Detours, Inequality, add, always
from slidedp.compiler.eventgraph import ZERO, Linear, TimedEdge
from slidedp.compiler.queues import ANYTHING, FAR, MAX_HOPS, Queues
from slidedp.compiler.search import Partners, choose, partners_of


@dataclass(frozen=True, slots=True)
class Window:
    """Updates up to number `last` are done between the end of GPU op `behind` and the start of GPU op `before`.

    GPU ops by their place in the chain, counted on around the step.
    """

    last: int
    behind: int
    before: int


@dataclass(frozen=True)
class Nested:
    """The windows of the updates in the graph of `detours`."""

    detours: Detours

    def windows(self) -> Iterator[Window]:
        """Of every prefix of the updates, as far as windows are known of all of it."""
        d = self.detours
        queues, partners = Queues(d), partners_of(d.graph)
        behind, before = FAR, -FAR
        for k in range(len(d.graph.works)):
            taken = self.taken(k, partners)
            found = [(a, b) for e in d.graph.edges if e.num_works == k + 1 and (a := self.begin(e, taken, queues)) > -FAR
                     and (b := self.end(e, taken, queues)) < FAR]  # fmt: skip
            if not found:
                return
            a, b = max(found, key=lambda window: (window[0] - window[1], window))
            behind, before = min(behind, a), max(before, b)
            if behind < before:
                yield Window(k, behind, before)

    def taken(self, k: int, partners: Partners) -> Linear:
        """Some time under every option, of one family if that is enough, under which work `k` takes time."""
        families, duration = self.detours.graph.choices.families, self.detours.graph.works[k].duration
        for f, values in duration.terms:
            resident = families[f].resident
            if resident is not None:
                trial = list(self.detours.graph.choices.default)
                choose(trial, f, resident, partners)
                if all(trial[g] == families[g].resident for g, _ in duration.terms) and duration.at(trial) == 0:
                    return Linear(0, ((f, tuple(int(o != resident) for o in range(len(values)))),))
        return ANYTHING

    def begin(self, e: TimedEdge, taken: Linear, queues: Queues) -> int:
        """The last GPU op over when `e` begins, whenever `taken` is some time; -FAR if there is none, or `e` may be off."""
        at = self.detours.place.get(e.src)
        if not always(taken, e.weight, ZERO if at is None else self.detours.busy(at)):
            return -FAR
        return queues.behind(e.src, taken, MAX_HOPS) if at is None else at

    def end(self, e: TimedEdge, taken: Linear, queues: Queues) -> int:
        """The first GPU op that starts no earlier than `e` ends; FAR if there is none."""
        at = self.detours.place.get(e.dst)
        first = min(queues.surely_before[e.dst], queues.before(e.dst, taken, ZERO, MAX_HOPS)) if at is None else at
        return first + e.distance * len(self.detours.chain)

    def inequalities(self) -> Iterator[Inequality]:
        """That the gaps inside a window are no less than the updates that the GPU's ops there do not cover."""
        d, n = self.detours, len(self.detours.chain)
        for w in self.windows():
            links = tuple(k % n for k in range(w.behind, w.before))
            covered = [d.busy(k) for k in range(w.behind + 1, w.before)]
            need = add([d.prefixes[w.last + 1]], covered)
            if need.const + sum(max(values) for _, values in need.terms) > 0:
                yield Inequality(links, 0, need)
