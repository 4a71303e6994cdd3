"""The persistent state of a host: FP32 masters and moments, shadows and returned gradients, one copy for all its ranks.

Every buffer is flat, one a parameter group, in the layout of :class:`slidedp.compiler.layergraph.Group`, and starts on a
page. They lie in six shared segments: master (which outlives the others when the plan is closed), moments, candidates, shadow,
grads, control. The layout depends on the groups and on four of their decisions only; no route or chunk count changes it.
A group whose state lives in HBM (resident.py) has a master here, for the user's parameters to be views of, and nothing else.

A group whose updates speculate (passes/clipping.py) has its state twice, on two *sides*: one is the state, the other what it
may be next. It changes sides when a step's norm is known to need no clipping (sides.py); no byte moves. The dictionaries below
show what was last asked for (:meth:`HostState.show`), which is the state whenever nothing is in flight; ops of a step ask by its
number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from slidedp.compiler.decisions import Decisions, Reduction, Source
from slidedp.compiler.layergraph import Group, Lookup, Param
from slidedp.compiler.residency import is_resident, speculates
from slidedp.executor.segment import GIB, Exchange, SharedSegment
from slidedp.executor.sides import Sides
from slidedp.executor.words import Check, Words, WordsLayout

_PAGE = 4096


class Buffer(StrEnum):
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    SHADOW = "shadow"
    GRAD = "grad"
    RAW_GRAD = "raw_grad"


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


def layout_state(
    groups: tuple[Group, ...],
    decisions: Decisions,
    *,
    world_size: int,
    compute_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    control_bytes: int,
) -> StateLayout:
    """The layout of the host state. Pure: allocates nothing."""
    sizes = dict.fromkeys(("master", "moments", "candidates", "shadow", "grads"), 0)
    places: dict[tuple[Buffer, str, int], Place] = {}

    def put(buffer: Buffer, group: str, numel: int, dtype: torch.dtype, i: int = 0) -> None:
        segment = segment_of(buffer, i)
        place = Place(sizes[segment], numel, dtype)
        places[buffer, group, i] = place
        sizes[segment] += -(-place.nbytes // _PAGE) * _PAGE

    for g in groups:
        put(Buffer.MASTER, g.name, g.numel, torch.float32)
        if is_resident(g, decisions.of(g.name)):
            continue
        if decisions.of(g.name).source is Source.SHADOW:
            put(Buffer.SHADOW, g.name, g.numel, compute_dtype)
        if not g.trainable:
            continue
        put(Buffer.EXP_AVG, g.name, g.num_trainable, torch.float32)
        put(Buffer.EXP_AVG_SQ, g.name, g.num_trainable, torch.float32)
        put(Buffer.GRAD, g.name, g.num_trainable, grad_dtype)
        for buffer in (Buffer.MASTER, Buffer.EXP_AVG, Buffer.EXP_AVG_SQ, Buffer.SHADOW) if speculates(decisions, g) else ():
            if (buffer, g.name, 0) in places:
                put(buffer, g.name, g.numel, places[buffer, g.name, 0].dtype, 1)
        if world_size > 1 and decisions.of(g.name).reduction is Reduction.CPU:
            for rank in range(world_size):
                put(Buffer.RAW_GRAD, g.name, g.num_trainable, grad_dtype, rank)
    return StateLayout(sizes | {"control": control_bytes}, places)


@dataclass(frozen=True, slots=True)
class GroupState:
    """The flat state of one trainable group, on one side. `shadow`: None for a group that is cast."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    shadow: Tensor | None


