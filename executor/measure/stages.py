"""A model's own stages on the real device: a few of each kind, on random weights, as the stage runner runs them in a step.

The user's model takes part as code only: its parameters are exchanged for views of random buffers, its buffers for copies,
and all that its forward leaves behind (attributes, generators) is put back.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from slidedp.compiler.costmodel.measured import PhaseCost
from slidedp.compiler.decisions import Activation
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.tracing.metamodel import attributes_kept
from slidedp.compiler.tracing.minipipeline import mini_pipeline, reached
from slidedp.compiler.tracing.tracer import Trace
from slidedp.executor.devices.backend import Backend
from slidedp.executor.devices.devices import open_backend
from slidedp.executor.measure.lab import Lab, lengths
from slidedp.executor.ranks.collectives import SingleRank
from slidedp.executor.stages.binding import Binding, Leaves
from slidedp.executor.stages.stage_graph import Slots
from slidedp.executor.stages.stages import StageRunner
from slidedp.executor.streams.tickets import Aborted

REPEATS = 2
"""Of each experiment; most kinds of layers are there twice."""
IN_A_ROW_S = 0.5
"""For how long layers run in a row when a GPU is timed, if the model has so many. Within 0.1 s they take it to its power limit,
and its clock goes down by some 10 %; the head after every other layer leaves it where it was.
"""
WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class _Part:
    """One phase of one stage."""

    stage: str
    phase: OpKind
    run: Callable[[], object]


def measure_stages(
    model: nn.Module, trace: Trace, batch: Mapping[str, Tensor], device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[PhaseCost, ...]:
    """Time and memory of every phase of each kind of stage, for `batch`'s shapes. `dtypes`: of weights, of gradients.

    Medians of a few runs, after two to warm up: how long the device takes, of runs back to back, so that it is busy ahead, of a
    GPU's layers with many in a row; how long issuing takes, of single ones, so that nothing holds the host up. This rank alone:
    nothing is collective. Leaves `model` and every default generator as they were; torch's peak memory statistics are reset.
    Raises what the model's forward or backward raises.
    """
    mini = mini_pipeline(trace)
    with untouched(model, device) as backend:
        return tuple(_run(model, mini, len(trace.graph.layers), batch, backend, dtypes))


def _run(model: nn.Module, mini: Trace, num_layers: int, batch: Mapping[str, Tensor], backend: Backend,
         dtypes: tuple[torch.dtype, torch.dtype]) -> list[PhaseCost]:
    binding = Binding(model, mini.graph.groups)  # it may refuse the model
    lab = Lab(backend, SingleRank(), 0.0)
    try:
        with torch.inference_mode(False):
            pipeline = _Pipeline(mini, binding, backend, batch, dtypes)
        parts = pipeline.parts()
        tasks = {Stream.GPU: [part.run for part in parts]}
        lab.spans(tasks)
        memory = _memory(lab, parts, backend.device)
        issues = [lab.issues(tasks[Stream.GPU]) for _ in range(REPEATS)]
        spans = lab.spans({Stream.GPU: tasks[Stream.GPU] * (REPEATS + 1)})[Stream.GPU]
        seconds = [lengths(spans[i + len(parts) :: len(parts)]) for i in range(len(parts))]
        if backend.device.type == "cuda":
            once_s = sum(map(statistics.median, seconds))
            count = num_in_a_row(num_layers / max(len(mini.graph.layers), 1), once_s)
            for i, in_a_row in layers_in_a_row(lab, pipeline, parts, count).items():
                seconds[i] = in_a_row
    except Aborted as e:
        raise e.__cause__ or e from None
    finally:
        lab.close()
        binding.restore()
    return _rows(mini, parts, seconds, [list(each) for each in zip(*issues, strict=True)], memory)


def num_in_a_row(of_a_step: float, once_s: float) -> int:
    """How often to run the layers between two heads, where a step does so `of_a_step` times and once takes `once_s`."""
    return max(1, min(round(of_a_step), math.ceil(IN_A_ROW_S / once_s)))


def layers_in_a_row(lab: Lab, pipeline: _Pipeline, parts: Sequence[_Part], count: int) -> dict[int, list[float]]:
    """Seconds of the parts that are layers', by number: of `count` runs between two heads, as in a step, after as many before."""
    head = next(i for i, part in enumerate(parts) if part.phase is OpKind.EPILOGUE)
    ends = {parts[0].stage, parts[head].stage}
    layers = [i for i, part in enumerate(parts) if part.stage not in ends]
    whole = [part.run for part in parts]
    whole.insert(head + 1, pipeline.keep_seeds)
    alone = sorted([0, head, *layers])
    row = [pipeline.seed if i == head else parts[i].run for i in alone]
    step = whole + row * count
    spans = lab.spans({Stream.GPU: step * 2})[Stream.GPU][len(step) + len(whole) :]
    return {i: lengths(spans[n :: len(row)]) for n, i in enumerate(alone) if i in layers}


