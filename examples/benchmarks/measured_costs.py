"""What measuring is worth: this machine's profile, the stages' times, and the predicted step beside the measured one.

    python examples/benchmarks/measured_costs.py --size 4B --batch 16,64

The prediction four ways: costs from the built-in profile or from the machine as measured now, with stages analytic or as
measured; then steps of the plan, stream by stream. Nothing of it is kept in the user's cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace

import torch
from models import build, tokens

import slidedp
from slidedp.compiler.costmodel.costs import ResolvedCosts
from slidedp.compiler.costmodel.measured import Measurement
from slidedp.compiler.simulation.predict import predict
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.compiler.units import format_bytes
from slidedp.hardware import detect


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    hardware = slidedp.HardwareProfile.measure(cache_dir=args.cache_dir)
    print(f"measured this machine in {time.perf_counter() - started:.1f} s\n{hardware.to_yaml()}", flush=True)
    model = build(args.size)
    model.to("cpu", torch.float32)
    torch.cuda.empty_cache()
    for batch in args.batch:
        example = tokens(batch, args.seq)
        with slidedp.compile(model, hardware, example=example, measure=True, cache_dir=args.cache_dir, validate=False) as plan:
            print(f"\n==== Qwen3-{args.size}, batch {batch}, sequence {args.seq}\n{plan}\n{stage_table(plan)}", flush=True)
            for _ in range(3):
                plan.run(tokens(batch, args.seq))
            print(comparison(plan, plan.measure(tokens(batch, args.seq) for _ in range(args.steps))), flush=True)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="4B", help="0.6B, 1.7B, 4B, 8B")
    p.add_argument("--batch", type=lambda s: [int(b) for b in s.split(",")], default=[16], help="sequences, comma-separated")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=4, help="measured steps, after three")
    p.add_argument("--cache-dir", default=tempfile.mkdtemp(prefix="slidedp-"))
    return p.parse_args()


def stage_table(plan: slidedp.Plan) -> str:
    """A line for each measured phase, and what the analytic model says of it."""
    spec = plan._spec
    analytic = predicted_costs(plan, spec.settings.hw, measured=False)
    lines = [f"{'stage kind':<32} {'phase':<10} {'measured ms':>12} {'analytic ms':>12} {'peak':>11} {'kept':>11}"]
    for row in spec.measurement.phases:
        op = next(o for o in spec.graph.ops if o.kind is row.phase and spec.layers.stage(o.layer).kind_key == row.kind_key)
        sizes = [f"{'?' if size is None else format_bytes(size):>11}" for size in (row.peak_bytes, row.kept_bytes)]
        lines.append(f"{row.kind_key:<32} {row.phase:<10} {row.duration_us / 1e3:>12.3f} {analytic.duration_us(op) / 1e3:>12.3f} "
                     + " ".join(sizes))
    return "\n".join([*lines, f"measuring the stages took {spec.measurement.seconds:.2f} s"])


def predicted_costs(plan: slidedp.Plan, hw: slidedp.HardwareProfile, *, measured: bool) -> ResolvedCosts:
    spec = plan._spec
    other = replace(spec, settings=replace(spec.settings, hw=hw), measurement=spec.measurement if measured else Measurement())
    return other.costs_of(spec.graph)


def comparison(plan: slidedp.Plan, measured: Timeline) -> str:
    """The step and each stream's busy time, in ms: predicted four ways, and as it was."""
    spec = plan._spec
    builtin = detect(spec.settings.device.type)
    columns: dict[str, Timeline] = {}
    for name, hw in (("built-in", builtin), ("tables", spec.settings.hw)):
        for stages in (False, True):
            costs = predicted_costs(plan, hw, measured=stages)
            columns[name + (" + stages" if stages else "")] = predict(spec.graph, costs, hw)
    columns["measured"] = measured
    streams = [s for s in measured.busy_us if any(s in c.busy_us for c in columns.values())]
    rows = [("step", [c.step_us for c in columns.values()])]
    rows += [(f"{s} busy", [c.busy_us.get(s, 0) for c in columns.values()]) for s in streams]
    lines = [" " * 10 + "".join(f"{name:>20}" for name in columns)]
    for name, values in rows:
        cells = [f"{v / 1e3:.1f} ({v / max(values[-1], 1) - 1:+.1%})" for v in values[:-1]] + [f"{values[-1] / 1e3:.1f}"]
        lines.append(f"{name:<10}" + "".join(f"{cell:>20}" for cell in cells))
    missing = sorted({s.kind_key for s in spec.layers.stages} - {r.kind_key for r in spec.measurement.phases})
    return "\n".join([*lines, f"kinds not measured: {', '.join(missing) or 'none'}"])


if __name__ == "__main__":
    main()
