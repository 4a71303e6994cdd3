"""Copies between host and device, by size: each direction alone on one rank, on all ranks at once, and both directions."""

from __future__ import annotations

from collections.abc import Sequence

from slidedp.compiler.costmodel.tables import Curve, Load, Quantity
from slidedp.compiler.ops import Stream
from slidedp.executor.measure.lab import Lab
from slidedp.executor.measure.rig import Rig


def measure_links(lab: Lab, rig: Rig, sizes: Sequence[int]) -> list[Curve]:
    """Curves of h2d and d2h over `sizes` (bytes): ``alone``, with several ranks ``all``, and ``duplex``."""
    rates: dict[tuple[Quantity, Load], list[tuple[int, float]]] = {}
    for size in sizes:
        up, down = rig.to_device(size), rig.to_host(size)
        for load in (Load.ALONE, Load.ALL) if lab.world_size > 1 else (Load.ALONE,):
            for stream, task, quantity in ((Stream.H2D, up, Quantity.H2D_GBPS), (Stream.D2H, down, Quantity.D2H_GBPS)):
                seconds = lab.seconds({stream: task}, alone=load is Load.ALONE)[stream]
                rates.setdefault((quantity, load), []).append((size, gbps(size, seconds)))
        both = lab.seconds({Stream.H2D: up, Stream.D2H: down})
        for stream, quantity in ((Stream.H2D, Quantity.H2D_GBPS), (Stream.D2H, Quantity.D2H_GBPS)):
            rates.setdefault((quantity, Load.DUPLEX), []).append((size, gbps(size, both[stream])))
    return [Curve(quantity, load, tuple(points)) for (quantity, load), points in rates.items()]


def gbps(num_bytes: float, seconds: float) -> float:
    """10^9 bytes a second, to four digits: what is written is what is used."""
    return float(f"{num_bytes / max(seconds, 1e-9) / 1e9:.4g}")
