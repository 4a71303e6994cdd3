"""A cost model of your own changes a plan, and `diff` shows what it changed. Needs no GPU and no weights.

SlideDP takes durations from a hardware profile. Whoever knows better, from a measurement or because the machine is shared
with others, passes an object with two methods. It is asked about every op; what it leaves open, the profile answers.
"""

from __future__ import annotations

import argparse

import torch

import slidedp
from slidedp.compiler.ops import Op, OpKind
from slidedp.hardware import load_profile
from slidedp.planner import Planner, Settings
from slidedp.presets import build_meta_model
from slidedp.report import planfile_of


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
    args = parser.parse_args()

    quiet = make_plan(args.model, args.hw, None)
    busy = make_plan(args.model, args.hw, BusyGpuLinks(args.slowdown))
    print(slidedp.diff(quiet, busy))


def make_plan(model: str, hw_profile: str, cost_model: slidedp.CostModel | None) -> slidedp.PlanFile:
    """What `slidedp plan` does, with a cost model. In a training script it is `slidedp.compile(..., cost_model=...)`."""
    hw = load_profile(hw_profile)
    dtype = torch.bfloat16
    settings = Settings(hw=hw, compute_dtype=dtype, grad_dtype=dtype, world_size=hw.num_gpus, cost_model=cost_model)
    planner = Planner(build_meta_model(model), settings)
    tokens = torch.zeros(8, 1024, dtype=torch.long)  # each rank's batch: only its shape matters
    draft = planner.draft({"input_ids": tokens, "labels": tokens})
    return planfile_of(planner.finish(draft, draft.decisions))


if __name__ == "__main__":
    main()
