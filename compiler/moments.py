"""Activations on a GPU at each moment of a step that can be its peak, from the LayerGraph and the decisions alone.

Boundaries and what layers keep pile up through the forward and go one by one in the backward, so the peak is while head and
loss run, or in one of the backwards. What is counted, as in memory_over_time.py: a boundary until its gradient, which takes its
place, has been read; the gradient of one that is on the host; what a layer keeps. What a kernel needs beside that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slidedp.compiler.decisions import Activation, Decisions
from slidedp.compiler.layergraph import LayerGraph, Stage, StageKind

BOUNDARIES = "boundary activations"
RETAINED = "retained activations"
RUNNING = "running stage's activations"
HEAD = "head and loss"

SELECTED_SHARE = 0.5
"""Of a layer's activation bytes, the most that a selective layer keeps."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes while `stage` runs: its backward, or the epilogue with the loss in it. Places of what is moved are not among them."""

    stage: str
    boundaries: int
    retained: int
    running: int
    head: int = 0

    @property
    def total(self) -> int:
        return self.boundaries + self.retained + self.running + self.head

    def by_use(self) -> dict[str, int]:
        return {BOUNDARIES: self.boundaries, RETAINED: self.retained, RUNNING: self.running, HEAD: self.head}


def peak_moment(layers: LayerGraph, decisions: Decisions) -> Moment:
    """The first that needs most."""
    return max(moments(layers, decisions), key=lambda m: m.total)


def moments(layers: LayerGraph, decisions: Decisions) -> Iterator[Moment]:
    """The epilogue, and the backwards in order of time."""
    stages = layers.stages[1:]
    waiting = [s.boundary_bytes * (not decisions.moves_boundary(s)) for s in stages]
    kept = [kept_bytes(s, decisions) for s in stages]
    held, retained = sum(waiting), sum(kept)
    yield Moment(stages[-1].name, held, retained, *epilogue_bytes(layers, decisions))
    for i in reversed(range(len(stages) - 1)):
        stage, after = stages[i], stages[i + 1]
        boundaries = sum(waiting[: i + 1]) + after.boundary_bytes + stage.boundary_bytes - waiting[i]
        moved = decisions.activation(stage) is Activation.OFFLOAD
        yield Moment(stage.name, boundaries, sum(kept[: i + 1]), 0 if moved else stage.activation_bytes - kept[i])
    first = layers.stages[0]
    if any(layers.group(name).trainable for name in first.groups):
        yield Moment(first.name, stages[0].boundary_bytes, 0, first.activation_bytes)


def kept_bytes(stage: Stage, decisions: Decisions) -> int:
    """What stays on the device from the stage's forward to its backward, beside its inputs."""
    if stage.kind is not StageKind.LAYER:
        return 0
    match decisions.activation(stage):
        case Activation.RETAIN:
            return stage.activation_bytes
        case Activation.SELECTIVE:
            return int(SELECTED_SHARE * stage.activation_bytes)
        case _:
            return 0


def epilogue_bytes(layers: LayerGraph, decisions: Decisions) -> tuple[int, int]:
    """What the last stage holds while it runs: by what autograd saves, or, where it was measured, by that."""
    head = layers.head
    return (0, head.peak_bytes(decisions.head_chunks)) if head else (layers.stages[-1].activation_bytes, 0)
