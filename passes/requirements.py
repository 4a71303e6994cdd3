"""What must be ordered before what, derived from reads, writes and places alone: the verifier's own derivation.

Two laws cover everything, within a step, between steps and between ranks:

- a read comes after the writes of the very bytes and version that it reads (`flow`);
- bytes are overwritten only after everything that still reads or writes what they held (`overwrite`).

Edges play no part here. :mod:`slidedp.passes.verify` tests by reachability whether they imply each requirement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from slidedp.compiler.ops import Op, OpGraph, Ref, RowSet
from slidedp.compiler.text import print_ref

EXTERNAL = ("batch",)
"""Values that come from outside the step."""

Touch = tuple[int, int, int]
"""(instance, lo, hi): elements of one rank's copy of a value, or, of a shared value, of the only copy there is (0)."""

Key = tuple[object, ...]
"""What the touches of a ref depend on: layers repeat, so answers are remembered under it."""


@dataclass(frozen=True, slots=True)
class Access:
    """One op's read or write of one ref."""

    op: Op
    ref: Ref
    is_write: bool

    def __str__(self) -> str:
        return f"{'writes' if self.is_write else 'reads'} {print_ref(self.ref)}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """`first`, `distance` steps earlier, on this rank or (`from_other`) on every other one, ends before `then` starts."""

    first: Access
    then: Access
    distance: int
    from_other: bool

    def __str__(self) -> str:
        """What breaks without it, in words."""
        step = " of the step before" if self.distance else ""
        rank = " on the other ranks" if self.from_other else ""
        op, other = self.then.op.name, f"{self.first.op.name}{step}{rank}"
        if not self.then.is_write:
            harm = "it may see the values of a step earlier" if self.distance else "it may see bytes that have not arrived"
            return f"{op} {self.then} but does not wait for {other}, which writes them: {harm}"
        what = print_ref(self.then.ref)
        harm = f"its late write may destroy {what}" if self.first.is_write else f"it may find {what} there instead"
        return f"{op} {self.then} but does not wait for {other}, which {self.first} in the same place: {harm}"


def slot_name(ref: Ref) -> str:
    """The place of a ref in one spelling: the only slot of a pool may go by the pool's name."""
    location = ref.location
    return location if not ref.place or location.endswith("]") else f"{location}[0]"


class Memory:
    """Who touches which elements of which copy of a value: computed for all ranks of the graph, remembered by shape."""

    def __init__(self, graph: OpGraph) -> None:
        self.world_size = graph.world_size
        self._groups = graph.group_by_name
        self._numbers: dict[int, tuple[Ref, int]] = {}  # by identity, which lasts as long as the ref that is kept beside it
        self._known: dict[Key, int] = {}
        self._touches: list[tuple[tuple[Touch, ...], ...]] = []  # by number
        self._overlaps: dict[tuple[int, int], tuple[bool, bool]] = {}
        self._missing: dict[tuple[tuple[int, ...], int], tuple[Touch, ...]] = {}

    def number(self, ref: Ref) -> int:
        """Equal for refs that touch the same elements of the same copies."""
        if (known := self._numbers.get(id(ref))) is not None:
            return known[1]
        g = self._groups.get(ref.group)
        size = (g.numel, g.num_trainable) if g else None
        number = self._known.setdefault((size, ref.chunk, ref.scope, ref.shared, ref.peers), len(self._touches))
        if number == len(self._touches):
            self._touches.append(tuple(self._compute(ref, rank) for rank in range(self.world_size)))
        self._numbers[id(ref)] = ref, number
        return number

    def _compute(self, ref: Ref, rank: int) -> tuple[Touch, ...]:
        instances = range(self.world_size) if ref.peers else (0 if ref.shared else rank,)
        ranges = ref.ranges(self._groups.get(ref.group), self.world_size, rank)
        return tuple((i, lo, hi) for i in instances for lo, hi in ranges)

    def overlap(self, a: Ref, b: Ref, distance: int = 0) -> tuple[bool, bool]:
        """(some rank's `a` meets its own `b`, some rank's `a` meets another rank's `b`), for two refs of one value.

        `distance`: from one step's to another's, which has touched rows of its own.
        """
        if distance == 0 and a.rows and a.disjoint(b):
            return False, False
        numbers = self.number(a), self.number(b)
        if (known := self._overlaps.get(numbers)) is not None:
            return known
        of_a, of_b = (self._touches[number] for number in numbers)
        ranks = range(self.world_size)
        own = any(_meet(of_a[r], of_b[r]) for r in ranks)
        cross = any(_meet(of_a[q], of_b[r]) for q in ranks for r in ranks if q != r)
        self._overlaps[numbers] = own, cross
        return own, cross

    def missing(self, read: Ref, writes: list[Ref]) -> tuple[Touch, ...]:
        """What some rank reads and no rank's `writes` write: of all rows, or of the touched or untouched ones."""
        if read.rows is RowSet.ALL and any(w.rows for w in writes):
            halves = (replace(read, rows=rows) for rows in (RowSet.TOUCHED, RowSet.UNTOUCHED))
            return tuple(dict.fromkeys(hole for half in halves for hole in self.missing(half, writes)))
        writes = [w for w in writes if not w.disjoint(read)]
        numbers = tuple(map(self.number, writes)), self.number(read)
        if numbers not in self._missing:
            written = sorted({t for number in numbers[0] for touches in self._touches[number] for t in touches})
            wanted = {t for touches in self._touches[numbers[1]] for t in touches}
            self._missing[numbers] = tuple(sorted(hole for want in wanted for hole in _subtract(want, written)))
        return self._missing[numbers]


