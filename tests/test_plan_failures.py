"""What becomes of a plan that has failed, on one rank: nothing goes on with a step left out, and closed it keeps nothing."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from tiny_models import PlainGPT, lm_batch

import slidedp
from slidedp.executor.backend import CpuBackend

pytestmark = pytest.mark.cpu


def failing(monkeypatch, method: str) -> None:
    def fail(self, *args):
        raise RuntimeError("CUDA error: device-side assert triggered")

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
