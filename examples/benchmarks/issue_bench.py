"""What it costs to issue an op: a model of layers that do nothing, so that a step is all interpreter and streams.

    python examples/benchmarks/issue_bench.py                      # 36 layers of 8 chunks, on the CPU
    python examples/benchmarks/issue_bench.py --device cuda

One JSON line: CPU microseconds an op, medians over steps. `issue_us`: of the thread that walks the program and submits every
op. `process_us`: of the whole process, so with the streams' threads, which run the ops (a tensor operation or a copy each).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time

import torch
from torch import Tensor, nn

import slidedp
from slidedp.executor.machine.interpreter import Interpreter


class Empty(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Stack(nn.Module):
    def __init__(self, num_layers: int, numel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Empty(numel) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch["y"]).square().sum(), outputs.shape[0]


def main() -> None:
    args = parse_arguments()
    numel = 64 * args.chunks  # chunks are cut at multiples of 64
    model, batch = Stack(args.layers, numel), {"x": torch.randn(1, numel), "y": torch.randn(1, numel)}
    issue_us: list[float] = []
    profile = cProfile.Profile()
    issue = Interpreter.run

    def timed(self: Interpreter, *arguments: object) -> None:
        began = time.thread_time()
        if args.profile:
            profile.runcall(issue, self, *arguments)
        else:
            issue(self, *arguments)
        issue_us.append((time.thread_time() - began) * 1e6 / len(self.graph.ops))

    Interpreter.run = timed  # type: ignore[method-assign]
    process_us = []
    with slidedp.compile(model, device=args.device, loss_fn=loss_of, example=batch, policy={"chunks": args.chunks},
                          validate=False) as plan:
        for _ in range(args.steps):
            began = time.process_time()
            plan.run(batch)
            plan.synchronize()
            process_us.append((time.process_time() - began) * 1e6 / len(plan._spec.graph.ops))
        num_ops = len(plan._spec.graph.ops)
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
    line = {"what": "issue", "device": args.device, "layers": args.layers, "chunks": args.chunks, "ops": num_ops,
            "issue_us": round(statistics.median(issue_us[1:]), 2), "process_us": round(statistics.median(process_us[1:]), 2)}
    print(json.dumps(line), flush=True)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cpu")
    p.add_argument("--layers", type=int, default=36)
    p.add_argument("--chunks", type=int, default=8)
    p.add_argument("--steps", type=int, default=11, help="the first is a warm-up")
    p.add_argument("--profile", action="store_true", help="print where the issuing thread spends its time")
    return p.parse_args()


if __name__ == "__main__":
    main()
