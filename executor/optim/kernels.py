"""Host kernels behind one interface: the native library where it can be had, torch otherwise.

`cast` and `reduce` give the same bits either way; AdamW does not: see :mod:`slidedp.executor.optim.adam`.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slidedp.executor.native.build import DTYPE_CODES, SEGMENT, NativeUnavailable, in_process, load_library
from slidedp.executor.options import update_threads

if TYPE_CHECKING:
    from slidedp.executor.streams.updates import UpdateQueue

_BLOCK = 1 << 20  # elements the torch fallback converts at a time, so that its temporaries stay small


class Kernel(StrEnum):
    """`auto`: native where it can be built, else torch with one warning. `native`: or an error. `torch`: torch's bits."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class HostKernels:
    """Element-wise work on host memory with `num_threads` threads of its own, which sleep between calls.

    `num_threads`: default: this process's cores, shared among `num_ranks`. `quiet`: no warning for a fallback. `queue`: work on
    its threads instead, ahead of its updates: beside them more threads than cores would wait for one another.
    One object serves one caller at a time (calls queue up); make one per worker thread. Raises ValueError for an unknown
    `kernel`, and for ``native`` when the library cannot be built.
    """

    def __init__(
        self,
        kernel: Kernel | str = Kernel.AUTO,
        num_threads: int | None = None,
        *,
        num_ranks: int = 1,
        quiet: bool = False,
        queue: UpdateQueue | None = None,
    ) -> None:
        if kernel not in list(Kernel):
            raise ValueError(f"kernel: expected one of {', '.join(Kernel)}, got {kernel!r}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads: expected a positive number, got {num_threads}")
        self.num_threads = num_threads or update_threads(num_ranks)
        self._library: Any = None  # ctypes.CDLL
        if kernel != Kernel.TORCH:
            try:
                self._library = load_library()
            except NativeUnavailable as error:
                if kernel == Kernel.NATIVE:
                    raise ValueError(f"kernel='native' cannot be had: {error}; or use kernel='torch'") from error
                if not quiet:
                    _warn_once(str(error))
        self._queue = queue  # kept alive
        if self._library is not None and queue is not None:
            self._crew = queue.crew
        elif self._library is not None:
            self._crew = self._library.slidedp_pool_create(self.num_threads)
            weakref.finalize(self, in_process, os.getpid(), self._library.slidedp_pool_destroy, self._crew)

    @property
    def native(self) -> bool:
        return self._library is not None

    @property
    def library(self) -> Any:
        """The native library, or None."""
        return self._library

    def handles(self, *dtypes: torch.dtype | None) -> bool:
        """True if the native library is there and knows these element types."""
        return self.native and all(d is None or d in DTYPE_CODES for d in dtypes)

    def cast(self, source: Tensor, out: Tensor) -> None:
        """``out[i] = source[i]`` rounded to nearest even. `source`: FP32; both flat, contiguous, of one length."""
        assert source.dtype == torch.float32, source.dtype
        _check_flat(source, out)
        if self.handles(out.dtype):
            code = DTYPE_CODES[out.dtype]
            self._library.slidedp_cast(self._crew, source.data_ptr(), out.data_ptr(), code, out.numel())
        else:
            out.copy_(source)

    def reduce(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """``out = sources[0] + sources[1] + …`` summed in FP32 in that order and rounded once. All flat, of one dtype."""
        assert {s.dtype for s in sources} == {out.dtype}, [s.dtype for s in sources]
        _check_flat(*sources, out)
        if self.handles(out.dtype):
            pointers = np.array([s.data_ptr() for s in sources], dtype=np.uint64)
            code = DTYPE_CODES[out.dtype]
            self._library.slidedp_reduce(self._crew, pointers.ctypes.data, len(sources), out.data_ptr(), code, out.numel())
            return
        for lo in range(0, out.numel(), _BLOCK):
            total = sources[0][lo : lo + _BLOCK].to(torch.float32, copy=True)
            for source in sources[1:]:
                total += source[lo : lo + _BLOCK]
            out[lo : lo + _BLOCK].copy_(total)

    def adamw(
        self,
        state: tuple[Tensor, Tensor, Tensor],
        grad: Tensor,
        shadow: Tensor | None,
        segments: np.ndarray,
        betas: tuple[float, float],
        eps: float,
    ) -> int:
        """One native AdamW call over `segments` (dtype SEGMENT) of a group's flat `state`: master and the two moments.

        Returns -1, or the first element of the lowest tile left untouched because its gradient was not finite.
        """
        assert segments.dtype == SEGMENT
        assert segments.flags.c_contiguous
        assert segments.size == 0 or segments["end"].max() <= grad.numel()
        _check_flat(*state, grad, *([] if shadow is None else [shadow]), same_length=False)
        bad: int = self._library.slidedp_adamw(
            self._crew,
            *(t.data_ptr() for t in state),
            grad.data_ptr(),
            DTYPE_CODES[grad.dtype],
            None if shadow is None else shadow.data_ptr(),
            0 if shadow is None else DTYPE_CODES[shadow.dtype],
            segments.ctypes.data,
            segments.size,
            betas[0],
            1 - betas[0],
            betas[1],
            1 - betas[1],
            eps,
        )
        return bad

    def update(self, handle: int, step: int, lr: float, present: np.ndarray | None, scale: float = 1.0) -> int:
        """A native update (see :class:`slidedp.executor.optim.adam.BoundUpdate`). `present`: bool, one a parameter of the group.

        Returns as :meth:`adamw` does.
        """
        flags = None if present is None else present.ctypes.data
        bad: int = self._library.slidedp_update_now(self._crew, handle, step, lr, flags, scale)
        return bad


def _check_flat(*tensors: Tensor, same_length: bool = True) -> None:
    for t in tensors:
        flat = t.dim() == 1 and t.is_contiguous() and t.device.type == "cpu"
        assert flat, (t.shape, t.stride(), t.device)
        assert not same_length or t.numel() == tensors[0].numel(), [t.numel() for t in tensors]


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"slidedp: the native CPU kernels cannot be built, using torch's (slower): {reason}", stacklevel=4)
