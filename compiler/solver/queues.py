"""What a whole stream makes the GPU wait for: a queue, whose tasks each have to be done between two GPU ops.

A detour is of a few ops; where the stream of the collectives binds, the GPU waits for hundreds of them, one behind the other,
and which ones depends on as many choices. Each has a window: it cannot begin before some GPU op has ended (the backward that
makes a gradient, the last reader of a slot), and has to be done when another begins (the next user of a slot, the next reader of
weights). What is not chosen takes no time. Of tasks i..k of one stream, none of which has a window that begins before the end of
GPU op a or ends behind the start of GPU op b,

    start of b  >=  end of a  +  the time of tasks i..k

whatever is chosen: no term of it is switched off, so that it is as tight for fractions of options as for whole ones. Windows are
widened until neither end of them goes back along the queue; then this follows for all i, k, a and b from one time a task,

    done[k]  >=  end of GPU op behind[k]  +  time[k]         done[k]  >=  done[k - 1]  +  time[k]
    start of GPU op before[k]  >=  done[k]

which are true of the least such times in every timetable: let i be the task from whose window's begin on done[k] counts. Of tasks
i..k let i' be the first and k' the last that take time. Then done[k] is the end of behind[i] and the time of i'..k'; i' starts no
earlier than the end of behind[i'], which is not before behind[i]; and k' is done when before[k'] starts, not behind before[k]. If
none takes time, behind[i] is before before[k] in the GPU's order. (The demand of a single machine, as in eventgraph.py.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slidedp.compiler.eventgraph.eventgraph import ZERO, Linear
from slidedp.compiler.ops import Stream
from slidedp.compiler.solver.detours import Detours, always

FAR = 1 << 40
MAX_HOPS = 3
"""Events between a GPU op and a task on a path that is there only if the task takes time."""
ANYTHING = Linear(1)
"""Stands for a task that takes time under every option."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Task `event` takes its time, if it takes any, between the end of GPU op `behind` and the start of GPU op `before`.

    GPU ops by their place in the chain, counted on around the step: less than 0 is the step before. `due`: what `before` was
    before it was widened; it holds if the task takes time.
    """

    event: int
    behind: int
    before: int
    due: int = FAR


@dataclass(frozen=True)
class Queues:
    """The queues of the graph of `detours`."""

    detours: Detours

    def on(self, stream: Stream) -> list[Queued]:
        """In the order of the stream, without those of which nothing is known."""
        found = []
        for event, e in enumerate(self.detours.graph.events):
            if e.stream is stream and e.busy != ZERO:
                behind, before = self.behind(event, e.busy, MAX_HOPS), self.before(event, e.busy, e.busy, MAX_HOPS)
                if -FAR < behind < before < FAR:
                    found.append(Queued(event, behind, before))
        return widened(found, len(self.detours.chain))

    def behind(self, event: int, busy: Linear, hops: int) -> int:
        """The last GPU op that `event` is behind the end of, whenever `busy` is some time; -FAR if there is none."""
        latest, d = self.surely_behind[event], self.detours
        for e in d.arriving[event]:
            back = e.distance * len(d.chain)
            if e.src in d.place:
                if always(busy, e.weight, d.graph.events[e.src].busy):
                    latest = max(latest, d.place[e.src] - back)
            elif hops and always(busy, e.weight, ZERO):
                latest = max(latest, self.behind(e.src, busy, hops - 1) - back)
        return latest

    def before(self, event: int, busy: Linear, need: Linear, hops: int) -> int:
        """The first GPU op that starts `need` behind the start of `event` or later, whenever `busy` is some time; FAR if none."""
        first, d = FAR, self.detours
        for e in d.leaving[event]:
            if not always(busy, e.weight, need):
                continue
            on = e.distance * len(d.chain)
            if e.dst in d.place:
                first = min(first, d.place[e.dst] + on)
            else:
                further = self.before(e.dst, busy, ZERO, hops - 1) if hops else FAR
                first = min(first, self.surely_before[e.dst] + on, further + on)
        return first

    @cached_property
    def surely_behind(self) -> list[int]:
        """Of every event the last GPU op that it is behind the end of under every choice. Two sweeps: paths around the step."""
        latest, d = [-FAR] * len(self.detours.graph.events), self.detours
        for _ in range(2):
            for event in range(len(latest)):
                for e in d.arriving[event]:
                    if always(ANYTHING, e.weight, d.graph.events[e.src].busy if e.src in d.place else ZERO):
                        src = d.place.get(e.src, latest[e.src])
                        latest[event] = max(latest[event], src - e.distance * len(d.chain))
        return latest

    @cached_property
    def surely_before(self) -> list[int]:
        """Of every event the first GPU op that starts no earlier than it does under every choice."""
        first, d = [FAR] * len(self.detours.graph.events), self.detours
        for _ in range(2):
            for event in reversed(range(len(first))):
                for e in d.leaving[event]:
                    if always(ANYTHING, e.weight, ZERO):
                        first[event] = min(first[event], d.place.get(e.dst, first[e.dst]) + e.distance * len(d.chain))
        return first


def widened(queue: list[Queued], lap: int) -> list[Queued]:
    """With windows neither end of which goes back along the queue, around a step of `lap` GPU ops."""
    if not queue:
        return []
    behind, before = min(q.behind for q in queue) + lap, max(q.before for q in queue) - lap
    behinds, befores = [], []
    for q in reversed(queue):
        behind = min(behind, q.behind)
        behinds.append(behind)
    for q in queue:
        before = max(before, q.before)
        befores.append(before)
    return [Queued(q.event, a, b, q.before) for q, a, b in zip(queue, reversed(behinds), befores, strict=True)]
