"""Bytes by place that a plan needs, from the LayerGraph and the decisions alone: no graph is lowered for it.

The sizes of slots are computed here for the passes too, so that what is planned is what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from slidedp.compiler.decisions import Activation, Decisions, GroupDecision, Reduction, Route, Source
from slidedp.compiler.footprint.moments import peak_moment
from slidedp.compiler.layergraph import STORAGE_ALIGN, Group, LayerGraph, Stage, StageKind, aligned, cut_chunks
from slidedp.compiler.ops import Slot, in_lane
from slidedp.compiler.residency import (
    STATE_BYTES,
    held_groups,
    is_resident,
    resident_groups,
    speculates,
    state_bytes,
    update_chunks,
    waits_in_hbm,
    windowed_groups,
)
from slidedp.compiler.units import format_bytes

FRAGMENTATION_BYTES = 4 * 2**30 // 10
"""What torch's allocator reserves on a GPU beyond what is allocated. Measured on H200s in steps of Qwen3-4B at batch 8, 16 and
64, plans of 4 to 125 GiB: up to 1.6 GiB more than was planned, with a budget up to 0.9; so this is within 0.5 GiB or 5 % of all.
"""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes by use: `hbm` on each GPU, `host` on the whole host, all ranks together. `str()` is a table with totals.

    `notes`: what is not so any more.
    """

    hbm: dict[str, int]
    host: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        return sum(self.hbm.values())

    @property
    def reserved_bytes(self) -> int:
        """What torch's allocator will have reserved on each GPU at the step's peak, about; see FRAGMENTATION_BYTES."""
        return self.hbm_bytes + FRAGMENTATION_BYTES

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def __str__(self) -> str:
        places = (("device, each rank's", self.hbm), ("host, all ranks together", self.host))
        width = max(len(use) for _, uses in places for use in (*uses, "total"))
        lines = []
        for place, uses in places:
            rows = [(use, size) for use, size in uses.items() if size] + [("total", sum(uses.values()))]
            lines += [place, *(f"  {use:<{width}}  {format_bytes(size):>10}" for use, size in rows)]
        return "\n".join([*lines, *self.notes])


def estimate_memory(graph: LayerGraph, decisions: Decisions) -> MemoryReport:
    """What training with `decisions` needs. Activations: at the peak of the step, in the order of its ops (moments.py)."""
    of_groups, slots = group_memory(graph, decisions), activation_slots(graph, decisions)
    on_their_way = sum(slot.count * slot.bytes for slot in slots if slot.memory != "pinned")
    offloaded = graph.world_size * sum(slot.count * slot.bytes for slot in slots if slot.memory == "pinned")
    activations = {"activations on their way": on_their_way, **peak_moment(graph, decisions).by_use()}
    return MemoryReport(of_groups.hbm | activations, of_groups.host | {"offloaded activations": offloaded})


def group_memory(graph: LayerGraph, decisions: Decisions) -> MemoryReport:
    """What parameters, gradients and optimizer state take: all but activations."""
    return MemoryReport(_hbm(graph, decisions), _host(graph, decisions))


def num_window_slots(graph: LayerGraph, decisions: Decisions) -> int:
    """Weight slots that exist: no more than there are groups to stream."""
    return min(decisions.window, len(windowed_groups(graph, decisions)))


def largest_cast(graph: LayerGraph, decisions: Decisions) -> int:
    """Elements of the largest piece that one rank casts at a time; 0 if nothing is cast."""

    def cast(numel: int, decision: GroupDecision) -> int:
        ranks = graph.world_size if decision.delivery is Route.SHARDED else 1
        return _largest_chunk(graph, numel, decision.delivery_chunks) // ranks

    each = [(g, decisions.of(g.name)) for g in graph.groups]
    return max((cast(g.numel, d) for g, d in each if d.source is Source.CAST and not is_resident(g, d)), default=0)


def largest_reduced(graph: LayerGraph, decisions: Decisions) -> int:
    """Elements of the largest sum that one rank receives from a reduction between GPUs; 0 if there is none."""
    each = [(g, decisions.of(g.name)) for g in graph.groups] if graph.world_size > 1 else []
    chunks = [_largest_chunk(graph, g.num_trainable, d.return_chunks) for g, d in each
              if (d.reduction is Reduction.GPU or is_resident(g, d)) and not waits_in_hbm(decisions, g)]
    return max(chunks, default=0) // graph.world_size


