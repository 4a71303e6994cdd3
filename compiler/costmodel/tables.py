"""Measured tables of a hardware profile: rates by size or by number of threads, and what lies between the points.

A profile's scalar rates are what a long transfer achieves; a table says what a short one does, and what each does beside
others. YAML: quantity -> load -> list of ``[x, rate]``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from slidedp.compiler.strict import as_float, as_int, as_list, as_mapping, check_keys


class Quantity(StrEnum):
    """What a curve holds, over what: bytes of one op, or threads of all ranks together (`cpu_adam_gparams`).

    `all_gather_gbps`, `reduce_gbps`: over the bytes that a rank receives. `cast_gbps`: BF16 bytes written, each rank.
    `cpu_adam_gparams`: all ranks together. `h2d_gbps`, `d2h_gbps`: each rank.
    """

    H2D_GBPS = "h2d_gbps"
    D2H_GBPS = "d2h_gbps"
    ALL_GATHER_GBPS = "all_gather_gbps"
    REDUCE_GBPS = "reduce_gbps"
    CAST_GBPS = "cast_gbps"
    CPU_ADAM_GPARAMS = "cpu_adam_gparams"


class Load(StrEnum):
    """What else runs. `alone`: nothing, one rank. `all`: the same on all ranks. `duplex`: all ranks, both link directions.

    `busy`: all ranks, both directions *and* the update: of a link, what is left for it; of the update, what is left for that.
    """

    ALONE = "alone"
    ALL = "all"
    DUPLEX = "duplex"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Curve:
    """One measured quantity under one load: `points` (x, rate), ascending in x, both more than 0."""

    quantity: Quantity
    load: Load
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        where = f"tables: {self.quantity}: {self.load}"
        if not self.points:
            raise ValueError(f"{where}: no points")
        for x, rate in self.points:
            if not (x > 0 and rate > 0):
                raise ValueError(f"{where}: [{x}, {rate}]: both must be more than 0")
        for (a, _), (b, _) in pairwise(self.points):
            if a >= b:
                raise ValueError(f"{where}: {b} follows {a}: sizes must ascend")

    def rate(self, x: float) -> float:
        """Between two points linear, outside them the nearest one's."""
        xs = [p[0] for p in self.points]
        i = bisect_right(xs, x)
        if i == 0 or i == len(xs):
            return self.points[0 if i == 0 else -1][1]
        (a, low), (b, high) = self.points[i - 1 : i + 1]
        return low + (high - low) * (x - a) / (b - a)

    def us(self, num_bytes: float) -> float:
        """Microseconds of one op of `num_bytes`, of a curve over bytes: the *time* is linear between two points.

        Below the first point its time (a fixed cost is most of it), above the last its rate.
        """
        (first, rate), (last, top) = self.points[0], self.points[-1]
        if num_bytes <= first:
            return first / rate / 1e3
        if num_bytes >= last:
            return num_bytes / top / 1e3
        i = bisect_right([p[0] for p in self.points], num_bytes)
        (a, low), (b, high) = self.points[i - 1 : i + 1]
        before, after = a / low / 1e3, b / high / 1e3
        return before + (after - before) * (num_bytes - a) / (b - a)


@dataclass(frozen=True, slots=True)
class Tables:
    """The curves of a profile, by quantity and load; empty (and false) for one that was not measured."""

    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        keys = [(c.quantity, c.load) for c in self.curves]
        assert len(set(keys)) == len(keys), keys
        object.__setattr__(self, "curves", tuple(sorted(self.curves, key=_place)))

    def __bool__(self) -> bool:
        return bool(self.curves)

    def find(self, quantity: Quantity, *loads: Load) -> Curve | None:
        """The curve of `quantity` under the first of `loads` that there is one for."""
        for load in loads:
            for curve in self.curves:
                if (curve.quantity, curve.load) == (quantity, load):
                    return curve
        return None

    def to_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for c in self.curves:
            content.setdefault(str(c.quantity), {})[str(c.load)] = [[x, rate] for x, rate in c.points]
        return content


def _place(curve: Curve) -> tuple[int, int]:
    return list(Quantity).index(curve.quantity), list(Load).index(curve.load)


def read_tables(content: object, where: str) -> Tables:
    """The inverse of :meth:`Tables.to_content`. ValueError, naming the place, for anything else."""
    curves = []
    top: Mapping[str, Any] = as_mapping(content, where)
    check_keys(top, [str(q) for q in Quantity], where, required=())
    for quantity, loads in top.items():
        at = f"{where}: {quantity}"
        by_load = as_mapping(loads, at)
        check_keys(by_load, [str(x) for x in Load], at, required=())
        for load, rows in by_load.items():
            points = tuple(_point(row, f"{at}: {load}") for row in as_list(rows, f"{at}: {load}"))
            curves.append(Curve(Quantity(quantity), Load(load), points))
    return Tables(tuple(curves))


def _point(row: object, where: str) -> tuple[int, float]:
    pair = as_list(row, where)
    if len(pair) != 2:
        raise ValueError(f"{where}: expected [x, rate], got {pair!r}")
    return as_int(pair[0], where), as_float(pair[1], where)
