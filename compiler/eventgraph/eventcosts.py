"""What each option costs, by asking the cost model about the very ops that it would lower to.

The same bytes as the passes write into their ops (tests compare the two): a user's cost model sees probe ops with the
names, kinds, chunks and sizes of real ones, so it flips choices without knowing that a solver is asking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slidedp.compiler.costmodel.contention import Contention, Resource, work_us
from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.eventgraph.choices import Values
from slidedp.compiler.footprint.memory import moved_bytes
from slidedp.compiler.layergraph import Group, LayerGraph, Stage, StageKind, cut_chunks
from slidedp.compiler.ops import Chunk, Op, OpKind, Ref, Stream, in_lane
from slidedp.compiler.rows import Split

Lane = tuple[Stage, ...]
"""The stages of one micro-batch."""


@dataclass(frozen=True, slots=True)
class Chunked:
    """A transfer, collective or host task in `num` chunks: microseconds of all, of one chunk.

    `work_us`: for how long all of it keeps busy what is shared, if it has that to itself.
    """

    total_us: int = 0
    num: int = 1
    work_us: Mapping[Resource, int] = field(default_factory=dict)

    @property
    def chunk_us(self) -> int:
        return -(-self.total_us // max(self.num, 1))

    def __add__(self, more: Chunked) -> Chunked:
        """Chunk by chunk, one behind the other."""
        return replace(in_a_row([self, more]), num=self.num)


NOTHING = Chunked()


@dataclass(frozen=True)
class OptionCosts:
    """Durations of a layer graph's ops under any option.

    `contention`: what ops share (contention.py), so that none is faster than all ranks together can be; None: nothing. `scale`:
    factors, which the loop of AutoPolicy corrects: by the name of a transfer, of all its chunks, how many times as long as alone
    they take; else of all that runs on a stream.
    """

    layers: LayerGraph
    hw: HardwareProfile
    costs: CostModel
    contention: Contention | None = None
    scale: Mapping[str, float] = field(default_factory=dict)
    _known: dict[tuple[object, ...], Chunked] = field(default_factory=dict, init=False, compare=False, repr=False)

    # ---- weights ----

    def cast(self, group: Group, use: str, o: Values) -> Chunked:
        """`use`: fwd, bwd or step. Nothing for a source that needs no cast, and for weights that stay."""
        if not self._delivers(use, o) or o["source"] != "cast":
            return NOTHING
        item = self.layers.compute_itemsize
        return self._deliver(OpKind.HOST_CAST, Stream.CAST, group, use, o, 4 + item)

    def h2d(self, group: Group, use: str, o: Values) -> Chunked:
        if not self._delivers(use, o):
            return NOTHING
        return self._deliver(OpKind.H2D, Stream.H2D, group, use, o, self.layers.compute_itemsize)

    def all_gather(self, group: Group, use: str, o: Values) -> Chunked:
        world = self.layers.world_size
        if not self._delivers(use, o) or not self.sharded(o):
            return NOTHING
        return self._deliver(OpKind.ALL_GATHER, Stream.COMM, group, use, o, self.layers.compute_itemsize * (world - 1))

    def sharded(self, o: Values) -> bool:
        return bool(o) and o["delivery"] == "sharded" and self.layers.world_size > 1

    @staticmethod
    def _delivers(use: str, o: Values) -> bool:
        return bool(o) and not (use == "bwd" and o.get("weights") == "hold")

    def _deliver(self, kind: OpKind, stream: Stream, group: Group, use: str, o: Values, per_element: int) -> Chunked:
        world = self.layers.world_size
        ranks = world if self.sharded(o) else 1
        tag = f"{use}.{group.name}"
        writes = (Ref(f"W.{tag}" if kind is not OpKind.HOST_CAST else f"T.{tag}"),)
        op = Op(f"{kind}.{tag}", kind, stream, group.name, writes=writes)
        return self._chunks(op, group.numel, int(o["delivery_chunks"]), lambda n: n // ranks * per_element)

    # ---- gradients ----

    def reduce(self, group: Group, o: Values, normed: bool = False) -> Chunked:
        """`normed`: with the norm of each chunk's sum."""
        if self.layers.world_size == 1 or not o or o["reduction"] != "gpu":
            return NOTHING
        return self._reduce(group, o, normed)

    def _reduce(self, group: Group, o: Values, normed: bool) -> Chunked:
        world, size = self.layers.world_size, self.layers.grad_itemsize
        reduce = self._return(OpKind.REDUCE, Stream.COMM, group, o, lambda n: n // world * size * (world - 1))
        return reduce + self.norm_of_sum(group, o) if normed else reduce

    def norm_of_sum(self, group: Group, o: Values) -> Chunked:
        """Of a gradient's sum over several ranks, on the stream that has made it."""
        world, stream = self.layers.world_size, Stream.HOST if self.on_host(o) else Stream.COMM
        if world == 1:
            return NOTHING
        return self._return(OpKind.GRAD_NORM, stream, group, o, lambda n: n // world * self.layers.grad_itemsize)

    def norm(self, group: Group) -> int:
        """Of the gradient that one rank's backward leaves on the GPU."""
        return self.op_us(Op(f"grad_norm.{group.name}", OpKind.GRAD_NORM, Stream.GPU, group.name,
                             bytes=group.num_trainable * self.layers.grad_itemsize))  # fmt: skip

    def combined_norm(self, name: str, stream: Stream) -> int:
        """`name`: norms, norm or clip, as passes/clipping.py."""
        return self.op_us(Op(name, OpKind.GRAD_NORM, stream, name))

    def d2h(self, group: Group, o: Values) -> Chunked:
        if not o:
            return NOTHING
        ranks = 1 if self.on_host(o) else self.layers.world_size
        return self._return(OpKind.D2H, Stream.D2H, group, o, lambda n: n // ranks * self.layers.grad_itemsize)

    def host_reduce(self, group: Group, o: Values, normed: bool = False) -> Chunked:
        world = self.layers.world_size
        if not o or not self.on_host(o):
            return NOTHING
        per_element = self.layers.grad_itemsize * (world + 1)
        reduce = self._return(OpKind.HOST_REDUCE, Stream.HOST, group, o, lambda n: n // world * per_element)
        return reduce + self.norm_of_sum(group, o) if normed else reduce

    def on_host(self, o: Values) -> bool:
        return o.get("reduction") == "cpu" and self.layers.world_size > 1

    def update(self, group: Group, o: Values, source: str, split: Split | None = None, *, early: bool = False) -> Chunked:
        """On the CPU, in the chunks of the gradient's return. `source`: with a shadow to write, or without. Of a table whose
        rows are `split`: the touched rows' part, or the others' (`early`).
        """
        if not o:
            return NOTHING
        world, item = self.layers.world_size, self.layers.grad_itemsize
        per_param = 24 + item + (self.layers.compute_itemsize if source == "shadow" else 0)

        def num_bytes(n: int) -> int:
            whole = n // world * per_param
            return whole if split is None else split.update_bytes(whole, n // world * item)[not early]

        return self._return(OpKind.CPU_UPDATE, Stream.CPU, group, o, num_bytes)

    # ---- state in HBM, in the chunks that its gradient would return in ----

    def gpu_update(self, group: Group, num_chunks: int, stream: Stream) -> Chunked:
        """Of this rank's part. `stream`: whose time it takes."""
        per_param = 24 + self.layers.grad_itemsize + self.layers.compute_itemsize
        return self._return(OpKind.GPU_UPDATE, stream, group, {"return_chunks": num_chunks},
                            lambda n: n // self.layers.world_size * per_param)  # fmt: skip

    def reduce_resident(self, group: Group, num_chunks: int, normed: bool) -> Chunked:
        return self._reduce(group, {"return_chunks": num_chunks}, normed)

    def gather_resident(self, group: Group, num_chunks: int) -> Chunked:
        """Of the weights that the other ranks have made."""
        world, size = self.layers.world_size, self.layers.compute_itemsize
        op = Op(f"{OpKind.ALL_GATHER}.resident.{group.name}", OpKind.ALL_GATHER, Stream.COMM, group.name)
        return self._chunks(op, group.num_trainable, num_chunks, lambda n: n // world * size * (world - 1), trainable=True)

    def _return(self, kind: OpKind, stream: Stream, group: Group, o: Values, num_bytes: Callable[[int], int]) -> Chunked:
        op = Op(f"{kind}.{group.name}", kind, stream, group.name)
        return self._chunks(op, group.num_trainable, int(o["return_chunks"]), num_bytes, trainable=True)

    def _chunks(self, op: Op, numel: int, num: int, num_bytes: Callable[[int], int], *, trainable: bool = False) -> Chunked:
        """`op` in chunks of `numel` elements, which are of at most two sizes: one question for each size."""
        key = (op.name, op.stream, num, num_bytes(numel))
        if key not in self._known:
            cut = cut_chunks(numel, num, self.layers.world_size)
            each: dict[int, Chunked] = {}
            for c, (lo, hi) in enumerate(cut):
                if hi - lo not in each:
                    chunk = Chunk(c, len(cut), trainable)
                    each[hi - lo] = self.one(replace(op, name=f"{op.name}.c{c}", chunk=chunk, bytes=num_bytes(hi - lo)))
            self._known[key] = in_a_row([each[hi - lo] for lo, hi in cut])
        return self._known[key]

    # ---- compute and activations ----

    def forward(self, i: int) -> int:
        """Of stage `i`: prologue, a layer, or the epilogue with its backward. Here and below: of all micro-batches together."""
        stage = self.layers.stages[i]
        if stage.kind is StageKind.EPILOGUE:
            return self._gpu(stage.name, OpKind.EPILOGUE, i, lambda lane: lane[i].activation_bytes, 3)
        prologue = stage.kind is StageKind.PROLOGUE
        return self._gpu(stage.name if prologue else f"fwd.{stage.name}", OpKind.PROLOGUE if prologue else OpKind.FORWARD, i,
                         lambda lane: lane[i + 1].boundary_bytes)

    def recompute(self, i: int, act: str) -> int:
        """What runs again before the backward: nothing of a layer that kept or reloads all."""
        if act in ("retain", "offload"):
            return 0
        return self._gpu(f"recompute.{self.layers.stages[i].name}", OpKind.RECOMPUTE, i, lambda lane: lane[i].activation_bytes)

    def backward(self, i: int) -> int:
        name = f"bwd.{self.layers.stages[i].name}"
        return self._gpu(name, OpKind.BACKWARD, i, lambda lane: lane[i].boundary_bytes * (i > 0), 2)

    def move(self, i: int, kind: OpKind, head: str) -> Chunked:
        """`kind`: act_offload or act_reload, of everything that a layer keeps (`head`: act) or of its inputs (h). One chunk a
        micro-batch.
        """
        stream = Stream.D2H if kind is OpKind.ACT_OFFLOAD else Stream.H2D
        return self._in_lanes(f"{kind}.{head}.{self.layers.stages[i].name}", kind, stream, i,
                              lambda lane: moved_bytes(lane[i], head), 0)  # fmt: skip

    def _gpu(self, name: str, kind: OpKind, i: int, num_bytes: Callable[[Lane], int], forwards: int = 1) -> int:
        return self._in_lanes(name, kind, Stream.GPU, i, num_bytes, forwards).total_us

    def _in_lanes(self, name: str, kind: OpKind, stream: Stream, i: int, num_bytes: Callable[[Lane], int],
                  forwards: int) -> Chunked:  # fmt: skip
        """One op of stage `i` for each micro-batch. `forwards`: its flops are so many times those of a forward."""
        num = self.layers.num_lanes
        ops = [Op(in_lane(name, k, num), kind, stream, lane[i].name, bytes=num_bytes(lane), flops=forwards * lane[i].flops)
               for k, lane in enumerate(self.layers.each_lane)]  # fmt: skip
        return in_a_row([self.one(op) for op in ops])

    def op_us(self, op: Op) -> int:
        return self.one(op).total_us

    def one(self, op: Op) -> Chunked:
        """`op`, asked for once."""
        us, work, slowed = self.costs.duration_us(op, self.hw), dict[Resource, int](), 1.0
        if self.contention:
            op = replace(op, bytes=self.costs.bytes(op, self.hw))
            found = work_us([self.contention.draw(op, us).least], [us])
            work = {resource: round(found[resource]) for resource in self.contention.shared if resource in found}
            slowed = 1 / self.contention.lone_speed(op, us)
        by_name = self.scale.get(op.whole)
        slowed = max(by_name, slowed) if by_name else slowed * self.scale.get(op.stream, 1.0)
        return Chunked(us if slowed == 1.0 else round(us * slowed), 1, work)


def in_a_row(ops: Sequence[Chunked]) -> Chunked:
    """All of `ops`, one after the other."""
    work: dict[Resource, int] = {}
    for op in ops:
        for resource, us in op.work_us.items():
            work[resource] = work.get(resource, 0) + us
    return Chunked(sum(op.total_us for op in ops), max(len(ops), 1), work)
