"""What ops share that run at once, and how fast each of them then runs: progressive filling over a few resources.

An op has a duration *alone*: its rank runs nothing else, and the others nothing on the links; its rank's share of the cores is
all that it has. While it runs it draws its bytes (costs.py says what they are) from resources, evenly over that time. Ops whose
draws together exceed a resource slow down. Capacities follow from the hardware profile:

=============  ==================================================================  =====================================
resource       capacity                                                            drawn on by
=============  ==================================================================  =====================================
host memory    `host_dram_gbps`                                                    copies, host work, of all ranks
root in, out   `h2d_all_gbps`, `d2h_all_gbps`, times the number of GPUs            copies of all ranks, by direction
root           `duplex_gbps`, times the number of GPUs, times 2                    copies of all ranks, both directions
link in, out   `h2d_gbps`, `d2h_gbps`                                              copies of this rank
cores          all of them                                                         host work of all ranks, which takes turns
GPU link       `gpu_link_gbps`                                                     collectives
GPU            all of it                                                           compute, updates in HBM
=============  ==================================================================  =====================================

Ranks are alike and in step: what one rank draws on a resource of the host, all ranks draw at the same time. Without a link
between the GPUs a collective goes through host memory: its sender writes there, its receiver reads (NCCL's shared-memory
transport).

Source: max-min fairness by progressive filling, Bertsekas and Gallager, Data Networks, 6.5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.tablecosts import ADAM_BYTES_PER_PARAM
from slidedp.compiler.costmodel.tables import Load, Quantity
from slidedp.compiler.ops import Op, OpKind

CPU_SHARE = 3.1
"""When host memory is the limit, a rank's update gets this many times the bytes of each of its copies, on average. Measured on
one H200: with both links busy an update of 28 bytes a parameter runs at 3.49 Gparam/s, 98 of 160 GB/s; the copies get 31 each.
A profile that was measured says what they got on its machine."""

HOMEWARD = 1.5
"""What a copy to the host then gets of it over what one to the device gets, where the host's cores are at work, too. GB/s beside
updates that never rest, five H200 hosts: 52 and 28, 36 and 26.5, 51.5 and 30, 42 and 28, 44 and 29. Without the cores the two
directions are alike. A profile that was measured says what they got on its machine."""

READ_BESIDE_CORES, WRITTEN_BESIDE_CORES = 1.5, 0.75
"""What a copied byte takes of host memory where the cores are at work, too: one that the device reads is waited for, and of those
that it writes some are read from the cache. Measured in steps of Qwen3-4B, GB/s of update, copies to the device, copies home:

    one host       148; 119 and 35; 139 and 54 (home); 104, 30 and 50
    another one    182; 172 and 42; 180 and 48 (home); 143, 31 and 43

so that all together move hardly more beside copies to the device than the update alone, and a quarter more beside copies home.
Both are scaled so that all three at once, in the proportion in which they were measured, take what they move: see
`Contention.beside`."""

ISSUED_BESIDE_CORES = 1.8
"""How many times as long it takes to issue compute beside updates: their threads take turns with the one that issues, and what
it needs is out of the caches. An H200 of 16 cores, Qwen3-4B, of a layer's forward, recompute and backward together: 7.3 ms
alone; beside nothing but 16 update threads of niceness 10, and copies, 8.9 to 11.6, beside 14 of them 10.4 to 15.1; in a step
with all state on the host 14.6. With COPY_ISSUE_US this gives the GPU's busy time of ten plans of batch 8 within 4 %, or 17 to
25 % too short where nearly all state is on the host and a third of the layers or more retain."""

COPY_ISSUE_US = 100
"""For how long issuing a copy keeps the thread that issues compute waiting: of the interpreter there is one."""

COMPUTE_US = 850
"""A layer's forward that takes so long has the same share of the GPU as an update in HBM beside it, and one that takes longer so
much more: each of the update's kernels waits for the products under way to end, which last the longer. A backward has twice as
many products. Measured on H200s, a layer of Qwen3-4B, whose update is planned with 1.2 ms alone (HBM_UPDATE_BYTES_PER_PARAM,
costs.py): beside backwards of 6.1 ms (batch 8) it takes 5.8, beside such of 12.4 (batch 16) about 9.3, and the backward takes
longer by about what it takes alone. Beyond these lengths, and for an epilogue, nobody has measured it. In smaller pieces it takes
longer."""


class Resource(StrEnum):
    DRAM = "host memory"
    ROOT_IN = "root in"
    ROOT_OUT = "root out"
    ROOT = "root"
    LINK_IN = "link in"
    LINK_OUT = "link out"
    CORES = "cores"
    GPU_LINK = "gpu link"
    GPU = "gpu"


OF_THE_HOST = frozenset(Resource) - {Resource.LINK_IN, Resource.LINK_OUT, Resource.GPU_LINK, Resource.GPU}
"""Shared by all ranks; the others are each rank's own."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What one op takes while it runs at its speed alone: by resource, the fraction of its capacity that all ranks together
    take (more than 1: it cannot run at that speed on all ranks). `weight`: how fast its speed rises as the resources fill. Beside
    work of the host's cores it rises `beside_cores` times as fast, and takes `memory_beside_cores` times as much of host memory.
    """

    parts: tuple[tuple[Resource, float], ...] = ()
    weight: float = 1.0
    beside_cores: float = 1.0
    memory_beside_cores: float = 1.0

    def among(self, cores: bool) -> Draw:
        """What it is beside work of the host's cores, or without."""
        if not cores or self.beside_cores == self.memory_beside_cores == 1:
            return self
        return Draw(self._parts(self.memory_beside_cores), self.weight * self.beside_cores)

    @property
    def least(self) -> Draw:
        """What it takes at least, whatever runs beside it: no step in which ops take all there is is shorter."""
        return replace(self, parts=self._parts(min(self.memory_beside_cores, 1.0)))

    def _parts(self, of_memory: float) -> tuple[tuple[Resource, float], ...]:
        return tuple((r, part * of_memory if r is Resource.DRAM else part) for r, part in self.parts)


