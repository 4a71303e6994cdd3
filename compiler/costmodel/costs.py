"""What each op costs: a user's model over an analytic one, and where each number came from.

    CostModel (protocol, user classes plug in)  ->  resolve()  ->  ResolvedCosts: a duration and a source for every op
    AnalyticCostModel: the fallback, from a hardware profile alone

An op's `bytes` means, by kind: `h2d`, `d2h`, activations: what crosses this rank's host link; `all_gather`, `reduce`: what
this rank receives from the others; `host_cast`, `host_gather`, `host_reduce`, `cpu_update`, `snapshot`: host memory
traffic, reads plus writes, of this rank's part; kinds on the GPU: device memory traffic that is the least they can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Protocol, runtime_checkable

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.measured import LONGEST_US, MEASURED, MeasuredCosts
from slidedp.compiler.costmodel.tablecosts import ADAM_BYTES_PER_PARAM, MEASURED_TABLE, table_us
from slidedp.compiler.layergraph import ITEMSIZE
from slidedp.compiler.ops import Chunk, Op, OpKind, Stream
from slidedp.compiler.strict import content_hash

HBM_UPDATE_BYTES_PER_PARAM = 48
"""Device memory traffic of an update in HBM, in effect. Measured on an H200, Qwen3-4B, every layer retains: 4.02 G parameters
updated beside a step's compute make it longer by 52 ms (batch 16), 28 and 52 ms (batch 8, on two machines): the time of 55 and
29 bytes each at 4200 GB/s. The least is 28: master and two moments read and written, gradient read, weights written; an FP32
copy of the gradient is 8 more."""


@runtime_checkable
class CostModel(Protocol):
    """What an op costs on a machine. None (or NotImplementedError) for an op leaves it to the analytic model."""

    def duration_us(self, op: Op, hw: HardwareProfile) -> int:
        """Microseconds that `op` occupies its stream, a whole number, 0 or more."""
        ...

    def bytes(self, op: Op, hw: HardwareProfile) -> int:
        """Bytes that `op` moves: a whole number, 0 or more."""
        ...


@dataclass(frozen=True, slots=True)
class AnalyticCostModel:
    """Durations from a profile's rates, all ranks active at once and in step.

    Host work of all ranks shares the host's rates: N ranks, each with its 1/N, take as long as one rank with all. A profile's
    measured tables, where it has them, come before its rates; `update_threads` (of all ranks together) picks from them. As for
    what else an op shares, there are two answers:

    - by default a guess of what usually runs beside it, for whoever simulates no contention: deliveries for the backward
      and gradient returns run at the same time, so both get the `duplex` rate; deliveries for the forward get the
      one-direction rate of all GPUs;
    - `alone`: nothing; one rank's links and casts at the rates of one. For a simulation with contention
      (:mod:`slidedp.compiler.costmodel.contention`), where the profile's rates for all at once are capacities.
    """

    world_size: int = 1
    compute_dtype: str = "bfloat16"
    alone: bool = False
    update_threads: int | None = None

    def bytes(self, op: Op, hw: HardwareProfile) -> int:
        return op.bytes

    def duration_us(self, op: Op, hw: HardwareProfile) -> int:
        return math.ceil(self.exact_us(op, hw))

    def exact_us(self, op: Op, hw: HardwareProfile) -> float:
        measured = self.measured_us(op, hw)
        return self.rates_us(op, hw) if measured is None else measured

    def source(self, op: Op, hw: HardwareProfile) -> str:
        """Where the duration of `op` comes from: ``measured table`` or ``analytic``."""
        return "analytic" if self.measured_us(op, hw) is None else MEASURED_TABLE

    def measured_us(self, op: Op, hw: HardwareProfile) -> float | None:
        return table_us(op, hw, self.world_size, self.compute_dtype, self.update_threads, self.single(hw))

    def rates_us(self, op: Op, hw: HardwareProfile) -> float:
        match op.kind:
            case OpKind.H2D | OpKind.ACT_RELOAD:
                return hw.link_latency_us + _us(op.bytes, self.h2d_gbps(op, hw))
            case OpKind.D2H | OpKind.ACT_OFFLOAD:
                return hw.link_latency_us + _us(op.bytes, hw.d2h_gbps if self.single(hw) else hw.duplex_gbps)
            case OpKind.ALL_GATHER | OpKind.REDUCE:
                return hw.collective_latency_us + _us(op.bytes, hw.gpu_link_gbps or self.staged_gbps(hw))
            case OpKind.BARRIER:
                return hw.collective_latency_us
            case OpKind.SETTLE:
                return 0.0  # of a step that is not clipped; else it is a CPU update
            case OpKind.GRAD_NORM:
                return self.norm_us(op, hw)
            case OpKind.HOST_CAST:
                return hw.host_task_us + self.cast_us(op, hw)
            case OpKind.CPU_UPDATE:
                adam_gbps = min(hw.cpu_adam_gparams * ADAM_BYTES_PER_PARAM, hw.host_dram_gbps)
                return hw.host_task_us + _us(op.bytes * self.world_size, adam_gbps)
            case OpKind.HOST_GATHER | OpKind.HOST_REDUCE | OpKind.SNAPSHOT:
                return hw.host_task_us + _us(op.bytes * self.world_size, hw.host_dram_gbps)
            case OpKind.GPU_UPDATE:
                return hw.gpu_launch_us + _us(op.bytes * HBM_UPDATE_BYTES_PER_PARAM / ADAM_BYTES_PER_PARAM, hw.hbm_gbps)
            case OpKind.FORWARD | OpKind.RECOMPUTE | OpKind.BACKWARD | OpKind.PROLOGUE | OpKind.EPILOGUE:
                return hw.gpu_launch_us + max(op.flops / hw.tflops(self.compute_dtype) / 1e6, _us(op.bytes, hw.hbm_gbps))

    def single(self, hw: HardwareProfile) -> bool:
        """No figure but that of one copy applies: asked for, or one rank of a machine whose other GPUs are idle."""
        return self.alone or (self.world_size == 1 and hw.num_gpus > 1)

    def staged_gbps(self, hw: HardwareProfile) -> float:
        """The rate of a collective between GPUs without a link: it crosses the host links both ways, and host memory twice."""
        return min(hw.h2d_gbps, hw.d2h_gbps, hw.host_dram_gbps / 2) if self.alone else hw.duplex_gbps

    def h2d_gbps(self, op: Op, hw: HardwareProfile) -> float:
        if self.single(hw):
            return hw.h2d_gbps
        for_backward = any(ref.value.startswith("W.bwd.") for ref in op.writes)
        return hw.duplex_gbps if for_backward or op.kind is OpKind.ACT_RELOAD else hw.h2d_all_gbps

    def norm_us(self, op: Op, hw: HardwareProfile) -> float:
        """A norm reads its gradient once, where it is; bringing all of them home is a small copy, what follows a host task."""
        if op.stream is Stream.HOST:
            return hw.host_task_us + _us(op.bytes * self.world_size, hw.host_dram_gbps)
        return hw.link_latency_us if op.stream is Stream.UPDATE else hw.gpu_launch_us + _us(op.bytes, hw.hbm_gbps)

    def cast_us(self, op: Op, hw: HardwareProfile) -> float:
        """A cast reads FP32 and writes the compute dtype; the profile's rates count BF16 bytes written."""
        bf16_bytes = 2 * op.bytes / (4 + ITEMSIZE[self.compute_dtype])
        return _us(bf16_bytes, hw.cast_gbps if self.alone else min(hw.cast_gbps, hw.cast_total_gbps / self.world_size))


