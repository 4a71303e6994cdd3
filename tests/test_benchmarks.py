"""What the benchmarks compute from what they have measured, and that their cases are plans: they themselves need a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stacks import looking_up, qwen3_4b
from test_eventgraph import tied

from slidedp.compiler.decisions import StateHome
from slidedp.compiler.ops import OpKind
from slidedp.compiler.policy import apply_policy
from slidedp.compiler.simulation.timeline import Span, Timeline
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile

pytestmark = pytest.mark.null


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples/benchmarks"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which they would set for good
    yield
    for name in ("pinned", "throughput", "device", "copies"):
        sys.modules.pop(name, None)


def test_pinned_plans_are_plans():
    """Each pins what exists, no two the same, and their embeddings' states are in both places."""
    from pinned import candidates

    layers = looking_up(tied(qwen3_4b(8)), 8192)
    embedding, rule = layers.groups[0].name, default_decisions(layers, load_profile("h200x1"))
    decided = []
    for case in candidates(len(layers.layers), embedding):
        pins = {key: value for key, value in case.items() if key != "solver"}
        decided.append((case["solver"], apply_policy(rule, pins, layers)))
    assert len(decided) >= 12
    assert len({(solver, str(d)) for solver, d in decided}) == len(decided)
    assert {d.of(embedding).state for _, d in decided} == set(StateHome)


def line(step_s, predicted_s, busy, case=None):
    return {"batch": 16, "step_s": step_s, "times": [step_s], "measured_over_predicted": step_s / predicted_s, "busy_s": busy,
            "case": case}


def test_verdict():
    from pinned import verdict

    choice = line(1.0, 1.0, {"gpu": [0.9, 0.9], "d2h": [0.001, 0.01]})
    near, far = (line(s, 1.05, {"gpu": [b, 0.9]}, {"x": s}) for s, b in ((1.1, 0.8), (0.97, 0.6)))
    good = verdict([choice], [near], [near])
    assert good["ok"] == {"choice": True, "steps": True, "busy": True}  # the other stream is hardly busy
    bad = verdict([choice], [far], [near, far])
    assert bad["ok"] == {"choice": False, "steps": True, "busy": False}
    assert (bad["best"], bad["choice_over_best"]) == ({"x": 0.97}, 1.0309)
    slow = line(1.07, 1.0, {})  # the host has become slower meanwhile, for both
    assert verdict([choice, slow], [far, slow], [near, far])["choice_over_best"] == 1.0147


def test_bounds_are_by_what_was_measured_before_and_after():
    from throughput import bounds

    before, after = (replace(load_profile("h200x1"), host_dram_gbps=gbps, duplex_gbps=50.0) for gbps in (160.0, 240.0))
    host = {"step_s": 1.0, "reference_s": 0.5, "loads_s": {"host": 1.0, "links": 0.2}, "mixed_gbps": [150.0, 210.0],
            "traffic_gb": {"cpu": 120.0, "h2d": 32.0, "d2h": 10.0}}  # fmt: skip
    assert bounds(host, before, after) == {
        "host_dram_gbps": [160.0, 240.0], "bounds_s": {"host": 0.9, "host_at_peak": 0.8, "links": 0.2}, "bound_over_step": 0.9,
        "peak_bound_over_step": 0.8}  # fmt: skip
    assert bounds(host | {"reference_s": 0.95}, before, after)["bound_over_step"] == 0.95
    unmixed = bounds(host | {"reference_s": None, "mixed_gbps": []}, before, before)
    assert unmixed["bound_over_step"] == unmixed["peak_bound_over_step"] == 1.0


def test_what_a_plans_traffic_gets(monkeypatch):
    """In what proportions it is moved: as much as its updates call for, in whole copies."""
    from mixture import NUM_UPDATES, REPEATS, mixed_gbps

    from slidedp.compiler.ops import Stream
    from slidedp.executor.measure.lab import Lab

    plain, seen = Lab.spans, []
    monkeypatch.setattr(Lab, "spans", lambda lab, work: seen.append({s: len(ops) for s, ops in work.items()}) or plain(lab, work))
    assert mixed_gbps({Stream.CPU: 0, Stream.H2D: 8, Stream.D2H: 8}) is None
    assert mixed_gbps({Stream.CPU: 28, Stream.H2D: 4, Stream.D2H: 2}, num_threads=1) > 0
    assert mixed_gbps({Stream.CPU: 28, Stream.H2D: 0, Stream.D2H: 2}, num_threads=1) > 0
    both = {Stream.CPU: NUM_UPDATES, Stream.H2D: 2 * NUM_UPDATES, Stream.D2H: NUM_UPDATES}
    assert seen == [both] * REPEATS + [{s: count for s, count in both.items() if s is not Stream.H2D}] * REPEATS


def test_rates_of_copies():
    from copies import copy_gbps

    from slidedp.compiler.ops import Op, OpGraph, Stream

    ops = tuple(Op(f"h2d.{i}", OpKind.H2D, Stream.H2D, "L00", bytes=40 << 20) for i in range(11))
    plan = type("Plan", (), {"_spec": type("Spec", (), {"graph": OpGraph(ops)})})
    spans = [Span(op.name, Stream.H2D, 0, op.bytes // (1000 * (i + 1))) for i, op in enumerate(ops)]  # at 1 to 11 GB/s
    measured = Timeline(1, tuple(spans), {}, ())
    assert copy_gbps(plan, measured, Timeline(1, (), {}, ())) == {"h2d": {"measured": [2.0, 6.0, 10.0]}}