NOTHING = Draw()
COMPUTE = frozenset({OpKind.PROLOGUE, OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.EPILOGUE})
OF_TWO_PASSES = frozenset({OpKind.BACKWARD, OpKind.EPILOGUE})


@dataclass(frozen=True, slots=True)
class Contention:
    """Who shares what on machine `hw` with `world_size` ranks. `num_bytes`: by op name, where it is not `op.bytes`."""

    hw: HardwareProfile
    world_size: int = 1
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    share: float = field(init=False)
    homeward: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", share_of_update(self.hw, self.world_size))
        object.__setattr__(self, "homeward", homeward(self.hw))

    def draw(self, op: Op, alone_us: int) -> Draw:
        """What `op` takes from what it shares, if it takes `alone_us` microseconds alone: its bytes, evenly over that time.

        One rank's part of a resource is at most the whole of it: a cost model that makes an op faster than the profile allows
        is believed, as far as that op alone goes.
        """
        if op.kind in COMPUTE:  # one stream runs all of it, so that only an update in HBM slows it
            return Draw(((Resource.GPU, 1.0),), max(1.0, alone_us / (2 if op.kind in OF_TWO_PASSES else 1) / COMPUTE_US))
        num_bytes = self.num_bytes.get(op.name, op.bytes)
        if not num_bytes or not alone_us:
            return NOTHING
        gbps = num_bytes / alone_us / 1e3
        match op.kind:
            case OpKind.H2D | OpKind.ACT_RELOAD:
                slower = 2 / (1 + self.homeward)
                return self.copy(gbps, slower, self.beside(READ_BESIDE_CORES), Resource.LINK_IN, Resource.ROOT_IN)
            case OpKind.D2H | OpKind.ACT_OFFLOAD:
                faster = 2 * self.homeward / (1 + self.homeward)
                return self.copy(gbps, faster, self.beside(WRITTEN_BESIDE_CORES), Resource.LINK_OUT, Resource.ROOT_OUT)
            case OpKind.ALL_GATHER | OpKind.REDUCE:
                return self.collective(gbps)
            case OpKind.HOST_CAST:
                cores = self.hw.cast_gbps / self.hw.cast_total_gbps
                return self.over({Resource.DRAM: gbps, Resource.CORES: cores}, self.cpu_weight)
            case OpKind.CPU_UPDATE | OpKind.HOST_REDUCE | OpKind.HOST_GATHER | OpKind.SNAPSHOT:
                return self.over({Resource.DRAM: gbps, Resource.CORES: 1 / self.world_size}, self.cpu_weight)
            case OpKind.GPU_UPDATE:
                return Draw(((Resource.GPU, 1.0),))
            case _:
                return NOTHING

    def copy(self, gbps: float, beside_cores: float, memory_beside_cores: float, *of_direction: Resource) -> Draw:
        used = dict.fromkeys((*of_direction, Resource.ROOT, Resource.DRAM), gbps)
        return replace(self.over(used, 1 / gbps), beside_cores=beside_cores, memory_beside_cores=memory_beside_cores)

    def collective(self, gbps: float) -> Draw:
        """`gbps`: what a rank receives; it sends as much."""
        if self.hw.gpu_link_gbps:
            return self.over({Resource.GPU_LINK: gbps}, 1 / gbps)
        through = self.over({Resource.LINK_IN: gbps, Resource.LINK_OUT: gbps, Resource.ROOT_IN: gbps, Resource.ROOT_OUT: gbps,
                             Resource.ROOT: 2 * gbps, Resource.DRAM: 2 * gbps}, 1 / gbps)
        return replace(through, memory_beside_cores=self.beside((READ_BESIDE_CORES + WRITTEN_BESIDE_CORES) / 2))

    def beside(self, cores: float) -> float:
        """A byte's share beside the cores, such that copies both ways, those home `homeward` times faster, take their bytes."""
        return cores * (1 + self.homeward) / (READ_BESIDE_CORES + self.homeward * WRITTEN_BESIDE_CORES)

    def over(self, used: dict[Resource, float], weight: float) -> Draw:
        """Fractions from one rank's rates (GB/s; of the cores, a fraction already)."""
        parts = []
        for resource, amount in used.items():
            ranks = self.world_size if resource in OF_THE_HOST else 1
            parts.append((resource, ranks * min(amount / self.capacity(resource), 1.0)))
        return Draw(tuple(parts), weight)

    def lone_speed(self, op: Op, alone_us: int) -> float:
        """How fast `op` runs if its rank runs nothing else, but all ranks run it: no slower in any company."""
        return 1 / max([1.0, *(part for _, part in self.draw(op, alone_us).parts)])

    @property
    def shared(self) -> tuple[Resource, ...]:
        """What ops of more than one stream draw on, compute aside."""
        if self.world_size > 1 and not self.hw.gpu_link_gbps:
            return tuple(r for r in Resource if r not in (Resource.GPU, Resource.GPU_LINK))
        return Resource.DRAM, Resource.ROOT, Resource.CORES

    @property
    def cpu_weight(self) -> float:
        """All work of a rank's cores slows down alike in speed, which for its update is `share` times the bytes a second of the
        average copy.
        """
        return self.share * self.world_size / (self.hw.cpu_adam_gparams * ADAM_BYTES_PER_PARAM)

    def capacity(self, resource: Resource) -> float:
        """In GB/s; of the cores, 1. A profile's rates for all GPUs hold for each of more ranks than it has GPUs, too."""
        num_gpus = max(self.hw.num_gpus, self.world_size)
        match resource:
            case Resource.DRAM:
                return self.hw.host_dram_gbps
            case Resource.ROOT_IN:
                return num_gpus * self.hw.h2d_all_gbps
            case Resource.ROOT_OUT:
                return num_gpus * self.hw.d2h_all_gbps
            case Resource.ROOT:
                return 2 * num_gpus * self.hw.duplex_gbps
            case Resource.LINK_IN:
                return self.hw.h2d_gbps
            case Resource.LINK_OUT:
                return self.hw.d2h_gbps
            case Resource.CORES | Resource.GPU:
                return 1.0
            case Resource.GPU_LINK:
                return self.hw.gpu_link_gbps


