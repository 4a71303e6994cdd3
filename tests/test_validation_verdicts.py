"""Validation on real steps: whether there is one and against what, what the cache knows, and what is reported."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_cases import OPTIMIZER
from test_autopolicy import big, settings
from test_host_state import GROUPS
from tiny_models import lm_batch
from train_cases import config as train_config
from train_cases import make_folder
from validation_cases import HBM, PLANS, RECORD, batches, model, on_trial, slower, train

import slidedp
from slidedp.commands.cli import main
from slidedp.compiler.decisions import Decisions, GroupDecision, Source, StateHome
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.planfile.verdict import DEFAULT, PLAN, Verdict
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.executor.state.host_state import HostState
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.planner import Planner
from slidedp.planning.recheck import Recheck
from slidedp.reports.report import summary, validation_facts
from slidedp.trial.validation import rival_of

pytestmark = pytest.mark.cpu


# ---- whether and against what ----


def test_default_of_a_given_profile_and_of_auto() -> None:
    """Off for the one, on for the other, where the default's states are where the plan's are."""
    with on_trial(PLANS["cast"], slower(True)):
        plan = slidedp.compile(model(), "cpu", example=lm_batch())
        assert plan._trial is None
        plan.close()
        plan = slidedp.compile(model(), example=lm_batch(), cache_dir="")
        assert (plan._trial._num_steps, plan._settings.same_bits) == (3, True)
        plan.close()
    with on_trial(PLANS["some in HBM"], slower(True)):
        plan = slidedp.compile(model(), example=lm_batch(), cache_dir="")
        assert plan._trial is None, "the same plan but for the states"
        plan.close()
    for bad in (-1, "yes", 1.5):
        with pytest.raises(ValueError, match="validate="):
            slidedp.compile(model(), "cpu", validate=bad)


def test_the_cache_knows(tmp_path: Any) -> None:
    for policy, kept in ((PLANS["cast"], DEFAULT), (PLANS["offload"], PLAN)):
        with on_trial(policy, slower(kept == DEFAULT)):
            _, first = train(steps=batches(5), validate=1, cache_dir=tmp_path)
        with on_trial(policy, slower(kept == PLAN)):
            plan = slidedp.compile(model(), "cpu", example=lm_batch(), optimizer=OPTIMIZER, validate=1, cache_dir=tmp_path)
            assert plan._trial is None
            assert plan.validation == first.validation
            assert plan.decisions == first.decisions
            assert first._planner.recheck is None, "measured just now"
            plan.run(lm_batch())
            recheck = plan._planner.recheck
            assert len(recheck._steps) + len(recheck._times_us) == 1
            assert recheck.verdict.kept_us == 1_000_000
            assert recheck.kept.is_file()
            plan.close()
            other = slidedp.compile(model(), "cpu", example=lm_batch(batch=3), validate=1, cache_dir=tmp_path)
            assert other._trial is not None, "another shape"
            other.close()


@pytest.mark.parametrize(("seconds", "says"), [
    ([1.1] * 60, False), ([2.0] * 9 + [1.1] * 51, False), ([1.1] * 20 + [1.3] * 40, True), ([0.8] * 60, True)])
def test_steps_that_take_another_time_than_the_cache_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: list[float],
                                                           says: bool) -> None:
    """Once; steps of other shapes do not count, nor those that are under way."""
    spec = object()
    recheck = Recheck(replace(VERDICT, plan_measured_us=1_000_000), spec, tmp_path / "validated.yaml")  # type: ignore[arg-type]
    for wall_s in [*seconds, 9.0]:
        step = SimpleNamespace(compute_ended=threading.Event(), wall_s=wall_s)
        recheck.ran(step, spec)  # type: ignore[arg-type]
        step.compute_ended.set()
        recheck.ran(SimpleNamespace(wall_s=9.0), object())  # type: ignore[arg-type]
    assert caplog.text.count(f"to have both timed again, delete {tmp_path / 'validated.yaml'}") == says
    if says:
        assert "s, and took 1 s when this plan was timed" in caplog.text


def test_a_default_that_cannot_run_the_batch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise ValueError("no room for this batch")

    monkeypatch.setattr(Planner, "candidates", no_room)
    with on_trial(PLANS["cast"], slower(True)), slidedp.compile(model(), "cpu", example=lm_batch(), validate=1) as plan:
        assert plan._trial is None
    assert "the plan is not validated: the default cannot run this batch (no room for this batch)" in caplog.text


def test_rivals() -> None:
    layers, s = big(), replace(settings(), validate=3)
    rule = default_decisions(layers, s.hw)
    plan = default_decisions(layers, s.hw, policy={"act": "retain", "layers": {"L01": HBM}})
    chosen = AutoPlan(plan, RECORD, rule=rule)
    assert rival_of(layers, replace(s, same_bits=False), chosen) == rule
    same = rival_of(layers, s, chosen)
    assert same is not None
    assert same.of("L01").state is StateHome.HBM
    assert same.of("L00") == rule.of("L00")
    assert rival_of(layers, replace(s, validate=0), chosen) is None
    assert rival_of(layers, s, AutoPlan(rule, RECORD, rule=rule)) is None
    assert rival_of(layers, s, AutoPlan(plan)) is None, "nothing was solved"
    other = replace(chosen, rule=replace(rule, head_chunks=2))
    assert rival_of(layers, replace(s, same_bits=False), other) is None, "that changes more than a rounding"
    tight = estimate_memory(layers, rule).host_bytes
    assert rival_of(layers, replace(s, same_bits=False, host_budget=tight + 2**30), chosen) == rule
    cast = AutoPlan(default_decisions(layers, s.hw, policy={"reduction": "cpu", "source": "cast"}), RECORD, rule=rule)
    assert rival_of(layers, replace(s, host_budget=tight), cast) is None, "no room for control words beside"


def test_memory_for_both_goes_back() -> None:
    """What only the other plan needs is given back to the system, and nothing else."""
    def decisions(state: StateHome, source: Source) -> Decisions:
        return Decisions({g.name: GroupDecision(state=state, source=source) for g in GROUPS})

    both = decisions(StateHome.HOST, Source.CAST), decisions(StateHome.HOST, Source.SHADOW)
    state = HostState(GROUPS, both[0], rank=0, world_size=1, compute_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, num_words=1,
                      others=both[1:])  # fmt: skip
    assert not state.shadow
    state.master["L00"].fill_(3)
    state.serve(both[1])
    state.shadow["L00"].fill_(2)
    state.serve(both[0])
    files = {name: segment._fd for name, segment in state._segments.items()}
    used = {name: os.fstat(fd).st_blocks for name, fd in files.items()}
    state.settle_on(both[0])
    now = {name: os.fstat(fd).st_blocks for name, fd in files.items()}
    assert now["shadow"] < used["shadow"]
    assert {n: b for n, b in now.items() if n != "shadow"} == {n: b for n, b in used.items() if n != "shadow"}
    assert state.bytes_by_place()["shadow"] == 0
    assert (state.master["L00"] == 3).all()
    state.close(keep_master=False)


# ---- what is reported ----

VERDICT = Verdict(PLAN, 3, 900, 1000, 1250, 2000, 1500, 100, 200, 950)


def test_what_it_cost_and_when_it_has_paid() -> None:
    assert (VERDICT.cost_us, VERDICT.gain_us, VERDICT.pays_back_after) == (1250, 250, 5)
    assert VERDICT.off == pytest.approx(0.25)
    default = replace(VERDICT, kept=DEFAULT)
    assert (default.gain_us, default.pays_back_after) == (0, None)
    assert default.off == pytest.approx(-0.25)
    assert replace(VERDICT, default_measured_us=1240).pays_back_after is None, "kept within the tolerance"
    facts = " ".join(validation_facts(VERDICT).values())
    for part in ("plan 1.2 ms", "simulated 1.0 ms", "predicted 0.9 ms", "default 1.5 ms", "+25.0%", "after 5 steps"):
        assert part in facts
    assert "nothing is saved" in validation_facts(default)["selection"]


def test_a_tie_keeps_the_plan() -> None:
    with on_trial(PLANS["cast"], lambda step, of_plan: 1.01 if of_plan else 1.0):
        _, plan = train(validate=1, steps=batches(5))
    assert plan.validation.kept == PLAN
    assert plan.validation.pays_back_after is None


def test_plan_files_and_reports_say_it(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([9.0, 1.0, 3.0, 1.5, 9.0, 2.0, 2.5, 2.0])
    with on_trial(PLANS["cast"], lambda step, of_plan: next(seconds)), caplog.at_level(logging.INFO, "slidedp"):
        _, plan = train(validate=3, steps=batches(9))
    v = plan.validation
    assert (v.kept, v.plan_measured_us, v.default_measured_us) == (PLAN, 1_500_000, 2_000_000)
    assert v.plan_predicted_us == RECORD.step_us
    assert v.plan_simulated_us == plan.simulate().step_us
    lost_us = round(1e6 * sum(t - 1.5 for t in (9.0, 2.0, 2.5, 2.0)))
    assert v.trying_us >= lost_us
    file = plan.to_planfile()
    read = PlanFile.parse(file.to_yaml())
    assert read.validation == file.validation == v
    assert read.to_yaml() == file.to_yaml()
    for text in (summary(file), str(plan.explain())):
        assert f"paid back after {v.pays_back_after} steps" in " ".join(text.split())
    assert caplog.text.count("the plan is kept") == 1


def test_slidedp_train_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"hw": "cpu", "update_kernel": "torch", "device": "cpu", "validate": 1}
    path = train_config(make_folder(tmp_path), steps=6, data={"train": "train.txt", "seq": 24}, evaluate_every=None, plan=plan,
                        log={"every": 1})
    with on_trial(PLANS["cast"], slower(True)):
        assert main(["train", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.count("the default is kept") == 1
    assert said.index("step 4/6") < said.index("the default is kept") < said.index("step 5/6")
