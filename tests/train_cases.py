"""A tiny model, tokenizer and text for tests of ``slidedp train``, and what their rank processes run."""

from __future__ import annotations

import itertools
import os
import random
import signal
import string
import threading
from pathlib import Path
from typing import Any

import torch
import yaml

import slidedp
from slidedp.commands.cli import main
from slidedp.training.loader import StatefulLoader

TEMPLATE = ("{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}|{% endfor %}"
            "{% if add_generation_prompt %}<a>{% endif %}")  # fmt: skip
"""A chat: ``<u>hello|<a>world|``."""


def tiny_tokenizer() -> Any:
    """A token a character, of printable ASCII; <s> and </s> besides."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *string.printable[:95], "\n"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   chat_template=TEMPLATE)


def words(seed: int, count: int) -> str:
    """Nonsense that is no two times the same."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(count))


def make_folder(folder: Path, **dropout: float) -> Path:
    """A folder with a tiny model and its tokenizer, another model without one, text to train on, and text that is held out."""
    from tiny_models import family  # every family's classes: a rank process needs none of it

    model = family("llama", **dropout)
    model.save_pretrained(folder / "model")
    model.config.save_pretrained(folder / "bare")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "train.txt").write_text("\n".join(words(seed, 12) for seed in range(22)))
    (folder / "heldout.txt").write_text(words(99, 40))
    return folder


def config(folder: Path, output: str = "out", **changes: Any) -> Path:
    """A config of 20 steps in `folder`; it has more of them than the data has in an epoch, whose last batch is short."""
    content = {
        "model": "model", "output": output, "data": {"train": "train.txt", "heldout": "heldout.txt", "seq": 24}, "batch": 4,
        "steps": 20, "optimizer": {"lr": "1e-2"}, "schedule": {"name": "cosine", "warmup": 3}, "evaluate_every": 8,
        "plan": {"hw": "cpu", "update_kernel": "torch", "device": "cpu"}, "seed": 5, **changes,
    }  # fmt: skip
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def hang_in_loader(path: str, step: int) -> int:
    """`slidedp train`; the batch of `step` never comes to rank 1, or not for ten minutes."""
    load, calls = StatefulLoader.batches, itertools.count(1)

    def hanging(loader: StatefulLoader, indices: Any) -> Any:
        if next(calls) == step and loader.split.rank == 1:
            threading.Event().wait(600)
        return load(loader, indices)

    StatefulLoader.batches = hanging  # type: ignore[method-assign]
    return main(["train", path])


def run_until(path: str, step: int, number: int, on_rank: int = 0) -> int:
    """`slidedp train`, whose rank `on_rank` sends itself the signal `number` in the middle of `step`, once its loss is known."""
    torch.set_num_threads(1)
    run, rank = slidedp.Plan.run, int(os.environ.get("RANK", "0"))

    def signalled(plan: slidedp.Plan, batch: Any) -> slidedp.StepResult:
        result = run(plan, batch)
        if result.step == step and rank == on_rank:
            os.kill(os.getpid(), signal.Signals(number))
        return result

    slidedp.Plan.run = signalled  # type: ignore[method-assign]
    try:
        return main(["train", path])
    finally:
        slidedp.Plan.run = run  # type: ignore[method-assign]


def run_until_one_dies(path: str, step: int) -> int:
    """`slidedp train` in ranks that torchrun started: rank 1 dies in `step`. A SIGTERM after the end of it all does nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the command handles it, and from then on again
    return run_until(path, step, int(signal.SIGKILL), 1)
