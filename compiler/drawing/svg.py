"""Timelines and memory as SVG: plain shapes as wide as their frame, with a tooltip each, and no script.

Both are drawn over the same stretch of time, so that they line up under one another at any width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from slidedp.compiler.drawing.gantt import duration, round_step
from slidedp.compiler.footprint.memory_over_time import MemoryCurve
from slidedp.compiler.ops import OpGraph, OpKind, Stream
from slidedp.compiler.simulation.simulate import Timeline
from slidedp.compiler.simulation.unroll import Picture, picture
from slidedp.compiler.units import format_bytes

RESOLUTION = 2000
"""Parts of the drawn time that are told apart: ops of one layer and kind with less between them are one bar."""

COLOURS = {
    OpKind.FORWARD: "#3b82c4", OpKind.BACKWARD: "#1f5f99", OpKind.RECOMPUTE: "#7fb2dd", OpKind.PROLOGUE: "#5c6b7a",
    OpKind.EPILOGUE: "#8a6fb5", OpKind.H2D: "#e08a2e", OpKind.D2H: "#b8611a", OpKind.ALL_GATHER: "#4a9d5b",
    OpKind.REDUCE: "#2f6f3d", OpKind.HOST_CAST: "#c2a83e", OpKind.HOST_REDUCE: "#a05a78", OpKind.CPU_UPDATE: "#c4473b",
}  # fmt: skip
"""Colours of the kinds that most plans have; other kinds take a hue by their place in the enum."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Neighbouring ops of one kind, layer and step on one stream."""

    kind: OpKind | None
    layer: str
    step: str
    num_ops: int
    start_us: int
    end_us: int

    @property
    def title(self) -> str:
        ops = f" ({self.num_ops} ops)" * (self.num_ops > 1)
        return (f"{self.kind or 'other'} {self.layer}{ops}{self.step}: {duration(self.start_us)} to {duration(self.end_us)}, "
                f"{duration(self.end_us - self.start_us)}")


def colour(kind: OpKind | None) -> str:
    if kind is None:
        return "#999999"
    return COLOURS.get(kind, f"hsl({list(OpKind).index(kind) * 360 // len(OpKind)} 45% 50%)")


def timeline_rows(graph: OpGraph, timeline: Timeline) -> Iterator[tuple[Stream, float, str]]:
    """For each stream: the stream, its busy share of the picture, and an SVG of its bars."""
    shown = picture(timeline)
    for stream in shown.streams:
        mine = shown.on(stream)
        busy = sum(i.end_us - i.start_us for i in mine) / max(shown.end_us, 1)
        yield stream, busy, bars_svg(list(bars(graph, shown, stream, shown.end_us // RESOLUTION)), shown.end_us)


def bars(graph: OpGraph, shown: Picture, stream: Stream, gap_us: int) -> Iterator[Bar]:
    """The instances of one stream as bars: those of one layer and kind, no more than `gap_us` apart, are one."""
    last: Bar | None = None
    for i in shown.on(stream):
        op = graph[i.op] if i.op in graph.index else None
        bar = Bar(op.kind if op else None, op.layer if op else i.op, step_words(i.step, shown), 1, i.start_us, i.end_us)
        alike = last is not None and (last.kind, last.layer, last.step) == (bar.kind, bar.layer, bar.step)
        if last is not None and alike and bar.start_us - last.end_us <= gap_us:
            last = Bar(bar.kind, bar.layer, bar.step, last.num_ops + 1, last.start_us, bar.end_us)
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def step_words(step: int, shown: Picture) -> str:
    if shown.num_steps > 1:
        return f", step {step}"
    return ", of the step before" if step < 0 else ", for the next step" if step > 0 else ""


def bars_svg(row: Sequence[Bar], end_us: int) -> str:
    """One stream, as high as its frame; bars of one kind in one group."""
    groups: dict[OpKind | None, list[str]] = defaultdict(list)
    for bar in row:
        groups[bar.kind].append(f'<rect x="{bar.start_us}" width="{bar.end_us - bar.start_us}" height="10">'
                                f"<title>{escape(bar.title)}</title></rect>")  # fmt: skip
    shapes = "".join(f'<g fill="{colour(kind)}">{"".join(rects)}</g>' for kind, rects in groups.items())
    return f'<svg viewBox="0 0 {end_us} 10" preserveAspectRatio="none">{shapes}</svg>'


def memory_svg(curve: MemoryCurve, colours: Sequence[str], budget_bytes: int = 0) -> str:
    """Uses stacked, the first at the bottom; `budget_bytes`, if any, a line across. The top is the larger of it and the peak."""
    top = max(curve.peak_bytes, budget_bytes, 1)
    base = [0] * len(curve.times_us)
    shapes = []
    for (use, num_bytes), fill in zip(curve.num_bytes.items(), colours, strict=True):
        above = [b + n for b, n in zip(base, num_bytes, strict=True)]
        if max(num_bytes):
            title = f"{use}: {format_bytes(min(num_bytes))} to {format_bytes(max(num_bytes))}"
            outline = [*steps(curve, above, top), *reversed(list(steps(curve, base, top)))]
            points = " ".join(f"{x},{y}" for x, y in outline)
            shapes.append(f'<polygon fill="{fill}" points="{points}"><title>{escape(title)}</title></polygon>')
        base = above
    if budget_bytes:
        y = height(budget_bytes, top)
        shapes.append(f'<line class="budget" x1="0" x2="{curve.end_us}" y1="{y}" y2="{y}"><title>budget '
                      f"{format_bytes(budget_bytes)}</title></line>")  # fmt: skip
    return f'<svg viewBox="0 0 {curve.end_us} 1000" preserveAspectRatio="none">{"".join(shapes)}</svg>'


def steps(curve: MemoryCurve, levels: Sequence[int], top: int) -> Iterator[tuple[int, float]]:
    """Corners of a staircase from the first time to the end."""
    for time, until, level in zip(curve.times_us, (*curve.times_us[1:], curve.end_us), levels, strict=True):
        yield time, height(level, top)
        yield until, height(level, top)


def height(level: int, top: int) -> float:
    """The y coordinate of `level` in a drawing 1000 units high."""
    return round(1000 - 1000 * level / top, 1)


def ticks(end_us: int, at_most: int = 10) -> Iterator[tuple[float, str]]:
    """Round times: where, as a part of the whole, and how they read."""
    step = round_step(end_us / at_most)
    for time in range(0, end_us, step):
        yield time / end_us, duration(time) if time else "0"
