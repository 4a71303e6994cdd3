"""HBM of one GPU over a step: what holds how many bytes when, from the ops' reads and writes and the times at which they run.

Slots are allocated once and count in full all the time (`reserved`), or only while something is in them (`occupied`).
Activations come and go with the ops. What is counted, and under which name, is the same as in :func:`estimate_memory`, and so
is the peak, to the byte: a boundary from the op that writes it to the last that reads its gradient, which takes its place;
what a layer keeps for its backward while there is such a value; what the epilogue and the prologue's backward need while they
run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.footprint.memory import update_workspace_bytes
from slidedp.compiler.footprint.moments import BOUNDARIES, HEAD, RETAINED, RUNNING, epilogue_bytes, kept_bytes
from slidedp.compiler.layergraph import LayerGraph, Stage
from slidedp.compiler.ops import OpGraph, OpKind, Slot, in_lane, split_lane
from slidedp.compiler.simulation.simulate import Timeline
from slidedp.compiler.simulation.unroll import Instance, num_measured_steps, phase, unroll

SLOT_USES = {
    "w": "weight slots", "g": "gradient slots", "held": "held weights", "gheld": "held gradients", "state": "resident state",
    "red": "reduce slots", "rheld": "waiting gradients", "sum": "gradient sums",
    "act": "activations on their way", "h": "activations on their way", "back": "activations on their way",
}  # fmt: skip
"""Use, as in a MemoryReport, by the first part of a slot's name; any other slot is a use of its own, by its name."""

WORKSPACE = "update workspace"


@dataclass(frozen=True)
class MemoryCurve:
    """`num_bytes[use][i]` bytes from `times_us[i]` until the next time, the last until `end_us`. The first time is 0."""

    times_us: tuple[int, ...]
    end_us: int
    num_bytes: dict[str, tuple[int, ...]]

    @cached_property
    def total(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.num_bytes.values(), strict=True))) if self.num_bytes else (0,) * len(self.times_us)

    @property
    def peak_bytes(self) -> int:
        return max(self.total)

    @property
    def peak_us(self) -> int:
        """When the peak is first reached."""
        return self.times_us[self.total.index(self.peak_bytes)]

    def at(self, time_us: int) -> dict[str, int]:
        """Bytes by use at `time_us`, 0 or later."""
        i = bisect_right(self.times_us, time_us) - 1
        return {use: values[i] for use, values in self.num_bytes.items()}

    def highest_in(self, lo_us: int, hi_us: int) -> dict[str, int]:
        """Bytes by use at the moment of the highest total from `lo_us` up to `hi_us`: what one column of a drawing shows."""
        lo = bisect_right(self.times_us, lo_us) - 1
        hi = max(lo + 1, bisect_right(self.times_us, hi_us - 1))
        i = max(range(lo, hi), key=lambda k: self.total[k])
        return {use: values[i] for use, values in self.num_bytes.items()}


@dataclass(frozen=True, slots=True)
class Life:
    """`num_bytes` that are there, in every step, from the start of the first of `ops` to the end of the last."""

    use: str
    num_bytes: int
    ops: tuple[str, ...]


def memory_over_time(
    layers: LayerGraph, decisions: Decisions, graph: OpGraph, timeline: Timeline, *, occupied: bool = False
) -> MemoryCurve:
    """HBM over the steps of a measured `timeline`, or over one predicted period, from the start of its compute.

    `graph`: what `decisions` lower to. The times are those of `picture` (unroll.py). `occupied`: slots count only while something
    is in them.
    """
    if num_measured_steps(timeline):
        end = max((s.end_us for s in timeline.spans), default=0)
        return memory_curve(layers, decisions, graph, unroll(timeline), 0, end, occupied=occupied)
    origin, back, ahead = phase(timeline)
    lo, hi = origin + back * timeline.step_us, origin + (back + 1) * timeline.step_us
    return memory_curve(layers, decisions, graph, unroll(timeline, back + 1 + ahead), lo, hi, occupied=occupied)


def memory_curve(
    layers: LayerGraph, decisions: Decisions, graph: OpGraph, instances: Iterable[Instance], lo_us: int, hi_us: int, *,
    occupied: bool = False,
) -> MemoryCurve:  # fmt: skip
    """HBM between `lo_us`, which becomes time 0, and `hi_us`. `instances`: of all steps that reach into it."""
    steps: dict[int, dict[str, Instance]] = defaultdict(dict)
    for i in instances:
        steps[i.step][i.op] = i
    changes: dict[str, dict[int, int]] = {use: defaultdict(int) for use in uses(graph)}
    for life in (*activation_lives(layers, decisions, graph), *(slot_lives(graph) if occupied else ())):
        for ran in steps.values():
            during = [ran[op] for op in life.ops if op in ran]
            start = max(min((i.start_us for i in during), default=hi_us), lo_us)
            end = min(max((i.end_us for i in during), default=lo_us), hi_us)
            if start < end:
                changes[life.use][start - lo_us] += life.num_bytes
                changes[life.use][end - lo_us] -= life.num_bytes
    if WORKSPACE in changes:
        changes[WORKSPACE][0] += update_workspace_bytes(layers, decisions)
    if not occupied:
        for slot in device_slots(graph):
            changes[slot_use(slot)][0] += slot.count * slot.bytes
    return integrate(changes, hi_us - lo_us)


