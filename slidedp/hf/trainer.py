"""`SlideTrainer`: a `transformers.Trainer` whose training step is `Plan.run`.

    trainer = SlideTrainer(model=model, args=TrainingArguments(...), train_dataset=..., plan_options={"hbm_budget": "20GiB"})
    trainer.train()

The loop, its callbacks, logs, schedules, samplers and data position are Trainer's own. A plan takes the place of what a step
consists of (forward, backward, clipping, optimizer), of evaluation's loss, and of checkpoints. Written against transformers 5.17
to 5.24; what their arguments mean for a plan, and which are refused, is in arguments.py.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import has_length

from slidedp.api import compile
from slidedp.executor.checkpoints.checkpoint_files import MANIFEST
from slidedp.hf import arguments, checkpoints
from slidedp.hf.arguments import LABELS
from slidedp.plan import Plan
from slidedp.schedule import LearningRate

__all__ = ["SlideTrainer"]


class SlideTrainer(Trainer):
    """`transformers.Trainer`, full-parameter, for models whose training state does not fit in GPU memory.

    Takes what Trainer takes, and `plan_options`: arguments of :func:`slidedp.compile` (`hw_profile`, `policy`, `hbm_budget`,
    `host_budget`, …). Under torchrun every rank trains on its share of each batch. :attr:`plan` is there from the first batch on.

    Different from Trainer: the loss of a step is the mean over all valid tokens of its micro-batches and ranks, for every model;
    a step whose loss or gradient is NaN or Inf is left out as a whole, its place in the schedule too; evaluations draw no random
    number that training would miss; gradients are never on the model. A callback of yours may look at the model: each of its
    events first waits for pending updates, unless it has an attribute ``reads_model = False``.

    Raises ValueError for an argument that it would not honour; says which, and the remedy.
    """

    model: nn.Module
    optimizer: StepRate | None

    def __init__(self, model: nn.Module | None = None, args: TrainingArguments | None = None, *others: Any,
                 plan_options: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        args = args or TrainingArguments("tmp_trainer")
        given = inspect.signature(Trainer.__init__).bind(self, model, args, *others, **keywords).arguments
        refuse_parts(given)
        if type(self).compute_loss is not Trainer.compute_loss:
            raise ValueError(f"{type(self).__name__}.compute_loss would never be called: a plan runs the model layer by layer; "
                             "give the loss as compute_loss_func=")
        arguments.refuse_arguments(args)
        arguments.refuse_options(plan_options or {})
        self.plan: Plan | None = None
        self._plan_options = dict(plan_options or {})
        self._micro_batches: list[dict[str, Tensor]] = []
        self._resume_from: Path | None = None
        self._grad_norm: float | None = None
        self._loading_from: Iterator[Any] | None = None
        super().__init__(model, args, *others, **keywords)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.accelerator.mixed_precision not in ("no", "bf16"):
            raise ValueError("accelerate's configuration asks for DeepSpeed, FSDP, FP16 or FP8: SlideDP takes their place; start "
                             "with torchrun, or change it with `accelerate config`")
        self._compute_dtype = arguments.compute_dtype(self.model, self.accelerator.mixed_precision)
        handler = self.callback_handler
        self.callback_handler = DrainedCallbacks(handler.callbacks, handler.model, handler.processing_class, handler.optimizer,
                                                 handler.lr_scheduler)
        self.callback_handler.trainer = self

    def close(self) -> None:
        """Frees the plan's memory. The model keeps its weights, as ordinary parameters."""
        if self.plan is not None:
            self.plan.close()

    # ---- the plan ----

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = DataAccelerator  # Trainer makes it by its class's name
        self.accelerator.device_placement = False  # a plan takes batches on the host

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the plan decides what is where."""

    def create_optimizer(self, model: nn.Module | None = None) -> StepRate:
        """The handle that schedulers work on; the plan's own optimizer is the AdamW that the arguments describe."""
        if self.optimizer is None:
            self.optimizer = StepRate(self.args.learning_rate)
        return self.optimizer

    def _plan_for(self, batch: Mapping[str, Tensor], *, training: bool) -> Plan:
        """The plan, made for the first batch if there is none yet, and resumed if that is due. Draws no random number."""
        if self.plan is None:
            with generators_kept(self.args.device):
                self.plan = self._compile(batch, training=training)
        if self._resume_from is not None:
            with generators_kept(self.args.device):  # Trainer restores its own, at the moment that fits the data's order
                self.plan.resume(self._resume_from)
            self._resume_from = None
        return self.plan

    def _compile(self, batch: Mapping[str, Tensor], *, training: bool) -> Plan:
        options = {"example": batch if training else self._training_example(batch), **self._plan_options}
        limit = self.args.max_grad_norm if self.args.max_grad_norm > 0 else float("inf")  # Trainer logs the norm in any case
        optimizer = arguments.adamw(self.args, self.model, self.get_decay_parameter_names(self.model))
        plan = compile(self.model, optimizer=optimizer, loss_fn=self._loss_fn(), compute_dtype=self._compute_dtype,
                       max_grad_norm=limit, device=self.args.device, **options)
        plan.optimizer = self.create_optimizer()
        return plan

    def _training_example(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A training batch to plan for, when an evaluation comes first: its batches have another size. Else `batch`."""
        if isinstance(self.train_dataset, IterableDataset) or not has_length(self.train_dataset):
            return batch
        data: Any = self.train_dataset
        rows = [data[i] for i in range(min(self._train_batch_size, len(data)))]
        return self._as_batch(self._get_collator_with_removed_columns(self.data_collator)(rows)) if rows else batch

    def _loss_fn(self) -> Any:
        """None for the model's own loss."""
        if self.compute_loss_func is not None:
            return arguments.loss_fn(self.compute_loss_func, getattr(self, "_loss_shifts_labels", False))
        smoother = self.label_smoother
        if smoother is None:
            return None
        shifted = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

        def smoothed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Any:
            return smoother(outputs, labels, shift_labels=shifted, num_items_in_batch=num_items_in_batch)

        return arguments.loss_fn(smoothed, shifted)

    def _as_batch(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a plan takes: host tensors. Labels for a loss of its own are under another name than the model's forward has."""
        batch = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in inputs.items() if v is not None}
        if self.compute_loss_func is not None or self.label_smoother is not None:
            if "labels" not in batch:
                raise ValueError("compute_loss_func and label_smoothing_factor need labels in every batch; this one has "
                                 f"{', '.join(batch)}")
            batch[LABELS] = batch.pop("labels")
        return batch

    # ---- training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **keywords: Any) -> Any:
        """As Trainer's; True resumes from the newest checkpoint that is undamaged. The model has its new weights afterwards."""
        self._micro_batches = []
        path = checkpoints.newest(self) if resume_from_checkpoint is True else resume_from_checkpoint
        output = super().train(path, *others, **keywords)
        if self.plan is not None:
            self.plan.synchronize()
        return output

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], None]:
        """The next step's batches; a rank that hangs here is told from a busy one, but for an epoch's start. Counts no tokens:
        a plan does, of all ranks, and here it would take a collective in which the others waited for a rank that hangs."""
        started, self._loading_from = self._loading_from is epoch_iterator, epoch_iterator
        with self.plan.loading() if self.plan is not None and started else nullcontext():
            return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """The loss of the whole step at its last micro-batch, which runs them all; zero before."""
        self._micro_batches.append(self._as_batch(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._micro_batches = self._micro_batches, []
        plan = self._plan_for(batches[0], training=True)
        model.train()
        result = plan.run(batches[0] if len(batches) == 1 else batches)
        self._grad_norm = result.grad_norm
        self.create_optimizer().step_was_skipped = result.skipped
        return torch.tensor(result.loss, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        """The norm of all gradients before the plan clipped them."""
        return self._grad_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self._grad_norm

    def hyperparameter_search(self, *args: Any, **keywords: Any) -> Any:
        """Refused: ValueError."""
        raise ValueError("hyperparameter_search is not supported by SlideTrainer: start a process for each trial")

    # ---- evaluation ----

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """As Trainer's. Training goes on afterwards with the bits that it would have had: no generator has moved."""
        if self.plan is not None:
            self.plan.synchronize()  # a backward under way looks at the modules' mode, which is about to change
        with generators_kept(self.args.device):
            return super().evaluation_loop(*args, **keywords)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool,
                        ignore_keys: list[str] | None = None) -> tuple[Any, Any, Any]:
        """The loss alone comes from the plan; for logits the module runs, its weights moved to the device one by one."""
        if prediction_loss_only and self.label_names and all(inputs.get(name) is not None for name in self.label_names):
            batch = self._as_batch(inputs)
            loss = self._plan_for(batch, training=False).evaluate(batch)
            return torch.tensor(loss, device=self.args.device), None, None
        if self._resume_from is not None:
            self._plan_for(self._as_batch(inputs), training=False)
        device = self.args.device
        bf16 = torch.autocast(device.type, torch.bfloat16, enabled=self._compute_dtype is torch.bfloat16)
        with delivered(self.model, device), bf16:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    # ---- checkpoints ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's."""
        if self.plan is not None:
            self.plan.synchronize()
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """`checkpoint-N` appears when it is complete: see hf/checkpoints.py."""
        self.store_flos()
        checkpoints.save(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Remembers it: weights and moments are loaded into the plan, which comes with the first batch."""
        path = Path(resume_from_checkpoint)
        if not (path / MANIFEST).is_file():
            raise ValueError(f"{path} is not a checkpoint that SlideTrainer can resume: it has no {MANIFEST}, and so no moments "
                             "for a plan. To start from its weights, load them with from_pretrained")
        self._resume_from = path

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.state.global_step >= self.state.max_steps:  # no batch will come
            super()._load_from_checkpoint(checkpoint)

    def _load_best_model(self) -> None:
        if self.plan is not None:
            self.plan.synchronize()
        super()._load_best_model()  # each rank writes all of it, the same bytes
        self.accelerator.wait_for_everyone()


class StepRate(LearningRate):
    """The plan's handle for schedulers, and for Trainer, which leaves the schedule alone after a step that was skipped."""

    step_was_skipped = False


class DataAccelerator(Accelerator):
    """Shards data loaders over ranks and gathers metrics; leaves the model and its optimizer to the plan."""

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> torch.optim.Optimizer:
        self._optimizers.append(optimizer)
        return optimizer


class DrainedCallbacks(CallbackHandler):
    """Callbacks that find the model as the last step leaves it: users' own wait for the updates that still run."""

    trainer: SlideTrainer

    def call_event(self, event: str, args: TrainingArguments, state: Any, control: Any, **keywords: Any) -> Any:
        if self.trainer.plan is not None and any(may_look(callback, event) for callback in self.callbacks):
            self.trainer.plan.synchronize()
        return super().call_event(event, args, state, control, **keywords)


def may_look(callback: Any, event: str) -> bool:
    """True if someone's own `callback`, not one that comes with transformers, handles `event` and may look at the model."""
    module = getattr(getattr(type(callback), event, None), "__module__", "")
    return not module.startswith("transformers.") and getattr(callback, "reads_model", True)


def refuse_parts(given: Mapping[str, Any]) -> None:
    """ValueError for arguments of Trainer itself that a plan cannot honour."""
    if given.get("model") is None or given.get("model_init") is not None:
        raise ValueError("SlideTrainer needs model=; model_init= is not supported: build the model yourself, after "
                         "transformers.set_seed(args.seed)")
    if any(part is not None for part in given.get("optimizers") or ()) or given.get("optimizer_cls_and_kwargs") is not None:
        raise ValueError("optimizers= and optimizer_cls_and_kwargs= are not supported by SlideTrainer: the plan's optimizer is "
                         "AdamW, and its schedule any of transformers: use learning_rate, weight_decay, adam_..., "
                         "lr_scheduler_type, warmup_steps and lr_scheduler_kwargs of TrainingArguments")


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Python's, NumPy's and torch's random numbers go on afterwards as if nothing had drawn any."""
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


@contextmanager
def delivered(model: nn.Module, device: torch.device) -> Iterator[None]:
    """`model`, whose weights are on the host, can be called with inputs on `device`: each module's own parameters and buffers are
    there while its forward runs. The same parameters on the host before and after; nothing to do where `device` is the CPU."""
    if device.type == "cpu":
        yield
        return
    homes: dict[nn.Module, list[tuple[dict[str, Any], dict[str, Any]]]] = {}

    def deliver(module: nn.Module, _: Any) -> None:
        homes[module] = [(own, dict(own)) for own in (module._parameters, module._buffers)]
        for own, home in homes[module]:
            own.update({name: t.to(device) for name, t in home.items() if t is not None})

    def put_back(module: nn.Module, *_: Any) -> None:
        for own, home in homes.pop(module, []):
            own.update(home)

    owners = [m for m in model.modules() if m._parameters or m._buffers]
    handles = [m.register_forward_pre_hook(deliver) for m in owners]
    handles += [m.register_forward_hook(put_back, always_call=True) for m in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
