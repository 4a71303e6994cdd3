"""What becomes of a plan that has failed, on one rank: nothing goes on with a step left out, and closed it keeps nothing."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from tiny_models import PlainGPT, lm_batch

import slidedp
from slidedp.executor.devices.backend import CpuBackend, Sent
from slidedp.executor.ranks.collectives import SingleRank
from slidedp.executor.stages.stages import StageRunner

pytestmark = pytest.mark.cpu


def fail(*args, **options):
    raise RuntimeError("CUDA error: device-side assert triggered")


def failing(monkeypatch, method: str) -> None:
    monkeypatch.setattr(CpuBackend, method, fail)


@pytest.mark.parametrize("method", ["send", "fence_caller"])
def test_a_batch_that_cannot_set_out_ends_the_plan(monkeypatch, method):
    """Other ranks are in the step by then, and the optimizer has counted it."""
    with slidedp.compile(PlainGPT(), optimizer=slidedp.AdamW(lr=1e-3)) as plan:
        plan.run(lm_batch())
        with monkeypatch.context() as patch:
            failing(patch, method)
            with pytest.raises(RuntimeError, match="device-side assert"):
                plan.run(lm_batch())
        with pytest.raises(RuntimeError, match="device-side assert"):
            plan.run(lm_batch())


@pytest.mark.parametrize("seen", ["in a step", "at the end"])
def test_a_device_that_has_failed_keeps_nothing_of_the_host(monkeypatch, seen):
    """In every call, once an assertion has failed on it. The step's error is the one to hear of, and that once."""
    model = PlainGPT()
    plan = slidedp.compile(model, optimizer=slidedp.AdamW(lr=1e-3))
    plan.run(lm_batch())
    plan.synchronize()
    machine = plan._machine
    with monkeypatch.context() as patch:
        if seen == "in a step":
            failing(patch, "receive")
            with pytest.raises(RuntimeError, match="device-side assert"):
                plan.run(lm_batch())
        for method in ("fence_caller", "drain", "close"):
            failing(patch, method)
        with nullcontext() if seen == "in a step" else pytest.raises(RuntimeError, match="device-side assert"):
            plan.close()
    assert machine.closed
    assert not machine.failure.watchdog._thread.is_alive()
    assert not machine.state.master
    with slidedp.compile(model, optimizer=slidedp.AdamW(lr=1e-3)) as plan:
        plan.run(lm_batch())


@pytest.mark.parametrize("when", ["in its start", "in a step", "never"])
def test_collectives_that_a_failed_step_has_under_way_end_before_the_device_is_waited_for(monkeypatch, when):
    """A kernel of theirs waits for the other ranks, who have left the step. Of a start that has failed nothing is under way, and
    the process groups serve the next one."""
    said = []
    monkeypatch.setattr(SingleRank, "abort", lambda self: said.append("abort"))
    monkeypatch.setattr(CpuBackend, "drain", lambda self: said.append("drain"))
    plan = slidedp.compile(PlainGPT(), optimizer=slidedp.AdamW(lr=1e-3))
    with monkeypatch.context() as patch:
        if when == "in its start":
            patch.setattr("slidedp.executor.machine.machine.CpuAdam", fail)
        elif when == "in a step":
            patch.setattr(StageRunner, "forward", fail)
        with nullcontext() if when == "never" else pytest.raises(RuntimeError, match="device-side assert"):
            plan.run(lm_batch())
    if when == "in its start":
        assert said == ["drain"]
        plan.run(lm_batch())
        said.clear()
    plan.close()
    assert said == (["abort", "drain"] if when == "in a step" else ["drain"])


@pytest.mark.parametrize("fails", ["send", "receive", "loss"])
def test_a_batch_stays_on_the_device_until_what_is_under_way_there_has_ended(monkeypatch, fails):
    """What the device still reads may be given to nobody else; once the plan is closed it is, whoever keeps the result."""
    there, armed = [], []

    def send(self, value):
        if fails == "send" and len(there) == 7:
            raise RuntimeError("no pinned memory")
        copy = value.clone()
        there.append(weakref.ref(copy))
        return Sent(value, copy)

    def receive(self, sent):
        if fails == "receive" and armed:
            del sent  # this frame is not the plan's
            raise RuntimeError("CUDA error: device-side assert triggered")
        return sent.there

    monkeypatch.setattr(CpuBackend, "send", send)
    monkeypatch.setattr(CpuBackend, "receive", receive)
    plan = slidedp.compile(PlainGPT(), optimizer=slidedp.AdamW(lr=1e-3))
    kept = [plan.run([lm_batch(), lm_batch()])]
    plan.synchronize()
    assert [tensor() for tensor in there] == [None] * 4
    armed.append(True)
    if fails == "loss":
        monkeypatch.setattr(StageRunner, "epilogue", fail)
    with pytest.raises(RuntimeError, match=r"pinned|assert"):
        kept.append(plan.run([lm_batch(), lm_batch()]))
    kept.append(plan)
    assert len(there) > 6
    assert all(tensor() is not None for tensor in there[4:])
    plan.close()
    gc.collect()
    assert [tensor() for tensor in there if tensor() is not None] == []


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_who_keeps_a_failed_plan_its_results_or_its_error_keeps_nothing_of_the_device(monkeypatch, stage):
    """As one does who tries again with a smaller batch, and gives the new plan the name of the old one."""
    made = []
    plan = slidedp.compile(PlainGPT(), optimizer=slidedp.AdamW(lr=1e-3), policy={"act": "retain"})
    kept = [plan, plan.run(lm_batch())]
    plan.synchronize()
    buffers = plan._machine.buffers
    made += [weakref.ref(t) for t in (*buffers._slots.values(), *chain(*buffers._leaves.values()))]
    before = getattr(StageRunner, stage)

    def fail(self, name, *args):
        if name == "L01":
            made.extend(weakref.ref(value) for value in self.values.env.values())
            del args  # this frame is not the plan's
            raise torch.OutOfMemoryError("CUDA out of memory")
        return before(self, name, *args)

    monkeypatch.setattr(StageRunner, stage, fail)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        kept.append((plan.run(lm_batch()), plan.synchronize()))
    kept.append(raised.value)
    assert len(made) > 10
    plan.close()
    gc.collect()
    assert sum(tensor() is not None for tensor in made) == 0
