"""Qwen3-14B and 32B on four GPUs of one host: tokens a second, HBM and host memory of plans, compute alone, and FSDP2.

    python examples/benchmarks/headline.py                                   # every case, in order; see --list
    python examples/benchmarks/headline.py --cases 1 --baselines shared/baselines --record headline.jsonl
    python examples/benchmarks/headline.py --predict                         # the same plans simulated; no GPU
    python examples/benchmarks/headline.py --tiny                            # every case in small on two CPU ranks

Random weights from the configuration, synthetic tokens. A case is a set of processes, one a rank, with a time limit of its own;
one that fails or takes too long is recorded as such, and the next one runs. Results are appended at once: a row of a table
to --results, a line of JSON to the output and to --record, whose compute-only figures of earlier runs serve for ratios, too.

Rank 0 never holds a second copy of the weights: all ranks build on `meta`, and write random weights into the plan's host state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import Outcome, run_ranks, this_rank

Result = dict[str, Any]
ON_HOST = {"state": "host", "act": "recompute"}


@dataclass(frozen=True)
class Case:
    """`item`: of the list in --list. `batches`: sequences a GPU. `warm`: steps before the measured ones, beside the first."""

    name: str
    item: int
    system: str
    size: str
    batches: tuple[int, ...]
    ranks: int = 4
    seq: int = 1024
    policy: Mapping[str, Any] = field(default_factory=dict)
    solver: str = "cp-sat"
    steps: int = 2
    warm: int = 1
    limit_s: int = 300


ITEMS = {1: "Qwen3-14B, 16 and 64 sequences a GPU",
         2: "Qwen3-14B, 256 sequences a GPU: 1 048 576 tokens a step; FSDP2's best batch",
         3: "Qwen3-32B, 32 sequences a GPU, cast", 4: "Qwen3-14B, one sequence of 262 144 tokens a GPU, one step",
         5: "Qwen3-14B, 256 sequences in all on 2 and 4 GPUs"}  # fmt: skip
CASES = (
    Case("compute-only-14b", 1, "compute-only", "14B", (16, 64), ranks=1),
    Case("ours-14b-b16", 1, "ours", "14B", (16,)),
    Case("ours-host-14b-b16", 1, "ours", "14B", (16,), policy=ON_HOST, solver="rule"),
    Case("ours-14b-b64", 1, "ours", "14B", (64,)),
    Case("ours-host-14b-b64", 1, "ours", "14B", (64,), policy=ON_HOST, solver="rule"),
    Case("fsdp2-14b", 1, "fsdp2", "14B", (16, 64)),
    Case("fsdp2-offload-14b", 1, "fsdp2-offload", "14B", (16, 64), limit_s=400),
    Case("ours-14b-b256", 2, "ours", "14B", (256,), limit_s=500),
    Case("fsdp2-14b-larger", 2, "fsdp2", "14B", (32, 96, 128), limit_s=400),  # with item 1's: until one does not fit
    Case("compute-only-32b", 3, "compute-only", "32B", (32,), ranks=1),
    Case("ours-32b-b32", 3, "ours", "32B", (32,), policy={"source": "cast"}, limit_s=500),
    Case("ours-14b-262144", 4, "ours", "14B", (1,), seq=262144, steps=1, warm=0, limit_s=580),
    Case("ours-14b-2-gpus", 5, "ours", "14B", (128,), ranks=2, limit_s=400),
    Case("ours-14b-4-gpus", 5, "ours", "14B", (64,)),
)
TINY = {"size": "tiny", "seq": 16, "limit_s": 120}

SHARED_COLUMNS = ("case", "GPUs x sequences x length", "step s", "tokens/s a GPU", "of compute-only", "HBM GiB", "host GiB")
COLUMNS = (*SHARED_COLUMNS, "predicted s")
PREDICTED = (*SHARED_COLUMNS, "bound by", "layers: deliveries or state in HBM; activations")


def in_small(case: Case) -> Case:
    """The same, for CPU ranks: at most two, a batch or two of the smallest."""
    return replace(case, **TINY, ranks=min(case.ranks, 2), batches=tuple(range(1, len(case.batches) + 1)))


# ---- one rank of a case ----


def work(case: Case, args: argparse.Namespace) -> Iterator[Result]:
    import torch
    import torch.distributed as dist

    rank, world = this_rank()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if case.system == "ours":
        yield from ours(case, args.hw, rank, world, device)
    else:
        import peers

        shape = (case.size, case.batches, case.seq)
        if args.baselines and case.system == "fsdp2-offload":
            yield from peers.script(args.baselines, "fsdp2.py", *shape)
        elif args.baselines and case.system == "compute-only":
            yield from peers.script(args.baselines, "resident.py", *shape, "--recompute")
        elif case.system == "compute-only":
            yield from peers.compute_only(*shape, case.steps, device)
        else:
            yield from peers.fsdp2(*shape, case.steps, device, offload=case.system == "fsdp2-offload")
    if dist.is_initialized():
        dist.destroy_process_group()


def ours(case: Case, hw: str, rank: int, world: int, device: Any) -> Iterator[Result]:
    import peers
    import torch
    from device import reset_peak
    from models import open_plan, tokens

    generator = torch.Generator().manual_seed(rank)
    for batch in case.batches:
        began = time.perf_counter()
        example = tokens(batch, case.seq, case.size, generator)
        with open_plan(case.size, example, device, hw=hw, policy=dict(case.policy) or None, solver=case.solver) as plan:
            if rank == 0:
                print(f"ready after {time.perf_counter() - began:.1f} s\n{plan}", flush=True)
            results = [plan.run(example)]
            losses = [results[0].loss]
            reset_peak(device)  # without what measuring the stages took
            for _ in range(case.warm):
                losses.append(plan.run(tokens(batch, case.seq, case.size, generator)).loss)
            measured = results if not case.warm else [
                plan.run(tokens(batch, case.seq, case.size, generator)) for _ in range(case.steps)]
            times = [result.wall_s for result in measured]
            losses += [result.loss for result in measured]
            plan.synchronize()
            memory, step_us = plan.memory(), plan.simulate().step_us
            yield peers.facts("ours", batch, case.seq, times, device, world) | {
                "predicted_s": round(step_us / 1e6, 4), "planned_hbm_gib": gib(memory.hbm_bytes),
                "planned_host_gib": gib(memory.host_bytes), "losses": [round(loss, 4) for loss in losses],
                "over_predicted": round(statistics.median(times) / (step_us / 1e6), 3)}  # fmt: skip


def gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 2)


# ---- predictions ----


def predictions(cases: Iterable[Case], hw_name: str) -> Iterator[list[str]]:
    """Rows of PREDICTED, for what can be simulated: plans, and the compute alone that they are compared with."""
    from predictions import predict_plan

    from slidedp.hardware import load_profile

    hw = load_profile(hw_name)
    for case in cases:
        for batch in case.batches if case.system == "ours" else ():
            began = time.perf_counter()
            try:
                p = predict_plan(case.size, batch, case.seq, case.ranks, hw, case.policy, case.solver)
            except ValueError as error:
                yield [case.name, sizes(case, batch), *[""] * 5, f"does not fit: {error}", ""]
                continue
            rate = batch * case.seq / p.step_us * 1e6
            print(f"{case.name}: planned in {time.perf_counter() - began:.0f} s\n{p.timeline}", flush=True)
            yield [case.name, sizes(case, batch), f"{p.step_us / 1e6:.3f}", f"{rate:,.0f}", f"{p.of_compute_only:.3f}",
                   f"{gib(p.memory.hbm_bytes):.1f}", f"{gib(p.memory.host_bytes):.1f}",
                   f"{'GPU' if p.timeline.gpu_bound else 'host'}: {p.timeline.binds}", p.choices]


# ---- the table ----


def sizes(case: Case, batch: int) -> str:
    return f"{case.ranks} x {batch} x {case.seq}"


def heading(columns: Iterable[str], title: str) -> str:
    columns = list(columns)
    return f"\n## {title}\n\n{row(columns)}\n{row(['---'] * len(columns))}\n"


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"


def rows(case: Case, outcome: Outcome, known: Iterable[Result]) -> Iterator[str]:
    """One for each batch that was measured, and one more for what went wrong. `known`: results of all cases so far."""
    known = list(known)
    for r in outcome.lines:
        ratio = ""
        if reference := nearest_reference(case, r["batch"], known):
            ratio = f"{r['tokens_per_s_per_gpu'] / reference['tokens_per_s_per_gpu']:.3f}"
            ratio += "" if reference["batch"] == r["batch"] else f" (that of batch {reference['batch']})"
        hbm = " / ".join(f"{r[key]:.1f}" for key in ("allocated_gib", "reserved_gib") if key in r)
        hbm += f" ({r['planned_hbm_gib']:.1f})" if hbm and "planned_hbm_gib" in r else ""
        host = f"{r['pss_gib']:.1f}" if "pss_gib" in r else f"{outcome.host_gib:.0f} less available"
        predicted = f"{r['predicted_s']:.3f}" if "predicted_s" in r else ""
        yield row([case.name, sizes(case, r["batch"]), f"{r['step_s']:.3f}", f"{r['tokens_per_s_per_gpu']:,}", ratio, hbm, host,
                   predicted])
    if outcome.problem:
        missing = case.batches[len(outcome.lines) :]
        yield row([case.name, sizes(case, missing[0]) if missing else "", outcome.problem, *[""] * 5])


def nearest_reference(case: Case, batch: int, known: Iterable[Result]) -> Result | None:
    """Compute alone on the same shape: with as many sequences, else with the most below."""
    same = [r for r in known if r.get("system", "").startswith("compute-only") and r["size"] == case.size
            and r["seq"] == case.seq and r["batch"] <= batch]
    return max(same, key=lambda r: r["batch"], default=None)


# ---- all cases ----


def run(cases: Iterable[Case], args: argparse.Namespace) -> None:
    known = [json.loads(line) for line in args.record.read_text().splitlines()] if args.record and args.record.exists() else []
    append(args.results, heading(COLUMNS, f"Headline, {time.strftime('%Y-%m-%d %H:%M')}" + ", in small, on the CPU" * args.tiny))
    for case in cases:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", case.name]
        outcome = run_ranks(command, case.ranks, limit_s=case.limit_s if args.limit_s is None else args.limit_s, on_line=show)
        facts = {"case": case.name, "item": case.item, "size": case.size, "seq": case.seq, "ranks": case.ranks}
        found = [{**facts, **r, "host_less_gib": round(outcome.host_gib, 1)} for r in outcome.lines]
        known += found
        if outcome.problem:
            found.append({**facts, "problem": outcome.problem, "codes": outcome.codes})
        lines = [json.dumps(r) for r in found]
        print("\n".join(lines), flush=True)
        append(args.results, "".join(f"{line}\n" for line in rows(case, outcome, known)))
        if args.record:
            append(args.record, "".join(f"{line}\n" for line in lines))


def show(line: str) -> None:
    if not line.startswith("{"):
        print(f"  {line}", flush=True)


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def main() -> None:
    args = parse_arguments()
    cases = [in_small(case) if args.tiny else case for case in CASES]
    if args.worker:
        case = next(case for case in cases if case.name == args.worker)
        for result in work(case, args):
            if this_rank()[0] == 0:
                print(json.dumps(result), flush=True)
        return
    cases = [case for case in cases if not args.cases or case.name in args.cases or str(case.item) in args.cases]
    if args.list:
        for item, what in ITEMS.items():
            print(f"{item}  {what}", *(f"     {case.name}" for case in cases if case.item == item), sep="\n")
    elif args.predict:
        append(args.results, heading(PREDICTED, f"Headline, predicted by the profile {args.hw}: not measured"))
        for cells in predictions(cases, args.hw):
            print(row(cells), flush=True)
            append(args.results, f"{row(cells)}\n")
    else:
        run(cases, args)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(case.name for case in CASES)
    p.add_argument("--cases", type=lambda s: s.split(","), metavar="NAMES", help=f"items (1 to 5) or names: {names}")
    p.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    p.add_argument("--predict", action="store_true", help="simulate the plans instead of running them")
    p.add_argument("--tiny", action="store_true", help="every case in small, on the CPU, over gloo")
    p.add_argument("--hw", help="hardware profile; default: auto, for --predict h200x4")
    p.add_argument("--baselines", type=Path, metavar="DIR", 
                   help="take compute-only from resident.py and FSDP2 with offload from fsdp2.py there")
    p.add_argument("--results", type=Path, default=Path(__file__).with_name("RESULTS.md"), help="file of the table's rows")
    p.add_argument("--record", type=Path, metavar="FILE", help="file of JSON lines, read for references and appended to")
    p.add_argument("--limit-s", type=float, help="of every case, instead of its own")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    args = p.parse_args()
    known = {case.name for case in CASES} | {str(item) for item in ITEMS}
    if unknown := set(args.cases or ()) - known:
        p.error(f"no such case: {', '.join(sorted(unknown))}; see --list")
    args.hw = args.hw or ("h200x4" if args.predict else "auto")
    return args


if __name__ == "__main__":
    main()
