"""The verifier: is a graph sound, whatever the timing of its ops? Reads, writes and places decide; edges only serve.

It runs after the pipeline and on every plan that is loaded. CHECKS is the specification: small checks, each with one
sentence of why. What must be ordered is derived in :mod:`slidedp.passes.requirements`, and tested by reachability
(:mod:`slidedp.compiler.reach`): never by schedule times, and never by an edge's reason. Delete an edge that the others do
not imply, and a requirement fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from slidedp.compiler.ops import OpGraph, OpKind, RowSet, Slot
from slidedp.compiler.reach import MAX_DISTANCE, Reach
from slidedp.compiler.text import print_ref
from slidedp.compiler.units import format_bytes
from slidedp.passes.requirements import EXTERNAL, Access, Memory, accesses, requirements, slot_name, written_as

MAX_LISTED = 12
"""Violations that an error message spells out."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that can go wrong. `rule`: name of the check; `message`: what breaks, in words."""

    rule: str
    message: str
    ops: tuple[str, ...] = ()
    value: str = ""
    place: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.message}"


class VerifyError(ValueError):
    """The graph is not sound. `violations` lists all that was found."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        listed = [f"  {v}" for v in violations[:MAX_LISTED]]
        if len(violations) > MAX_LISTED:
            listed.append(f"  and {len(violations) - MAX_LISTED} more")
        super().__init__("\n".join([f"the graph is not sound ({len(violations)} violations):", *listed]))
        self.violations = violations


@dataclass(frozen=True)
class Subject:
    """What the checks look at."""

    graph: OpGraph
    hbm_budget: int | None
    pinned_budget: int | None
    accesses: list[Access]
    memory: Memory
    writers: dict[tuple[str, int], list[Access]] = field(default_factory=dict)
    top_version: dict[str, int] = field(default_factory=dict)

    @cached_property
    def reach(self) -> Reach:
        """Of a graph whose form is sound."""
        return Reach(self.graph)

    @staticmethod
    def of(graph: OpGraph, hbm_budget: int | None, pinned_budget: int | None) -> Subject:
        s = Subject(graph, hbm_budget, pinned_budget, accesses(graph), Memory(graph))
        for a in s.accesses:
            if a.is_write:
                s.writers.setdefault((a.ref.value, a.ref.version), []).append(a)
                s.top_version[a.ref.value] = max(a.ref.version, s.top_version.get(a.ref.value, 0))
        return s


Found = Iterator[Violation]


# Form: without it, the other checks cannot even be asked


def check_names(s: Subject) -> Found:
    """Edges and streams refer to ops by name, so a name stands for one op."""
    seen = set()
    for op in s.graph.ops:
        if op.name in seen:
            yield Violation("names", f"{op.name} stands twice in the graph", (op.name,))
        seen.add(op.name)


def check_edges(s: Subject) -> Found:
    """An edge to nowhere orders nothing; the executor keeps the events of one step back."""
    for e in s.graph.edges:
        for name in (e.src, e.dst):
            if name not in s.graph.index:
                yield Violation("edges", f"edge {e.src} -> {e.dst}: there is no op {name}", (e.src, e.dst))
        if not 0 <= e.distance <= MAX_DISTANCE:
            yield Violation("edges", f"edge {e.src} -> {e.dst}: distance {e.distance}, only 0 and 1 exist", (e.src, e.dst))


def check_chunks(s: Subject) -> Found:
    """A chunk is a range of its group's layout: the group and that many chunks of it must exist."""
    for a in s.accesses:
        group = s.graph.group_by_name.get(a.ref.group)
        if a.ref.group and group is None:
            yield Violation("chunks", f"{a.op.name} {a}: no group {a.ref.group}", (a.op.name,), a.ref.value)
        elif a.ref.chunk and group is None:
            yield Violation("chunks", f"{a.op.name} {a}: a value without a group has no chunks", (a.op.name,), a.ref.value)
        elif a.ref.chunk and group:
            try:
                a.ref.chunk.bounds(group, s.graph.world_size)
            except IndexError:
                message = f"{a.op.name} {a}: group {group.name} does not have that many chunks"
                yield Violation("chunks", message, (a.op.name,), a.ref.value)


