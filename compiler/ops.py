"""The OpGraph: one training step of one rank as a dependency graph of transfers, collectives, updates and compute.

The graph is SPMD: one text for all ranks. It describes one step of a *periodic* schedule; an edge of distance 1 comes
from the step before. The executor has no layer loop: per stream it issues ops in the order in which they stand here.

    layergraph  ->  ops (this file), text.py (print, parse), dsl.py (hand-built graphs), chunk and shard arithmetic
                ->  passes/ build, lower and verify; executor/ runs; simulate.py predicts

Values and the places they live in:

======================  =========================================================================================
``P.<group>``           FP32 master and moments. ``@0`` at the start of the step, ``@1`` after its update. In shared host
                        memory, or in ``state.<group>`` in HBM: there is one of each, every rank holds its own part
``S.<group>``           shadow: the copy in compute dtype that the update writes, shared host memory. Versions as `P`
``T.<use>.<group>``     staging: `P` cast to compute dtype, this rank's pinned memory, in ``stage[k]``
``W.<use>.<group>``     delivered weights, in weight slot ``w[k]`` (layers; `use` is ``fwd`` or ``bwd``) or in ``held.<group>``
                        (`use` is ``step``). `use` ``resident``: weights that stay in ``held.<group>`` from step to step,
                        made by an update in HBM. Versions as `P`
``G.<group>``           this rank's gradient, flat, in gradient slot ``g[k]`` or in ``gheld.<group>``; ``@1``, ``@2``… as
                        several stages of the step accumulate into it
``A.<stage>.<group>``   FP32 sum of the stage's gradients over the micro-batches so far, in ``sum.<k>``; the last makes it `G`
``R.<group>``           reduced shard of a gradient chunk, on the device, in ``red[k]``
``Q.<group>``           this rank's unreduced gradient in host memory (reduction route `cpu`)
``H.<group>``           reduced gradient in shared host memory, what the update reads. These three have an ``@1`` where a part of
                        the gradient goes home before all of it (:mod:`slidedp.passes.rows`)
``C.<group>``           candidate: the next `P` and `S` if gradients need no clipping, shared host memory. The buffers of `P`, `S`
                        and `C` are the same two in turn, but what reads and overwrites them is ordered by these names alone
``h.<stage>``           inputs of a stage (boundary activations); ``d.<stage>`` their gradients
``act.<stage>``         what autograd saved for the stage's backward, kept by the forward or filled in by the recompute
``sel.<stage>``         results of some of a layer's operations, for its recompute
``h.<stage>``, ``act.<stage>`` of layers whose inputs or activations go to the host are in ``h[k]``, ``act[k]`` for as long as
                        that takes; ``off.<value>`` is the copy in pinned memory, in a slot of its name; ``back.<value>`` is the
                        value again in HBM, in ``back.h[k]``, ``back.act[k]``
``const``               what the prologue made for all (masks, rotary)
``loss``                this rank's loss
``norm.<group>``        norms of a gradient's parts; ``norms`` all of them, on the host; ``norm`` this rank's sum of their
                        squares, in shared memory; ``clip`` the factor for all gradients, or that there is no update
======================  =========================================================================================

A step of several micro-batches has one op and one value of each for each: ``fwd.L03.s1`` makes ``h.L04.s1``. They share weights
and gradients, and all of a layer's stand between its delivery and the release of its slot.

Source: DESIGN §4; the SSA values with explicit places follow MLIR's and tinygrad's habit of an IR that is data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from slidedp.compiler.layergraph import Group, cut_chunks, shard


class OpKind(StrEnum):
    HOST_CAST = "host_cast"
    HOST_GATHER = "host_gather"
    H2D = "h2d"
    ALL_GATHER = "all_gather"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    REDUCE = "reduce"
    D2H = "d2h"
    HOST_REDUCE = "host_reduce"
    CPU_UPDATE = "cpu_update"
    GPU_UPDATE = "gpu_update"
    SETTLE = "settle"
    ACT_OFFLOAD = "act_offload"
    ACT_RELOAD = "act_reload"
    PROLOGUE = "prologue"
    EPILOGUE = "epilogue"
    GRAD_NORM = "grad_norm"
    SNAPSHOT = "snapshot"
    BARRIER = "barrier"


class Stream(StrEnum):
    """Queues that run beside one another. All issue in text order but `cpu`, which takes the earliest deadline first, also from
    an update that has begun.

    `update` is the GPU's: a stream of its own, so that what an update waits for on the host (the loss, word from other ranks)
    does not hold up the issue of compute.
    """

    GPU = "gpu"
    H2D = "h2d"
    D2H = "d2h"
    COMM = "comm"
    UPDATE = "update"
    CAST = "cast"
    HOST = "host"
    CPU = "cpu"


COLLECTIVES = frozenset({OpKind.ALL_GATHER, OpKind.REDUCE, OpKind.BARRIER})
"""Kinds that every rank enters together: the op ends on no rank before it has started on all."""

ORDERED = frozenset(Stream) - {Stream.CPU}
"""Streams whose issue order is text order, so that consecutive ops need no edge."""

OF_THE_HOST = frozenset({Stream.CAST, Stream.HOST, Stream.CPU})
"""Streams of host threads whatever the device is. The others are the device's, to which a host thread issues each op."""

