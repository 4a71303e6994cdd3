"""What the ranks of the measuring tests run: module-level functions for the `run_ranks` fixture, results as JSON."""

from __future__ import annotations

from typing import Any

from rank_cases import OPTIMIZER, build, shares, start
from training import state_of

import slidedp
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