def share_of_update(hw: HardwareProfile, world_size: int) -> float:
    """How many times the bytes of a copy a rank's update gets of host memory when both directions and the updates all run."""
    down, up, adam = (hw.tables.find(q, Load.BUSY) for q in (Quantity.H2D_GBPS, Quantity.D2H_GBPS, Quantity.CPU_ADAM_GPARAMS))
    if down is None or up is None or adam is None:
        return CPU_SHARE
    update = max(rate for _, rate in adam.points) * ADAM_BYTES_PER_PARAM / world_size
    return update / ((down.points[-1][1] + up.points[-1][1]) / 2)


def homeward(hw: HardwareProfile) -> float:
    """How many times what a copy to the device gets beside updates one to the host gets."""
    down, up = (hw.tables.find(q, Load.BUSY) for q in (Quantity.H2D_GBPS, Quantity.D2H_GBPS))
    return HOMEWARD if down is None or up is None else up.points[-1][1] / down.points[-1][1]


def work_us(draws: Iterable[Draw], alone_us: Iterable[int]) -> dict[Resource, float]:
    """For how long ops with these draws keep each resource full."""
    work: dict[Resource, float] = {}
    for draw, us in zip(draws, alone_us, strict=True):
        for resource, part in draw.parts:
            work[resource] = work.get(resource, 0.0) + part * us
    return work


def fill(draws: Sequence[Draw]) -> tuple[float, ...]:
    """The speed of each op, 1 being its speed alone, when ops with these draws run at once.

    Speeds rise from 0 in proportion to the weights. An op stops rising at 1, or when a resource that it draws on is full.
    Nobody can then be faster without an op slower for its weight becoming slower still.
    """
    speeds = [0.0] * len(draws)
    cores = any(resource is Resource.CORES for draw in draws for resource, _ in draw.parts)
    draws = [draw.among(cores) for draw in draws]
    weights = [draw.weight for draw in draws]
    full = dict.fromkeys((r for d in draws for r, _ in d.parts), 0.0)
    rising = set(range(len(draws)))
    while rising:
        pace = dict.fromkeys(full, 0.0)
        for i in rising:
            for resource, part in draws[i].parts:
                pace[resource] += weights[i] * part
        until_full = {r: max(1 - full[r], 0.0) / rate for r, rate in pace.items() if rate > 0}
        until_alone = {i: (1 - speeds[i]) / weights[i] for i in rising}
        step = min([*until_full.values(), *until_alone.values()])
        now = step * (1 + 1e-12)  # what rounding sets apart happens together
        exhausted = {r for r, when in until_full.items() if when <= now}
        for i in rising:
            speeds[i] += weights[i] * step
        for resource, rate in pace.items():
            full[resource] += rate * step
        for i in sorted(rising):
            if until_alone[i] <= now:
                speeds[i] = 1.0  # exactly, so that an op that nobody slows takes exactly its time alone
                rising.remove(i)
            elif any(r in exhausted for r, _ in draws[i].parts):
                rising.remove(i)
    return tuple(speeds)
