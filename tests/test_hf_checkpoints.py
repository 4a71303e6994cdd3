"""Checkpoints of SlideTrainer: resumed, the bits of a run that nobody stopped; whole ones only, whenever it is killed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from hf_cases import arguments, bits, differing, dropping, history, rows, train_on_ranks, train_six_steps, trainer, weights
from test_checkpoint import Killed, KilledFiles
from tiny_models import family
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import slidedp
from slidedp.hf import SlideTrainer

pytestmark = pytest.mark.cpu


class Stop(TrainerCallback):
    """Ends the process's part in it after a step, as a crash would: nothing is saved."""

    def __init__(self, after):
        self.after = after

    def on_step_begin(self, args, state, control, **given):
        if state.global_step == self.after:
            raise KeyboardInterrupt


def saving(directory, **changes):
    steps = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    return arguments(directory, **{**steps, **changes})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Ten steps in epochs of four; checkpoints after steps 4 (an epoch's end) and 6."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    trained = trainer(SlideTrainer, dropping(), saving(directory, save_steps=2), train_dataset=rows(16))
    trained.train()
    return trained, directory


@pytest.mark.parametrize("step", [4, 6])
def test_resumed_equals_uninterrupted(uninterrupted, tmp_path, step):
    """At an epoch's end and within one: order of the data, dropout, schedule, moments, what has been logged."""
    want, directory = uninterrupted
    shutil.copytree(directory / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    torch.manual_seed(99)
    got = trainer(SlideTrainer, dropping(seed=5), saving(tmp_path, save_steps=2), train_dataset=rows(16))
    got.train(resume_from_checkpoint=True)
    assert history(got)[:-1] == history(want)[:-1]
    assert got.state.global_step == 10
    assert differing(bits(got), bits(want)) == []
    assert got.optimizer.param_groups[0]["lr"] == want.optimizer.param_groups[0]["lr"]


def test_resumed_as_trainer_resumes(tmp_path):
    """Trainer's own interrupted run and ours, beside each other."""
    made = {}
    for kind in (Trainer, SlideTrainer):
        args = saving(tmp_path / kind.__name__, max_steps=8, eval_strategy="no")  # it would draw random numbers in Trainer
        with pytest.raises(KeyboardInterrupt):
            trainer(kind, dropping(), args, callbacks=[Stop(6)]).train()
        made[kind] = trainer(kind, dropping(), args)
        made[kind].train(resume_from_checkpoint=str(tmp_path / kind.__name__ / "checkpoint-4"))
    plain, slide = made.values()
    assert [s["step"] for s in history(slide)] == [s["step"] for s in history(plain)]
    for mine, theirs in zip(history(slide)[:-1], history(plain)[:-1], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_what_a_checkpoint_is(uninterrupted):
    """One that transformers loads, that a plan resumes, and of which the newest are kept."""
    trained, directory = uninterrupted
    path = directory / "checkpoint-10"
    assert get_last_checkpoint(str(directory)) == str(path)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert differing({n: p.detach() for n, p in loaded.named_parameters()}, weights(trained)) == []
    state = json.loads((path / "trainer_state.json").read_text())
    assert state["global_step"] == 10
    assert [s.get("loss") for s in state["log_history"]] == [s.get("loss") for s in trained.state.log_history[:-1]]
    with slidedp.compile(family("llama", num_hidden_layers=2), "cpu", example=trained._as_batch(batch())) as plan:
        assert plan.resume(path).step == 10


def batch():
    return {key: torch.stack([row[key] for row in rows(2)]) for key in rows(1)[0]}


def test_limits_and_the_best(tmp_path):
    args = saving(tmp_path, save_steps=1, eval_steps=1, save_total_limit=2, load_best_model_at_end=True, max_steps=6,
                  learning_rate=0.2)  # fmt: skip
    trained = trainer(SlideTrainer, dropping(), args)
    trained.train()
    best = trained.state.best_global_step
    assert best < 6
    assert {p.name for p in tmp_path.iterdir()} == {f"checkpoint-{best}", "checkpoint-6"}
    assert trained.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")
    loss = [s["eval_loss"] for s in trained.state.log_history if s["step"] == best and "eval_loss" in s]
    assert trained.evaluate()["eval_loss"] == pytest.approx(loss[0], abs=1e-6)


def test_a_finished_run_resumed_has_its_weights(uninterrupted):
    want, directory = uninterrupted
    got = trainer(SlideTrainer, dropping(seed=5), saving(directory), train_dataset=rows(16))
    got.train(resume_from_checkpoint=True)
    assert differing(weights(got), weights(want)) == []


def test_weights_alone(tmp_path):
    """save_only_model: for a model, not for a resume."""
    trained = trainer(SlideTrainer, dropping(), saving(tmp_path, max_steps=4, save_only_model=True))
    trained.train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", dtype=torch.float32)
    assert differing({n: p.detach() for n, p in loaded.named_parameters()}, weights(trained)) == []
    with pytest.raises(ValueError, match=r"checkpoint-4 is not a checkpoint that SlideTrainer can resume.*from_pretrained"):
        trainer(SlideTrainer, dropping(), saving(tmp_path)).train(resume_from_checkpoint=True)


def test_a_damaged_one_is_named_and_the_one_before_it_used(uninterrupted, tmp_path):
    want, directory = uninterrupted
    for step in (6, 8):
        shutil.copytree(directory / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    moments = next((tmp_path / "checkpoint-8").glob("moments-*"))
    moments.write_bytes(moments.read_bytes()[:-1])
    again = trainer(SlideTrainer, dropping(seed=5), saving(tmp_path, save_steps=2), train_dataset=rows(16))
    with pytest.warns(UserWarning, match="checkpoint-8 is damaged .moments-00001.*trying the one before"):
        again.train(resume_from_checkpoint=True)
    assert differing(bits(again), bits(want)) == []
    (tmp_path / "checkpoint-8" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="checkpoint-8 is damaged"), pytest.raises(ValueError, match="manifest"):
        trainer(SlideTrainer, dropping(), saving(tmp_path)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    with pytest.raises(ValueError, match="no whole checkpoint"):
        trainer(SlideTrainer, dropping(), saving(tmp_path / "elsewhere")).train(resume_from_checkpoint=True)


def test_a_kill_at_every_file_operation_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """One there, a second being saved: Trainer's own search finds the first or the second, with all its files."""
    trained = trainer(SlideTrainer, dropping(), saving(tmp_path / "run", max_steps=2, save_steps=1, save_total_limit=3))
    trained.train()
    run = tmp_path / "run"
    names = {p.name for p in (run / "checkpoint-1").iterdir()}
    assert {"manifest.json", "trainer_state.json", "scheduler.pt", "optimizer.pt", "rng_state.pth"} <= names
    whole = {n: {f.name: f.read_bytes() for f in (run / f"checkpoint-{n}").iterdir()} for n in (1, 2)}
    found = []
    for at in range(200):
        shutil.rmtree(run / "checkpoint-2", ignore_errors=True)
        files = KilledFiles(at)
        for user in ("plan", "hf.checkpoints"):
            monkeypatch.setattr(f"slidedp.{user}.FileLayer", lambda files=files: files)
        try:
            trained._save_checkpoint(trained.model, None)
        except Killed:
            last = get_last_checkpoint(str(run))
            found.append(int(last[-1]))
            for name, content in whole[found[-1]].items():
                if not name.startswith("trainer_state"):  # in which the log goes on
                    assert (run / f"checkpoint-{found[-1]}" / name).read_bytes() == content, (at, name)
            json.loads((run / f"checkpoint-{found[-1]}" / "trainer_state.json").read_text())
            continue
        break
    assert len(found) >= 20
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert {p.name for p in run.iterdir()} == {"checkpoint-1", "checkpoint-2"}  # nothing of the kills is left


def test_a_second_run_into_the_same_directory(tmp_path):
    for seed in (1, 2):
        trained = trainer(SlideTrainer, dropping(), saving(tmp_path, max_steps=2, save_steps=2, eval_strategy="no", seed=seed))
        trained.train()
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-2"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    assert differing({n: p.detach() for n, p in loaded.named_parameters()}, weights(trained)) == []


def test_ranks(run_ranks, tmp_path):
    """Two ranks of 2 rows are one of 4: accelerate deals the rows out, and fills an uneven end up. Resumed (from
    the checkpoint before a damaged one), nobody sees it."""
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    first, second = (r.value for r in run_ranks(train_on_ranks, 2, str(tmp_path), options, timeout=120))
    assert first == second
    assert len(first["uneven"]["history"]) == 8
    assert first["resumed"] == first["uneven"]
    alone = train_six_steps(str(tmp_path / "alone"), 16)
    for mine, theirs in zip(first["even"]["history"], alone["history"], strict=True):
        mine.pop("eval_loss", None)  # Trainer weighs the batches of an evaluation by rows
        assert mine == pytest.approx({key: theirs[key] for key in mine}, rel=1e-4)
    assert first["even"]["sums"] == pytest.approx(alone["sums"], rel=1e-4)
