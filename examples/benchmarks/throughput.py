r"""Tokens per second of a Qwen3 shape through plans, beside a compute-only reference in the same process.

    python examples/benchmarks/throughput.py --size 4B --batch 16,64
    python examples/benchmarks/throughput.py --size 4B --batch 8,16 --measure solver=rule state=host act=recompute / solver=cp-sat

Random weights, synthetic tokens. The reference keeps BF16 weights on the GPU, recomputes every layer, and has no optimizer:
what the GPU alone could do. One JSON line a run; ratios are what to quote, since hosts differ. Liger kernels (rotary, norm,
SwiGLU) are used on both sides where installed. Host memory is the process's proportional set size.

`bound_s`: the least that a plan's step can take here: the longest of the reference's step, the plan's host memory traffic at
the rate of the profile, and its copies at theirs; with `--measure` these rates have just been measured on this machine.
`waits_s`: how long the GPU waits in a step, by what it waits for as predicted, in all as measured.

    python examples/benchmarks/throughput.py --size 4B --batch 16,64 state=host / state=host max_grad_norm=inf \
        / state=host max_grad_norm=1e-9

measures what clipping costs: no norm, a limit that no step reaches, one that every step does. `over_first_case`: a step over that
of the same batch in the first case.
"""

from __future__ import annotations

import argparse
import gc
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

ARGUMENTS = ("solver", "hbm_budget", "max_grad_norm")
"""Keys of a case that are arguments of `slidedp.compile`; the others are its policy."""


def main() -> None:
    args = parse_arguments()
    profile = slidedp.HardwareProfile.measure(keep=False, show_progress=False) if args.measure else "auto"
    if args.measure:
        print(json.dumps({"host_dram_gbps": profile.host_dram_gbps, "duplex_gbps": profile.duplex_gbps,
                          "cpu_adam_gparams": profile.cpu_adam_gparams}), flush=True)
    model = build(args.size)
    reference: dict[int, float] = {}
    if args.reference:
        for batch in args.batch:
            times = compute_only(model, batch, args.seq, args.steps)
            report("compute-only+recompute", args, batch, times)
            reference[batch] = statistics.median(times)
    model.to("cpu", torch.float32)
    torch.cuda.empty_cache()
    first: dict[int, float] = {}
    for case in cases(args.case):
        for batch in args.batch:  # a plan each: what fits one batch is another's waste
            run(model, batch, case, profile, args, reference.get(batch), first)


def run(model: Any, batch: int, case: dict[str, Any], profile: Any, args: argparse.Namespace, reference_s: float | None,
        first: dict[int, float]) -> None:
    """One plan. `first`: seconds of a step by batch, of the first case that ran it."""
    arguments = {key: case[key] for key in ARGUMENTS if key in case}
    policy = {key: value for key, value in case.items() if key not in ARGUMENTS}
    gc.collect()
    torch.cuda.empty_cache()  # of the plan before: it would count as this one's
    try:
        plan = slidedp.compile(model, profile, example=tokens(batch, args.seq), optimizer=slidedp.AdamW(lr=1e-5),
                               policy=policy or None, **arguments)
    except ValueError as error:
        print(json.dumps({"system": "slidedp", "batch": batch, "case": case, "error": str(error)}), flush=True)
        return
    with plan:
        started = time.perf_counter()
        plan.run(tokens(batch, args.seq))
        plan.synchronize()
        print(f"ran the first step in {time.perf_counter() - started:.1f} s\n{plan}", flush=True)
        torch.cuda.reset_peak_memory_stats()  # without what planning took to measure the stages
        results = [plan.run(tokens(batch, args.seq)) for _ in range(args.steps + 1)]
        times = [r.wall_s for r in results][1:]
        step_s, predicted = statistics.median(times), plan.simulate()
        peak = {"host_gib": round(pss_bytes() / 2**30, 1), "planned_gib": round(plan.memory().hbm_bytes / 2**30, 2)}
        measured = plan.measure(tokens(batch, args.seq) for _ in range(3))
        loads = {str(r): share * predicted.step_us / 1e6 for r, share in predicted.resources.items()}
        bounds = {key: loads.get(name, 0.0) for key, name in (("host", "host memory"), ("links", "root"))}
        bound = max([reference_s or 0.0, *bounds.values()])
        over_first = step_s / first.setdefault(batch, step_s)
        report("slidedp", args, batch, times, case=case, **peak, loss=round(results[-1].loss, 3),
               predicted_s=round(predicted.step_us / 1e6, 4),
               measured_over_predicted=round(step_s / (predicted.step_us / 1e6), 3),
               to_reference=round(reference_s / step_s, 3) if reference_s else None,
               bounds_s={key: round(value, 3) for key, value in bounds.items()}, bound_over_step=round(bound / step_s, 3),
               waits_s={str(kind): round(us / 1e6, 3) for kind, us in predicted.exposed_by.items()}
               | {"measured": round(measured.exposed_us / 1e6, 3)},
               busy_s={str(s): [round(measured.busy_us[s] / 1e6, 3), round(us / 1e6, 3)] for s, us in predicted.busy_us.items()
                       if s in measured.busy_us},  # measured, predicted
               over_first_case=round(over_first, 4), **clipping(plan))
        print(f"predicted {predicted}\nmeasured {measured}", flush=True)


def clipping(plan: slidedp.Plan) -> dict[str, int]:
    """Groups that speculate, and what came of it in all steps so far; nothing for a plan that takes no norm."""
    decisions, counters = plan.decisions, plan.counters()
    if decisions.update == "in_backward":
        return {}
    return {"groups": len(decisions.groups), "speculating": sum(d.update == "speculative" for d in decisions.groups.values()),
            **{key: counters.get(key, 0) for key in ("clipped_steps", "skipped_steps", "cpu_update", "redone_update")}}


def cases(words: list[str]) -> list[dict[str, Any]]:
    """``a=1 b=x / c=2`` -> two cases. No words: one case that pins nothing."""
    found: list[dict[str, Any]] = [{}]
    for word in words:
        if word == "/":
            found.append({})
        else:
            key, value = word.split("=", 1)
            found[-1][key] = float(value) if key == "max_grad_norm" else int(value) if value.isdigit() else value
    return found


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="0.6B", help="0.6B, 1.7B, 4B, 8B")
    p.add_argument("--batch", type=lambda s: [int(b) for b in s.split(",")], default=[16], help="sequences, comma-separated")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=5, help="measured steps; one more warms up")
    p.add_argument("--no-reference", dest="reference", action="store_false")
    p.add_argument("--measure", action="store_true", help="plan for this machine as measured now, not for the nearest profile")
    p.add_argument("case", nargs="*", help="KEY=VALUE pins and " + ", ".join(ARGUMENTS) + "; '/' begins another case")
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


def compute_only(model: Any, batch: int, seq: int, steps: int) -> list[float]:
    """Seconds of forward and backward with full recompute; gradients are dropped as they come."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    drop: Callable[[torch.Tensor], None] = lambda p: setattr(p, "grad", None)  # noqa: E731
    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters()]
    data = {k: v.cuda() for k, v in tokens(batch, seq).items()}
    times = list(timed(lambda: model(**data).loss.backward(), steps))
    for hook in hooks:
        hook.remove()
    model.gradient_checkpointing_disable()
    return times


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
