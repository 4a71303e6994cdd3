"""The persistent state of a host: FP32 masters and moments, shadows and returned gradients, one copy for all its ranks.

Every buffer is flat, one a parameter group, in the layout of :class:`slidedp.compiler.layergraph.Group`, and starts on a
page. They lie in six shared segments: master (which outlives the others when the plan is closed), moments, candidates, shadow,
grads, control. The layout depends on the groups and on four of their decisions only; no route or chunk count changes it.
A group whose state lives in HBM (resident.py) has a master here, for the user's parameters to be views of, and nothing else.

A group whose updates speculate (passes/clipping.py) has its state twice, on two *sides*: one is the state, the other what it
may be next. It changes sides when a step's norm is known to need no clipping (sides.py); no byte moves. The dictionaries below
show what was last asked for (:meth:`HostState.show`), which is the state whenever nothing is in flight; ops of a step ask by its
number.

There may be room for several plans, of which one at a time works with the state (:meth:`HostState.serve`). What only the others
need goes back to the system once one of them is settled on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import Group, Lookup, Param, shard
from slidedp.compiler.residency import is_resident
from slidedp.executor.shared.segment import Exchange, SharedSegment
from slidedp.executor.shared.words import Check, Words, WordsLayout
from slidedp.executor.state.sides import Sides
from slidedp.executor.state.state_layout import MOMENTS, PAGE, Buffer, check_budget, layout_state, needed, segment_of


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
    Resident groups have a ``master`` only, which the GPU copies from and to. All this is what `decisions` need; there is room for
    `others` too, see :meth:`serve`.
    ``pairs``: both sides of groups that speculate, and ``sides``, which of them is the state.
    ``words``: the control segment; ``param_index``: a parameter's place in its presence flags, groups in order; ``row_index``: of
    groups whose rows are split (`split_rows`), the place of a table's first row in the masks.

    `exchange`, `barrier`: collectives among the host's ranks, see :data:`slidedp.executor.shared.segment.Exchange`.
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
        others: Sequence[Decisions] = (),
    ) -> None:
        assert world_size == 1 or (exchange and barrier), "several ranks need their collectives"
        self.groups = {g.name: g for g in groups}
        self._dtypes = {"compute_dtype": compute_dtype, "grad_dtype": grad_dtype}
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
            control_bytes=control.nbytes,
            others=others,
            **self._dtypes,
        )
        check_budget(self.layout, host_budget)
        self._segments: dict[str, SharedSegment] = {}
        try:
            for name, nbytes in self.layout.segment_bytes.items():
                self._segments[name] = SharedSegment(f"host state ({name})", nbytes, rank=rank, exchange=exchange)
            if barrier is not None:
                barrier()  # rank 0 must not close a segment that another rank is about to open
        except BaseException:
            self._release()
            raise
        self.words = Words(self._segments["control"], control, rank)
        self.serve(decisions)

    # ---- plans ----

    def serve(self, decisions: Decisions) -> None:
        """Shows what a plan with these decisions works with; it is one of those that there is room for. No byte moves.

        Nothing may be in flight, and groups that speculate must be on their first sides (:meth:`take_first_sides`).
        """
        flat: dict[Buffer, dict[str, Any]] = {b: {} for b in Buffer}
        other: dict[Buffer, dict[str, Any]] = {b: {} for b in Buffer}
        self._resident = [g.name for g in self.groups.values() if is_resident(g, decisions.of(g.name))]
        for buffer, group, i in self._keys(decisions):
            tensor = self._tensor(buffer, group, i)
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

    def _keys(self, decisions: Decisions) -> list[tuple[Buffer, str, int]]:
        return [(buffer, g.name, i) for g in self.groups.values()
                for buffer, i in needed(g, decisions, world_size=self.world_size, **self._dtypes)]

    def _tensor(self, buffer: Buffer, group: str, i: int = 0) -> Tensor:
        place = self.layout.places[buffer, group, i]
        return self._segments[segment_of(buffer, i)].tensor(place.dtype, place.offset_bytes, place.numel)

    def moments_of(self, group: str) -> list[Tensor]:
        """Flat, where they are on the host, if only between two plans; not of groups that all plans keep in HBM alike."""
        return [self._tensor(moment, group) for moment in MOMENTS]

    @torch.no_grad()
    def take_first_sides(self) -> None:
        """Copies this rank's part of what is shown on second sides to the first ones; all ranks must before anybody serves."""
        for name, (first, _) in self.pairs.items():
            if self.master[name] is first.master:
                continue
            part = slice(*shard(0, self.groups[name].numel, self.rank, self.world_size))
            now = GroupState(self.master[name], self.exp_avg[name], self.exp_avg_sq[name], self.shadow.get(name))
            for field_ in fields(GroupState):
                old, new = getattr(now, field_.name), getattr(first, field_.name)
                if old is not None:
                    new[part].copy_(old[part])

    def settle_on(self, decisions: Decisions) -> None:
        """Gives back the memory that the plan with these decisions, which is served, does not need. All ranks, none in a step."""
        kept = set(self._keys(decisions))
        for (buffer, group, i), p in self.layout.places.items():
            if (buffer, group, i) not in kept and self.rank == 0:
                self._segments[segment_of(buffer, i)].discard(p.offset_bytes, -(-p.nbytes // PAGE) * PAGE)
        self.layout = replace(self.layout, places={key: p for key, p in self.layout.places.items() if key in kept})

    # ---- the state ----

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
