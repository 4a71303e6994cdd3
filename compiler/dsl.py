"""A one-screen builder for hand-written graphs, in the grammar of text.py. For tests and examples.

>>> g = GraphBuilder(world_size=1)
>>> g.group("L00", 128).slot("w", 1, 256)                                          # doctest: +ELLIPSIS
<...>
>>> g.op("h2d.fwd.L00.c0", "S.L00@0[c0/1,*] -> W.fwd.L00[c0/1,*]:w[0]", bytes=256)  # doctest: +ELLIPSIS
<...>
>>> g.op("fwd.L00", "h.L00, W.fwd.L00:w[0] -> h.epilogue", after="data:h2d.fwd.L00.c0").build().ops[1].kind
<OpKind.FORWARD: 'forward'>
"""

from __future__ import annotations

from typing import Self

from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Chunk, Edge, Op, OpGraph, OpKind, Slot, Stream
from slidedp.compiler.text import TextError, infer_chunk, infer_layer, parse_edge, parse_io

HEADS: dict[str, tuple[OpKind, Stream]] = {
    "host_cast": (OpKind.HOST_CAST, Stream.CAST),
    "host_gather": (OpKind.HOST_GATHER, Stream.HOST),
    "h2d": (OpKind.H2D, Stream.H2D),
    "all_gather": (OpKind.ALL_GATHER, Stream.COMM),
    "fwd": (OpKind.FORWARD, Stream.GPU),
    "recompute": (OpKind.RECOMPUTE, Stream.GPU),
    "bwd": (OpKind.BACKWARD, Stream.GPU),
    "reduce": (OpKind.REDUCE, Stream.COMM),
    "d2h": (OpKind.D2H, Stream.D2H),
    "host_reduce": (OpKind.HOST_REDUCE, Stream.HOST),
    "cpu_update": (OpKind.CPU_UPDATE, Stream.CPU),
    "gpu_update": (OpKind.GPU_UPDATE, Stream.UPDATE),
    "settle": (OpKind.SETTLE, Stream.CPU),
    "act_offload": (OpKind.ACT_OFFLOAD, Stream.D2H),
    "act_reload": (OpKind.ACT_RELOAD, Stream.H2D),
    "prologue": (OpKind.PROLOGUE, Stream.GPU),
    "epilogue": (OpKind.EPILOGUE, Stream.GPU),
    "grad_norm": (OpKind.GRAD_NORM, Stream.HOST),
    "barrier": (OpKind.BARRIER, Stream.COMM),
}
"""What the first component of an op's name says about its kind and stream."""


class GraphBuilder:
    """Collects groups, slots and ops in text order; every method but `build` returns the builder."""

    def __init__(self, world_size: int = 1) -> None:
        self._world_size = world_size
        self._groups: list[Group] = []
        self._slots: list[Slot] = []
        self._ops: list[Op] = []
        self._edges: list[Edge] = []

    def group(self, name: str, numel: int, num_trainable: int | None = None, uses: tuple[str, ...] | None = None) -> Self:
        """A group used by the stage of its own name unless `uses` says otherwise; all of it trainable by default."""
        trainable = numel if num_trainable is None else num_trainable
        self._groups.append(Group(name, numel, trainable, (name,) if uses is None else uses))
        return self

    def slot(self, name: str, count: int, bytes: int, memory: str = "hbm") -> Self:
        self._slots.append(Slot(name, count, bytes, memory))
        return self

    def op(
        self,
        name: str,
        io: str,
        *,
        after: str = "",
        kind: OpKind | None = None,
        stream: Stream | None = None,
        layer: str | None = None,
        chunk: Chunk | None = None,
        bytes: int = 0,
        flops: int = 0,
        deadline: int = 0,
    ) -> Self:
        """`io`: ``READS -> WRITES``. `after`: edges into the op. `kind` and `stream` follow from the name's head (HEADS)."""
        head = name.partition(".")[0]
        if head not in HEADS and (kind is None or stream is None):
            raise TextError(f"op {name}: nothing known about {head!r}; give its kind and stream")
        kind = HEADS[head][0] if kind is None else kind
        stream = HEADS[head][1] if stream is None else stream
        reads, writes = parse_io(io)
        layer = infer_layer(name) if layer is None else layer
        chunk = infer_chunk(reads, writes) if chunk is None else chunk
        self._ops.append(Op(name, kind, stream, layer, chunk, reads, writes, bytes, flops, deadline))
        self._edges += [parse_edge(token, name) for token in after.split()]
        return self

    def build(self) -> OpGraph:
        return OpGraph(tuple(self._ops), tuple(self._edges), tuple(self._slots), tuple(self._groups), self._world_size)
