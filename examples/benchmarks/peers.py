"""What plans are compared with: the GPU's compute alone, and FSDP2, resident or with CPU offload. Each yields a dict a batch.

`script` runs the peers' own scripts instead, in this process, with shapes added that they do not know. FSDP2 here has FP32
shards, BF16 compute, full recompute and a fused AdamW; its weights are drawn shard by shard, so that a model fits which no
rank could hold whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from device import Device, pss_bytes, timed
from models import build, renew_buffers, shape_of, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

Result = dict[str, Any]


def compute_only(size: str, batches: Sequence[int], seq: int, steps: int, device: torch.device, *,
                 num_layers: int | None = None) -> Iterator[Result]:
    """One GPU: BF16 weights there, every layer recomputed, no optimizer, gradients dropped as they come."""
    model = build(size, num_layers, str(device), dtype=compute_dtype(device), fused_loss=True)
    for batch in batches:
        times = compute_times(model, on(device, tokens(batch, seq, size)), steps, device)
        yield facts("compute-only+recompute", batch, seq, times, device)


def compute_times(model: Any, batch: dict[str, torch.Tensor], steps: int, device: Device) -> list[float]:
    """Seconds of forward and backward of a model that is on `device`, as is the batch. The model stays as it is."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    drop: Callable[[torch.Tensor], None] = lambda p: setattr(p, "grad", None)  # noqa: E731
    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    times = timed(lambda: model(**batch).loss.backward(), steps, device)
    for hook in hooks:
        hook.remove()
    model.gradient_checkpointing_disable()
    return times


def fsdp2(size: str, batches: Sequence[int], seq: int, steps: int, device: torch.device, *, offload: bool,
          num_layers: int | None = None) -> Iterator[Result]:
    """Every rank with its own `batch`. Ranks are found in the environment; the process group stays for the caller to destroy."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    mesh = init_device_mesh(device.type, (world,))
    model = build(size, num_layers, "meta", dtype=torch.float32, fused_loss=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute_dtype(device), torch.float32), "offload_policy": policy}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if offload else device)
    renew_buffers(model, device)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            own = p.to_local()
            generator = torch.Generator(own.device).manual_seed(i * world + rank)
            own.normal_(0, 0.02, generator=generator) if p.dim() > 1 else own.fill_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for batch in batches:
        data = on(device, tokens(batch, seq, size))

        def step() -> None:
            model(**data).loss.backward()  # noqa: B023
            optimizer.step()
            optimizer.zero_grad()

        times = timed(step, steps, device)
        yield facts("fsdp2-cpu-offload" if offload else "fsdp2", batch, seq, times, device, world)


def script(folder: Path, name: str, size: str, batches: Sequence[int], seq: int, *options: str) -> Iterator[Result]:
    """`folder`/`name` as a program, in this process: what it has printed as JSON. It knows every size that we do.

    Raises RuntimeError, after what there is, if it has not printed a line for each batch.
    """
    sys.path.insert(0, str(folder))
    sizes = __import__("common").SIZES
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    sizes.setdefault(size, {key: shape_of(size)[key] for key in names})
    sys.argv = [name, "--size", size, "--batch", ",".join(map(str, batches)), "--seq", str(seq), *options]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(folder / name), run_name="__main__")
    found = [json.loads(line) for line in output.getvalue().splitlines() if line.startswith("{")]
    for r in found:
        yield {"system": r["system"], "batch": r["batch"], "step_s": r["step_s"], "times": r["times"],
               "tokens_per_s_per_gpu": r["tokens_per_s"], "allocated_gib": r["peak_hbm_gib"]}
    if len(found) < len(batches):
        said = [line for line in output.getvalue().splitlines() if not line.startswith("{")]
        raise RuntimeError(f"{name}: {said[-1] if said else 'it has not said why'}")


# ---- shared ----


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def on(device: Device, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to(device) for key, value in batch.items()}


def facts(system: str, batch: int, seq: int, times: Sequence[float], device: torch.device, world: int = 1) -> Result:
    """`batch`: of a rank. Host memory is that of all ranks together; collective if there are several."""
    step_s = statistics.median(times)
    host = torch.tensor([pss_bytes()])
    if world > 1:
        dist.all_reduce(host)
    found = {"system": system, "batch": batch, "step_s": round(step_s, 4), "times": [round(t, 3) for t in times],
             "tokens_per_s_per_gpu": round(batch * seq / step_s), "pss_gib": round(host.item() / 2**30, 2)}
    if device.type == "cuda":
        found["allocated_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 2)
    return found
