"""Maps a file so that huge pages can hold it: at an address that is a multiple of theirs, which `mmap.mmap` cannot ask for.

The CPU update reads and writes eight streams at once, and with small pages it waits for address translation: huge pages are
worth 7 to 10 % of its time. For shared memory most systems give none by themselves (`shmem_enabled` is `never`), but
`MADV_COLLAPSE` (Linux 6.1) makes them for whoever asks, whatever that setting is. Without it pages are small, no more.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # Linux 5.14 and 6.1; not in Python's mmap module
_MAP_FIXED, _PROT_NONE = 0x10, 0


class FileMapping:
    """`nbytes` of the file `fd` in this process; unmapped when this object and all tensors of it have gone.

    `private`: copy on write. Raises OSError.
    """

    def __init__(self, fd: int, nbytes: int, *, private: bool = False) -> None:
        self.nbytes = nbytes
        reserved = nbytes + HUGE_PAGE_BYTES  # addresses only: the file takes the place of a part of them
        start = _mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        try:
            _mmap(self.address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, fd)
        except OSError:
            _libc().munmap(start, reserved)
            raise
        # A tensor keeps the object that it is made of alive, and this one can be given a finalizer.
        self._bytes = (ctypes.c_ubyte * nbytes).from_address(self.address)
        weakref.finalize(self._bytes, _libc().munmap, start, reserved).atexit = False
        self._advise(mmap.MADV_HUGEPAGE, 0, nbytes)

    def tensor(self, dtype: torch.dtype, offset_bytes: int, numel: int) -> Tensor:
        """A flat view; it keeps the memory mapped for as long as it lives."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)  # frombuffer refuses nothing
        return torch.frombuffer(self._bytes, dtype=dtype, count=numel, offset=offset_bytes)

    def populate(self, start: int, nbytes: int) -> int:
        """Allocates zeroed memory for ``[start, start + nbytes)`` of a new file, in huge pages where they can be had.

        Returns an errno; EINVAL where the kernel cannot do this.
        """
        first, last = (x // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES for x in (start + HUGE_PAGE_BYTES - 1, start + nbytes))
        for page in range(first, last, HUGE_PAGE_BYTES):  # collapsing wants one small page to be there
            if code := self._advise(_MADV_POPULATE_WRITE, page, mmap.PAGESIZE):
                return code
        if first < last:
            self._advise(_MADV_COLLAPSE, first, last - first)
        return self._advise(_MADV_POPULATE_WRITE, start, nbytes)

    def discard(self, start: int, nbytes: int) -> int:
        """Frees whole pages of shared memory, in the file too: they read as zeros from here on. Returns an errno."""
        return self._advise(mmap.MADV_REMOVE, start, nbytes)

    def _advise(self, advice: int, start: int, nbytes: int) -> int:
        return 0 if _libc().madvise(self.address + start, nbytes, advice) == 0 else ctypes.get_errno()


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc().mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno() or errno.ENOMEM
        raise OSError(code, os.strerror(code))
    return found


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    return libc
