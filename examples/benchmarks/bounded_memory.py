r"""Whether a step stays within its HBM budget, how fast it is there, and whether its losses are those of other plans.

    python examples/benchmarks/bounded_memory.py --size 4B --batch 8,16,64 --budgets 8 --repeat 2 | tee log
    python examples/benchmarks/plots.py budgets log -o budgets.png
    python examples/benchmarks/bounded_memory.py --size 14B --layers 16 --batch 32 hbm_budget=16GiB window=2
    python examples/benchmarks/bounded_memory.py --size 4B --batch 256 --steps 2 / slices=32
    python examples/benchmarks/bounded_memory.py --size 4B --batch 1 --seq 262144 --steps 0 --analytic --forward / head_chunks=512

`--budgets N`: every case in N budgets, from the smallest in which some plan fits to the whole GPU; with `--repeat`, all of it in
turn, again. One JSON line a run. `reserved_to_budget`: the allocator's peak over the budget, at most 1 if it held.
`loss_to_first`: the largest relative difference of a step's loss to that of the first run of the same batch, over the same
tokens and, by a learning rate of 0, the same weights. ``--steps 0``: one step, which is no warm-up; ``--forward``: of other cases
than the first only forwards. Both are for steps of minutes. ``--size tiny`` tries a command out without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from models import build
from throughput import ARGUMENTS, cases

import slidedp
from slidedp.compiler.footprint.budgets import RESERVE, RESERVE_BYTES, WHOLE
from slidedp.compiler.layergraph import recut
from slidedp.compiler.units import parse_bytes
from slidedp.hardware import load_profile
from slidedp.paper import draft_on_paper, settings_on_paper
from slidedp.planning.decide import least_bytes
from slidedp.planning.slicing import COUNTS

GRAIN = 2**20
"""Bytes that budgets are multiples of."""


def main() -> None:
    args = parse_arguments()
    profile = load_profile("auto")
    model = build(args.size, args.layers).to("cpu", torch.float32)
    first: dict[int, list[float]] = {}
    for _ in range(args.repeat):
        for case in cases(args.case):
            for batch in args.batch:
                for budget in budgets(model, profile, batch, args.seq, args.budgets) or [None]:
                    run(model, batch, case if budget is None else case | {"hbm_budget": budget}, args, first)


def run(model: Any, batch: int, case: dict[str, Any], args: argparse.Namespace, first: dict[int, list[float]]) -> None:
    """One plan. `first`: losses of each step of the first plan for a batch."""
    arguments = {key: case[key] for key in ARGUMENTS if key in case}
    policy = {key: value for key, value in case.items() if key not in ARGUMENTS}
    line: dict[str, Any] = {"system": "slidedp", "model": f"Qwen3-{args.size}", "batch": batch, "seq": args.seq, "case": case}
    data = list(batches(batch, args.seq, args.steps + 1, model.config.vocab_size))
    gc.collect()
    torch.cuda.empty_cache()
    try:
        plan = slidedp.compile(model, "auto", example=data[0], optimizer=slidedp.AdamW(lr=0.0), policy=policy or None,
                               validate=False, measure=False if args.analytic else None, **arguments)  # of one plan
    except ValueError as error:
        print(json.dumps(line | {"error": str(error)}), flush=True)
        return
    with plan:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # without what planning took to measure the stages
        if args.forward and batch in first:
            began = time.perf_counter()
            losses = [plan.evaluate(each) for each in data]
            times = [(time.perf_counter() - began) / len(data)]
        else:
            results = [plan.run(each) for each in data]
            losses, times = [r.loss for r in results], [r.wall_s for r in results][min(1, args.steps) :]
        before = first.setdefault(batch, losses)
        step_s = statistics.median(times)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        budget, memory = case.get("hbm_budget"), plan.memory()
        print(plan, flush=True)
    line |= {
        "layers": args.layers, "slices": plan.decisions.slices, "step_s": round(step_s, 4), "times": [round(t, 3) for t in times],
        "tokens_per_s": round(batch * args.seq / step_s), "predicted_s": round(plan.simulate().step_us / 1e6, 4),
        "planned_gib": round(memory.hbm_bytes / 2**30, 2), "planned_reserved_gib": round(memory.reserved_bytes / 2**30, 2),
        "planned_host_gib": round(memory.host_bytes / 2**30, 2),
        "peak_allocated_gib": round(allocated / 2**30, 2), "peak_reserved_gib": round(reserved / 2**30, 2),
        "reserved_to_budget": None if budget is None else round(reserved / parse_bytes(budget), 4), "losses": losses,
        "loss_to_first": max(abs(a - b) / abs(b) for a, b in zip(losses, before, strict=True))}  # fmt: skip
    print(json.dumps(line), flush=True)


def batches(batch: int, seq: int, number: int, vocab: int) -> Iterator[dict[str, torch.Tensor]]:
    """The same every time."""
    for step in range(number):
        ids = torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(step))
        yield {"input_ids": ids, "labels": ids}


def budgets(model: Any, profile: slidedp.HardwareProfile, batch: int, seq: int, number: int) -> list[int]:
    """`number` of them, ascending, each larger than the one before by the same factor; none for 0."""
    if not number:
        return []
    low, high = smallest_budget(model, profile, batch, seq), profile.hbm_bytes
    sizes = [low * (high / low) ** (i / max(number - 1, 1)) for i in range(number - 1)]
    return [*(-(-round(size) // GRAIN) * GRAIN for size in sizes), high]


def smallest_budget(model: Any, profile: slidedp.HardwareProfile, batch: int, seq: int) -> int:
    """With the reserve that a budget keeps free, in whatever slices need least."""
    settings = settings_on_paper(profile, 1, policy={"slices": 1})
    _, draft = draft_on_paper(model, settings, batch, seq)
    least = min(least_bytes(recut(draft.layers, k), settings)["hbm"] for k in (1, *COUNTS) if k <= batch)
    if profile.gpu_name == "cpu":
        return least
    return min(round(least / WHOLE), max(round(least / (1 - RESERVE)), least + RESERVE_BYTES))


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="0.6B", help="of Qwen3: 0.6B, 1.7B, 4B, 8B, 14B, or tiny")
    p.add_argument("--layers", type=int, help="only so many of the shape's")
    p.add_argument("--batch", type=lambda s: [int(b) for b in s.split(",")], default=[16], help="sequences, comma-separated")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=5, help="measured steps; one more warms up")
    p.add_argument("--forward", action="store_true", help="only forwards in other cases than the first of a batch")
    p.add_argument("--analytic", action="store_true", help="measure no stage: a layer of a long sequence takes seconds")
    p.add_argument("--budgets", type=int, default=0, help="run each case in so many HBM budgets")
    p.add_argument("--repeat", type=int, default=1, help="run all of it so often, so that drift shows")
    p.add_argument("case", nargs="*", help="KEY=VALUE pins and " + ", ".join(ARGUMENTS) + "; '/' begins another case")
    return p.parse_args()


if __name__ == "__main__":
    main()
