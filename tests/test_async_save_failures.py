"""Saving beside training that fails: it is told, and harms neither training nor older checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from async_save_cases import OPTIMIZER, POLICIES, SMALL, FullDisk, compiled, files_of
from test_checkpoint import Killed, KilledFiles
from tiny_models import lm_batch
from torch import nn

import slidedp
from slidedp.checkpoints import find
from slidedp.executor.checkpoints.checkpoint_files import complete
from slidedp.executor.checkpoints.snapshot import SMALLEST_BUFFER_BYTES
from slidedp.executor.errors import CheckpointError
from slidedp.saving import start_save

pytestmark = pytest.mark.cpu


def test_bad_arguments_begin_nothing(tmp_path):
    with compiled({}) as plan:
        plan.run(lm_batch())
        with pytest.raises(ValueError, match="save_buffer=100 bytes: at least"):
            plan.save(tmp_path, wait=False, save_buffer=100)
        with pytest.raises(ValueError, match="JSON"):
            plan.save(tmp_path, wait=False, extra={"x": object()})
        plan.run(lm_batch())
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").write_text("not a folder")
        said = "no checkpoint can be written into .*file/here: Not a directory .*; let this process create and write it, or save"
        for wait in (True, False):
            with pytest.raises(CheckpointError, match=said):
                plan.save(tmp_path / "file/here", wait=wait)
        plan.run(lm_batch())


@pytest.mark.parametrize("heard", ["run", "save", "close", "wait"])
def test_a_full_disk_is_told_once_and_harms_nothing(tmp_path, monkeypatch, heard):
    with compiled({"chunks": 3}) as plan:
        plan.run(lm_batch(seed=0))
        older = plan.save(tmp_path)
        plan.run(lm_batch(seed=1))
        monkeypatch.setattr("slidedp.plan.FileLayer", FullDisk)
        handle = plan.save(tmp_path, wait=False, save_buffer=SMALL)
        monkeypatch.undo()
        handle._ended.wait()
        again = {"run": lambda: plan.run(lm_batch(seed=2)), "save": lambda: plan.save(tmp_path), "close": plan.close,
                 "wait": handle.wait}[heard]
        with pytest.raises(CheckpointError, match=r"saving .*step-00000002 has failed: .*No space left on device"):
            again()
        assert complete(tmp_path) == [older]
        assert (tmp_path / "latest").read_text() == "step-00000001\n"
        if heard != "close":
            assert plan.run(lm_batch(seed=2)).step == 3
            assert plan.save(tmp_path, wait=False).wait().name == "step-00000003"
            assert not list(tmp_path.glob(".*"))


def test_a_full_disk_holds_up_no_update(tmp_path, monkeypatch):
    """It fills while updates wait for the buffer."""
    monkeypatch.setattr("slidedp.plan.FileLayer", lambda: FullDisk(room=12))
    with compiled({"chunks": 3}) as plan:
        plan.run(lm_batch(seed=0))
        plan.save(tmp_path, wait=False, save_buffer=SMALLEST_BUFFER_BYTES)
        with pytest.raises(CheckpointError, match="No space"):
            run_many(plan)
        plan.synchronize()


def run_many(plan):
    for step in range(1000):
        plan.run(lm_batch(seed=step))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class KilledBeside(KilledFiles):
    """Dies at operations of the save beside training too, a write half way."""

    def open(self, path):
        self._tick()
        return super().open(path)

    def write_at(self, fd, data, offset):
        try:
            self._tick()
        except Killed:
            super().write_at(fd, data[: data.nbytes // 2], offset)
            raise
        super().write_at(fd, data, offset)


def squared(out, batch):
    return out.square().sum(), out.numel()


def test_a_kill_at_every_file_operation(tmp_path):
    """One checkpoint there, a second being saved while a step runs: whatever it dies at, one of the two is found, whole."""
    batch = {"x": torch.randn(4, 8)}
    model = Two()
    folders, found, at, ops = {}, [], 0, 0
    with slidedp.compile(copy.deepcopy(model), "cpu", loss_fn=squared, optimizer=OPTIMIZER) as plan:
        for step in (1, 2):
            plan.run(batch)
            folders[step] = files_of(plan.save(tmp_path / "whole"))
            if step == 1:
                one = plan.save(tmp_path / "one")
    assert one.name == "step-00000001"
    with slidedp.compile(copy.deepcopy(model), "cpu", loss_fn=squared, optimizer=OPTIMIZER, example=batch) as plan:
        while True:
            directory = tmp_path / str(at)
            for path in one.iterdir():
                (target := directory / one.name / path.name).parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(path)
            plan.resume(tmp_path / "whole")
            files = KilledBeside(at)
            try:
                handle = start_save(plan._machine, plan.decisions, directory, None, 1, files, plan.optimizer.settings(), SMALL)
                if at % 7 == 0:
                    plan.run(batch)
                handle.wait()
            except Killed:
                found.append(whole(directory, folders, plan))
                at += 1
                continue
            break
        assert whole(directory, folders, plan) == 2
        ops = files.done
        assert [p.name for p in complete(directory)] == ["step-00000002"]
        assert not list(directory.glob(".*"))
    assert len(found) == ops >= 25
    assert found == sorted(found)
    assert set(found) == {1, 2}


def whole(directory, folders, plan):
    """The step of the checkpoint that a resume would take; its files are those of the save that nobody killed."""
    checkpoint = find(directory, plan._collectives)
    assert checkpoint.passed_over == ()
    assert files_of(checkpoint.path) == folders[checkpoint.step]
    return checkpoint.step


def test_an_error_of_the_user_is_not_hidden_by_a_save_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("slidedp.plan.FileLayer", FullDisk)
    def train():
        with compiled(POLICIES["host"]) as plan:
            plan.run(lm_batch())
            plan.save(tmp_path, wait=False)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as raised:
        train()
    assert "No space left" in "".join(raised.value.__notes__)
