"""Several GPUs of one host: same bits on every datapath, what a killed rank does, links, chunk sizes, and scaling.

    python examples/benchmarks/multi_gpu.py correctness --gpus 1,2,4
    python examples/benchmarks/multi_gpu.py kill        --gpus 2,4
    python examples/benchmarks/multi_gpu.py links       --gpus 2,4 --out .            # h200x2.yaml, h200x4.yaml
    python examples/benchmarks/multi_gpu.py chunks      --gpus 1,2,4 --size 4B --layers 12
    python examples/benchmarks/multi_gpu.py scaling     --gpus 1,2,4 --size 4B --batch 16,64 --strong 64,128

--tiny does the same in small on CPU ranks, over gloo. Random weights from the configuration, synthetic tokens. One JSON line a
case; each number of GPUs is a set of processes, one a GPU, with a time limit of its own. The exit status is 1 if anything did
not end well, or a promise was not kept: bits, losses near one rank's, a killed rank named, nothing left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products, for `correctness`

import peers
import torch
import torch.distributed as dist
from device import reset_peak
from models import build, open_plan, tokens
from processes import run_ranks, this_rank
from torch import Tensor
from verdicts import correct, named, scaled

import slidedp

Case = dict[str, Any]

ROUTES = {
    "auto": {},
    "replicated": {"delivery": "replicated"},
    "sharded": {"delivery": "sharded"},
    "cpu-reduce": {"delivery": "replicated", "reduction": "cpu"},
    "resident": {"state": "hbm"},
}
"""`auto`: the solver's own choice; the others pin what they say, and the default rule decides the rest."""

PEERS = ("compute-only", "fsdp2-offload", "fsdp2")

# ---- what a rank does ----


