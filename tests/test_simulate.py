"""The simulator against hand-worked schedules, and against max-plus algebra on random graphs."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
from stacks import qwen3_4b

from slidedp.compiler.costmodel.contention import READ_BESIDE_CORES, Contention
from slidedp.compiler.costmodel.costs import AnalyticCostModel, resolve
from slidedp.compiler.costmodel.tables import Curve, Load, Quantity, Tables
from slidedp.compiler.ops import Edge, Op, OpGraph, OpKind, Reason, Stream
from slidedp.compiler.simulation.simulate import Timeline, simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null
KIND = {Stream.GPU: OpKind.FORWARD, Stream.H2D: OpKind.H2D, Stream.D2H: OpKind.D2H, Stream.CPU: OpKind.CPU_UPDATE,
        Stream.COMM: OpKind.ALL_GATHER, Stream.CAST: OpKind.HOST_CAST, Stream.HOST: OpKind.HOST_REDUCE}  # fmt: skip


def graph(ops: list[tuple[str, str, int]], edges: list[tuple[str, str, int]], deadlines: dict[str, int] | None = None) -> OpGraph:
    """Ops as (name, stream, microseconds); edges as (from, to, distance). The duration travels in `bytes`."""
    made = tuple(Op(name, KIND[Stream(stream)], Stream(stream), "L00", bytes=us, deadline=(deadlines or {}).get(name, 0))
                 for name, stream, us in ops)
    return OpGraph(made, tuple(Edge(a, b, Reason.DATA, d) for a, b, d in edges))


def us(op: Op) -> int:
    return op.bytes


def test_one_stream_is_the_sum() -> None:
    line = simulate(graph([("a", "gpu", 3), ("b", "gpu", 4)], []), us)
    assert (line.step_us, line.exposed_us, line.bottleneck) == (7, 0, Stream.GPU)
    assert line.utilisation == {Stream.GPU: 1.0}
    assert [(s.op, s.start_us, s.end_us) for s in line.spans] == [("a", 0, 3), ("b", 3, 7)]


def test_copies_hide_behind_compute() -> None:
    line = simulate(graph([("copy", "h2d", 5), ("run", "gpu", 8)], [("copy", "run", 0)]), us)
    assert line.step_us == 8  # the next step's copy runs under this step's compute
    assert line.bottleneck is Stream.GPU


def test_version_edge_closes_the_cycle() -> None:
    ops = [("copy", "h2d", 5), ("run", "gpu", 8), ("update", "cpu", 7)]
    line = simulate(graph(ops, [("copy", "run", 0), ("run", "update", 0), ("update", "copy", 1)]), us)
    assert line.step_us == 20
    assert line.exposed_us == 12
    assert line.critical == ("copy", "run", "update")
    assert line.exposed_by == {OpKind.CPU_UPDATE: 7, OpKind.H2D: 5}
    assert [(leg.kind, leg.us) for leg in line.cycle] == [(OpKind.H2D, 5), (OpKind.FORWARD, 8), (OpKind.CPU_UPDATE, 7)]
    assert (line.cycle_steps, line.gpu_bound, line.binds, line.steady) == (1, False, OpKind.FORWARD, True)


def test_the_cycle_may_take_several_steps() -> None:
    """What an update makes is needed two steps later: copy, run and update come around every second step."""
    edges = [("copy", "run", 0), ("run", "update", 0), ("update", "copy", 2)]
    line = simulate(graph([("copy", "h2d", 1), ("run", "gpu", 6), ("update", "cpu", 8)], edges), us)
    assert line.step_us == 8  # the update's own stream takes longer than (1 + 6 + 8) / 2
    assert [(leg.kind, leg.us) for leg in line.cycle] == [(OpKind.CPU_UPDATE, 8)]
    line = simulate(graph([("copy", "h2d", 10), ("run", "gpu", 6), ("update", "cpu", 5)], edges), us, 24)
    assert line.step_us == 11
    assert sum(leg.us for leg in line.cycle) == line.cycle_steps * (10 + 6 + 5) / 2
    assert {leg.kind for leg in line.cycle} == {OpKind.H2D, OpKind.FORWARD, OpKind.CPU_UPDATE}
    assert f"over {line.cycle_steps} steps" in str(line)


def test_waits_are_shared_out_along_the_chain_of_causes() -> None:
    """`run1` waits 9 from the end of `run0`: for the last 4 of the update, the 3 of the copy and the 2 of the gather."""
    ops = [("run0", "gpu", 5), ("copy", "h2d", 3), ("gather", "comm", 2), ("run1", "gpu", 5), ("update", "cpu", 4)]
    edges = [("run0", "update", 0), ("update", "copy", 0), ("copy", "gather", 0), ("gather", "run1", 0)]
    line = simulate(graph(ops, edges), us)
    assert line.step_us == 19
    assert line.exposed_by == {OpKind.CPU_UPDATE: 4, OpKind.H2D: 3, OpKind.ALL_GATHER: 2}
    assert sum(line.exposed_by.values()) == line.exposed_us
    assert "the GPU waits for cpu_update 0.00 ms, h2d 0.00 ms" in str(line)
    assert "host-bound" not in str(line)


def test_more_steps_until_the_period_is_steady() -> None:
    """Periods of 10 and 11 alternate: six steps measure three of them, twenty-four twelve."""
    alternating = graph([("copy", "h2d", 10), ("run", "gpu", 6), ("update", "cpu", 5)],
                        [("copy", "run", 0), ("run", "update", 0), ("update", "copy", 2)])
    assert not simulate(alternating, us, 6).steady
    assert "had not settled" in str(simulate(alternating, us, 6))
    assert simulate(alternating, us) == simulate(alternating, us, 24)
    assert simulate(alternating, us).steady


def test_a_wait_over_many_steps_is_seen() -> None:
    """Nobody waits in the first six steps; from then on seven ops of 10 take turns six steps apart."""
    streams = list(KIND)
    ops = [(f"o{i}", stream.value, 10) for i, stream in enumerate(streams)]
    edges = [(f"o{i}", f"o{i + 1}", 0) for i in range(6)] + [("o6", "o0", 6)]
    assert simulate(graph(ops, edges), us).step_us == 12  # 70 / 6
    assert simulate(graph(ops, edges), us, 6).step_us == 10


def test_reuse_edge_delays_the_refill() -> None:
    ops = [("copy0", "h2d", 5), ("copy1", "h2d", 5), ("run0", "gpu", 2), ("run1", "gpu", 2)]
    flow = [("copy0", "run0", 0), ("copy1", "run1", 0)]
    one_slot = [("run0", "copy1", 0), ("run1", "copy0", 1)]
    assert simulate(graph(ops, flow), us).step_us == 10
    assert simulate(graph(ops, flow + one_slot), us).step_us == 14


def test_updates_run_earliest_deadline_first() -> None:
    """Gradients arrive last layer first; each update makes way for the next to come, and goes on behind it."""
    ops = [("bwd2", "gpu", 1), ("bwd1", "gpu", 1), ("bwd0", "gpu", 1), ("u2", "cpu", 10), ("u1", "cpu", 10), ("u0", "cpu", 10)]
    edges = [("bwd2", "u2", 0), ("bwd1", "u1", 0), ("bwd0", "u0", 0), ("u0", "bwd2", 1), ("u1", "bwd2", 1), ("u2", "bwd2", 1)]
    line = simulate(graph(ops, edges, {"u2": 2, "u1": 1, "u0": 0}), us)
    spans = {s.op: (s.start_us, s.end_us) for s in line.spans if s.stream is Stream.CPU}
    assert spans == {"u2": (1, 31), "u1": (2, 22), "u0": (3, 13)}
    assert (line.busy_us[Stream.CPU], line.step_us) == (30, 31)
    assert line.critical == ("bwd2", "u2", "u0", "u1")  # whenever the others came, u2 would end no earlier
    assert [(leg.kind, leg.us) for leg in line.cycle] == [(OpKind.FORWARD, 1), (OpKind.CPU_UPDATE, 30)]
    arrival = simulate(graph(ops, edges), us)
    starts = {s.op: s.start_us for s in arrival.spans}
    assert starts["u2"] < starts["u1"] < starts["u0"]


def test_what_is_left_of_an_update_that_makes_way() -> None:
    """It goes on where it was, with contention as without: a copy beside both slows them down as long as it runs."""
    ops = [("bwd1", "gpu", 1), ("bwd0", "gpu", 4), ("in", "h2d", 10), ("u1", "cpu", 10), ("u0", "cpu", 10)]
    edges = [("bwd1", "u1", 0), ("bwd1", "in", 0), ("bwd0", "u0", 0), ("u0", "bwd1", 1), ("u1", "bwd1", 1), ("in", "bwd1", 1)]
    g = graph(ops, edges, {"u1": 1, "u0": 0})
    free = simulate(g, us)
    assert {s.op: (s.start_us, s.end_us) for s in free.spans if s.stream is Stream.CPU} == {"u1": (1, 21), "u0": (5, 15)}
    rates = ((Quantity.H2D_GBPS, 1.0), (Quantity.D2H_GBPS, 2.0))  # so that what is read takes READ_BESIDE_CORES exactly
    tables = Tables(tuple(Curve(quantity, Load.BUSY, ((1, rate),)) for quantity, rate in rates))
    fast = replace(load_profile("h200x1"), host_dram_gbps=1e-3, h2d_gbps=1.0, h2d_all_gbps=1.0, duplex_gbps=1.0, tables=tables)
    contention = Contention(fast, 1, {"in": 10, "u1": 10, "u0": 10})  # each draws all that there is, at 1 MB/s
    shared = simulate(g, us, contention=contention)
    spans = {s.op: (s.start_us, s.end_us) for s in shared.spans}
    assert contention.beside(READ_BESIDE_CORES) == pytest.approx(READ_BESIDE_CORES)
    assert shared.step_us == pytest.approx(1 + 20 + 10 * READ_BESIDE_CORES, abs=1)  # one resource, and the work for it
    assert spans["u1"][0] < spans["u0"][0] < spans["u0"][1] < spans["u1"][1] == shared.step_us
    assert shared.busy_us[Stream.CPU] == shared.step_us - 1
    busy = shared.busy_us[Stream.CPU] + shared.busy_us[Stream.H2D]
    assert sum(shared.contended_us.values()) == pytest.approx(busy - 30, abs=1)


def test_an_earlier_step_goes_first() -> None:
    """A late deadline of this step is earlier than an early one of the next."""
    ops = [("a", "gpu", 1), ("late", "cpu", 3), ("soon", "cpu", 3)]
    edges = [("a", "late", 0), ("a", "soon", 0), ("late", "a", 2), ("soon", "a", 2)]
    line = simulate(graph(ops, edges, {"late": 9, "soon": 1}), us, num_steps=8)
    assert line.step_us == 6
    assert {s.op: s.end_us - s.start_us for s in line.spans} == {"a": 1, "late": 3, "soon": 3}


def test_deadlock_names_the_ops() -> None:
    with pytest.raises(ValueError, match="deadlocks: 2 ops never start, among them a, b"):
        simulate(graph([("a", "gpu", 1), ("b", "h2d", 1)], [("a", "b", 0), ("b", "a", 0)]), us)
    with pytest.raises(ValueError, match="deadlocks"):  # text order against an edge
        simulate(graph([("a", "gpu", 1), ("b", "gpu", 1)], [("b", "a", 0)]), us)


def test_empty_graph_and_zero_durations() -> None:
    assert simulate(OpGraph(), us).step_us == 0
    line = simulate(graph([("a", "gpu", 0), ("b", "h2d", 0)], [("a", "b", 0)]), us)
    assert (line.step_us, line.utilisation[Stream.GPU]) == (0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_equals_max_plus_on_random_graphs(seed: int) -> None:
    """Without the priority stream, ASAP starts follow from the recurrence start = max over edges, stream order included."""
    rng = random.Random(seed)
    streams = ["gpu", "h2d", "d2h", "comm"]
    ops = [(f"o{i}", rng.choice(streams), rng.randrange(1, 30)) for i in range(25)]
    edges = [(f"o{i}", f"o{j}", 0) for i in range(25) for j in range(i + 1, 25) if rng.random() < 0.08]
    edges += [(f"o{i}", f"o{j}", rng.choice([1, 2])) for i in range(25) for j in range(25) if rng.random() < 0.03]
    g, num_steps = graph(ops, edges), 8
    end: dict[tuple[str, int], int] = {}
    into: dict[str, list[tuple[str, int]]] = {op.name: [] for op in g.ops}
    for e in (*g.edges, *g.stream_edges()):
        into[e.dst].append((e.src, e.distance))
    for step in range(num_steps):
        for op in g.ops:
            start = max((end[src, step - d] for src, d in into[op.name] if step >= d), default=0)
            end[op.name, step] = start + op.bytes
    line = simulate(g, us, num_steps)
    origin = min(end[op.name, num_steps - 1] - op.bytes for op in g.ops)
    assert [s.end_us for s in line.spans] == [end[op.name, num_steps - 1] - origin for op in g.ops]
    gained = max(end[op.name, num_steps - 1] - end[op.name, num_steps - 5] for op in g.ops)
    assert line.step_us == -(-gained // 4)


@pytest.mark.parametrize("batch", [4, 64])
def test_a_real_plan(batch: int) -> None:
    """Qwen3-4B sizes on one H200: host-bound with few sequences, GPU-bound with many; the chain covers the step."""
    layers, hw = qwen3_4b(batch), load_profile("h200x1")
    g = lower(layers, default_decisions(layers, hw))
    costs = resolve(g.ops, hw, AnalyticCostModel())
    line = simulate(g, costs.duration_us)
    assert line == simulate(g, costs.duration_us)
    assert line.step_us == pytest.approx(simulate(g, costs.duration_us, 12).step_us, rel=1e-3)
    assert line.bottleneck is (Stream.CPU if batch == 4 else Stream.GPU)
    assert max(line.busy_us.values()) <= line.step_us <= 1.3 * max(line.busy_us.values())
    assert sum(costs.durations_us[name] for name in line.critical) >= line.step_us
    assert sum(leg.us for leg in line.cycle) == pytest.approx(line.cycle_steps * line.step_us, rel=1e-3)
    assert sum(line.exposed_by.values()) == pytest.approx(line.exposed_us, abs=5)
    assert line.gpu_bound is (batch == 64)
    assert line.binds is (OpKind.CPU_UPDATE if batch == 4 else OpKind.BACKWARD)
    assert "bound by" in str(line)


BEFORE_CONTENTION = {"host": "237a77ed011ccb34", "cpu": "137a14dd79996970"}
"""Of what the simulator gave on the graphs of the test below before it knew contention; of those with a priority stream, when
updates had begun to make way for others."""


@pytest.mark.parametrize("stream", ["host", "cpu"])
def test_without_contention_results_are_as_ever(stream: str) -> None:
    """Spans, busy times, periods and chains of random graphs, with and without a priority stream."""
    digest = hashlib.sha256()
    for seed in range(40):
        rng = random.Random(seed)
        names = [rng.choice(["gpu", "h2d", "d2h", "comm", stream, stream, "cast"]) for _ in range(rng.randrange(2, 30))]
        n = range(len(names))
        edges = [(f"o{i}", f"o{j}", 0) for i in n for j in n[i + 1 :] if rng.random() < 0.1]
        edges += [(f"o{i}", f"o{j}", rng.choice([1, 2])) for i in n for j in n if rng.random() < 0.04]
        ops = [(f"o{i}", name, rng.randrange(20)) for i, name in enumerate(names)]
        digest.update(account(simulate(graph(ops, edges, {f"o{i}": rng.randrange(5) for i in n}), us, 6 + seed % 3)))
    assert digest.hexdigest()[:16] == BEFORE_CONTENTION[stream]


def account(line: Timeline) -> bytes:
    spans = [(s.op, str(s.stream), s.start_us, s.end_us) for s in line.spans]
    return repr((line.step_us, spans, {str(s): us for s, us in line.busy_us.items()}, line.critical)).encode()
