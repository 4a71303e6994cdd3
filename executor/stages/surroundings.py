"""Generators and buffers: what a layer's forward may change besides its outputs, and a recompute must find as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slidedp.executor.devices.backend import Backend, RngState
from slidedp.executor.stages.binding import Binding, BufferStore

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import StageProgram


@dataclass(frozen=True, slots=True)
class Before:
    """State from before a forward: generators; buffers, their versions, and copies of them."""

    rng: RngState
    buffers: dict[str, Tensor]
    versions: dict[str, int]
    snapshot: dict[str, Tensor]


@dataclass(slots=True)
class Changed:
    """What the forward has changed of that state, as it was before."""

    rng: RngState | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Surroundings:
    """Generators, and the buffers of one bound module."""

    def __init__(self, binding: Binding, backend: Backend) -> None:
        self._binding, self._backend = binding, backend
        self._written: dict[tuple[str, bool], set[str]] = {}  # (stage, training mode) -> buffers found changed

    def before(self, program: StageProgram) -> Before:
        store = self._store()
        buffers = {name: store.get(name) for name in program.buffers}
        return Before(
            self._backend.rng_state(),
            buffers,
            {name: buffer._version for name, buffer in buffers.items()},
            {name: buffer.clone() for name, buffer in buffers.items()},
        )

    @contextmanager
    def undone_if_it_fails(self, program: StageProgram) -> Iterator[Before]:
        """Context of anything that may be tried again: after an error, everything is as before. That takes no memory."""
        before = self.before(program)
        try:
            yield before
        except BaseException:
            store = self._store()
            for name, buffer in before.buffers.items():
                store.set(name, buffer)
                buffer.data.copy_(before.snapshot[name])  # not a change in the eyes of a graph that has saved it
            self._backend.set_rng_state(before.rng)
            raise

    def changed_since(self, before: Before, program: StageProgram) -> Changed:
        changed = Changed()
        if not before.rng.same(self._backend.rng_state()):
            changed.rng = before.rng
        if before.buffers:
            changed.buffers = {name: before.snapshot[name] for name in self._changed_buffers(program, before)}
        return changed

    def as_before(self, changed: Changed) -> AbstractContextManager[None]:
        """Context of a recompute: everything as before the forward; afterwards as it was found."""
        return nullcontext() if changed.rng is None and not changed.buffers else self._set_back(changed)

    @contextmanager
    def _set_back(self, changed: Changed) -> Iterator[None]:
        store = self._store()
        now = {name: store.get(name) for name in changed.buffers}
        then = {name: value.clone() for name, value in changed.buffers.items()}  # to write to: it may have to be repeated
        rng = self._backend.rng_state() if changed.rng is not None else None
        try:
            for name, value in then.items():
                store.set(name, value)
            if changed.rng is not None:
                self._backend.set_rng_state(changed.rng)
            yield
        finally:
            if rng is not None:
                self._backend.set_rng_state(rng)
            for name, value in now.items():
                store.set(name, value)

    def _store(self) -> BufferStore:
        assert self._binding.buffers is not None
        return self._binding.buffers

    def _changed_buffers(self, program: StageProgram, before: Before) -> set[str]:
        """Buffers that the forward has written to or replaced.

        Version counters miss the running statistics of `torch.batch_norm`. Hence its modules are known by class, and for
        anybody else's the values are compared the first time (which on a GPU waits for it).
        """
        store, snapshot = self._store(), before.snapshot
        changed = {n for n, old in before.buffers.items() if store.get(n) is not old or old._version != before.versions[n]}
        changed |= {name for name in before.buffers if _tracks_statistics(store.owner(name))}
        key = (program.name, self._binding.model.training)
        if key not in self._written:
            others = before.buffers.keys() - changed
            self._written[key] = {n for n in others if not _same(snapshot[n], store.get(n))}
        return changed | self._written[key]


def _tracks_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, except that NaNs count as different: then the snapshot is kept, which is always right."""
    return a.shape == b.shape and torch.equal(a, b)
