"""Saving and resuming a plan: what all ranks do together. The format is :mod:`slidedp.executor.checkpoints.checkpoint`'s."""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from slidedp.compiler.layergraph import Group
from slidedp.executor.checkpoints import checkpoint as content
from slidedp.executor.checkpoints.checkpoint_files import (
    FileFact,
    FileLayer,
    begin,
    complete,
    damage,
    partial_of,
    publish,
    read_manifest,
)
from slidedp.executor.checkpoints.checkpoint_moments import ResidentMoments
from slidedp.executor.errors import CheckpointError
from slidedp.executor.machine.machine import Machine
from slidedp.executor.ranks.collectives import Collectives

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `step`: training steps done; `extra`: what :meth:`Plan.save` was given to keep with it.

    `passed_over`: newer checkpoints that were damaged, each with what is wrong.
    """

    path: Path
    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()


def save(machine: Machine, directory: Path, extra: Mapping[str, Any] | None, keep: int, files: FileLayer,
         optimizer: Mapping[str, Any] | None = None) -> Path:
    """Writes a checkpoint of the drained `machine`; returns its path. Collective.

    Raises ValueError, on every rank, for an `extra` of any that is not JSON, and where one cannot write. What was there stays as
    it was.
    """
    collectives, state, model, device = machine.meetings, machine.state, machine.binding.model, machine.backend.device
    with machine.failure.at_files(), told_where(directory):
        training = on_all(collectives, lambda: facts_of_training(machine, extra, keep, optimizer))
        target = begin_on_all(directory, training["step"], collectives, files)
        moments = ResidentMoments(state, machine.resident, collectives)
        mine = on_all(collectives, lambda: content.write_part(partial_of(target), state, model, training, device, files, moments))
        publish_on_all(machine, target, training["step"], mine, keep, collectives, files)
    return target


@contextmanager
def told_where(directory: Path) -> Iterator[None]:
    """An OSError becomes a CheckpointError that names the folder and the remedy."""
    try:
        yield
    except OSError as e:
        remedy = "make room there, or" if e.errno in (errno.ENOSPC, errno.EDQUOT) else "let this process create and write it, or"
        raise CheckpointError(f"no checkpoint can be written into {directory}: {e.strerror or e} ({e.filename or 'a file'}); "
                              f"{remedy} save to another folder. Training can go on; older checkpoints are as they were") from e


def facts_of_training(machine: Machine, extra: Mapping[str, Any] | None, keep: int,
                      optimizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """What training.json says of the drained `machine`. ValueError for an `extra` or a `keep` that will not do."""
    if keep < 1:
        raise ValueError(f"keep={keep!r}: at least the checkpoint being saved is kept")
    return {"step": machine.num_steps + machine.steps_before, "step_counts": machine.adam.steps,
            "optimizer": dict(optimizer or {}), "extra": as_json(extra)}


def begin_on_all(directory: Path, step: int, collectives: Collectives, files: FileLayer) -> Path:
    """Where the checkpoint will be; its partial directory is there. Collective."""
    def start() -> bytes:
        return begin(directory, step, files).name.encode() if collectives.rank == 0 else b""

    return directory / collectives.broadcast_bytes(on_all(collectives, start)).decode()


def publish_on_all(machine: Machine, target: Path, step: int, mine: Mapping[str, FileFact], keep: int,
                   collectives: Collectives, files: FileLayer) -> None:
    """The files of all ranks, synced, become the newest checkpoint. `mine`: facts of this rank's. Collective."""
    facts = gather_facts(content.file_names(machine.state, machine.binding.model), mine, collectives)
    groups = list(machine.state.groups.values())
    manifest = {"step": step, "ranks": collectives.world_size, "parameters": content.names_of(groups)}
    on_all(collectives, lambda: publish(target, facts, manifest, keep, files) if collectives.rank == 0 else None)


def as_json(extra: Mapping[str, Any] | None) -> Any:
    try:
        return json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError) as e:
        raise ValueError(f"extra= must be a mapping that JSON can hold: {e}") from e


