"""LayerGraph and choices -> timed event graph: the lowering of passes/ once more, a layer at a time instead of a chunk.

The order of ops on every stream, the slots and who waits for whom are those of the passes (slots, delivery, gradients,
updates); tests hold the two together: equal busy times, and periods to 0.1 % of plans with nothing to choose. Written again,
because what is a decision in the passes is a variable here, and because the compiler imports no pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slidedp.compiler.eventgraph.choices import Choices
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.eventgraph import OFF, ZERO, EventGraph, Linear
from slidedp.compiler.eventgraph.eventmoves import Moves
from slidedp.compiler.eventgraph.eventparts import Parts, Weights, owner
from slidedp.compiler.eventgraph.eventresident import Resident, take_norm
from slidedp.compiler.eventgraph.eventupdates import add_shared_rate, add_updates
from slidedp.compiler.layergraph import Group, LayerGraph, StageKind
from slidedp.compiler.ops import OpKind, Stream

FORWARD = {StageKind.PROLOGUE: OpKind.PROLOGUE, StageKind.LAYER: OpKind.FORWARD, StageKind.EPILOGUE: OpKind.EPILOGUE}


@dataclass(frozen=True, slots=True)
class Phase:
    """One compute op. `reads`: the deliveries it needs; `writes`: the groups whose gradients it adds to."""

    name: str
    stage: int
    kind: OpKind
    reads: tuple[Weights, ...]
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The compute ops in order, their deliveries in order of first use, the last reader of each, and the slots they take."""

    phases: tuple[Phase, ...]
    uses: list[Weights]
    last_read: dict[Weights, str]
    slots: dict[Weights, int]


def build_event_graph(layers: LayerGraph, choices: Choices, costs: OptionCosts) -> EventGraph:
    """The event graph of training `layers`, with the slots of ``choices.defaults``.

    With ``costs.contention`` a step also takes as long as all its work takes each resource that ops share, a loop around one
    event, and updates in HBM take their time from compute. Without, every stream is alone, as in a simulation without contention.

    The order of ops is that of a plan in which all goes that may: where a layer's weights or state might stay in HBM, others
    take its place in the window, and where fewer activations go, others are the last of them. So periods are near those of the
    ops where much is chosen, and theirs where each family has one option.
    """
    parts = Parts(layers, choices, costs)
    phases = tuple(find_phases(parts))
    uses = list(dict.fromkeys(w for p in phases for w in p.reads))
    last_read = {w: p.name for p in phases for w in p.reads}
    program = Program(phases, uses, last_read, assign_slots(parts, phases, uses))
    moves = Moves.of(parts)
    emit(parts, program, moves, Resident(parts, Stream.GPU if costs.contention else Stream.UPDATE))
    reuse_weight_slots(parts, program)
    reuse_gradient_slots(parts, program)
    keep_order(parts)
    works = add_updates(parts, uses)
    for resource in costs.contention.shared if costs.contention else ():
        add_shared_rate(parts, uses, resource, sum((window.work_us(resource) for window in moves.windows), ZERO))
    return EventGraph(choices, tuple(parts.events), tuple(parts.edges), works)


def find_phases(parts: Parts) -> Iterator[Phase]:
    """As passes/compute.py and the renaming of passes/slots.py: layers in the window at the turn are not delivered again."""
    layers = parts.layers
    windowed = [g.name for g in layers.groups if parts.streams(g)]
    kept = set(windowed[len(windowed) - num_slots(parts) :])

    def reads(i: int, use: str) -> tuple[Weights, ...]:
        groups = [g for name in layers.stages[i].groups if not parts.stays(g := layers.group(name))]
        return tuple(("step" if not parts.streams(g) else "fwd" if g.name in kept else use, g.name) for g in groups)

    def writes(i: int) -> tuple[str, ...]:
        return tuple(name for name in layers.stages[i].groups if layers.group(name).trainable)

    last = len(layers.stages) - 1
    for i, stage in enumerate(layers.stages):
        name = f"fwd.{stage.name}" if stage.kind is StageKind.LAYER else stage.name
        yield Phase(name, i, FORWARD[stage.kind], reads(i, "fwd"), writes(i) if i == last else ())
    for i in reversed(range(1, last)):
        name = layers.stages[i].name
        yield Phase(f"recompute.{name}", i, OpKind.RECOMPUTE, reads(i, "bwd"))
        yield Phase(f"bwd.{name}", i, OpKind.BACKWARD, reads(i, "bwd"), writes(i))
    if writes(0):
        yield Phase(f"bwd.{layers.stages[0].name}", 0, OpKind.BACKWARD, reads(0, "fwd"), writes(0))


def num_slots(parts: Parts) -> int:
    """Of weights: no more than there are groups to stream."""
    return min(parts.choices.defaults.window, sum(parts.streams(g) for g in parts.layers.groups))