def largest_update(graph: LayerGraph, decisions: Decisions) -> int:
    """Elements of the largest part of a chunk that one rank updates in HBM at a time; 0 if no state lives there."""
    chunks = [c for g in resident_groups(graph, decisions) for c in update_chunks(g, decisions.of(g.name), graph.world_size)]
    return max((hi - lo for lo, hi in chunks), default=0) // graph.world_size


def waiting_bytes(graph: LayerGraph, decisions: Decisions, group: Group) -> int:
    """Bytes of a gradient that waits in HBM for a deferred update, beside the slots that it has anyway: a buffer for each chunk
    of the sum that this rank receives; on one rank, a buffer for what would otherwise share the gradient slots.
    """
    if not waits_in_hbm(decisions, group):
        return 0
    if graph.world_size == 1:
        return graph.grad_itemsize * group.num_trainable * graph.streams(group)
    chunks = cut_chunks(group.num_trainable, decisions.of(group.name).return_chunks, graph.world_size)
    return len(chunks) * graph.grad_itemsize * max(hi - lo for lo, hi in chunks) // graph.world_size


def candidate_bytes(graph: LayerGraph, decisions: Decisions, group: Group) -> int:
    """Host memory of a second master, second moments and a second shadow, for a group whose updates speculate."""
    if not speculates(decisions, group):
        return 0
    shadow = graph.compute_itemsize if decisions.of(group.name).source is Source.SHADOW else 0
    return (STATE_BYTES + shadow) * group.numel


def sums_apart(graph: LayerGraph) -> bool:
    """True if gradients are summed over the step's micro-batches in FP32 buffers of their own, and then rounded once."""
    return graph.num_lanes > 1 and graph.grad_dtype != "float32"


def sum_places(graph: LayerGraph) -> dict[str, str]:
    """Value -> place of every ``A.<stage>.<group>``: a stage's groups side by side, the largest first."""
    return {f"A.{s.name}.{g.name}": f"sum.{i}" for s in graph.stages for i, g in enumerate(_trained_in(graph, s))}


def sum_slots(graph: LayerGraph) -> tuple[Slot, ...]:
    """FP32 buffers for one stage's gradients at a time."""
    if not sums_apart(graph):
        return ()
    sizes = [[4 * g.num_trainable for g in _trained_in(graph, s)] for s in graph.stages]
    return tuple(Slot(f"sum.{i}", 1, max(each)) for i, each in enumerate(zip_longest(*sizes, fillvalue=0)))


def _trained_in(graph: LayerGraph, stage: Stage) -> list[Group]:
    return sorted((g for g in graph.groups if g.trainable and stage.name in g.uses), key=lambda g: -g.num_trainable)


def update_workspace_bytes(graph: LayerGraph, decisions: Decisions) -> int:
    """An FP32 copy of the gradients that are updated in HBM at a time, where they are not FP32 already."""
    return 0 if graph.grad_dtype == "float32" else 4 * largest_update(graph, decisions)


def _largest_chunk(graph: LayerGraph, numel: int, num_chunks: int) -> int:
    return max((hi - lo for lo, hi in cut_chunks(numel, num_chunks, graph.world_size)), default=0)


def _hbm(graph: LayerGraph, decisions: Decisions) -> dict[str, int]:
    own = [g for g in graph.groups if graph.streams(g)]
    shared = [g for g in graph.groups if g.uses and not graph.streams(g)]
    windowed, held = windowed_groups(graph, decisions), held_groups(graph, decisions)
    resident = resident_groups(graph, decisions)
    weight, grad = graph.compute_itemsize, graph.grad_itemsize
    return {
        "weight slots": num_window_slots(graph, decisions) * weight * max((g.numel for g in windowed), default=0),
        "gradient slots": decisions.grad_slots * grad * max((g.num_trainable for g in own), default=0),
        "held weights": sum(weight * g.numel for g in held),
        "held gradients": sum(grad * g.num_trainable for g in shared),
        "gradient sums": sum(slot.bytes for slot in sum_slots(graph)),
        "waiting gradients": sum(waiting_bytes(graph, decisions, g) for g in graph.groups),
        "resident state": sum(state_bytes(g, graph.world_size) for g in resident),
        "update workspace": update_workspace_bytes(graph, decisions),
        "reduce slots": decisions.reduce_slots * grad * largest_reduced(graph, decisions),
    }


