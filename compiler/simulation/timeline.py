"""What a step looks like in time, predicted (:mod:`slidedp.compiler.simulation.simulate`) or measured: spans, and what binds it.

A Timeline explains itself: `str()` says how long a step takes, whether the GPU or the host binds it, what the GPU waits for,
and which ops follow one another without a gap from one step to the next: the critical cycle. Nothing but making one of
those ops faster, or moving one off the cycle, makes the step shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slidedp.compiler.costmodel.contention import Resource
from slidedp.compiler.ops import OpKind, Stream

Event = tuple[str, Stream, float, float]
"""Op, stream, start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """When one op of the last simulated step ran, in microseconds from that step's first start."""

    op: str
    stream: Stream
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of the critical cycle: consecutive ops of one kind, which take `us` microseconds together.

    `layers`: those of the ops, in order, each once. A recompute counts as a part of its backward.
    """

    kind: OpKind
    stream: Stream
    ops: tuple[str, ...]
    layers: tuple[str, ...]
    us: int

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        where = first if first == last else f"{first}…{last}"
        return str(self.kind) if where == self.kind else f"{self.kind} {where}"


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
    exposed_by: Mapping[OpKind, int] = field(default_factory=dict)
    """Microseconds in which the GPU waits, by the kind of op that it waits for: the op whose end starts it again, or whose
    end let that op start, and so on back to where the wait began. Longest first; empty for a measured step."""
    cycle: tuple[Leg, ...] = ()
    """The critical cycle, in order of time: `cycle_steps` periods long. Empty for a measured step."""
    cycle_steps: int = 0
    contended_us: Mapping[OpKind, int] = field(default_factory=dict)
    """By kind, how much longer ops took than alone, because others drew on the same resources; without contention, empty."""
    stretched: Mapping[Stream, Mapping[str, float]] = field(default_factory=dict)
    """How many times as long as alone each op took, all chunks of a transfer as one. Without contention, empty."""
    resources: Mapping[Resource, float] = field(default_factory=dict)
    """The fraction of each shared resource's capacity that a step uses, fullest first. One near 1 bounds the step, whatever the
    order of its ops. Without contention, empty."""
    steady: bool = True
    """False if the period still changed when the simulation gave up waiting for it to settle."""
    peer_wait_us: int = 0
    """In a measured step of several ranks: microseconds in which collectives waited for the last rank to begin them. Not part of
    `busy_us`, though the stream could do nothing else; skew between ranks is not predicted."""
    issues: tuple[Span, ...] = ()
    """In a measured step, of ops on a device: when a host thread issued them. `stream` is the device's."""
    late_us: int = 0
    """How much longer compute lasts because the host was late to issue it. Not known of a measured step: see `issuing_us`."""
    issuing_us: Mapping[Stream, int] = field(default_factory=dict)
    """In a measured step: for how much of `busy_us` the host was still issuing the op that ran, streams without any left out.
    Where this is most of it the device waits for the host's Python: what it runs should have been issued long before."""

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

    @property
    def gpu_bound(self) -> bool:
        """True if work on the GPU takes more of the critical cycle than the host, its links and the collectives do."""
        on_gpu = sum(leg.us for leg in self.cycle if leg.stream is Stream.GPU)
        return 2 * on_gpu > sum(leg.us for leg in self.cycle) if self.cycle else self.bottleneck is Stream.GPU

    @property
    def binds(self) -> OpKind | None:
        """The kind that takes most of the critical cycle; None for an empty graph and for a measured step."""
        share: dict[OpKind, int] = {}
        for leg in self.cycle:
            share[leg.kind] = share.get(leg.kind, 0) + leg.us
        return max(share, key=lambda kind: share[kind], default=None)

    def __str__(self) -> str:
        lines = [f"step {_ms(self.step_us)}, {'GPU' if self.gpu_bound else 'host'}-bound, GPU waits {_ms(self.exposed_us)}, "
                 f"bound by {self.binds or self.bottleneck}"]
        lines += [f"  {stream:<5} {busy / 1e3:10.2f} ms {self.utilisation[stream]:6.1%}" for stream, busy in self.busy_us.items()]
        if self.exposed_by:
            lines.append("the GPU waits for " + _by_kind(self.exposed_by))
        if self.cycle:
            over = "" if self.cycle_steps == 1 else f" over {self.cycle_steps} steps"
            lines.append(f"critical cycle{over}: " + " → ".join(f"{leg} ({_ms(leg.us)})" for leg in shortened(self.cycle)))
        if self.contended_us:
            lines.append("contention adds " + _by_kind(self.contended_us))
        if self.late_us:
            lines.append(f"the host is late to issue compute, which adds {_ms(self.late_us)}")
        if self.peer_wait_us:
            lines.append(f"collectives also wait {_ms(self.peer_wait_us)} for the last rank")
        if self.issuing_us:
            late = ", ".join(f"{stream} {_ms(us)}" for stream, us in self.issuing_us.items())
            lines.append(f"of their busy times, the host was still issuing the op: {late}")
        if self.resources:
            lines.append("of what is shared, used: " + ", ".join(f"{name} {part:.0%}" for name, part in self.resources.items()))
        if not self.steady:
            lines.append("the period had not settled: the step time is a mean")
        return "\n".join(lines)


