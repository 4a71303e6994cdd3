"""An oracle for the verifier that knows nothing of reachability: run the graph on all ranks with hostile timing and look.

Every op starts and ends at separate moments, and any op that may start or end may do so next. Memory is modelled in units of 64
elements, each tagged with what lies there. An op must find what it expects to read both when it starts and when it ends; while
it runs, what it writes is unusable; a slot forgets its old value when a new one moves in.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection

from slidedp.compiler.ops import COLLECTIVES, Op, OpGraph, Ref

Node = tuple[int, int, int]  # op, step, rank
Cell = tuple[object, ...]
UNIT = 64


class Adversary:
    """One run of `num_steps` steps. `slow`: (op name, rank) that end as late as they can; the rest is drawn from `seed`."""

    def __init__(self, graph: OpGraph, num_steps: int = 3, slow: Collection[tuple[str, int]] = (), seed: int = 0) -> None:
        self.graph, self.num_steps, self.slow = graph, num_steps, set(slow)
        self.random = random.Random(seed)
        self.ranks = range(graph.world_size)
        self.updated = {cell[1:] for op in graph.ops for ref in op.writes if ref.persistent
                        for rank in self.ranks for cell in self.cells(ref, 0, rank)}
        self.memory: dict[Cell, Cell] = {}
        self.resident: dict[Cell, Cell] = {}
        self.waits: dict[Node, int] = {}
        self.wakes: dict[Node, list[Node]] = defaultdict(list)
        self.build_waits()

    def build_waits(self) -> None:
        into = defaultdict(list)
        for e in (*self.graph.edges, *self.graph.stream_edges()):
            into[e.dst].append(e)
        for i, op in enumerate(self.graph.ops):
            for step in range(self.num_steps):
                for rank in self.ranks:
                    joined = self.ranks if op.kind in COLLECTIVES else [rank]
                    sources = {(self.graph.index[e.src], step - e.distance, q) for e in into[op.name] if e.distance <= step
                               for r in joined for q in (self.ranks if e.all_ranks else [r])}
                    self.waits[i, step, rank] = len(sources)
                    for source in sources:
                        self.wakes[source].append((i, step, rank))

    def cells(self, ref: Ref, step: int, rank: int) -> list[Cell]:
        """(whose memory, place, unit within it, and what belongs there: value, unit of the group) of each unit touched."""
        group = self.graph.group_by_name.get(ref.group)
        fresh = not (ref.place or ref.group)
        place: object = (ref.value, step) if fresh else ref.location
        out: list[Cell] = []
        for owner in self.ranks if ref.peers else ["host" if ref.shared else rank]:
            for lo, hi in ref.ranges(group, self.graph.world_size, rank):
                units = range(lo // UNIT, -(-hi // UNIT))
                base = lo // UNIT if ref.occupant[2] else 0
                out += [(owner, place, u - base, ref.value, u) for u in units]
        return out

    def expected(self, ref: Ref, cell: Cell, step: int) -> Cell:
        value, unit = cell[3:]
        if ref.value == "batch":
            return ("initial",)
        if ref.persistent and ref.version == 0:
            return (value, unit, 1, step - 1) if step and cell[1:] in self.updated else ("initial",)
        return value, unit, ref.version, step

    def look(self, op: Op, node: Node, *, ending: bool) -> str | None:
        _, step, rank = node
        own = {cell[:3] for ref in op.writes for cell in self.cells(ref, step, rank)} if ending else set()
        for ref in op.reads:
            for cell in self.cells(ref, step, rank):
                found, want = self.memory.get(cell[:3], ("initial",)), self.expected(ref, cell, step)
                if cell[:3] not in own and found != want:
                    return f"{op.name} of step {step} on rank {rank} wants {want}, finds {found}"
        for ref in op.writes if ending else ():
            for cell in self.cells(ref, step, rank):
                if self.memory[cell[:3]] != ("busy", node):
                    return f"{op.name} of step {step} on rank {rank}: its write to {cell[:3]} is lost"
        return None

    def write(self, op: Op, node: Node, *, ending: bool) -> None:
        _, step, rank = node
        for ref in op.writes:
            for cell in self.cells(ref, step, rank):
                slot, resident = cell[:2], (ref.value, ref.occupant[2])
                if self.resident.setdefault(slot, resident) != resident:
                    self.resident[slot] = resident
                    for c in self.memory:
                        if c[:2] == slot:
                            self.memory[c] = ("gone",)
                self.memory[cell[:3]] = (*cell[3:], ref.version, step) if ending else ("busy", node)

    def misread(self) -> str | None:
        """The first thing that went wrong, or None. Raises AssertionError on deadlock."""
        todo = sorted(node for node, waits in self.waits.items() if waits == 0)
        running: list[Node] = []
        ended = 0
        while todo or running:
            quick = todo + [n for n in running if not self.is_slow(n)]
            node = self.random.choice(quick) if quick else min(running, key=lambda n: n[1])
            op = self.graph.ops[node[0]]
            starting = node in todo
            joined = [(node[0], node[1], r) for r in self.ranks] if starting and op.kind in COLLECTIVES else [node]
            for n in joined:
                if wrong := self.look(op, n, ending=not starting):
                    return wrong
            for n in joined:
                self.write(op, n, ending=not starting)
                if starting:
                    todo.remove(n)
                    running.append(n)
                    continue
                running.remove(n)
                ended += 1
                for woken in self.wakes[n]:
                    self.waits[woken] -= 1
                    if self.waits[woken] == 0:
                        todo.append(woken)
        assert ended == len(self.waits), "deadlock"
        return None

    def is_slow(self, node: Node) -> bool:
        return (self.graph.ops[node[0]].name, node[2]) in self.slow
