"""What the ranks of the measuring tests run: module-level functions for the `run_ranks` fixture, results as JSON."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from rank_cases import OPTIMIZER, build, shares, start
from training import state_of

import slidedp
from slidedp.compiler.costmodel.tables import Load, Quantity
from slidedp.executor.measure.lab import Lab
from slidedp.executor.native.build import NativeUnavailable
from slidedp.executor.optim import kernels
from slidedp.executor.shared.words import PeerError
from slidedp.hardware import load_profile, measure_hardware


def measure_and_train(cache_dir: str) -> dict[str, Any]:
    """A quick profile, then plans that are measured, look into the cache, and neither; ranks 1… have no weights."""
    rank, world = start()
    hardware = measure_hardware(quick=True, cache_dir=cache_dir, device="cpu")
    out: dict[str, Any] = {"profile": hardware.content_hash(), "loads": sorted({str(c.load) for c in hardware.tables.curves})}
    out["quantities"] = sorted({str(c.quantity) for c in hardware.tables.curves})
    for measure in (True, "cached", False):
        options = {"optimizer": OPTIMIZER, "example": shares(world, 0)[rank], "num_threads": 1, "cache_dir": cache_dir}
        with slidedp.compile(build(rank), hardware, device="cpu", measure=measure, **options) as plan:
            losses = [plan.run(shares(world, step)[rank]).loss for step in range(2)]
            out[f"phases {measure}"] = [p.to_content() for p in plan._spec.measurement.phases]
            out[f"trained {measure}"] = [losses, state_of(plan).digest()]
    out["auto"] = load_profile("auto", cache_dir=cache_dir, ranks=plan._ranks).content_hash()
    return out


def measure_unalike() -> dict[str, Any]:
    """Rank 1 has no native library, and another number of cores; then one, but no thread to be had for its updates."""
    rank, _ = start()
    out: dict[str, Any] = {}
    with ExitStack() as stack:
        if rank:
            stack.enter_context(patch.object(kernels, "load_library", side_effect=NativeUnavailable("no compiler")))
            stack.enter_context(patch.object(os, "sched_getaffinity", lambda _: set(range(6))))
        hardware = measure_hardware(quick=True, keep=False, device="cpu", num_threads=2, show_progress=False)
        out["rates"] = [hardware.cpu_adam_gparams, hardware.host_dram_gbps, hardware.h2d_gbps]
        curve = hardware.tables.find(Quantity.CPU_ADAM_GPARAMS, Load.ALONE)
        out["threads"] = [threads for threads, _ in curve.points] if curve else []
    with ExitStack() as stack:
        if rank:
            stack.enter_context(patch.object(Lab, "open_queue", side_effect=OSError("no thread")))
        try:
            measure_hardware(quick=True, keep=False, device="cpu", num_threads=1, show_progress=False)
        except (OSError, PeerError) as e:
            out["error"] = f"{type(e).__name__}: {e}"
    return out
