"""Plans of random Qwen3 shapes, on one rank or several, of which none ever holds a second copy of the weights.

    hollow  no weights yet: for a plan whose host state leaves no room for a second copy
    fill    random weights into the parameters of such a plan, each rank its part
    open_plan   a plan of such a model, filled
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from device import TINY
from throughput import build
from torch import Tensor, nn

import slidedp
from slidedp.presets import PRESETS

PIECE = 1 << 26
"""Elements drawn on the GPU at a time: 256 MiB beside whatever the plan has there."""


def shape_of(size: str) -> dict[str, Any]:
    """Arguments of a Qwen3Config: `tiny`, or a preset's (0.6B to 32B)."""
    shape = TINY if size == "tiny" else PRESETS[f"qwen3-{size.lower()}"]
    return {key: value for key, value in shape.items() if key != "model_type"}


def hollow(size: str, rank: int, num_layers: int | None = None) -> Any:
    """On `meta`; on rank 0, whose parameters a plan takes over, zeros that all lie in one element. Buffers are real."""
    model = build(size, num_layers, "meta", dtype=torch.float32)
    renew_buffers(model, "cpu")
    if rank == 0:
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(torch.zeros(()).expand(p.shape))
        model.tie_weights()
    return model


def renew_buffers(model: Any, device: str | torch.device) -> None:
    """Of a model built on `meta`: the rotary embedding's, the only ones of these shapes, computed on `device`."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    left = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    assert not left, f"buffers without values: {left}"


@torch.no_grad()
def fill(model: nn.Module, rank: int, world: int, device: torch.device) -> None:
    """Random weights into a plan's model, which all ranks share, each rank every `world`-th parameter. Barrier, then run."""
    for i, p in enumerate(model.parameters()):
        if i % world != rank:
            continue
        if p.dim() == 1:  # norms
            p.fill_(1)
            continue
        generator = torch.Generator(device).manual_seed(i)
        for piece in p.view(-1).split(PIECE):
            piece.copy_(torch.empty(piece.numel(), device=device).normal_(0, 0.02, generator=generator))
    if device.type == "cuda":
        torch.cuda.empty_cache()


def open_plan(size: str, example: dict[str, Tensor], device: torch.device, *, num_layers: int | None = None, hw: str = "auto",
              lr: float = 1e-5, **options: Any) -> slidedp.Plan:
    """Of this rank among those of the environment; random weights, the same ones however many there are. Collective."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan = slidedp.compile(hollow(size, rank, num_layers), hw, example=example, device=device, optimizer=slidedp.AdamW(lr=lr),
                           validate=False, **options)
    fill(plan.model, rank, world, device)
    if world > 1:
        dist.barrier()  # every rank casts what it finds in the master weights, so all must be there
    return plan


def tokens(batch: int, seq: int, size: str = "", generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Random ones, which are their own labels. `size`: of the model, where it may be `tiny`."""
    ids = torch.randint(0, TINY["vocab_size"] if size == "tiny" else 151936, (batch, seq), generator=generator)
    return {"input_ids": ids, "labels": ids}
