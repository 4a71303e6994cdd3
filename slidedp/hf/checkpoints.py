"""Checkpoints of a SlideTrainer: `checkpoint-N` of the output directory holds what a plan saves and what Trainer adds to it.

    checkpoint-N/   manifest.json, model-*.safetensors, moments-*.safetensors, config.json, …  (checkpoint.py)
                    trainer_state.json, optimizer.pt (the learning rate), scheduler.pt, rng_state*.pth, tokenizer

It is written as `.checkpoint-N.partial`, synced, and renamed when everything is in it: Trainer's resume sees whole checkpoints
only, whenever the process is killed. `from_pretrained` loads it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from slidedp.checkpoints import on_all
from slidedp.executor.checkpoints.checkpoint_files import MANIFEST, FileLayer, damage, read_manifest
from slidedp.executor.errors import CheckpointError

if TYPE_CHECKING:
    from slidedp.hf.trainer import SlideTrainer


def save(trainer: SlideTrainer) -> None:
    """Writes the checkpoint of the current step and removes those that `save_total_limit` no longer keeps. All ranks call it."""
    assert trainer.plan is not None, "Trainer saves after a step"
    files, collectives, args = FileLayer(), trainer.plan._collectives, trainer.args
    run = Path(trainer._get_output_dir(None))
    target = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    partial = run / f".{target.name}.partial"

    def clear() -> None:
        for leftover in run.glob(f".{PREFIX_CHECKPOINT_DIR}-*"):
            files.remove(leftover)

    def publish() -> None:
        for path in staged.rglob("*"):
            files.sync(path)
        files.sync(staged)
        if target.exists():  # an earlier run's
            files.rename(target, run / f".{target.name}.old")
        files.rename(staged, target)
        files.sync(run)
        rotate_checkpoints(output_dir=str(run), save_total_limit=args.save_total_limit, use_mtime=True,
                           best_model_checkpoint=trainer.state.best_model_checkpoint)
        clear()

    first = trainer.args.process_index == 0
    on_all(collectives, lambda: clear() if first else None)
    staged = write_state(trainer, partial)
    note_best(trainer, run, target)
    on_all(collectives, lambda: write_trainer_files(trainer, staged))
    on_all(collectives, lambda: publish() if first else None)
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(target))


def newest(trainer: SlideTrainer) -> str:
    """The newest checkpoint of the output directory whose files are what they were written as; warns of newer ones. Collective.

    One without a manifest is returned, too: it is not damaged, but no plan's. Raises ValueError when there is none.
    """
    run, args = Path(trainer._get_output_dir(None)), trainer.args
    for path in map(Path, reversed(sort_checkpoints(str(run)) if run.is_dir() else [])):
        try:
            manifest = read_manifest(path) if (path / MANIFEST).exists() else None
            wrong = None if manifest is None else damage(path, manifest, args.process_index, args.world_size)
        except CheckpointError as e:
            wrong = str(e)
        if not trainer.accelerator.gather(torch.tensor([int(wrong is not None)], device=args.device)).any():
            return str(path)
        wrong = wrong or "as another rank found"
        warnings.warn(f"checkpoint {path} is damaged ({wrong}); trying the one before it", stacklevel=3)
    raise ValueError(f"{run} holds no whole checkpoint to resume from: give resume_from_checkpoint=False, or another output_dir")


def write_state(trainer: SlideTrainer, partial: Path) -> Path:
    """Weights and, unless `save_only_model`, all of the plan's state, into a directory under `partial`; returns that."""
    assert trainer.plan is not None
    if not trainer.args.save_only_model:
        return trainer.plan.save(partial, keep=1)
    trainer.save_model(str(partial / "model"), _internal_call=True)
    return partial / "model"


def note_best(trainer: SlideTrainer, run: Path, target: Path) -> None:
    """As Trainer does: the best step's checkpoint, if there is one."""
    best = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.best_global_step}"
    if trainer.state.best_global_step and (best == target or best.exists()):
        trainer.state.best_model_checkpoint = str(best)


def write_trainer_files(trainer: SlideTrainer, staged: Path) -> None:
    """What Trainer keeps beside weights and moments, and what makes it a directory that `from_pretrained` loads."""
    if not trainer.args.save_only_model:
        trainer._save_optimizer_and_scheduler(str(staged))
        trainer._save_rng_state(str(staged))
    if not trainer.args.should_save:
        return
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    for part in (tokenizer, getattr(trainer.model, "generation_config", None)):
        if part is not None:
            part.save_pretrained(str(staged))
    states: Any = trainer.state.stateful_callbacks  # a dictionary, though annotated as a list
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name, state = type(callback).__name__, callback.state()
            kept = states[name]
            if isinstance(kept, list):
                kept.append(state)
            else:
                states[name] = state
    trainer.state.save_to_json(str(staged / TRAINER_STATE_NAME))