def gather_facts(names: list[str], mine: Mapping[str, FileFact], collectives: Collectives) -> dict[str, FileFact]:
    """Everyone's facts; each file has been written by one rank."""
    own = [value for name in names for value in ((mine[name].num_bytes, mine[name].crc32) if name in mine else (0, 0))]
    total = [sum(column) for column in zip(*collectives.gather_ints(own), strict=True)]
    return {name: FileFact(total[2 * i], total[2 * i + 1]) for i, name in enumerate(names)}


def find(directory: Path, collectives: Collectives) -> Checkpoint:
    """The newest undamaged checkpoint of `directory`; `directory` may also be one checkpoint itself. Collective.

    Damaged ones are named in a warning and passed over. Raises CheckpointError when none is left.
    """
    single = (directory / "manifest.json").is_file()
    candidates = [directory] if single else complete(directory)
    passed_over: list[str] = []
    for path in candidates:
        wrong = what_is_wrong(path, collectives)
        if wrong is None:
            manifest = read_manifest(path)
            extra = json.loads((path / content.TRAINING).read_text())["extra"]
            return Checkpoint(path, manifest["step"], extra, tuple(passed_over))
        passed_over.append(f"{path}: {wrong}")
        warnings.warn(f"checkpoint {path} is damaged ({wrong}){'' if single else '; trying the one before it'}", stacklevel=4)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; plan.save makes one")
    raise CheckpointError(f"{directory} holds no complete checkpoint" + "".join(f"; {p}" for p in passed_over)
                          + "; name a folder that plan.save has written to, or begin anew without resuming")


def what_is_wrong(path: Path, collectives: Collectives) -> str | None:
    """Each rank checks its share of the files; the first rank that finds something tells the others."""
    try:
        wrong = damage(path, read_manifest(path), collectives.rank, collectives.world_size)
    except CheckpointError as e:
        wrong = str(e)
    flags = [flag for (flag,) in collectives.gather_ints([int(wrong is not None)])]
    if not any(flags):
        return None
    return wrong or f"as rank {flags.index(1)} found"


def require_same_names(found: Checkpoint, model: nn.Module) -> None:
    """CheckpointError if it cannot be of `model`, as far as that is known before the model is traced: of a parameter that it has
    not, or has in another shape."""
    ours = {name: list(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    saved = read_manifest(found.path)["parameters"]
    content.require_same_names(found.path, saved, {name: ours[name] for name in saved if name in ours})


def require_same_model(found: Checkpoint, groups: Sequence[Group]) -> None:
    """CheckpointError, naming a parameter, if the checkpoint is of a model with other parameters."""
    content.require_same_model(found.path, read_manifest(found.path), groups)


def load(machine: Machine, found: Checkpoint) -> dict[str, Any]:
    """Puts a checkpoint into the drained `machine`; returns the `optimizer` it was saved with. Collective.

    Raises CheckpointError on every rank: with nothing changed for another model's, with the state in pieces if a file has
    changed since it was checked.
    """
    state = machine.state
    moments = ResidentMoments(state, machine.resident, machine.meetings)
    manifest = read_manifest(found.path)
    require_same_model(found, list(state.groups.values()))

    def read() -> dict[str, Any]:
        training = content.read_part(found.path, manifest, state, machine.binding.model, machine.backend.device, moments)
        machine.adam.load_steps(training["step_counts"])
        return dict(training["optimizer"])

    machine.exposure.expose()  # the shadows are cast anew before the next step
    with machine.failure.at_files():
        optimizer = on_all(machine.meetings, read)
    machine.steps_before = found.step - machine.num_steps
    return optimizer


def on_all(collectives: Collectives, work: Callable[[], T]) -> T:
    """What `work` returns. If it raises on one rank, all raise. Collective."""
    problem: Exception | None = None
    try:
        result = work()
    except Exception as e:
        problem = e
    flags = [flag for (flag,) in collectives.gather_ints([int(problem is not None)])]
    if problem is not None:
        raise problem
    if any(flags):
        raise CheckpointError(f"rank {flags.index(1)} failed; see its own error")
    return result
