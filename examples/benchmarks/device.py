"""What the benchmarks ask of the device, and of the CPU in its place: there they only show that they work.

    DEVICE      the GPU if there is one
    TINY        the shape of `--size tiny`
    thin        a model whose weights are one piece of noise: for shapes that the host cannot hold twice
"""

from __future__ import annotations

from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> dict[str, float]:
    """Since :func:`reset_peak`; nothing without a GPU."""
    if DEVICE != "cuda":
        return {}
    return {"peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2)}


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
