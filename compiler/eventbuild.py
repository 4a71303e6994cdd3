"""LayerGraph and choices -> timed event graph: the lowering of passes/ once more, a layer at a time instead of a chunk.

The order of ops on every stream, the slots and who waits for whom are those of the passes (slots, delivery, gradients,
updates); tests hold the two together: equal busy times, and periods within a percent. Written again, because what is a
decision in the passes is a variable here, and because the compiler imports no pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slidedp.compiler.choices import Choices
from slidedp.compiler.eventcosts import OptionCosts
from slidedp.compiler.eventgraph import OFF, ZERO, EventGraph, Linear
from slidedp.compiler.eventparts import Parts, Point, Weights, owner
from slidedp.compiler.eventupdates import add_shared_rates, add_updates
from slidedp.compiler.layergraph import Group, LayerGraph, StageKind
from slidedp.compiler.memory import num_window_slots
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.residency import is_resident

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
    event. Without it every stream is alone, as in a simulation without contention.
    """
    parts = Parts(layers, choices, costs)
    phases = tuple(find_phases(layers, choices))
    uses = list(dict.fromkeys(w for p in phases for w in p.reads))
    last_read = {w: p.name for p in phases for w in p.reads}
    program = Program(phases, uses, last_read, assign_slots(layers, choices, phases, uses))
    emit(parts, program)
    reuse_weight_slots(parts, program)
    reuse_gradient_slots(parts, program)
    keep_order(parts)
    works = add_updates(parts, uses)
    add_shared_rates(parts, uses)
    return EventGraph(choices, tuple(parts.events), tuple(parts.edges), works)


def find_phases(layers: LayerGraph, choices: Choices) -> Iterator[Phase]:
    """As passes/compute.py and the renaming of passes/slots.py: layers in the window at the turn are not delivered again."""
    open_state = {f.group for f in choices.families if f.name == "state"}

    def streams(g: Group) -> bool:
        return layers.streams(g) and (g.name in open_state or not is_resident(g, choices.defaults.of(g.name)))

    windowed = [g.name for g in layers.groups if streams(g)]
    kept = set(windowed[len(windowed) - num_window_slots(layers, choices.defaults) :])

    def reads(i: int, use: str) -> tuple[Weights, ...]:
        groups = [layers.group(name) for name in layers.stages[i].groups]
        return tuple(("step" if not streams(g) else "fwd" if g.name in kept else use, g.name) for g in groups)

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


def assign_slots(layers: LayerGraph, choices: Choices, phases: tuple[Phase, ...], uses: list[Weights]) -> dict[Weights, int]:
    """Weight slot of every streamed delivery, as passes/slots.py: the one that has been free for longest."""
    last_read = {w: i for i, p in enumerate(phases) for w in p.reads}
    free_at = [-1] * max(1, num_window_slots(layers, choices.defaults))  # deliveries of resident groups take no time
    slots = {}
    for w in uses:
        if w[0] != "step":
            k = min(range(len(free_at)), key=lambda s: (free_at[s], s))
            slots[w], free_at[k] = k, last_read[w]
    return slots


def emit(parts: Parts, program: Program) -> None:
    """All events in text order, with what they wait for inside the step."""
    behind = deliveries_behind(program)
    producer = {name: p.name for p in program.phases for name in p.writes}
    reloads: dict[int, Point] = {}
    for w in behind.get("", ()):
        parts.deliver(w)
    for p in program.phases:
        end = parts.run(p.name, Stream.GPU, duration(parts, p))
        for w in p.reads:
            for arrived in parts.deliveries[w].arrived:
                parts.wait(end.event, arrived, f"weights {'.'.join(w)} of {p.name}")
        if p.kind is OpKind.RECOMPUTE and p.stage in reloads:
            parts.wait(end.event, reloads[p.stage], f"reload for {p.name}")
        for name in parts.splits if p.kind is OpKind.EPILOGUE else ():
            parts.take_home_early(name, end)
        for name in p.writes:
            if producer[name] == p.name:
                parts.take_home(name, end)
                update_on_gpu(parts, name, end, next(q.name for q in program.phases if name in {w[1] for w in q.reads}))
        for w in behind.get(p.name, ()):
            parts.deliver(w)
        move_activations(parts, p, end, reloads)


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


