"""What autograd saves in a layer's forward, and where it is kept until the backward.

A layer's forward runs with gradients, and its graph is kept for its backward. Of what the graph saves, only what the plan pays
for is kept in memory:

    a weight, or an input of the stage     a reference (:class:`_Located`): its place in memory that has a name. It is
                                           resolved at backward time, so a weight's slot can be refilled in between. (An
                                           input that does not move meanwhile is held as it is)
    anything else                          a holder, numbered in the order of saving. It keeps the tensor (`retain`), or sends
                                           it to the host and gets it back in time (`offload`), or is empty until the layer
                                           is run again: the rerun saves the same tensors in the same order, and stops early,
                                           once the last empty holder is filled

Source: `torch.utils.checkpoint` without reentrant autograd, whose hooks these resemble. Differences: the op graph, not the
first unpack, decides when a layer is run again; and weights and inputs are recognised by their storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slidedp.executor.devices.parcels import Copy, Geometry, Parcel, storage_of
from slidedp.executor.stages.binding import Leaves


class _Stop(BaseException):
    """Ends a rerun from within: all that is needed has been saved. Not an Exception: a layer may catch those."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Holder:
    """One saved tensor. `version`: of its memory when it was put in. `away`: once it has been copied to the host, what it is
    like and where in the parcel its storage begins.
    """

    value: Tensor | None = None
    version: int = 0
    away: tuple[Geometry, int] | None = None

    @property
    def empty(self) -> bool:
        return self.value is None and self.away is None


class _Located(NamedTuple):
    """A tensor over memory that is known by name."""

    name: str
    geometry: Geometry


class _Memory(NamedTuple):
    """Memory that has a name: a tensor that lies in it, and others that have been made over it, which may be asked for again."""

    tensor: Tensor
    views: dict[Geometry, Tensor]


_Signature = tuple[str, torch.Size, torch.dtype]
"""What a rerun must repeat of each save: the name of its memory ('' for a holder), shape and dtype."""


