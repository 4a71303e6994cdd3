"""What `transformers.TrainingArguments` mean for a plan: the optimizer, the loss, and what is refused.

Every argument is in one of two tables: SUPPORTED, or REFUSED with a remedy. One that is in neither (of a newer transformers)
is refused unless it has its default value, so that none is ever silently ignored.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from slidedp.api import compile
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.strict import closest

LABELS = "loss_labels"
"""Key of the labels in a batch for a loss of its own: the model's forward is not to see them, as in Trainer."""

_SUPPORTED = """
    output_dir do_train do_eval do_predict seed data_seed full_determinism use_cpu bf16 tf32 use_cache local_rank
    per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps gradient_accumulation_steps
    optim learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm label_smoothing_factor average_tokens_across_devices
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter logging_dir log_on_each_node log_level
    log_level_replica include_num_input_tokens_seen disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id skip_memory_metrics
    eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    prediction_loss_only include_for_metrics batch_eval_metrics load_best_model_at_end metric_for_best_model greater_is_better
    save_strategy save_steps save_total_limit save_only_model save_on_each_node resume_from_checkpoint ignore_data_skip
    restore_callback_states_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_backend ddp_timeout
"""
SUPPORTED = frozenset(_SUPPORTED.split())

_CHECKPOINTING = 'a plan decides what to recompute, layer by layer; to pin it: plan_options={"policy": {"act": "recompute"}}'
_DDP = "the plan reduces gradients itself, without DistributedDataParallel; leave it out"
REFUSED = {
    "fp16": "use bf16=True: gradients then need no loss scaling",
    "fp16_full_eval": "evaluation reads the FP32 master weights; leave it out",
    "bf16_full_eval": "it would turn the FP32 master weights into BF16; bf16=True evaluates in BF16 and keeps them",
    "deepspeed": "SlideDP takes its place; leave it out",
    "fsdp": "SlideDP takes its place; leave it out",
    "fsdp_config": "SlideDP takes FSDP's place; leave it out",
    "parallelism_config": "every rank holds a share of the data, and of nothing else; leave it out",
    "torch_compile": "layers run as they are; leave it out",
    "torch_compile_backend": "layers run as they are; leave it out",
    "torch_compile_mode": "layers run as they are; leave it out",
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_kwargs": _CHECKPOINTING,
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _CHECKPOINTING,
    "optim_args": "AdamW is described by learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon",
    "optim_target_modules": "every parameter is trained by AdamW; freeze those that are not to be with requires_grad_(False)",
    "auto_find_batch_size": 'set per_device_train_batch_size; `slidedp plan --batch 1..64` says which fit',
    "neftune_noise_alpha": "it hooks the embedding; leave it out, or add the noise in the model's own forward",
    "use_liger_kernel": "pip install liger-kernel is enough: the plan's loss uses its kernel. To patch layers too, call "
                        "liger_kernel.transformers.apply_liger_kernel_to_... on the model yourself",
    "liger_kernel_config": "patch the model yourself before it is given to the trainer",
    "torch_empty_cache_steps": "a plan allots device memory once; leave it out",
    "debug": "it hooks the model's modules; debug with transformers.Trainer, on a smaller model",
    "enable_jit_checkpoint": "it saves in the middle of a step; use save_steps",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
}  # fmt: skip
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
OF_THE_TRAINER = {
    "model": "model=",
    "loss_fn": "compute_loss_func=",
    "optimizer": "learning_rate, weight_decay and adam_... of TrainingArguments",
    "compute_dtype": "TrainingArguments(bf16=...)",
    "max_grad_norm": "TrainingArguments(max_grad_norm=...)",
    "device": "TrainingArguments(use_cpu=...)",
}
"""Parameters of `slidedp.compile` that a Trainer already has a name for."""


