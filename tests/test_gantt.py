"""Timelines as text, and what they are drawn from: periods of a steady state, memory over time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from stacks import qwen3_4b, stack
from test_simulate import graph, us

from slidedp.compiler.decisions import Activation, Boundary, Decisions, Reduction, Residence, Route, Source, StateHome
from slidedp.compiler.drawing.gantt import gantt, letters, scale
from slidedp.compiler.drawing.memory_chart import memory_chart
from slidedp.compiler.dsl import GraphBuilder
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.footprint.memory_over_time import MemoryCurve, memory_over_time
from slidedp.compiler.footprint.moments import BOUNDARIES, RETAINED, RUNNING
from slidedp.compiler.layergraph import LayerGraph, LossHead
from slidedp.compiler.ops import Op, OpGraph, OpKind, Stream
from slidedp.compiler.simulation.predict import cost_model_of, predict, price
from slidedp.compiler.simulation.simulate import Span, Timeline, measured_timeline, simulate
from slidedp.compiler.simulation.unroll import picture, unroll
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null
Planned = tuple[LayerGraph, Decisions, OpGraph, Timeline]


def planned(layers: LayerGraph, hw_name: str = "h200x1", policy: dict[str, object] | None = None) -> Planned:
    hw = load_profile(hw_name)
    decisions = default_decisions(layers, hw, policy=policy)
    ops = lower(layers, decisions)
    return layers, decisions, ops, predict(ops, price(ops, cost_model_of(layers), hw), hw)


def plain_us(op: Op) -> int:
    """Durations that no cost model changes."""
    return {OpKind.FORWARD: 100, OpKind.RECOMPUTE: 100, OpKind.BACKWARD: 200, OpKind.EPILOGUE: 150}.get(op.kind, 60)


def twice(line: Timeline, num_steps: int = 2) -> Timeline:
    """What measuring two steps of `line` would give."""
    events = [(i.op, i.stream, i.start_us / 1e6, i.end_us / 1e6) for i in unroll(line, num_steps)]
    random.Random(0).shuffle(events)
    return measured_timeline(events, num_steps)


# ---- periods ----


def test_a_period_holds_every_op_for_as_long_as_it_runs() -> None:
    """Updates that run into the next step, and deliveries ahead of it, are at their place in the period."""
    ops = [("copy", "h2d", 5), ("run", "gpu", 8), ("update", "cpu", 7)]
    line = simulate(graph(ops, [("copy", "run", 0), ("run", "update", 0), ("update", "copy", 1)]), us)
    shown = picture(line)
    assert (shown.end_us, shown.num_steps) == (20, 1)
    assert [(i.op, i.step, i.start_us, i.end_us) for i in shown.instances] == [
        ("run", 0, 0, 8), ("update", 0, 8, 15), ("copy", 1, 15, 20)]  # fmt: skip


@pytest.mark.parametrize("batch", [2, 64])
def test_a_period_of_a_real_plan(batch: int) -> None:
    _, _, _, line = planned(qwen3_4b(batch))
    shown = picture(line)
    for stream in shown.streams:
        mine = shown.on(stream)
        busy = line.busy_us[stream]
        assert sum(i.end_us - i.start_us for i in mine) == pytest.approx(busy, abs=len(mine))  # each rounded
        assert all(a.end_us <= b.start_us for a, b in pairwise(mine)), "two at once"
    assert shown.on(Stream.GPU)[0].start_us == 0
    assert max(i.end_us for i in shown.instances) <= line.step_us


def test_measured_steps_are_numbered_in_order_of_time() -> None:
    _, _, _, line = planned(stack(3))
    measured = twice(line)
    assert [(i.step, i.op) for i in unroll(measured)] == [(i.step, i.op) for i in unroll(line, 2)]
    shown = picture(measured)
    assert shown.num_steps == 2
    assert shown.end_us == max(s.end_us for s in measured.spans)
    once = twice(line, 1)
    assert [(i.step, i.op) for i in unroll(once, 3)] == [(0, i.op) for i in unroll(line)]  # one was run


# ---- the drawing ----


def test_ops_that_run_while_they_are_issued() -> None:
    """Of two steps; the second `run` is issued well before it runs, the copies in no time."""
    events = [("run", Stream.GPU, 1.0, 2.0), ("run", Stream.GPU, 3.0, 4.0), ("copy", Stream.H2D, 0.5, 0.6),
              ("update", Stream.CPU, 1.0, 4.0)]  # fmt: skip
    issues = [("run", Stream.GPU, 0.75, 1.5), ("run", Stream.GPU, 1.5, 2.75), ("copy", Stream.H2D, 0.25, 0.25)]
    line = measured_timeline(events, 2, issues=issues)
    assert line.issuing_us == {Stream.GPU: 250_000}
    assert "still issuing the op: gpu 250.00 ms" in str(line)
    assert [span.start_us for span in line.issues] == [250_000, 1_000_000, -250_000]
    assert not measured_timeline(events, 2).issuing_us


def test_gantt_of_a_small_plan(golden: Callable[[str, str], None]) -> None:
    ops = lower(layers := stack(6), default_decisions(layers, load_profile("h200x1")))
    line = simulate(ops, plain_us)
    text = gantt(ops, line, 80)
    assert text == gantt(ops, line, 80)
    golden("gantt_stack.txt", text + "\n")


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_drawing_keeps_to_its_width(ranks: int) -> None:
    layers, decisions, ops, line = planned(qwen3_4b(8, world_size=ranks), "h200x4" if ranks > 1 else "h200x1")
    curve = memory_over_time(layers, decisions, ops, line)
    for width in (64, 80, 132, 200):
        drawn = gantt(ops, line, width).splitlines()
        rows = [text for text in drawn if text.endswith("%")]
        assert len(rows) == len(line.busy_us)
        assert {len(row) for row in rows} == {max(map(len, drawn))}
        assert len(rows[0]) in (width - 1, width)
        assert max(map(len, memory_chart(curve, width, budget_bytes=2**40).splitlines())) <= width


def test_letters_and_idle_columns_are_where_the_ops_are() -> None:
    made = graph([("copy", "h2d", 30), ("run", "gpu", 40), ("update", "cpu", 30)],
                 [("copy", "run", 0), ("run", "update", 0), ("update", "copy", 1)])
    lines = gantt(made, simulate(made, us), 65).splitlines()
    columns = {line.split()[0]: line[line.index("|") + 1 : line.rindex("|")] for line in lines if line.endswith("%")}
    num = len(columns["gpu"])
    assert columns["gpu"] == "F" * round(0.4 * num) + "." * (num - round(0.4 * num))
    assert columns["cpu"].strip(".") == "U" * columns["cpu"].count("U")
    assert columns["cpu"].index("U") == columns["gpu"].count("F")
    assert columns["h2d"].endswith("H")
    assert any("F forward 40 us" in line for line in lines)


def test_a_stream_that_is_hardly_busy_is_small() -> None:
    made = graph([(f"o{i}", "gpu", 10) for i in range(100)] + [(f"c{i}", "h2d", 1) for i in range(100)],
                 [(f"c{i}", f"o{i}", 0) for i in range(100)] + [(f"o{i - 1}", f"c{i}", 0) for i in range(1, 100)])  # fmt: skip
    rows = [line for line in gantt(made, simulate(made, us), 40).splitlines() if line.endswith("%")]
    assert set(rows[0][5:-8]) <= {"F", "|"}
    assert "h" in rows[1]
    assert "H" not in rows[1]


def test_every_kind_has_a_letter_of_its_own() -> None:
    assert len(set(letters().values())) == len(letters()) == len(OpKind)


def test_scale_marks_round_times_at_their_place() -> None:
    text = scale(1000, 80)
    assert text.startswith("|0")
    assert text[16:].startswith("|200 us")
    assert text[48:].startswith("|600 us")


def test_a_measured_run_is_drawn_whole() -> None:
    _, _, ops, line = planned(stack(3))
    text = gantt(ops, twice(line), 80)
    assert text.startswith("2 steps measured, ")
    foreign = replace(line, spans=(*line.spans, Span("someone.else", Stream.HOST, 0, 5)))
    assert "? other" in gantt(ops, foreign, 80)


def test_nothing_is_drawn_of_nothing() -> None:
    assert gantt(OpGraph(), simulate(OpGraph(), us)) == "nothing runs"
    empty = memory_over_time(stack(2), Decisions(), OpGraph(), simulate(OpGraph(), us))
    assert memory_chart(empty) == "nothing is held on the device"


# ---- memory over time ----


@pytest.mark.parametrize(
    ("layers", "hw_name", "policy"),
    [
        (stack(1), "h200x1", None),
        (stack(5, frozen=(0, 3)), "h200x1", {"window": 2}),
        (stack(4, tokens=4096, width=64, dtype="float32"), "cpu", {"source": "cast", "grad_slots": 1}),
        (stack(6, world_size=4), "h200x4", {"delivery": "sharded", "reduction": "cpu"}),
        (qwen3_4b(64), "h200x1", {"chunks": 2}),
        (qwen3_4b(16, world_size=4), "a800x4-nvlink", {"source": "cast", "window": 3}),
    ],
)
def test_the_peak_is_the_estimate_to_the_byte(layers: LayerGraph, hw_name: str, policy: dict[str, object] | None) -> None:
    layers, decisions, ops, line = planned(layers, hw_name, policy)
    estimate = estimate_memory(layers, decisions)
    curve = memory_over_time(layers, decisions, ops, line)
    assert curve.peak_bytes == estimate.hbm_bytes
    assert memory_over_time(layers, decisions, ops, twice(line)).peak_bytes == estimate.hbm_bytes
    peak = curve.at(curve.peak_us)
    assert peak == {use: size for use, size in estimate.hbm.items() if use in peak}
    assert sum(size for use, size in estimate.hbm.items() if use not in peak) == 0
    in_use = memory_over_time(layers, decisions, ops, line, occupied=True)
    assert 0 < in_use.peak_bytes <= curve.peak_bytes


def test_the_epilogue_is_counted_while_it_runs() -> None:
    """The head's activations, larger than a layer's, make the peak exactly during the epilogue."""
    layers = stack(4, tokens=256)
    head = replace(layers.stages[-1], activation_bytes=10**9)
    layers, decisions, ops, line = planned(replace(layers, stages=(*layers.stages[:-1], head)))
    curve = memory_over_time(layers, decisions, ops, line)
    [epilogue] = [i for i in picture(line).instances if i.op == "epilogue"]
    assert curve.peak_us == epilogue.start_us
    assert curve.peak_bytes == estimate_memory(layers, decisions).hbm_bytes
    assert curve.at(epilogue.end_us)[RUNNING] == 0


def test_a_large_layer_before_the_turn_makes_the_peak_when_later_boundaries_are_gone() -> None:
    layers = stack(4, tokens=256)
    stages = [replace(s, activation_bytes=10**9) if s.name == "L00" else s for s in layers.stages]
    layers, decisions, ops, line = planned(replace(layers, stages=tuple(stages)))
    curve = memory_over_time(layers, decisions, ops, line)
    estimate = estimate_memory(layers, decisions)
    assert curve.peak_bytes == estimate.hbm_bytes
    assert estimate.hbm[BOUNDARIES] == sum(layers.stage(name).boundary_bytes for name in ("L00", "L01"))
    [recompute] = [i for i in picture(line).instances if i.op == "recompute.L00"]
    assert curve.peak_us == recompute.start_us


@pytest.mark.parametrize("seed", range(24))
def test_the_estimate_is_the_peak_whatever_is_decided(seed: int) -> None:
    """Of random decisions and sizes, use by use; ops of random durations in whatever order that gives."""
    draw = random.Random(seed)
    layers = random_stack(draw)
    values = {"delivery": Route, "source": Source, "reduction": Reduction, "act": Activation, "boundary": Boundary,
              "weights": Residence, "state": StateHome}  # fmt: skip
    names = [g.name for g in layers.groups]
    pins = {name: {key: str(draw.choice(list(kind))) for key, kind in values.items()} for name in names if draw.random() < 0.8}
    counts = {"window": 4, "grad_slots": 3, "act_slots": 3, "head_chunks": 9 if layers.head else 1}
    policy = {key: draw.randint(1, most) for key, most in counts.items()} | {"layers": pins}
    decisions = default_decisions(layers, load_profile("h200x1"), policy=policy)
    ops = lower(layers, decisions)
    line = simulate(ops, lambda op: draw.randint(1, 50))
    curve, estimate = memory_over_time(layers, decisions, ops, line), estimate_memory(layers, decisions)
    assert curve.peak_bytes == estimate.hbm_bytes
    assert memory_over_time(layers, decisions, ops, twice(line, 3)).peak_bytes == estimate.hbm_bytes
    peak = curve.at(curve.peak_us)
    assert {use: size for use, size in peak.items() if size} == {use: size for use, size in estimate.hbm.items() if size}


def random_stack(draw: random.Random) -> LayerGraph:
    """Stages of unlike sizes, some of them frozen, and sometimes a measured head."""
    num = draw.randint(2, 7)
    layers = stack(num, world_size=draw.choice([1, 1, 2]), frozen=tuple(i for i in range(num) if draw.random() < 0.15))
    stages = [replace(s, activation_bytes=512 * draw.randint(0, 60),
                      boundary_bytes=512 * draw.randint(1, 20) if s.boundary_bytes else 0) for s in layers.stages]  # fmt: skip
    if draw.random() < 0.5:
        peaks = tuple((chunks, 512 * draw.randint(1, most)) for chunks, most in ((1, 60), (2, 20), (8, 9)))
        stages[-1] = replace(stages[-1], head=LossHead(64, 100, peaks))
    return replace(layers, stages=tuple(stages))


def test_boundaries_grow_through_the_forward_and_shrink_through_the_backward() -> None:
    layers, decisions, ops, line = planned(stack(5), policy={"act": "recompute"})
    one = layers.stage("L00").boundary_bytes
    curve = memory_over_time(layers, decisions, ops, line)
    runs = {i.op: i for i in picture(line).instances if i.stream is Stream.GPU}
    for i in range(5):
        assert curve.at(runs[f"fwd.L{i:02}"].end_us - 1)[BOUNDARIES] == (i + 2) * one  # its inputs, and what it writes
        assert curve.at(runs[f"recompute.L{i:02}"].start_us)[BOUNDARIES] == (i + 2) * one  # the last is a gradient by now
        assert curve.at(runs[f"recompute.L{i:02}"].start_us)[RUNNING] == layers.stage("L00").activation_bytes
    assert curve.at(line.step_us - 1)[BOUNDARIES] == 0


def test_what_is_offloaded_is_gone_until_it_is_reloaded() -> None:
    layers = stack(1)
    one = layers.stage("L00").boundary_bytes
    ops = GraphBuilder().slot("off", 1, one, "pinned").group("L00", 4096)
    ops.op("prologue", "batch -> h.L00, const").op("fwd.L00", "h.L00, const -> h.epilogue", after="data:prologue")
    ops.op("act_offload.L00", "h.L00 -> O.L00:off[0]", after="data:prologue")
    ops.op("epilogue", "h.epilogue, const -> loss, d.epilogue", after="data:fwd.L00")
    ops.op("act_reload.L00", "O.L00:off[0] -> h.L00@1", after="data:act_offload.L00 data:epilogue")
    ops.op("recompute.L00", "h.L00@1, const -> act.L00", after="data:act_reload.L00")
    ops.op("bwd.L00", "act.L00, d.epilogue -> d.L00, G.L00@1", after="data:recompute.L00")
    made = ops.build()
    line = simulate(made, lambda op: 10)
    curve = memory_over_time(layers, default_decisions(layers, load_profile("h200x1")), made, line)
    assert [curve.at(t)[BOUNDARIES] // one for t in (5, 15, 25, 35, 45, 55)] == [1, 2, 1, 2, 2, 2]  # offloaded from 20 to 30
    assert [curve.at(t)[RUNNING] > 0 for t in (35, 45, 55)] == [False, True, True]


def test_what_is_retained_stays_from_forward_to_backward() -> None:
    layers = stack(1)
    ops = GraphBuilder().op("prologue", "batch -> h.L00, const")
    ops.op("fwd.L00", "h.L00, const -> h.epilogue, act.L00", after="data:prologue")
    ops.op("epilogue", "h.epilogue, const -> loss, d.epilogue", after="data:fwd.L00")
    made = ops.op("bwd.L00", "act.L00, d.epilogue -> d.L00", after="data:epilogue").build()
    curve = memory_over_time(layers, default_decisions(layers, load_profile("h200x1")), made, simulate(made, lambda op: 10))
    assert [curve.at(t)[RETAINED] // layers.stage("L00").activation_bytes for t in (5, 15, 25, 35)] == [0, 1, 1, 1]


def test_highest_moment_of_a_stretch() -> None:
    curve = MemoryCurve((0, 10, 20, 30), 40, {"a": (1, 5, 2, 0), "b": (0, 0, 4, 0)})
    assert curve.peak_bytes == 6
    assert curve.peak_us == 20
    assert curve.highest_in(0, 10) == {"a": 1, "b": 0}
    assert curve.highest_in(5, 20) == {"a": 5, "b": 0}
    assert curve.highest_in(12, 13) == {"a": 5, "b": 0}
    assert curve.highest_in(0, 40) == {"a": 2, "b": 4}


def test_memory_chart(golden: Callable[[str, str], None]) -> None:
    layers = stack(6)
    decisions = default_decisions(layers, load_profile("h200x1"))
    ops = lower(layers, decisions)
    curve = memory_over_time(layers, decisions, ops, simulate(ops, plain_us))
    golden("memory_stack.txt", memory_chart(curve, 80, budget_bytes=2**20) + "\n")
