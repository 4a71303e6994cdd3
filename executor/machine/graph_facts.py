"""What the interpreter derives from a graph once: what each op waits for, and which ops' completion others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slidedp.compiler.ops import ORDERED, Edge, Op, OpGraph, OpKind, Ref, Stream, split_lane

HOST_STREAMS = frozenset({Stream.CAST, Stream.HOST, Stream.CPU})
"""Their ops begin when the host knows that what they wait for is complete."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts about one graph; ops by name, in the order of the text.

    `op_names`: without snapshots, which no later step waits for. `compute`: on the GPU's stream. `ends`: when these are done, all
    are. `watched`: the host asks for their ends. `published`: other ranks wait for them. `split`: tables whose rows are split.
    `moved_by`: values that go to the host -> the ops that copy them. `reduced_by`: reduced shards -> the ops that make them.
    `speculating`: groups that it makes candidates for.
    """

    op_names: tuple[str, ...]
    snapshots: frozenset[str]
    previous_on_stream: Mapping[str, str]
    compute: tuple[str, ...]
    last_epilogue: str
    ends: tuple[str, ...]
    watched: frozenset[str]
    published: frozenset[str]
    split: frozenset[str]
    moved_by: Mapping[str, str]
    reduced_by: Mapping[Ref, str]
    speculating: frozenset[str]

    @classmethod
    def of(cls, graph: OpGraph, num_ranks: int) -> GraphFacts:
        snapshots = frozenset(op.name for op in graph.ops if op.kind is OpKind.SNAPSHOT)
        compute = tuple(op.name for op in graph.on(Stream.GPU))
        last_epilogue = [op.name for op in graph.ops if op.kind is OpKind.EPILOGUE][-1]
        ends = outcomes(graph)
        published = frozenset(e.src for e in graph.edges if e.all_ranks)
        watched = {e.src for e in graph.edges if graph[e.dst].stream in HOST_STREAMS}
        watched |= {compute[-1], last_epilogue, *ends, *published}
        if num_ranks > 1:  # only once a reduction is done has every rank said which parameters had a gradient
            watched |= {e.src for e in graph.edges if graph[e.dst].kind is OpKind.GPU_UPDATE}
            watched.update(compute)  # that others see them end, however far ahead they are issued: see hangs.py
        return cls(
            op_names=tuple(op.name for op in graph.ops if op.name not in snapshots),
            snapshots=snapshots,
            previous_on_stream={e.dst: e.src for e in graph.stream_edges() if not e.distance} if snapshots else {},
            compute=compute,
            last_epilogue=last_epilogue,
            ends=ends,
            watched=frozenset(watched),
            published=published,
            split=frozenset(op.layer for op in graph.ops for ref in op.writes if ref.rows),  # see passes/rows.py
            moved_by={op.reads[0].value: op.name for op in graph.ops if op.kind is OpKind.ACT_OFFLOAD},
            reduced_by={op.writes[0]: op.name for op in graph.ops if op.kind is OpKind.REDUCE},
            speculating=frozenset(op.layer for op in graph.ops if op.kind is OpKind.SETTLE),
        )


def waits(graph: OpGraph, op: Op) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Edge, ...]]:
    """Ops of this step and of the one before whose tickets to wait for, and edges that other ranks must signal."""
    same: list[str] = []
    before: list[str] = []
    across: list[Edge] = []
    for edge in graph.edges_into[op.name]:
        if edge.all_ranks:
            across.append(edge)
        elif graph[edge.src].stream is op.stream and op.stream in ORDERED:
            continue  # issue order
        else:
            (before if edge.distance else same).append(edge.src)
    return tuple(same), tuple(before), tuple(across)


def outcomes(graph: OpGraph) -> tuple[str, ...]:
    """Ops that no other op of the step waits for, and the last one of each stream: when they are done, all are."""
    waited_for = {e.src for e in graph.edges if e.distance == 0}
    last = {op.stream: op.name for op in graph.ops}
    return tuple(op.name for op in graph.ops if op.name not in waited_for or last[op.stream] == op.name)


def leaving(graph: OpGraph, op: Op) -> list[tuple[str, int]]:
    """Values, and whose lane's, whose places `op` takes: their memory is freed when it starts; the graph has it wait for
    their copy.
    """
    places = {ref.place for ref in op.writes if ref.place.startswith(("act[", "h["))}
    before = graph.ops[: graph.index[op.name]]
    last = {ref.place: ref.value for earlier in before for ref in earlier.writes if ref.place in places}
    return [split_lane(value) for value in last.values()]


def read_last(graph: OpGraph, op: Op) -> tuple[list[Ref], list[Ref]]:
    """Accesses to slots that nothing reads any more once `op` has: weights and moved activations, of which all of the slot is
    free then; and chunks of gradients.
    """
    slots, chunks = [], []
    normed = {r.value for o in graph.ops if o.kind is OpKind.GRAD_NORM for r in o.reads}
    shared = normed if op.kind in (OpKind.GRAD_NORM, OpKind.D2H) else ()  # these two read at once: neither is the last
    for ref in op.reads:
        if ref.value.startswith(("W.", "off.", "back.")) and not ref.persistent:
            if op is [o for o in graph.ops if any(r.value == ref.value for r in o.reads)][-1]:
                slots.append(ref)
        elif ref.value[:2] in ("G.", "R.") and ref.chunk is not None and ref.value not in shared and not ref.rows:
            chunks.append(ref)
    return slots, chunks
