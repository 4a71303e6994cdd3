"""Parts of `slidedp train` on their own: the rows that it prepares, signals, and metrics."""

from __future__ import annotations

import csv
import json
import os
import re
import signal

import pytest
import torch
import train_cases
from tiny_models import family

import slidedp
from slidedp.training.metrics import Metrics, read_metrics, want_tensorboard
from slidedp.training.packed_rows import Rows, prepare
from slidedp.training.stopping import SIGNALS, StopSignals
from slidedp.training.train import require_documents_apart

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(("seq", "packing", "says"), [
    (8192, "concat", r"data.seq: 8192 tokens a row, but there are 1,\d+ in 1 row: 8\d% of what .* padding; use at most 1\d\d\d"),
    (1024, "concat", ""), (24, "concat", ""), (24, "none", ""),
    (8192, "none", "in 1 row: 8.% of what is computed is padding; use a smaller one, or packing: concat")])  # fmt: skip
def test_rows_that_are_mostly_padding(tmp_path, seq, packing, says):
    (tmp_path / "train.txt").write_text("\n".join(train_cases.words(seed, 12) for seed in range(22)))
    _, facts = prepare(tmp_path / "data", [tmp_path / "train.txt"], train_cases.tiny_tokenizer(), seq=seq, packing=packing,
                       assistant_only=False)
    assert re.search(says, facts.remedy()) if says else not facts.remedy()


def test_a_tokenizer_without_a_vocabulary_is_none(tmp_path):
    """transformers makes one for a Qwen3 without tokenizer files; it finds no token in any text."""
    from transformers import Qwen3Config

    from slidedp.training.model_files import find_model

    Qwen3Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="there is no tokenizer in it"):
        find_model(tmp_path).tokenizer()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_documents_are_as_if_alone(tmp_path, name):
    """Three documents in a row of 24: the loss of the three alone, over all tokens."""
    path, losses = tmp_path / "data.jsonl", []
    path.write_text("\n".join(json.dumps({"text": train_cases.words(seed, 9)[:7]}) for seed in range(6)))
    with slidedp.compile(family(name), "cpu") as plan:
        for packing, seq in (("documents", 24), ("none", 24), ("concat", 24)):
            rows = Rows(*prepare(tmp_path, [path], train_cases.tiny_tokenizer(), seq=seq, packing=packing, assistant_only=False))
            assert len(rows) == (6 if packing == "none" else 2)
            every = list(range(len(rows)))
            losses.append((plan.evaluate(rows.batch(every, len(every))), rows.num_valid(every)))
        (apart, n), (alone, m), (crossing, _) = losses
        assert n == m == 6 * 7
        assert apart == pytest.approx(alone, rel=1e-6)
        assert abs(crossing - alone) > 1e-4
        require_documents_apart(plan, rows.batch(every, 2))


def test_a_model_that_mixes_documents_is_refused():
    class Mixing:
        def evaluate(self, batch):
            return batch["input_ids"].float().mean().item()

    with pytest.raises(ValueError, match="packing: documents: this model's attention crosses"):
        require_documents_apart(Mixing(), {"input_ids": torch.arange(3, 27).view(2, 12)})


def test_a_second_signal_leaves_at_once_but_an_echo_does_not(monkeypatch):
    asked, left, now = [], [], [100.0]
    before = [signal.getsignal(number) for number in SIGNALS]  # a shell has its background jobs ignore SIGINT
    monkeypatch.setattr("slidedp.training.stopping.time.monotonic", lambda: now[0])
    with StopSignals(quiet=True, leave=left.append) as signals:
        signals.save_on_stop(lambda: asked.append(True))
        for wait_s, number in ((0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGINT)):
            now[0] += wait_s
            os.kill(os.getpid(), number)
        assert (asked, left, signals.name) == ([True], [], "SIGTERM")
        now[0] += 2
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_before_there_is_anything_to_save_a_signal_ends_the_process():
    with pytest.raises(SystemExit, match="143"), StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_resumed_run_records_no_step_twice(tmp_path):
    first = Metrics(tmp_path, tensorboard=False)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = Metrics(tmp_path, done=2, tensorboard=False)
    again.write({"step": 3, "loss": 30.0})
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 30.0]
    with (tmp_path / "metrics.csv").open() as file:
        assert [r["loss"] for r in csv.DictReader(file)] == ["1.0", "2.0", "30.0"]
    assert want_tensorboard(False) is False


def test_tensorboard_gets_what_there_is_of_each_step(tmp_path, monkeypatch):
    written = []

    class Board:
        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    monkeypatch.setattr("slidedp.training.metrics.find_spec", lambda name: name)
    opened = lambda folder, done: written.append((folder.name, done)) or Board()  # noqa: E731
    monkeypatch.setattr("slidedp.training.metrics.open_tensorboard", opened)
    metrics = Metrics(tmp_path, done=2)
    metrics.write({"step": 3, "loss": 2.5, "grad_norm": None, "exposed_s": 0.0, "skipped": False})
    metrics.write({"step": 3, "eval_loss": 2.25})
    metrics.close()
    assert written == [("tensorboard", 2), ("train/loss", 2.5, 3), ("train/exposed_s", 0.0, 3), ("eval/loss", 2.25, 3), "closed"]


def test_tensorboard_shows_no_step_twice(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError)
    for done, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        metrics = Metrics(tmp_path, done=done)
        for step in steps:
            metrics.write({"step": step, "loss": float(10 * done + step)})
        metrics.close()
    reader = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
