"""Which groups speculate: what it is predicted to save, what it takes of the host, and what the user says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stacks import qwen3_4b, stack
from test_clipping import OPTIMIZER
from tiny_models import PlainGPT, lm_batch

import slidedp
from slidedp.api import pins_updates
from slidedp.compiler.decisions import Update
from slidedp.compiler.footprint.memory import candidate_bytes, estimate_memory
from slidedp.compiler.ops import Stream
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.decide import problem_of
from slidedp.planning.speculation import in_order_of_arrival, most_that_fit, speculating, with_fewest
from slidedp.reports.explanation import explain
from slidedp.settings import Settings

pytestmark = pytest.mark.null
H200 = load_profile("h200x1")


@pytest.fixture(scope="module")
def host_bound():
    """Qwen3-4B at batch 16, all state on the host: the problem, its deferred decisions, and what simulating has come to."""
    layers = qwen3_4b(16)
    settings = Settings(H200, torch.bfloat16, torch.bfloat16, policy={"update": "deferred"})
    problem, known = problem_of(layers, settings), {}

    def simulate(decisions):
        key = (decisions.update, tuple(d.update for d in decisions.groups.values()))
        if key not in known:
            known[key] = problem.simulate(decisions)
        return known[key]

    rule = default_decisions(layers, H200, policy={"update": "deferred"})
    return replace(problem, simulate=simulate), rule, known


def test_clipping_costs_little_where_the_host_binds(host_bound):
    """Against no clipping at all: within 6 %, as the issue asks, where updates that are all deferred cost more than a third."""
    problem, deferred, known = host_bound
    free_us = problem.simulate(replace(deferred, update=Update.IN_BACKWARD)).step_us
    deferred_us = problem.simulate(deferred).step_us
    chosen = with_fewest(problem, AutoPlan(deferred)).decisions
    chosen_us = problem.simulate(chosen).step_us
    assert deferred_us > 4 / 3 * free_us
    assert chosen_us < 1.06 * free_us
    assert len(known) < 11
    names = [g.name for g in in_order_of_arrival(problem.layers, chosen)]
    taken = [chosen.of(name).update is Update.SPECULATIVE for name in names]
    assert 0 < sum(taken) < len(names)
    assert taken == sorted(taken, reverse=True), "the last layers, whose gradients come first"
    assert names[0] == "epilogue"
    assert names[-1] == "prologue"


def test_no_more_than_the_host_has_room_for(host_bound):
    problem, deferred, _ = host_bound
    need = estimate_memory(problem.layers, deferred).host_bytes
    layer = candidate_bytes(problem.layers, speculating(problem.layers, deferred, 99), problem.layers.group("L35"))
    assert layer == 14 * problem.layers.group("L35").numel
    head = candidate_bytes(problem.layers, speculating(problem.layers, deferred, 99), problem.layers.group("epilogue"))
    for room, number in ((0, 0), (head - 1, 0), (head, 1), (head + 5 * layer + 1, 6), (1 << 60, 38)):
        tight = replace(problem, host_budget=need + room)
        assert most_that_fit(tight, deferred) == number
    tight = replace(problem, host_budget=need + head + 5 * layer)
    chosen = with_fewest(tight, AutoPlan(deferred)).decisions
    assert estimate_memory(problem.layers, chosen).host_bytes <= tight.host_budget
    assert problem.simulate(chosen).step_us < problem.simulate(deferred).step_us


def test_a_step_that_the_gpu_binds_needs_none():
    layers = stack(12, 2**24, 2**20, tokens=2**19, width=1024)
    problem = problem_of(layers, Settings(H200, torch.bfloat16, torch.bfloat16, policy={"update": "deferred"}))
    deferred = default_decisions(layers, H200, policy={"update": "deferred"})
    assert with_fewest(problem, AutoPlan(deferred)).decisions == deferred


def test_what_the_policy_says_is_kept(tmp_path):
    """Groups named in it, or all; in a plan file and back; and groups cannot update in the backward of a plan that waits."""
    some = {"update": "deferred", "layers": {"L01-L02": {"update": "speculative"}}}
    all_but_one = {"update": "speculative", "layers": {"L01": {"update": "deferred"}}}
    for policy, number in ((some, 2), ({"update": "speculative"}, 6), (all_but_one, 5)):
        assert pins_updates(policy)
        plan = slidedp.plan_on_paper(PlainGPT(), "cpu", batch=2, seq=10, ranks=1, solver="rule", policy=policy, max_grad_norm=1.0)
        assert plan.decisions.update is Update.DEFERRED
        assert sum(d.update is Update.SPECULATIVE for d in plan.decisions.groups.values()) == number
        plan.dump(tmp_path / "plan.yaml")
        assert PlanFile.load(tmp_path / "plan.yaml").decisions == plan.decisions
        with slidedp.compile(PlainGPT(), "cpu", policy=tmp_path / "plan.yaml", max_grad_norm=1.0, example=lm_batch(),
                             optimizer=OPTIMIZER) as running:
            assert running.decisions == plan.decisions
            assert running.memory().host["candidates"] > 0
    assert not pins_updates({"chunks": 2, "layers": {"L01": {"chunks": 1}}})
    with pytest.raises(ValueError, match="in_backward is for the whole plan"):
        slidedp.compile(PlainGPT(), "cpu", policy={"layers": {"L01": {"update": "in_backward"}}}, max_grad_norm=1.0,
                        example=lm_batch())


def test_explain_says_what_the_norm_costs():
    plans = {update: slidedp.plan_on_paper("qwen3-0.6b", "h200x1", batch=4, seq=1024, ranks=1, solver="rule", cache_dir="",
                                           policy={"update": update}) for update in ("in_backward", "deferred", "speculative")}
    reports = {update: explain(plan, "window") for update, plan in plans.items()}
    steps = {update: report.step_us for update, report in reports.items()}
    assert reports["in_backward"].norm_us is None
    assert "norm" not in str(reports["in_backward"])
    for update in ("deferred", "speculative"):
        assert reports[update].norm_us == steps[update] - steps["in_backward"]
    assert reports["deferred"].norm_us > reports["speculative"].norm_us
    assert reports["deferred"].redone_us == 0
    assert reports["speculative"].redone_us == pytest.approx(reports["in_backward"].busy_us[Stream.CPU], rel=0.05)
    assert "and a clipped one by" in " ".join(str(reports["speculative"]).split())
    assert "no group speculates" in " ".join(str(reports["deferred"]).split())
    assert f"{len(plans['speculative'].decisions.groups)} groups speculate" in " ".join(str(reports["speculative"]).split())
    asked = {a.value: a for a in explain(plans["speculative"], "update").alternatives}
    assert asked["in_backward"].step_change_us == -reports["speculative"].norm_us
    assert asked["deferred"].step_change_us == steps["deferred"] - steps["speculative"]
    host = {update: plan.predictions.host_bytes for update, plan in plans.items()}
    assert asked["deferred"].host_change_bytes == host["deferred"] - host["speculative"]