def shortened(cycle: Sequence[Leg], longest: int = 8) -> tuple[Leg, ...]:
    """At most `longest` legs: the ones that take most of the time, in order of time."""
    kept = sorted(sorted(range(len(cycle)), key=lambda i: -cycle[i].us)[:longest])
    return tuple(cycle[i] for i in kept)


def measured_timeline(
    events: Sequence[Event], num_steps: int, peer_wait_s: float = 0.0, issues: Sequence[Event] = ()
) -> Timeline:
    """A Timeline of `num_steps` recorded steps in a row. `critical` is empty.

    `peer_wait_s`: of all steps, how long collectives waited for other ranks; it counts apart from the comm stream's busy time.
    `issues`: when the host issued ops, of those that ran on a device.
    """
    origin = min((start for _, _, start, _ in events), default=0.0)
    spans, issued = (tuple(Span(op, stream, round((a - origin) * 1e6), round((b - origin) * 1e6)) for op, stream, a, b in seen)
                     for seen in (events, issues))
    busy = {s: covered_us([span for span in spans if span.stream is s]) // num_steps for s in Stream}
    waited = round(peer_wait_s * 1e6) // num_steps
    busy[Stream.COMM] -= min(waited, busy[Stream.COMM])
    end = max((span.end_us for span in spans), default=0)
    return Timeline(end // num_steps, spans, {s: us for s, us in busy.items() if us}, (), peer_wait_us=waited, issues=issued,
                    issuing_us={s: us // num_steps for s, us in overlaps_us(spans, issued).items() if us >= num_steps})


def overlaps_us(spans: Iterable[Span], issued: Iterable[Span]) -> dict[Stream, int]:
    """By stream, for how many microseconds ops ran while they were still being issued."""
    runs, issues = _by_op(spans), _by_op(issued)
    found: dict[Stream, int] = {}
    for stream, op in runs.keys() & issues.keys():
        pairs = zip(runs[stream, op], issues[stream, op], strict=False)  # the n-th issue of an op is of its n-th run
        both = sum(max(min(a.end_us, b.end_us) - max(a.start_us, b.start_us), 0) for a, b in pairs)
        found[stream] = found.get(stream, 0) + both
    return {stream: found[stream] for stream in Stream if stream in found}


def _by_op(spans: Iterable[Span]) -> dict[tuple[Stream, str], list[Span]]:
    found: dict[tuple[Stream, str], list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start_us):
        found.setdefault((span.stream, span.op), []).append(span)
    return found


def covered_us(spans: Iterable[Span]) -> int:
    """Microseconds in which one of `spans` runs: an update's encloses those of the updates that it made way for."""
    covered, until = 0, 0
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        covered += max(end - max(start, until), 0)
        until = max(until, end)
    return covered


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"


def _by_kind(times: Mapping[OpKind, int]) -> str:
    return ", ".join(f"{kind} {_ms(us)}" for kind, us in times.items())
