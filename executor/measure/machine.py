"""All of a machine's figures, measured one after the other: the rates and tables of a hardware profile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from slidedp.compiler.costmodel.tables import Curve, Load, Quantity, Tables
from slidedp.executor.devices.devices import open_backend
from slidedp.executor.measure.caches import last_level_cache_bytes
from slidedp.executor.measure.compute import measure_hbm_gbps, measure_launch_us, measure_tflops
from slidedp.executor.measure.host import measure_cast, measure_task_us, measure_update, thread_counts
from slidedp.executor.measure.lab import Lab
from slidedp.executor.measure.links import measure_links
from slidedp.executor.measure.peers import measure_peers
from slidedp.executor.measure.rig import Rig, enough
from slidedp.executor.optim.kernels import Kernel
from slidedp.executor.options import update_threads
from slidedp.executor.ranks.collectives import Collectives

KIB, MIB = 1 << 10, 1 << 20

Report = Callable[[str, int, int], object]
"""Told what is measured now, how many parts are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. `budget_s`: of one experiment; `numel`: parameters of a rank, at least; `link_bytes`: of copies.

    All state together is at least `caches` times the host's last-level caches, which are taken to have `cache_bytes` or more: a
    virtual machine may say less than there is.
    """

    budget_s: float
    caches: int
    cache_bytes: int
    numel: int
    link_bytes: tuple[int, ...]
    matmul_bf16: int
    matmul_fp32: int
    hbm_bytes: int


FULL_CUDA = Sizes(0.15, 8, 512 * MIB, 1 << 26, (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB), 8192, 8192, 1 << 30)
QUICK_CUDA = Sizes(0.03, 4, 256 * MIB, 1 << 24, (64 * KIB, MIB, 16 * MIB), 8192, 4096, 1 << 28)
FULL_CPU = Sizes(0.15, 8, 0, 1 << 23, (64 * KIB, 256 * KIB, MIB, 4 * MIB), 512, 1024, 32 * MIB)
QUICK_CPU = Sizes(0.01, 2, 0, 1 << 21, (64 * KIB, MIB), 256, 256, 8 * MIB)


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What was measured: fields of a HardwareProfile by name, and its tables."""

    rates: dict[str, float]
    tables: Tables


