"""The interpreter of an OpGraph: it issues a step's ops, and has no loop over layers.

Building an :class:`Interpreter` resolves every op to a closure over the tensors that it touches (closures.py), what it waits for,
and who waits for it (graph_facts.py). A step then walks the ops in text order and submits each closure to its stream, with the
tickets of the ops that its edges name; the streams run them (streams.py). What is issued, and in which order, is what the graph
says and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpGraph, OpKind
from slidedp.executor.machine.closures import Closures
from slidedp.executor.machine.graph_facts import GraphFacts, waits
from slidedp.executor.machine.step import Step

if TYPE_CHECKING:
    from slidedp.executor.machine.machine import Machine
    from slidedp.executor.streams.tickets import Ticket


class Interpreter:
    """Runs one graph on one machine. The stages that it runs are the step's: each of its micro-batches has a runner.

    Args:
        graph: a lowered, verified OpGraph.
        layers: the LayerGraph it was lowered from.
        machine: slots, host state, streams; shared by all interpreters of a plan.
    """

    def __init__(self, graph: OpGraph, layers: LayerGraph, machine: Machine) -> None:
        self.graph, self.machine = graph, machine
        self.facts = GraphFacts.of(graph, machine.world_size)
        self.closures = Closures(graph, layers, machine, self.facts)
        self.has_run = False
        self.program = [(op, self.closures.of(op), *waits(graph, op)) for op in graph.ops]

    def run(self, step: Step, previous: Mapping[str, Ticket]) -> None:
        """Submit every op of one step. `previous`: the tickets of the step before (empty after a drain)."""
        streams, tickets, facts = self.machine.streams, step.tickets, self.facts
        updates, bound = self.machine.updates.native(step), self.closures.bound
        for op, task, same, before, across in self.program:
            awaited = [tickets[name] for name in same]
            awaited += [previous[name] for name in before if name in previous]
            expected = self.machine.expected(across, step.number) if across else ()
            if updates is not None and op.name in bound:
                ticket = updates.submit(op, *bound[op.name], awaited, expected)
            else:
                ticket = streams[op.stream].submit(partial(task, step), awaited, name=op.name, before=self.gate(op, expected),
                                                   deadline=op.deadline, need_done=op.name in facts.watched)
            if op.name in facts.published:
                ticket.add_done_callback(partial(self.machine.publish, op.name, step.number, ticket))
            tickets[op.name] = ticket
            if facts.snapshots:
                before_it = facts.previous_on_stream.get(op.name)
                self.watch_stall(awaited if before_it is None else [*awaited, tickets[before_it]])
        self.machine.last_published |= dict.fromkeys(facts.published, step.number)
        self.has_run = True

    def clear(self) -> None:
        """No step runs any more, and ops' closures are empty: errors keep the frames of ops, and a frame its function."""
        for _, task, *_ in self.program:
            for cell in getattr(task, "__closure__", None) or ():
                del cell.cell_contents

    def gate(self, op: Op, expected: Sequence[tuple[int, int]]) -> Callable[[], bool] | None:
        """What an op also waits for, asked again and again: other ranks, or a save's buffer."""
        if op.kind is OpKind.SNAPSHOT:
            snapshot = self.machine.saves.reading
            return None if snapshot is None else partial(snapshot.has_room, op.layer, *self.closures.span(op.reads[0]))
        return partial(self.machine.ranks_have, expected) if expected else None

    def watch_stall(self, awaited: Sequence[Ticket]) -> None:
        """A save counts how long an update that has all else waits for its snapshot."""
        held, snapshot = [t for t in awaited if t.name in self.facts.snapshots], self.machine.saves.reading
        if held and snapshot is not None:
            snapshot.stall.watch([t for t in awaited if t is not held[0]], held[0])
