"""Random Qwen3 shapes, tokens, and plans, on one rank or several, of which none ever holds a second copy of the weights.

    build   a model with its weights
    hollow  no weights yet: for a plan whose host state leaves no room for a second copy
    fill    random weights into the parameters of such a plan, each rank its part
    open_plan   a plan of such a model, filled
    tokens  of a batch
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from device import DEVICE, TINY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import slidedp
from slidedp.presets import PRESETS

OWN_FORWARD = Qwen3ForCausalLM.forward
"""Before Liger's fused loss replaced it for all models of the class, those built before included."""

PIECE = 1 << 26
"""Elements drawn on the GPU at a time: 256 MiB beside whatever the plan has there."""


def shape_of(size: str) -> dict[str, Any]:
    """Arguments of a Qwen3Config: `tiny`, or a preset's (0.6B to 32B)."""
    shape = TINY if size == "tiny" else PRESETS[f"qwen3-{size.lower()}"]
    return {key: value for key, value in shape.items() if key != "model_type"}


def build(size: str, num_layers: int | None = None, device: str = DEVICE, *, dtype: torch.dtype = torch.bfloat16,
          fused_loss: bool = False) -> Any:
    """Random weights; on the GPU: seconds instead of minutes. `num_layers`: only so many of the shape's."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(rope=True, rms_norm=True, swiglu=True, cross_entropy=False,
                                    fused_linear_cross_entropy=fused_loss)
    except ImportError:
        print("no Liger kernels here: both sides run without")
    if not fused_loss:
        Qwen3ForCausalLM.forward = OWN_FORWARD
    config = Qwen3Config(**shape_of(size), use_cache=False)
    config._attn_implementation = "sdpa"
    if num_layers is not None:
        config.num_hidden_layers, config.layer_types = num_layers, config.layer_types[:num_layers]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


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