class SavedTensors:
    """The tensors that one forward of one stage saves for its backward.

    Its hooks are called some fifty times a layer, by the thread that issues a step's work: every call in them shows in the time
    of a short step.

    Args:
        label: names the stage in errors.
        keep: holders keep what they are given (`retain`, `offload`); else they are empty until :meth:`refill`.
        stay: inputs that are where they are until the backward is done, so that the graph may as well hold them itself.

    `whole`: the forward is run again to its end, not only until the holders are full; to be set once it has run.
    """

    def __init__(self, label: str, keep: bool, stay: Collection[str] = ()) -> None:
        self._label, self._keep, self._stay = label, keep, stay
        self.whole = False
        self._memory: dict[str, _Memory] = {}
        self._names: dict[int, str] = {}
        self._saves: list[_Located | ReferenceType[_Holder]] = []
        self._signatures: list[_Signature | None] = []  # of the saves; if all is kept, it can be told by that until it is dropped
        self._full = keep
        self._empty: dict[int, _Holder] = {}  # while it is refilled: by number of the save
        self._next = self._last = -1
        self._parcel: Parcel | None = None
        self._slot: Tensor | None = None

    def bind(self, weights: Mapping[str, Leaves], inputs: Mapping[str, Tensor]) -> None:
        """Where the weights (by group) and inputs (by name) are from now on, for the run that follows and for the backward.

        Inputs that are not bound are saved like anything else.
        """
        memory = {f"weights of {group}": (leaves[0], leaves.views) for group, leaves in weights.items() if leaves}
        memory |= {name: (t, {}) for name, t in inputs.items()}
        moved = {name: _Memory(*new) for name, new in memory.items() if not self._lies_in(name, new[0])}
        if moved:
            self._memory |= moved
            self._names = {storage_of(tensor): name for name, (tensor, _) in self._memory.items()}

    def _lies_in(self, name: str, tensor: Tensor) -> bool:
        """True if the memory of this name is bound to `tensor` already."""
        return name in self._memory and self._memory[name].tensor is tensor

    def borrows(self, t: Tensor) -> bool:
        """True if `t` lies in memory that is somebody else's after the backward: a function may return what it has saved."""
        return storage_of(t) in self._names or (self._slot is not None and storage_of(t) == storage_of(self._slot))

    def unbind_input(self, name: str) -> None:
        del self._memory[name]

    def recording(self) -> saved_tensors_hooks:
        """Context of the forward."""
        return saved_tensors_hooks(self._pack_kept if self._keep else self._pack_empty, self._unpack)

    def refill(self, run: Callable[[], object]) -> None:
        """Fills the empty holders that the graph still has: `run` is the forward again. It is left as soon as they are full,
        unless it is wanted `whole`.

        Raises RuntimeError, naming the stage, when it does not save what the forward saved.
        """
        self._empty = {i: holder for i, holder in self._holders() if holder.empty}
        if self._empty:
            self._next, self._last = 0, next(reversed(self._empty))
            try:
                self._run_again(run)
            except BaseException:  # whoever tries again begins with nothing
                for holder in self._empty.values():
                    holder.value = None
                raise
            finally:
                self._empty = {}
        self._full = True

    def _run_again(self, run: Callable[[], object]) -> None:
        try:
            with saved_tensors_hooks(self._repack, self._unpack):
                run()
        except _Stop:
            return
        if self.whole and self._next > self._last:
            return
        raise RuntimeError(
            f"{self._label} saved {len(self._saves)} tensors in its forward, but {self._next} when it was run again for "
            f"its backward; {_REMEDY}"
        )

    @property
    def lacks(self) -> bool:
        """True if the backward needs what only :meth:`refill` can bring."""
        return not self._full and any(holder.empty for _, holder in self._holders())

    def drop(self) -> None:
        """Empties the holders, of which nothing may be on its way to the host: the stage will have to be run again."""
        self._signatures = self._signatures or [self._signature_of(save) for save in self._saves]
        self._full = False
        for _, holder in self._holders():
            holder.value = None

    # ---- to the host and back; each by the thread of its stream, one after another ----

    def offload(self, buffer: Tensor, device: torch.device, copy: Copy) -> int:
        """Copies what holders keep to `buffer`, as far as it fits. Returns the number of bytes."""
        self._parcel = Parcel(self.kept(), device, buffer.numel())
        for _, holder in self._holders():
            if holder.value is not None and (start := self._parcel.start(holder.value)) is not None:
                holder.away = Geometry.of(holder.value), start
        self._parcel.pack(buffer, copy)
        return self._parcel.num_bytes

    def leave(self) -> list[Tensor]:
        """Once :meth:`offload`'s copies are done: drops what it has copied, and returns the memory."""
        assert self._parcel is not None
        for _, holder in self._holders():
            if holder.away is not None:
                holder.value = None
        return self._parcel.let_go()

    def reload(self, buffer: Tensor, slot: Tensor, copy: Copy) -> int:
        """Copies `buffer` to `slot`, where the tensors are from now on. Returns the number of bytes."""
        assert self._parcel is not None
        size, self._slot = self._parcel.num_bytes, slot
        copy(slot[:size], buffer[:size])
        return size

    def kept(self) -> list[Tensor]:
        """What holders keep alive now."""
        return [holder.value for _, holder in self._holders() if holder.value is not None]

    def _holders(self) -> Iterator[tuple[int, _Holder]]:
        """Those that the graph still has, by number in the order of saving. A part of the graph that nothing needs is gone at
        once.
        """
        for i, save in enumerate(self._saves):
            if not isinstance(save, _Located) and (holder := save()) is not None:
                yield i, holder

    # ---- hooks; the order of calls is the order of saving, in both runs ----

    def _pack_kept(self, t: Tensor) -> _Holder | _Located | Tensor:
        name = self._names.get(t.untyped_storage()._cdata)  # as storage_of has it
        if name is not None:
            return self._locate(name, t)
        holder = _Holder(t.detach(), t._version)  # with its own graph it would lead back here: a cycle
        self._saves.append(ref(holder))
        return holder

    def _pack_empty(self, t: Tensor) -> _Holder | _Located | Tensor:
        name = self._names.get(t.untyped_storage()._cdata)
        if name is not None:
            return self._locate(name, t)
        self._signatures.append(("", t.shape, t.dtype))
        holder = _Holder()
        self._saves.append(ref(holder))
        return holder

    def _locate(self, name: str, t: Tensor) -> _Located | Tensor:
        geometry = Geometry.of(t)
        if not self._keep:
            self._signatures.append((name, geometry.size, geometry.dtype))
        self._saves.append(located := _Located(name, geometry))
        return t.detach() if name in self._stay else located

    def _repack(self, t: Tensor) -> _Located | Tensor:
        index = self._next
        self._next += 1
        name = self._names.get(t.untyped_storage()._cdata, "")
        signature = name, t.shape, t.dtype
        before = self._signatures[index] if index < len(self._signatures) else _NOTHING_MORE
        if signature != before and before is not None:
            raise RuntimeError(
                f"{self._label} saved {_describe(before)} in its forward, but {_describe(signature)} in its place (number "
                f"{index}) when it was run again for its backward; {_REMEDY}"
            )
        if name and isinstance(located := self._saves[index], _Located):
            return located  # as in the forward: it is this tensor, should the layer ask for a gradient itself
        value, holder = t.detach(), self._empty.get(index)
        if holder is not None:
            holder.value, holder.version = value, t._version
        if index == self._last and not self.whole:
            raise _Stop
        return value

    def _unpack(self, packed: _Holder | _Located | Tensor) -> Tensor:
        if isinstance(packed, _Holder):
            value = packed.value
            if value is None:
                return self._reloaded(packed)
            if value._version != packed.version:  # autograd's own check does not see behind hooks
                raise RuntimeError(
                    f"{self._label}: a tensor that its backward needs ({_describe(('', value.shape, value.dtype))}) has been "
                    f"modified by an in-place operation: it is at version {value._version}, {packed.version} was saved"
                )
            return value
        return self._over(packed) if isinstance(packed, _Located) else packed

    def _over(self, located: _Located) -> Tensor:
        name, geometry = located
        memory, views = self._memory[name]
        view = views.get(geometry)
        if view is None:
            if len(views) == _MOST_VIEWS:
                views.clear()
            view = views[geometry] = memory if Geometry.of(memory) == geometry else geometry.over(memory)
        return view

    def _reloaded(self, holder: _Holder) -> Tensor:
        assert holder.away is not None, f"{self._label} has not been run again before its backward"
        assert self._slot is not None, f"{self._label}: its activations are not back from the host"
        geometry, start = holder.away
        return geometry.over(self._slot, start)

    def _signature_of(self, save: _Located | ReferenceType[_Holder]) -> _Signature | None:
        """None if nobody can tell any more, nor needs to."""
        if isinstance(save, _Located):
            return save.name, save.geometry.size, save.geometry.dtype
        holder = save()
        return None if holder is None or holder.value is None else ("", holder.value.shape, holder.value.dtype)


_MOST_VIEWS = 1000
"""Of a slot's weights; a layer that slices a weight by its data's lengths could ask for ever more."""

_NOTHING_MORE = "nothing more"

_REMEDY = (
    "between its forward and its backward, a layer that is recomputed must do the same again: let it depend on nothing but its "
    "inputs, parameters, buffers and torch's default generators, or keep its activations (act: retain)"
)


def enter(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values, each the start of a graph of its own: differentiable, like any layer's input, and no leaf.

    A leaf would be held by its graph, so that its memory could not be freed or moved before the backward.
    """
    return {name: _Entry.apply(torch.empty(0, requires_grad=True), value) for name, value in values.items()}  # type: ignore[no-untyped-call]


class _Entry(torch.autograd.Function):
    """Its gradient is asked for by edge, so its backward never runs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing lies before a stage's inputs")


def _describe(signature: _Signature | str) -> str:
    if isinstance(signature, str):
        return signature
    name, shape, dtype = signature
    return f"{name or 'a tensor'} of shape {tuple(shape)} and {str(dtype).removeprefix('torch.')}"
