"""Validation on real steps: the same training whichever plan runs when, the faster plan stays, and the cache knows."""

from __future__ import annotations

import copy
import gc
import logging
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import validation_cases
from test_autopolicy import big, settings
from test_host_state import GROUPS
from tiny_models import PlainGPT, lm_batch
from train_cases import config as train_config
from train_cases import make_folder
from training import state_of
from validation_cases import EXACT, RECORD, on_trial

import slidedp
from slidedp.autopolicy import AutoPlan
from slidedp.cli import main
from slidedp.compiler.decisions import Decisions, GroupDecision, Source, StateHome
from slidedp.compiler.defaults import default_decisions
from slidedp.compiler.memory import estimate_memory
from slidedp.compiler.planfile import PlanFile
from slidedp.compiler.verdict import DEFAULT, PLAN, Verdict
from slidedp.executor import switching
from slidedp.executor.host_state import HostState
from slidedp.plan import StopAsked
from slidedp.planner import Planner
from slidedp.report import summary, validation_facts
from slidedp.validation import rival_of

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)
HBM = {"state": "hbm"}
PLANS: dict[str, dict[str, Any]] = {
    "cast": {"chunks": 3, "source": "cast", "window": 2, "act": "retain"},
    "offload": {"chunks": 2, "act": "offload", "boundary": "host", "weights": "hold"},
    "some in HBM": {"layers": {"L01": HBM, "prologue": HBM}},
    "all in HBM": HBM | {"chunks": 2},
}
OLD = {"chunks": 5, "source": "cast", "layers": {"L00": HBM}}


def batches(num: int = 6) -> list[dict[str, torch.Tensor]]:
    return [lm_batch(seed=i) for i in range(num)]


def model() -> PlainGPT:
    torch.manual_seed(0)
    return PlainGPT()


def train(after: Any = None, steps: Any = None, **options: Any) -> tuple[str, slidedp.Plan]:
    """Digest of losses, weights and moments, and the plan, closed. `after`: called with plan and number after each step."""
    plan = slidedp.compile(model(), "cpu", optimizer=OPTIMIZER, **options)
    plan._options = replace(EXACT, max_grad_norm=options.get("max_grad_norm"))
    losses = []
    with plan:
        for i, batch in enumerate(steps or batches()):
            losses.append(plan.run(batch).loss)
            if after is not None:
                after(plan, i)
        return replace(state_of(plan), losses=losses, grads=[]).digest(), plan


@pytest.fixture(scope="module")
def want() -> str:
    return train()[0]


def slower(plan: bool) -> Any:
    return lambda step, of_plan: 2.0 if of_plan is plan else 1.0


@pytest.mark.parametrize(("name", "kept"), [*zip(PLANS, [DEFAULT, PLAN, PLAN, DEFAULT], strict=True)])
def test_the_same_bits_and_the_faster_plan_stays(name: str, kept: str, want: str) -> None:
    with on_trial(PLANS[name], slower(kept == DEFAULT)):
        got, plan = train(validate=1)
    assert got == want
    assert plan.validation is not None
    assert plan.validation.kept == kept
    layers = plan._spec.layers
    chosen = default_decisions(layers, plan._settings.hw, policy=PLANS[name] if kept == PLAN else None)
    assert plan.decisions == chosen
    assert plan._spec.solver == (RECORD if kept == PLAN else None)