def _rows(
    mini: Trace, parts: list[_Part], seconds: list[list[float]], issues: list[list[float]], memory: list[tuple[int, int]] | None
) -> list[PhaseCost]:
    """One row a kind and phase: the median times of its parts, the most memory of any, the least that is given back.

    None for the backward of a stage that nothing differentiates in the cut-down model.
    """
    kinds, differentiated = {s.name: s.kind_key for s in mini.graph.stages}, reached(mini)
    members: dict[tuple[str, OpKind], list[int]] = {}
    for i, part in enumerate(parts):
        if part.phase is not OpKind.BACKWARD or part.stage in differentiated:
            members.setdefault((kinds[part.stage], part.phase), []).append(i)
    rows = []
    for (kind, phase), indices in members.items():
        peak, kept = (None, None) if memory is None else (max(memory[i][k] for i in indices) for k in (0, 1))
        issue_us = median_us(issues, indices) if issues else None
        rows.append(PhaseCost(kind, phase, Activation.RECOMPUTE, median_us(seconds, indices), peak, kept, issue_us))
    return rows


def median_us(seconds: list[list[float]], indices: list[int]) -> int:
    return round(statistics.median(s for i in indices for s in seconds[i]) * 1e6)


class _Pipeline:
    """The ops of one step of a cut-down model, as tasks for the GPU stream, which is where all its tensors are made."""

    def __init__(self, mini: Trace, binding: Binding, backend: Backend, batch: Mapping[str, Tensor],
                 dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        self.mini, self.binding, self.backend = mini, binding, backend
        self.runner = StageRunner(mini, binding, backend)
        generator = torch.Generator(backend.device).manual_seed(0)
        self.weights: dict[str, Leaves] = {}
        self.grads: dict[str, Tensor] = {}
        for g in mini.graph.groups:
            flat = backend.empty(g.numel, dtypes[0]).normal_(0, WEIGHT_SCALE, generator=generator)
            self.weights[g.name] = binding.leaves(flat, g.name)
            if g.trainable:
                self.grads[g.name] = backend.empty(g.num_trainable, dtypes[1])
        self.batch = batch
        backend.fence_caller()
        self.written: set[str] = set()
        self.seeds: dict[str, Tensor] = {}

    def parts(self) -> list[_Part]:
        first, *layers, last = [s.name for s in self.mini.graph.stages]
        parts = [_Part(first, OpKind.PROLOGUE, self.prologue)]
        parts += [_Part(name, OpKind.FORWARD, partial(self.runner.forward, name, self.of(name))) for name in layers]
        parts.append(_Part(last, OpKind.EPILOGUE, lambda: self.runner.epilogue(self.of(last), self.slots(last))))
        for name in reversed(layers):
            parts.append(_Part(name, OpKind.RECOMPUTE, partial(self.runner.recompute, name, self.of(name))))
            parts.append(_Part(name, OpKind.BACKWARD, partial(self.backward, name)))
        if any(self.mini.graph.group(g).trainable for g in self.mini.graph.stage(first).groups):
            parts.append(_Part(first, OpKind.BACKWARD, partial(self.backward, first)))
        return parts

    def prologue(self) -> None:
        self.written.clear()
        self.runner.start({key: self.backend.to_device(value) for key, value in self.batch.items()})
        self.runner.prologue(self.of(self.mini.graph.stages[0].name))

    def keep_seeds(self) -> None:
        """Copies of the gradients that the head has just left: a layer's backward may write into its own."""
        self.seeds = {name: grad.clone() for name, grad in self.runner.values.grads.items()}

    def seed(self) -> None:
        """In the head's place: the gradients that it left before."""
        self.runner.values.grads |= {name: grad.clone() for name, grad in self.seeds.items()}

    def backward(self, stage: str) -> None:
        self.runner.backward(stage, self.of(stage), self.slots(stage))

    def of(self, stage: str) -> dict[str, Leaves]:
        return {name: self.weights[name] for name in self.mini.graph.stage(stage).groups}

    def slots(self, stage: str) -> Slots:
        """As the graph's versions have it: a group's first contribution of a step is written, later ones are added."""
        groups = [name for name in self.mini.graph.stage(stage).groups if name in self.grads]
        found = {name: (self.grads[name], name in self.written) for name in groups}
        self.written |= set(groups)
        return found


def _memory(lab: Lab, parts: list[_Part], device: torch.device) -> list[tuple[int, int]] | None:
    """Peak and remainder of each phase, in bytes, from the allocator's books, which are kept as work is issued."""
    if device.type != "cuda":
        return None
    found: list[tuple[int, int]] = []

    def counted(part: _Part) -> None:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        part.run()
        found.append((torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before))

    lab.spans({Stream.GPU: [partial(counted, part) for part in parts]})
    return found


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[Backend]:
    """A backend on which `model` may run: its buffers are copies, and generators and attributes are put back afterwards."""
    backend = open_backend(device)
    states = backend.rng_state(), random.getstate(), np.random.get_state()
    try:
        with attributes_kept(model):
            copies: dict[int, Tensor] = {}
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
            yield backend
    finally:
        backend.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        backend.close()
        if device.type == "cuda":
            gc.collect()  # what the pipeline kept goes back to the device: a plan's streams cannot use another stream's blocks
            torch.cuda.empty_cache()