@dataclass(frozen=True, slots=True)
class Mover:
    """A layer's activations (``act``) or boundary (``h``), as one micro-batch has them, which go to the host and back."""

    head: str
    stage: Stage
    lane: int
    num_lanes: int

    @property
    def name(self) -> str:
        """Layer and lane: ``L03``, or ``L03.s1``."""
        return in_lane(self.stage.name, self.lane, self.num_lanes)

    @property
    def num_bytes(self) -> int:
        return moved_bytes(self.stage, self.head)


def movers(graph: LayerGraph, decisions: Decisions) -> dict[str, tuple[list[Mover], list[Mover]]]:
    """By head of the value, those that go to the host, and those for which that would be too late: the last
    :func:`num_places` of them, whose places nobody needs before their backward. In the order of the forward.
    """
    acts = [i for i, s in enumerate(graph.stages)
            if s.kind is StageKind.LAYER and decisions.activation(s) is Activation.OFFLOAD]
    boundaries = [i for i, s in enumerate(graph.stages) if decisions.moves_boundary(s)]
    out = {}
    for head, stages in (("act", acts), ("h", boundaries)):
        if stages:
            n = num_places(graph, decisions, head)
            values = [Mover(head, lane[i], k, graph.num_lanes) for i in stages for k, lane in enumerate(graph.each_lane)]
            out[head] = values[:-n], values[-n:]
    return out


def num_places(graph: LayerGraph, decisions: Decisions, head: str) -> int:
    """Places of the window out. A forward reads a boundary and makes the next, while those of the other micro-batches wait for
    their turn: that takes one more than there are micro-batches.
    """
    return decisions.act_slots if head == "act" else max(decisions.act_slots, graph.num_lanes + 1)


def num_places_back(decisions: Decisions, head: str) -> int:
    """Places of the window back."""
    return decisions.act_slots if head == "act" else max(decisions.act_slots, 2)


def moved_bytes(stage: Stage, head: str) -> int:
    return aligned(stage.activation_bytes if head == "act" else stage.boundary_bytes, STORAGE_ALIGN)


def activation_slots(graph: LayerGraph, decisions: Decisions) -> tuple[Slot, ...]:
    """Places of what :func:`movers` move: the window out and the window back in HBM, and each value's own host memory."""
    slots: list[Slot] = []
    for head, (leaving, staying) in movers(graph, decisions).items():
        n = num_places(graph, decisions, head)
        slots.append(Slot(head, min(n, len(leaving) + len(staying)), max(m.num_bytes for m in (*leaving, *staying)), "allocator"))
        if leaving:
            num_back = min(num_places_back(decisions, head), len(leaving))
            slots.append(Slot(f"back.{head}", num_back, max(m.num_bytes for m in leaving)))
        slots += [Slot(f"off.{head}.{m.name}", 1, m.num_bytes, "pinned") for m in leaving]
    return tuple(slots)


def _host(graph: LayerGraph, decisions: Decisions) -> dict[str, int]:
    at_home = [g for g in graph.groups if not is_resident(g, decisions.of(g.name))]
    shadowed = [g for g in at_home if decisions.of(g.name).source is Source.SHADOW]
    on_host = [g for g in at_home if decisions.of(g.name).reduction is Reduction.CPU] if graph.world_size > 1 else []
    staging = largest_cast(graph, decisions)
    return {
        "master weights": sum(4 * g.numel for g in graph.groups),
        "moments": sum(8 * g.num_trainable for g in at_home),
        "candidates": sum(candidate_bytes(graph, decisions, g) for g in graph.groups),
        "shadow": sum(graph.compute_itemsize * g.numel for g in shadowed),
        "gradients": sum(graph.grad_itemsize * g.num_trainable for g in at_home),
        "unreduced gradients": graph.world_size * sum(graph.grad_itemsize * g.num_trainable for g in on_host),
        "cast staging": graph.world_size * decisions.staging_slots * graph.compute_itemsize * staging,
    }
