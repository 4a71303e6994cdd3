"""Trainer's arguments in SlideTrainer: which optimizer and schedule they make, and which are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_cases import arguments, trainer
from tiny_models import PlainGPT, family
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType

import slidedp
from slidedp.hf import SlideTrainer
from slidedp.hf.arguments import adamw, refuse_arguments

pytestmark = pytest.mark.cpu

LLAMA = family("llama", num_hidden_layers=2)
CHECKPOINTING = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"


def test_weight_decay_goes_where_trainer_lets_it(tmp_path):
    """Also where one parameter's name is part of another's, which no substring could tell apart."""
    model = PlainGPT(layers=2)
    model.postnorm = torch.nn.Linear(32, 32, bias=False)  # no LayerNorm, and none by Trainer's patterns, but for "norm.weight"
    plain = trainer(Trainer, model, arguments(tmp_path))
    decayed, exempt = plain.create_optimizer().param_groups
    names = {id(p): name for name, p in plain.model.named_parameters()}
    described = adamw(plain.args, plain.model, plain.get_decay_parameter_names(plain.model))
    assert {n for n in names.values() if described.decays(n)} == {names[id(p)] for p in decayed["params"]}
    assert {n for n in names.values() if not described.decays(n)} == {names[id(p)] for p in exempt["params"]}
    assert "postnorm.weight" in {names[id(p)] for p in decayed["params"]}


@pytest.mark.parametrize(("name", "value", "remedy"), [
    ("bf16_full_eval", True, "bf16=True"),
    ("torch_compile", True, "leave it out"),
    (CHECKPOINTING, True, "recompute"),
    ("optim", "adafactor", "adamw_torch"),
    ("optim_args", "a=1", "adam_beta1"),
    ("auto_find_batch_size", True, "slidedp plan"),
    ("neftune_noise_alpha", 5.0, "leave it out"),
    ("torch_empty_cache_steps", 5, "leave it out"),
    ("use_liger_kernel", True, "liger-kernel"),
    ("enable_jit_checkpoint", True, "save_steps"),
    ("debug", "underflow_overflow", "debug with transformers.Trainer"),
    ("ddp_find_unused_parameters", True, "reduces gradients itself"),
])  # fmt: skip
def test_refused_arguments_are_named_with_a_remedy(tmp_path, name, value, remedy):
    with pytest.raises(ValueError, match=rf"{name}=.*not supported by SlideTrainer.*{remedy}"):
        trainer(SlideTrainer, LLAMA, arguments(tmp_path, **{name: value}))


def test_processes_that_trainer_does_not_know_of(tmp_path, monkeypatch):
    """As torchrun's are on a CPU without use_cpu=True."""
    args = arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started, but TrainingArguments knows of 1: .* use_cpu=True"):
        refuse_arguments(args)


@pytest.mark.parametrize(("name", "value"), [("fp16", True), ("deepspeed", "zero3.json"), ("fsdp", "full_shard"),
                                             ("fsdp_config", {"version": 2}), ("parallelism_config", "tp"), ("debug", "tpu")])
def test_refused_arguments_that_need_other_machines_to_be_made(tmp_path, name, value):
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"{name}=.*not supported by SlideTrainer"):
        trainer(SlideTrainer, LLAMA, args)


class OfTwoRanks(TrainingArguments):
    world_size = property(lambda self: 2)


@pytest.mark.parametrize(("changes", "said"), [
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
    ({}, r"2 GPUs in one process.*torchrun --nproc-per-node 2"),
])  # fmt: skip
def test_refused_on_several_ranks_or_gpus(tmp_path, changes, said):
    args = OfTwoRanks(str(tmp_path), use_cpu=True, **changes)
    args._n_gpu = 1 if changes else 2
    with pytest.raises(ValueError, match=said):
        refuse_arguments(args)


class OwnLoss(SlideTrainer):
    def compute_loss(self, *args, **given):
        return super().compute_loss(*args, **given)


@pytest.mark.parametrize(("make", "said"), [
    (lambda args: SlideTrainer(args=args, model_init=lambda: LLAMA), "model_init= is not supported"),
    (lambda args: SlideTrainer(LLAMA, args, optimizers=(torch.optim.SGD(LLAMA.parameters()), None)), "optimizers="),
    (lambda args: SlideTrainer(LLAMA, args, optimizer_cls_and_kwargs=(torch.optim.SGD, {})), "optimizer_cls_and_kwargs="),
    (lambda args: OwnLoss(LLAMA, args), "OwnLoss.compute_loss would never be called.*compute_loss_func="),
    (lambda args: SlideTrainer(copy.deepcopy(LLAMA).half(), args), "float16"),
    (lambda args: SlideTrainer(LLAMA, args, plan_options={"max_grad_norm": 1.0}), r"TrainingArguments\(max_grad_norm"),
    (lambda args: SlideTrainer(LLAMA, args, plan_options={"polcy": {}}), "polcy.*not an argument.*policy"),
    (lambda args: SlideTrainer(LLAMA, args).hyperparameter_search(), "hyperparameter_search is not supported"),
])  # fmt: skip
def test_refused_parts(tmp_path, make, said):
    with pytest.raises(ValueError, match=said):
        make(arguments(tmp_path))


def test_an_argument_that_nobody_has_thought_of_is_refused(tmp_path, monkeypatch):
    """A later transformers will have others; one that is used must not be ignored."""
    monkeypatch.setattr("slidedp.hf.arguments.SUPPORTED", slidedp.hf.arguments.SUPPORTED - {"seed"})
    trainer(SlideTrainer, LLAMA, arguments(tmp_path))
    with pytest.raises(ValueError, match=r"seed=3.*this version of slidedp does not know it"):
        trainer(SlideTrainer, LLAMA, arguments(tmp_path, seed=3))


def test_every_scheduler_of_transformers_is_made(tmp_path):
    slide = trainer(SlideTrainer, LLAMA, arguments(tmp_path))
    optimizer = slide.create_optimizer()
    for kind in SchedulerType:
        slide.lr_scheduler = None
        slide.args.lr_scheduler_type = kind
        slide.args.lr_scheduler_kwargs = {
            "cosine_with_min_lr": {"min_lr": 1e-4}, "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
            "warmup_stable_decay": {"num_decay_steps": 3},
        }.get(kind.value, {})  # fmt: skip
        assert slide.create_scheduler(10).optimizer is optimizer