@dataclass(frozen=True)
class ResolvedCosts:
    """Microseconds, bytes and source of every op of one graph. `name` and `hash`: the model's. `issue_us`: how long a host thread
    takes to issue an op, of those whose duration was measured on a device.

    Sources: ``user``, ``measured`` (a stage on this machine), ``measured table`` (of the profile), ``analytic``.
    """

    name: str
    hash: str
    durations_us: dict[str, int]
    num_bytes: dict[str, int]
    sources: dict[str, str]
    issue_us: dict[str, int]

    def duration_us(self, op: Op) -> int:
        return self.durations_us[op.name]

    def source(self, op: Op) -> str:
        """Where the duration of `op` came from."""
        return self.sources[op.name]


def resolve(
    ops: Iterable[Op],
    hw: HardwareProfile,
    analytic: AnalyticCostModel,
    user: CostModel | None = None,
    measured: MeasuredCosts | None = None,
) -> ResolvedCosts:
    """Costs of `ops` from `user`, where it is silent as `measured`, and from `analytic` for the rest.

    Raises ValueError, naming class and op, for a model without the two methods and for a cost that is not a whole number
    of 0 or more; and naming the op, for one that takes longer than `LONGEST_US`.
    """
    costs = WithFallback(analytic, user, measured)
    durations, num_bytes, sources, issues = {}, {}, {}, {}
    for op in ops:
        durations[op.name], sources[op.name] = costs.sourced_duration_us(op, hw)
        num_bytes[op.name] = costs.bytes(op, hw)
        if measured is not None and sources[op.name] == MEASURED and (issue_us := measured.issue_us(op)):
            issues[op.name] = issue_us
    name, identity = _name(user), _hash(user, hw)
    if measured and measured.measurement:
        name, identity = f"{name} with measured stages", content_hash([identity, measured.content_hash()])
    return ResolvedCosts(name, identity, durations, num_bytes, sources, issues)


