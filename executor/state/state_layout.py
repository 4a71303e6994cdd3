"""Which flat buffers the host state has for a plan, or for any of several, and where each lies in its shared segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from slidedp.compiler.decisions import Decisions, Reduction, Source
from slidedp.compiler.layergraph import Group
from slidedp.compiler.residency import is_resident, speculates, update_chunks
from slidedp.executor.shared.segment import GIB

PAGE = 4096


class Buffer(StrEnum):
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    SHADOW = "shadow"
    GRAD = "grad"
    RAW_GRAD = "raw_grad"


MOMENTS = (Buffer.EXP_AVG, Buffer.EXP_AVG_SQ)

_SEGMENT_OF = {
    Buffer.MASTER: "master",
    Buffer.EXP_AVG: "moments",
    Buffer.EXP_AVG_SQ: "moments",
    Buffer.SHADOW: "shadow",
    Buffer.GRAD: "grads",
    Buffer.RAW_GRAD: "grads",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one flat buffer lies in its segment."""

    offset_bytes: int
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StateLayout:
    """Sizes of the segments and places of the buffers, keyed by buffer, group and, of raw gradients, rank; else side."""

    segment_bytes: dict[str, int] = field(default_factory=dict)
    places: dict[tuple[Buffer, str, int], Place] = field(default_factory=dict)

    def bytes_by_place(self) -> dict[str, int]:
        """Bytes of each kind of state, the whole host's: master, moments, candidates, shadow, grads, raw_grads, control."""
        out = dict.fromkeys(("master", "moments", "candidates", "shadow", "grads", "raw_grads"), 0)
        for (buffer, _, i), place in self.places.items():
            out["raw_grads" if buffer is Buffer.RAW_GRAD else segment_of(buffer, i)] += place.nbytes
        return out | {"control": self.segment_bytes["control"]}


def segment_of(buffer: Buffer, i: int) -> str:
    """`i`: of raw gradients the rank, else the side."""
    return "candidates" if i and buffer is not Buffer.RAW_GRAD else _SEGMENT_OF[buffer]


def needed(group: Group, decisions: Decisions, *, world_size: int, compute_dtype: torch.dtype,
           grad_dtype: torch.dtype) -> dict[tuple[Buffer, int], tuple[int, torch.dtype]]:
    """What a plan keeps of a group on the host: elements and their type, by buffer and, of raw gradients, rank; else side."""
    d = decisions.of(group.name)
    out = {(Buffer.MASTER, 0): (group.numel, torch.float32)}
    if is_resident(group, d):
        return out
    if d.source is Source.SHADOW:
        out[Buffer.SHADOW, 0] = group.numel, compute_dtype
    if not group.trainable:
        return out
    for moment in MOMENTS:
        out[moment, 0] = group.num_trainable, torch.float32
    out[Buffer.GRAD, 0] = group.num_trainable, grad_dtype
    for buffer in (Buffer.MASTER, *MOMENTS, Buffer.SHADOW) if speculates(decisions, group) else ():
        if (buffer, 0) in out:
            out[buffer, 1] = out[buffer, 0]
    if world_size > 1 and d.reduction is Reduction.CPU:
        out |= {(Buffer.RAW_GRAD, rank): (group.num_trainable, grad_dtype) for rank in range(world_size)}
    return out


def layout_state(
    groups: tuple[Group, ...],
    decisions: Decisions,
    *,
    world_size: int,
    compute_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    control_bytes: int,
    others: Sequence[Decisions] = (),
) -> StateLayout:
    """The layout of the host state. Pure: allocates nothing.

    `others`: of plans that the state may serve too. There is room for what any of them needs, and for moments that live in HBM in
    all of them but are cut in other ways: they pass through the host on their way from one plan to the next.
    """
    dtypes = {"compute_dtype": compute_dtype, "grad_dtype": grad_dtype}
    sizes = dict.fromkeys(("master", "moments", "candidates", "shadow", "grads"), 0)
    places: dict[tuple[Buffer, str, int], Place] = {}

    def put(buffer: Buffer, group: str, numel: int, dtype: torch.dtype, i: int = 0) -> None:
        segment = segment_of(buffer, i)
        place = Place(sizes[segment], numel, dtype)
        places[buffer, group, i] = place
        sizes[segment] += -(-place.nbytes // PAGE) * PAGE

    for g in groups:
        wanted = needed(g, decisions, world_size=world_size, **dtypes)
        for other in others:
            wanted |= needed(g, other, world_size=world_size, **dtypes)
        in_hbm = [d.of(g.name) for d in (decisions, *others) if is_resident(g, d.of(g.name))]
        if g.trainable and len({len(update_chunks(g, decision, world_size)) for decision in in_hbm}) > 1:
            wanted |= {(moment, 0): (g.num_trainable, torch.float32) for moment in MOMENTS}
        for (buffer, i), (numel, dtype) in wanted.items():
            put(buffer, g.name, numel, dtype, i)
    return StateLayout(sizes | {"control": control_bytes}, places)


def check_budget(layout: StateLayout, host_budget: int | None) -> None:
    """Raises ValueError, naming every part, when the state is larger than `host_budget` bytes."""
    parts = layout.bytes_by_place()
    needed = sum(parts.values())
    if host_budget is None or needed <= host_budget:
        return
    listed = ", ".join(f"{name} {nbytes / GIB:.3g}" for name, nbytes in parts.items() if nbytes)
    remedy = "deliver groups with source=cast (no shadow)" if parts["shadow"] else "freeze parameters"
    if parts["raw_grads"]:
        remedy += ", reduce gradients on the GPUs (reduction=gpu)"
    raise ValueError(
        f"host_budget: the state needs {needed / GIB:.3g} GiB ({listed}), {(needed - host_budget) / GIB:.3g} GiB more than "
        f"the {host_budget / GIB:.3g} GiB allowed; raise host_budget, or {remedy}"
    )
