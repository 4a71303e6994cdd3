"""What becomes of a plan that has failed, on one rank: nothing goes on with a step left out, and closed it keeps nothing."""

from __future__ import annotations

import pytest
import torch
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