@dataclass(frozen=True, slots=True)
class WithFallback:
    """`user`'s costs, checked, then `measured` ones, then `analytic`'s; itself a CostModel. Raises as :func:`resolve`."""

    analytic: AnalyticCostModel
    user: CostModel | None = None
    measured: MeasuredCosts | None = None

    def __post_init__(self) -> None:
        if self.user is not None:
            _check_methods(self.user)

    def sourced_duration_us(self, op: Op, hw: HardwareProfile) -> tuple[int, str]:
        cost, source = self._sourced_duration_us(op, hw)
        if cost > LONGEST_US:
            raise ValueError(f"{op.name} takes more than {LONGEST_US} microseconds, the most that an op may ({source} cost)")
        return cost, source

    def _sourced_duration_us(self, op: Op, hw: HardwareProfile) -> tuple[int, str]:
        cost = _ask(self.user, "duration_us", op, hw)
        if cost is not None:
            return cost, "user"
        cost = None if self.measured is None else self.measured.duration_us(op)
        return (self.analytic.duration_us(op, hw), self.analytic.source(op, hw)) if cost is None else (cost, MEASURED)

    def duration_us(self, op: Op, hw: HardwareProfile) -> int:
        return self.sourced_duration_us(op, hw)[0]

    def bytes(self, op: Op, hw: HardwareProfile) -> int:
        cost = _ask(self.user, "bytes", op, hw)
        return self.analytic.bytes(op, hw) if cost is None else cost


def _name(user: CostModel | None) -> str:
    return "analytic" if user is None else f"{type(user).__module__}.{type(user).__qualname__}"


def _hash(user: CostModel | None, hw: HardwareProfile) -> str:
    """A hash of the cost model's answers to fixed questions: what identifies it is what it computes, not its source."""
    answers: list[object] = [_name(user)]
    if user is not None:
        for kind, size in product(OpKind, (2**20, 2**28)):
            probe = Op(f"{kind}.L00.c0", kind, Stream.GPU, "L00", Chunk(0, 1), bytes=size, flops=1000 * size)
            try:
                answers.append([_ask(user, "duration_us", probe, hw), _ask(user, "bytes", probe, hw)])
            except Exception as e:  # the user's code may insist on ops of a real graph; then that is its answer
                answers.append(type(e).__name__)
    return content_hash(answers)


def _us(num_bytes: float, gbps: float) -> float:
    return num_bytes / gbps / 1e3


def _check_methods(user: object) -> None:
    if isinstance(user, type):
        raise ValueError(f"cost model {user.__qualname__} is a class; pass an instance: {user.__qualname__}()")
    for method in ("duration_us", "bytes"):
        if not callable(getattr(user, method, None)):
            raise ValueError(f"cost model {type(user).__qualname__} has no method {method}(op, hw); see slidedp.CostModel")


def _ask(user: CostModel | None, method: str, op: Op, hw: HardwareProfile) -> int | None:
    if user is None:
        return None
    try:
        cost: object = getattr(user, method)(op, hw)
    except NotImplementedError:
        return None
    if cost is None:
        return None
    if isinstance(cost, bool) or not hasattr(cost, "__index__"):
        raise ValueError(f"cost model {type(user).__qualname__}: {method} of {op.name} is {cost!r} ({type(cost).__name__}); "
                         "return a whole number (int), or None for the analytic estimate")
    cost = int(cost.__index__())
    if cost < 0:
        raise ValueError(f"cost model {type(user).__qualname__}: {method} of {op.name} is {cost}; it must be 0 or more")
    return cost
