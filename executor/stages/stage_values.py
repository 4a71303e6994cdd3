"""What one micro-batch has on the device between its stages: values, their gradients, and the layers' autograd graphs.

Stages make and use them (stages.py). In between, two others reach in:

    copy streams   take activations ("act.<stage>") and boundaries ("h.<stage>", a layer's inputs) to the host and back
    fallback.py    has layers give up, when memory is short, what they can compute again

Values are named as the trace names them: ``batch.<key>`` or ``<stage>.<node>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slidedp.compiler.decisions import Activation
from slidedp.executor.devices.backend import poison
from slidedp.executor.devices.parcels import Copy, Geometry, Parcel, num_bytes, part, storage_of
from slidedp.executor.stages.saved import SavedTensors
from slidedp.executor.stages.stage_graph import Graph

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import StageProgram


@dataclass(slots=True)
class Boundary:
    """Inputs of a stage that go to the host. `away`: name -> the tensor's geometry, and the byte of the parcel at which its
    storage begins; `slot`: the device memory that the parcel has come back to.
    """

    parcel: Parcel
    away: dict[str, tuple[Geometry, int]]
    slot: Tensor | None = None


class StageValues:
    """The values of one trace during one step.

    ``env``: name -> value, detached, for as long as a stage is still to use it. ``grads``: name -> its gradient so far.
    ``graphs``: stage -> its autograd graph, from its forward until its backward is done.
    """

    def __init__(self, programs: Sequence[StageProgram], device: torch.device) -> None:
        self._programs, self._device = {p.name: p for p in programs}, device
        self._num_uses = Counter(name for p in programs for name in set(p.inputs))
        self.clear()

    def clear(self) -> None:
        self.env: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.graphs: dict[str, Graph] = {}
        self._boundaries: dict[str, Boundary] = {}
        self._uses_left: Counter[str] = Counter()

    def start(self, batch: Mapping[str, Tensor]) -> None:
        """Begins a step with a batch on the device."""
        self.clear()
        self._uses_left = Counter(self._num_uses)
        self.env = {f"batch.{key}": value for key, value in batch.items() if f"batch.{key}" in self._num_uses}

    # ---- stages ----

    def store(self, program: StageProgram, outputs: Sequence[Tensor]) -> None:
        for name, value in zip(program.outputs, outputs, strict=True):
            if self._uses_left[name]:
                self.env[name] = value.detach()

    def release_inputs(self, program: StageProgram) -> None:
        """The stage has used its inputs for the last time: those that no other stage is to use are freed."""
        for name in set(program.inputs):
            self._uses_left[name] -= 1
            if not self._uses_left[name]:
                self.env.pop(name, None)  # without loss there may be no way back from the host

    def inputs_of(self, stage: str) -> dict[str, Tensor]:
        """The inputs of a stage that is run again; those that were on the host, from the slot that they came back to."""
        if (boundary := self._boundaries.get(stage)) is not None:
            assert boundary.slot is not None, f"{stage}: its inputs are not back from the host"
            places = {start: part(boundary.slot, start) for _, start in boundary.away.values()}
            self.env |= {name: geometry.over(places[start]) for name, (geometry, start) in boundary.away.items()}
            del self._boundaries[stage]
        return {name: self.env[name] for name in self._programs[stage].inputs}

    def end(self, stage: str) -> None:
        """The stage's backward is done: its graph and the gradients of its outputs are freed."""
        self.graphs.pop(stage, None)
        self._boundaries.pop(stage, None)
        for name in self._programs[stage].grad_outputs:
            self.grads.pop(name, None)

    # ---- to the host and back ----
    # Each call by the thread of its own stream. The op graph's edges order them among themselves and with the stages' ops.

    def offload(self, value: str, buffer: Tensor, copy: Copy) -> int:
        """Copies to `buffer` on the host what of the value is this stage's alone. Returns the number of bytes."""
        head, _, stage = value.partition(".")
        if head == "act":
            saved = self._saved(stage)
            return saved.offload(buffer, self._device, copy) if saved is not None else 0
        program = self._programs[stage]
        own = {name: self.env[name] for name in program.grad_inputs if self._num_uses[name] == 1}
        parcel = Parcel(own.values(), self._device, buffer.numel())
        away = {n: (Geometry.of(t), start) for n, t in own.items() if (start := parcel.start(t)) is not None}
        self._boundaries[stage] = Boundary(parcel, away)
        parcel.pack(buffer, copy)
        return parcel.num_bytes

    def leave(self, value: str, *, poisoned: bool = False) -> None:
        """Frees on the device what :meth:`offload` has copied. `poisoned`: fills it with NaN first, where nothing shares it."""
        head, _, stage = value.partition(".")
        saved = self._saved(stage)
        if head == "act":
            memory = [] if saved is None else saved.leave()
        else:
            memory = self._boundaries[stage].parcel.let_go()
            for name in self._boundaries[stage].away:
                del self.env[name]
                if saved is not None:
                    saved.unbind_input(name)
        if poisoned:
            kept = [t for graph in self.graphs.values() for t in graph.kept()]
            used = {storage_of(t) for t in (*self.env.values(), *kept)}
            for freed in memory:
                if storage_of(freed) not in used:
                    poison(freed, self._device)

    def reload(self, value: str, buffer: Tensor, slot: Tensor, copy: Copy) -> int:
        """Copies the value from `buffer` to `slot`, where the backward finds it. Returns the number of bytes."""
        head, _, stage = value.partition(".")
        if head == "act":
            saved = self._saved(stage)
            return saved.reload(buffer, slot, copy) if saved is not None else 0
        boundary = self._boundaries[stage]
        size, boundary.slot = boundary.parcel.num_bytes, slot
        copy(slot[:size], buffer[:size])
        return size

    def _saved(self, stage: str) -> SavedTensors | None:
        graph = self.graphs.get(stage)
        return None if graph is None else graph.saved

    # ---- what can be given up when memory is short ----

    def held(self) -> dict[str, int]:
        """Layers that could drop what they keep and be computed again -> bytes that this would free, in order of the forwards."""
        used = {storage_of(t) for t in (*self.env.values(), *self.grads.values())}
        kept = {stage: graph.kept() for stage, graph in self.graphs.items()
                if graph.saved is not None and graph.act is not Activation.RECOMPUTE and not graph.moves}
        sizes = {stage: num_bytes(t for t in tensors if storage_of(t) not in used) for stage, tensors in kept.items()}
        return {stage: size for stage, size in sizes.items() if size}

    def drop(self, stage: str) -> Activation:
        """Frees what a layer of :meth:`held` keeps; its backward will first run it again, from its inputs and weights.

        Returns what it had been told to keep.
        """
        graph = self.graphs[stage]
        assert graph.saved is not None, stage
        graph.saved.drop()
        graph.keeping = None
        return graph.act

    def leaving(self) -> list[str]:
        """Layers that still keep what goes to the host: another thread may be about to copy it."""
        return [stage for stage, graph in self.graphs.items() if graph.moves and graph.kept()]

    def leave_early(self, stage: str) -> int:
        """:meth:`leave` for the stage's activations, once they have been copied, before their place is needed. Returns bytes."""
        before = num_bytes(self.graphs[stage].kept())
        self.leave(f"act.{stage}")
        return before - num_bytes(self.graphs[stage].kept())
