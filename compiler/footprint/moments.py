"""Activations on a GPU at each moment of a step that can be its peak, from the LayerGraph and the decisions alone.

Boundaries and what layers keep accumulate through the forward and are freed one by one in the backward, so the peak is either
while head and loss run or in one of the backwards. As in memory_over_time.py, this counts a boundary until its gradient, which
takes its place, has been read; the gradient of a boundary that is on the host; what a layer keeps; and, in its backward, the
largest gradient within. It does not count what a kernel needs besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from slidedp.compiler.decisions import Activation, Decisions
from slidedp.compiler.layergraph import LayerGraph, Stage, StageKind

BOUNDARIES = "boundary activations"
RETAINED = "retained activations"
RUNNING = "running stage's activations"
HEAD = "head and loss"

SELECTED_SHARE = 0.5
"""The largest share of its activation bytes that a selective layer keeps."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes while `stage` runs for a micro-batch: its backward, or the epilogue with the loss in it. Places of what is moved are
    not among them.
    """

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
    """The epilogues, and the backwards in order of time: of each layer, those of all micro-batches in turn."""
    lanes = [lane[1:] for lane in layers.each_lane]
    moved = [decisions.moves_boundary(s) for s in layers.stages[1:]]
    waiting = [[s.boundary_bytes * (not away) for s, away in zip(lane, moved, strict=True)] for lane in lanes]
    kept = [[kept_bytes(s, decisions) for s in lane] for lane in lanes]
    below = [0, *accumulate(map(sum, zip(*waiting, strict=True)))]  # of all lanes, of the stages before
    retained = [0, *accumulate(map(sum, zip(*kept, strict=True)))]
    for lane in lanes:
        yield Moment(lane[-1].name, below[-1], retained[-1], *epilogue_bytes(lane[-1], decisions))
    for i in reversed(range(len(moved) - 1)):
        offloads = decisions.activation(layers.stages[1:][i]) is Activation.OFFLOAD
        for k, lane in enumerate(lanes):
            # Lanes before this one have made the gradient of their inputs; it and those after it still have that of the outputs.
            inputs = sum(done[i].boundary_bytes for done in lanes[: k + 1]) + sum(w[i] for w in waiting[k + 1 :])
            outputs = sum(left[i + 1].boundary_bytes for left in lanes[k:])
            running = lane[i].workspace_bytes + (0 if offloads else lane[i].activation_bytes - kept[k][i])
            yield Moment(lane[i].name, below[i] + inputs + outputs, retained[i] + sum(own[i] for own in kept[k:]), running)
    first = layers.stages[0]
    if any(layers.group(name).trainable for name in first.groups):
        for k, lane in enumerate(layers.each_lane):
            yield Moment(first.name, sum(left[0].boundary_bytes for left in lanes[k:]), 0, lane[0].activation_bytes)


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


def epilogue_bytes(epilogue: Stage, decisions: Decisions) -> tuple[int, int]:
    """What the last stage holds while it runs: by what autograd saves, or, where it was measured, by that."""
    head = epilogue.head
    return (0, head.peak_bytes(decisions.head_chunks)) if head else (epilogue.activation_bytes, 0)
