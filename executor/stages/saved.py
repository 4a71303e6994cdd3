"""What autograd saves in a layer's forward, and where it is kept until the backward.

A layer's forward runs with gradients, and its graph is kept for its backward. Of what the graph saves, only what the plan pays
for is kept in memory:

    a weight, or an input of the stage     a reference (:class:`_Located`): its place in memory that has a name. It is
                                           resolved at backward time, so a weight's slot can be refilled in between
    anything else                          a holder, numbered in the order of saving. It keeps the tensor (`retain`), or sends
                                           it to the host and gets it back in time (`offload`), or is empty until the layer
                                           is run again: the rerun saves the same tensors in the same order, and stops early,
                                           once the last empty holder is filled

Source: `torch.utils.checkpoint` without reentrant autograd, whose hooks these resemble. Differences: the op graph, not the
first unpack, decides when a layer is run again; and weights and inputs are recognised by their storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slidedp.executor.devices.parcels import Copy, Geometry, Parcel, storage_of


class _Stop(BaseException):
    """Ends a rerun from within: all that is needed has been saved. Not an Exception: a layer may catch those."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Holder:
    """One saved tensor. `version`: of its memory when it was put in. `away`: once it has been copied to the host, what it is
    like and where in the parcel its storage begins.
    """

    index: int
    value: Tensor | None = None
    version: int = 0
    away: tuple[Geometry, int] | None = None

    @property
    def empty(self) -> bool:
        return self.value is None and self.away is None

    def put(self, t: Tensor) -> None:
        self.value = t.detach()  # its graph would lead back here: a cycle
        self.version = t._version


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor over memory that is known by name."""

    name: str
    geometry: Geometry


_Signature = tuple[str, torch.Size, torch.dtype]
"""What a rerun must repeat of each save: the name of its memory ('' for a holder), shape and dtype."""


class SavedTensors:
    """The tensors that one forward of one stage saves for its backward.

    Args:
        label: names the stage in errors.
        keep: holders keep what they are given (`retain`, `offload`); else they are empty until :meth:`refill`.
    """

    def __init__(self, label: str, keep: bool) -> None:
        self._label, self._keep = label, keep
        self._memory: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._signatures: list[_Signature] = []
        self._holders: list[ReferenceType[_Holder] | None] = []
        self._next = self._last = -1
        self._parcel: Parcel | None = None
        self._slot: Tensor | None = None

    def bind_weights(self, weights: Mapping[str, Sequence[Tensor]]) -> None:
        """Where the weights (by group) are from now on, for the run that follows and for the backward."""
        self._bind({f"weights of {group}": leaves[0] for group, leaves in weights.items() if leaves})

    def bind_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Where the inputs (by name) are. Those that are not bound are saved like anything else."""
        self._bind(inputs)

    def borrows(self, t: Tensor) -> bool:
        """True if `t` lies in memory that is somebody else's after the backward: a function may return what it has saved."""
        return storage_of(t) in self._names or (self._slot is not None and storage_of(t) == storage_of(self._slot))

    def unbind_input(self, name: str) -> None:
        del self._memory[name]

    def _bind(self, memory: Mapping[str, Tensor]) -> None:
        self._memory |= memory
        self._names = {storage_of(t): name for name, t in self._memory.items()}

    def recording(self) -> saved_tensors_hooks:
        """Context of the forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def refill(self, run: Callable[[], object]) -> None:
        """Fills the empty holders that the graph still has: `run` is the forward again. It is left as soon as they are full.

        Raises RuntimeError, naming the stage, when it does not save what the forward saved.
        """
        empty = [h for h in self.holders() if h.empty]
        if not empty:
            return
        self._next, self._last = 0, empty[-1].index
        try:
            with saved_tensors_hooks(self._repack, _same):
                run()
        except _Stop:
            return
        except BaseException:  # whoever tries again begins with nothing
            for holder in empty:
                holder.value = None
            raise
        raise RuntimeError(
            f"{self._label} saved {len(self._signatures)} tensors in its forward, but {self._next} when it was run again for "
            f"its backward; {_REMEDY}"
        )

    @property
    def lacks(self) -> bool:
        """True if the backward needs what only :meth:`refill` can bring."""
        return any(holder.empty for holder in self.holders())

    def drop(self) -> None:
        """Empties the holders, of which nothing may be on its way to the host: the stage will have to be run again."""
        for holder in self.holders():
            holder.value = None

    # ---- to the host and back; each by the thread of its stream, one after another ----

    def offload(self, buffer: Tensor, device: torch.device, copy: Copy) -> int:
        """Copies what holders keep to `buffer`, as far as it fits. Returns the number of bytes."""
        self._parcel = Parcel(self.kept(), device, buffer.numel())
        for holder in self.holders():
            if holder.value is not None and (start := self._parcel.start(holder.value)) is not None:
                holder.away = Geometry.of(holder.value), start
        self._parcel.pack(buffer, copy)
        return self._parcel.num_bytes

    def leave(self) -> list[Tensor]:
        """Once :meth:`offload`'s copies are done: drops what it has copied, and returns the memory."""
        assert self._parcel is not None
        for holder in self.holders():
            if holder.away is not None:
                holder.value = None
        return self._parcel.let_go()

    def reload(self, buffer: Tensor, slot: Tensor, copy: Copy) -> int:
        """Copies `buffer` to `slot`, where the tensors are from now on. Returns the number of bytes."""
        assert self._parcel is not None
        size, self._slot = self._parcel.num_bytes, slot
        copy(slot[:size], buffer[:size])
        return size

    def holders(self) -> list[_Holder]:
        """Those that the graph still has, in the order of saving. A part of the graph that nothing needs is gone at once."""
        found = (reference() for reference in self._holders if reference is not None)
        return [holder for holder in found if holder is not None]

    def kept(self) -> list[Tensor]:
        """What holders keep alive now."""
        return [holder.value for holder in self.holders() if holder.value is not None]

    # ---- hooks; the order of calls is the order of saving, in both runs ----

    def _signature(self, t: Tensor) -> _Signature:
        return self._names.get(storage_of(t), ""), t.shape, t.dtype

    def _pack(self, t: Tensor) -> _Holder | _Located:
        signature = self._signature(t)
        self._signatures.append(signature)
        if name := signature[0]:
            self._holders.append(None)
            return _Located(name, Geometry.of(t))
        holder = _Holder(len(self._holders))
        if self._keep:
            holder.put(t)
        self._holders.append(ref(holder))
        return holder

    def _repack(self, t: Tensor) -> Tensor:
        index = self._next
        self._next += 1
        if index >= len(self._signatures) or self._signature(t) != self._signatures[index]:
            before = _describe(self._signatures[index]) if index < len(self._signatures) else "nothing more"
            raise RuntimeError(
                f"{self._label} saved {before} in its forward, but {_describe(self._signature(t))} in its place (number {index}) "
                f"when it was run again for its backward; {_REMEDY}"
            )
        reference = self._holders[index]
        holder = None if reference is None else reference()
        if holder is not None and holder.empty:
            holder.put(t)
        if index == self._last:
            raise _Stop
        return t.detach()

    def _unpack(self, packed: _Holder | _Located) -> Tensor:
        if isinstance(packed, _Located):
            return packed.geometry.over(self._memory[packed.name])
        if packed.away is not None:
            geometry, start = packed.away
            assert self._slot is not None, f"{self._label}: its activations are not back from the host"
            return geometry.over(self._slot, start)
        value = packed.value
        assert value is not None, f"{self._label} has not been run again before its backward"
        if value._version != packed.version:  # autograd's own check does not see behind hooks
            raise RuntimeError(
                f"{self._label}: a tensor that its backward needs ({_describe(('', value.shape, value.dtype))}) has been "
                f"modified by an in-place operation: it is at version {value._version}, {packed.version} was saved"
            )
        return value


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


def _same(t: Tensor) -> Tensor:
    return t


def _describe(signature: _Signature) -> str:
    name, shape, dtype = signature
    return f"{name or 'a tensor'} of shape {tuple(shape)} and {str(dtype).removeprefix('torch.')}"
