"""What a plan decides, per group and for the plan as a whole (DESIGN §5).

`Decisions` is all that a plan file needs to hold: the ops follow from it, the LayerGraph and the passes. Who decides:
the user (:mod:`slidedp.compiler.policy`), and for the rest the rule in :mod:`slidedp.compiler.solver.defaults`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from slidedp.compiler.layergraph import Stage, StageKind


class Route(StrEnum):
    """Delivery of weights: every rank copies the whole layer, or 1/N each and an all-gather over the GPU links."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Source(StrEnum):
    """What is delivered: the FP32 master cast chunk by chunk, or the shadow that the update wrote."""

    CAST = "cast"
    SHADOW = "shadow"


class Reduction(StrEnum):
    """Where gradients are summed: between GPUs, one sum returning; or on the host, every rank returning its own."""

    GPU = "gpu"
    CPU = "cpu"


class Activation(StrEnum):
    """What becomes of what autograd saves in a layer's forward: it stays in HBM (`retain`), waits in host memory (`offload`),
    or is dropped, and the forward runs again (`recompute`), but for the operations whose results are dear for their size: those
    are kept (`selective`).
    """

    RETAIN = "retain"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    SELECTIVE = "selective"


class Boundary(StrEnum):
    """Where the inputs of a layer that does not retain wait for its backward."""

    HBM = "hbm"
    HOST = "host"


class StateHome(StrEnum):
    """Where a group's FP32 master and moments live, and so where they are updated.

    `hbm`: sharded over the GPUs, next to the weights, which stay there too: nothing is delivered, and no gradient returns.
    """

    HOST = "host"
    HBM = "hbm"


class Update(StrEnum):
    """When updates run: as their gradients arrive (`in_backward`); once the norm of all of them is known, most under the next
    forward (`deferred`); or as they arrive, into second buffers, which are taken over once the norm is known, or else are not
    and the update is done again (`speculative`).

    Whether updates wait for the norm is the plan's decision: only then can it clip by the norm, and skip a step whose gradient
    is not finite. How those of a group wait is the group's.
    """

    IN_BACKWARD = "in_backward"
    DEFERRED = "deferred"
    SPECULATIVE = "speculative"


class Rows(StrEnum):
    """What of an embedding is updated when: all of it once its gradient is complete; or the rows that the step's batches do not
    look up before that, so that only the others sit on the step boundary (rows.py says where that can be).
    """

    WHOLE = "whole"
    SPLIT = "split"


class Residence(StrEnum):
    """A group's weights between their uses: delivered again for each, or once a step and then held in HBM."""

    STREAM = "stream"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """How one group's weights, gradients and update move. Chunk counts are clamped to what the group's size allows.

    With the state in HBM, `delivery`, `source`, `delivery_chunks` and `weights` say nothing, and gradients are summed there.
    `update`: `deferred` or `speculative`, for plans whose updates wait for the norm; see residency.py for what speculates.
    """

    delivery: Route = Route.REPLICATED
    source: Source = Source.SHADOW
    delivery_chunks: int = 1
    reduction: Reduction = Reduction.GPU
    return_chunks: int = 1
    act: Activation = Activation.RECOMPUTE
    boundary: Boundary = Boundary.HBM
    weights: Residence = Residence.STREAM
    state: StateHome = StateHome.HOST
    update: Update = Update.DEFERRED
    rows: Rows = Rows.WHOLE


@dataclass(frozen=True)
class Decisions:
    """`groups`: one entry a group. `window`: weight slots; `grad_slots`: gradient slots; `staging_slots`: cast buffers;
    `act_slots`: layers whose activations (or boundaries) are in HBM on their way to the host, and again on their way back.

    `head_chunks`: in how many chunks of tokens the epilogue makes the logits, at most; 1: all at once, as eager.
    `update`: `in_backward`, or `deferred` if updates wait for the norm of all gradients.
    `slices`: in how many pieces, cut along its rows, a batch goes through each layer: what a layer needs while it runs is that of
    a piece. To whatever couples rows (batch norm in training, an auxiliary loss over experts) each is a batch by itself.
    """

    groups: dict[str, GroupDecision] = field(default_factory=dict)
    window: int = 3
    grad_slots: int = 2
    staging_slots: int = 4
    reduce_slots: int = 2
    head_chunks: int = 1
    act_slots: int = 2
    update: Update = Update.IN_BACKWARD
    slices: int = 1

    def of(self, group: str) -> GroupDecision:
        return self.groups[group]

    def activation(self, layer: Stage) -> Activation:
        """What `layer` keeps: as its own group says, or, if it has none, the first of those that it shares."""
        return self.of(layer.groups[0]).act if layer.groups else Activation.RECOMPUTE

    def moves_boundary(self, stage: Stage) -> bool:
        """True if the inputs of `stage` go to the host."""
        if stage.kind is not StageKind.LAYER or not stage.groups or self.activation(stage) is Activation.RETAIN:
            return False
        return self.of(stage.groups[0]).boundary is Boundary.HOST