def _meet(a: tuple[Touch, ...], b: tuple[Touch, ...]) -> bool:
    return any(i == j and lo < top and bottom < hi for i, lo, hi in a for j, bottom, top in b)


def _subtract(want: Touch, written: list[Touch]) -> Iterator[Touch]:
    """The parts of `want` that no entry of `written` (sorted) covers."""
    instance, at, end = want
    for i, lo, hi in written:
        if i != instance or hi <= at or lo >= end:
            continue
        if lo > at:
            yield instance, at, lo
        at = max(at, hi)
    if at < end:
        yield instance, at, end


def accesses(graph: OpGraph) -> list[Access]:
    """Every access, in text order; an op's reads before its writes."""
    return [a for op in graph.ops for a in
            (*(Access(op, ref, False) for ref in op.reads), *(Access(op, ref, True) for ref in op.writes))]


def written_as(ref: Ref) -> tuple[int, int]:
    """(version, distance) of the write that a read of `ref` sees: the start of persistent state is the last step's end."""
    return (1, 1) if ref.persistent and ref.version == 0 else (ref.version, 0)


def requirements(graph: OpGraph, memory: Memory | None = None) -> Iterator[Requirement]:
    """Every ordering that the graph's reads, writes and places ask for. The graph must be well formed."""
    memory = Memory(graph) if memory is None else memory
    all_accesses = accesses(graph)
    yield from _flow(all_accesses, memory)
    yield from _overwrite(all_accesses, memory)


def _flow(all_accesses: list[Access], memory: Memory) -> Iterator[Requirement]:
    """Read after write. A collective needs its peers' inputs too; since it enters on all ranks together, what holds for
    this rank's inputs holds for theirs.
    """
    writers: dict[tuple[str, int], list[Access]] = defaultdict(list)
    for a in all_accesses:
        if a.is_write:
            writers[a.ref.value, a.ref.version].append(a)
    for read in all_accesses:
        if read.is_write:
            continue
        version, distance = written_as(read.ref)
        for write in writers.get((read.ref.value, version), ()):
            own, cross = memory.overlap(write.ref, read.ref, distance)
            if own:
                yield Requirement(write, read, distance, False)
            if cross:
                yield Requirement(write, read, distance, True)


def _overwrite(all_accesses: list[Access], memory: Memory) -> Iterator[Requirement]:
    """Overwrite after use. A place holds its *residents* in turn, in the order of their first writes, and starts over in
    the next step. A resident is a value with all its versions, or one chunk of it where the slot holds only that.
    """
    places: dict[str, dict[Key, list[Access]]] = defaultdict(dict)
    written = [a for a in all_accesses if a.is_write and (a.ref.place or a.ref.group)]  # all else is allocated afresh
    for a in written:
        places[slot_name(a.ref)].setdefault(_resident(a.ref), [])
    for a in all_accesses:
        resident = places.get(slot_name(a.ref), {}).get(_resident(a.ref))
        if resident is not None:
            resident.append(a)
    for residents in places.values():
        in_turn = list(residents.values())
        for i, resident in enumerate(in_turn):
            yield from _within(resident, len(in_turn) == 1, memory)
            if len(in_turn) > 1:
                following = in_turn[(i + 1) % len(in_turn)]
                yield from _between(resident, following, int(i + 1 == len(in_turn)), memory)


def _resident(ref: Ref) -> Key:
    value, version, chunk = ref.occupant
    return value, 0 if ref.persistent else version, chunk


def _within(resident: list[Access], alone: bool, memory: Memory) -> Iterator[Requirement]:
    """Later versions, and if nothing else moves in, the next step's: only the same elements get into each other's way."""
    writes = [a for a in resident if a.is_write]
    for use in resident:
        for write in writes:
            distance = 0 if use.ref.version < write.ref.version else 1
            if distance and not alone:
                continue
            own, cross = memory.overlap(use.ref, write.ref, distance)
            if own and (distance or use.op is not write.op):  # an op may update in place what it reads
                yield Requirement(use, write, distance, False)
            if cross:
                yield Requirement(use, write, distance, True)


def _between(resident: list[Access], following: list[Access], distance: int, memory: Memory) -> Iterator[Requirement]:
    """Another value moves in: everything that was there is lost."""
    writes = [a for a in following if a.is_write]
    for use in resident:
        for write in writes:
            yield Requirement(use, write, distance, False)
            if memory.world_size > 1 and (use.ref.shared or use.ref.peers or write.ref.shared):
                yield Requirement(use, write, distance, True)
