"""The configuration of a training run: what is wrong is named, with the key, the closest known one and the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from slidedp.training.config import TrainConfig, load_config

pytestmark = pytest.mark.null

WHOLE = "model: m\noutput: out\ndata: {train: text.txt}\n"


def read(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path)


def test_the_smallest_config_and_its_defaults(tmp_path):
    config = read(tmp_path, WHOLE)
    assert config.model == tmp_path / "m"
    assert config.data.train == (tmp_path / "text.txt",)
    assert (config.batch, config.steps, config.resume, config.data.packing) == (1, None, "auto", "concat")
    assert config.sequences_a_step(num_ranks=3) == 3


def test_everything_at_once(tmp_path):
    config = read(tmp_path, """
model: /models/m
output: ../out
data: {train: [a.jsonl, sub/b.txt], heldout: h.txt, seq: 64, packing: none, assistant_only: true, shuffle: false}
batch: 2
global_batch: 16
epochs: 3
optimizer: {lr: 1e-4, betas: [0.9, 0.99], eps: 1.0e-6, weight_decay: 0, no_decay: [bias]}
schedule: {name: warmup_stable_decay, warmup: 0.03, options: {num_decay_steps: 5}}
max_grad_norm: null
plan: {hw: my.yaml, policy: {act: retain}, hbm_budget: 20GiB, host_budget: 1000, compute_dtype: float32}
evaluate_every: 5
checkpoint: {every: 10, keep: 3}
resume: false
log: {every: 1, tensorboard: false}
""")
    assert config.model == Path("/models/m")
    assert config.data.train == (tmp_path / "a.jsonl", tmp_path / "sub/b.txt")
    assert config.optimizer.describe().lr == 1e-4
    assert config.schedule.warmup_steps(1000) == 30
    assert config.plan.hw == str(tmp_path / "my.yaml")
    assert config.plan.policy == {"act": "retain"}
    assert config.max_grad_norm is None
    assert config.resume is False
    assert config.sequences_a_step(num_ranks=4) == 16
    assert read(tmp_path, WHOLE + "resume: old\nplan: {policy: p.yaml}").resume == tmp_path / "old"
    assert read(tmp_path, WHOLE + "plan: {policy: p.yaml}").plan.policy == tmp_path / "p.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bacth: 2", r"run\.yaml: unknown key 'bacth'; closest: 'batch'; allowed: model, output"),
        ("lr: 2", r"run\.yaml: unknown key 'lr'; closest: 'optimizer\.lr'"),
        ("optimizer: {learning: 1}", r"run\.yaml: optimizer: unknown key 'learning'; allowed: lr, betas"),
        ("checkpoint: {evry: 1}", r"run\.yaml: checkpoint: unknown key 'evry'; closest: 'every'"),
        ("batch: two", r"run\.yaml: batch: expected a whole number, got 'two' \(str\)"),
        ("batch: true", r"run\.yaml: batch: expected a whole number, got True"),
        ("batch: 0", r"run\.yaml: batch: 0 is less than 1"),
        ("batch:", r"run\.yaml: batch: expected a whole number, got nothing"),
        ("optimizer: {lr: fast}", r"run\.yaml: optimizer: lr: expected a number, got 'fast'"),
        ("optimizer: {betas: [0.9]}", r"optimizer: betas: expected 2 values, got 1"),
        ("optimizer: {betas: [0.9, 1]}", r"run\.yaml: optimizer: AdamW\.betas\[1\]: expected a number in \[0, 1\)"),
        ("steps: 1\nepochs: 1", r"run\.yaml: steps and epochs: give one of them"),
        ("accumulate: 1\nglobal_batch: 1", "accumulate and global_batch: give one of them"),
        ("schedule: {warmup: 2.5}", r"run\.yaml: schedule: warmup: 2\.5 is neither"),
        ("plan: {hbm_budget: much}", r"run\.yaml: plan: hbm_budget: 'much' is not a size"),
        ("plan: {update_kernel: quick}", "plan: update_kernel: 'quick' is unknown; allowed: auto, native, torch"),
        ("plan: {policy: 3}", "plan: policy: expected a path or a mapping, got 3"),
        ("resume: true", "resume: expected auto, false or a path, got True"),
        ("evaluate_every: 3", "evaluate_every: there is nothing to evaluate on"),
        ("max_grad_norm: 0", "max_grad_norm: 0 is not a limit"),
        ("log: {tensorboard: maybe}", "log: tensorboard: expected true or false, got 'maybe'"),
        ("log: 3", "log: expected a mapping, got 3"),
        ("batch: 1\nbatch: 2", "key 'batch' is given twice"),
    ],
)
def test_mistakes(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, WHOLE + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing key 'model'"),
        ("model: m\noutput: o\ndata: {}", "data: missing key 'train'"),
        ("model: m\noutput: o\ndata: {train: []}", "data: train: name at least one file"),
        ("model: m\noutput: o\ndata: {train: a.txt, packing: tight}",
         "packing: 'tight' is unknown; allowed: concat, documents, none"),
        ("[1]", "expected a mapping"),
        ("model: {", "not valid YAML"),
        ("model: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_what_is_no_config(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)