class HostState:
    """Maps the host state on every rank; collective, as is `load`.

    Flat tensors by group name: ``master`` FP32 ``[numel]``; ``exp_avg``, ``exp_avg_sq`` FP32 ``[num_trainable]`` and
    ``grad`` (the reduced gradient) grad_dtype ``[num_trainable]`` of trainable groups; ``shadow`` compute_dtype ``[numel]``
    of groups delivered from it; ``raw_grad[group][rank]`` of groups reduced on the host by several ranks. All zero at first.
    Resident groups have a ``master`` only, which the GPU copies from and to.
    ``pairs``: both sides of groups that speculate, and ``sides``, which of them is the state.
    ``words``: the control segment; ``param_index``: a parameter's place in its presence flags, groups in order; ``row_index``: of
    groups whose rows are split (`split_rows`), the place of a table's first row in the masks.

    `exchange`, `barrier`: collectives among the host's ranks, see :data:`slidedp.executor.segment.Exchange`.
    Raises ValueError when the state exceeds `host_budget` (bytes), HostMemoryError when the host is short; both before or
    without keeping anything, on every rank.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        decisions: Decisions,
        *,
        rank: int,
        world_size: int,
        compute_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        num_words: int,
        exchange: Exchange | None = None,
        barrier: Callable[[], object] | None = None,
        host_budget: int | None = None,
        split_rows: Sequence[str] = (),
    ) -> None:
        assert world_size == 1 or (exchange and barrier), "several ranks need their collectives"
        self.groups = {g.name: g for g in groups}
        self._resident = [g.name for g in groups if is_resident(g, decisions.of(g.name))]
        self.rank, self.world_size = rank, world_size
        self.param_index: dict[str, int] = {}
        for p in (p for g in groups for p in g.params):
            self.param_index[p.name] = len(self.param_index)
        self._loaded_word = num_words  # one more than asked for, of our own
        self._num_loads = 0
        self.row_index: dict[str, int] = {}
        num_rows = 0
        for name in split_rows:
            self.row_index[name] = num_rows
            num_rows += self.groups[name].params[0].shape[0]
        control = WordsLayout(num_words + 1, world_size, len(self.param_index), num_rows)
        self.layout = layout_state(
            groups,
            decisions,
            world_size=world_size,
            compute_dtype=compute_dtype,
            grad_dtype=grad_dtype,
            control_bytes=control.nbytes,
        )
        check_budget(self.layout, host_budget)
        self._segments: dict[str, SharedSegment] = {}
        try:
            for name, nbytes in self.layout.segment_bytes.items():
                self._segments[name] = SharedSegment(f"host state ({name})", nbytes, rank=rank, exchange=exchange)
        except BaseException:
            self._release()
            raise
        if barrier is not None:
            barrier()  # rank 0 must not close a segment that another rank is about to open
        self.words = Words(self._segments["control"], control, rank)
        self._bind(self._segments)

    def _bind(self, memory: Mapping[str, SharedSegment]) -> None:
        flat: dict[Buffer, dict[str, Any]] = {b: {} for b in Buffer}
        other: dict[Buffer, dict[str, Any]] = {b: {} for b in Buffer}
        for (buffer, group, i), p in self.layout.places.items():
            tensor = memory[segment_of(buffer, i)].tensor(p.dtype, p.offset_bytes, p.numel)
            if buffer is Buffer.RAW_GRAD:
                flat[buffer].setdefault(group, [None] * self.world_size)[i] = tensor
            else:
                (other if i else flat)[buffer][group] = tensor
        self.pairs: dict[str, tuple[GroupState, GroupState]] = {}
        self.master: dict[str, Tensor] = flat[Buffer.MASTER]
        self.exp_avg: dict[str, Tensor] = flat[Buffer.EXP_AVG]
        self.exp_avg_sq: dict[str, Tensor] = flat[Buffer.EXP_AVG_SQ]
        self.shadow: dict[str, Tensor] = flat[Buffer.SHADOW]
        self.grad: dict[str, Tensor] = flat[Buffer.GRAD]
        self.raw_grad: dict[str, list[Tensor]] = flat[Buffer.RAW_GRAD]
        for name, master in other[Buffer.MASTER].items():
            moments = other[Buffer.EXP_AVG][name], other[Buffer.EXP_AVG_SQ][name]
            self.pairs[name] = self.both(name)[0], GroupState(master, *moments, other[Buffer.SHADOW].get(name))
        self.sides = Sides(self.pairs)

    def both(self, group: str) -> tuple[GroupState, GroupState]:
        """Both sides of a trainable group; of one that does not speculate, its only one twice."""
        if group not in self.pairs:
            only = GroupState(self.master[group], self.exp_avg[group], self.exp_avg_sq[group], self.shadow.get(group))
            return only, only
        return self.pairs[group]

    def delivered_from(self, group: str, *, cast: bool) -> tuple[Tensor, Tensor]:
        """What deliveries read of a group, on both sides: masters that are `cast`, or shadows. One twice, as for :meth:`both`."""
        if group not in self.pairs:
            flat = (self.master if cast else self.shadow)[group]
            return flat, flat
        first, second = (side.master if cast else side.shadow for side in self.pairs[group])
        assert first is not None, f"{group} has no shadow"
        assert second is not None
        return first, second

    def show(self, step: int) -> list[str]:
        """The dictionaries show the state that `step` begins with. Returns the groups that have changed sides."""
        changed = []
        for name, pair in self.pairs.items():
            now = pair[self.sides.of(name, step)]
            if self.master[name] is not now.master:
                self.master[name], self.exp_avg[name], self.exp_avg_sq[name] = now.master, now.exp_avg, now.exp_avg_sq
                if now.shadow is not None:
                    self.shadow[name] = now.shadow
                changed.append(name)
        return changed

    def views(self, buffer: Buffer | str, group: str) -> list[Tensor]:
        """One tensor a parameter, in its shape, in the order of ``Group.params``; buffers of trainable parts: those only.

        `buffer`: any but the raw gradients. Raises KeyError when the group has no such buffer.
        """
        buffer = Buffer(buffer)
        assert buffer is not Buffer.RAW_GRAD
        flat = self.flat(buffer, group)
        everything = buffer in (Buffer.MASTER, Buffer.SHADOW)
        return [shaped(flat, p) for p in self.groups[group].params if everything or p.trainable]

    def flat(self, buffer: Buffer, group: str) -> Tensor:
        """A group's flat buffer as it is now; any but the raw gradients. Raises KeyError when the group has no such buffer."""
        tensors: dict[str, Tensor] = getattr(self, buffer)
        return tensors[group]

    def load(self, values: Mapping[str, Tensor], check: Check | None = None) -> None:
        """Rank 0 writes the parameters' values into the masters and casts the shadows; the other ranks wait for it.

        `values`: real floating-point tensors by any of a parameter's names; ignored on other ranks, which may be on meta.
        Copies element by element into place: no second copy of anything. Raises ValueError, with nothing written, for a
        missing or unfit value; the other ranks then get PeerError when rank 0 aborts or ends (`check`).
        """
        if self.rank == 0:
            self._write(values)
        self._num_loads += 1
        self.words.publish(self._loaded_word, self._num_loads)  # at once on the other ranks, which write nothing
        self.words.wait(self._loaded_word, self._num_loads, check)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        found = {p.name: _find(values, p) for g in self.groups.values() for p in g.params}
        for name, group in self.groups.items():
            for p, view in zip(group.params, self.views(Buffer.MASTER, name), strict=True):
                view.copy_(found[p.name])
            if name in self.shadow:
                self.shadow[name].copy_(self.master[name])

    def bytes_by_place(self) -> dict[str, int]:
        """See :meth:`StateLayout.bytes_by_place`."""
        return self.layout.bytes_by_place()

    def mark_rows(self, step: int, lookups: Iterable[Lookup], batch: Mapping[str, Tensor]) -> None:
        """Which rows of tables whose rows are split occur in this rank's `batch` of training step `step`, before its exchange."""
        masks = self.words.rows(step)[self.rank]
        for lookup in lookups:
            if (first := self.row_index.get(lookup.group)) is not None:
                mask = masks[first : first + lookup.num_rows]
                mask[:] = 0
                for key in lookup.keys:
                    mask[batch[key].detach().cpu().numpy().reshape(-1)] = 1

    def dma_buffers(self) -> list[Tensor]:
        """Flat tensors that this rank's GPU copies from or to, to be registered with CUDA: shadows, gradients, own raw ones, and
        the masters of resident groups.
        """
        out = [side.shadow for pair in self.pairs.values() for side in pair if side.shadow is not None]
        out += [t for name, t in self.shadow.items() if name not in self.pairs]
        out += [*self.grad.values(), *(ranks[self.rank] for ranks in self.raw_grad.values())]
        out += [self.master[name] for name in self._resident]
        return [t for t in out if t.numel()]

    def close(self, *, keep_master: bool = True, agreed: bool = True) -> dict[str, Tensor]:
        """Releases everything; the caller has drained all updates, unregistered `dma_buffers` and passed a barrier.

        `keep_master`: returns new flat masters by group, private to this process (copy on write), as shown; to be put in place
        of every tensor made from the old ones, whose memory stays until the last of them has gone. Else returns ``{}``.
        `agreed`: all ranks show the same. Idempotent (returns ``{}`` the second time).
        """
        kept: dict[str, Tensor] = {}
        if keep_master and "master" in self._segments:
            moved = {name: self.master[name] for name, (first, _) in self.pairs.items() if self.master[name] is not first.master}
            for name, master in moved.items() if agreed else ():
                self.pairs[name][0].master.copy_(master)  # every rank the same bytes; shared memory, and so still one copy
            private = self._segments["master"].remap_private()
            for (buffer, group, side), p in self.layout.places.items():
                if buffer is Buffer.MASTER and side == 0:
                    kept[group] = private.tensor(p.dtype, p.offset_bytes, p.numel)
            for name, master in moved.items() if not agreed else ():
                kept[name].copy_(master)
        self._release()
        return kept

    def _release(self) -> None:
        for name in ("master", "exp_avg", "exp_avg_sq", "shadow", "grad", "raw_grad", "pairs"):
            setattr(self, name, {})
        for segment in self._segments.values():
            segment.close()
        self._segments = {}


def shaped(flat: Tensor, param: Param) -> Tensor:
    """A parameter's part of its group's flat buffer, as a view in the parameter's shape."""
    return flat[param.offset : param.offset + param.numel].view(param.shape)


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


def _find(values: Mapping[str, Tensor], param: Param) -> Tensor:
    """The value of a parameter under any of its names. Raises ValueError when it cannot become a master."""
    value = next((values[name] for name in param.names if name in values), None)
    if value is None:
        raise ValueError(f"parameter {param.name}: no value given under any of its names {param.names}")
    if tuple(value.shape) != tuple(param.shape):
        raise ValueError(f"parameter {param.name}: expected shape {tuple(param.shape)}, got {tuple(value.shape)}")
    if value.layout is not torch.strided or not value.is_floating_point():
        raise ValueError(f"parameter {param.name}: expected a dense floating-point tensor, got {value.dtype}, {value.layout}")
    if value.device.type == "meta":
        raise ValueError(f"parameter {param.name}: has no values (it is on the meta device); build rank 0's model with weights")
    return value.detach()
