"""Collectives of one host's ranks: delivery's all-gather, the gradients' reduction, and a few integers between ranks.

    SingleRank      no peers: nothing to send
    RankCollectives NCCL on the current CUDA stream, or gloo on host tensors
    StagedGloo      gloo for CUDA tensors, through pinned memory: two ranks on one GPU cannot use NCCL

The reduction is an all-to-all of the ranks' shards and an FP32 sum in rank order, rounded once. It moves the bytes of a
reduce-scatter, and gives the same bits for any chunking and for the host route (executor/optim/kernels.py, `reduce`), while a
ring's order of summation depends on the chunk.

All traffic goes over process groups of our own, so that the user's collectives cannot come between: `data` is used by the
comm stream's thread alone, `control` by the thread that drives the plan alone. On each, all ranks call in one order.

Each call on `control` begins with the ranks' meeting, at which a rank that has failed since the last one says so instead
(`together`): it has come to the others' next call, whichever that is, and none is left waiting in one.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slidedp.executor.shared.words import Check, PeerError

TIMEOUT = timedelta(minutes=30)
"""For a peer that is alive and late; dead ones are found by the watchdog (executor/failures/liveness.py) or a lost connection."""

LOOK = timedelta(milliseconds=200)
"""How often a wait for other ranks looks whether there is still something to wait for."""

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


_WELL, _TOLD, _FAILED, _REFUSED = range(4)
"""What a rank says at a meeting: nothing, or that it has failed: for another rank's error, for its own, for a ValueError."""
_TEXT_BYTES = 1000


class PeerFailed(PeerError):
    """Another rank has failed where the ranks work :func:`together`. `refused`: by a ValueError; `text`: its error."""

    def __init__(self, rank: int, text: str, *, refused: bool) -> None:
        self.text, self.refused = text, refused
        super().__init__(rank, f"rank {rank} has failed: {text}")


@contextmanager
def together(collectives: Collectives) -> Iterator[None]:
    """Work that all ranks do alike, and which they must be told of if it fails on one: there it raises what it raises, once all
    ranks have come to their next call on `control` or have failed too, and on the others PeerFailed, in that call.
    """
    try:
        yield
    except PeerFailed:
        raise
    except Exception as e:
        collectives.fail(e)
        raise


class SingleRank:
    """The interface, for one rank."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.check: Check = lambda: None
        """Called while other ranks' weights or gradients are waited for; what it raises ends the wait, and `data` for good."""

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Allocates scratch for gradient chunks of up to `numel` elements on `device` (host), so that no step has to."""

    def release(self) -> None:
        """Gives the scratch back. No collective of gradients or weights may be under way."""

    def all_gather(self, part: Tensor) -> None:
        """Fills `part`, equal shards in rank order, of which this rank's own is there already; flat, contiguous."""

    def reduce(self, part: Tensor, out: Tensor) -> None:
        """``out`` = this rank's shard of the sum of all ranks' `part`, equal shards in rank order; flat, contiguous."""
        out.copy_(part)

    def exchange_ints(self, values: list[int]) -> list[int]:
        """Rank 0's values; every rank passes as many (64-bit)."""
        return list(values)

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Every rank's values, in rank order; every rank passes as many (64-bit)."""
        return [list(values)]

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        """Rank 0's bytes; what other ranks pass is ignored."""
        return data

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrites a host tensor with rank 0's."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def fail(self, error: Exception) -> None:
        """Instead of this rank's next call: the others' raise PeerFailed. See :func:`together`."""

    def abort(self) -> None:
        """After a failure, before the device is waited for: ends what is under way there, which another rank may never join."""

    def close(self, *, healthy: bool = True) -> None:
        """Destroys our process groups; after a failure, those without anything under way: it would be waited for. Idempotent."""


