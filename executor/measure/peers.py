"""Collectives by size, as delivery and gradients use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slidedp.compiler.costmodel.tables import Curve, Load, Quantity
from slidedp.compiler.layergraph import ALIGN, aligned
from slidedp.compiler.ops import Stream
from slidedp.executor.measure.lab import Lab, Task
from slidedp.executor.measure.links import gbps

BF16 = torch.bfloat16


def measure_peers(lab: Lab, sizes: Sequence[int]) -> list[Curve]:
    """All-gather and reduction over the bytes that a rank receives, for chunks of `sizes` bytes. Several ranks."""
    world, collectives = lab.world_size, lab.collectives
    numels = [aligned(size // BF16.itemsize, ALIGN * world) for size in sizes]
    slot, part = (lab.backend.empty(numels[-1], BF16).zero_() for _ in range(2))
    out = lab.backend.empty(numels[-1] // world, BF16)
    collectives.reserve(numels[-1], BF16, lab.backend.device)
    lab.backend.fence_caller()

    def gather(numel: int) -> Task:
        return lambda: collectives.all_gather(slot[:numel])

    def reduce(numel: int) -> Task:
        return lambda: collectives.reduce(part[:numel], out[: numel // world])

    curves = []
    for quantity, task in ((Quantity.ALL_GATHER_GBPS, gather), (Quantity.REDUCE_GBPS, reduce)):
        points = []
        for numel in numels:
            received = numel * BF16.itemsize * (world - 1) // world
            points.append((received, gbps(received, lab.seconds({Stream.COMM: task(numel)})[Stream.COMM])))
        curves.append(Curve(quantity, Load.ALL, tuple(points)))
    return curves
