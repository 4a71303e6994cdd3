"""The stage runner: one step of the user's model, stage by stage, with gradients equal to eager PyTorch's.

    prologue       embedding, masks, rotary tables: runs with gradients; its graph is small and is kept until its backward
    forward        a layer, with gradients; what autograd saves is kept, or not, as the plan says (saved.py)
    recompute      the layer's forward again, from the same inputs, generator state and buffers, to fill in what was not kept
    backward       the layer's gradients: of its parameters into a flat gradient slot, of its inputs into `values.grads`
    epilogue       forward and backward of norm, head and loss together

What passes from one stage to another is in stage_values.py.

Every call but the prologue's backward can be repeated after it has run out of memory: until it succeeds, it frees nothing that it
needs and changes nothing that others see. Therefore a layer keeps its inputs, and whatever a rerun needs, until its backward is
done, even where no recompute is planned: memory may run short, and what it saved be dropped (:meth:`StageValues.drop`).

All of it runs in the GPU stream's thread. Contributions to one value's gradient are summed in the autograd engine's order: later
stages first, and within a stage on top of the sum so far (which seeds the leaf). There is one exception. Where several stages use
a parameter, and one of the earlier ones uses it several times, that stage's contributions are summed first and then added: the
engine's order would need another full-size temporary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slidedp.compiler.decisions import Activation
from slidedp.executor.devices.backend import Backend
from slidedp.executor.stages.binding import Binding
from slidedp.executor.stages.gradients import GradientSlots
from slidedp.executor.stages.modes import Modes
from slidedp.executor.stages.saved import SavedTensors, enter
from slidedp.executor.stages.selective import Keeping, Selections
from slidedp.executor.stages.stage_graph import Gradients, Graph, Slots, Weights, edges_of, fills_what_it_saves
from slidedp.executor.stages.stage_values import StageValues
from slidedp.executor.stages.surroundings import Changed, Surroundings

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import StageProgram, Trace


class StageRunner:
    """Runs the stages of one trace on a bound module. One step at a time, started by :meth:`start`.

    Each micro-batch of a step has a runner of its own. They share `slots`, which record which parameters have a gradient already;
    all runners start before any writes a gradient.

    The caller (the op graph) settles the order of calls: a layer's forward comes after the stages that make its inputs, its
    recompute and backward after those of all stages that use its outputs.
    """

    def __init__(self, trace: Trace, binding: Binding, backend: Backend, slots: GradientSlots | None = None) -> None:
        self.trace, self._binding, self._backend = trace, binding, backend
        self._programs: dict[str, StageProgram] = {p.name: p for p in trace.programs}
        self.labels = {s.name: f"layer {s.name} ({s.kind_key.rpartition('-')[0] or s.kind})" for s in trace.graph.stages}
        names = list(self._programs)
        self._first, self._last = names[0], names[-1]
        self._to_the_end: dict[str, bool] = {}  # layers whose forward must be run again to its end, once they have run
        self._staying = {p.name: frozenset(p.inputs).difference(p.grad_inputs) for p in trace.programs}
        self.values = StageValues(trace.programs, backend.device)
        self._surroundings, self._modes = Surroundings(binding, backend), Modes(trace, binding.model)
        self._selections = Selections(trace.graph, binding.model, backend)
        self._slots = slots or GradientSlots(binding.groups)
        self.clear()

    def clear(self) -> None:
        """Drops everything that a step has left."""
        self.values.clear()
        self._kept: dict[str, Changed] = {}
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
        self.values.start(batch)
        self._binding.bind_buffers(self._backend.device)
        self._modes.start()

    def prologue(self, weights: Weights) -> None:
        program = self._programs[self._first]
        self._bind(weights)
        with self._surroundings.undone_if_it_fails(program), torch.set_grad_enabled(self._training):
            outputs = self._call(program, [self.values.env[name] for name in program.inputs])
        if self._training:
            self.values.graphs[program.name] = Graph({}, edges_of(program, outputs), weights)
        self.values.store(program, outputs)
        self.values.release_inputs(program)

    def forward(self, stage: str, weights: Weights, act: Activation = Activation.RECOMPUTE, stays: bool = False) -> None:
        """`act`: what becomes of what autograd saves. `stays`: the plan moves nothing of this layer's, although it offloads."""
        program = self._programs[stage]
        self._bind(weights)
        inputs = {name: self.values.env[name] for name in program.inputs}
        if not self._training:
            with torch.no_grad():
                self.values.store(program, self._call(program, [inputs[name] for name in program.inputs]))
            self.values.release_inputs(program)
            return
        saved = self._saved(program, keep=act in (Activation.RETAIN, Activation.OFFLOAD))
        keeping = self._selections.keeping(stage, self.labels[stage]) if act is Activation.SELECTIVE else None
        with self._surroundings.undone_if_it_fails(program) as before:
            graph, outputs = self._record(program, inputs, weights, saved, keeping)
            kept = self._surroundings.changed_since(before, program)
        graph.act, graph.moves = act, act is Activation.OFFLOAD and not stays
        self.values.graphs[stage] = graph
        self.values.store(program, outputs)
        self._kept[stage] = kept
        self._drew |= kept.rng is not None

    def recompute(self, stage: str, weights: Weights) -> None:
        """Runs the layer's forward again, to fill in what its graph lacks. Does nothing if it lacks nothing, or if this rank's
        batch bears no loss, since no gradient depends on it then.
        """
        graph = self.values.graphs.get(stage)
        if graph is None or graph.saved is None or graph.spent or not graph.saved.lacks:
            return
        self._bind(weights)
        inputs = self.values.inputs_of(stage)
        graph.saved.bind(weights, inputs)
        program = self._programs[stage]
        with self._modes.as_they_were(stage), self._surroundings.as_before(self._kept[stage]), torch.enable_grad():
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
        grads = self.values.grads
        graph = self.values.graphs.get(stage) if has_tokens else None
        if graph is None or not any(name in grads for name in graph.names):
            self._end(stage)
            return self._slots.write_none(slots)
        graph = self._whole(stage, graph, weights)
        outputs = [name for name in graph.outputs if name in grads]
        try:
            found = self._differentiate(graph, [graph.outputs[n] for n in outputs], [grads[n] for n in outputs], slots)
        except BaseException:
            graph.spend()
            raise
        self._end(stage)
        return self._commit(found, slots)

    def _whole(self, stage: str, graph: Graph, weights: Weights) -> Graph:
        """The layer's graph with all that its backward needs: refilled, or, after a backward that has failed, a new one."""
        if graph.spent:
            program = self._programs[stage]
            saved = self._saved(program, keep=True)
            self._bind(weights)
            with self._modes.as_they_were(stage), self._surroundings.as_before(self._kept[stage]):
                graph, _ = self._record(program, self.values.inputs_of(stage), weights, saved)
            self.values.graphs[stage] = graph
        elif graph.saved is not None:
            self.recompute(stage, weights)
            graph.saved.bind(weights, self.values.inputs_of(stage))
        return graph

    def _end(self, stage: str) -> None:
        """The stage's backward is done, or there is none to do."""
        self.values.end(stage)
        if self._kept.pop(stage, None) is not None:  # the prologue's inputs are gone already
            self.values.release_inputs(self._programs[stage])

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
            self.values.release_inputs(program)
            self.values.graphs.clear()
            return torch.zeros((), device=self._backend.device), self._slots.write_none(slots)
        self._bind(weights)
        with self._surroundings.undone_if_it_fails(program):
            args, leaves = self._with_leaves(program)
            with torch.enable_grad():
                (loss,) = self._call(program, args)
            del args  # backward shall free what it can
            graph, value = Graph(leaves, {}, weights), loss.detach()
            found = self._differentiate(graph, [loss], [torch.full_like(loss, seed)], slots) if loss.requires_grad else None
        self.values.release_inputs(program)
        return value, self._slots.write_none(slots) if found is None else self._commit(found, slots)

    def evaluate(self, weights: Weights) -> Tensor:
        """The loss alone, after forwards only. Ends the step."""
        program = self._programs[self._last]
        self._bind(weights)
        with torch.no_grad():
            (loss,) = self._call(program, [self.values.env[name] for name in program.inputs])
        self.clear()
        return loss.detach()

    def time_no_more(self, stage: str) -> list[str]:
        """Layers of the stage's kind, which keep nothing from here on, if it was the one to measure what they shall keep."""
        graph = self.values.graphs.get(stage)
        if graph is None or graph.keeping is None or not self._selections.give_up(stage):
            return []
        return [name for name, other in self.values.graphs.items() if other.keeping and self._selections.alike(name, stage)]

    # ---- gradients ----

    def _differentiate(
        self, graph: Graph, outputs: list[GradientEdge | Tensor], seeds: list[Tensor], slots: Slots
    ) -> Gradients:
        for name, value in graph.inputs.items():
            if name in self.values.grads:  # from later stages: the engine adds this stage's contributions on top, one by one
                outputs.append(value)
                seeds.append(self.values.grads[name])
        params = {group: graph.weights[group].trainable for group in slots}
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
        """Writes gradients into their slots. Must not be repeated, which would add a gradient twice; it takes no memory."""
        self.values.grads |= found.of_inputs
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

    def _saved(self, program: StageProgram, keep: bool) -> SavedTensors:
        return SavedTensors(self.labels[program.name], keep, stay=self._staying[program.name])

    def _record(self, program: StageProgram, inputs: Mapping[str, Tensor], weights: Weights, saved: SavedTensors,
                keeping: Keeping | None = None) -> tuple[Graph, Sequence[Tensor]]:
        """Runs a bound layer; its graph and outputs."""
        saved.bind(weights, inputs)
        with torch.enable_grad(), saved.recording():
            entered = enter({name: inputs[name] for name in program.grad_inputs})
            with keeping or nullcontext():
                outputs = self._call(program, [entered.get(name, inputs[name]) for name in program.inputs])
        if program.name not in self._to_the_end:
            self._to_the_end[program.name] = fills_what_it_saves(outputs)
        saved.whole = self._to_the_end[program.name]
        edges = {name: get_gradient_edge(value) for name, value in entered.items()}
        return Graph(edges, edges_of(program, outputs), weights, saved, keeping), outputs

    def _call(self, program: StageProgram, args: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = program.fn(self._binding.model, *args)
        assert len(outputs) == len(program.outputs), f"{program.name} gave {len(outputs)} values, not {program.outputs}"
        return outputs

    def _with_leaves(self, program: StageProgram) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The stage's arguments, with leaves for the differentiable ones. The tracer has made sure that none is written to."""
        leaves = {name: self.values.env[name].detach().requires_grad_() for name in program.grad_inputs}
        return [leaves.get(name, self.values.env[name]) for name in program.inputs], leaves