def check_places(s: Subject) -> Found:
    """A place is a declared slot, or the bytes have nowhere to be."""
    pools = {slot.name: slot for slot in s.graph.slots}
    for a in s.accesses:
        if not a.ref.place:
            continue
        pool, _, index = slot_name(a.ref).removesuffix("]").rpartition("[")
        if pool not in pools:
            yield Violation("places", f"{a.op.name} {a}: no slots {pool} are declared", (a.op.name,), a.ref.value, a.ref.place)
        elif not int(index) < pools[pool].count or (pools[pool].count > 1 and not a.ref.place.endswith("]")):
            message = f"{a.op.name} {a}: {pool} has slots 0 to {pools[pool].count - 1}"
            yield Violation("places", message, (a.op.name,), a.ref.value, a.ref.place)


def check_text_order(s: Subject) -> Found:
    """Ops are issued in text order, so an op stands behind what it waits for in its own step."""
    for e in s.graph.edges:
        if e.distance == 0 and s.graph.index[e.src] > s.graph.index[e.dst]:
            yield Violation("text_order", f"{e.dst} stands before {e.src}, for which it waits", (e.src, e.dst))


# Meaning


def check_versions(s: Subject) -> Found:
    """Versions count up by one, and state that outlives the step makes exactly one: the next step's start."""
    for value, version in s.writers:
        ops = tuple(a.op.name for a in s.writers[value, version])
        persistent = s.writers[value, version][0].ref.persistent
        if persistent and version != 1:
            yield Violation("versions", f"{ops[0]} writes {value}@{version}; a step makes @1 of @0", ops, value)
        elif version > 1 and (value, version - 1) not in s.writers:
            yield Violation("versions", f"{ops[0]} writes {value}@{version}, but nothing writes @{version - 1}", ops, value)


def check_one_writer(s: Subject) -> Found:
    """SSA: of two writers of the same elements of a version, which one wins would be a matter of timing."""
    for (value, version), writes in s.writers.items():
        for i, a in enumerate(writes):
            for b in writes[i:]:
                own, cross = s.memory.overlap(a.ref, b.ref)
                if (own and a is not b) or cross:
                    who = f"{a.op.name} and {b.op.name}" if a is not b else f"{a.op.name} of several ranks"
                    message = f"{who} write the same elements of {value}@{version}"
                    yield Violation("one_writer", message, (a.op.name, b.op.name), value, a.ref.location)


def check_covered(s: Subject) -> Found:
    """Bytes are conserved over chunks: every element that is read has been written, on this rank or a peer."""
    for a in s.accesses:
        if a.is_write or a.ref.value.partition(".")[0] in EXTERNAL:
            continue
        version, distance = written_as(a.ref)
        writes = [w.ref for w in s.writers.get((a.ref.value, version), ())]
        holes = s.memory.missing(a.ref, writes)
        if holes and distance:  # what nobody updates stays as it was: whole groups, and parameters that are frozen
            updated = any((f"{head}.{a.ref.group}", 1) in s.writers for head in ("P", "S"))
            trainable = s.graph.group_by_name[a.ref.group].num_trainable if updated else 0
            holes = tuple(hole for hole in holes if hole[1] < trainable)
        if holes:
            _, lo, hi = holes[0]
            what = f"elements [{lo}, {hi}) of " if a.ref.group else ""
            message = f"{a.op.name} {a}, but nothing writes {what}{a.ref.value}@{version}"
            yield Violation("covered", message, (a.op.name,), a.ref.value, a.ref.location)


def check_same_place(s: Subject) -> Found:
    """A read looks where the write put it; a staging or reduce slot starts with its chunk, so the chunks must be equal."""
    for a in s.accesses:
        if a.is_write:
            continue
        here = slot_name(a.ref), a.ref.occupant[2]
        for w in s.writers.get((a.ref.value, written_as(a.ref)[0]), ()):
            if (slot_name(w.ref), w.ref.occupant[2]) != here and any(s.memory.overlap(w.ref, a.ref)):
                message = f"{a.op.name} {a}, but {w.op.name} {w}: not the same place"
                yield Violation("same_place", message, (a.op.name, w.op.name), a.ref.value, a.ref.location)


def check_last_version(s: Subject) -> Found:
    """Whatever consumes a gradient takes all contributions: an update after the first of two tied gradients loses one, but in
    the rows that the prologue, whose contribution is the last, does not touch.
    """
    for a in s.accesses:
        top = s.top_version.get(a.ref.value, 0)
        if a.is_write or a.ref.persistent or a.ref.version >= top or a.ref.rows is RowSet.UNTOUCHED:
            continue
        if not any(w.value == a.ref.value and w.version == a.ref.version + 1 for w in a.op.writes):
            late = s.writers[a.ref.value, top][0].op.name
            message = f"{a.op.name} takes {print_ref(a.ref)} before {late} has added its part ({a.ref.value}@{top})"
            yield Violation("last_version", message, (a.op.name, late), a.ref.value, a.ref.location)


