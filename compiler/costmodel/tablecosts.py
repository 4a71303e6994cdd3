"""Durations of ops from the measured tables of a hardware profile, where it has the curve (tables.py)."""

from __future__ import annotations

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.tables import Curve, Load, Quantity
from slidedp.compiler.layergraph import ITEMSIZE
from slidedp.compiler.ops import Op, OpKind

MEASURED_TABLE = "measured table"
"""The source of a cost that came from here."""

ADAM_BYTES_PER_PARAM = 28
"""Host memory traffic of the update that `cpu_adam_gparams` is quoted for: FP32 master and two moments read and written
(24), BF16 gradient read, BF16 shadow written."""


def table_us(op: Op, hw: HardwareProfile, world_size: int, compute_dtype: str, update_threads: int | None,
             alone: bool = False) -> float | None:
    """Microseconds of `op`, None where the profile has no curve for it. All ranks run it at once, unless `alone`.

    `update_threads`: of all ranks together; None: as many as were fastest. Loads are those of the analytic model: deliveries
    for the backward and gradient returns run beside each other (``duplex``), deliveries for the forward do not.
    """
    if not hw.tables:
        return None
    find = hw.tables.find
    one_way = (Load.ALONE,) if alone else (Load.ALL, Load.ALONE)
    both_ways = (Load.ALONE,) if alone else (Load.DUPLEX, Load.ALL, Load.ALONE)
    match op.kind:
        case OpKind.H2D | OpKind.ACT_RELOAD:
            backward = op.kind is OpKind.ACT_RELOAD or any(ref.value.startswith("W.bwd.") for ref in op.writes)
            return _us(find(Quantity.H2D_GBPS, *(both_ways if backward else one_way)), op.bytes)
        case OpKind.D2H | OpKind.ACT_OFFLOAD:
            return _us(find(Quantity.D2H_GBPS, *both_ways), op.bytes)
        case OpKind.ALL_GATHER:
            return _us(find(Quantity.ALL_GATHER_GBPS, Load.ALL), op.bytes)
        case OpKind.REDUCE:
            return _us(find(Quantity.REDUCE_GBPS, Load.ALL), op.bytes)
        case OpKind.HOST_CAST:
            written = 2 * op.bytes / (4 + ITEMSIZE[compute_dtype])  # as if the cast were to BF16
            return _us(find(Quantity.CAST_GBPS, *one_way), written)
        case OpKind.CPU_UPDATE:
            curve = find(Quantity.CPU_ADAM_GPARAMS, Load.ALONE)
            if curve is None:
                return None
            gparams = curve.rate(update_threads) if update_threads else max(rate for _, rate in curve.points)
            return hw.host_task_us + op.bytes * world_size / ADAM_BYTES_PER_PARAM / gparams / 1e3
    return None


def _us(curve: Curve | None, num_bytes: float) -> float | None:
    return None if curve is None else curve.us(num_bytes)
