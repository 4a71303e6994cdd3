"""A cost model of your own changes a plan, and `diff` shows what it changed. Needs no GPU and no weights.

SlideDP takes durations from a hardware profile. Whoever knows better, from a measurement or because the machine is shared
with others, passes an object with two methods. It is asked about every op; what it leaves open, the profile answers.
"""

from __future__ import annotations

import argparse

import slidedp
from slidedp.compiler.ops import Op, OpKind


class BusyGpuLinks:
    """The links between the GPUs carry someone else's traffic too: collectives take `slowdown` times as long."""

    def __init__(self, slowdown: int) -> None:
        self.slowdown = slowdown

    def duration_us(self, op: Op, hw: slidedp.HardwareProfile) -> int | None:
        if op.kind not in (OpKind.ALL_GATHER, OpKind.REDUCE):
            return None  # the profile knows
        return round(self.slowdown * (hw.collective_latency_us + op.bytes / (hw.gpu_link_gbps * 1e3)))

    def bytes(self, op: Op, hw: slidedp.HardwareProfile) -> int | None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a shape preset, or a Hugging Face config")
    parser.add_argument("--hw", default="h200x4", help="a hardware profile with links between its GPUs")
    parser.add_argument("--slowdown", type=int, default=10)
    parser.add_argument("--solver", choices=("cp-sat", "rule"), default="cp-sat")
    args = parser.parse_args()

    # 64 sequences a rank: the GPUs bind, so both routes are affordable. With few sequences the host's memory binds, and whole
    # copies for every GPU would cost more than gathering over links that are ten times slower; the solver knows.
    # What `slidedp plan` does. In a training script it is `slidedp.compile(..., cost_model=...)`.
    quiet = slidedp.plan_on_paper(args.model, args.hw, batch=64, seq=1024, solver=args.solver)
    busy = slidedp.plan_on_paper(args.model, args.hw, batch=64, seq=1024, solver=args.solver,
                                 cost_model=BusyGpuLinks(args.slowdown))
    print(slidedp.diff(quiet, busy))


if __name__ == "__main__":
    main()
