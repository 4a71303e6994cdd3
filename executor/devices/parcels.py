"""Memory that goes to the host and back: storages packed one after another into a flat byte buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from slidedp.compiler.layergraph import STORAGE_ALIGN, aligned

Copy = Callable[[Tensor, Tensor], None]
"""``copy(target, source)``, in the calling thread's stream."""


def storage_of(t: Tensor) -> int:
    """Identifies the memory behind `t`, shared by its views, as long as one of them lives."""
    return int(t.untyped_storage()._cdata)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once, as the allocator counts."""
    return sum({storage_of(t): aligned(t.untyped_storage().nbytes(), STORAGE_ALIGN) for t in tensors}.values())


def whole(t: Tensor) -> Tensor:
    """All bytes of the storage behind `t`."""
    return _bytes_of(t.untyped_storage(), t.device)


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def part(memory: Tensor, start: int) -> Tensor:
    """The bytes of `memory` from `start` on, as a storage of their own, which keeps the whole alive: tensors that came in one
    parcel are then told apart by their storages, as they were before.
    """
    return _bytes_of(memory.untyped_storage()[start:], memory.device)


class Geometry(NamedTuple):
    """A tensor without its memory. `offset`: elements from the start of the storage. (One is made for many a tensor that autograd
    saves, and looked up for it: a dataclass takes several times as long to do either.)
    """

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: Tensor) -> Geometry:
        return tuple.__new__(cls, (t.dtype, t.storage_offset(), t.size(), t.stride()))  # the class itself takes twice as long

    def over(self, memory: Tensor, start: int = 0) -> Tensor:
        """The tensor over the storage of `memory`, where its own storage would begin `start` bytes in."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), start // self.dtype.itemsize + self.offset, self.size, self.stride)


class Parcel:
    """The storages of `tensors` that are on `device` and fit into `capacity` bytes, each once, aligned to STORAGE_ALIGN.

    Largest first: a storage that does not fit is not in it, and stays where it is. That happens with another batch than the
    buffer was sized for, and by a little wherever a kernel saves more than the tracer could know of.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, capacity: int) -> None:
        self._start: dict[int, int] = {}
        self._sources: list[Tensor] = []
        self.num_bytes = 0
        sizes = ((aligned(t.untyped_storage().nbytes(), STORAGE_ALIGN), t) for t in tensors if t.device == device)
        for size, t in sorted(sizes, key=lambda item: item[0], reverse=True):
            if storage_of(t) not in self._start and self.num_bytes + size <= capacity:
                self._start[storage_of(t)] = self.num_bytes
                self._sources.append(whole(t))
                self.num_bytes += size

    def start(self, t: Tensor) -> int | None:
        """Where the storage behind `t` begins in the buffer; None if it is not in it. Not after :meth:`let_go`."""
        return self._start.get(storage_of(t))

    def pack(self, buffer: Tensor, copy: Copy) -> None:
        for source, start in zip(self._sources, self._start.values(), strict=True):
            copy(buffer[start : start + source.numel()], source)

    def let_go(self) -> list[Tensor]:
        """Gives up the memory that was copied from, and returns it."""
        sources, self._sources, self._start = self._sources, [], {}
        return sources
