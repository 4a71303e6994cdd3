"""The CUDA backend: a `torch.cuda.Stream` behind each device stream, events between them, registered host memory.

Each stream's host thread has its CUDA stream current for good, so that what an op allocates belongs to that stream's
pool. Buffers that several streams touch (slots) are allocated once and ordered by events alone: no `record_stream`.

Host memory is registered at its exact size. `Tensor.pin_memory()` is not used: it rounds up to a power of two.
Sources: CUDA Runtime API, Event and Stream Management and `cudaHostRegister`; PyTorch notes, "CUDA semantics".
"""

from __future__ import annotations

import mmap
import threading
import time
from functools import partial

import torch
from torch import Tensor

from slidedp.compiler.ops import OF_THE_HOST, Stream
from slidedp.compiler.units import format_bytes
from slidedp.executor.devices import garbage
from slidedp.executor.devices.allocator import AllocatorCap, free_workspaces
from slidedp.executor.devices.backend import RngState, Sent
from slidedp.executor.streams.streams import Seconds, Streams, Trace

_CYCLES_PER_S = 1.5e9  # of a multiprocessor, about

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class CudaQueue:
    """A CUDA stream as an OpStream sees it. `clock`: converts device time to host time; shared by a device's queues."""

    def __init__(self, device: torch.device, priority: int, clock: Clock) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._device, self._clock = device, clock

    def enter(self) -> None:
        """In the stream's host thread, first of all: both settings are per thread."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self.stream)

    def wait(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def record(self, *, blocking: bool, timing: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timing, blocking=blocking)
        event.record(self.stream)
        return event

    def pause(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def elapsed_s(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) * 1e-3

    def time_s(self, event: torch.cuda.Event) -> float:
        return self._clock.time_s(event)


class Clock:
    """Device time of timing events on the clock of `time.perf_counter`, from one event seen on both.

    That clock is the host's (CLOCK_MONOTONIC), so times of several ranks compare, as long as the device's has not drifted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.anchor()

    def anchor(self) -> None:
        """See both clocks anew. No timing event may be waiting to be converted."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def time_s(self, event: torch.cuda.Event) -> float:
        return self._origin_s + float(self._origin.elapsed_time(event)) * 1e-3


class CudaBackend:
    """One GPU. Raises ValueError when `device` is not a CUDA device of this machine."""

    def __init__(self, device: torch.device | str | int = 0) -> None:
        if not torch.cuda.is_available():
            raise ValueError("device: CUDA is not available here; use device='cpu'")
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: expected a CUDA device, got {device}")
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        if self.device.index >= torch.cuda.device_count():
            raise ValueError(f"device: {self.device} does not exist, this process sees {torch.cuda.device_count()}")
        torch.cuda.init()
        garbage.collect_abandoned()
        self._cap = AllocatorCap(self.device)
        self._clock = Clock(self.device)
        self._memory = PinnedMemory(self.device)
        self._staging = _StagingPool(self.device, self._memory)
        self._batches = torch.cuda.Stream(self.device)

    def open_streams(self, *, delay: Seconds | None = None, pause: Seconds | None = None, trace: Trace | None = None) -> Streams:
        # Collectives first when both could run: others' GPUs wait for them.
        queues = {s: CudaQueue(self.device, -1 if s is Stream.COMM else 0, self._clock) for s in Stream if s not in OF_THE_HOST}
        return Streams(queues, enter=partial(self._enter, queues), delay=delay, pause=pause, trace=trace)

    def _enter(self, queues: dict[Stream, CudaQueue], stream: Stream) -> None:
        if stream in queues:
            queues[stream].enter()
        else:
            torch.cuda.set_device(self.device)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype, device=self.device)
        # The memory may be a freed block whose last kernel, on the allocating stream, still runs; ours are other streams.
        torch.cuda.current_stream(self.device).synchronize()
        return tensor

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(numel, dtype)

    def register(self, tensor: Tensor) -> None:
        self._memory.register(tensor)

    def unregister(self, tensor: Tensor) -> None:
        self._memory.unregister(tensor)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    def fence_caller(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def send(self, value: Tensor) -> Sent:
        """On a stream of its own, whose pool its memory is of: it goes back there once the step is done.

        Copied by the step's first op it would wait in the copy engine behind the weights that are queued there: 13 to 18 ms
        of a step of 750, measured.
        """
        if value.is_cuda or not value.numel():
            return Sent(value)
        with torch.inference_mode(False), torch.cuda.stream(self._batches):  # whatever the user's thread is in
            try:
                there = self._staging.to_device(value)
            except torch.OutOfMemoryError:  # in the step layers can make room
                return Sent(value)
            arrived = torch.cuda.Event()
            arrived.record()
        return Sent(value, there, arrived)

    def receive(self, sent: Sent) -> Tensor:
        if sent.there is None:
            return self._staging.to_device(sent.value)
        torch.cuda.current_stream(self.device).wait_event(sent.arrived)
        return sent.there

    def to_device(self, value: Tensor) -> Tensor:
        """From the host through a pinned buffer: a pageable copy would first wait for all queued work. Always a copy."""
        return self._staging.to_device(value)

    def to_host(self, value: Tensor) -> Tensor:
        if not value.is_cuda:
            return value.clone()
        # Torch's pinned pool, right for a few bytes a step: the block is not reused before this copy is done.
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    def rng_state(self) -> RngState:
        return RngState(torch.get_rng_state(), torch.cuda.get_rng_state(self.device))

    def set_rng_state(self, state: RngState) -> None:
        torch.set_rng_state(state.cpu)
        if state.device is not None:
            torch.cuda.set_rng_state(state.device, self.device)

    def release_cached(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        torch.cuda.empty_cache()

    def cap(self, num_bytes: int) -> None:
        """At the limit torch first frees what it keeps for later, then refuses: see fallback.py."""
        self._cap.set(num_bytes)

    def memory_in_use(self) -> str:
        free, total = torch.cuda.mem_get_info(self.device)
        share = torch.cuda.get_per_process_memory_fraction(self.device)
        allowed = f", of which this process may use {format_bytes(int(share * total))}" if share < 1 else ""
        return (f"{format_bytes(torch.cuda.memory_allocated(self.device))} allocated, "
                f"{format_bytes(torch.cuda.memory_reserved(self.device))} reserved, {format_bytes(free)} of the device's "
                f"{format_bytes(total)} free{allowed}")

    def trim(self) -> None:
        garbage.collect()  # what is left of a plan may refer to itself in cycles, and so keep slots alive
        torch.cuda.synchronize(self.device)  # what other streams have freed they may still write
        free_workspaces()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def settle(self) -> None:
        garbage.hold(self)

    def drain(self) -> None:
        torch.cuda.synchronize(self.device)

    def anchor_clock(self) -> None:
        self._clock.anchor()

    def close(self) -> None:
        garbage.release(self)  # first: whatever follows fails on a device that has failed
        try:
            self._staging.clear()
            self._memory.close()
            torch.cuda.synchronize(self.device)
            free_workspaces()
        finally:
            self._cap.lift()  # last: until then this plan's memory is in use, and another one's step may be under way


class PinnedMemory:
    """Host memory that the GPU reads and writes directly: page-aligned, registered at its exact size (rounded to pages)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._registered: dict[int, Tensor] = {}  # address -> a tensor that keeps the memory mapped

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat, zeroed, registered tensor. It stays registered until `unregister` or `close`."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # after a fork (data loaders), copy on write would move pages away from the GPU's
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        tensor.zero_()  # touched before registering: ten times faster than letting the driver fault pages in
        self.register(tensor)
        return tensor

    def register(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        address, page = tensor.data_ptr(), mmap.PAGESIZE
        assert tensor.is_contiguous(), tensor.stride()
        assert address % page == 0, "only whole pages can be registered"
        assert address not in self._registered, "host memory registered twice"
        num_bytes = -(-tensor.nbytes // page) * page
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE), f"pinning {num_bytes} bytes")
        self._registered[address] = tensor

    def unregister(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        del self._registered[tensor.data_ptr()]
        with torch.cuda.device(self._device):
            _check(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()), "unpinning host memory")

    def close(self) -> None:
        """Unregisters everything, once the device is done with it. Idempotent."""
        if self._registered:
            torch.cuda.synchronize(self._device)
        for tensor in list(self._registered.values()):
            self.unregister(tensor)


