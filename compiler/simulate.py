"""Discrete-event simulation of an OpGraph: many steps back to back, until the period is steady.

Streams issue in text order, step after step; `cpu` is one server with a priority queue: of the updates that are ready,
the earliest deadline first (DESIGN §5), the rule that the executor follows. Ranks are alike, so one rank is simulated
and edges over all ranks are local ones. Shared-rate contention is in the durations or nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from slidedp.compiler.ops import Op, OpGraph, Stream


@dataclass(frozen=True, slots=True)
class Span:
    """When one op of the last simulated step ran, in microseconds from that step's first start."""

    op: str
    stream: Stream
    start_us: int
    end_us: int


@dataclass(frozen=True)
class Timeline:
    """The steady state. `step_us`: period. `busy_us`: of one step, by stream, streams without an op left out.

    `critical`: the chain of ops, in order of time and reaching back one period, each of which started only when the one
    before it ended; its last op is the last to end.
    """

    step_us: int
    spans: tuple[Span, ...]
    busy_us: dict[Stream, int]
    critical: tuple[str, ...]

    @property
    def utilisation(self) -> dict[Stream, float]:
        return {stream: busy / self.step_us if self.step_us else 0.0 for stream, busy in self.busy_us.items()}

    @property
    def bottleneck(self) -> Stream | None:
        """The busiest stream; None for an empty graph."""
        return max(self.busy_us, key=lambda s: self.busy_us[s], default=None)

    @property
    def exposed_us(self) -> int:
        """The part of a step in which the GPU waits."""
        return self.step_us - self.busy_us.get(Stream.GPU, 0)

    def __str__(self) -> str:
        lines = [f"step {self.step_us / 1e3:.2f} ms, GPU waits {self.exposed_us / 1e3:.2f} ms, bound by {self.bottleneck}"]
        for stream, busy in self.busy_us.items():
            lines.append(f"  {stream:<5} {busy / 1e3:10.2f} ms {self.utilisation[stream]:6.1%}")
        return "\n".join(lines)


def simulate(graph: OpGraph, duration_us: Callable[[Op], int], num_steps: int = 6) -> Timeline:
    """Run `num_steps` steps of `graph` and measure the period over the second half of them.

    Raises ValueError naming the ops that wait for each other, if any do.
    """
    assert num_steps >= 2, "a period needs two steps"
    run = _Run(graph, [duration_us(op) for op in graph.ops], num_steps)
    run.to_the_end()
    return run.timeline()


def measured_timeline(events: Sequence[tuple[str, Stream, float, float]], num_steps: int) -> Timeline:
    """A Timeline from recorded (op, stream, start, end) in seconds of `num_steps` steps in a row. `critical` is empty."""
    origin = min((start for _, _, start, _ in events), default=0.0)
    spans = tuple(Span(op, stream, round((a - origin) * 1e6), round((b - origin) * 1e6)) for op, stream, a, b in events)
    busy = {s: sum(span.end_us - span.start_us for span in spans if span.stream is s) // num_steps for s in Stream}
    end = max((span.end_us for span in spans), default=0)
    return Timeline(end // num_steps, spans, {s: us for s, us in busy.items() if us}, ())


class _Run:
    """State of one simulation. Node ``step * n + i`` is op i of that step; predecessors of earlier runs count as ended."""

    def __init__(self, graph: OpGraph, durations: list[int], num_steps: int) -> None:
        self.ops, self.durations, self.n, self.num_steps = graph.ops, durations, len(graph.ops), num_steps
        total = self.n * num_steps
        self.start, self.end = [-1] * total, [-1] * total
        self.ready, self.waiting = [0] * total, [0] * total
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
        self.busy = dict.fromkeys(self.streams, False)
        self.last_on = dict.fromkeys(self.streams, -1)
        self.updates: list[tuple[int, int, int]] = []  # (step, deadline, node) of ready ops on the cpu stream
        self.events: list[tuple[int, int]] = []  # (end, node)

    def to_the_end(self) -> None:
        for i, op in enumerate(self.ops):
            if op.stream is Stream.CPU:
                for step in range(self.num_steps):
                    if not self.waiting[step * self.n + i]:
                        heappush(self.updates, (step, op.deadline, step * self.n + i))
        for stream in self.streams:
            self.issue(stream, 0)
        while self.events:
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:  # all that ends now, before anything is chosen
                touched |= self.finish(heappop(self.events)[1], now)
            for stream in self.streams:
                if stream in touched:
                    self.issue(stream, now)
        stuck = [self.ops[i].name for i in range(self.n) if self.end[(self.num_steps - 1) * self.n + i] < 0]
        if stuck:
            raise ValueError(f"the schedule deadlocks: {len(stuck)} ops never start, among them {', '.join(stuck[:5])}")

    def finish(self, node: int, now: int) -> set[Stream]:
        """Ends `node`; returns the streams that may have something to start."""
        step, i = divmod(node, self.n)
        stream = self.ops[i].stream
        self.busy[stream], self.last_on[stream] = False, node
        touched = {stream}
        for dst, distance in self.successors[i]:
            if step + distance >= self.num_steps:
                continue
            after = (step + distance) * self.n + dst
            self.waiting[after] -= 1
            self.ready[after], self.last_dependency[after] = now, node
            if not self.waiting[after]:
                touched.add(self.ops[dst].stream)
                if self.ops[dst].stream is Stream.CPU:
                    heappush(self.updates, (step + distance, self.ops[dst].deadline, after))
        return touched

    def issue(self, stream: Stream, now: int) -> None:
        """Starts the next op of an idle stream, if it can start."""
        if self.busy[stream]:
            return
        if stream is Stream.CPU:
            if not self.updates:
                return
            node = heappop(self.updates)[2]
        else:
            step, k = divmod(self.position[stream], len(self.queue[stream]))
            if step >= self.num_steps:
                return
            node = step * self.n + self.queue[stream][k]
            if self.waiting[node]:
                return
            self.position[stream] += 1
        before = self.last_on[stream]
        self.cause[node] = before if before >= 0 and self.end[before] == now else self.last_dependency[node]
        self.busy[stream], self.start[node] = True, now
        self.end[node] = now + self.durations[node % self.n]
        heappush(self.events, (self.end[node], node))

    def timeline(self) -> Timeline:
        if not self.ops:
            return Timeline(0, (), {}, ())
        last = (self.num_steps - 1) * self.n
        half = self.num_steps // 2
        gained = max(self.end[last + i] - self.end[last - half * self.n + i] for i in range(self.n))
        step_us = -(-gained // half)
        origin = min(self.start[last:])
        spans = tuple(Span(op.name, op.stream, self.start[last + i] - origin, self.end[last + i] - origin)
                      for i, op in enumerate(self.ops))
        busy = {s: sum(self.durations[i] for i in self.queue[s]) for s in self.streams}
        return Timeline(step_us, spans, busy, self.chain(step_us))

    def chain(self, step_us: int) -> tuple[str, ...]:
        last = (self.num_steps - 1) * self.n
        node = max(range(last, last + self.n), key=lambda v: (self.end[v], -v))
        until = self.end[node] - step_us
        names = []
        while node >= 0 and self.end[node] > until:
            names.append(self.ops[node % self.n].name)
            node = self.cause[node]
        return tuple(reversed(names))