class RankCollectives(SingleRank):
    """Several ranks: NCCL for CUDA tensors, gloo for host tensors. Built by all at once, from the default process group."""

    def __init__(self, data_backend: str) -> None:
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._control: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._data: Any = dist.new_group(backend=data_backend, timeout=TIMEOUT)
        self._as_bytes = data_backend == "gloo"  # whose list of element types differs by version and collective
        self._scratch: dict[str, Tensor] = {}
        self._left = False

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        device = device or torch.device("cpu")
        self._buffer("received", numel, dtype, device)
        if dtype is not torch.float32:
            self._buffer("sum", numel // self.world_size, torch.float32, device)

    def release(self) -> None:
        for buffer in self._scratch.values():
            self._outgrown(buffer)
        self._scratch.clear()

    def all_gather(self, part: Tensor) -> None:
        self._gather(part)

    def reduce(self, part: Tensor, out: Tensor) -> None:
        assert part.numel() == out.numel() * self.world_size, (part.numel(), out.numel())
        received = self._buffer("received", part.numel(), part.dtype, part.device)
        self._exchange(part, received)
        self._sum(received, out)

    def _gather(self, part: Tensor) -> None:
        """In place: NCCL and gloo allow the input to be its own place in the output."""
        part = part.view(torch.uint8) if self._as_bytes else part
        size = part.numel() // self.world_size
        self._call(_all_gather, part, part[self.rank * size : (self.rank + 1) * size])

    def _exchange(self, part: Tensor, received: Tensor) -> None:
        """`received` = shard number `rank` of every rank's `part`, in rank order."""
        if self._as_bytes:
            part, received = part.view(torch.uint8), received.view(torch.uint8)
        self._call(dist.all_to_all_single, received, part)

    def _call(self, collective: Any, out: Tensor, part: Tensor) -> None:
        """Gloo's waits look at `check`: a thread that stayed in one would be ended by Python's exit, and the process with it."""
        if self._as_bytes:
            self._wait(collective(out, part, group=self._data, async_op=True), out, part)
        else:
            collective(out, part, group=self._data)

    def _wait(self, work: Any, *tensors: Tensor) -> None:
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # what has become of it, if not done within the last moment of that time
                    return
            try:
                self.check()
            except BaseException:
                self._left = True
                # What is left under way ends with the last peer, perhaps when Python is no more: nothing of it may be freed then.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._data, work, tensors)))
                raise

    def _sum(self, received: Tensor, out: Tensor) -> None:
        shards = received.view(self.world_size, -1)
        exact = out if out.dtype is torch.float32 else self._buffer("sum", out.numel(), torch.float32, out.device)
        exact.copy_(shards[0])
        for shard in shards[1:]:
            exact.add_(shard)
        if exact is not out:
            out.copy_(exact)

    def _buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Scratch that grows. One user, the comm stream, whose order keeps one call's contents from the next's."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.dtype is not dtype or buffer.numel() < numel or buffer.device != device:
            if buffer is not None:
                self._outgrown(buffer)
            buffer = self._scratch[name] = self._allocate(numel, dtype, device)
        return buffer[:numel]

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def _outgrown(self, buffer: Tensor) -> None:
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # freed, another stream may get its memory at once

    def fail(self, error: Exception) -> None:
        kind = _TOLD if isinstance(error, PeerError) else _REFUSED if isinstance(error, ValueError) else _FAILED
        with suppress(RuntimeError):  # a rank has died meanwhile
            self._meet(kind, f"{type(error).__name__}: {error}")

    def _meet(self, own: int = _WELL, text: str = "") -> None:
        """The ranks' meeting. PeerFailed if another one has failed, and this one has not."""
        kinds = [kind for (kind,) in self._gathered(torch.tensor([own]))]
        if not any(kinds):
            return
        said = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        texts = self._gathered(torch.frombuffer(bytearray(said), dtype=torch.uint8))
        if own == _WELL:
            rank = max(range(self.world_size), key=lambda r: (min(kinds[r], _FAILED), -r))  # a cause before what follows from it
            its = bytes(texts[rank]).rstrip(b"\0").decode(errors="replace")
            raise PeerFailed(rank, its, refused=kinds[rank] == _REFUSED)

    def _gathered(self, own: Tensor) -> list[list[int]]:
        everyone = torch.empty(self.world_size * own.numel(), dtype=own.dtype)
        _all_gather(everyone, own, group=self._control)
        rows: list[list[int]] = everyone.view(self.world_size, -1).tolist()
        return rows

    def exchange_ints(self, values: list[int]) -> list[int]:
        message = torch.tensor(values, dtype=torch.int64)
        self.broadcast(message)
        return message.tolist()

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        self._meet()
        return self._gathered(torch.tensor(values, dtype=torch.int64))

    def broadcast_bytes(self, data: bytes = b"") -> bytes:
        (length,) = self.exchange_ints([len(data)])
        message = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0 and length:
            message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.broadcast(message)
        return message.numpy().tobytes()

    def broadcast(self, tensor: Tensor) -> None:
        self._meet()
        if tensor.numel():
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            dist.broadcast(raw, dist.get_global_rank(self._control, 0), group=self._control)
            if raw.data_ptr() != tensor.data_ptr():
                tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def barrier(self) -> None:
        self._meet()

    def abort(self) -> None:
        if self._data is not None and not self._as_bytes:
            with suppress(Exception):  # the device may have failed; what is left under way is then ended with the process
                dist.distributed_c10d._abort_process_group(self._data)
            self._data = None

    def close(self, *, healthy: bool = True) -> None:
        self._scratch.clear()
        quiet = healthy or (self._as_bytes and not self._left)
        for group in (self._data if quiet else None, self._control):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._data = self._control = None


class StagedGloo(RankCollectives):
    """gloo for CUDA tensors: to pinned host memory, gloo there, and back. The sum is taken on the host, bit for bit the same."""

    def __init__(self, device: torch.device) -> None:
        from slidedp.executor.devices.cuda import PinnedMemory

        super().__init__("gloo")
        self._device, self._memory = device, PinnedMemory(device)

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().reserve(numel, dtype)
        self._buffer("staged", numel, dtype, torch.device("cpu"))

    def all_gather(self, part: Tensor) -> None:
        staged = self._buffer("staged", part.numel(), part.dtype, torch.device("cpu"))
        size = part.numel() // self.world_size
        own = slice(self.rank * size, (self.rank + 1) * size)
        staged[own].copy_(part[own], non_blocking=True)
        torch.cuda.current_stream(part.device).synchronize()  # gloo reads `staged` on the host now
        self._gather(staged)
        part.copy_(staged, non_blocking=True)  # done before `staged` is written again: the next call synchronises first

    def reduce(self, part: Tensor, out: Tensor) -> None:
        staged = self._buffer("staged", part.numel(), part.dtype, torch.device("cpu"))
        staged.copy_(part, non_blocking=True)
        torch.cuda.current_stream(part.device).synchronize()
        received = self._buffer("received", part.numel(), part.dtype, torch.device("cpu"))
        self._exchange(staged, received)
        result = staged[: out.numel()].view(out.dtype) if out.dtype is part.dtype else torch.empty(out.shape, dtype=out.dtype)
        self._sum(received, result)
        out.copy_(result, non_blocking=True)

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._memory.allocate(numel, dtype)

    def _outgrown(self, buffer: Tensor) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # a copy may still read it
        self._memory.unregister(buffer)

    def close(self, *, healthy: bool = True) -> None:
        super().close(healthy=healthy)
        with nullcontext() if healthy else suppress(RuntimeError):  # a device that has failed fails here too
            self._memory.close()


Collectives = SingleRank
"""What the executor is given: any of the three."""


def open_collectives(device: torch.device, rank: int, world_size: int) -> Collectives:
    """What fits the ranks' devices; all ranks call it at once.

    Raises ValueError when several ranks are asked for and torch.distributed has not been initialised for them.
    """
    if world_size == 1:
        return SingleRank()
    if not dist.is_initialized():
        raise ValueError(f"{world_size} ranks need torch.distributed: call torch.distributed.init_process_group first")
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ValueError(
            f"torch.distributed says rank {dist.get_rank()} of {dist.get_world_size()}, the plan {rank} of {world_size}; "
            "all ranks of the default process group take part in a plan"
        )
    if device.type == "cpu":
        return RankCollectives("gloo")
    return StagedGloo(device) if not dist.is_nccl_available() or _share_a_gpu(device) else RankCollectives("nccl")


def _share_a_gpu(device: torch.device) -> bool:
    """True, on all ranks alike, if two of them use one GPU (told by its UUID: indices are per process)."""
    identity = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).int
    own = torch.tensor([identity >> 96, identity >> 64 & 0xFFFFFFFF, identity >> 32 & 0xFFFFFFFF, identity & 0xFFFFFFFF])
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    everyone = torch.empty(dist.get_world_size() * 4, dtype=torch.int64)
    _all_gather(everyone, own, group=group)
    dist.destroy_process_group(group)
    devices = {tuple(row) for row in everyone.view(-1, 4).tolist()}
    return len(devices) < dist.get_world_size()
