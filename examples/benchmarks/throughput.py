"""Tokens per second of a Qwen3 shape through a plan, beside a compute-only reference in the same process.

    python examples/benchmarks/throughput.py --size 4B --batch 16,64

Random weights, synthetic tokens. The reference keeps BF16 weights on the GPU, recomputes every layer, and has no optimizer:
what the GPU alone could do. One JSON line a run; ratios are what to quote, since hosts differ. Liger kernels (rotary, norm,
SwiGLU) are used on both sides where installed. Host memory is the process's proportional set size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import slidedp
from slidedp.presets import PRESETS


def main() -> None:
    args = parse_arguments()
    model = build(args.size)
    if args.reference:
        for batch in args.batch:
            report("compute-only+recompute", args, batch, *compute_only(model, batch, args.seq, args.steps))
    model.to("cpu", torch.float32)
    torch.cuda.empty_cache()
    policy = dict(pair.split("=") for pair in args.policy)
    policy = {key: int(value) if value.isdigit() else value for key, value in policy.items()}
    for batch in args.batch:  # a plan each: what fits one batch is another's waste
        with slidedp.compile(model, optimizer=slidedp.AdamW(lr=1e-5), policy=policy or None, solver=args.solver,
                             max_grad_norm=args.max_grad_norm) as plan:
            started = time.perf_counter()
            plan.run(tokens(batch, args.seq))
            plan.synchronize()
            print(f"planned and ran the first step in {time.perf_counter() - started:.1f} s\n{plan}", flush=True)
            torch.cuda.reset_peak_memory_stats()  # without what planning took to measure the stages
            batches = (tokens(batch, args.seq) for _ in range(args.steps + 1))
            results = [plan.run(b) for b in batches]
            times = [r.wall_s for r in results][1:]
            report("slidedp", args, batch, times, host_gib=round(pss_bytes() / 2**30, 1), loss=round(results[-1].loss, 3),
                   predicted_s=round(plan.simulate().step_us / 1e6, 4))
            print(f"predicted {plan.simulate()}\nmeasured {plan.measure(tokens(batch, args.seq) for _ in range(3))}", flush=True)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="0.6B", help="0.6B, 1.7B, 4B, 8B")
    p.add_argument("--batch", type=lambda s: [int(b) for b in s.split(",")], default=[16], help="sequences, comma-separated")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=5, help="measured steps; one more warms up")
    p.add_argument("--max-grad-norm", type=float, help="clip by the norm of all gradients; inf: only take it")
    p.add_argument("--no-reference", dest="reference", action="store_false")
    p.add_argument("--solver", default="cp-sat", help="cp-sat or rule")
    p.add_argument("policy", nargs="*", help="KEY=VALUE pins, e.g. window=4 source=cast")
    return p.parse_args()


def build(size: str, num_layers: int | None = None, device: str = "cuda") -> Any:
    """Random weights in BF16; on the GPU: seconds instead of minutes. `num_layers`: only so many of the shape's."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False)
    except ImportError:
        print("no Liger kernels here: both sides run without")
    config = Qwen3Config(**{k: v for k, v in PRESETS[f"qwen3-{size.lower()}"].items() if k != "model_type"}, use_cache=False)
    config._attn_implementation = "sdpa"
    if num_layers is not None:
        config.num_hidden_layers, config.layer_types = num_layers, config.layer_types[:num_layers]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return model.train()


def tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 151936, (batch, seq))
    return {"input_ids": ids, "labels": ids}


def compute_only(model: Any, batch: int, seq: int, steps: int) -> tuple[list[float]]:
    """Forward and backward with full recompute; gradients are dropped as they come."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    drop: Callable[[torch.Tensor], None] = lambda p: setattr(p, "grad", None)  # noqa: E731
    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    data = {k: v.cuda() for k, v in tokens(batch, seq).items()}
    times = list(timed(lambda: model(**data).loss.backward(), steps))
    for hook in hooks:
        hook.remove()
    model.gradient_checkpointing_disable()
    return (times,)


def timed(step: Callable[[], object], steps: int) -> Iterator[float]:
    step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        yield time.perf_counter() - started


def report(system: str, args: argparse.Namespace, batch: int, times: list[float], **extra: Any) -> None:
    step = statistics.median(times)
    line = {"system": system, "model": f"Qwen3-{args.size}", "batch": batch, "seq": args.seq, "step_s": round(step, 4),
            "tokens_per_s": round(batch * args.seq / step), "times": [round(t, 3) for t in times],
            "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2), **extra}
    print(json.dumps(line), flush=True)


def pss_bytes() -> int:
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
