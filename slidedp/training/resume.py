"""What ``slidedp train`` can tell of an earlier run before the model is loaded. On rank 0."""

from __future__ import annotations

import json
from pathlib import Path

from slidedp.executor.checkpoints.checkpoint import TRAINING
from slidedp.executor.checkpoints.checkpoint_files import MANIFEST, complete, read_manifest
from slidedp.training.config import TrainConfig
from slidedp.training.loader import StatefulLoader

EXPORTED = "slidedp.json"
"""Beside the trained model: the step that it is of."""


def newest_step(checkpoints: Path) -> int:
    """Step of the newest checkpoint, damaged or not; 0 for none."""
    found = complete(checkpoints)
    return int(found[0].name.removeprefix("step-").partition(".")[0]) if found else 0


def check_resume(config: TrainConfig) -> None:
    """ValueError where `resume` cannot be meant: there is no such checkpoint, or there are some that would get lost."""
    asked, own = config.resume, config.output / "checkpoints"
    if isinstance(asked, Path):
        single = (asked / MANIFEST).is_file()
        if not single and not complete(asked):
            raise ValueError(f"resume: {asked} " + ("holds no complete checkpoint" if asked.is_dir() else "is no directory")
                             + "; name a checkpoint or a directory of them, or use resume: auto, which takes the output's own")
        refuse_to_go_back(asked, read_manifest(asked)["step"] if single else newest_step(asked), own, newest_step(own))
    if asked is False and (there := newest_step(own)):
        raise ValueError(f"resume: false, but {own} holds the checkpoints of an earlier run, up to step {there}; use resume: "
                         "auto, or another output")


def refuse_to_go_back(asked: Path | str, step: int, checkpoints: Path, there: int) -> None:
    if step < there:
        raise ValueError(f"resume: {asked} is of step {step}, but {checkpoints} holds checkpoints up to step {there}, which "
                         "would be taken for the newest; use another output")


def is_finished(config: TrainConfig, loader: StatefulLoader, num_steps: int) -> bool:
    """True if the last step's checkpoint is there, and the model that it has left. ValueError if the run that would go on from it
    would see other data."""
    newest = next(iter(complete(config.output / "checkpoints")), None)
    if config.resume != "auto" or newest is None:
        return False
    try:
        step = read_manifest(newest)["step"]
        state = json.loads((newest / TRAINING).read_text())["extra"]["loader"]
        exported = json.loads((config.output / "model" / EXPORTED).read_text())["step"]
    except (OSError, ValueError, KeyError):  # damaged, or not there yet: the run that goes on will see
        return False
    place = loader.place
    loader.load_state_dict(state)
    loader.place = place
    return bool(exported == step >= num_steps)
