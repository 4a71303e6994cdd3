"""Several GPUs of one host: same bits on every datapath, what a killed rank does, chunk sizes, and scaling.

    python examples/benchmarks/multi_gpu.py correctness --gpus 1,2,4
    python examples/benchmarks/multi_gpu.py kill        --gpus 4
    python examples/benchmarks/multi_gpu.py chunks      --gpus 1,2,4 --size 4B --layers 12 --batch 16
    python examples/benchmarks/multi_gpu.py scaling     --gpus 1,2,4 --size 4B --batch 16,64 --routes auto,replicated,sharded

Starts one process a GPU itself (no torchrun, whose agent would end the others when one is killed). Random weights from the
configuration, synthetic tokens. One JSON line a case; each number of GPUs is a set of processes with its own time limit.
The rates of the links are `slidedp profile`'s business.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products, for `correctness`

import torch
from throughput import build, pss_bytes, tokens
from torch import Tensor

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

# ---- what a rank does ----


def correctness(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """20 steps on one global batch, however many ranks share it; deterministic kernels, so that bits can be compared."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    routes = list(product(("replicated", "sharded"), ("gpu", "cpu"), ("shadow", "cast"), (1, 4)))
    routes = [("replicated", "gpu", "shadow", 4)] if world == 1 else routes[:: args.every]
    for delivery, reduction, source, chunks in routes:
        policy = {"delivery": delivery, "reduction": reduction, "source": source, "chunks": chunks}
        generator = torch.Generator().manual_seed(0)
        with plan_of(args, rank, policy=policy, solver="rule") as plan:
            losses = []
            for _ in range(args.steps):
                ids = torch.randint(0, 151936, (args.global_batch, 512), generator=generator)
                own = ids.chunk(world)[rank]
                losses.append(plan.run({"input_ids": own, "labels": own}).loss)
            digest = digest_of(plan.model.parameters()) if rank == 0 else ""
        yield {"policy": policy, "losses": losses, "digest": digest}


