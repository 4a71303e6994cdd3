"""Steps of training through a plan beside the same recipe with everything on the GPU: how far apart are the weights?

    python examples/benchmarks/trajectory.py --size 4B                                       # 20 steps; some minutes on an H200
    python examples/benchmarks/trajectory.py --size tiny --steps 4 --batch 2 --seq 32        # tries it out on a CPU

The recipe: BF16 weights and gradients, FP32 masters and moments, AdamW. The reference keeps all of it on the GPU. What kernels do
in whatever order their threads come (attention's backward, the embedding's) makes its own repeats differ, too: how far, is the
measure for ours. One JSON line a run: the largest relative difference of a loss from the reference's, and of the change of the
weights ``|w - w_ref| / |w_ref - w_start|``: of all together, and of the parameter where it is largest. In the end a ``verdict``:
ours over the largest of the repeats, for all weights together; at most 1.5 is what is wanted.

Plans: the default rule's, and (``--whole-head``) the same with all logits made at once, as the reference makes them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device import DEVICE, peak_gib, reset_peak
from models import build, tokens
from torch import Tensor

import slidedp

Batches = list[dict[str, Tensor]]
Weights = dict[str, Tensor]


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(1)
    different = [tokens(args.batch, args.seq, args.size) for _ in range(4)]
    batches = [different[i % 4] for i in range(args.steps)]
    optimizer = slidedp.AdamW(lr=args.lr)
    start = {name: p.detach() for name, p in build(args.size, args.layers).named_parameters()}
    with reported("reference", args):
        want_losses, want = resident(args, batches, optimizer)
    whole = norm(want[n].float() - start[n].float() for n in want)
    repeats = []
    for i in range(args.repeats):
        with reported("repeat", args, number=i) as line:
            line |= apart(*resident(args, batches, optimizer), want_losses, want, start, whole)
        repeats.append(line["change"])
    ours = {}
    for name, policy in [("plan", {}), *([("plan, whole head", {"head_chunks": 1})] if args.whole_head else [])]:
        with reported(name, args) as line:
            losses, weights = streamed(args, batches, optimizer, policy)
            line |= apart(losses, weights, want_losses, want, start, whole)
            del weights
        ours[name] = line["change"]
    largest = max(repeats, default=0.0)
    print(json.dumps({"what": "verdict", "largest_repeat": largest, "ours": ours, "ratio": {
        name: round(change / largest, 3) if largest else None for name, change in ours.items()}}), flush=True)


@contextmanager
def reported(what: str, args: argparse.Namespace, **facts: Any) -> Iterator[dict[str, Any]]:
    """Prints what the block has put into the line, with its seconds and peak memory."""
    gc.collect()
    torch.cuda.empty_cache()
    reset_peak()
    began, line = time.perf_counter(), {"what": what, "model": f"Qwen3-{args.size}", "steps": args.steps, **facts}
    yield line
    print(json.dumps(line | {"seconds": round(time.perf_counter() - began, 1), **peak_gib()}), flush=True)


def resident(args: argparse.Namespace, batches: Batches, optimizer: slidedp.AdamW) -> tuple[list[float], Weights]:
    """Losses and FP32 masters of the reference, which stay on the device."""
    model = build(args.size, args.layers)
    params = dict(model.named_parameters())
    masters = {name: p.detach().float() for name, p in params.items()}
    adam = torch.optim.AdamW(
        [{"params": [m], "weight_decay": optimizer.weight_decay if optimizer.decays(n) else 0.0} for n, m in masters.items()],
        lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, foreach=False)  # fmt: skip
    losses = []
    for batch in batches:
        loss = model(**{key: value.to(DEVICE) for key, value in batch.items()}).loss
        loss.backward()
        losses.append(loss.item())
        del loss
        for name, p in params.items():
            assert p.grad is not None, name
            masters[name].grad, p.grad = p.grad.float(), None
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(masters[name])
    return losses, masters


def streamed(args: argparse.Namespace, batches: Batches, optimizer: slidedp.AdamW,
             policy: dict[str, Any]) -> tuple[list[float], Weights]:
    """Losses and masters, on the host, of a plan of the rule: the HBM that the solver would fill is taken here."""
    model = build(args.size, args.layers).to("cpu", torch.float32)
    torch.cuda.empty_cache()
    with slidedp.compile(model, example=batches[0], optimizer=optimizer, policy=policy, solver="rule", measure=False,
                         compute_dtype=torch.bfloat16) as plan:
        losses = [plan.run(batch).loss for batch in batches]
        plan.synchronize()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def apart(losses: list[float], weights: Weights, want_losses: list[float], want: Weights, start: Weights,
          whole: float) -> dict[str, Any]:
    off = {name: norm([weights[name].to(w.device) - w]) for name, w in want.items()}
    of_one = {name: off[name] / max(norm([w - start[name].float()]), 1e-30) for name, w in want.items()}
    worst = max(of_one, key=lambda name: of_one[name])
    return {"losses": [round(losses[0], 5), round(losses[-1], 5)],
            "loss": max(abs(a - b) / b for a, b in zip(losses, want_losses, strict=True)),
            "change": sum(x * x for x in off.values()) ** 0.5 / whole, "worst": [worst, of_one[worst]]}


@torch.no_grad()
def norm(tensors: Any) -> float:
    """Of all of them together; sums in double precision, of pieces in single."""
    return sum(float(torch.linalg.vector_norm(t)) ** 2 for t in tensors) ** 0.5


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="4B")
    p.add_argument("--layers", type=int, default=None, help="only so many layers of that shape")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=512)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--whole-head", action="store_true", help="a second plan, which makes all logits at once")
    return p.parse_args()


if __name__ == "__main__":
    main()
