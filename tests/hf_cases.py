"""What the tests of SlideTrainer share: data, arguments, both trainers on the same of everything, and what ranks run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tiny_models import family, lm_batch
from torch import Tensor
from training import state_of
from transformers import Trainer, TrainerCallback, TrainingArguments

from slidedp.hf import SlideTrainer

CLOCK = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_tokens_per_second", "eval_runtime",
         "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}  # fmt: skip


def rows(count: int, padding: str = "padded") -> list[dict[str, Tensor]]:
    """Rows of a data set. The first label of each is ignored: some versions of Trainer count it, though no loss has it."""
    found = [{key: value[i] for key, value in lm_batch(padding, seed=seed).items()} for seed in range(count) for i in range(2)]
    for row in found:
        row["labels"][0] = -100
    return found[:count]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    """Of ten short steps on the CPU that log all there is to log, with torch's plain AdamW."""
    settings: dict[str, Any] = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "optim": "adamw_torch", "max_steps": 10,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2, "weight_decay": 0.1,
        "logging_steps": 1, "lr_scheduler_type": "cosine", "warmup_steps": 3, "include_num_input_tokens_seen": True}  # fmt: skip
    return TrainingArguments(str(directory), **{**settings, **changes})


def trainer(kind: type[Trainer], model: torch.nn.Module, args: TrainingArguments, **given: Any) -> Trainer:
    """A trainer of a copy of `model`, on 32 rows. torch's own AdamW in a plan, whose bits are the same at one thread."""
    torch.set_num_threads(1)
    if issubclass(kind, SlideTrainer):
        given = {"plan_options": {"update_kernel": "torch"}, **given}
    return kind(model=copy.deepcopy(model), args=args, **{"train_dataset": rows(32), "eval_dataset": rows(10), **given})


def history(trained: Trainer) -> list[dict[str, float]]:
    """All that has been logged, without what a clock says."""
    return [{key: value for key, value in logs.items() if key not in CLOCK} for logs in trained.state.log_history]


def weights(trained: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained.model.named_parameters()}


def bits(trained: SlideTrainer) -> dict[str, Tensor]:
    """Weights and moments."""
    state = state_of(trained.plan)
    parts = {"weight": state.params, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def dropping(seed: int = 0) -> torch.nn.Module:
    """A model with dropout, by whose random numbers one sees where a resume went on."""
    return family("llama", seed, num_hidden_layers=2, attention_dropout=0.3)


class Recorder(TrainerCallback):
    """Every event, with the state at that moment and, where there are any, logs or metrics."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []


def _record(event: str) -> Any:
    def handle(self: Recorder, args: Any, state: Any, control: Any, **given: Any) -> None:
        told = given.get("logs") or given.get("metrics") or {}
        self.events.append((event, state.global_step, state.epoch, state.num_input_tokens_seen, state.best_metric,
                            control.should_log, control.should_evaluate, control.should_save,
                            {key: value for key, value in told.items() if key not in CLOCK}))

    return handle


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Recorder, _event, _record(_event))


# ---- run by ranks ----


def train_six_steps(directory: str, num_rows: int, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """What six steps on so many rows log, an evaluation, and the sums of the weights they leave; `resume`: from the newest."""
    args = arguments(Path(directory), max_steps=6, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3,
                     **changes)  # fmt: skip
    policy = {"delivery": "sharded"} if args.world_size > 1 else {}
    with torch.device("meta" if args.process_index else "cpu"):  # rank 0's weights are everyone's
        model = family("llama", num_hidden_layers=2)
    made = trainer(SlideTrainer, model, args, train_dataset=rows(num_rows), eval_dataset=rows(7),
                   plan_options={"update_kernel": "torch", "policy": policy})  # fmt: skip
    made.train(resume_from_checkpoint=resume)
    found = {"history": history(made)[:-1], "evaluated": made.evaluate()["eval_loss"],
             "sums": {name: value.double().abs().sum().item() for name, value in weights(made).items()}}  # fmt: skip
    made.close()
    return found


def train_on_ranks(directory: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of 16 rows, which fill every batch of all ranks, and of 13, which do not."""
    even, uneven = (train_six_steps(f"{directory}/{count}", count, **options) for count in (16, 13))
    if torch.distributed.get_rank() == 0:
        next(Path(directory, "13", "checkpoint-6").glob("moments-*")).write_text("damaged")
    torch.distributed.barrier()
    return {"even": even, "uneven": uneven, "resumed": train_six_steps(f"{directory}/13", 13, resume=True, **options)}
