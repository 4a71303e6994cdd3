"""Anonymous shared memory that all ranks of a host map and that dies with them.

The memory is a memfd: rank 0 makes it, the others open it through ``/proc/<pid>/fd/<fd>``. It has no name in any file
system, so nothing is left behind whatever ends the processes.

It is allocated in full before use (a page that is first touched when the host is full kills the process with SIGBUS or
the OOM killer), step by step, looking before each step at what the machine and the control group have left.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from slidedp.executor.shared.host_memory import available_bytes, total_bytes
from slidedp.executor.shared.mapping import FileMapping

Exchange = Callable[[list[int]], list[int]]
"""Collective: every rank passes a list of one length, every rank gets rank 0's."""

GIB = 1 << 30
_STEP_BYTES = GIB
_MOST_STEPS = 8  # allocated side by side: the kernel zeroes memory in the thread that asks for it
_NUM_INTS = 5


class HostMemoryError(MemoryError, ValueError):
    """The host has less memory than the state needs. The message has both numbers and the remedy."""

    def __init__(self, name: str, needed_bytes: int, available_bytes: int) -> None:
        self.needed_bytes, self.available_bytes = needed_bytes, max(available_bytes, 0)
        super().__init__(
            f"host memory: {name} needs {needed_bytes / GIB:.2f} GiB, {self.available_bytes / GIB:.2f} GiB are available; "
            "free host memory, raise the container's memory limit, or use a smaller model"
        )


class SharedSegment:
    """`nbytes` of zeroed memory shared by all ranks, mapped in this process.

    Collective when `world_size` > 1: every rank constructs it with the same `nbytes`, at the same time; `barrier` (or the
    caller's own) must pass before rank 0 closes. Raises HostMemoryError, on every rank, when the host is short.

    `available`, `total`, `wait_s`: how free memory is read and how long a shortage may last; for tests.
    """

    def __init__(
        self,
        name: str,
        nbytes: int,
        *,
        rank: int = 0,
        exchange: Exchange | None = None,
        available: Callable[[], int] = available_bytes,
        total: Callable[[], int] = total_bytes,
        wait_s: float = 10.0,
    ) -> None:
        self.name, self.nbytes = name, max(nbytes, 1)
        self._fd = -1
        self._map: FileMapping | None = None
        error: Exception | None = None
        message = [0] * _NUM_INTS
        if rank == 0:
            try:
                self._create(available, total, wait_s)
                message = [1, os.getpid(), self._fd, self.nbytes, os.fstat(self._fd).st_ino]
            except (OSError, HostMemoryError) as e:
                self.close()
                error, message = e, [0, self.nbytes, getattr(e, "available_bytes", 0), 0, 0]
        if exchange is not None:
            message = exchange(message)  # also after a failure, so that no rank is left waiting
        if not message[0]:
            raise error or HostMemoryError(name, message[1], message[2])
        if rank != 0:
            self._open(*message[1:])

    def _create(self, available: Callable[[], int], total: Callable[[], int], wait_s: float) -> None:
        self._fd = os.memfd_create(f"slidedp-{self.name}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.nbytes)
        self._map = FileMapping(self._fd, self.nbytes)
        start = 0
        with ThreadPoolExecutor(min(_MOST_STEPS, os.cpu_count() or 1)) as threads:
            while start < self.nbytes:
                step = min(_STEP_BYTES, self.nbytes - start)
                left = _wait_for(step, available, total, wait_s)
                if left < step:
                    raise HostMemoryError(self.name, self.nbytes, start + left)
                end = min(start + max(1, min(_MOST_STEPS, left // _STEP_BYTES)) * _STEP_BYTES, self.nbytes)
                parts = [(at, min(_STEP_BYTES, end - at)) for at in range(start, end, _STEP_BYTES)]
                try:
                    list(threads.map(self._allocate, *zip(*parts, strict=True)))
                except OSError as e:
                    if e.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT):
                        raise
                    raise HostMemoryError(self.name, self.nbytes, start + available()) from e
                start = end

    def _allocate(self, start: int, step: int) -> None:
        # Touching through the mapping lets the kernel use huge pages; fallocate cannot.
        assert self._map is not None
        code = self._map.populate(start, step)
        if code == errno.EINVAL:
            os.posix_fallocate(self._fd, start, step)
        elif code:
            raise OSError(code, os.strerror(code))

    def _open(self, pid: int, fd: int, nbytes: int, inode: int) -> None:
        assert nbytes == self.nbytes, f"segment {self.name}: {self.nbytes} bytes here, {nbytes} on rank 0"
        path = f"/proc/{pid}/fd/{fd}"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise ValueError(
                f"host state {self.name}: cannot open rank 0's memory at {path} ({e.strerror}); "
                "all ranks of a host must run as one user in one container (PID namespace)"
            ) from e
        assert os.fstat(self._fd).st_ino == inode, f"{path} is not rank 0's segment {self.name}"
        self._map = FileMapping(self._fd, self.nbytes)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> Tensor:
        """A flat view of the memory; it keeps the memory mapped for as long as it lives."""
        assert self._map is not None, f"segment {self.name} is closed"
        return self._map.tensor(dtype, offset_bytes, numel)

    def remap_private(self) -> FileMapping:
        """The same memory as an ordinary, per-process one: pages stay shared until somebody writes to them (copy on write).

        Nobody may write through the shared mapping from now on. Valid after `close` and after other ranks have ended.
        """
        return FileMapping(self._fd, self.nbytes, private=True)

    def discard(self, offset_bytes: int, nbytes: int) -> None:
        """Gives whole pages back to the system, where it takes them; they read as zeros, on all ranks. One rank calls it."""
        assert self._map is not None, f"segment {self.name} is closed"
        self._map.discard(offset_bytes, nbytes)

    def close(self) -> None:
        """Unmaps and releases. While a tensor from here lives, its pages stay; new ones cannot be made. Idempotent."""
        self._map = None  # the last reference to go, this or a tensor's, unmaps
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _wait_for(step: int, available: Callable[[], int], total: Callable[[], int], wait_s: float) -> int:
    """Free bytes once they reach `step`, or after `wait_s` without growth.

    Some virtual machines grow while they are used (a balloon): being short then lasts a moment.
    """
    size = total()
    deadline = time.monotonic() + wait_s
    while (left := available()) < step and time.monotonic() < deadline:
        time.sleep(0.05)
        if total() > size:
            size, deadline = total(), time.monotonic() + wait_s
    return left