def integrate(changes: Mapping[str, Mapping[int, int]], end_us: int) -> MemoryCurve:
    """Sums of `changes` (bytes by use and time) up to each time at which one of them is not 0."""
    times = sorted({0, *(t for change in changes.values() for t, size in change.items() if size and t < end_us)})
    series = {use: tuple(accumulate(change.get(t, 0) for t in times)) for use, change in changes.items()}
    return MemoryCurve(tuple(times), end_us, series)


def uses(graph: OpGraph) -> list[str]:
    """What a curve counts, in the order in which it is stacked: what is always there first."""
    workspace = [WORKSPACE] * any(op.kind is OpKind.GPU_UPDATE for op in graph.ops)
    return list(dict.fromkeys([*map(slot_use, device_slots(graph)), *workspace, BOUNDARIES, RETAINED, RUNNING, HEAD]))


def device_slots(graph: OpGraph) -> tuple[Slot, ...]:
    return tuple(slot for slot in graph.slots if slot.memory != "pinned")


def slot_use(slot: Slot) -> str:
    return SLOT_USES.get(slot.name.partition(".")[0], slot.name)


def slot_lives(graph: OpGraph) -> Iterator[Life]:
    """Each occupant of each slot on the device, from the start of its first write to the end of its last use."""
    slots = {slot.name: slot for slot in device_slots(graph)}
    accesses: dict[tuple[str, object], list[str]] = defaultdict(list)
    for op in graph.ops:
        for ref in (*op.reads, *op.writes):
            if ref.place.partition("[")[0] in slots:
                accesses[ref.place, ref.occupant].append(op.name)
    for (place, _), ops in accesses.items():
        slot = slots[place.partition("[")[0]]
        yield Life(slot_use(slot), slot.bytes, tuple(ops))


def activation_lives(layers: LayerGraph, decisions: Decisions, graph: OpGraph) -> Iterator[Life]:
    """Values of the step that lie outside the slots. Whatever else an op needs while it runs is in no one's estimate."""
    accesses: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for op in graph.ops:
        for ref in (*op.reads, *op.writes):
            if split_lane(ref.value.partition(".")[2])[0] in layers.stage_by_name and not ref.place:
                accesses[ref.value][ref.version].append(op.name)
    for lane, stages in enumerate(layers.each_lane):
        for stage in stages:
            name = in_lane(stage.name, lane, layers.num_lanes)
            backward = [f"bwd.{name}"] * (f"bwd.{name}" in graph.index)
            yield from kept_lives(stage, name, decisions, graph, accesses, backward)
            if backward and stage.workspace_bytes:
                yield Life(RUNNING, stage.workspace_bytes, tuple(backward))
            boundary = list(accesses[f"h.{name}"].values())
            for ops in boundary[:-1]:  # it leaves the device and comes back as a later version
                yield Life(BOUNDARIES, stage.boundary_bytes, tuple(ops))
            gradient = accesses[f"d.{name}"][0]
            if boundary:
                yield Life(BOUNDARIES, stage.boundary_bytes, (*boundary[-1], *backward, *gradient))
            elif gradient:  # of a boundary that has places of its own
                yield Life(BOUNDARIES, stage.boundary_bytes, tuple(gradient))
    yield from end_lives(layers, decisions, graph)


def end_lives(layers: LayerGraph, decisions: Decisions, graph: OpGraph) -> Iterator[Life]:
    """What head and loss, and the prologue's backward, need while they run."""
    for op in graph.ops:
        prologue, *_, epilogue = layers.each_lane[op.lane if op.lane < layers.num_lanes else 0]
        if op.kind is OpKind.EPILOGUE:
            saved, measured = epilogue_bytes(epilogue, decisions)
            yield Life(RUNNING, saved, (op.name,))
            yield Life(HEAD, measured, (op.name,))
        elif op.kind is OpKind.BACKWARD and op.layer == prologue.name:
            yield Life(RUNNING, prologue.activation_bytes, (op.name,))


def kept_lives(
    stage: Stage, name: str, decisions: Decisions, graph: OpGraph, accesses: Mapping[str, Mapping[int, list[str]]],
    backward: list[str],
) -> Iterator[Life]:  # fmt: skip
    """What the layer's forward leaves for its backward, and what its recompute adds to that. `name`: with the lane."""
    for ops in accesses.get(f"act.{name}", {}).values():
        from_forward = any(graph[name].kind is OpKind.FORWARD for name in ops)
        selected = f"sel.{name}" in accesses
        added = stage.activation_bytes - (kept_bytes(stage, decisions) if selected else 0)
        yield Life(RETAINED if from_forward else RUNNING, added, tuple(ops))
        if selected:
            yield Life(RETAINED, kept_bytes(stage, decisions), (*accesses[f"sel.{name}"][0], *backward))
