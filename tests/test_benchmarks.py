"""What the benchmarks compute from what they have measured, and that their cases are plans: they themselves need a GPU."""

from __future__ import annotations

import sys
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
    return {"batch": 16, "step_s": step_s, "measured_over_predicted": step_s / predicted_s, "busy_s": busy, "case": case}


def test_verdict():
    from pinned import verdict

    choice = line(1.0, 1.0, {"gpu": [0.9, 0.9], "d2h": [0.001, 0.01]})
    near, far = (line(s, 1.05, {"gpu": [b, 0.9]}, {"x": s}) for s, b in ((1.1, 0.8), (0.97, 0.6)))
    good = verdict(choice, [near])
    assert good["ok"] == {"choice": True, "steps": True, "busy": True}  # the other stream is hardly busy
    bad = verdict(choice, [near, far])
    assert bad["ok"] == {"choice": False, "steps": True, "busy": False}
    assert (bad["best"], bad["choice_over_best"]) == ({"x": 0.97}, 1.0309)


def test_rates_of_copies():
    from copies import copy_gbps

    from slidedp.compiler.ops import Op, OpGraph, Stream

    ops = tuple(Op(f"h2d.{i}", OpKind.H2D, Stream.H2D, "L00", bytes=40 << 20) for i in range(11))
    plan = type("Plan", (), {"_spec": type("Spec", (), {"graph": OpGraph(ops)})})
    spans = [Span(op.name, Stream.H2D, 0, op.bytes // (1000 * (i + 1))) for i, op in enumerate(ops)]  # at 1 to 11 GB/s
    measured = Timeline(1, tuple(spans), {}, ())
    assert copy_gbps(plan, measured, Timeline(1, (), {}, ())) == {"h2d": {"measured": [2.0, 6.0, 10.0]}}
