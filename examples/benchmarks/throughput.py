r"""Tokens per second of a Qwen3 shape through plans, beside a compute-only reference in the same process.

    python examples/benchmarks/throughput.py --size 4B --batch 16,64
    python examples/benchmarks/throughput.py --size 4B --batch 8,16 --measure solver=rule state=host act=recompute / solver=cp-sat

Random weights, synthetic tokens. The reference keeps BF16 weights on the GPU, recomputes every layer, and has no optimizer:
what the GPU alone could do. One JSON line a run; ratios are what to quote, since hosts differ. Liger kernels (rotary, norm,
SwiGLU) are used on both sides where installed; the reference's loss is Liger's fused linear cross-entropy, a plan's is made in
chunks. Host memory is the process's proportional set size.

`bounds_s`: the least that a plan's step can take here: the longest of the reference's step, the plan's host memory traffic and
its copies at the rates of the profile. With `--measure` the machine is measured before and after each plan, for neighbours come
and go; the plan is made for the former, its bounds are by the mean of both. `host`: at what its own mixture of updates and copies
gets when nothing holds it up (`mixed_gbps`, see mixture.py); `host_at_peak`: at the most that any gets (`host_dram_gbps`).
`bound_over_step` and `peak_bound_over_step` are by one and the other.
`mean_s`: of the measured steps; where the host binds they differ by a third, and the next ones make up for it.
`gc_s`: full garbage collections during the steps, in which no thread of Python's runs.
`issuing_s`: for how long ops ran while the host was still issuing them. Much of it for `gpu`: the host's Python holds it up.
`stolen`: of the steps' time, the fraction that the hypervisor kept the machine's cores for others, in the mean.
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
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from copies import copy_gbps
from device import DEVICE, full_collections, peak_gib, pss_bytes, reset_peak, stolen, thin
from mixture import mixed_gbps, traffic_bytes
from models import build, tokens
from peers import compute_only

import slidedp
from slidedp.hardware import load_profile

THIN_FROM = 6_000_000_000
"""Parameters from which on host memory does not hold the model's own weights beside a plan's state."""

ARGUMENTS = ("solver", "hbm_budget", "max_grad_norm", "num_threads")
"""Keys of a case that are arguments of `slidedp.compile`; the others are its policy."""


def main() -> None:
    args = parse_arguments()
    reference = measured_references(args) if args.reference else {}
    model = build(args.size)
    profile = this_machine(args)
    first: dict[int, float] = {}
    for case in cases(args.case):
        for batch in args.batch:  # a plan each: what fits one batch is another's waste
            line = run(model, batch, case, profile, args, reference.get(batch), first, mixed=args.measure)
            if line is not None:
                before, profile = profile, this_machine(args)
                print(json.dumps(line | bounds(line, before, profile)), flush=True)


def this_machine(args: argparse.Namespace) -> slidedp.HardwareProfile:
    """As it is just now, if it is to be measured."""
    if not args.measure:
        return load_profile("auto")
    profile = slidedp.HardwareProfile.measure(keep=False, show_progress=False)
    rates = ("host_dram_gbps", "duplex_gbps", "cpu_adam_gparams", "host_task_us")
    print(json.dumps({key: getattr(profile, key) for key in rates}), flush=True)
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
        number = len(list(args.traces.glob("profile-*.yaml")))
        (args.traces / f"profile-{number:02}.yaml").write_text(profile.to_yaml())
    return profile


def bounds(line: dict[str, Any], before: slidedp.HardwareProfile, after: slidedp.HardwareProfile) -> dict[str, Any]:
    """What bounds the step of a `line` whose plan was made for `before`: seconds by resource, and how near the step comes."""
    peak = line["loads_s"]["host"] * before.host_dram_gbps * 2 / (before.host_dram_gbps + after.host_dram_gbps)
    links = line["loads_s"]["links"] * before.duplex_gbps * 2 / (before.duplex_gbps + after.duplex_gbps)
    host = sum(line["traffic_gb"].values()) / statistics.mean(line["mixed_gbps"]) if line["mixed_gbps"] else peak
    reference = line["reference_s"] or 0.0
    return {"host_dram_gbps": [before.host_dram_gbps, after.host_dram_gbps],
            "bounds_s": {"host": round(host, 3), "host_at_peak": round(peak, 3), "links": round(links, 3)},
            "bound_over_step": round(max(reference, host, links) / line["step_s"], 3),
            "peak_bound_over_step": round(max(reference, peak, links) / line["step_s"], 3)}


def measured_references(args: argparse.Namespace) -> dict[int, float]:
    """Seconds of a step by batch, of those that fit into HBM."""
    found: dict[int, float] = {}
    try:
        for each in compute_only(args.size, args.batch, args.seq, args.steps, torch.device(DEVICE)):
            print(json.dumps(facts("compute-only+recompute", args, each["batch"], each["times"])), flush=True)
            found[each["batch"]] = each["step_s"]
    except torch.OutOfMemoryError as error:
        print(f"compute-only: {error}", flush=True)
    return found


def run(model: Any, batch: int, case: dict[str, Any], profile: Any, args: argparse.Namespace, reference_s: float | None,
        first: dict[int, float], *, mixed: bool = False) -> dict[str, Any] | None:
    """One plan; None if there is none. `first`: seconds of a step by batch, of the first case that ran it. `mixed`: measures what
    its traffic gets of host memory, before its steps and after them.
    """
    arguments = {key: case[key] for key in ARGUMENTS if key in case}
    policy = {key: value for key, value in case.items() if key not in ARGUMENTS}
    thin(model) if num_params(model) > THIN_FROM else model.to("cpu", torch.float32)  # the plan before has left it whole
    gc.collect()
    torch.cuda.empty_cache()  # of the plan before: it would count as this one's
    try:
        plan = slidedp.compile(model, profile, example=tokens(batch, args.seq, args.size), optimizer=slidedp.AdamW(lr=1e-5),
                               policy=policy or None, validate=False, **arguments)
    except ValueError as error:
        print(json.dumps({"system": "slidedp", "batch": batch, "case": case, "error": str(error)}), flush=True)
        return None
    with plan:
        started = time.perf_counter()
        plan.run(tokens(batch, args.seq, args.size))
        plan.synchronize()
        print(f"ran the first step in {time.perf_counter() - started:.1f} s\n{plan}", flush=True)
        traffic, gbps = traffic_bytes(plan), list[float | None]()
        if mixed:
            gbps.append(mixed_gbps(traffic, case.get("num_threads")))
        reset_peak()  # without what planning and measuring took
        predicted = plan.simulate()
        num_steps = max(args.steps, math.ceil(args.seconds * 1e6 / predicted.step_us))
        with full_collections() as pauses, stolen() as fraction:
            results = [plan.run(tokens(batch, args.seq, args.size)) for _ in range(num_steps + 1)]
        times = [r.wall_s for r in results][1:]
        step_s = statistics.median(times)
        host_bytes = pss_bytes()
        peak = {"host_gib": round(host_bytes / 2**30, 1), "host_bytes_per_param": round(host_bytes / num_params(model), 2),
                "planned_gib": round(plan.memory().hbm_bytes / 2**30, 2)}
        measured = plan.measure(tokens(batch, args.seq, args.size) for _ in range(3))
        if mixed:
            gbps.append(mixed_gbps(traffic, case.get("num_threads")))
        loads = {str(r): share * predicted.step_us / 1e6 for r, share in predicted.resources.items()}
        over_first = step_s / first.setdefault(batch, step_s)
        line = facts("slidedp", args, batch, times, case=case, **peak, gc_s=[round(p, 3) for p in pauses],
               stolen=round(fraction[0], 4),
               mean_s=round(statistics.mean(times), 4),
               loss=round(results[-1].loss, 3),
               predicted_s=round(predicted.step_us / 1e6, 4),
               measured_over_predicted=round(step_s / (predicted.step_us / 1e6), 3),
               to_reference=round(reference_s / step_s, 3) if reference_s else None,
               reference_s=reference_s,
               traffic_gb={str(s): round(num / 1e9, 2) for s, num in traffic.items()},
               mixed_gbps=[rate for rate in gbps if rate is not None],
               loads_s={key: loads.get(name, 0.0) for key, name in (("host", "host memory"), ("links", "root"))},
               waits_s={str(kind): round(us / 1e6, 3) for kind, us in predicted.exposed_by.items()}
               | {"measured": round(measured.exposed_us / 1e6, 3)},
               busy_s={str(s): [round(measured.busy_us[s] / 1e6, 3), round(us / 1e6, 3)] for s, us in predicted.busy_us.items()
                       if s in measured.busy_us},  # measured, predicted
               issuing_s={str(s): round(us / 1e6, 3) for s, us in measured.issuing_us.items()},
               copy_gbps=copy_gbps(plan, measured, predicted), over_first_case=round(over_first, 4), **clipping(plan))
        print(f"predicted {predicted}\nmeasured {measured}", flush=True)
        if args.traces:
            args.traces.mkdir(parents=True, exist_ok=True)
            number = len(list(args.traces.glob("*-measured.json")))
            for what, timeline in (("predicted", predicted), ("measured", measured)):
                plan.write_trace(args.traces / f"{number:02}-batch{batch}-{what}.json", timeline)
    return line


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
    shared_arguments(p)
    p.add_argument("case", nargs="*", help="KEY=VALUE pins and " + ", ".join(ARGUMENTS) + "; '/' begins another case")
    return p.parse_args()


def shared_arguments(p: argparse.ArgumentParser, steps: int = 5) -> None:
    p.add_argument("--size", default="0.6B", help="0.6B, 1.7B, 4B, 8B; tiny: to try it out without a GPU")
    p.add_argument("--batch", type=lambda s: [int(b) for b in s.split(",")], default=[16], help="sequences, comma-separated")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=steps, help="measured steps at least; one more warms up")
    p.add_argument("--seconds", type=float, default=0.0, help="of measured steps, as predicted, at least")
    p.add_argument("--no-reference", dest="reference", action="store_false")
    p.add_argument("--traces", type=Path, help="a folder for traces of each plan, predicted and measured, numbered as run")
    p.add_argument("--measure", action="store_true", help="plan for this machine as measured, not for the nearest profile")


def facts(system: str, args: argparse.Namespace, batch: int, times: list[float], **extra: Any) -> dict[str, Any]:
    step = statistics.median(times)
    return {"system": system, "model": f"Qwen3-{args.size}", "batch": batch, "seq": args.seq, "step_s": round(step, 4),
            "tokens_per_s": round(batch * args.seq / step), "times": [round(t, 3) for t in times], **peak_gib(), **extra}


def num_params(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
