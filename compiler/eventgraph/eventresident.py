"""Parts of a timed event graph that stand behind gradients on the device: updates of state in HBM, and the norm of a step.

As passes/residency.py and passes/clipping.py. On several ranks a group's gradient is reduced, each rank updates its part, and the
others' weights are gathered behind the reductions of the next group. Deferred updates, and what they wait for, come last:

    partial norms, each behind what makes a gradient   ->   norms   ->   norm (several ranks)   ->   clip
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from slidedp.compiler.decisions import StateHome
from slidedp.compiler.eventgraph.eventcosts import Chunked
from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO
from slidedp.compiler.eventgraph.eventparts import Parts, Point, Transfer
from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.residency import update_chunks


def take_norm(parts: Parts, name: str) -> None:
    """Of a gradient on one rank's GPU, behind the op that has completed it. On several ranks it is part of each chunk's sum."""
    if parts.deferred and parts.layers.world_size == 1:
        parts.norms.append(parts.run(f"grad_norm.{name}", Stream.GPU, ZERO + parts.costs.norm(parts.layers.group(name))))


@dataclass
class Piece:
    """Something in chunks with nothing to choose: the events of its start and, once it is finished, of its end."""

    parts: Parts
    name: str
    stream: Stream
    transfer: Transfer
    start: int
    end: int = -1

    @classmethod
    def of(cls, parts: Parts, name: str, stream: Stream, cost: Chunked) -> Piece:
        transfer = Transfer(None, (cost,))
        return cls(parts, name, stream, transfer, parts.start(name, stream, transfer))

    def finish(self) -> None:
        self.end = self.parts.end(self.name, self.stream, self.transfer, self.start)

    @property
    def chunk_us(self) -> int:
        return self.transfer.each[0].chunk_us

    @property
    def first(self) -> Point:
        """The end of the first chunk."""
        return Point(self.start) + self.chunk_us


@dataclass
class Resident:
    """The updates of groups whose state is in HBM, or may be. `stream`: whose time they take."""

    parts: Parts
    stream: Stream
    late: list[str] = field(default_factory=list)  # that wait for the norm
    sums: dict[str, Piece] = field(default_factory=dict)  # over the ranks
    updates: dict[str, Piece] = field(default_factory=dict)
    to_gather: str = ""  # behind the next group's sum

    def update(self, name: str, produced: Point) -> None:
        """Behind the op that has completed the gradient of `name`; deferred: only what is done at once."""
        parts, group, several = self.parts, self.parts.layers.group(name), self.parts.layers.world_size > 1
        if all(o for o in parts.options(name, "gradients")):
            return
        if not parts.stays(group):
            self.may_update(group, produced)
            return
        if parts.deferred:
            self.late.append(name)
        if several:
            cost = parts.costs.reduce_resident(group, self.num_chunks(group), parts.deferred)
            self.sums[name] = reduce = Piece.of(parts, f"{OpKind.REDUCE}.resident.{name}", Stream.COMM, cost)
            parts.wait(reduce.start, produced, f"gradient of {name}")
        if not parts.deferred:
            self.start_update(group, produced)
        if several:
            reduce.finish()
            parts.freed[name] = (Point(reduce.end),)
            parts.norms.append(Point(reduce.end))
        if not parts.deferred:
            self.finish_update(group)
        if several and not parts.deferred:
            filled, emptied = reduce, self.updates[name]
            parts.sums.fill(name, filled.transfer, emptied.transfer, (filled.start, filled.end),
                            (Point(emptied.start), Point(emptied.end)))  # fmt: skip
            self.gather()
            self.to_gather = name

    def may_update(self, group: Group, produced: Point) -> None:
        """Where the state is to be chosen: all at once, whatever the other groups choose."""
        parts, name, num = self.parts, group.name, self.num_chunks(group)
        there = parts.resident(name, 0, OFF)
        if parts.layers.world_size > 1:
            reduce, gather = parts.costs.reduce_resident(group, num, parts.deferred), parts.costs.gather_resident(group, num)
            shared = parts.resident(name, reduce.total_us + gather.total_us)
            done = parts.run(f"{OpKind.ALL_GATHER}.resident.{name}", Stream.COMM, shared)
            parts.wait(done.event, produced + there, f"gradient of {name}")
            parts.wait(self.first_reader(name), done + there, f"resident weights of {name}", 1)
        update = parts.resident(name, parts.costs.gpu_update(group, num, self.stream).total_us)
        done = parts.run(f"{OpKind.GPU_UPDATE}.{name}", self.stream, update)
        if self.stream is not Stream.GPU:
            parts.wait(done.event, produced + there, f"gradient of {name}")
            parts.wait(self.first_reader(name), done + there, f"resident weights of {name}", 1)

    def rest(self) -> None:
        """What comes at the end of a step."""
        parts = self.parts
        if parts.deferred and parts.norms:
            clip = parts.clip = self.clip()
            for name in sorted(self.late, key=self.first_reader):
                self.start_update(parts.layers.group(name), clip)
                self.finish_update(parts.layers.group(name))
                self.to_gather = name if parts.layers.world_size > 1 else ""
                self.gather()
        self.gather()

    def start_update(self, group: Group, behind: Point) -> None:
        """Behind the gradient, the first chunk of its sum, or the norm."""
        parts, name = self.parts, group.name
        cost = parts.costs.gpu_update(group, self.num_chunks(group), self.stream)
        self.updates[name] = update = Piece.of(parts, f"{OpKind.GPU_UPDATE}.{name}", self.stream, cost)
        parts.wait(update.start, behind, f"update of {name}")
        if name in self.sums:
            parts.wait(update.start, self.sums[name].first, f"sum before update of {name}")

    def finish_update(self, group: Group) -> None:
        parts, name, update = self.parts, group.name, self.updates[group.name]
        update.finish()
        if name in self.sums:
            parts.wait(update.end, Point(self.sums[name].end) + update.chunk_us, f"sum before update of {name}")
        else:
            parts.freed[name] = (*parts.freed.get(name, ()), Point(update.end))
            parts.wait(self.first_reader(name), Point(update.end), f"resident weights of {name}", 1)

    def gather(self) -> None:
        name, self.to_gather = self.to_gather, ""
        if not name:
            return
        parts, update, group = self.parts, self.updates[name], self.parts.layers.group(name)
        cost = parts.costs.gather_resident(group, self.num_chunks(group))
        gather = Piece.of(parts, f"{OpKind.ALL_GATHER}.resident.{name}", Stream.COMM, cost)
        gather.finish()
        parts.wait(gather.start, update.first, f"update before gather of {name}")
        parts.wait(gather.end, Point(update.end) + gather.chunk_us, f"update before gather of {name}")
        parts.wait(self.first_reader(name), Point(gather.end), f"resident weights of {name}", 1)

    def clip(self) -> Point:
        """When the factor for all gradients is known."""
        parts, several = self.parts, self.parts.layers.world_size > 1
        known, before = list(parts.norms), Point(-1)
        on_gpu = Stream.HOST if self.stream is Stream.GPU else Stream.UPDATE  # a copy, which takes none of compute's time
        for name, stream in (("norms", on_gpu), *([("norm", Stream.HOST)] if several else []), ("clip", Stream.HOST)):
            before = parts.run(name, stream, ZERO + parts.costs.combined_norm(name, stream))
            for point in known:
                parts.wait(before.event, point, f"gradients before {name}")
            known = [before]
        return before

    def first_reader(self, name: str) -> int:
        """The op of a step that reads the weights first."""
        stage = self.parts.layers.group(name).uses[0]
        return (self.parts.ends.get(f"fwd.{stage}") or self.parts.ends[stage]).event

    def num_chunks(self, group: Group) -> int:
        in_hbm = replace(self.parts.choices.defaults.of(group.name), state=StateHome.HBM)
        return len(update_chunks(group, in_hbm, self.parts.layers.world_size))
