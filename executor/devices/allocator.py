"""What a plan asks of torch's CUDA allocator, which is the whole process's: a limit, segments that fit it, workspaces freed."""

from __future__ import annotations

import os
import threading
from typing import ClassVar

import torch


class AllocatorCap:
    """One plan's part of what torch's allocator may reserve on `device`, which is a number of the process: as long as several
    plans have a part, it is the sum of theirs. A limit that was there before the first of them is the user's, and stays.

    While there is one, segments grow and shrink by pages, so that what is free in them does not lie idle: of a budget of
    4.9 GiB that was 0.8.
    """

    _parts: ClassVar[dict[int, dict[AllocatorCap, int]]] = {}  # by device: of the process, as the allocator is
    _lock = threading.RLock()  # plans are opened and closed in several threads, and by a collection here while it is held

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def set(self, num_bytes: int) -> None:
        with self._lock:
            parts = self._parts.setdefault(self._device.index, {})
            if parts or torch.cuda.get_per_process_memory_fraction(self._device) >= 1:
                parts[self] = num_bytes
                self._apply(parts)

    def lift(self) -> None:
        """Idempotent."""
        with self._lock:
            parts = self._parts.get(self._device.index, {})
            if parts.pop(self, None) is not None:
                self._apply(parts)

    def _apply(self, parts: dict[AllocatorCap, int]) -> None:
        total = torch.cuda.mem_get_info(self._device)[1]
        share = sum(parts.values()) / total if parts else 1.0
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), self._device)
        set_expandable_segments(any(self._parts.values()))


def set_expandable_segments(on: bool) -> None:
    """How memory is reserved from now on, unless the user has configured the allocator, or this torch cannot be told."""
    configured = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None and not configured:
        change(f"expandable_segments:{on}")


def free_workspaces() -> None:
    """cuBLAS's, of which torch keeps one for each stream and thread, 32 MiB on an H200, for ever: streams go with their plan.

    No product may be under way; the next one gets a new workspace.
    """
    free = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if free is not None:
        free()
