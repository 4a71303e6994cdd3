"""Saving beside training: the same checkpoint as :func:`slidedp.checkpoints.save` writes, byte for byte, while steps go on.

What is small (generators, step counts, buffers, `extra`) is taken at once; weights and moments are read before the next step's
updates overwrite them (snapshot.py in passes/ and in executor/checkpoints/), each rank its own parts, and written into files that
all ranks share. Every rank has a thread for it, and these have meetings of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slidedp.agreement import SAVE_FAILED, SAVES, Posted, exchange, refuse_if_ranks_differ
from slidedp.checkpoints import begin_on_all, facts_of_training, on_all, publish_on_all, told_where
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.units import parse_bytes
from slidedp.executor.checkpoints import checkpoint as content
from slidedp.executor.checkpoints.checkpoint_files import FileFact, FileLayer, partial_of
from slidedp.executor.checkpoints.saving import SaveHandle
from slidedp.executor.checkpoints.snapshot import Piece, Snapshot, buffers_of
from slidedp.executor.checkpoints.tensor_files import TensorFile, extents
from slidedp.executor.errors import CheckpointError
from slidedp.executor.machine.machine import Machine


def agree_to_save(machine: Machine) -> None:
    """All ranks are about to save: the save before has ended, and what has been written into the model counts. Collective.

    Raises on every rank if anything has failed on one.
    """
    problem, looked = None, machine.exposure.exposed
    try:
        machine.saves.finish()
        machine.exposure.take_back()
    except ValueError as e:  # the other ranks are waiting to hear of it
        problem = e
    machine.exposure.exposed = looked  # what is written into the model from here on counts in the next step
    failed = SAVE_FAILED if isinstance(problem, CheckpointError) else int(problem is not None)
    posted = exchange(machine, Posted(failed, call=SAVES, changed=int(machine.exposure.changed)))
    if problem:
        raise problem
    refuse_if_ranks_differ(posted, machine.rank)
    if any(row.changed for row in posted):
        machine.exposure.refresh()


def start_save(machine: Machine, decisions: Decisions, directory: Path, extra: Mapping[str, Any] | None, keep: int,
               files: FileLayer, optimizer: Mapping[str, Any] | None, save_buffer: int | str) -> SaveHandle:
    """Begins a checkpoint of the drained `machine`; the updates of its next step wait for it. Collective.

    Raises ValueError, on every rank, for arguments of any that will not do, and where the checkpoint cannot be begun.
    """
    def ready() -> tuple[dict[str, Any], Snapshot]:
        training = facts_of_training(machine, extra, keep, optimizer)
        return training, Snapshot(machine.state, decisions, machine.resident, parse_bytes(save_buffer))

    training, snapshot = on_all(machine.meetings, ready)
    with told_where(directory):
        target = begin_on_all(directory, training["step"], machine.meetings, files)
    writer = Writer(machine, partial_of(target), training, files)
    collectives = machine.saves.meetings

    def work() -> None:
        if machine.backend.device.type == "cuda":
            torch.cuda.set_device(machine.backend.device)  # this thread's, for state that is there
        on_all(collectives, partial(writer.write_state, snapshot))  # no file is complete before all ranks have written
        mine = on_all(collectives, writer.seal)
        publish_on_all(machine, target, training["step"], mine, keep, collectives, files)

    return machine.saves.begin(target, snapshot, work)


class Writer:
    """Writes one rank's share of a checkpoint into `folder`. Made in the user's thread, used in the save's."""

    def __init__(self, machine: Machine, folder: Path, training: Mapping[str, Any], files: FileLayer) -> None:
        state, model = machine.state, machine.binding.model
        self._folder, self._files, self._state = folder, files, state
        self._fds: dict[str, int] = {}
        parts = content.cut_files(list(state.groups.values()))
        laid_out = [content.tensor_files(state, part) for part in parts]
        self._file_of = {name: of for part, of in zip(parts, laid_out, strict=True) for name in part.groups}
        self._own = [f for of in laid_out[state.rank :: state.world_size] for f in dict.fromkeys(of.values())]
        self._small: dict[str, Any] = {f"rng-{state.rank:05d}.safetensors": content.rng_states(machine.backend.device)}
        if state.rank == 0:
            self._small |= content.write_once(state, model, training, parts)

    def write_state(self, snapshot: Snapshot) -> None:
        """All pieces of this rank, and the headers of the files that are its own."""
        try:
            for file in self._own:
                self._files.write_at(self._open(file), memoryview(file.header), 0)
            snapshot.drain(self._write)
        except OSError as e:
            raise OSError(e.errno, f"rank {self._state.rank}: {e.strerror or e}", e.filename or str(self._folder)) from e
        finally:
            snapshot.stop()  # after an error: no update waits for what will not be written
            for fd in self._fds.values():
                os.close(fd)

    def _write(self, piece: Piece, values: Tensor) -> int:
        num_bytes = 0
        for row, buffer in zip(values, buffers_of(piece), strict=True):
            file, raw = self._file_of[piece.group.name][buffer], memoryview(row.numpy()).cast("B")
            for offset, a, b in extents(piece.group, piece.lo, piece.hi, buffer, file):
                self._files.write_at(self._open(file), raw[4 * a : 4 * b], offset)
                num_bytes += 4 * (b - a)
        return num_bytes

    def _open(self, file: TensorFile) -> int:
        if file.name not in self._fds:
            self._fds[file.name] = self._files.open(self._folder / file.name)
        return self._fds[file.name]

    def seal(self) -> dict[str, FileFact]:
        """Syncs this rank's files, which all ranks have written into, and writes the small ones; returns their facts."""
        facts: dict[str, FileFact] = {}
        for file in self._own:
            self._files.sync(self._folder / file.name)
            facts[file.name] = FileFact.of(self._folder / file.name)
        for name, value in self._small.items():
            self._files.write(self._folder / name, partial(content.write_file, value=value))
            facts[name] = FileFact.of(self._folder / name)
        return facts
