"""A Timeline as instances of ops in several steps: what is drawn, traced and summed, predicted and measured alike.

A predicted Timeline holds one step of a steady state, so its steps are copies a period apart; a measured one holds the
steps that were run. :func:`unroll` makes both a list of instances, :func:`picture` the part of it that is worth drawing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from slidedp.compiler.ops import Stream
from slidedp.compiler.simulation.simulate import Timeline


@dataclass(frozen=True, slots=True)
class Instance:
    """Op `op` of step `step`, from `start_us` to `end_us`."""

    step: int
    op: str
    stream: Stream
    start_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Instances, cut at 0 and `end_us`, in order of start. `step`: 0 is the step whose compute starts at 0. An update that made
    way for others is in pieces.
    """

    instances: tuple[Instance, ...]
    end_us: int
    num_steps: int

    def on(self, stream: Stream) -> tuple[Instance, ...]:
        return tuple(i for i in self.instances if i.stream is stream)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Those with an instance, in the order of the enum."""
        present = {i.stream for i in self.instances}
        return tuple(s for s in Stream if s in present)


def num_measured_steps(timeline: Timeline) -> int:
    """How often the op that ran most often ran; 0 for a predicted Timeline, which knows what is critical."""
    return 0 if timeline.critical else max(Counter(span.op for span in timeline.spans).values(), default=0)


def unroll(timeline: Timeline, num_steps: int = 1) -> tuple[Instance, ...]:
    """Instances in order of start: the steps that were measured, or `num_steps` of the predicted one, a period apart."""
    shifts = range(1 if num_measured_steps(timeline) else num_steps)
    spans = sorted(timeline.spans, key=lambda span: span.start_us)
    seen: Counter[str] = Counter()
    out = []
    for k in shifts:
        shift = k * timeline.step_us
        for span in spans:
            out.append(Instance(seen[span.op], span.op, span.stream, span.start_us + shift, span.end_us + shift))
            seen[span.op] += 1
    return in_order(out)


def in_pieces(instances: Iterable[Instance]) -> list[Instance]:
    """Those of a stream one of which may enclose others, for which it made way: what is left of it without their time."""
    instances = list(instances)
    out, around = list[Instance](), list[Instance]()  # each of `around` is what is left of one, and in the one before it

    def end_until(start_us: float) -> None:
        while around and around[-1].end_us <= start_us:
            ended = around.pop()
            out.append(ended)
            if around:
                around[-1] = replace(around[-1], start_us=max(around[-1].start_us, ended.end_us))

    for i in sorted(instances, key=lambda i: (i.start_us, -i.end_us)):
        end_until(i.start_us)
        if around:
            out.append(replace(around[-1], end_us=i.start_us))
        around.append(i)
    end_until(float("inf"))
    return [i for i in out if i.start_us < i.end_us] + [i for i in instances if i.start_us == i.end_us]


def picture(timeline: Timeline) -> Picture:
    """What was measured, from the first start to the last end; or one predicted period, from the start of its compute.

    In the steady state updates of a step run under the next one's forward, and deliveries ahead of it: they are in the
    picture at the time of the period at which they run, as `step` -1 or 1.
    """
    measured = num_measured_steps(timeline)
    if measured:
        return Picture(one_at_a_time(unroll(timeline)), max((s.end_us for s in timeline.spans), default=0), measured)
    period = timeline.step_us
    origin, back, ahead = phase(timeline)
    shift = origin + back * period
    moved = (replace(i, step=i.step - back, start_us=i.start_us - shift, end_us=i.end_us - shift)
             for i in unroll(timeline, back + 1 + ahead))
    return Picture(one_at_a_time(clip(moved, 0, period)), period, 1)


def one_at_a_time(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    instances = list(instances)
    updates = in_pieces(i for i in instances if i.stream is Stream.CPU)
    return in_order([*(i for i in instances if i.stream is not Stream.CPU), *updates])


def phase(timeline: Timeline) -> tuple[int, int, int]:
    """When a predicted step's compute starts, and how many steps before and after overlap the period that starts there."""
    starts = [s.start_us for s in timeline.spans if s.stream is Stream.GPU] or [s.start_us for s in timeline.spans]
    origin, period = min(starts, default=0), timeline.step_us
    if not period:
        return origin, 0, 0
    back = max(0, -(-(max(s.end_us for s in timeline.spans) - origin) // period) - 1)
    ahead = max(0, -(-(origin - min(s.start_us for s in timeline.spans)) // period))
    return origin, back, ahead


def clip(instances: Iterable[Instance], lo_us: int, hi_us: int) -> list[Instance]:
    """The parts of `instances` between `lo_us` and `hi_us`."""
    return [replace(i, start_us=max(i.start_us, lo_us), end_us=min(i.end_us, hi_us))
            for i in instances if i.start_us < hi_us and i.end_us > lo_us]  # fmt: skip


def in_order(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    return tuple(sorted(instances, key=lambda i: (i.start_us, i.end_us, i.step)))