COMPUTE_AHEAD = 10
"""Ops of compute that are issued and not yet done, at most. CUDA takes about a thousand kernels, those of ten layers' forward and
backward or so; then it blocks whoever launches or copies anything, and not until there is room for one more: on an H200 for 20 to
60 ms, after which the device had nothing left to do. Half as many outlast what holds the host up now and then."""


class Scope(StrEnum):
    """Which ranks' parts of a chunk an access touches."""

    OWN = "r"
    ALL = "*"
    OTHERS = "o"


class RowSet(StrEnum):
    """Which rows of an embedding an access counts for: those that some batch of the step looks up, the others, or all."""

    ALL = ""
    TOUCHED = "touched"
    UNTOUCHED = "untouched"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk `index` of `count`, of the whole group, or of its trainable part (`trainable`)."""

    index: int
    count: int
    trainable: bool = False

    def bounds(self, group: Group, world_size: int) -> tuple[int, int]:
        """`[lo, hi)` in elements of the group's flat layout."""
        return cut_chunks(group.num_trainable if self.trainable else group.numel, self.count, world_size)[self.index]


@dataclass(frozen=True, slots=True)
class Ref:
    """A read or a write: `value` at `version`, all of it or a chunk, the parts of the ranks in `scope`, in `place`.

    `peers`: the instances of all ranks of a value that each rank has for itself (only `Q`, whose memory is shared).
    `rows`: of a chunk of an embedding; every step has rows of its own.
    """

    value: str
    version: int = 0
    chunk: Chunk | None = None
    scope: Scope = Scope.ALL
    place: str = ""
    peers: bool = False
    rows: RowSet = RowSet.ALL

    @property
    def location(self) -> str:
        """Where the bytes are: the slot, or a home of the value's own."""
        return self.place or self.value

    @property
    def group(self) -> str:
        """The group of a per-group value, else ''."""
        head, _, rest = self.value.partition(".")
        if head in ("P", "S", "G", "R", "Q", "H", "C"):
            return rest
        return rest.partition(".")[2] if head in ("T", "W", "A") else ""

    @property
    def persistent(self) -> bool:
        """True if the value outlives the step: reading version 0 means what the step before wrote as version 1."""
        return self.value[:2] in ("P.", "S.") or self.value.startswith("W.resident.")

    @property
    def occupant(self) -> tuple[str, int, Chunk | None]:
        """What fills the place. `T` and `R` lie at the start of their slot, so two chunks of one value replace each other, and
        two versions of `R` have slots of their own; every other value has each element at its offset in the group, so its chunks
        lie side by side.
        """
        version = self.version if self.persistent or self.value[:2] == "R." else 0
        return self.value, version, self.chunk if self.value[:2] in ("T.", "R.") else None

    def disjoint(self, other: Ref) -> bool:
        """True if the two count for no row in common, within a step."""
        return bool(self.rows and other.rows) and self.rows is not other.rows

    @property
    def shared(self) -> bool:
        """True if there is one instance a host, each rank writing its own part; else every rank has its own."""
        return self.value[:2] in ("P.", "S.", "H.", "C.")

    def ranges(self, group: Group | None, world_size: int, rank: int) -> tuple[tuple[int, int], ...]:
        """The `[lo, hi)` element ranges that `rank` touches. A value without a group is one unit, ``(0, 1)``."""
        if group is None:
            return ((0, 1),)
        lo, hi = self.chunk.bounds(group, world_size) if self.chunk else (0, group.numel)
        a, b = shard(lo, hi, rank, world_size)
        parts: tuple[tuple[int, int], ...]
        match self.scope:
            case Scope.ALL:
                parts = ((lo, hi),)
            case Scope.OWN:
                parts = ((a, b),)
            case Scope.OTHERS:
                parts = ((lo, a), (b, hi))
        return tuple((x, y) for x, y in parts if x < y)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `deadline` orders CPU updates: the position in the text of the next step's first op that needs it."""

    name: str
    kind: OpKind
    stream: Stream
    layer: str
    chunk: Chunk | None = None
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    bytes: int = 0
    flops: int = 0
    deadline: int = 0

    @property
    def lane(self) -> int:
        """The micro-batch that a compute op is for, or a move of its values."""
        return split_lane(self.name)[1]

    @property
    def whole(self) -> str:
        """Name of what this is a chunk of."""
        return self.name.rpartition(".")[0] if self.chunk else self.name

    @property
    def stage(self) -> str:
        """A compute op's layer, with the lane if the step has several."""
        return self.layer + self.name[len(split_lane(self.name)[0]) :]


