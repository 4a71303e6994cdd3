"""The host thread that issues compute: when it holds the device up, and when it is far enough ahead not to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stacks import qwen3_4b

from slidedp.compiler.costmodel.contention import COPY_ISSUE_US, ISSUED_BESIDE_CORES, Contention
from slidedp.compiler.costmodel.measured import Measurement, PhaseCost
from slidedp.compiler.decisions import Activation
from slidedp.compiler.ops import COMPUTE_AHEAD, Edge, Op, OpGraph, OpKind, Reason, Stream
from slidedp.compiler.simulation.predict import cost_model_of, predict, price
from slidedp.compiler.simulation.simulate import Timeline, simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null

HW = load_profile("h200x1")
DEVICE_US, HOST_US = 1000, 1500
"""Of an op: it takes the host longer to issue than the device to run."""


def compute(n: int, kind: OpKind = OpKind.FORWARD) -> tuple[Op, ...]:
    return tuple(Op(f"{kind}.{i}", kind, Stream.GPU, "L00") for i in range(n))


def stepped(ops: tuple[Op, ...], issue_us: dict[str, int], edges: tuple[Edge, ...] = (), **lasts: int) -> Timeline:
    """`lasts`: microseconds of ops, by kind, where it is not DEVICE_US. No op moves any bytes."""
    return simulate(OpGraph(ops, edges), lambda op: lasts.get(op.kind, DEVICE_US), contention=Contention(HW), issue_us=issue_us)


def test_compute_takes_no_less_than_issuing_it():
    ops = compute(8)
    late = stepped(ops, {op.name: HOST_US for op in ops})
    assert (late.step_us, late.late_us, late.busy_us[Stream.GPU]) == (8 * HOST_US, 8 * (HOST_US - DEVICE_US), 8 * HOST_US)
    assert "the host is late to issue compute, which adds 4.00 ms" in str(late)
    assert not late.contended_us
    early = stepped(ops, {op.name: DEVICE_US // 2 for op in ops})
    assert (early.step_us, early.late_us) == (8 * DEVICE_US, 0)
    assert "late to issue" not in str(early)


def test_beside_the_cores_issuing_takes_longer():
    ops = (*compute(4), Op("update", OpKind.CPU_UPDATE, Stream.CPU, "L00"))
    line = stepped(ops, {op.name: HOST_US for op in ops[:4]}, cpu_update=100_000)
    assert line.busy_us[Stream.CPU] == line.step_us == 100_000
    assert line.busy_us[Stream.GPU] == pytest.approx(4 * HOST_US * ISSUED_BESIDE_CORES, abs=2)


@pytest.mark.parametrize("num_ops", [COMPUTE_AHEAD - 1, 4 * COMPUTE_AHEAD])
def test_the_host_gets_ahead_while_a_long_op_runs(num_ops: int):
    """But only so many ops, for more would fill the device's queue; from then on it loses of that what it is slower by."""
    ops = (*compute(1, OpKind.EPILOGUE), *compute(num_ops, OpKind.BACKWARD))
    line = stepped(ops, {op.name: HOST_US for op in ops}, epilogue=1_000_000)
    issued_then = (num_ops - (COMPUTE_AHEAD - 1)) * HOST_US  # after the long op, whose end lets the first of them begin
    assert line.late_us == max(0, issued_then - num_ops * DEVICE_US)
    assert line.step_us == 1_000_000 + num_ops * DEVICE_US + line.late_us


def test_what_waits_for_the_host_is_issued_when_that_is_done():
    """An update of 5 ms, a copy, then compute, which the host could not issue before."""
    names = {OpKind.CPU_UPDATE: Stream.CPU, OpKind.H2D: Stream.H2D, OpKind.FORWARD: Stream.GPU}
    ops = tuple(Op(str(kind), kind, stream, "L00") for kind, stream in names.items())
    round_trip = zip(ops, (*ops[1:], ops[0]), (0, 0, 1), strict=True)
    edges = tuple(Edge(a.name, b.name, Reason.DATA, distance) for a, b, distance in round_trip)
    by_copy = stepped(ops, {"forward": HOST_US}, edges, cpu_update=5000, h2d=200)
    assert by_copy.step_us == 5000 + HOST_US  # the copy is issued with the update's end, and so is what comes behind it
    assert by_copy.late_us == HOST_US - DEVICE_US - 200


def test_copies_hold_up_what_is_being_issued():
    ops = (*compute(4), *(Op(f"copy.{i}", OpKind.D2H, Stream.D2H, "L00") for i in range(4)))
    edges = tuple(Edge(f"forward.{i}", f"copy.{i}", Reason.DATA, 0) for i in range(4))
    issue = {op.name: HOST_US for op in ops[:4]}
    assert stepped(ops, issue, edges, d2h=10).step_us == 4 * (HOST_US + COPY_ISSUE_US)
    assert stepped(ops, dict.fromkeys(issue, 100), edges, d2h=10).step_us == 4 * DEVICE_US


def test_an_update_in_hbm_waits_for_the_loss():
    """So that a slot for gradients which it frees is issued to late, however far ahead compute was."""
    ops = (*compute(1, OpKind.EPILOGUE), *compute(2, OpKind.BACKWARD), Op("update", OpKind.GPU_UPDATE, Stream.UPDATE, "L00"))
    edges = (Edge("backward.0", "update", Reason.DATA, 0), Edge("update", "backward.1", Reason.DATA, 0))
    issue = {"epilogue.0": 100, "backward.0": 100, "backward.1": 20_000}
    line = stepped(ops, issue, edges, epilogue=50_000, gpu_update=10)
    assert line.late_us == pytest.approx(20_000 - DEVICE_US - DEVICE_US - 10, abs=20)


def test_measured_stages_say_how_long_issuing_takes():
    layers = qwen3_4b(8)
    graph = lower(layers, default_decisions(layers, HW))
    kind = layers.layers[0].kind_key
    rows = tuple(PhaseCost(kind, phase, Activation.RECOMPUTE, 2000, issue_us=9000)
                 for phase in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD))
    slow, quick, unknown = (
        predict(graph, price(graph, cost_model_of(layers, measurement=Measurement(rows)), HW), HW)
        for rows in (rows, tuple(replace(r, issue_us=100) for r in rows), tuple(replace(r, issue_us=None) for r in rows)))
    assert slow.step_us > quick.step_us
    assert slow.late_us > 0
    assert quick == unknown
    assert price(graph, cost_model_of(layers), HW).issue_us == {}