def assign_slots(parts: Parts, phases: tuple[Phase, ...], uses: list[Weights]) -> dict[Weights, int]:
    """Weight slot of every streamed delivery, as passes/slots.py: the one that has been free for longest."""
    last_read = {w: i for i, p in enumerate(phases) for w in p.reads}
    free_at = [-1] * num_slots(parts)
    slots = {}
    for w in uses:
        if w[0] != "step":
            k = min(range(len(free_at)), key=lambda s: (free_at[s], s))
            slots[w], free_at[k] = k, last_read[w]
    return slots


def emit(parts: Parts, program: Program, moves: Moves, resident: Resident) -> None:
    """All events in text order, with what they wait for inside the step."""
    behind = deliveries_behind(program)
    producer = {name: p.name for p in program.phases for name in p.writes}
    for w in behind.get("", ()):
        parts.deliver(w)
    for p in program.phases:
        end = parts.run(p.name, Stream.GPU, duration(parts, p))
        for w in p.reads:
            for arrived in parts.deliveries[w].arrived:
                parts.wait(end.event, arrived, f"weights {'.'.join(w)} of {p.name}")
        moves.before(p.kind, p.stage, end)
        for name in parts.splits if p.kind is OpKind.EPILOGUE else ():
            parts.take_home_early(name, end)
        for name in p.writes:
            if producer[name] == p.name:
                take_norm(parts, name)
                if not parts.stays(parts.layers.group(name)):
                    parts.take_home(name, end)
                resident.update(name, end)
        moves.behind(p.kind, p.stage, end)
        for w in behind.get(p.name, ()):
            parts.deliver(w)
    resident.rest()


def deliveries_behind(program: Program) -> dict[str, list[Weights]]:
    """Phase -> what is issued once it has ended, as passes/delivery.py; '': at the start of the step."""
    behind: dict[str, list[Weights]] = {}
    occupant: dict[int, Weights] = {}
    previous = ""
    for w in program.uses:
        if w in program.slots:
            slot = program.slots[w]
            previous = program.last_read[occupant[slot]] if slot in occupant else ""
            occupant[slot] = w
        behind.setdefault(previous, []).append(w)
    return behind


def duration(parts: Parts, p: Phase) -> Linear:
    stage = parts.layers.stages[p.stage]
    if p.kind is OpKind.RECOMPUTE:
        if not parts.options(owner(stage), "act"):
            return Linear(parts.costs.recompute(p.stage, "recompute"))
        return parts.each(owner(stage), "act", lambda o: parts.costs.recompute(p.stage, str(o["act"])))
    return Linear(parts.costs.backward(p.stage) if p.kind is OpKind.BACKWARD else parts.costs.forward(p.stage))


def reuse_weight_slots(parts: Parts, program: Program) -> None:
    """A slot is refilled when whoever read it last has ended, around to the next step."""
    for k in set(program.slots.values()):
        occupants = [w for w in program.uses if program.slots.get(w) == k]
        for before, after in zip(occupants, [*occupants[1:], occupants[0]], strict=True):
            freed = parts.ends[program.last_read[before]]
            parts.wait(parts.deliveries[after].copy_start, freed, f"weight slot of {'.'.join(after)}", int(after == occupants[0]))
    for w in program.uses:
        if w not in program.slots:
            delivered = parts.each(w[1], "weights", lambda o: 0 if o else OFF)
            parts.wait(parts.deliveries[w].copy_start, parts.ends[program.last_read[w]] + delivered, f"held weights of {w[1]}", 1)


def reuse_gradient_slots(parts: Parts, program: Program) -> None:
    """A backward writes where the gradient before has left."""
    writer = {name: next(parts.ends[p.name].event for p in program.phases if name in p.writes) for name in parts.freed}
    shared = [name for name in writer if shares_slots(parts, parts.layers.group(name))]
    num = min(parts.choices.defaults.grad_slots, len(shared))
    for k in range(num):
        taking = shared[k::num]
        for before, after in zip(taking, [*taking[1:], taking[0]], strict=True):
            for freed in parts.freed[before]:
                parts.wait(writer[after], freed, f"gradient slot of {after}", int(after == taking[0]))
    for name in writer:
        if name not in shared:
            for freed in parts.freed[name]:
                parts.wait(writer[name], freed, f"held gradient of {name}", 1)


def shares_slots(parts: Parts, group: Group) -> bool:
    """As passes/slots.py: not if the gradient waits in its place for a deferred update, or several stages add to it."""
    waits = parts.deferred and parts.layers.world_size == 1 and parts.stays(group)
    return parts.layers.streams(group) and not waits


def keep_order(parts: Parts) -> None:
    """Every stream does one thing after the other, and the next step's after this one's."""
    for stream, queue in parts.on.items():
        for (_, end), (start, _) in zip(queue, [*queue[1:], queue[0]], strict=True):
            parts.wait(start, end, f"order on {stream}", int(start == queue[0][0]))
