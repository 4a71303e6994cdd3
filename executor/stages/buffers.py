"""The device's slots and their views: allocated once for a plan, found by the places that ops name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from slidedp.compiler.errors import BudgetError
from slidedp.compiler.ops import OpGraph, Slot
from slidedp.compiler.units import format_bytes
from slidedp.executor.devices.backend import Backend
from slidedp.executor.stages.binding import Binding, Leaves
from slidedp.executor.stages.fallback import first_sentences, is_out_of_memory


class Buffers:
    """Every slot of `graph` as a flat tensor, by place (``w[0]``; ``held.shared0`` for a single one).

    `there`: slots on the device that are there already, with what they hold.
    """

    def __init__(
        self, graph: OpGraph, backend: Backend, binding: Binding, compute_dtype: torch.dtype, grad_dtype: torch.dtype,
        there: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._binding = binding
        self._slots: dict[str, Tensor] = dict(there or {})
        self._leaves: dict[tuple[str, str], Leaves] = {}
        self._backend, self._dtypes = backend, (compute_dtype, grad_dtype)
        self._pinned: list[Tensor] = []
        self.pools = graph.slots
        try:
            self.extend(graph)
        except BaseException:
            self.free()
            raise

    def extend(self, graph: OpGraph) -> None:
        """Allocates what `graph` has beyond what is there: more micro-batches need more places. What is there stays."""
        for slot in graph.slots:
            if slot.memory == "allocator":
                continue
            dtype = dtype_of(slot, *self._dtypes)
            pinned = slot.memory == "pinned"
            make = self._backend.pinned if pinned else self._backend.empty
            for i in range(slot.count):
                if f"{slot.name}[{i}]" not in self._slots:
                    try:
                        tensor = make(self._size(slot) // dtype.itemsize, dtype)
                    except RuntimeError as error:
                        if not is_out_of_memory(error):
                            raise
                        raise self._shortage(slot, i, graph, error) from error
                    self._pinned += [tensor] if pinned else []
                    tensor.zero_()  # gaps between parameters must be finite: they are summed and sent like the rest
                    self._slots[f"{slot.name}[{i}]"] = tensor
            if slot.count == 1:
                self._slots[slot.name] = self._slots[f"{slot.name}[0]"]
        self._backend.fence_caller()

    def _shortage(self, slot: Slot, i: int, graph: OpGraph, error: RuntimeError) -> BudgetError:
        total = sum(s.bytes * s.count for s in graph.slots if s.memory not in ("allocator", "pinned"))
        numbers = "; ".join(filter(None, [first_sentences(error), self._backend.memory_in_use()]))
        return BudgetError(
            f"device memory: there is no room for buffer {slot.name}[{i}] of {format_bytes(slot.bytes)}, one of those that the "
            f"plan takes before its first step, {format_bytes(total)} in all ({numbers}); free memory that others use on this "
            "device, or compile with a smaller hbm_budget")

    def _size(self, slot: Slot) -> int:
        """Bytes of one place of `slot`. What goes to the host must fit the window for its return, which an earlier graph may have
        made smaller; the rest stays on the device.
        """
        head, _, value = slot.name.partition(".")
        back = self._slots.get(f"back.{value.partition('.')[0]}[0]") if head == "off" else None
        return slot.bytes if back is None else min(slot.bytes, back.nbytes)

    def __getitem__(self, place: str) -> Tensor:
        return self._slots[place]

    def of(self, names: Collection[str]) -> dict[str, Tensor]:
        """The places of these slots."""
        return {place: tensor for place, tensor in self._slots.items() if place.partition("[")[0] in names}

    def leaves(self, places: Mapping[str, str]) -> dict[str, Leaves]:
        """Group -> views of its slot, one a parameter, as autograd leaves; made once for each (group, place)."""
        out = {}
        for group, place in places.items():
            if (group, place) not in self._leaves:
                self._leaves[group, place] = self._binding.leaves(self._slots[place], group)
            out[group] = self._leaves[group, place]
        return out

    def free(self) -> None:
        """Gives everything back while the backend goes on. No copy may be under way."""
        for tensor in self._pinned:
            self._backend.unregister(tensor)
        self.clear()

    def clear(self) -> None:
        self._pinned.clear()
        self._slots.clear()
        self._leaves.clear()


def dtype_of(slot: Slot, compute_dtype: torch.dtype, grad_dtype: torch.dtype) -> torch.dtype:
    """Optimizer state and sums over micro-batches are FP32; activations on the host, or back from it, are bytes; weights have the
    compute dtype.
    """
    if slot.name.startswith(("state.", "sum.")):
        return torch.float32
    if holds_activations(slot):
        return torch.uint8
    return compute_dtype if holds_weights(slot) else grad_dtype


def holds_weights(slot: Slot) -> bool:
    """True for slots of weights and of their staging, which have the compute dtype; the others have the gradients'."""
    return slot.name in ("w", "stage") or slot.name.startswith("held.")


def may_come_later(slot: Slot) -> bool:
    """True for slots that a step of more micro-batches adds: for their sums, and for what they move to the host and back."""
    return slot.name.startswith("sum.") or slot.memory == "allocator" or holds_activations(slot)


def holds_activations(slot: Slot) -> bool:
    """True for slots of activations on the host or back from it: bytes, since a layer saves tensors of any dtypes."""
    return slot.name.startswith(("off.", "back."))
