"""What the host's cores do: the cast, the update by number of threads, alone and beside the copies, and tasks as such."""

from __future__ import annotations

from collections.abc import Sequence

from slidedp.compiler.costmodel.tablecosts import ADAM_BYTES_PER_PARAM
from slidedp.compiler.costmodel.tables import Curve, Load, Quantity
from slidedp.compiler.ops import Stream
from slidedp.executor.measure.lab import Lab
from slidedp.executor.measure.links import gbps
from slidedp.executor.measure.rig import Rig


def thread_counts(num_threads: int, cores: int, quick: bool) -> list[int]:
    """Powers of two up to a rank's share of the `cores`, that share, and `num_threads`, which the runtime uses."""
    powers = [] if quick else [2**i for i in range(cores.bit_length()) if 2**i <= cores]
    return sorted({1, *powers, cores, num_threads})


def measure_update(lab: Lab, rig: Rig, threads: Sequence[int], link_bytes: int, num_threads: int, crossings: int,
                   ) -> tuple[list[Curve], float]:
    """The update over threads of all ranks together, ``alone`` and ``busy`` (both link directions run too).

    Also what is then left for the links, at `num_threads` a rank, with copies of `link_bytes`. That number is measured again in
    the end and the faster one counts: memory that the machine has got a moment ago is slower at first. All ranks take part.
    Second: the most host memory traffic of all this, 10^9 bytes a second; a copied byte crosses it `crossings` times.
    """
    alone: dict[int, float] = {}
    busy: dict[int, float] = {}
    links, most = {}, 0.0
    everyone, up, down = rig.piece * lab.world_size, rig.to_device(link_bytes), rig.to_host(link_bytes)
    for count in (*(threads if rig.native else ()), num_threads):
        with rig.updating(lab, count) as (own, update):
            by_itself = gbps(everyone, own.seconds({Stream.CPU: update})[Stream.CPU])
            seconds = own.seconds({Stream.CPU: update, Stream.H2D: up, Stream.D2H: down})
        rates = {s: gbps(everyone if s is Stream.CPU else link_bytes, seconds[s]) for s in seconds}
        copied = crossings * lab.world_size * (rates[Stream.H2D] + rates[Stream.D2H])
        most = max(most, by_itself * ADAM_BYTES_PER_PARAM, rates[Stream.CPU] * ADAM_BYTES_PER_PARAM + copied)
        x = count * lab.world_size
        alone[x] = max(by_itself, alone.get(x, 0.0))
        if count == num_threads and rates[Stream.CPU] > busy.get(x, 0.0):
            links = {Quantity.H2D_GBPS: rates[Stream.H2D], Quantity.D2H_GBPS: rates[Stream.D2H]}
        busy[x] = max(rates[Stream.CPU], busy.get(x, 0.0))
    updates = [Curve(Quantity.CPU_ADAM_GPARAMS, load, tuple(sorted(points.items())))
               for load, points in ((Load.ALONE, alone), (Load.BUSY, busy))]
    return updates + [Curve(quantity, Load.BUSY, ((link_bytes, rate),)) for quantity, rate in links.items()], most


def measure_cast(lab: Lab, rig: Rig, sizes: Sequence[int], num_threads: int) -> list[Curve]:
    """BF16 bytes written a second by each rank over `sizes`: one rank ``alone``, and with several ranks ``all``."""
    curves = []
    for load in (Load.ALONE, Load.ALL) if lab.world_size > 1 else (Load.ALONE,):
        points = []
        for size in sizes:
            task = rig.cast(size, num_threads)
            points.append((size, gbps(size, lab.seconds({Stream.CAST: task}, alone=load is Load.ALONE)[Stream.CAST])))
        curves.append(Curve(Quantity.CAST_GBPS, load, tuple(points)))
    return curves


def measure_task_us(lab: Lab, rig: Rig, link_bytes: int, num_threads: int) -> float:
    """Microseconds that an update of next to nothing takes in the queue, while both links are at work: its fixed cost."""
    with rig.updating(lab, num_threads, numel=4096) as (own, update):
        work = {Stream.CPU: update, Stream.H2D: rig.to_device(link_bytes), Stream.D2H: rig.to_host(link_bytes)}
        return own.seconds(work)[Stream.CPU] * 1e6
