"""What the results of multi_gpu.py come to, beside what is promised. Each prints its lines and says whether all was kept."""

from __future__ import annotations

import argparse
from typing import Any

Case = dict[str, Any]

NEAR = 1e-3
"""Relative difference of a BF16 loss from one rank's."""
STOPS_S = 30
TARGETS = {"weak": 0.95, "of best pinned": 0.98, "predicted": 0.10}


def correct(cases: list[Case], args: argparse.Namespace) -> bool:
    """One digest for each number of ranks; losses of several ranks near those of one."""
    cases = [c for c in cases if "digest" in c]
    one = next((c["losses"] for c in cases if c["gpus"] == 1), None)
    kept = True
    for world in args.gpus:
        mine = [c for c in cases if c["gpus"] == world]
        same = len({(c["digest"], *c["losses"]) for c in mine}) == 1
        off = max((abs(a - b) / b for c in mine for a, b in zip(c["losses"], one, strict=True)), default=0.0) if one else 0.0
        kept &= same and off <= NEAR
        print(f"{world} GPUs: {len(mine)} datapaths, {'identical bits' if same else 'BITS DIFFER'} "
              f"({', '.join(sorted({c['digest'] for c in mine}))}); "
              + (f"largest relative difference of a loss from one GPU's: {off:.1e}" if one else "not compared with one GPU"))
    return kept


def named(cases: list[Case], args: argparse.Namespace) -> bool:
    """Every survivor has named the victim in time."""
    kept = True
    for world in (world for world in args.gpus if world > 1):
        mine = [c for c in cases if c["gpus"] == world and "said" in c]
        good = [c for c in mine if c["after_s"] < STOPS_S and f"rank {c['victim']} " in c["said"]]
        kept &= len(good) == world - 1
        print(f"{world} GPUs: {len(good)} of {world - 1} survivors named the victim, "
              f"after {max((c['after_s'] for c in good), default=float('nan'))} s at most")
    return kept


def scaled(cases: list[Case], args: argparse.Namespace) -> bool:
    """A line for each number of GPUs and batch: the solver's plan beside one GPU's, pinned routes, peers, and its prediction.

    Targets that are missed are marked with ``!``; they are no failures, since machines differ.
    """
    rate = {(c["gpus"], c["batch"], c["route"]): c["tokens_per_s_per_gpu"] for c in cases if "tokens_per_s_per_gpu" in c}
    autos = {(c["gpus"], c["batch"]): c for c in cases if c.get("route") == "auto" and "step_s" in c}
    for (world, batch), auto in sorted(autos.items()):
        own, parts = auto["tokens_per_s_per_gpu"], []
        if world > 1 and (1, batch, "auto") in rate and batch in args.batch:
            parts.append(marked("weak scaling", own / rate[1, batch, "auto"], TARGETS["weak"]))
        total = batch * world
        if world > 1 and total in args.strong and (1, total, "auto") in rate:
            parts.append(f"strong scaling of {total}: {world * own / rate[1, total, 'auto']:.2f} x one GPU")
        pinned = {r: v for (w, b, r), v in rate.items() if (w, b) == (world, batch) and r in args.routes and r != "auto"}
        if pinned:
            best = max(pinned, key=lambda r: pinned[r])
            parts.append(marked(f"of the best pinned route ({best})", own / pinned[best], TARGETS["of best pinned"]))
        if (1, batch, "compute-only") in rate:
            parts.append(f"{own / rate[1, batch, 'compute-only']:.3f} of compute-only")
        known = [peer for peer in ("fsdp2-offload", "fsdp2") if (world, batch, peer) in rate]
        parts += [f"{own / rate[world, batch, peer]:.2f} x {peer}" for peer in known]
        off = auto["step_s"] / auto["predicted_s"] - 1
        parts.append(f"{off:+.1%} of the prediction{' !' * (abs(off) > TARGETS['predicted'])}")
        print(f"{world} GPUs, batch {batch}: {own:,} tokens/s a GPU; " + "; ".join(parts))
    return True


def marked(what: str, value: float, target: float) -> str:
    return f"{what} {value:.3f}{' !' * (value < target)}"