def correctness(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """Steps on one global batch, however many ranks share it; deterministic kernels, so that bits can be compared."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    ways = [("replicated", "gpu")] if world == 1 else list(product(("replicated", "sharded"), ("gpu", "cpu")))
    grid = [(*way, source, chunks) for way in ways for source, chunks in product(("shadow", "cast"), (1, 4))]
    for delivery, reduction, source, chunks in grid[:: args.every]:
        policy = {"delivery": delivery, "reduction": reduction, "source": source, "chunks": chunks}
        generator = torch.Generator().manual_seed(0)
        batches = [tokens(args.global_batch, args.seq, args.size, generator) for _ in range(args.steps)]
        own = [{key: value.chunk(world)[rank] for key, value in batch.items()} for batch in batches]
        with plan_of(args, own[0], policy=policy, solver="rule", lr=1e-4) as plan:
            losses = [plan.run(batch).loss for batch in own]
            digest = digest_of(plan.model.parameters()) if rank == 0 else ""
        yield {"policy": policy, "losses": losses, "digest": digest}


def kill(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """The last rank kills itself in the third step; the others say after how long they knew, and whom they name."""
    batch = tokens(2, args.seq, args.size)
    with plan_of(args, batch) as plan:
        plan.run(batch)
        plan.run(batch)
        plan.synchronize()
        started = time.perf_counter()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while time.perf_counter() < started + 60:
                plan.run(batch)
            said = "nothing in 60 s"
        except Exception as e:  # which class and which words is what we want to see
            said = f"{type(e).__name__}: {e}"
    yield {"rank": rank, "victim": world - 1, "after_s": round(time.perf_counter() - started, 1), "said": said.splitlines()[0]}


def links(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """Copies by size, alone and all at once, both ways; collectives by size; the update by threads, also beside the copies."""
    profile = slidedp.HardwareProfile.measure(keep=False, show_progress=False, quick=args.tiny, device=args.device.type)
    name = f"h200x{world}" if "H200" in profile.gpu_name else f"{'-'.join(profile.gpu_name.lower().split())}-x{world}"
    profile = replace(profile, name=name)
    if rank == 0:
        when = f"# Measured by multi_gpu.py links on {time.strftime('%Y-%m-%d')}, {profile.gpu_name}, {os.cpu_count()} cores.\n"
        (args.out / f"{name}.yaml").write_text(when + profile.to_yaml())
    rates = {key: getattr(profile, key) for key in (
        "h2d_gbps", "d2h_gbps", "h2d_all_gbps", "d2h_all_gbps", "duplex_gbps", "gpu_link_gbps", "collective_latency_us",
        "host_dram_gbps", "cpu_adam_gparams", "cast_gbps", "cast_total_gbps")}  # fmt: skip
    yield {"profile": f"{name}.yaml", "duplex_of_all_gbps": round(2 * world * profile.duplex_gbps, 1), **rates,
           "curves": {f"{curve.quantity} {curve.load}": curve.points for curve in profile.tables.curves}}


def chunks(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """Delivery and return in pieces of so many MB, and of whole layers."""
    layer_mb = 2 * sum(p.numel() for p in build(args.size, 1, "meta").model.layers[0].parameters()) / 1e6
    for mb in (*args.chunk_mb, None):
        num = 1 if mb is None else max(1, round(layer_mb / mb))
        for batch in args.batch:
            facts = {"chunk_mb": mb or round(layer_mb, 3), "num_chunks": num}
            yield timed(args, batch, {"layers": {"*": {"chunks": num}}}, "rule", **facts)


def scaling(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """Tokens a second and the GPU's waiting time, each route pinned and the planner's own choice, a plan for each batch."""
    for route in args.routes if world > 1 else ["auto"]:
        for batch in batches_of(args, world):
            yield timed(args, batch, ROUTES[route], "cp-sat" if route == "auto" else "rule", route=route)


def beside(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """One of PEERS, on the batches of :func:`scaling`."""
    shape = args.size, batches_of(args, world), args.seq
    options = {"num_layers": args.layers}
    if args.baselines and args.peer == "fsdp2-offload":
        found: Any = peers.script(args.baselines, "fsdp2.py", *shape)
    elif args.baselines and args.peer == "compute-only":
        found = peers.script(args.baselines, "resident.py", *shape, "--recompute")
    elif args.peer == "compute-only":
        found = peers.compute_only(*shape, args.steps, args.device, **options)
    else:
        found = peers.fsdp2(*shape, args.steps, args.device, offload=args.peer == "fsdp2-offload", **options)
    for result in found:
        yield {"route": args.peer, **result}


def batches_of(args: argparse.Namespace, world: int) -> list[int]:
    """Sequences a GPU: the ones that stay as GPUs are added, and the shares of the ones that do not."""
    return sorted({*args.batch, *(total // world for total in args.strong if total >= world)})


def timed(args: argparse.Namespace, batch: int, policy: dict[str, Any], solver: str, **facts: Any) -> Case:
    example = tokens(batch, args.seq, args.size)
    try:
        plan = plan_of(args, example, policy=policy or None, solver=solver)
    except ValueError as error:  # on all ranks: they plan together
        return {**facts, "batch": batch, "problem": str(error)}
    with plan:
        plan.run(example)
        reset_peak(args.device)
        plan.run(example)
        times = [plan.run(tokens(batch, args.seq, args.size)).wall_s for _ in range(args.steps)]
        found = peers.facts("slidedp", batch, args.seq, times, args.device, plan_world())
        measured, predicted = plan.measure([example, example]), plan.simulate()
        return {
            **facts, **found, "predicted_s": round(predicted.step_us / 1e6, 4), "exposed_s": seconds(measured.exposed_us),
            "predicted_exposed_s": seconds(predicted.exposed_us), "peer_wait_s": seconds(measured.peer_wait_us),
            "busy_s": {str(s): seconds(us) for s, us in measured.busy_us.items()},
            "predicted_busy_s": {str(s): seconds(us) for s, us in predicted.busy_us.items()},
        }  # fmt: skip


def seconds(us: int) -> float:
    return round(us / 1e6, 4)


def plan_world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def plan_of(args: argparse.Namespace, example: dict[str, Tensor], **options: Any) -> slidedp.Plan:
    return open_plan(args.size, example, args.device, num_layers=args.layers, **options)


def digest_of(parameters: Any) -> str:
    digest = 0
    for p in parameters:
        digest = zlib.crc32(as_bytes(p), digest)
    return f"{digest:08x}"


def as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


# ---- the processes ----


def start(args: argparse.Namespace, world: int, worker: str, *more: str) -> list[Case]:
    """One process a GPU; what was reported, and what went wrong."""
    before = set(os.listdir("/dev/shm"))
    show = lambda line: print(line, flush=True)  # noqa: E731
    outcome = run_ranks([sys.executable, *sys.argv, "--worker", worker, *more], world, limit_s=args.limit_s,
                        grace_s=60 if args.section == "kill" else 20, on_line=show)
    left = sorted(set(os.listdir("/dev/shm")) - before)
    print(f"{world} GPUs: exit codes {outcome.codes}; left in /dev/shm: {left}; {outcome.problem or 'ended well'}", flush=True)
    wanted = [0] * world if args.section != "kill" else [0] * (world - 1) + [-signal.SIGKILL]
    cases = outcome.lines + (outcome.others if args.section == "kill" else [])
    if outcome.codes != wanted or left:
        cases.append({"section": args.section, "gpus": world, "problem": outcome.problem or f"left in /dev/shm: {left}"})
    return cases


def work(args: argparse.Namespace) -> None:
    rank, world = this_rank()
    if args.device.type == "cuda":
        args.device = torch.device("cuda", rank)
        torch.cuda.set_device(args.device)
    for case in globals()[args.worker](args, rank, world):
        if rank == 0 or args.worker == "kill":
            print(json.dumps({"section": args.section, "gpus": world, "model": f"Qwen3-{args.size}", **case}), flush=True)
    if dist.is_initialized() and args.worker != "kill":  # a group with a dead rank cannot be taken down in order
        dist.destroy_process_group()


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    numbers = [world for world in args.gpus if world > 1 or args.section != "kill"]  # one rank alone has nobody to miss it
    cases = [case for world in numbers for case in start(args, world, args.section)]
    if args.section == "scaling":
        for peer in args.beside:
            for world in [1] if peer == "compute-only" else args.gpus:
                cases += start(args, world, "beside", "--peer", peer)
    verdicts = {"correctness": correct, "kill": named, "scaling": scaled}
    kept = verdicts[args.section](cases, args) if args.section in verdicts else True
    sys.exit(0 if kept and not any("problem" in case for case in cases if "route" not in case) else 1)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda s: [int(n) for n in s.split(",")]  # noqa: E731
    words = lambda s: [word for word in s.split(",") if word]  # noqa: E731
    p.add_argument("section", choices=["correctness", "kill", "links", "chunks", "scaling"])
    p.add_argument("--gpus", type=numbers, help="numbers of GPUs, comma-separated; default: all, with --tiny 2")
    p.add_argument("--tiny", action="store_true", help="in small, on CPU ranks")
    p.add_argument("--size", default="0.6B", help="0.6B, 1.7B, 4B, 8B, 14B, 32B")
    p.add_argument("--layers", type=int, help="only so many layers of that shape")
    p.add_argument("--batch", type=numbers, default=[16], help="sequences a GPU")
    p.add_argument("--strong", type=numbers, default=[], help="sequences of all GPUs together, for scaling")
    p.add_argument("--global-batch", type=int, default=8, help="sequences of all ranks together, for correctness")
    p.add_argument("--every", type=int, default=1, help="for correctness, only every so many of the datapaths")
    p.add_argument("--seq", type=int, help="default: 1024; 512 for correctness and kill")
    p.add_argument("--steps", type=int, help="default: 5; 20 for correctness")
    p.add_argument("--chunk-mb", type=lambda s: [float(n) for n in s.split(",")], default=[8.0, 32.0, 64.0])
    p.add_argument("--routes", type=words, default=list(ROUTES), help=f"of {', '.join(ROUTES)}")
    p.add_argument("--beside", type=words, default=list(PEERS[:2]), help=f"of {', '.join(PEERS)}, for scaling")
    p.add_argument("--baselines", type=Path, metavar="DIR", help="take the first two of them from resident.py and fsdp2.py there")
    p.add_argument("--out", type=Path, default=Path(), help="folder of the profiles that links writes")
    p.add_argument("--limit-s", type=int, default=300, help="for each number of GPUs")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--peer", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.tiny:
        args.size, args.seq, args.batch, args.strong = "tiny", 16, [2], [8]
        args.steps, args.chunk_mb, args.gpus = args.steps or 2, [0.01, 0.03], args.gpus or [2]
    args.device = torch.device("cpu" if args.tiny else "cuda")
    short = args.section in ("correctness", "kill")
    args.seq, args.steps = args.seq or (512 if short else 1024), args.steps or (20 if args.section == "correctness" else 5)
    args.gpus = args.gpus or [max(torch.cuda.device_count(), 1)]
    return args


if __name__ == "__main__":
    main()
