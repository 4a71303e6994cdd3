"""What host memory gives to a plan's own traffic: its updates and copies, in its proportions, at once, and held up by nothing.

No order of a plan's ops moves its bytes faster. That is less than the most that any experiment sees (`host_dram_gbps`): beside
copies to the device updates lose more than these move, and beside copies to the host less (NOTES.md).
"""

from __future__ import annotations

from contextlib import ExitStack, closing

import torch
from device import DEVICE

import slidedp
from slidedp.compiler.costmodel.tablecosts import ADAM_BYTES_PER_PARAM
from slidedp.compiler.ops import Stream
from slidedp.executor.devices.devices import open_backend
from slidedp.executor.measure.lab import Lab
from slidedp.executor.measure.rig import Rig, enough
from slidedp.executor.options import update_threads
from slidedp.executor.ranks.collectives import SingleRank

COPY_BYTES, NUM_UPDATES, STATE_BYTES = (32 << 20, 64, 4 << 30) if DEVICE == "cuda" else (1 << 20, 8, 16 << 20)
"""Of a copy, as a profile measures them; updates of as many parameters as it carries; memory that they walk through."""

REPEATS = 3
OF_HOST_MEMORY = (Stream.CPU, Stream.H2D, Stream.D2H)


def traffic_bytes(plan: slidedp.Plan) -> dict[Stream, int]:
    """Of a step, by stream."""
    return {s: sum(op.bytes for op in plan._spec.graph.on(s)) for s in OF_HOST_MEMORY}


def mixed_gbps(traffic: dict[Stream, int], num_threads: int | None = None) -> float | None:
    """10^9 bytes a second of host memory: the best of a few runs until all is done. None for a plan without host updates."""
    if not traffic[Stream.CPU]:
        return None
    piece = COPY_BYTES // 2
    updated = NUM_UPDATES * piece * ADAM_BYTES_PER_PARAM
    copies = {s: round(updated * traffic[s] / traffic[Stream.CPU] / COPY_BYTES) for s in (Stream.H2D, Stream.D2H)}
    alone = SingleRank()
    with ExitStack() as last, closing(open_backend(torch.device(DEVICE))) as backend, closing(Lab(backend, alone, 0.0)) as lab:
        rig = last.enter_context(closing(Rig(backend, alone, enough(piece, piece, 1, STATE_BYTES), piece, "auto")))
        with rig.updating(lab, num_threads or update_threads(1)) as (own, update):
            tasks = {Stream.CPU: [update] * NUM_UPDATES, Stream.H2D: [rig.to_device(COPY_BYTES)] * copies[Stream.H2D],
                     Stream.D2H: [rig.to_host(COPY_BYTES)] * copies[Stream.D2H]}
            runs = [own.spans({s: ops for s, ops in tasks.items() if ops}) for _ in range(REPEATS)]
    moved = updated + sum(copies.values()) * COPY_BYTES
    lasted = [max(end for ops in run.values() for _, end in ops) - min(ops[0][0] for ops in run.values()) for run in runs]
    return round(moved / min(lasted) / 1e9, 1)