def refuse_arguments(args: TrainingArguments) -> None:
    """ValueError, naming the argument and the remedy, for any that a plan would not honour."""
    for field in dataclasses.fields(TrainingArguments):
        value = getattr(args, field.name, None)
        if field.name in SUPPORTED or not value or value == default_of(field):
            continue
        remedy = REFUSED.get(field.name, "this version of slidedp does not know it; leave it out")
        raise ValueError(f"TrainingArguments({field.name}={value!r}) is not supported by SlideTrainer: {remedy}")
    if args.optim not in OPTIMIZERS:
        raise ValueError(f"TrainingArguments(optim={str(args.optim)!r}) is not supported by SlideTrainer: a plan's optimizer is "
                         f"AdamW with FP32 moments; use {' or '.join(map(repr, OPTIMIZERS))}")
    if args.device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {args.device} is not supported by SlideTrainer: use a CUDA device, or use_cpu=True")
    if args.n_gpu > 1:
        raise ValueError(f"{args.n_gpu} GPUs in one process would need torch.nn.DataParallel: start a process for each "
                         f"(torchrun --nproc-per-node {args.n_gpu}), or let it see one GPU with CUDA_VISIBLE_DEVICES=0")
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) > args.world_size:
        raise ValueError(f"{started} processes were started, but TrainingArguments knows of {args.world_size}: each would train "
                         "on the same rows; without GPUs give it use_cpu=True")
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError("TrainingArguments(average_tokens_across_devices=False) is not supported by SlideTrainer: the loss is "
                         "the mean over the tokens of all ranks; leave it out")
    accelerator_config: Any = args.accelerator_config  # an AcceleratorConfig by now, whatever was given
    if args.world_size > 1 and not accelerator_config.even_batches:
        raise ValueError("accelerator_config even_batches=False is not supported by SlideTrainer: every step needs all ranks; "
                         "use even_batches=True, or dataloader_drop_last=True")


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def refuse_options(options: Mapping[str, Any]) -> None:
    """ValueError for `plan_options` that `slidedp.compile` has not, or that are the Trainer's."""
    for name in options:
        if name in OF_THE_TRAINER:
            raise ValueError(f"plan_options[{name!r}]: give it to the trainer as {OF_THE_TRAINER[name]}")
        if name not in inspect.signature(compile).parameters:
            known = [n for n in inspect.signature(compile).parameters if n not in OF_THE_TRAINER]
            raise ValueError(f"plan_options[{name!r}] is not an argument of slidedp.compile; {closest(name, known)}there are "
                             f"{', '.join(known)}")


def adamw(args: TrainingArguments, model: nn.Module, decaying: Iterable[str]) -> AdamW:
    """The optimizer that `args` describe; of `model`'s parameters those named in `decaying` get weight decay."""
    decaying = set(decaying)
    exempt = tuple(f"^{name}$" for name, _ in model.named_parameters() if name not in decaying)
    return AdamW(lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon,
                 weight_decay=args.weight_decay, no_decay=exempt)


def compute_dtype(model: nn.Module, mixed_precision: str) -> torch.dtype:
    """BF16 if asked for or if the model is in it, else FP32. Masters are FP32 either way. Raises ValueError for an FP16 model."""
    dtypes = {p.dtype for p in model.parameters()}
    if torch.float16 in dtypes:
        raise ValueError('the model is in float16: load it with dtype="float32", and use bf16=True to compute in BF16')
    return torch.bfloat16 if mixed_precision == "bf16" or torch.bfloat16 in dtypes else torch.float32


def loss_fn(loss: Callable[..., Tensor], shifted: bool) -> Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]:
    """`loss(outputs, labels, num_items_in_batch=)`, a mean over the valid labels, as a plan's sum and count.

    `shifted`: the loss compares position i with label i + 1, so that the first label of a row does not count.
    """

    def sum_and_count(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch[LABELS]
        count = (labels[..., 1:] if shifted else labels).ne(-100).sum()
        return loss(outputs, labels, num_items_in_batch=count) * count, count

    return sum_and_count
