"""A timeline as a Chrome trace (JSON), for https://ui.perfetto.dev or chrome://tracing: predicted and measured alike.

One track a stream, in the order of :class:`Stream`; a slice an op, with what it reads, writes and moves; an arrow for
each `version` and `reuse` edge; a counter of device memory, in all and for each use that changes. Of a measured run on a device
one more track a stream: when the host issued its ops.

Source: "Trace Event Format", the Chromium project's document; events of phase X, M, C, s and f.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.footprint.memory_over_time import memory_curve
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpGraph, Reason, Stream
from slidedp.compiler.simulation.simulate import Span, Timeline
from slidedp.compiler.simulation.unroll import Instance, unroll
from slidedp.compiler.text import print_ref

ARROWS = (Reason.VERSION, Reason.REUSE)
PREDICTED_STEPS = 3
"""Enough for one step with all that reaches into it from the step before and out of it into the next."""

Event = dict[str, Any]


def write_trace(
    path: str | Path, graph: OpGraph, timeline: Timeline, layers: LayerGraph, decisions: Decisions, *,
    num_steps: int = PREDICTED_STEPS, title: str = "SlideDP", arrows: Collection[Reason] = ARROWS,
) -> None:  # fmt: skip
    """Write :func:`trace_events` of `timeline` to `path`, one event a line."""
    events = trace_events(graph, timeline, layers, decisions, num_steps=num_steps, title=title, arrows=arrows)
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    Path(path).write_text(f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n', encoding="utf-8")


def trace_events(
    graph: OpGraph, timeline: Timeline, layers: LayerGraph, decisions: Decisions, *,
    num_steps: int = PREDICTED_STEPS, title: str = "SlideDP", arrows: Collection[Reason] = ARROWS,
) -> list[Event]:  # fmt: skip
    """The events: names of tracks first, then everything in order of time (microseconds).

    Args:
        graph: the ops that `timeline` is of.
        layers, decisions: what the ops were lowered from, for the memory counter.
        num_steps: how often a predicted step is repeated; a measured timeline has the steps that were run.
        arrows: the reasons of the edges to draw. Stream order is plain to see and has none.
    """
    instances = without_overlap(unroll(timeline, num_steps))
    tracks = {stream: k for k, stream in enumerate(s for s in Stream if any(i.stream is s for i in instances))}
    seen = {span.stream for span in timeline.issues}
    issued = {stream: len(tracks) + k for k, stream in enumerate(s for s in tracks if s in seen)}
    events = [*slices(graph, instances, tracks), *flows(graph, instances, tracks, arrows),
              *counters(layers, decisions, graph, instances), *issues(timeline.issues, issued)]  # fmt: skip
    order = {"X": 0, "s": 1, "f": 2, "C": 3}
    labels = {tid: str(stream) for stream, tid in tracks.items()} | {tid: f"{stream}: issued" for stream, tid in issued.items()}
    return [*names(labels, title), *sorted(events, key=lambda e: (e["ts"], order[e["ph"]], e.get("tid", 0)))]


def without_overlap(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Slices of one track lie apart: where clocks say otherwise, the earlier one ends as the later one starts. Or one lies in the
    other, as updates do for which another made way; their clock is one.
    """
    out: list[Instance] = []
    last: dict[Stream, int] = {}
    for i in instances:
        before = last.get(i.stream)
        if before is not None and out[before].end_us > i.start_us and i.stream is not Stream.CPU:
            out[before] = replace(out[before], end_us=i.start_us)
        last[i.stream] = len(out)
        out.append(i)
    return tuple(out)


def names(labels: dict[int, str], title: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    for tid, label in labels.items():
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": label}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}}


def slices(graph: OpGraph, instances: Sequence[Instance], tracks: dict[Stream, int]) -> Iterator[Event]:
    for i in instances:
        op = graph[i.op] if i.op in graph.index else None
        what = {"cat": str(op.kind), "args": {"step": i.step} | details(op)} if op else {"cat": "other", "args": {"step": i.step}}
        yield {"ph": "X", "name": i.op, "pid": 0, "tid": tracks[i.stream], "ts": i.start_us, "dur": i.end_us - i.start_us, **what}


def issues(spans: Iterable[Span], tracks: dict[Stream, int]) -> Iterator[Event]:
    for span in spans:
        start_us = max(span.start_us, 0)  # time begins with the first op on the device, which was issued before
        yield {"ph": "X", "name": span.op, "cat": "issue", "pid": 0, "tid": tracks[span.stream], "ts": start_us,
               "dur": max(span.end_us - start_us, 0)}


def details(op: Op) -> Event:
    sizes = {key: value for key, value in (("bytes", op.bytes), ("flops", op.flops)) if value}
    refs = {key: ", ".join(map(print_ref, value)) for key, value in (("reads", op.reads), ("writes", op.writes)) if value}
    return {"layer": op.layer} | sizes | refs


def flows(
    graph: OpGraph, instances: Sequence[Instance], tracks: dict[Stream, int], reasons: Collection[Reason]
) -> Iterator[Event]:
    """A pair of events for each edge between two instances that are both there: out of the one's end, into the other's start."""
    when = {(i.step, i.op): i for i in instances}
    number = 0
    for edge in graph.edges:
        if edge.reason not in reasons:
            continue
        for step in sorted({i.step for i in instances}):
            src, dst = when.get((step, edge.src)), when.get((step + edge.distance, edge.dst))
            if src is None or dst is None:
                continue
            number += 1
            arrow = {"name": str(edge.reason), "cat": str(edge.reason), "id": number, "pid": 0}
            # an arrow belongs to the slice at its time: inside the source, not at the end of it, where the next one starts
            leaves = max(src.start_us, src.end_us - 1)
            slot = {"args": {"slot": edge.slot}} if edge.slot else {}
            yield {"ph": "s", **arrow, "tid": tracks[src.stream], "ts": leaves, **slot}
            yield {"ph": "f", "bp": "e", **arrow, "tid": tracks[dst.stream], "ts": max(dst.start_us, leaves), **slot}


def counters(layers: LayerGraph, decisions: Decisions, graph: OpGraph, instances: Sequence[Instance]) -> Iterator[Event]:
    """Device memory whenever it changes: ``HBM`` is what is allocated, ``HBM in …`` what lies in each kind of slot."""
    end = max((i.end_us for i in instances), default=0)
    reserved = memory_curve(layers, decisions, graph, instances, 0, end)
    occupied = memory_curve(layers, decisions, graph, instances, 0, end, occupied=True)
    yield from counter("HBM", reserved.times_us, reserved.total)
    for use, num_bytes in occupied.num_bytes.items():
        if len(set(num_bytes)) > 1:
            yield from counter(f"HBM: {use}", occupied.times_us, num_bytes)


def counter(name: str, times_us: Sequence[int], values: Sequence[int]) -> Iterator[Event]:
    before = None
    for time, value in zip(times_us, values, strict=True):
        if value != before:
            yield {"ph": "C", "name": name, "pid": 0, "ts": time, "args": {"bytes": value}}
        before = value

