"""The stage runner: one step of the user's model, stage by stage, with gradients equal to eager PyTorch's.

    prologue       runs with gradients, and its graph is kept until its backward (it is small: embedding, masks, rotary)
    forward        a layer, with gradients; its graph keeps what the plan says (saved.py): all it saved, or nothing
    recompute      the layer again, from the same inputs, generator state and buffers, until all that its graph lacks is there
    backward       the layer's gradients: its parameters' into a flat gradient slot, its inputs' into the environment
    epilogue       forward and backward of norm, head and loss in one go

Each can be tried again after it has failed for want of memory, all but the prologue's backward: until it has succeeded, nothing
that it needs is given up, and nothing that others see has changed. A layer therefore keeps its inputs and what it needs to be run
again until its backward is done, whether it is to be or not: what it has saved may have to go (:meth:`StageRunner.drop`).

All of it runs in the GPU stream's thread. Contributions to one value's gradient are summed in the order in which the
autograd engine would: later stages first, and within a stage on top of what has come in already (a seed at the leaf).
The one exception is a parameter used by several stages and several times within one of the earlier ones: its first sum
is taken within the stage, since the engine's way would need another full-size temporary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slidedp.compiler.decisions import Activation
from slidedp.executor.backend import Backend, poison
from slidedp.executor.binding import Binding
from slidedp.executor.gradients import GradientSlots
from slidedp.executor.parcels import Copy, Geometry, Parcel, num_bytes, storage_of
from slidedp.executor.saved import SavedTensors, enter
from slidedp.executor.selective import Keeping, Selections
from slidedp.executor.stage_graph import Boundary, Gradients, Graph, Slots, Weights, edges_of
from slidedp.executor.surroundings import Changed, Surroundings

if TYPE_CHECKING:
    from slidedp.compiler.tracer import StageProgram, Trace


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
        self.labels = {s.name: f"layer {s.name} ({s.kind_key.rpartition('-')[0] or s.kind})" for s in trace.graph.stages}
        names = list(self._programs)
        self._first, self._last = names[0], names[-1]
        self._num_uses = Counter(name for p in trace.programs for name in set(p.inputs))
        self._surroundings = Surroundings(binding, backend)
        self._selections = Selections(trace.graph, binding.model, backend)
        self._slots = slots or GradientSlots(binding.groups)
        self.clear()

    def clear(self) -> None:
        """Nothing is left of a step."""
        self._env: dict[str, Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        self._graphs: dict[str, Graph] = {}
        self._kept: dict[str, Changed] = {}
        self._boundaries: dict[str, Boundary] = {}
        self._uses_left: Counter[str] = Counter()
        self._training = True
        self._drew = False

    @property
    def draws_random(self) -> bool:
        """True if a layer of this step drew random numbers: its recompute, should there be one, will set the default generators
        for a while.
        """
        return self._drew

    # ---- a step ----

    def start(self, batch: Mapping[str, Tensor], training: bool = True) -> None:
        """Begins a step with a batch on the device. What an unfinished step left is dropped."""
        self.clear()
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
        with self._surroundings.undone_if_it_fails(program), torch.set_grad_enabled(self._training):
            outputs = self._call(program, [self._env[name] for name in program.inputs])
        if self._training:
            self._graphs[program.name] = Graph({}, edges_of(program, outputs), weights)
        self._store(program, outputs)
        self._release_inputs(program)

    def forward(self, stage: str, weights: Weights, act: Activation = Activation.RECOMPUTE, stays: bool = False) -> None:
        """`act`: what becomes of what autograd saves. `stays`: it is not called for, though other layers' goes to the host."""
        program = self._programs[stage]
        self._bind(weights)
        inputs = {name: self._env[name] for name in program.inputs}
        if not self._training:
            with torch.no_grad():
                self._store(program, self._call(program, [inputs[name] for name in program.inputs]))
            self._release_inputs(program)
            return
        saved = SavedTensors(self.labels[stage], keep=act in (Activation.RETAIN, Activation.OFFLOAD))
        keeping = self._selections.keeping(stage, self.labels[stage]) if act is Activation.SELECTIVE else None
        with self._surroundings.undone_if_it_fails(program) as before:
            graph, outputs = self._record(program, inputs, weights, saved, keeping)
            kept = self._surroundings.changed_since(before, program)
        graph.act, graph.moves = act, act is Activation.OFFLOAD and not stays
        self._graphs[stage] = graph
        self._store(program, outputs)
        self._kept[stage] = kept
        self._drew |= kept.rng is not None

    def recompute(self, stage: str, weights: Weights) -> None:
        """Nothing when this rank's batch bears no loss, for no gradient depends on it; nor when the graph lacks nothing."""
        graph = self._graphs.get(stage)
        if graph is None or graph.saved is None or graph.spent or not graph.saved.lacks:
            return
        self._bind(weights)
        graph.saved.bind_weights(weights)
        inputs = self._inputs_back(stage)
        graph.saved.bind_inputs(inputs)
        program = self._programs[stage]
        with self._as_in_its_forward(stage), torch.enable_grad():
            entered = enter({name: inputs[name] for name in program.grad_inputs})
            args = [entered.get(name, inputs[name]) for name in program.inputs]
            with self._selections.replaying(stage, graph.keeping):
                graph.saved.refill(lambda: self._call(program, args))

    def backward(self, stage: str, weights: Weights, slots: Slots, has_tokens: bool = True) -> dict[str, bool]:
        """Writes or adds the stage's parameter gradients into `slots`, and its input gradients into the environment.

        Returns, by parameter name, which trainable parameters of these groups have a gradient so far in this step. All
        gradients are zero when the batch bears no loss (`has_tokens` False), whatever the forward has computed. A layer
        that has not been recomputed, and has to be, is first.
        """
        graph = self._graphs.get(stage) if has_tokens else None
        if graph is None or not any(name in self._grads for name in graph.names):
            self._end(stage)
            return self._slots.write_none(slots)
        graph = self._whole(stage, graph, weights)
        outputs = [name for name in graph.outputs if name in self._grads]
        try:
            found = self._differentiate(graph, [graph.outputs[n] for n in outputs], [self._grads[n] for n in outputs], slots)
        except BaseException:
            graph.spend()
            raise
        self._end(stage)
        return self._commit(found, slots)

    def _whole(self, stage: str, graph: Graph, weights: Weights) -> Graph:
        """The layer's graph with all that its backward needs: refilled, or, after a backward that has failed, a new one."""
        if graph.spent:
            saved = SavedTensors(self.labels[stage], keep=True)
            self._bind(weights)
            with self._as_in_its_forward(stage):
                graph, _ = self._record(self._programs[stage], self._inputs_back(stage), weights, saved)
            self._graphs[stage] = graph
        elif graph.saved is not None:
            self.recompute(stage, weights)
            graph.saved.bind_weights(weights)
            graph.saved.bind_inputs(self._inputs_back(stage))
        return graph

    def _end(self, stage: str) -> None:
        """The stage's backward is done, or there is none to do."""
        self._graphs.pop(stage, None)
        self._boundaries.pop(stage, None)
        for name in self._programs[stage].grad_outputs:
            self._grads.pop(name, None)
        if self._kept.pop(stage, None) is not None:  # the prologue's inputs are gone already
            self._release_inputs(self._programs[stage])

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
        with self._surroundings.undone_if_it_fails(program):
            args, leaves = self._with_leaves(program)
            with torch.enable_grad():
                (loss,) = self._call(program, args)
            del args  # backward shall free what it can
            graph, value = Graph(leaves, {}, weights), loss.detach()
            found = self._differentiate(graph, [loss], [torch.full_like(loss, seed)], slots) if loss.requires_grad else None
        self._release_inputs(program)
        return value, self._slots.write_none(slots) if found is None else self._commit(found, slots)

    def evaluate(self, weights: Weights) -> Tensor:
        """The loss alone, after forwards only. Ends the step."""
        program = self._programs[self._last]
        self._bind(weights)
        with torch.no_grad():
            (loss,) = self._call(program, [self._env[name] for name in program.inputs])
        self.clear()
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
        self._boundaries[stage] = Boundary(parcel, away)
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
            kept = [t for graph in self._graphs.values() for t in graph.kept()]
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
        if (boundary := self._boundaries.get(stage)) is not None:
            assert boundary.slot is not None, f"{stage}: its inputs are not back from the host"
            self._env |= {name: geometry.over(boundary.slot, start) for name, (geometry, start) in boundary.away.items()}
            del self._boundaries[stage]
        return {name: self._env[name] for name in self._programs[stage].inputs}

    def _saved(self, stage: str) -> SavedTensors | None:
        graph = self._graphs.get(stage)
        return None if graph is None else graph.saved

    # ---- what can be given up ----

    def held(self) -> dict[str, int]:
        """Layers that could be computed again from here on -> bytes that this would free, in the order of their forwards."""
        used = {storage_of(t) for t in (*self._env.values(), *self._grads.values())}
        kept = {stage: graph.kept() for stage, graph in self._graphs.items()
                if graph.saved is not None and graph.act is not Activation.RECOMPUTE and not graph.moves}
        sizes = {stage: num_bytes(t for t in tensors if storage_of(t) not in used) for stage, tensors in kept.items()}
        return {stage: size for stage, size in sizes.items() if size}

    def drop(self, stage: str) -> Activation:
        """Frees what a layer of :meth:`held` keeps: its backward runs it again first, from its inputs and the weights of then.

        Returns what it had been told to keep.
        """
        graph = self._graphs[stage]
        assert graph.saved is not None, stage
        graph.saved.drop()
        graph.keeping = None
        return graph.act

    def leaving(self) -> list[str]:
        """Layers that still keep what goes to the host: another thread may be about to copy it."""
        return [stage for stage, graph in self._graphs.items() if graph.moves and graph.kept()]

    def leave_early(self, stage: str) -> int:
        """Once it has been copied: :meth:`leave`, with nobody waiting for its place. Returns bytes."""
        before = num_bytes(self._graphs[stage].kept())
        self.leave(f"act.{stage}")
        return before - num_bytes(self._graphs[stage].kept())

    def time_no_more(self, stage: str) -> list[str]:
        """Layers of the stage's kind, which keep nothing from here on, if it was the one to measure what they shall keep."""
        graph = self._graphs.get(stage)
        if graph is None or graph.keeping is None or not self._selections.give_up(stage):
            return []
        return [name for name, other in self._graphs.items() if other.keeping and self._selections.alike(name, stage)]

    # ---- gradients ----

    def _differentiate(
        self, graph: Graph, outputs: list[GradientEdge | Tensor], seeds: list[Tensor], slots: Slots
    ) -> Gradients:
        for name, value in graph.inputs.items():
            if name in self._grads:  # from later stages: the engine adds this stage's contributions on top, one by one
                outputs.append(value)
                seeds.append(self._grads[name])
        params = {group: [w for w in graph.weights[group] if w.requires_grad] for group in slots}
        sources = [*graph.inputs.values(), *(w for ws in params.values() for w in ws)]
        # torch takes edges and tensors side by side, which its annotation does not say
        ends, starts = cast(list[Tensor], outputs), cast(list[Tensor], sources)
        found = iter(torch.autograd.grad(ends, starts, seeds, allow_unused=True) if sources else ())
        of_inputs = {}
        for name, grad in zip(graph.inputs, found, strict=False):
            if grad is not None:
                of_inputs[name] = grad.clone() if graph.saved is not None and graph.saved.borrows(grad) else grad
        return Gradients(of_inputs, {group: [next(found) for _ in leaves] for group, leaves in params.items()})

    def _commit(self, found: Gradients, slots: Slots) -> dict[str, bool]:
        """From here on nothing may be tried again: it would add a gradient twice. Writing into slots takes no memory."""
        self._grads |= found.of_inputs
        present: dict[str, bool] = {}
        try:
            for group, grads in found.of_weights.items():
                flat, accumulate = slots[group]
                present |= self._slots.write(group, flat, grads, accumulate)
        except torch.OutOfMemoryError as e:
            raise RuntimeError("a gradient that is there cannot be written into its slot") from e
        return present

    # ---- running a program ----

    def _bind(self, weights: Weights) -> None:
        for group, views in weights.items():
            self._binding.bind(group, views)

    def _record(self, program: StageProgram, inputs: Mapping[str, Tensor], weights: Weights, saved: SavedTensors,
                keeping: Keeping | None = None) -> tuple[Graph, Sequence[Tensor]]:
        """Runs a bound layer; its graph and outputs."""
        saved.bind_weights(weights)
        saved.bind_inputs(inputs)
        with torch.enable_grad(), saved.recording():
            entered = enter({name: inputs[name] for name in program.grad_inputs})
            with keeping or nullcontext():
                outputs = self._call(program, [entered.get(name, inputs[name]) for name in program.inputs])
        edges = {name: get_gradient_edge(value) for name, value in entered.items()}
        return Graph(edges, edges_of(program, outputs), weights, saved, keeping), outputs

    @contextmanager
    def _as_in_its_forward(self, stage: str) -> Iterator[None]:
        """Context of running a layer again."""
        with self._modes_of_the_step(), self._surroundings.as_before(self._kept[stage]):
            yield

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