def kill(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """The last rank kills itself in the third step; the others say after how long they knew, and whom they name."""
    with plan_of(args, rank) as plan:
        batch = tokens(2, 512)
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
    yield {"after_s": round(time.perf_counter() - started, 1), "said": said.splitlines()[0]}


def chunks(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """Delivery and return in pieces of 8, 32, 64 MB and of whole layers."""
    layer_mb = 2 * sum(p.numel() for p in build(args.size, 1, "meta").model.layers[0].parameters()) / 1e6
    for mb in (8, 32, 64, None):
        num = 1 if mb is None else max(1, round(layer_mb / mb))
        yield from timed(args, rank, world, {"layers": {"*": {"chunks": num}}}, "rule", chunk_mb=mb or round(layer_mb))


def scaling(args: argparse.Namespace, rank: int, world: int) -> Iterator[Case]:
    """Tokens a second and the GPU's waiting time, each route pinned and the planner's own choice."""
    for route in args.routes if world > 1 else ["auto"]:
        yield from timed(args, rank, world, ROUTES[route], "cp-sat" if route == "auto" else "rule", route=route)


def timed(args: argparse.Namespace, rank: int, world: int, policy: dict[str, Any], solver: str, **facts: Any) -> Iterator[Case]:
    example = tokens(max(args.batch), args.seq)  # the largest: a plan keeps what it has once decided
    with plan_of(args, rank, policy=policy or None, solver=solver, example=example) as plan:
        for batch in args.batch:
            plan.run(tokens(batch, args.seq))
            torch.cuda.reset_peak_memory_stats()
            plan.run(tokens(batch, args.seq))
            times = [plan.run(tokens(batch, args.seq)).wall_s for _ in range(args.steps)]
            measured = plan.measure(tokens(batch, args.seq) for _ in range(2))
            step, predicted = statistics.median(times), plan.simulate()
            yield {
                **facts, "batch": batch, "step_s": round(step, 4), "times": [round(t, 3) for t in times],
                "tokens_per_s_per_gpu": round(batch * args.seq / step), "predicted_s": round(predicted.step_us / 1e6, 4),
                "busy_s": {str(s): round(us / 1e6, 3) for s, us in measured.busy_us.items()},
                "predicted_busy_s": {str(s): round(us / 1e6, 3) for s, us in predicted.busy_us.items()},
                "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1), "pss_gib": round(pss_bytes() / 2**30, 1),
            }  # fmt: skip


def plan_of(args: argparse.Namespace, rank: int, **options: Any) -> slidedp.Plan:
    """Rank 0 brings the weights; the others' model has none."""
    model = build(args.size, args.layers, "cuda" if rank == 0 else "meta")
    model = model.to("cpu", torch.float32) if rank == 0 else model.to(torch.float32)
    torch.cuda.empty_cache()
    return slidedp.compile(model, optimizer=slidedp.AdamW(lr=1e-4), validate=False, **options)


def digest_of(parameters: Any) -> str:
    digest = 0
    for p in parameters:
        digest = zlib.crc32(as_bytes(p), digest)
    return f"{digest:08x}"


def as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


# ---- the processes ----


def start(args: argparse.Namespace, world: int) -> list[Case]:
    """One process a GPU; what rank 0 reported. A rank that hangs is ended at the time limit, with all the others."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
           "LOCAL_WORLD_SIZE": str(world), "SLIDEDP_BENCH_WORKER": "1"}
    command = [sys.executable, *sys.argv]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)},
                              stdout=subprocess.PIPE if r == 0 else None, text=True) for r in range(world)]
    cases = []
    timer = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({args.limit_s})"])
    try:
        assert ranks[0].stdout is not None
        os.set_blocking(ranks[0].stdout.fileno(), False)
        while any(r.poll() is None for r in ranks) and timer.poll() is None:
            for line in ranks[0].stdout:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    cases.append(json.loads(line))
            time.sleep(0.2)
        for line in ranks[0].stdout:
            print(line, end="", flush=True)
            cases += [json.loads(line)] if line.startswith("{") else []
    finally:
        if timer.poll() is not None:
            print(f"{world} GPUs: not done after {args.limit_s} s: ended")
        for process in (*ranks, timer):
            process.kill()
    print(f"{world} GPUs: exit codes {[r.wait() for r in ranks]}; left in /dev/shm: {os.listdir('/dev/shm')}", flush=True)
    return cases


def judge(cases: list[Case]) -> None:
    """`correctness`: one digest for each number of ranks; losses of several ranks near those of one."""
    one = next((c["losses"] for c in cases if c["gpus"] == 1), None)
    for world in sorted({c["gpus"] for c in cases}):
        mine = [c for c in cases if c["gpus"] == world]
        same = len({(c["digest"], *c["losses"]) for c in mine}) == 1
        off = max(abs(a - b) / b for c in mine for a, b in zip(c["losses"], one, strict=True)) if one else float("nan")
        print(f"{world} GPUs: {len(mine)} datapaths, {'identical bits' if same else 'BITS DIFFER'}; "
              f"largest relative difference of a loss from one GPU's: {off:.1e}", flush=True)


def main() -> None:
    args = parse_arguments()
    if "SLIDEDP_BENCH_WORKER" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.cuda.set_device(rank)
        for case in globals()[args.section](args, rank, world):
            if rank == 0:
                print(json.dumps({"section": args.section, "gpus": world, "model": f"Qwen3-{args.size}", **case}), flush=True)
        if world > 1 and args.section != "kill":  # a group with a dead rank cannot be taken down in order
            torch.distributed.destroy_process_group()
        return
    cases = [case for world in args.gpus for case in start(args, world)]
    if args.section == "correctness":
        judge(cases)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda s: [int(n) for n in s.split(",")]  # noqa: E731
    p.add_argument("section", choices=["correctness", "kill", "chunks", "scaling"])
    p.add_argument("--gpus", type=numbers, default=[torch.cuda.device_count()], help="numbers of GPUs, comma-separated")
    p.add_argument("--size", default="0.6B", help="0.6B, 1.7B, 4B, 8B, 14B, 32B")
    p.add_argument("--layers", type=int, default=None, help="only so many layers of that shape")
    p.add_argument("--batch", type=numbers, default=[16], help="sequences a GPU")
    p.add_argument("--global-batch", type=int, default=8, help="sequences of all ranks together, for correctness")
    p.add_argument("--every", type=int, default=1, help="for correctness, only every so many of the 16 datapaths")
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--routes", type=lambda s: s.split(","), default=list(ROUTES), help=f"of {', '.join(ROUTES)}")
    p.add_argument("--limit-s", type=int, default=300, help="for each number of GPUs")
    return p.parse_args()


if __name__ == "__main__":
    main()
