"""The model as the passes see it: stages in execution order, and parameter groups that move as one unit.

A *stage* is what the GPU runs without a weight arriving in between: the prologue (embedding, masks, rotary tables), one
per layer, and the epilogue (final norm, head, loss). A *group* is a set of parameters used by the same stages; it has
one flat buffer per place (master, moments, shadow, weight slot, gradient slot), the same layout in each.

Everything here is plain data: a LayerGraph can be written into a plan file and read back without the model. What the
executor runs (torch.fx graph modules) travels beside it, in :class:`slidedp.compiler.tracing.tracer.Trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise

ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes an element, of the dtypes that weights and gradients may have on the device."""

ALIGN = 64
"""Elements: every parameter starts, and every chunk and shard is cut, at a multiple of this."""

ROW_UNIT = 64
"""Chunks of more tokens than this have a multiple of it, for the sake of the matrix kernels."""

STORAGE_ALIGN = 512
"""Bytes: what activations take is counted, and packed for a copy, in multiples of this; CUDA's allocator rounds up to it."""


class StageKind(StrEnum):
    PROLOGUE = "prologue"
    LAYER = "layer"
    EPILOGUE = "epilogue"


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter inside its group's flat layout. `names`: every name it goes by in the model (tied weights have several)."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    trainable: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


@dataclass(frozen=True)
class Group:
    """Parameters used by the same stages. Trainable ones come first: gradients, moments and updates cover `[0, num_trainable)`.

    `numel` and `num_trainable` are element counts of the flat layout, padded so that any number of ranks cuts them evenly
    at ALIGN (multiples of ``ALIGN * world_size``). `params` may be empty in a graph read back from a plan file.
    """

    name: str
    numel: int
    num_trainable: int
    uses: tuple[str, ...]
    params: tuple[Param, ...] = ()

    @property
    def trainable(self) -> bool:
        return self.num_trainable > 0


@dataclass(frozen=True, slots=True)
class LossHead:
    """What the epilogue needs while it runs, by the number of chunks in which it makes the logits ``[rows, vocab]``.

    `peaks`: (chunks, bytes) of what is alive at most besides its inputs and weights, ascending in chunks; the first are those
    of all logits at once. `whole`: why there can be no more than that; '' if there can.
    """

    rows: int
    vocab: int
    peaks: tuple[tuple[int, int], ...]
    whole: str = ""

    @property
    def logits_bytes(self) -> int:
        """All logits in FP32, once."""
        return 4 * self.rows * self.vocab

    def peak_bytes(self, num_chunks: int) -> int:
        """Exact where it was measured. Between, a chord: the peak is a maximum of linear functions of the rows of a chunk."""
        (_, whole), *cut = self.peaks
        if num_chunks == 1 or not cut:
            return whole
        below = [(n, size) for n, size in cut if n <= num_chunks]
        above = [(n, size) for n, size in cut if n > num_chunks]
        if not below or not above:
            return below[-1][1] if below else above[0][1]
        (few, most), (many, least) = below[-1], above[0]
        rows, smallest, largest = (chunk_rows(self.rows, n) for n in (num_chunks, many, few))
        return least + (most - least) * (rows - smallest) // max(1, largest - smallest)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table of which the prologue reads some rows, named by the batch, and nothing else: all of a group that trains.

    `keys`: the batch entries that hold the rows' indices, `num_ids` of them in this rank's batch; `num_rows`: of the table.
    """

    group: str
    keys: tuple[str, ...]
    num_rows: int
    num_ids: int


@dataclass(frozen=True)
class Stage:
    """One unit of compute. `groups`: the parameter groups it reads, its own first.

    `boundary_bytes`: its differentiable inputs, kept until its backward. `activation_bytes`: what a forward that keeps
    everything holds beside its inputs: the storages of all that autograd saves, each once and rounded up to STORAGE_ALIGN.
    `flops`: one forward. Stages of equal `kind_key` (module class and shapes) cost the same.
    """

    name: str
    kind: StageKind
    groups: tuple[str, ...]
    kind_key: str = ""
    flops: int = 0
    boundary_bytes: int = 0
    activation_bytes: int = 0
    workspace_bytes: int = 0
    """For a layer: about what its backward takes beside all of these, which is the gradient of the largest saved storage, while
    that storage is still there. Measured on an H200, Qwen3-4B, every layer recomputed, 131 072 tokens: 2.6 GiB, of which this
    accounts for 2.4.
    """
    head: LossHead | None = None
    """For the epilogue, where it was measured."""
    lookups: tuple[Lookup, ...] = ()
    """For the prologue."""


@dataclass(frozen=True)
class LayerGraph:
    """Stages in execution order (prologue, layers, epilogue), groups, and the number of ranks the layout is padded for."""

    stages: tuple[Stage, ...]
    groups: tuple[Group, ...]
    world_size: int = 1
    compute_dtype: str = "float32"
    grad_dtype: str = "float32"
    model: str = ""
    """What was traced, e.g. the class name: for messages and plan files."""
    lanes: tuple[tuple[Stage, ...], ...] = ()
    """The stages of each micro-batch of the step, in order, if there are several: `stages` then has their sums (see in_lanes)."""
    slices: int = 1
    """Pieces that each batch of the step was cut into, at most: `Decisions.slices` when this was made."""

    @cached_property
    def group_by_name(self) -> dict[str, Group]:
        return {g.name: g for g in self.groups}

    @cached_property
    def stage_by_name(self) -> dict[str, Stage]:
        return {s.name: s for s in self.stages}

    def group(self, name: str) -> Group:
        return self.group_by_name[name]

    def stage(self, name: str) -> Stage:
        return self.stage_by_name[name]

    @property
    def num_lanes(self) -> int:
        return max(len(self.lanes), 1)

    @property
    def each_lane(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages as every micro-batch has them."""
        return self.lanes or (self.stages,)

    @property
    def compute_itemsize(self) -> int:
        return ITEMSIZE[self.compute_dtype]

    @property
    def grad_itemsize(self) -> int:
        return ITEMSIZE[self.grad_dtype]

    @property
    def head(self) -> LossHead | None:
        """The epilogue's, if it was measured: that of the micro-batch with most logits."""
        return next((s.head for s in self.stages if s.head), None)

    @property
    def layers(self) -> tuple[Stage, ...]:
        return tuple(s for s in self.stages if s.kind is StageKind.LAYER)

    def streams(self, group: Group) -> bool:
        """True if `group` is delivered through the window of weight slots; the others stay in HBM for the whole step.

        Exactly the groups used by one layer and nothing else: a tied embedding, or a block used at two depths, has a
        buffer of its own, filled once a step.
        """
        return len(group.uses) == 1 and self.stage(group.uses[0]).kind is StageKind.LAYER