def check_ordered(s: Subject) -> Found:
    """Timing decides nothing: every read waits for its writers, and no byte is overwritten while it is in use."""
    reach, seen = s.reach, set()
    for r in requirements(s.graph, s.memory):
        key = (r.first.op.name, r.then.op.name, r.distance, r.from_other)
        if key in seen:
            continue
        seen.add(key)
        if not reach.precedes(*key):
            yield Violation("ordered", str(r), key[:2], r.then.ref.value, slot_name(r.then.ref))


def check_fits(s: Subject) -> Found:
    """A copy's bytes tell the size of an element, and with it whether what it reads or writes fits the slot."""
    pools = {slot.name: slot for slot in s.graph.slots}
    for a in s.accesses:
        group = s.graph.group_by_name.get(a.ref.group)
        if a.op.kind in (OpKind.ACT_OFFLOAD, OpKind.ACT_RELOAD) and a.op.bytes > pools[slot_name(a.ref).rpartition("[")[0]].bytes:
            message = f"{a.op.name} {a}: {format_bytes(a.op.bytes)}, more than the slot has"
            yield Violation("fits", message, (a.op.name,), a.ref.value, a.ref.place)
        if a.op.kind not in (OpKind.H2D, OpKind.D2H) or not (a.op.bytes and a.ref.place and group):
            continue
        copied = sum(hi - lo for lo, hi in a.ref.ranges(group, s.graph.world_size, 0))
        held = copied if a.ref.occupant[2] else group.num_trainable if a.ref.value.startswith("G.") else group.numel
        slot = pools[slot_name(a.ref).rpartition("[")[0]]
        if copied and held * a.op.bytes > slot.bytes * copied:
            need = format_bytes(-(-held * a.op.bytes // copied))
            message = f"{a.op.name} {a}: {a.ref.value} takes {need}, a slot of {slot.name} has {format_bytes(slot.bytes)}"
            yield Violation("fits", message, (a.op.name,), a.ref.value, a.ref.place)


def check_budgets(s: Subject) -> Found:
    """Slots are allocated once, for good: their sum is the prefix that counts."""
    for memory, budget in (("hbm", s.hbm_budget), ("pinned", s.pinned_budget)):
        kinds = ("hbm", "allocator") if memory == "hbm" else (memory,)
        slots = [slot for slot in s.graph.slots if slot.memory in kinds]
        need = sum(slot.count * slot.bytes for slot in slots)
        if budget is not None and need > budget:
            parts = ", ".join(f"{_size(slot)}" for slot in sorted(slots, key=lambda x: -x.count * x.bytes)[:4])
            message = f"slots need {format_bytes(need)}, {memory} budget {format_bytes(budget)}; largest: {parts}"
            yield Violation("budgets", message, place=memory)


def _size(slot: Slot) -> str:
    return f"{slot.name} {slot.count} x {format_bytes(slot.bytes)}"


FORM: tuple[Callable[[Subject], Found], ...] = (check_names, check_edges, check_chunks, check_places)
CHECKS: tuple[Callable[[Subject], Found], ...] = (
    check_text_order,
    check_versions,
    check_one_writer,
    check_covered,
    check_same_place,
    check_last_version,
    check_ordered,
    check_fits,
    check_budgets,
)


def check(graph: OpGraph, *, hbm_budget: int | None = None, pinned_budget: int | None = None) -> tuple[Violation, ...]:
    """Everything that is wrong with `graph`; () if it is sound. Budgets in bytes, of one rank. Seconds for 8000 ops.

    If the form is broken, or ops wait for one another, only that is reported: the rest cannot be asked.
    """
    subject = Subject.of(graph, hbm_budget, pinned_budget)
    if broken := [v for find in FORM for v in find(subject)]:
        return tuple(broken)
    if cycle := subject.reach.cycle():
        return (Violation("acyclic", f"each waits for the one before it: {' -> '.join([*cycle, cycle[0]])}", tuple(cycle)),)
    return tuple(v for find in CHECKS for v in find(subject))


def verify(graph: OpGraph, *, hbm_budget: int | None = None, pinned_budget: int | None = None) -> None:
    """Raise :class:`VerifyError` with everything that :func:`check` finds. Budgets in bytes, of one rank."""
    if violations := check(graph, hbm_budget=hbm_budget, pinned_budget=pinned_budget):
        raise VerifyError(violations)