class _StagingPool:
    """Pinned buffers for batch tensors, each reused once the copy that last used it is done.

    The user's thread takes them and the GPU stream's, at once where a step has been interrupted and the next one begun.
    """

    def __init__(self, device: torch.device, memory: PinnedMemory) -> None:
        self._device, self._memory, self._lock = device, memory, threading.Lock()
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []

    def to_device(self, value: Tensor) -> Tensor:
        """A copy, in the current stream. Whoever calls keeps `value` until it is done."""
        out = torch.empty(value.shape, dtype=value.dtype, device=self._device)
        if value.numel() == 0:
            return out
        if value.is_cuda:
            out.copy_(value, non_blocking=True)
        else:
            buffer = self._take(value.nbytes)
            staged = buffer[: value.nbytes].view(value.dtype).view(value.shape)
            staged.copy_(value)
            out.copy_(staged, non_blocking=True)
            done = torch.cuda.Event()
            done.record()  # before others see it: one that is not recorded counts as done
            with self._lock:
                self._buffers.append((buffer, done))
        return out

    def _take(self, num_bytes: int) -> Tensor:
        """The smallest free buffer that fits, else a new one: of a power of two, lest batches that grow leave one each."""
        with self._lock:
            fitting = [i for i, (buffer, done) in enumerate(self._buffers) if buffer.numel() >= num_bytes and done.query()]
            if fitting:
                return self._buffers.pop(min(fitting, key=lambda i: self._buffers[i][0].numel()))[0]
        return self._memory.allocate(1 << (num_bytes - 1).bit_length(), torch.uint8)

    def clear(self) -> None:
        self._buffers.clear()


def _check(code: object, what: str) -> None:
    """Raises RuntimeError unless `code`, an enum or an int by torch version, is success."""
    status = int(code)  # type: ignore[call-overload]
    if status != 0:
        raise RuntimeError(f"{what} failed with cudaError {code} ({status}); is the locked-memory limit (ulimit -l) high enough?")
