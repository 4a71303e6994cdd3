"""On a CUDA device: a save beside training reads state from HBM and host alike, as it was when the save began."""

from __future__ import annotations

import pytest
from async_save_cases import OPTIMIZER, SMALL, HeldFiles, files_of
from tiny_models import PlainGPT, lm_batch

import slidedp

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("policy", [{}, {"state": "hbm"}, {"layers": {"L01": {"state": "hbm"}}}, {"update": "deferred"}],
                         ids=["host", "hbm", "mixed", "deferred"])
def test_same_bytes(tmp_path, monkeypatch, policy):
    with slidedp.compile(PlainGPT(), optimizer=OPTIMIZER, device="cuda", policy={"chunks": 2} | policy) as plan:
        for step in range(2):
            plan.run(lm_batch(seed=step, batch=4))
        alone = plan.save(tmp_path / "alone")
        files = HeldFiles()
        monkeypatch.setattr("slidedp.plan.FileLayer", lambda: files)
        handle = plan.save(tmp_path / "beside", wait=False, save_buffer=SMALL)
        plan.run(lm_batch(seed=2, batch=4))
        files.release(handle)
        for step in range(3, 6):
            plan.run(lm_batch(seed=step, batch=4))
        assert files_of(handle.wait()) == files_of(alone)
        assert handle.stall_s > 0
