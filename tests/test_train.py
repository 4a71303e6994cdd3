"""`slidedp train`: an interrupted run ends where an uninterrupted one ends, to the bit; ranks that stop, together or alone."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import train_cases
from safetensors.torch import load_file
from train_cases import config, make_folder

from slidedp.commands.cli import main
from slidedp.executor.checkpoints.checkpoint_files import complete
from slidedp.training.metrics import read_metrics

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The model and the texts, and `whole`: the output of 20 steps without interruption."""
    folder = make_folder(tmp_path_factory.mktemp("train"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["train", str(config(folder, "whole", checkpoint={"every": 10}))]) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits are compared with those of processes that have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def figures(output: Path) -> list[tuple]:
    """Step, place in the data, loss, norm and rate of each step; held-out losses."""
    records = read_metrics(output / "metrics.jsonl")
    return [tuple(r.get(key) for key in ("step", "epoch", "loss", "grad_norm", "lr", "num_tokens", "eval_loss")) for r in records]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def moments(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(checkpoint.glob("moments-*")) for k, v in load_file(path).items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def one_error(capsys) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# ---- one rank ----


def test_what_a_run_leaves(base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = base / "whole"
    records = read_metrics(output / "metrics.jsonl")
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 21))
    assert [r["step"] for r in records if "eval_loss" in r] == [8, 16, 20]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert [r["lr"] for r in steps[:4]] == pytest.approx([0, 1e-2 / 3, 2e-2 / 3, 1e-2])
    assert steps[-1]["epoch"] > 1, "the test is to see the end of an epoch"
    assert all(0 <= r["exposed_s"] < r["wall_s"] for r in steps)
    assert min(r["num_tokens"] for r in steps) < max(r["num_tokens"] for r in steps), "and a short batch"
    with (output / "metrics.csv").open() as file:
        assert [float(r["loss"]) for r in csv.DictReader(file) if r["loss"]] == [r["loss"] for r in steps]
    assert [p.name for p in complete(output / "checkpoints")] == ["step-00000020", "step-00000010"]
    model = AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)
    assert same_bits(dict(model.state_dict()), weights(output))
    assert AutoTokenizer.from_pretrained(output / "model").decode([10, 11, 12]) == "789"


def test_the_first_steps_are_those_of_plain_pytorch(base):
    """Data, loss, schedule and clipping together: what a plain loop over the same rows gives."""
    from transformers import AutoModelForCausalLM, get_scheduler

    from slidedp.training.loader import Split, StatefulLoader
    from slidedp.training.packed_rows import Facts, Rows

    rows = [Rows(path.parent, Facts(**json.loads(path.read_text()))) for path in (base / "whole/data").glob("*/facts.json")]
    loader = StatefulLoader(max(rows, key=len), Split(4, 4), seed=5)
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32).train()
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2,
                             betas=(0.9, 0.95), foreach=False)
    scheduler, want = get_scheduler("cosine", adam, 3, 20), []
    for step in range(1, 13):
        ((batch,), rate) = next(loader), adam.param_groups[0]["lr"]
        loss = model(**batch, use_cache=False).loss
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        scheduler.step()
        want.append((step, loss.item(), norm.item(), rate))
    got = [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in read_metrics(base / "whole/metrics.jsonl") if "loss" in r]
    assert got[:12] == want


def test_interrupted_by_sigterm_and_resumed(base, run_ranks):
    """A process of its own, stopped by a signal in mid-epoch, in step 6; it finishes that step."""
    output, path = base / "stopped", config(base, "stopped", checkpoint={"every": 10})
    (done,) = run_ranks(train_cases.run_until, 1, str(path), 6, int(signal.SIGTERM))
    assert done.value == 0
    assert "SIGTERM: saving after the step under way" in done.output
    assert "stopped by SIGTERM after step 6 of 20" in done.output
    assert [p.name for p in complete(output / "checkpoints")] == ["step-00000006"]
    assert not (output / "model").exists()
    assert main(["train", str(path)]) == 0
    assert figures(output) == figures(base / "whole")
    assert same_bits(weights(output), weights(base / "whole"))
    assert same_bits(moments(output / "checkpoints/step-00000020"), moments(base / "whole/checkpoints/step-00000020"))


@pytest.mark.parametrize("step", [8, 14, 20])
def test_interrupted_anywhere(base, step):
    """Where an evaluation is due; at an epoch's end; and at the last step, whose model comes on the resume."""
    output, path = base / f"at{step}", config(base, f"at{step}", checkpoint={"every": 10, "keep": 1})
    assert train_cases.run_until(str(path), step, int(signal.SIGINT)) == 0
    assert [p.name for p in complete(output / "checkpoints")] == [f"step-{step:08d}"]
    assert not (output / "model").exists()
    assert main(["train", str(path)]) == 0
    assert figures(output) == figures(base / "whole")
    assert same_bits(weights(output), weights(base / "whole"))


