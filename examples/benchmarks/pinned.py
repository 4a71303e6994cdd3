"""The solver's plan beside pinned ones: is any of them faster, and is what was predicted of each what is measured?

    python examples/benchmarks/pinned.py --size 4B --batch 16 --measure
    python examples/benchmarks/pinned.py --size tiny --batch 2 --seq 32 --num 3      # tries it out on a CPU

Runs the solver's choice first, then as many of :func:`candidates` as `--num` says and fit, fastest on paper first (who would beat
the choice is known soonest), until `--limit-s` seconds of a batch are over; then the best of these and the choice once more, for
the host's speed drifts. One JSON line a plan, as throughput.py's, and one ``verdict`` a batch:

``choice_over_best``  the choice's step over the best pinned one's, medians of both runs of each; at most 1.02 is what is wanted
``step_off``          of each plan, measured step over predicted, less 1; within 0.08
``busy_off``          of each plan and stream, measured busy time over predicted, less 1; within 0.15. Streams that are busy for
                      less than 2 % of the step are left out
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from device import DEVICE
from models import build
from throughput import measured_references, run, shared_arguments, this_machine

import slidedp

Case = dict[str, Any]
Line = dict[str, Any]

CHOICE: Case = {"solver": "cp-sat"}


def candidates(num_layers: int, embedding: str) -> list[Case]:
    """Plans of all kinds: where the state is, what layers keep, where deliveries come from, in what pieces, in what window."""
    half, sixth = num_layers // 2, max(num_layers // 6, 1)
    third, quarter = (f"L{num_layers - max(num_layers // n, 1):02}-L{num_layers - 1:02}" for n in (3, 4))
    first, rest = f"L00-L{half - 1:02}", f"L{half:02}-L{num_layers - 1:02}"
    some, last = f"L00-L{sixth - 1:02}", f"L{num_layers - 1:02}"
    host: Case = {"solver": "rule", "state": "host", "act": "recompute"}
    hbm: Case = {"solver": "rule", "state": "hbm", "act": "recompute"}
    return [
        host,
        host | {"rows": "whole"},
        host | {"chunks": 1},
        host | {"chunks": 8},
        host | {"window": 3},
        host | {"source": "cast"},
        host | {"weights": "hold"},
        host | {"boundary": "host"},
        host | {"act": "offload"},
        host | {"act": "retain"},
        host | {"act": "selective"},
        host | {"layers": {rest: {"act": "retain"}}},
        host | {"layers": {third: {"act": "retain"}}},
        host | {"layers": {embedding: {"state": "hbm"}, quarter: {"act": "retain"}}},
        host | {"layers": {embedding: {"state": "hbm"}, "L00": {"state": "hbm"}, third: {"act": "retain"}}},
        host | {"layers": {embedding: {"state": "hbm"}, "L00": {"state": "hbm"}, third: {"act": "selective"}}},
        host | {"layers": {embedding: {"state": "hbm"}, some: {"state": "hbm"}, last: {"act": "retain"}}},
        host | {"act": "retain", "layers": {embedding: {"state": "hbm"}, some: {"state": "hbm"}}},
        host | {"act": "retain", "layers": {embedding: {"state": "hbm"}, first: {"state": "hbm"}}},
        host | {"layers": {embedding: {"state": "hbm"}, first: {"state": "hbm"}, rest: {"act": "retain"}}},
        hbm,
        hbm | {"act": "retain"},
        {"solver": "cp-sat", "state": "host"},
        {"solver": "cp-sat", "act": "recompute"},
    ]


def main() -> None:
    args = parse_arguments()
    profile = this_machine(args)
    reference = measured_references(args) if args.reference else {}
    model = build(args.size)
    config = model.config
    plans = candidates(config.num_hidden_layers, "shared0" if config.tie_word_embeddings else "prologue")
    for batch in args.batch:
        ends = time.monotonic() + args.limit_s
        first: dict[int, float] = {}

        def ran(case: Case, batch: int = batch, first: dict[int, float] = first) -> list[Line]:
            line = run(model, batch, case, profile, args, reference.get(batch), first)
            if line is not None:
                print(json.dumps(line), flush=True)
            return [] if line is None else [line]

        choice, pinned = ran(CHOICE), list[Line]()
        for case in on_paper(model, batch, plans, profile, args)[: args.num]:
            if time.monotonic() > ends:
                print(json.dumps({"batch": batch, "case": case, "not run": f"{args.limit_s} s were over"}), flush=True)
            else:
                pinned += ran(case)
        if choice and pinned:
            best = min(pinned, key=lambda line: line["step_s"])
            print(json.dumps(verdict(choice + ran(CHOICE), [best, *ran(best["case"])], pinned)), flush=True)


def on_paper(model: Any, batch: int, plans: list[Case], profile: slidedp.HardwareProfile, args: argparse.Namespace) -> list[Case]:
    """Those that fit, fastest first, by costs that nobody measured: an order, no more."""
    found = []
    for i, case in enumerate(plans):
        pins = {key: value for key, value in case.items() if key != "solver"}
        try:
            plan = slidedp.plan_on_paper(model, profile, batch=batch, seq=args.seq, ranks=1, policy=pins, solver="rule",
                                         compute_dtype=torch.bfloat16 if DEVICE == "cuda" else None)
        except ValueError as error:
            print(json.dumps({"batch": batch, "case": case, "error": str(error)}), flush=True)
            continue
        found.append((plan.predictions.step_us, i, case))
    return [case for *_, case in sorted(found, key=lambda entry: entry[:2])]


def verdict(choice: list[Line], best: list[Line], pinned: list[Line]) -> dict[str, Any]:
    """Of all runs of the choice, all of the best pinned plan, and one of each pinned one."""
    choice_s, best_s = (statistics.median([t for line in lines for t in line["times"]]) for lines in (choice, best))
    ratio, everything = choice_s / best_s, [choice[0], *pinned]
    step_off = [line["measured_over_predicted"] - 1 for line in everything]
    busy_off = [{stream: round(measured / predicted - 1, 2) for stream, (measured, predicted) in line["busy_s"].items()
                 if predicted > 0.02 * line["step_s"]} for line in everything]
    worst = max((abs(x) for off in busy_off for x in off.values()), default=0.0)
    return {"what": "verdict", "batch": choice[0]["batch"], "pinned": len(pinned), "choice_over_best": round(ratio, 4),
            "best": best[0]["case"], "step_off": [round(x, 3) for x in step_off], "busy_off": busy_off,
            "ok": {"choice": ratio <= 1.02, "steps": max(map(abs, step_off)) <= 0.08, "busy": worst <= 0.15}}


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared_arguments(p, steps=3)
    p.add_argument("--num", type=int, default=12, help="pinned plans a batch")
    p.add_argument("--limit-s", type=float, default=float("inf"), help="no other plan begins after so many seconds of a batch")
    return p.parse_args()


if __name__ == "__main__":
    main()
