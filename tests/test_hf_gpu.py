"""SlideTrainer on a CUDA device: the plan trains and evaluates there, and logits come from there too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_cases import arguments, history, rows, trainer
from tiny_models import family
from transformers import Trainer

from slidedp.hf import SlideTrainer

pytestmark = pytest.mark.gpu


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_beside_trainer_on_the_same_device(tmp_path, name):
    """FP32 on both: losses, norms, rates, evaluations with metrics, predictions."""
    made = []
    for kind in (Trainer, SlideTrainer):
        args = arguments(tmp_path / kind.__name__, use_cpu=False, eval_strategy="steps", eval_steps=4, save_strategy="steps",
                         save_steps=5)  # fmt: skip
        own = {"plan_options": {}} if kind is SlideTrainer else {}
        made.append(trainer(kind, family(name), args, compute_metrics=accuracy, **own))
        made[-1].train()
    plain, slide = made
    assert slide.plan._settings.device.type == "cuda"
    assert {p.device.type for p in slide.model.parameters()} == {"cpu"}
    for mine, theirs in zip(history(slide), history(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    got, want = slide.predict(rows(6)), plain.predict(rows(6))
    assert np.allclose(got.predictions, want.predictions, atol=1e-2)
    resumed = trainer(SlideTrainer, family(name, seed=3), slide.args, compute_metrics=accuracy, plan_options={})
    resumed.train(resume_from_checkpoint=str(tmp_path / "SlideTrainer" / "checkpoint-5"))
    assert history(resumed)[-2] == pytest.approx(history(slide)[-2], rel=1e-4)


def test_bf16(tmp_path):
    made = trainer(SlideTrainer, family("llama"), arguments(tmp_path, use_cpu=False, bf16=True), compute_metrics=accuracy,
                   plan_options={})  # fmt: skip
    made.train()
    assert made.plan._settings.compute_dtype is torch.bfloat16
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    metrics = made.evaluate()
    made.compute_metrics = None
    assert made.evaluate()["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-2)  # the plan's, and the module's
