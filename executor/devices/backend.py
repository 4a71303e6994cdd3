"""What the executor asks of a device, and the CPU's answer: every stream a thread, every copy a plain copy.

The CUDA backend (executor/devices/cuda.py) has the same methods, so that every schedule also runs, with real concurrency, on a
machine without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from slidedp.executor.streams.streams import Seconds, Streams, Trace


@dataclass(frozen=True, slots=True)
class RngState:
    """State of the generators that a stage's forward may draw from. `device` is None on the CPU backend."""

    cpu: Tensor
    device: Tensor | None = None

    def same(self, other: RngState) -> bool:
        """True if nothing has been drawn between the two."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.device is None or other.device is None or torch.equal(self.device, other.device)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch tensor of the user's; on the device, `there`, once `arrived`, if it has set out."""

    value: Tensor
    there: Tensor | None = None
    arrived: Any = None


class Backend(Protocol):
    """A device, its streams and its memory. Methods that move data act on the calling stream's thread."""

    device: torch.device

    def open_streams(self, *, delay: Seconds | None = None, pause: Seconds | None = None, trace: Trace | None = None) -> Streams:
        """All streams, their threads running. The caller closes them. Arguments: see :class:`Streams`."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat device buffer, uninitialised, at its exact size and for the backend's life."""

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat zeroed host buffer that the device copies to and from without staging, at its exact size."""

    def register(self, tensor: Tensor) -> None:
        """Lets the device copy directly to and from this host memory, which starts on a page of its own. Not twice."""

    def unregister(self, tensor: Tensor) -> None:
        """Undoes :meth:`register`. Its copies must be done."""

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """``dst = src``, asynchronous on the calling thread's current device stream."""

    def fence_caller(self) -> None:
        """In the user's thread, before a step reads what the user made: all device work that they queued is done."""

    def send(self, value: Tensor) -> Sent:
        """In the user's thread, before a step is submitted: a batch tensor sets out for the device, ahead of the step's weights.

        Whoever has it keeps it until the device has done all of the step.
        """

    def receive(self, sent: Sent) -> Tensor:
        """The tensor, in the current stream; a copy of the user's, who may refill theirs once `run` returns."""

    def to_device(self, value: Tensor) -> Tensor:
        """A copy of a batch tensor on the device, made in the current stream."""

    def to_host(self, value: Tensor) -> Tensor:
        """A host copy of a small result. It holds the values once the op that called this is done."""

    def rng_state(self) -> RngState:
        """State of the default generators."""

    def set_rng_state(self, state: RngState) -> None:
        """Puts the default generators back to `state`."""

    def release_cached(self) -> None:
        """Once the calling stream's work is done, gives back what the allocator holds and nothing uses."""

    def cap(self, num_bytes: int) -> None:
        """The allocator reserves no more than this until `close`, fragments included, nor than the sum of all open backends'; a
        limit of the user's own stays.
        """

    def memory_in_use(self) -> str:
        """The allocator's numbers, for messages; '' where there is no device with one."""

    def trim(self) -> None:
        """What has been freed goes back to the device, for buffers of other sizes."""

    def settle(self) -> None:
        """After the first step of a graph: what there is now stays. See garbage.py; the CPU has nobody waiting for the host."""

    def drain(self) -> None:
        """Waits for all work of the device, whatever became of the streams' threads."""

    def anchor_clock(self) -> None:
        """Before a recording, with nothing in flight: device times are exact from here on, however long ago the start was."""

    def close(self) -> None:
        """Unregisters all host memory. The streams must be closed. Idempotent."""


class CpuBackend:
    """The host as its own device: results are complete when an op's function returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def open_streams(self, *, delay: Seconds | None = None, pause: Seconds | None = None, trace: Trace | None = None) -> Streams:
        # A thread's first torch op would run with OpenMP's default number of threads, not with the one that was set.
        return Streams(enter=lambda stream: torch.get_num_threads() and None, delay=delay, pause=pause, trace=trace)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def register(self, tensor: Tensor) -> None:
        pass

    def unregister(self, tensor: Tensor) -> None:
        pass

    def copy(self, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src)

    def fence_caller(self) -> None:
        pass

    def send(self, value: Tensor) -> Sent:
        return Sent(value)

    def receive(self, sent: Sent) -> Tensor:
        return sent.value.clone()

    def to_device(self, value: Tensor) -> Tensor:
        return value.clone()

    def to_host(self, value: Tensor) -> Tensor:
        return value.clone()

    def rng_state(self) -> RngState:
        return RngState(torch.get_rng_state())

    def set_rng_state(self, state: RngState) -> None:
        torch.set_rng_state(state.cpu)

    def release_cached(self) -> None:
        pass

    def cap(self, num_bytes: int) -> None:
        pass

    def memory_in_use(self) -> str:
        return ""

    def trim(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def anchor_clock(self) -> None:
        pass

    def close(self) -> None:
        pass


POISON_BLOCK = 1 << 18
"""Elements on the device from which memory of the host is poisoned."""


def poison(tensor: Tensor, device: torch.device) -> None:
    """Test mode: fills a released slot with NaN, so that a read before the next write shows in the result.

    In the calling thread's stream of `device`; flat memory of the host too, by copies, since one from it that has been issued
    there may not have begun.
    """
    assert tensor.is_floating_point() or tensor.dtype is torch.uint8, tensor.dtype
    nan = float("nan") if tensor.is_floating_point() else 0xFF  # all bits set is a NaN in every floating-point dtype
    if tensor.device == device:
        tensor.fill_(nan)
        return
    block = torch.full((min(tensor.numel(), POISON_BLOCK),), nan, dtype=tensor.dtype, device=device)
    for part in tensor.split(POISON_BLOCK):
        part.copy_(block[: part.numel()], non_blocking=True)