def test_accumulated_micro_batches_are_one_batch(base):
    """Interrupted in mid-epoch, too, whose last step has a micro-batch of rows that do not count: 22 rows, 4 a step."""
    output, path = base / "parts", config(base, "parts", batch=1, accumulate=4, checkpoint={"every": 10})
    assert train_cases.run_until(str(path), 9, int(signal.SIGINT)) == 0
    assert len(figures(output)) < 12
    assert main(["train", str(path)]) == 0
    got, want = figures(output), figures(base / "whole")
    assert [(*f[:2], *f[4:6]) for f in got] == [(*f[:2], *f[4:6]) for f in want], "place in the data, rate and tokens"
    assert [f[2:4] for f in got[:2]] == [pytest.approx(f[2:4], rel=1e-6) for f in want[:2]], "from the same weights"
    assert [f[2] or f[6] for f in got] == pytest.approx([f[2] or f[6] for f in want], rel=1e-4)


def test_a_finished_run_is_not_run_again(base, capsys):
    """And its model is not loaded; but for one that has been stopped before its model was written."""
    before, output = figures(base / "whole"), base / "whole"
    path = str(config(base, "whole", checkpoint={"every": 10}))
    assert main(["train", path]) == 0
    said = capsys.readouterr().out
    assert f"step 20 of 20 is done, and {output / 'model'} written: there is nothing left to do" in said
    assert "loading" not in said
    (output / "model/slidedp.json").write_text('{"step": 10}')
    assert main(["train", path]) == 0
    assert f"going on from {output / 'checkpoints/step-00000020'}" in capsys.readouterr().out
    assert json.loads((output / "model/slidedp.json").read_text()) == {"step": 20}
    assert figures(base / "whole") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": False}, "resume: false, but .*up to step 20; use resume: auto, or another output"),
        ({"resume": "whole/checkpoints/step-00000010"}, "is of step 10, but .* up to step 20"),
        ({"resume": "nowhere"}, "resume: .*nowhere is no directory; name a checkpoint or a directory of them, or"),
        ({"resume": "model"}, "resume: .*model holds no complete checkpoint; name"),
        ({"seed": 6}, "another seed: 5 there, 6 here"),
        ({"batch": 2}, "of 4 sequences, this run's of 2 .*set global_batch: 4"),
        ({"data": {"train": "train.txt", "heldout": "heldout.txt", "seq": 32}}, "another data.seq: 24 there, 32 here; put it"),
        ({"data": {"train": "heldout.txt", "heldout": "heldout.txt", "seq": 24}}, "another data .its files, tokenizer or"),
        ({"model": "bare"}, "model .*bare: there is no tokenizer in it .tokenizer.json, .*save_pretrained"),
        ({"model": "nowhere"}, "model .*nowhere: expected a GGUF file, or a directory"),
        ({"schedule": {"name": "triangle"}}, "schedule.name: 'triangle' is unknown; allowed: linear, cosine"),
        ({"schedule": {"name": "cosin"}}, "schedule.name: 'cosin' is unknown; closest: 'cosine'; allowed: linear"),
        ({"data": {"train": "train.txt", "packing": "concatt"}, "evaluate_every": None}, "'concatt' is unknown; closest: 'conc"),
        ({"schedule": {"name": "cosine", "options": {"wobble": 1}}}, "schedule.options: cosine does not take them"),
        ({"log": {"tensorboard": True}}, "tensorboard is not installed; pip install tensorboard"),
        ({"data": {"train": "none.txt"}, "evaluate_every": None}, "none.txt: cannot be read"),
        ({"bacth": 1}, r"whole\.yaml: unknown key 'bacth'; closest: 'batch'"),
    ],
)
def test_mistakes_are_one_line(base, capsys, changes, message, monkeypatch):
    monkeypatch.setattr("slidedp.training.metrics.find_spec", lambda name: None)
    before = (base / "whole/metrics.jsonl").read_bytes()
    monkeypatch.setattr("slidedp.training.train.compile", lambda *args, **options: pytest.fail("mistakes are seen before"))
    assert main(["train", str(config(base, "whole", **changes))]) == 2
    assert re.search(message, one_error(capsys))
    assert (base / "whole/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("name", "says"), [("linear", True), ("constant_with_warmup", False)])
def test_another_number_of_steps_is_another_schedule(base, capsys, name, says):
    """A resumed run whose rates are others from there on says so, and only such a one."""
    options = {"schedule": {"name": name, "warmup": 2}, "evaluate_every": None, "checkpoint": {"every": 3}}
    assert main(["train", str(config(base, f"longer-{name}", steps=3, **options))]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["train", str(config(base, f"longer-{name}", steps=6, **options))]) == 0
    said = capsys.readouterr().out
    assert "step 3 of 6" in said
    told = "a run of 6 steps now, of 3 until step 3: from here on the learning rates are those that the linear schedule has"
    assert (told in said) == says


def test_another_learning_rate_on_a_resume_is_said_not_to_count(base, capsys):
    options = {"schedule": {"name": "constant"}, "evaluate_every": None, "checkpoint": {"every": 2}}
    assert main(["train", str(config(base, "rate", steps=2, **options))]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["train", str(config(base, "rate", steps=4, optimizer={"lr": 3e-2}, **options))]) == 0
    assert "warning: optimizer.lr is 0.03 here, but the run that is gone on with has 0.01, which stays" in capsys.readouterr().out
    assert {r["lr"] for r in read_metrics(base / "rate/metrics.jsonl") if "loss" in r} == {1e-2}



@pytest.mark.parametrize("name", ["constant", "linear", "warmup_stable_decay"])
def test_schedules_by_name(base, name):
    output = base / name
    path = config(base, name, steps=10, schedule={"name": name, "warmup": 0.2}, evaluate_every=None, max_grad_norm=None)
    assert main(["train", str(path)]) == 0
    lrs = [r["lr"] for r in read_metrics(output / "metrics.jsonl") if "loss" in r]
    assert lrs[0] == (1e-2 if name == "constant" else 0)
    assert lrs[4] == pytest.approx(1e-2 if name != "linear" else 1e-2 * 6 / 8)
    assert (lrs[-1] < 1e-2) == (name == "linear")


# ---- several ranks ----


def test_a_signal_to_one_rank_stops_both_and_one_goes_on(base, run_ranks):
    """Saved on two ranks after the same step; the data goes on in the same order on one, from the very bits."""
    path = config(base, "pair", batch=2, checkpoint={"every": 20})
    zero, one = run_ranks(train_cases.run_until, 2, str(path), 7, int(signal.SIGTERM), 1)
    assert (zero.value, one.value) == (0, 0)
    assert "stopped by a signal to another rank after step 7 of 20" in zero.output
    (saved,) = complete(base / "pair/checkpoints")
    assert saved.name == "step-00000007"
    pair, alone = figures(base / "pair"), {"global_batch": 4, "batch": 4, "checkpoint": {"every": 20}}
    silent = {"data": {"train": "train.txt", "seq": 24}, "evaluate_every": None}
    assert main(["train", str(config(base, "pair", **alone, **silent, steps=7))]) == 0
    loaded = {k: v for path in saved.glob("model-0*") for k, v in load_file(path).items()}
    assert same_bits(weights(base / "pair"), loaded)
    assert main(["train", str(config(base, "pair", **alone))]) == 0
    assert figures(base / "pair")[:7] == pair[:7]
    for got, want in zip(figures(base / "pair"), figures(base / "whole"), strict=True):
        assert got[:2] == want[:2]
        assert got[4:6] == want[4:6], "the learning rate, and tokens: those of the same rows"
        assert (got[2] or got[6]) == pytest.approx(want[2] or want[6], rel=1e-4)


@pytest.mark.parametrize("every", [None, 5])
def test_a_rank_that_dies_is_named_though_a_signal_comes_too(base, start_ranks, every):
    """What torchrun does: rank 1 dies, rank 0 gets a SIGTERM. There is nothing to save with, also in the middle of a save."""
    path = config(base, f"dead{every}", batch=2, checkpoint={"every": every})
    ranks = start_ranks(train_cases.run_until_one_dies, 2, str(path), 5)
    deadline = time.monotonic() + 90
    while ranks.processes[1].poll() is None and time.monotonic() < deadline:  # not rank 0: it may end, but stays to be signalled
        time.sleep(0.02)
    os.kill(ranks.pids[0], signal.SIGTERM)
    zero, one = ranks.wait(60, check=False)
    assert one.returncode == -signal.SIGKILL
    assert zero.value == 1
    assert "error (rank 0): rank 1 (pid" in zero.output
    assert not complete(base / f"dead{every}/checkpoints")


def test_a_rank_that_hangs_in_its_loader_stops_the_others(base, start_ranks):
    plan = {"hw": "cpu", "update_kernel": "torch", "device": "cpu", "peer_timeout_s": 4}
    ranks = start_ranks(train_cases.hang_in_loader, 2, str(config(base, "hung", batch=2, plan=plan)), 3)
    deadline = time.monotonic() + 90
    while ranks.poll()[0] is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ranks.poll()[1] is None, "still in its loader"
    assert "error (rank 0): rank 1 hangs in its data loader, at train_cases.py:" in ranks.output(0)
    assert "others have had their batch after step 2 for" in ranks.output(0)