def in_lanes(graphs: Sequence[LayerGraph], slices: int = 1) -> LayerGraph:
    """The graph of a step over several micro-batches, each with its own, in order; of one, just that.

    Raises ValueError where they do not have the same stages and groups: a layer's weights come once for all of them.
    """
    first, *others = graphs
    for i, other in enumerate(others, 1):
        if [(s.name, s.groups) for s in other.stages] != [(s.name, s.groups) for s in first.stages]:
            raise ValueError(f"micro-batch {i} uses other layers than micro-batch 0; run them in steps of their own")
    if not others:
        return replace(first, slices=slices)
    lanes = tuple(graph.stages for graph in graphs)
    return replace(first, stages=tuple(map(_summed, zip(*lanes, strict=True))), lanes=lanes, slices=slices)


def _summed(stages: tuple[Stage, ...]) -> Stage:
    """One stage of all lanes: its sizes are their sums, its head the largest."""
    heads = [s.head for s in stages if s.head]
    return replace(
        stages[0], flops=sum(s.flops for s in stages), boundary_bytes=sum(s.boundary_bytes for s in stages),
        activation_bytes=sum(s.activation_bytes for s in stages), workspace_bytes=sum(s.workspace_bytes for s in stages),
        head=max(heads, key=lambda h: h.logits_bytes, default=None))


def recut(graph: LayerGraph, slices: int) -> LayerGraph:
    """`graph` as it would be, about, with each batch in so many slices: equal parts of its sums. As it is, if it has as many."""
    if slices == graph.slices:
        return graph
    num = max(1, graph.num_lanes // graph.slices) * slices
    if num == 1:
        return replace(graph, stages=tuple(_part(s, 1, graph.num_lanes) for s in graph.stages), lanes=(), slices=slices)
    part = replace(graph, stages=tuple(_part(s, num, graph.num_lanes) for s in graph.stages), lanes=())
    return in_lanes([part] * num, slices)


def _part(stage: Stage, num: int, heads: int) -> Stage:
    """One of `num` parts of a stage, whose head is that of one of `heads` parts."""
    return replace(
        stage, flops=stage.flops // num, boundary_bytes=-(-stage.boundary_bytes // num),
        activation_bytes=-(-stage.activation_bytes // num), workspace_bytes=-(-stage.workspace_bytes // num),
        head=stage.head and _resized(stage.head, heads, num))


def _resized(head: LossHead, before: int, after: int) -> LossHead:
    """The head of one of `before` parts of a batch as one of `after`. Where it can be cut, chunks of a part are finer chunks."""
    rows, peaks = -(-head.rows * before // after), [(n, -(-size * before // after)) for n, size in head.peaks]
    if after > before and not head.whole:
        peaks = [(n, head.peak_bytes(max(1, n * after // before))) for n, _ in head.peaks]
    return replace(head, rows=rows, peaks=tuple(peaks))


def aligned(numel: int, unit: int = ALIGN) -> int:
    """`numel` rounded up to a multiple of `unit`."""
    return -(-numel // unit) * unit


@lru_cache(maxsize=1024)  # asked for every chunk of every group, of which there are a few sizes
def cut_chunks(numel: int, num_chunks: int, world_size: int = 1) -> tuple[tuple[int, int], ...]:
    """`[lo, hi)` of each chunk of a flat buffer: near-equal, cut at multiples of ``ALIGN * world_size``.

    Fewer chunks than asked when the buffer is too small for that many; none when it is empty.
    """
    unit = ALIGN * world_size
    units = numel // unit
    num_chunks = min(num_chunks, units)
    bounds = [units * i // num_chunks * unit for i in range(num_chunks + 1)] if num_chunks else [0]
    return tuple(pairwise(bounds))


def chunk_rows(num_rows: int, num_chunks: int) -> int:
    """Tokens of the largest chunk when the logits are made in at most `num_chunks`; the last may be smaller."""
    rows = -(-num_rows // max(1, min(num_chunks, num_rows)))
    return min(aligned(rows, ROW_UNIT), num_rows) if rows > ROW_UNIT else rows


def shard(lo: int, hi: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rank's `[lo, hi)` of a chunk made by :func:`cut_chunks`: equal parts, in rank order."""
    part = (hi - lo) // world_size
    return lo + rank * part, lo + (rank + 1) * part
