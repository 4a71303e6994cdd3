"""The autograd graph of one stage, from its forward until its backward, and the gradients that come of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from slidedp.compiler.decisions import Activation
from slidedp.executor.stages.binding import Leaves
from slidedp.executor.stages.saved import SavedTensors
from slidedp.executor.stages.selective import Keeping

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import StageProgram

Weights = Mapping[str, Leaves]
"""Group -> its parameters as leaves (:meth:`Binding.leaves` of the slot that they were delivered to)."""

Slots = Mapping[str, tuple[Tensor, bool]]
"""Group -> its flat gradient slot, and whether an earlier op of this step has written its gradient there already."""


@dataclass(slots=True)
class Graph:
    """A stage between its forward and its backward: edges of its differentiable inputs and outputs, by name, not the values.

    `weights`: of the forward, whose gradients are asked for. `saved`: what the graph saved, None if torch holds it. `keeping`:
    results that a selective recompute need not compute again. `act`: what becomes of what it saved; `moves`: it goes to the
    host. `spent`: a backward that has failed has used it up, and another must be made. `names`: of the outputs, spent or not.
    """

    inputs: Mapping[str, GradientEdge | Tensor]
    outputs: dict[str, GradientEdge]
    weights: Weights
    saved: SavedTensors | None = None
    keeping: Keeping | None = None
    act: Activation = Activation.RECOMPUTE
    moves: bool = False
    spent: bool = False
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.names = tuple(self.outputs)

    def spend(self) -> None:
        """A backward has failed: autograd may have freed some of what was saved, so nothing of it can be used again."""
        self.spent, self.inputs, self.outputs, self.saved, self.keeping = True, {}, {}, None, None

    def kept(self) -> list[Tensor]:
        """What it keeps alive now, beside weights and inputs."""
        kept = [] if self.saved is None else self.saved.kept()
        return kept if self.keeping is None else [*kept, *self.keeping.kept()]


@dataclass(frozen=True, slots=True)
class Gradients:
    """What a stage's backward has found: gradients of its inputs, by name, and of the trainable weights of each group."""

    of_inputs: dict[str, Tensor]
    of_weights: dict[str, list[Tensor | None]]


FILL_WHAT_THEY_SAVE = frozenset({"RreluWithNoiseBackward0"})
"""Autograd's nodes of operations that write a tensor which they have saved before: its noise."""


def fills_what_it_saves(outputs: Iterable[Tensor]) -> bool:
    """True if what made `outputs` may save a tensor that is complete only when the operation that saves it is done."""
    nodes, seen = [t.grad_fn for t in outputs if t.grad_fn is not None], set[object]()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return any(node.name() in FILL_WHAT_THEY_SAVE for node in seen)  # type: ignore[attr-defined]


def edges_of(program: StageProgram, outputs: Sequence[Tensor]) -> dict[str, GradientEdge]:
    """Gradient edges of the outputs that require a gradient, by name."""
    named = dict(zip(program.outputs, outputs, strict=True))
    return {name: get_gradient_edge(named[name]) for name in program.grad_outputs if named[name].requires_grad}
