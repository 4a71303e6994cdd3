"""The stage runner: one step of the user's model, stage by stage, with gradients equal to eager PyTorch's.

    prologue       runs with gradients, and its graph is kept until its backward (it is small: embedding, masks, rotary)
    forward        a layer, with gradients; its graph keeps what the plan says (saved.py): all it saved, or nothing
    recompute      the layer again, from the same inputs, generator state and buffers, until all that its graph lacks is there
    backward       the layer's gradients: its parameters' into a flat gradient slot, its inputs' into the environment
    epilogue       forward and backward of norm, head and loss in one go

All of it runs in the GPU stream's thread. Contributions to one value's gradient are summed in the order in which the
autograd engine would: later stages first, and within a stage on top of what has come in already (a seed at the leaf).
The one exception is a parameter used by several stages and several times within one of the earlier ones: its first sum
is taken within the stage, since the engine's way would need another full-size temporary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slidedp.compiler.decisions import Activation
from slidedp.compiler.moments import SELECTED_SHARE
from slidedp.executor.backend import Backend, poison
from slidedp.executor.binding import Binding
from slidedp.executor.gradients import GradientSlots
from slidedp.executor.parcels import Copy, Geometry, Parcel, storage_of
from slidedp.executor.saved import SavedTensors, enter
from slidedp.executor.selective import Keeping, Measuring, choose
from slidedp.executor.surroundings import Changed, Surroundings

if TYPE_CHECKING:
    from slidedp.compiler.tracer import StageProgram, Trace

Weights = Mapping[str, list[Tensor]]
"""Group -> its parameters as leaves (:meth:`Binding.leaves` of the slot that they were delivered to)."""

Slots = Mapping[str, tuple[Tensor, bool]]
"""Group -> its flat gradient slot, and whether an earlier op of this step has written its gradient there already."""


@dataclass(slots=True)
class _Graph:
    """A stage between its forward and its backward: edges of its differentiable inputs and outputs, by name, not the values.

    `weights`: of the forward, whose gradients are asked for. `saved`: what the graph saved, None if torch holds it.
    `keeping`: results that a selective recompute need not compute again.
    """

    inputs: Mapping[str, GradientEdge | Tensor]
    outputs: dict[str, GradientEdge]
    weights: Weights
    saved: SavedTensors | None = None
    keeping: Keeping | None = None


@dataclass(slots=True)
class _Boundary:
    """Inputs of a stage that go to the host. `away`: by name what they are like and where in the parcel their storage begins;
    `slot`: where they have come back to.
    """

    parcel: Parcel
    away: dict[str, tuple[Geometry, int]]
    slot: Tensor | None = None


class StageRunner:
    """Runs the stages of one trace on a bound module. One step at a time, started by :meth:`start`.

    Of a step with several micro-batches each has a runner of its own; they share `slots`, which know who has added what.
    All of them start before any writes a gradient.

    The order of calls is the caller's (the graph's): every layer's forward after the stages that make its inputs, and
    its recompute and backward after those of all stages that use its outputs.
    """

    def __init__(self, trace: Trace, binding: Binding, backend: Backend, slots: GradientSlots | None = None) -> None:
        self.trace, self._binding, self._backend = trace, binding, backend
        self._programs: dict[str, StageProgram] = {p.name: p for p in trace.programs}
        self._labels = {s.name: f"layer {s.name} ({s.kind_key.rpartition('-')[0] or s.kind})" for s in trace.graph.stages}
        names = list(self._programs)
        self._first, self._last = names[0], names[-1]
        self._num_uses = Counter(name for p in trace.programs for name in set(p.inputs))
        self._surroundings = Surroundings(binding, backend)
        self._choices: dict[tuple[str, bool], frozenset[int]] = {}  # (stage kind, training mode) -> operations to keep
        self._slots = slots or GradientSlots(binding.groups)
        self._clear()

    def _clear(self) -> None:
        self._env: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._graphs: dict[str, _Graph] = {}
        self._kept: dict[str, Changed] = {}
        self._with_inputs: set[str] = set()
        self._boundaries: dict[str, _Boundary] = {}
        self._uses_left: Counter[str] = Counter()
        self._training = True
        self._drew = False

    @property
    def draws_random(self) -> bool:
        """True if a layer of this step drew random numbers: its recompute will set the default generators for a while."""
        return self._drew

    # ---- a step ----

    def start(self, batch: Mapping[str, Tensor], training: bool = True) -> None:
        """Begins a step with a batch on the device. What an unfinished step left is dropped."""
        self._clear()
        self._slots.start()
        self._training = training
        self._uses_left = Counter(self._num_uses)
        self._env = {f"batch.{key}": value for key, value in batch.items() if f"batch.{key}" in self._num_uses}
        self._binding.bind_buffers(self._backend.device)
        self._modes = [(module, module.training) for module in self._binding.model.modules()]

    @contextmanager
    def _modes_of_the_step(self) -> Iterator[None]:
        """Modules in the mode that their forward had, whatever ``eval()`` or ``train()`` has been called since."""
        changed = [(module, mode) for module, mode in self._modes if module.training != mode]
        for module, mode in changed:
            module.training = mode
        try:
            yield
        finally:
            for module, mode in changed:
                module.training = not mode

    def prologue(self, weights: Weights) -> None:
        program = self._programs[self._first]
        self._bind(weights)
        with torch.set_grad_enabled(self._training):
            outputs = self._call(program, [self._env[name] for name in program.inputs])
        if self._training:
            self._graphs[program.name] = _Graph({}, _edges(program, outputs), weights)
        self._store(program, outputs)
        self._release_inputs(program)

    def forward(self, stage: str, weights: Weights, act: Activation = Activation.RECOMPUTE) -> None:
        """`act`: what becomes of what autograd saves. Nothing is kept until :meth:`recompute`, or there is none."""
        program = self._programs[stage]
        self._bind(weights)
        args = [self._env[name] for name in program.inputs]
        if not self._training:
            with torch.no_grad():
                self._store(program, self._call(program, args))
            self._release_inputs(program)
            return
        rerun = act in (Activation.RECOMPUTE, Activation.SELECTIVE)
        before = self._surroundings.before(program) if rerun else None
        saved = SavedTensors(self._labels[stage], keep=not rerun)
        keeping = self._keeping(stage) if act is Activation.SELECTIVE else None
        saved.bind_weights(weights)
        if act is not Activation.RETAIN:
            saved.bind_inputs({name: self._env[name] for name in program.inputs})
        with torch.enable_grad(), saved.recording():
            entered = enter({name: self._env[name] for name in program.grad_inputs})
            with keeping or nullcontext():
                outputs = self._call(program, [entered.get(name, self._env[name]) for name in program.inputs])
        inputs = {name: get_gradient_edge(value) for name, value in entered.items()}
        self._graphs[stage] = _Graph(inputs, _edges(program, outputs), weights, saved, keeping)
        self._store(program, outputs)
        if before is not None:
            kept = self._kept[stage] = self._surroundings.changed_since(before, program)
            self._drew |= kept.rng is not None
        elif act is Activation.OFFLOAD:
            self._with_inputs.add(stage)
        else:
            self._release_inputs(program)

    def recompute(self, stage: str, weights: Weights) -> None:
        """Nothing when this rank's batch bears no loss: no gradient depends on it."""
        program = self._programs[stage]
        kept, graph = self._kept.pop(stage), self._graphs.get(stage)
        if graph is not None and graph.saved is not None:
            self._bind(weights)
            graph.saved.bind_weights(weights)
            inputs = self._inputs_back(stage)
            graph.saved.bind_inputs(inputs)
            with self._modes_of_the_step(), self._surroundings.as_before(kept), torch.enable_grad():
                entered = enter({name: inputs[name] for name in program.grad_inputs})
                args = [entered.get(name, inputs[name]) for name in program.inputs]
                with self._replaying(stage, graph.keeping):
                    graph.saved.refill(lambda: self._call(program, args))
        self._release_inputs(program)

    def backward(self, stage: str, weights: Weights, slots: Slots, has_tokens: bool = True) -> dict[str, bool]:
        """Writes or adds the stage's parameter gradients into `slots`, and its input gradients into the environment.

        Returns, by parameter name, which trainable parameters of these groups have a gradient so far in this step. All
        gradients are zero when the batch bears no loss (`has_tokens` False), whatever the forward has computed. A layer
        that has not been recomputed is, first.
        """
        if stage in self._kept:
            self.recompute(stage, weights)
        graph = self._graphs.pop(stage, None)
        if stage in self._with_inputs:
            if graph is not None and graph.saved is not None:
                graph.saved.bind_inputs(self._inputs_back(stage))
            self._release_inputs(self._programs[stage])
        grads = {name: self._grads.pop(name) for name in self._programs[stage].grad_outputs if name in self._grads}
        if graph is None or not has_tokens:
            return self._slots.write_none(slots)
        if graph.saved is not None:
            graph.saved.bind_weights(weights)
        outputs = [name for name in graph.outputs if name in grads]
        if not outputs:
            return self._slots.write_none(slots)
        return self._differentiate(graph, [graph.outputs[n] for n in outputs], [grads.pop(n) for n in outputs], slots)

    def prologue_backward(self, weights: Weights, slots: Slots, has_tokens: bool = True) -> dict[str, bool]:
        return self.backward(self._first, weights, slots, has_tokens)

    def epilogue(
        self, weights: Weights, slots: Slots, seed: float = 1.0, has_tokens: bool = True
    ) -> tuple[Tensor, dict[str, bool]]:
        """The loss, detached, and what :meth:`backward` returns. `seed`: the gradient of the loss.

        Without loss-bearing tokens the loss is 0 and so is every gradient of this rank, now and in the rest of the step.
        """
        program = self._programs[self._last]
        if not has_tokens:
            self._release_inputs(program)
            self._graphs.clear()
            return torch.zeros((), device=self._backend.device), self._slots.write_none(slots)
        self._bind(weights)
        args, leaves = self._with_leaves(program)
        with torch.enable_grad():
            (loss,) = self._call(program, args)
        self._release_inputs(program)
        del args  # backward shall free what it can
        graph = _Graph(leaves, {}, weights)
        if not loss.requires_grad:
            return loss.detach(), self._slots.write_none(slots)
        return loss.detach(), self._differentiate(graph, [loss], [torch.full_like(loss, seed)], slots)

    def evaluate(self, weights: Weights) -> Tensor:
        """The loss alone, after forwards only. Ends the step."""
        program = self._programs[self._last]
        self._bind(weights)
        with torch.no_grad():
            (loss,) = self._call(program, [self._env[name] for name in program.inputs])
        self._clear()
        return loss.detach()

    # ---- activations ("act.<stage>") and boundaries ("h.<stage>") to the host and back ----
    # Each call by the thread of its own stream. The graph's edges order them among themselves and with the stages' ops.

    def offload(self, value: str, buffer: Tensor, copy: Copy) -> int:
        """Copies to `buffer` on the host what of the value is this stage's alone. Returns the number of bytes."""
        head, _, stage = value.partition(".")
        device = self._backend.device
        if head == "act":
            saved = self._saved(stage)
            return saved.offload(buffer, device, copy) if saved is not None else 0
        program = self._programs[stage]
        own = {name: self._env[name] for name in program.grad_inputs if self._num_uses[name] == 1}
        parcel = Parcel(own.values(), device, buffer.numel())
        away = {n: (Geometry.of(t), start) for n, t in own.items() if (start := parcel.start(t)) is not None}
        self._boundaries[stage] = _Boundary(parcel, away)
        parcel.pack(buffer, copy)
        return parcel.num_bytes

    def leave(self, value: str, *, poisoned: bool = False) -> None:
        """Frees on the device what :meth:`offload` has copied. `poisoned`: fills it with NaN, where nobody else has it."""
        head, _, stage = value.partition(".")
        saved = self._saved(stage)
        if head == "act":
            memory = [] if saved is None else saved.leave()
        else:
            memory = self._boundaries[stage].parcel.let_go()
            for name in self._boundaries[stage].away:
                del self._env[name]
                if saved is not None:
                    saved.unbind_input(name)
        if poisoned:
            kept = [t for graph in self._graphs.values() if graph.saved is not None for t in graph.saved.kept()]
            used = {storage_of(t) for t in (*self._env.values(), *kept)}
            for freed in memory:
                if storage_of(freed) not in used:
                    poison(freed)

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

    def _inputs_back(self, stage: str) -> dict[str, Tensor]:
        """The stage's inputs, those that were on the host from the slot that they came back to."""
        if (boundary := self._boundaries.pop(stage, None)) is not None:
            assert boundary.slot is not None, f"{stage}: its inputs are not back from the host"
            self._env |= {name: geometry.over(boundary.slot, start) for name, (geometry, start) in boundary.away.items()}
        return {name: self._env[name] for name in self._programs[stage].inputs}

    def _saved(self, stage: str) -> SavedTensors | None:
        graph = self._graphs.get(stage)
        return None if graph is None else graph.saved

    # ---- gradients ----

    def _differentiate(
        self, graph: _Graph, outputs: list[GradientEdge | Tensor], seeds: list[Tensor], slots: Slots
    ) -> dict[str, bool]:
        for name, value in graph.inputs.items():
            if name in self._grads:  # from later stages: the engine adds this stage's contributions on top, one by one
                outputs.append(value)
                seeds.append(self._grads[name])
        params = {group: [w for w in graph.weights[group] if w.requires_grad] for group in slots}
        sources = [*graph.inputs.values(), *(w for ws in params.values() for w in ws)]
        found = iter(torch.autograd.grad(outputs, sources, seeds, allow_unused=True) if sources else ())
        for name, grad in zip(graph.inputs, found, strict=False):
            if grad is not None:
                self._grads[name] = grad.clone() if graph.saved is not None and graph.saved.borrows(grad) else grad
        present: dict[str, bool] = {}
        for group, leaves in params.items():
            flat, accumulate = slots[group]
            present |= self._slots.write(group, flat, [next(found) for _ in leaves], accumulate)
        return present

    # ---- running a program ----

    def _bind(self, weights: Weights) -> None:
        for group, views in weights.items():
            self._binding.bind(group, views)

    def _call(self, program: StageProgram, args: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = program.fn(self._binding.model, *args)
        assert len(outputs) == len(program.outputs), f"{program.name} gave {len(outputs)} values, not {program.outputs}"
        return outputs

    def _with_leaves(self, program: StageProgram) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The stage's arguments, with leaves for the differentiable ones. The tracer has made sure that none is written to."""
        leaves = {name: self._env[name].detach().requires_grad_() for name in program.grad_inputs}
        return [leaves.get(name, self._env[name]) for name in program.inputs], leaves

    def _store(self, program: StageProgram, outputs: Sequence[Tensor]) -> None:
        for name, value in zip(program.outputs, outputs, strict=True):
            if self._uses_left[name]:
                self._env[name] = value.detach()

    def _release_inputs(self, program: StageProgram) -> None:
        for name in set(program.inputs):
            self._uses_left[name] -= 1
            if not self._uses_left[name]:
                self._env.pop(name, None)  # without loss there may be no way back from the host

    # ---- what a selective recompute need not compute ----

    def _keeping(self, stage: str) -> Keeping:
        return Keeping(self._labels[stage], self._choices.get(self._choice_key(stage), frozenset()))

    @contextmanager
    def _replaying(self, stage: str, keeping: Keeping | None) -> Iterator[None]:
        """Context of a rerun. The first of each kind measures what the next steps keep; none after that pays for it."""
        key = self._choice_key(stage)
        if keeping is None:
            yield
        elif key in self._choices:
            with keeping.replay():
                yield
        else:
            with Measuring(self._backend) as measuring:
                yield
            if ops := measuring.measured():
                self._choices[key] = choose(ops, self.trace.graph.stage(stage).activation_bytes, SELECTED_SHARE)

    def _choice_key(self, stage: str) -> tuple[str, bool]:
        return self.trace.graph.stage(stage).kind_key, self._binding.model.training

def _edges(program: StageProgram, outputs: Sequence[Tensor]) -> dict[str, GradientEdge]:
    named = dict(zip(program.outputs, outputs, strict=True))
    return {name: get_gradient_edge(named[name]) for name in program.grad_outputs if named[name].requires_grad}
