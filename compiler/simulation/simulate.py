"""Discrete-event simulation of an OpGraph: many steps back to back, until the period is steady.

    simulate(graph, duration_us)                          every op takes its duration, whatever else runs
    simulate(graph, duration_us, contention=Contention(hw, world_size))
                                                          durations are those alone; ops that run at once share rates
    simulate(…, issue_us={op.name: …})                    and compute ends no earlier than a host thread has issued it

Streams issue in text order, step after step; `cpu` is one server with a priority queue: of the updates that are ready,
the earliest deadline first (DESIGN §5), the rule that the executor follows. An update makes way for one of an earlier deadline
that becomes ready, and goes on behind it: the executor's threads take its blocks one by one (native/queue.cpp). Ranks are alike
and in step, so one rank is simulated, edges over all ranks are local ones, and what it draws on the host's resources all
ranks draw.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import groupby

from slidedp.compiler.costmodel.contention import COMPUTE, Contention, Draw, Resource, fill, work_us
from slidedp.compiler.ops import Op, OpGraph, OpKind, Stream
from slidedp.compiler.simulation.issuing import Issuing
from slidedp.compiler.simulation.timeline import Leg, Span, Timeline, measured_timeline

__all__ = ["Leg", "Span", "Timeline", "measured_timeline", "simulate"]

FEWEST_STEPS = 6
MOST_STEPS = 48
STEADY = 1e-3
"""The period is steady when the second half of the steps that it is measured over gives the same, to this part of it."""


def simulate(
    graph: OpGraph,
    duration_us: Callable[[Op], int],
    num_steps: int | None = None,
    *,
    contention: Contention | None = None,
    issue_us: Mapping[str, int] | None = None,
) -> Timeline:
    """The steady state of `graph`, run step after step.

    Args:
        duration_us: of each op, a whole number. With contention: alone on its rank.
        num_steps: exactly so many; default: 6 (more if edges reach over more than two), and twice as many, up to 48, until
            the period has settled. It is measured over the second half of them.
        contention: what ops share (:class:`slidedp.compiler.costmodel.contention.Contention`); None: nothing.
        issue_us: by op name, how long a host thread takes to issue it, where that is known: see issuing.py. Needs contention.

    Raises ValueError naming the ops that wait for each other, if any do.
    """
    assert contention or not issue_us, "without contention times are whole"
    assert num_steps is None or num_steps >= 2, "a period needs two steps"
    durations = [duration_us(op) for op in graph.ops]
    draws = [contention.draw(op, us) for op, us in zip(graph.ops, durations, strict=True)] if contention else None
    farthest = max((edge.distance for edge in graph.edges), default=0)
    steps = num_steps or max(FEWEST_STEPS, 3 * farthest)
    while True:
        run = _Run(graph, durations, draws, Issuing(graph.ops, issue_us, steps) if issue_us else None, steps)
        run.to_the_end()
        if num_steps or steps >= MOST_STEPS or run.steady:
            return run.timeline()
        steps *= 2


class _Run:
    """State of one simulation. Node ``step * n + i`` is op i of that step; predecessors of earlier runs count as ended.

    Times are whole microseconds as long as nothing is shared, else fractions. A run with contention measures the last step
    but one, so that what follows a step still competes with its end.
    """

    def __init__(self, graph: OpGraph, durations: list[int], draws: list[Draw] | None, issuing: Issuing | None,
                 num_steps: int) -> None:
        self.ops, self.durations, self.n, self.num_steps = graph.ops, durations, len(graph.ops), num_steps
        self.measured = num_steps - 1 - (draws is not None and num_steps > 2)
        self.window = (self.measured + 1) // 2
        total = self.n * num_steps
        self.start: list[float] = [-1] * total
        self.end: list[float] = [-1] * total
        self.waiting = [0] * total
        self.cause = [-1] * total  # the node whose end let this one start
        self.last_dependency = [-1] * total
        self.successors: list[list[tuple[int, int]]] = [[] for _ in range(self.n)]
        for edge in graph.edges:
            src, dst = graph.index[edge.src], graph.index[edge.dst]
            self.successors[src].append((dst, edge.distance))
            for step in range(edge.distance, num_steps):
                self.waiting[step * self.n + dst] += 1
        self.streams = [s for s in Stream if any(op.stream is s for op in graph.ops)]
        self.queue = {s: [i for i, op in enumerate(graph.ops) if op.stream is s] for s in self.streams}
        self.position = dict.fromkeys(self.streams, 0)
        self.last_on = dict.fromkeys(self.streams, -1)
        self.updates: list[tuple[int, int, int]] = []  # (step, deadline, node) of ready ops on the cpu stream
        self.running: dict[Stream, int] = {}  # the node on each stream that is busy
        self.paused: list[int] = []  # updates that have made way, each for the next and the last for the one that runs
        self.since: dict[int, float] = {}  # when they did
        self.left_us: dict[int, float] = {}  # what was left of them
        self.away: dict[int, float] = {}  # how long updates made way, those that did
        self.meanwhile: dict[int, list[int]] = {}  # what ran then
        self.draws, self.sharing = draws, _Shares(draws, durations) if draws else None
        self.issuing = issuing
        self.late: dict[int, float] = {}  # how much longer compute ops last that are issued late
        self.left = self.n  # ops of the measured step that have not ended

    def to_the_end(self) -> None:
        for i, op in enumerate(self.ops):
            if op.stream is Stream.CPU:
                for step in range(self.num_steps):
                    if not self.waiting[step * self.n + i]:
                        heappush(self.updates, (step, op.deadline, step * self.n + i))
        self.issue(self.streams, 0)
        while self.running and self.left:
            now = min(self.end[node] for node in self.running.values())
            ended = sorted(node for node in self.running.values() if self.end[node] == now)
            touched = set().union(*(self.finish(node, now) for node in ended))  # all that ends now, before anything is chosen
            self.issue([s for s in self.streams if s in touched], now)
        if self.left:
            first = self.measured * self.n
            stuck = [self.ops[i].name for i in range(self.n) if self.start[first + i] < 0]
            raise ValueError(f"the schedule deadlocks: {len(stuck)} ops never start, among them {', '.join(stuck[:5])}")

    def finish(self, node: int, now: float) -> set[Stream]:
        """Ends `node`; returns the streams that may have something to start."""
        step, i = divmod(node, self.n)
        stream = self.ops[i].stream
        del self.running[stream]
        self.left -= step == self.measured
        self.last_on[stream] = node
        if stream is Stream.CPU:
            for paused in self.paused:
                self.meanwhile.setdefault(paused, []).append(node)
        touched = {stream}
        if self.issuing:
            self.issuing.done(node, now)
        for dst, distance in self.successors[i]:
            if step + distance >= self.num_steps:
                continue
            after = (step + distance) * self.n + dst
            self.waiting[after] -= 1
            if self.issuing:
                self.issuing.ended(node, after, now)
            self.last_dependency[after] = node
            if not self.waiting[after]:
                touched.add(self.ops[dst].stream)
                if self.ops[dst].stream is Stream.CPU:
                    heappush(self.updates, (step + distance, self.ops[dst].deadline, after))
        return touched

    def issue(self, streams: list[Stream], now: float) -> None:
        """Starts the next op of each of these streams that is idle and has one that can start."""
        for stream in streams:
            if stream is Stream.CPU:
                self.make_way(now)
            if stream in self.running or (node := self.next_on(stream)) < 0:
                continue
            self.running[stream] = node
            if node in self.since:
                self.paused.remove(node)
                self.away[node] = self.away.get(node, 0) + now - self.since.pop(node)
            else:
                before = self.last_on[stream]
                self.cause[node] = before if before >= 0 and self.end[before] == now else self.last_dependency[node]
                self.start[node] = now
                if self.issuing:
                    self.issued(node, now)
            self.end[node] = now + self.left_us.get(node, self.durations[node % self.n])
        if self.sharing:
            nodes = [self.running[s] for s in self.streams if s in self.running]
            for node, end in self.sharing.ends(nodes, now, self.left_us):
                self.end[node] = end

    def issued(self, node: int, now: float) -> None:
        """`node` starts: it ends no earlier than it has been issued."""
        assert self.issuing is not None
        alone = self.durations[node % self.n]
        late = self.issuing.started(node, beside_cores=Stream.CPU in self.running) - now - alone
        if late > 0 and self.ops[node % self.n].kind in COMPUTE:
            self.late[node], self.left_us[node] = late, alone + late

    def make_way(self, now: float) -> None:
        """Puts the update that runs back among those that are ready, if one of them is due earlier."""
        node = self.running.get(Stream.CPU, -1)
        if node < 0 or not self.updates:
            return
        step, i = divmod(node, self.n)
        if self.updates[0][:2] < (step, self.ops[i].deadline):
            del self.running[Stream.CPU]
            self.left_us[node] = self.sharing.left_us(node, now) if self.sharing else self.end[node] - now
            self.since[node] = now
            self.paused.append(node)
            heappush(self.updates, (step, self.ops[i].deadline, node))

    def next_on(self, stream: Stream) -> int:
        """Takes the node that is next on an idle stream; -1 if none can start."""
        if stream is Stream.CPU:
            return heappop(self.updates)[2] if self.updates else -1
        step, k = divmod(self.position[stream], len(self.queue[stream]))
        node = step * self.n + self.queue[stream][k]
        if step >= self.num_steps or self.waiting[node]:
            return -1
        self.position[stream] += 1
        return node

    # ---- what came out ----

    def gained(self, steps: int) -> float:
        """How much later ops of the measured step ended than those `steps` steps earlier: the most of any op."""
        last = self.measured * self.n
        return max((self.end[v] - self.end[v - steps * self.n] for v in range(last, last + self.n)), default=0)

    @property
    def steady(self) -> bool:
        half = self.window // 2
        if not half:
            return False
        whole, late = self.gained(self.window) / self.window, self.gained(half) / half
        return abs(whole - late) <= STEADY * whole

    def timeline(self) -> Timeline:
        if not self.ops:
            return Timeline(0, (), {}, ())
        nodes = range(self.measured * self.n, (self.measured + 1) * self.n)
        step_us = math.ceil(self.gained(self.window) / self.window - 1e-6)
        origin = min(self.start[v] for v in nodes)
        spans = tuple(Span(op.name, op.stream, round(self.start[v] - origin), round(self.end[v] - origin))
                      for op, v in zip(self.ops, nodes, strict=True))
        busy = {s: round(sum(self.took(nodes[i]) for i in self.queue[s])) for s in self.streams}
        last = max(nodes, key=lambda v: (self.end[v], -v))
        cycle, steps = self.cycle(last)
        return Timeline(step_us, spans, busy, self.chain(last, step_us), self.exposed(nodes), cycle, steps,
                        self.contended(nodes), self.stretched(nodes), self.resources(step_us), self.steady,
                        late_us=round(sum(self.late.get(v, 0) for v in nodes)))

    def resources(self, step_us: int) -> dict[Resource, float]:
        """The part of each that a step uses, fullest first."""
        work = work_us(self.draws, self.durations) if self.draws else {}
        work.pop(Resource.GPU, None)  # the stream's own line
        return {r: us / step_us for r, us in sorted(work.items(), key=lambda item: -item[1])} if step_us else {}

    def took(self, node: int) -> float:
        """How long it ran, without the time for which it made way."""
        return self.end[node] - self.start[node] - self.away.get(node, 0)

    def chain(self, node: int, step_us: int) -> tuple[str, ...]:
        until = self.end[node] - step_us
        names = []
        while node >= 0 and self.end[node] > until:
            names += [self.ops[v % self.n].name for v in reversed(self.with_meanwhile(node)) if self.end[v] > until]
            node = self.cause[node]
        return tuple(reversed(names))

    def with_meanwhile(self, node: int) -> list[int]:
        """`node`, and what it made way for: it ends when all of that has been done, whenever that came."""
        return [node, *self.meanwhile.get(node, ())]

    def cycle(self, node: int) -> tuple[tuple[Leg, ...], int]:
        """The causes of `node`, back from an op to the same op some steps earlier: the nearest two a period apart a step.

        Also the number of steps. Where the period alternates, no two may be; then the two that are furthest apart a step.
        """
        period = self.gained(self.window) / self.window
        path: list[int] = []
        seen: dict[int, list[int]] = {}  # op -> positions in the path
        best, found = 0.0, (0, 0, 0)
        while node >= 0 and best < (1 - STEADY) * period:
            for first in seen.setdefault(node % self.n, []):
                later = path[first]
                steps = (later - node) // self.n
                mean = (self.end[later] - self.end[node]) / steps
                if mean > best:
                    best, found = mean, (first, len(path), steps)
            seen[node % self.n].append(len(path))
            path.append(node)
            node = self.cause[node]
        first, last, steps = found
        return self.legs(path[first:last][::-1]), steps

    def legs(self, path: list[int]) -> tuple[Leg, ...]:
        """`path`, in order of time, cut where the kind changes."""
        legs = []
        whole = [w for v in path for w in self.with_meanwhile(v)]
        for kind, nodes in groupby(whole, key=lambda v: phase(self.ops[v % self.n].kind)):
            ops = [(self.ops[v % self.n], self.took(v)) for v in nodes]
            layers = tuple(dict.fromkeys(op.layer for op, _ in ops))
            legs.append(Leg(kind, ops[0][0].stream, tuple(op.name for op, _ in ops), layers, round(sum(us for _, us in ops))))
        return tuple(legs)

    def exposed(self, nodes: range) -> dict[OpKind, int]:
        """The waits of the GPU before each of its ops of the measured step, shared out over the ops that it waited for."""
        waits: dict[OpKind, float] = {}
        queue = self.queue.get(Stream.GPU, [])
        for k, i in enumerate(queue):
            node = nodes[i]
            before = nodes[queue[k - 1]] if k else nodes[queue[-1]] - self.n
            since, until = self.end[before] if before >= 0 else 0, self.start[node]
            node = self.cause[node]
            while until > since and node >= 0:
                kind = self.ops[node % self.n].kind
                waits[kind] = waits.get(kind, 0) + until - max(self.start[node], since)
                until, node = self.start[node], self.cause[node]
        return in_order(waits)

    def contended(self, nodes: range) -> dict[OpKind, int]:
        longer: dict[OpKind, float] = {}
        for op, us, node in zip(self.ops, self.durations, nodes, strict=True):
            longer[op.kind] = longer.get(op.kind, 0) + self.took(node) - us - self.late.get(node, 0)
        return in_order(longer)


    def stretched(self, nodes: range) -> dict[Stream, dict[str, float]]:
        if not self.draws:
            return {}
        took: dict[Stream, Counter[str]] = defaultdict(Counter)
        alone: dict[Stream, Counter[str]] = defaultdict(Counter)
        for op, us, node in zip(self.ops, self.durations, nodes, strict=True):
            took[op.stream][op.whole] += self.took(node)  # type: ignore[assignment]
            alone[op.stream][op.whole] += us
        return {s: {name: took[s][name] / us for name, us in names.items() if us} for s, names in alone.items()}


def phase(kind: OpKind) -> OpKind:
    """A recompute is a part of its backward."""
    return OpKind.BACKWARD if kind is OpKind.RECOMPUTE else kind


def in_order(times: dict[OpKind, float]) -> dict[OpKind, int]:
    """Whole microseconds, longest first, without what rounds to nothing."""
    return {kind: round(us) for kind, us in sorted(times.items(), key=lambda item: -item[1]) if round(us)}


class _Shares:
    """Progress of the ops that run, at speeds that change whenever one starts or ends. Speeds are remembered by what runs."""

    def __init__(self, draws: list[Draw], durations: list[int]) -> None:
        self.draws, self.durations, self.n = list(dict.fromkeys(draws)), durations, len(draws)
        index = {draw: k for k, draw in enumerate(self.draws)}
        self.kind = [index[draw] for draw in draws]
        self.known: dict[tuple[int, ...], tuple[float, ...]] = {}
        self.progress: dict[int, tuple[float, float, float]] = {}  # running node -> (microseconds alone left, since when, speed)

    def left_us(self, node: int, now: float) -> float:
        """What is left of a node that runs: microseconds alone."""
        left, since, speed = self.progress[node]
        return max(left - speed * (now - since), 0)

    def ends(self, nodes: list[int], now: float, resumed: Mapping[int, float]) -> list[tuple[int, float]]:
        """When each node whose speed changes now will end, if nothing else changes. `resumed`: what was left of some that did
        not run until now.
        """
        what = tuple([self.kind[node % self.n] for node in nodes])
        speeds = self.known.get(what)
        if speeds is None:
            speeds = self.known[what] = fill([self.draws[k] for k in what])
        before, self.progress, changed = self.progress, {}, []
        for node, speed in zip(nodes, speeds, strict=True):
            left, since, old = before.get(node) or (resumed.get(node, self.durations[node % self.n]), now, 0.0)
            if speed != old:
                left = max(left - old * (now - since), 0)
                since = now
                changed.append((node, now + left / speed))
            self.progress[node] = left, since, speed
        return changed