def in_lane(name: str, lane: int, num_lanes: int) -> str:
    """Name of the op or value of one micro-batch: as it is where there is only one."""
    return f"{name}.s{lane}" if num_lanes > 1 else name


def split_lane(name: str) -> tuple[str, int]:
    """The inverse of :func:`in_lane`."""
    rest, _, last = name.rpartition(".s")
    return (rest, int(last)) if last.isdecimal() and rest else (name, 0)


class Reason(StrEnum):
    DATA = "data"
    VERSION = "version"
    REUSE = "reuse"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Edge:
    """`dst` may start only when `src` of `distance` steps ago has ended: on this rank, or (`all_ranks`) on every rank.

    `slot` names the buffer of a `reuse` edge. Stream order is not stored: it follows from the order of the ops.
    """

    src: str
    dst: str
    reason: Reason
    distance: int = 0
    all_ranks: bool = False
    slot: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    """`count` equal buffers named ``name[0]``…, of `bytes` each, in `memory`: ``hbm``, ``pinned``, or ``allocator``, for places
    in HBM that torch's allocator fills and an op frees when the next value moves in.
    """

    name: str
    count: int
    bytes: int
    memory: str = "hbm"


@dataclass(frozen=True)
class OpGraph:
    """Ops in issue order, edges, buffers and the groups they carry. Immutable: passes return new graphs.

    Edges are kept in one order (by `dst`, then `src`, as they stand in the text), so that graphs with the same edges are equal
    and print alike, whoever added them when.
    """

    ops: tuple[Op, ...] = ()
    edges: tuple[Edge, ...] = ()
    slots: tuple[Slot, ...] = ()
    groups: tuple[Group, ...] = ()
    world_size: int = 1
    meta: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        index, last = self.index, len(self.ops)

        def key(e: Edge) -> tuple[int, int, str, str, int, Reason, bool, str]:
            return index.get(e.dst, last), index.get(e.src, last), e.dst, e.src, e.distance, e.reason, e.all_ranks, e.slot

        object.__setattr__(self, "edges", tuple(sorted(self.edges, key=key)))

    @cached_property
    def index(self) -> dict[str, int]:
        """Op name -> position in the text."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def group_by_name(self) -> dict[str, Group]:
        return {g.name: g for g in self.groups}

    @cached_property
    def edges_into(self) -> dict[str, tuple[Edge, ...]]:
        into: dict[str, list[Edge]] = {op.name: [] for op in self.ops}
        for e in self.edges:
            into[e.dst].append(e)
        return {name: tuple(es) for name, es in into.items()}

    def __getitem__(self, name: str) -> Op:
        return self.ops[self.index[name]]

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def on(self, stream: Stream) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.stream is stream)

    def stream_edges(self) -> tuple[Edge, ...]:
        """The edges that issue order implies: between neighbours on a stream, and from its last op to its first, a step on."""
        out = []
        for stream in sorted(ORDERED):
            ops = self.on(stream)
            out += [Edge(a.name, b.name, Reason.STREAM) for a, b in pairwise(ops)]
            if ops:
                out.append(Edge(ops[-1].name, ops[0].name, Reason.STREAM, distance=1))
        return tuple(out)

    def with_(self, **changes: object) -> OpGraph:
        return replace(self, **changes)  # type: ignore[arg-type]
