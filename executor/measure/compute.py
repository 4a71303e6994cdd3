"""What the device computes: matrix products in BF16 and FP32, its memory's bandwidth, and the fixed cost of an op."""

from __future__ import annotations

import torch

from slidedp.compiler.ops import Stream
from slidedp.executor.measure.lab import Lab


@torch.no_grad()
def measure_tflops(lab: Lab, size: int, dtype: torch.dtype) -> float:
    """10^12 operations a second of square products of `size`, on random numbers: zeros would draw less power.

    In FP32 with whatever the process allows (TF32 or not): so will its layers run.
    """
    device = lab.backend.device
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=random, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    lab.backend.fence_caller()
    seconds = lab.seconds({Stream.GPU: lambda: _product(a, b, out)})[Stream.GPU]
    return 2 * size**3 / seconds / 1e12


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    with torch.no_grad():  # grad mode is a thread's own, and this runs in the stream's
        torch.mm(a, b, out=out)


def measure_hbm_gbps(lab: Lab, num_bytes: int) -> float:
    """10^9 bytes a second, read and written, of a copy of `num_bytes` within the device's memory."""
    source, target = (lab.backend.empty(num_bytes // 4, torch.float32).zero_() for _ in range(2))
    lab.backend.fence_caller()
    seconds = lab.seconds({Stream.GPU: lambda: target.copy_(source)})[Stream.GPU]
    return 2 * num_bytes / seconds / 1e9


def measure_launch_us(lab: Lab) -> float:
    """Microseconds of an op that does next to nothing."""
    tiny = lab.backend.empty(64, torch.float32).zero_()
    lab.backend.fence_caller()
    return lab.seconds({Stream.GPU: lambda: tiny.add_(1)})[Stream.GPU] * 1e6
