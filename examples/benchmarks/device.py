"""What the benchmarks ask of the device, and of the CPU in its place: there they only show that they work.

    DEVICE      the GPU if there is one
    TINY        the shape of `--size tiny`
    timed       seconds of each of some steps
    pss_bytes   host memory of this process
    stolen      how much of the cores' time the hypervisor has given to others
    full_collections    how long garbage collections hold up all Python threads
    thin        a model whose weights are one piece of noise: for shapes that the host cannot hold twice
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Device = torch.device | str

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip


def on_gpu(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def synchronize(device: Device) -> None:
    if on_gpu(device):
        torch.cuda.synchronize(device)


def reset_peak(device: Device = DEVICE) -> None:
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def timed(step: Callable[[], object], steps: int, device: Device) -> list[float]:
    """Seconds of each of `steps`, after one that does not count; memory is watched from the second on."""
    step()
    reset_peak(device)
    times = []
    for _ in range(steps):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return times


def peak_gib() -> dict[str, float]:
    """Since :func:`reset_peak`; nothing without a GPU."""
    if DEVICE != "cuda":
        return {}
    return {"peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)}


@contextmanager
def full_collections() -> Iterator[list[float]]:
    """Seconds of each full garbage collection in the block."""
    pauses, began = list[float](), 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if info["generation"] == 2 and phase == "start":
            began = time.perf_counter()
        elif info["generation"] == 2:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


@contextmanager
def stolen() -> Iterator[list[float]]:
    """The fraction of all cores' time in the block that was `steal` in /proc/stat, once the block has ended."""
    fraction, before = list[float](), _ticks()
    yield fraction
    spent = [b - a for a, b in zip(before, _ticks(), strict=True)]
    fraction.append(spent[7] / max(sum(spent[:8]), 1))


def _ticks() -> list[int]:
    with open("/proc/stat") as f:
        return [int(word) for word in f.readline().split()[1:]]


def pss_bytes() -> int:
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))


@torch.no_grad()
def thin(model: Any) -> Any:
    """`model` on the CPU, in BF16: every matrix a view of the same noise, normal and of 0.02, as these shapes are initialised.

    A plan copies it into its own state, beside which there would be no room for other copies of all weights.
    """
    largest = max(p.numel() for p in model.parameters())
    noise = torch.randn(largest, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for p in model.parameters():
        p.data = noise[: p.numel()].view(p.shape) if p.dim() > 1 else p.detach().to("cpu", torch.bfloat16)
    return model.to("cpu")
