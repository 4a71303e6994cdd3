"""Validation on real steps: the same training whichever plan runs when, and the faster plan stays."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import validation_cases
from rank_cases import OPTIMIZER
from tiny_models import lm_batch
from validation_cases import HBM, PLANS, RECORD, batches, model, on_trial, slower, train

import slidedp
from slidedp.agreement import StopAsked
from slidedp.compiler import residency
from slidedp.compiler.decisions import StateHome
from slidedp.compiler.planfile.verdict import DEFAULT, PLAN
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.executor.machine import switching

pytestmark = pytest.mark.cpu

OLD = {"chunks": 5, "source": "cast", "layers": {"L00": HBM}}


@pytest.fixture(scope="module")
def want() -> str:
    return train()[0]


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


@pytest.mark.parametrize(("chunks", "whole", "crossing"),
                         [({"chunks": 4}, 1, 4), ({"delivery_chunks": 4}, 1, 2), ({"chunks": 4}, residency.WHOLE_UPDATE, 2)])
def test_state_that_lives_in_hbm_in_both(chunks: Any, whole: int, crossing: int, want: str,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut otherwise, its moments cross the host; cut alike, as what is small is on one rank, it stays where it is."""
    monkeypatch.setattr(residency, "WHOLE_UPDATE", whole)
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
    monkeypatch.setattr("slidedp.trial.validation.MOST_OTHERS", 3)
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