def update_on_gpu(parts: Parts, name: str, produced: Point, first_reader: str) -> None:
    """Collectives of resident state between the gradient and the next step's first reader, and the update's time of the GPU."""
    group, chunks = parts.layers.group(name), parts.choices.defaults.of(name).return_chunks
    shared = parts.resident(name, sum(c.total_us for c in parts.costs.share_resident(group, chunks)))
    if shared != ZERO:
        there = parts.resident(name, 0, OFF)
        done = parts.run(f"all_gather.resident.{name}", Stream.COMM, shared)
        parts.wait(done.event, produced + there, f"gradient of {name}")
        parts.wait(parts.ends[first_reader].event, done + there, f"resident weights of {name}", 1)
    us = parts.resident(name, parts.costs.gpu_update(group).total_us)
    if us != ZERO:
        parts.run(f"gpu_update.{name}", Stream.GPU, us)


def move_activations(parts: Parts, p: Phase, end: Point, reloads: dict[int, Point]) -> None:
    """Offloads follow their forward; a reload follows the backward two layers before its own, when its buffer is free."""
    last = len(parts.layers.stages) - 1
    if p.kind is OpKind.FORWARD:
        parts.move_activations(p.stage, OpKind.ACT_OFFLOAD, end)
    due = {OpKind.EPILOGUE: (last - 1, last - 2), OpKind.BACKWARD: (p.stage - 2,)}.get(p.kind, ())
    for i in due:
        if i >= 1 and (back := parts.move_activations(i, OpKind.ACT_RELOAD, end)):
            name = parts.layers.stages[i].name
            parts.wait(back.event, parts.ends[f"{OpKind.ACT_OFFLOAD}.{name}"], f"offload before reload of {name}")
            reloads[i] = back


def reuse_weight_slots(parts: Parts, program: Program) -> None:
    """A slot is refilled when whoever read it last has ended, around to the next step."""
    for k in set(program.slots.values()):
        occupants = [w for w in program.uses if program.slots.get(w) == k]
        for before, after in zip(occupants, [*occupants[1:], occupants[0]], strict=True):
            freed = parts.ends[program.last_read[before]]
            parts.wait(parts.deliveries[after].copy_start, freed, f"weight slot of {'.'.join(after)}", int(after == occupants[0]))
    for w in program.uses:
        if w not in program.slots:
            parts.wait(parts.deliveries[w].copy_start, parts.ends[program.last_read[w]], f"held weights of {w[1]}", 1)


def reuse_gradient_slots(parts: Parts, program: Program) -> None:
    """A backward writes where the gradient before has left."""
    writer = {name: next(parts.ends[p.name].event for p in program.phases if name in p.writes) for name in parts.returns}
    streamed = [name for name in writer if parts.layers.streams(parts.layers.group(name))]
    num = min(parts.choices.defaults.grad_slots, len(streamed))
    for k in range(num):
        taking = streamed[k::num]
        for before, after in zip(taking, [*taking[1:], taking[0]], strict=True):
            for freed in parts.returns[before].freed:
                parts.wait(writer[after], freed, f"gradient slot of {after}", int(after == taking[0]))
    for name in writer:
        if name not in streamed:
            for freed in parts.returns[name].freed:
                parts.wait(writer[name], freed, f"held gradient of {name}", 1)


def keep_order(parts: Parts) -> None:
    """Every stream does one thing after the other, and the next step's after this one's."""
    for stream, queue in parts.on.items():
        for (_, end), (start, _) in zip(queue, [*queue[1:], queue[0]], strict=True):
            parts.wait(start, end, f"order on {stream}", int(start == queue[0][0]))