@pytest.mark.parametrize(("chunks", "crossing"), [({"chunks": 4}, 4), ({"delivery_chunks": 4}, 2)])
def test_state_that_lives_in_hbm_in_both(chunks: Any, crossing: int, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut otherwise, its moments cross the host; cut alike, it stays where it is."""
    written: list[str] = []
    write = switching.ResidentState.write_moments
    monkeypatch.setattr(switching.ResidentState, "write_moments",
                        lambda self, group, *moments: (written.append(group), write(self, group, *moments)))
    with on_trial(chunks | {"layers": {"L00": HBM, "L02": HBM, "epilogue": HBM}}, slower(False)):
        got, plan = train(validate=1, policy={"layers": {"L00": HBM, "L02": HBM}})
    assert got == want
    assert {g for g, d in plan.decisions.groups.items() if d.state is StateHome.HBM} == {"L00", "L02", "epilogue"}
    assert (written.count("L00"), written.count("epilogue")) == (crossing - 2, 1)


def test_speculation_changes_sides(want: str) -> None:
    """Groups on their second sides go on where the other plan looks for them; clipped and unclipped steps."""
    limit = 7.0
    plain, plan = train(max_grad_norm=limit, policy={"update": "deferred"})
    assert 0 < plan.counters()["clipped_steps"] < 6
    with on_trial({"update": "speculative"}, slower(False)):  # there, away and back
        got, plan = train(max_grad_norm=limit, validate=1, policy={"update": "deferred"})
    assert got == plain
    assert plan.validation.kept == PLAN
    assert plan.counters()["clipped_steps"] > 0


def test_what_comes_between(tmp_path: Any, want: str) -> None:
    """Evaluation, a look at the model, a save beside training, and a recorded step, which does not count."""
    plain = copy.deepcopy(want)

    def disturb(plan: slidedp.Plan, i: int) -> None:
        assert (plan.validation is None) == (i < 5), "one step does not count"
        if i == 0:
            plan.evaluate(lm_batch(seed=9))
        if i == 2:
            assert plan.model is plan._model
        if i == 1:
            plan.save(tmp_path, wait=False)
        if i == 4:
            plan._recording = False
        if i == 3:
            plan._recording = True  # as `measure` does: the fifth step

    with on_trial(PLANS["cast"], slower(True)):
        got, _ = train(disturb, validate=1)
    assert got == plain


@pytest.mark.parametrize("policy", [PLANS["cast"], PLANS["offload"] | {"layers": {"L01": HBM}}], ids=["cast", "offload"])
def test_one_plan_at_a_time_has_slots(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the plan before are gone before the other's are made, whatever results of its steps the user keeps."""
    left, results = [], []
    drop = switching.drop

    def dropped(machine: Any) -> None:
        slots = {place: weakref.ref(slot) for place, slot in machine.buffers._slots.items()}
        drop(machine)
        gc.collect()  # as a backend with a device does
        left.append([place for place, slot in slots.items() if slot() is not None])

    monkeypatch.setattr(switching, "drop", dropped)
    with on_trial(policy, slower(False)), slidedp.compile(model(), "cpu", optimizer=OPTIMIZER, validate=1) as plan:
        for i, batch in enumerate(batches(5)):
            results.append(plan.run(batch))
            if i in (1, 3):
                plan.evaluate(batch)
    assert left == [[], []]
    assert results[0].exposed_s >= 0


def sources_on_trial(steps: list[dict[str, torch.Tensor]]) -> tuple[slidedp.Plan, list[str]]:
    """A plan of casts on trial, which is said to be slower than the default's of shadows, over `steps`; which it was in each."""
    seen = []

    def look(plan: slidedp.Plan, i: int) -> None:
        seen.append(str(plan.decisions.of("L00").source))

    plain, _ = train(steps=steps)
    with on_trial(PLANS["cast"], slower(True)):
        got, plan = train(look, steps=steps, validate=1)
    assert got == plain
    return plan, seen


def test_other_shapes_do_not_count() -> None:
    steps = [lm_batch(seed=i, batch=3 if i in (1, 4) else 2) for i in range(7)]
    plan, seen = sources_on_trial(steps)
    assert seen == ["cast"] * 3 + ["shadow"] * 4
    assert plan.validation is not None


@pytest.mark.parametrize(("planned", "default"), [(1, 0), (3, 4)])
def test_batches_that_all_have_a_shape_of_their_own(planned: int, default: int, caplog: pytest.LogCaptureFixture,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is given up, on the solver's plan, whether it is its steps that do not come or the default's."""
    monkeypatch.setattr("slidedp.validation.MOST_OTHERS", 3)
    steps = [lm_batch(seed=i, batch=2 if i < planned else 3 + i) for i in range(planned + 6)]
    plan, seen = sources_on_trial(steps)
    assert seen == ["cast"] * 2 + ["shadow"] * default + ["cast"] * (planned + 4 - default)
    assert plan._trial is None
    assert plan.validation is None
    assert "3 steps were of other shapes" in caplog.text


def test_ranks(run_ranks: Any, tmp_path: Any) -> None:
    """The slowest rank counts; a verdict from the cache; and where one rank has no room for the default, all go back and on."""
    results = [r.value for r in run_ranks(validation_cases.on_ranks, 2, str(tmp_path), timeout=120)]
    assert "(rank 1 could not set it up (it says why itself))" in results[0]["no room"].pop("said")
    said = results[1]["no room"].pop("said")
    assert said.startswith("rank 1: the plan is not validated")
    assert "(RuntimeError: no memory for this)" in said
    for r in results:
        assert r["got"] == results[0]["want"]
        assert (r["kept"], r["measured"]) == (PLAN, [2_000_000, 3_000_000])
        assert r["states"] == ["hbm", "host"]
        assert r["cached"]
        assert r["no room"] == {"losses": True, "calls": 3, "validated": False, "act": "retain"}


def test_no_room_says_so(want: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def write_moments(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("not here")
        original(*args)

    original = switching.ResidentState.write_moments
    monkeypatch.setattr(switching.ResidentState, "write_moments", write_moments)
    with on_trial(OLD, slower(True)), caplog.at_level(logging.WARNING, "slidedp"):
        got, plan = train(validate=1, policy={"layers": {"L01": HBM}})
    assert got == want
    assert len(calls) > 1
    assert "MemoryError: not here" in caplog.text
    assert plan.validation is None
    assert plan.decisions.of("L00").state is StateHome.HBM


def test_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plan can be set up again: the plan ends, and the model keeps its weights, as of the last step."""
    def write_moments(*args: Any) -> None:
        raise MemoryError("nowhere")

    two = slidedp.compile(model(), "cpu", optimizer=OPTIMIZER, update_kernel="torch", policy=OLD)
    for batch in batches(2):
        two.run(batch)
    monkeypatch.setattr(switching.ResidentState, "write_moments", write_moments)
    with on_trial(OLD, slower(True)):
        plan = slidedp.compile(model(), "cpu", optimizer=OPTIMIZER, update_kernel="torch", policy={"layers": {"L01": HBM}},
                               validate=1)
        for batch in batches(2):
            plan.run(batch)
        for _ in range(2):
            with pytest.raises(MemoryError, match="nowhere"):
                plan.run(lm_batch())
        plan.close()
    kept = dict(plan._model.named_parameters())
    assert all(torch.equal(p, kept[name]) for name, p in two.model.named_parameters())
    two.close()


def test_a_stop_asked_for_while_plans_change() -> None:
    """What follows, a save above all, is of the plan that is there now, though none of its steps has run."""
    plan: slidedp.Plan
    with on_trial(PLANS["cast"], lambda step, of_plan: plan.ask_to_stop() or 1.0):
        plan = slidedp.compile(model(), "cpu", optimizer=OPTIMIZER, update_kernel="torch", validate=1)
        with plan:
            for batch in batches(2):
                plan.run(batch)
            with pytest.raises(StopAsked):
                plan.run(lm_batch())
            assert plan.decisions == plan._machine.plan.decisions != plan._trial.candidates[0].decisions


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


def test_the_cache_knows(tmp_path: Any, want: str) -> None:
    for policy, kept in ((PLANS["cast"], DEFAULT), (PLANS["offload"], PLAN)):
        with on_trial(policy, slower(kept == DEFAULT)):
            _, first = train(steps=batches(5), validate=1, cache_dir=tmp_path)
        with on_trial(policy, slower(kept == PLAN)):
            plan = slidedp.compile(model(), "cpu", example=lm_batch(), optimizer=OPTIMIZER, validate=1, cache_dir=tmp_path)
            assert plan._trial is None
            assert plan.validation == first.validation
            assert plan.decisions == first.decisions
            plan.close()
            other = slidedp.compile(model(), "cpu", example=lm_batch(batch=3), validate=1, cache_dir=tmp_path)
            assert other._trial is not None, "another shape"
            other.close()


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


def test_plan_files_and_reports_say_it(want: str, caplog: pytest.LogCaptureFixture) -> None:
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
