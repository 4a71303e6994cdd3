"""The rule that spends spare HBM on optimizer state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from stacks import qwen3_4b

from slidedp.compiler.costmodel.costs import AnalyticCostModel, resolve
from slidedp.compiler.decisions import StateHome
from slidedp.compiler.footprint.budgets import room_to_fill
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.simulation.simulate import simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null

H200 = replace(load_profile("h200x1"), cpu_adam_gparams=4.4, host_dram_gbps=160.0)
"""With a host at which a step of eight sequences takes more than twice as long as its compute."""
GIB = 2**30


def resident(decisions):
    return {name for name, d in decisions.groups.items() if d.state is StateHome.HBM}


def test_it_is_asked_for():
    assert resident(default_decisions(qwen3_4b(8), H200)) == set()


def test_more_budget_keeps_more_and_is_never_slower():
    """The embedding and the first layer, then layer by layer; within the budget; predicted throughput rises with it."""
    layers, kept, steps_us = qwen3_4b(8), [], []
    for budget in (9, 16, 32, 139):
        decisions = default_decisions(layers, H200, hbm_budget=budget * GIB, spare_hbm=True)
        graph = lower(layers, decisions, hbm_budget=budget * GIB)
        costs = resolve(graph.ops, H200, AnalyticCostModel())
        kept.append(resident(decisions))
        steps_us.append(simulate(graph, costs.duration_us).step_us)
        if kept[-1]:
            assert estimate_memory(layers, decisions).hbm_bytes <= room_to_fill(H200, budget * GIB)
    assert kept[0] == {"L00"}, "the embedding has no room"
    assert all(less <= more for less, more in pairwise(kept))
    assert {"prologue", "L00"} <= kept[1]
    assert "epilogue" not in kept[-1], "its update is the first and has all of the backward to hide behind"
    assert steps_us == sorted(steps_us, reverse=True)
    assert steps_us[-1] < 0.5 * steps_us[0]


def test_it_stops_when_the_update_is_hidden():
    small, large = (resident(default_decisions(qwen3_4b(b), H200, spare_hbm=True)) for b in (8, 32))
    assert {"prologue", "L00"} <= large < small


def test_what_is_pinned_stays():
    policy = {"layers": {"L00": {"state": "host"}, "L35": {"state": "hbm"}}}
    kept = resident(default_decisions(qwen3_4b(32), H200, policy=policy, spare_hbm=True))
    assert "L00" not in kept
    assert {"prologue", "L35"} <= kept
    assert resident(default_decisions(qwen3_4b(8), H200, policy={"state": "host"}, spare_hbm=True)) == set()