def measure_machine(
    device: torch.device,
    collectives: Collectives,
    *,
    num_threads: int | None = None,
    quick: bool = False,
    kernel: Kernel | str = Kernel.AUTO,
    report: Report = lambda *_: None,
) -> MachineFigures:
    """Measures this machine with the ranks of `collectives`. Collective; the same figures on every rank.

    `num_threads`: of a rank's update; default: what the runtime takes. `quick`: fewer and smaller experiments, less exact.
    """
    cuda = device.type == "cuda"
    sizes = (QUICK_CUDA if cuda else QUICK_CPU) if quick else (FULL_CUDA if cuda else FULL_CPU)
    world = collectives.world_size
    cores = update_threads(world)
    threads = num_threads or cores
    threads, cores = collectives.exchange_ints([threads, cores])  # bound to unlike cores, ranks still make the same experiments
    largest = sizes.link_bytes[-1]
    crossings = 1 if cuda else 2  # how often a copied byte crosses host memory: where the host is its own device, twice
    curves: list[Curve] = []
    rates: dict[str, float] = {}

    def update(lab: Lab, rig: Rig) -> None:
        counts = thread_counts(threads, cores, quick)
        found, rates["host_dram_gbps"] = measure_update(lab, rig, counts, largest, threads, crossings)
        curves.extend(found)

    with closing(open_backend(device)) as backend, closing(Lab(backend, collectives, sizes.budget_s)) as lab:
        rig = Rig(backend, collectives, state_numel(sizes, collectives), largest // 2, kernel)
        steps: list[tuple[str, Callable[[], object]]] = [
            ("links", lambda: curves.extend(measure_links(lab, rig, sizes.link_bytes))),
            ("update", lambda: update(lab, rig)),
            ("cast", lambda: curves.extend(measure_cast(lab, rig, sizes.link_bytes[-2:], threads))),
            ("tasks", lambda: rates.update(host_task_us=measure_task_us(lab, rig, MIB, threads))),
            ("launch", lambda: rates.update(gpu_launch_us=measure_launch_us(lab))),
            ("BF16 products", lambda: rates.update(gpu_bf16_tflops=measure_tflops(lab, sizes.matmul_bf16, torch.bfloat16))),
            ("FP32 products", lambda: rates.update(gpu_fp32_tflops=measure_tflops(lab, sizes.matmul_fp32, torch.float32))),
            ("device memory", lambda: rates.update(hbm_gbps=measure_hbm_gbps(lab, sizes.hbm_bytes))),
        ]  # fmt: skip
        if world > 1:
            steps.append(("collectives", lambda: curves.extend(measure_peers(lab, sizes.link_bytes))))
        healthy = False
        try:
            for i, (name, step) in enumerate(steps):
                report(name, i, len(steps))
                step()
            report("done", len(steps), len(steps))
            healthy = True
        finally:
            lab.close()
            backend.close()  # before the memory that it has registered
            if healthy:  # else the others, who are in another call, hear of it in this rank's next one: see `together`
                collectives.barrier()
            rig.close()
            if cuda:
                torch.cuda.empty_cache()
    tables = Tables(tuple(curves))
    found = rates | link_rates(tables) | host_rates(tables, world, crossings, rates["host_dram_gbps"])
    return MachineFigures({key: float(f"{value:.4g}") for key, value in found.items()}, tables)


def state_numel(sizes: Sizes, collectives: Collectives) -> int:
    """Parameters of each rank's part, rank 0 having looked at the caches."""
    caches = max(sizes.cache_bytes, last_level_cache_bytes())
    (num_bytes,) = collectives.exchange_ints([sizes.caches * caches])
    return enough(sizes.numel, sizes.link_bytes[-1] // 2, collectives.world_size, num_bytes)


def link_rates(tables: Tables) -> dict[str, float]:
    """The profile's scalar rates of links and collectives: those of the largest size."""

    def top(quantity: Quantity, *loads: Load) -> float:
        curve = tables.find(quantity, *loads)
        return curve.points[-1][1] if curve else 0.0

    def latency_us(quantity: Quantity, *loads: Load) -> float:
        """What the smallest op takes beyond its bytes at full rate."""
        curve = tables.find(quantity, *loads)
        if curve is None:
            return 0.0
        size, rate = curve.points[0]
        return max(size / rate - size / curve.points[-1][1], 0.0) / 1e3

    every = (Load.ALL, Load.ALONE)
    return {
        "h2d_gbps": top(Quantity.H2D_GBPS, Load.ALONE),
        "d2h_gbps": top(Quantity.D2H_GBPS, Load.ALONE),
        "h2d_all_gbps": top(Quantity.H2D_GBPS, *every),
        "d2h_all_gbps": top(Quantity.D2H_GBPS, *every),
        "duplex_gbps": min(top(Quantity.H2D_GBPS, Load.DUPLEX), top(Quantity.D2H_GBPS, Load.DUPLEX)),
        "link_latency_us": latency_us(Quantity.H2D_GBPS, Load.ALONE),
        "gpu_link_gbps": top(Quantity.ALL_GATHER_GBPS, Load.ALL),
        "collective_latency_us": latency_us(Quantity.ALL_GATHER_GBPS, Load.ALL),
    }


def host_rates(tables: Tables, world_size: int, crossings: int, of_updates: float) -> dict[str, float]:
    """Update, cast, and the most host memory traffic (10^9 B/s) that any experiment has seen. `of_updates`: with updates.

    What a cast writes, a small staging buffer, stays in the cache: only the 4 bytes that it reads count.
    """

    def best(quantity: Quantity, *loads: Load) -> float:
        curve = tables.find(quantity, *loads)
        return max(rate for _, rate in curve.points) if curve else 0.0

    duplex = crossings * world_size * (best(Quantity.H2D_GBPS, Load.DUPLEX) + best(Quantity.D2H_GBPS, Load.DUPLEX))
    cast, cast_all = best(Quantity.CAST_GBPS, Load.ALONE), best(Quantity.CAST_GBPS, Load.ALL, Load.ALONE) * world_size
    return {"cpu_adam_gparams": best(Quantity.CPU_ADAM_GPARAMS, Load.ALONE), "cast_gbps": cast, "cast_total_gbps": cast_all,
            "host_dram_gbps": max(of_updates, duplex, 2 * cast_all)}
