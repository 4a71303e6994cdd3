"""Chrome traces: sound by their format, and the same writer for predicted and measured timelines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stacks import qwen3_4b, stack
from test_gantt import plain_us, planned, twice

from slidedp.compiler.drawing.trace_events import Event, trace_events, write_trace
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.ops import Reason, Stream
from slidedp.compiler.simulation.simulate import Span, simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null


def require_sound(events: list[Event]) -> None:
    """What a viewer relies on: names first, time never goes back, slices lie apart or in one another, every arrow has two ends in
    slices.
    """
    named = [e["ph"] for e in events].count("M")
    assert all(e["ph"] == "M" for e in events[:named])
    timed = events[named:]
    assert {e["ph"] for e in timed} <= {"X", "C", "s", "f"}
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert all(isinstance(e["ts"], int) and e["ts"] >= 0 for e in timed)
    tracks: dict[int, list[Event]] = defaultdict(list)
    for e in timed:
        if e["ph"] == "X":
            tracks[e["tid"]].append(e)
    for slices in tracks.values():
        around: list[int] = []
        for e in slices:
            while around and around[-1] <= e["ts"]:
                around.pop()
            assert all(e["ts"] + e["dur"] <= end for end in around)
            around.append(e["ts"] + e["dur"])
    order = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    assert order == sorted(order)
    assert set(tracks) == {e["tid"] for e in events if e["name"] == "thread_name"}
    ends = {ph: {e["id"]: e for e in timed if e["ph"] == ph} for ph in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["s"]) + len(ends["f"]) == sum(e["ph"] in "sf" for e in timed), "an arrow's number is given twice"
    for number, start in ends["s"].items():
        end = ends["f"][number]
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        for e in (start, end):
            assert any(x["ts"] <= e["ts"] <= x["ts"] + x["dur"] for x in tracks[e["tid"]]), e


@pytest.mark.parametrize("ranks", [1, 4])
def test_predicted_and_measured_are_sound_and_alike(ranks: int) -> None:
    layers, decisions, ops, line = planned(stack(6, world_size=ranks), "h200x4" if ranks > 1 else "h200x1", {"source": "cast"})
    predicted = trace_events(ops, line, layers, decisions, num_steps=2)
    measured = trace_events(ops, twice(line), layers, decisions)
    require_sound(predicted)
    require_sound(measured)
    assert predicted == measured
    assert len([e for e in predicted if e["ph"] == "X"]) == 2 * len(ops.ops)
    counted = [e["args"]["bytes"] for e in predicted if e["ph"] == "C" and e["name"] == "HBM"]
    assert max(counted) == estimate_memory(layers, decisions).hbm_bytes


def test_an_update_that_makes_way_is_around_what_it_makes_way_for() -> None:
    layers, decisions, ops, line = planned(qwen3_4b(8))
    spans = [s for s in line.spans if s.stream is Stream.CPU]
    [most] = [s for s in spans if s.end_us - s.start_us == max(s.end_us - s.start_us for s in spans)]
    assert any(most.start_us < s.start_us and s.end_us < most.end_us for s in spans)
    events = trace_events(ops, line, layers, decisions, num_steps=1)
    require_sound(events)
    assert [e["dur"] for e in events if e["ph"] == "X" and e["name"] == most.op] == [most.end_us - most.start_us]


def test_tracks_are_streams_in_order() -> None:
    layers, decisions, ops, line = planned(stack(3))
    names = [e["args"]["name"] for e in trace_events(ops, line, layers, decisions) if e["name"] == "thread_name"]
    assert names == [str(s) for s in Stream if s in line.busy_us]


def test_when_ops_were_issued_is_a_track_of_its_own() -> None:
    layers, decisions, ops, line = planned(stack(3))
    measured = replace(twice(line), issues=(Span("fwd.L00", Stream.GPU, -5, 7), Span("fwd.L01", Stream.GPU, 9, 12)))
    events = trace_events(ops, measured, layers, decisions)
    require_sound(events)
    track = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}["gpu: issued"]
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e.get("tid") == track and e["ph"] == "X"] == [
        ("fwd.L00", 0, 7), ("fwd.L01", 9, 3)]  # fmt: skip
    assert len(events) == len(trace_events(ops, twice(line), layers, decisions)) + 2 + 2  # slices; name and place of the track


def test_arrows_are_the_edges_between_steps_that_are_there() -> None:
    layers, decisions, ops, line = planned(stack(4))
    for reason in (Reason.VERSION, Reason.REUSE, Reason.DATA):
        edges = [e for e in ops.edges if e.reason is reason]
        assert edges
        arrows = [e for e in trace_events(ops, line, layers, decisions, num_steps=3, arrows=(reason,)) if e["ph"] == "s"]
        assert len(arrows) == sum(3 - e.distance for e in edges)
    version = next(e for e in ops.edges if e.reason is Reason.VERSION)
    events = trace_events(ops, line, layers, decisions, num_steps=2, arrows=(Reason.VERSION,))
    updates = [e for e in events if e["name"] == version.src]
    deliveries = [e for e in events if e["name"] == version.dst]
    [update], [delivery] = ([e for e in es if e["args"]["step"] == k] for es, k in ((updates, 0), (deliveries, 1)))
    assert any(e["ph"] == "s" and update["ts"] <= e["ts"] < update["ts"] + update["dur"] for e in events)
    assert any(e["ph"] == "f" and e["ts"] == delivery["ts"] for e in events)


def test_slices_say_what_they_move() -> None:
    layers, decisions, ops, line = planned(stack(3))
    [event] = [e for e in trace_events(ops, line, layers, decisions, num_steps=1) if e["name"] == "h2d.fwd.L01.c0"]
    op = ops["h2d.fwd.L01.c0"]
    assert event["cat"] == "h2d"
    assert event["args"] == {"step": 0, "layer": "L01", "bytes": op.bytes, "reads": "S.L01@0[c0/1,*]",
                             "writes": f"W.fwd.L01[c0/1,*]:{op.writes[0].place}"}  # fmt: skip


def test_clocks_that_disagree_and_foreign_ops() -> None:
    """Events of a GPU are read to a fraction of a millisecond: an op may seem to start before the one before it ended."""
    layers, decisions, ops, line = planned(stack(3))
    first, second, *rest = sorted(twice(line).spans, key=lambda s: (s.stream is not Stream.GPU, s.start_us))
    late = replace(first, end_us=second.start_us + 3)
    measured = replace(twice(line), spans=(late, second, *rest, Span("checkpoint", Stream.HOST, 5, 9)))
    events = trace_events(ops, measured, layers, decisions)
    require_sound(events)
    assert [e["cat"] for e in events if e["name"] == "checkpoint"] == ["other"]


def test_the_file(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    layers = stack(2)
    decisions = default_decisions(layers, load_profile("h200x1"))
    ops = lower(layers, decisions)
    line = simulate(ops, plain_us)
    for name in ("a.json", "b.json"):
        write_trace(tmp_path / name, ops, line, layers, decisions, num_steps=2, title="Stack")
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    content = json.loads(text)
    assert content["traceEvents"] == trace_events(ops, line, layers, decisions, num_steps=2, title="Stack")
    golden("trace_stack.json", text)
