"""Memory of a plan as rows that are linear in its choices: what :func:`estimate_memory` says, for the solver.

Little is counted here. A group's share is read off :func:`group_memory` of a graph that has only that group, once for each
option, so that both always agree. A buffer that serves all groups in turn is a maximum over them, and activations are a
maximum over the moments of the step (moments.py). Never less than the estimate, and equal to it unless so few layers stream,
or go to the host, that a window is not filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from slidedp.compiler.choices import Choices, Family, Values
from slidedp.compiler.decisions import Activation, Decisions
from slidedp.compiler.eventgraph import Linear
from slidedp.compiler.layergraph import Group, LayerGraph, Stage
from slidedp.compiler.memory import MemoryReport, group_memory, moved_bytes, num_places
from slidedp.compiler.moments import epilogue_bytes, kept_bytes

SHARED_BUFFERS = {"weight slots": "weights", "cast staging": "weights", "reduce slots": "gradients", "update workspace": "state"}
"""Uses of memory that are as large as the largest group asks for, and the family whose choice says so."""

CONSTANT = "gradient slots"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """``total + sum over maxima of their largest + largest of peaks <= budget``, in bytes, in `place` (``hbm`` of a GPU, ``host``
    of all ranks). `maxima`: each of `total`'s families alone decides a term. `peaks`: sums over many families.
    """

    place: str
    budget: int
    total: Linear
    maxima: tuple[tuple[Linear, ...], ...] = ()
    peaks: tuple[Linear, ...] = ()

    @property
    def largest(self) -> tuple[tuple[Linear, ...], ...]:
        """All of which the largest counts."""
        return (*self.maxima, self.peaks) if self.peaks else self.maxima

    def needed(self, selection: Sequence[int]) -> int:
        return self.total.at(selection) + sum(max(x.at(selection) for x in each) for each in self.largest)

    def fits(self, selection: Sequence[int]) -> bool:
        return self.needed(selection) <= self.budget


def memory_rows(layers: LayerGraph, choices: Choices, hbm_budget: int, host_budget: int) -> tuple[MemoryRow, ...]:
    """The rows of HBM and host for the slots and defaults of `choices`."""
    alone = _Alone(layers, choices)
    stages = _Stages(layers, choices)
    hbm = MemoryRow("hbm", hbm_budget, alone.total("hbm"), (*alone.maxima("hbm"), *stages.windows()), stages.peaks())
    host = MemoryRow("host", host_budget, alone.total("host") + stages.offloaded(), alone.maxima("host"))
    return hbm, host


class _Alone:
    """Uses of a graph with one group, for every option of each family."""

    def __init__(self, layers: LayerGraph, choices: Choices) -> None:
        self.layers, self.choices, self.base = layers, choices, group_memory(layers, choices.defaults)
        self.own = {family.key: (i, family) for i, family in enumerate(choices.families) if family.name != "act"}
        self.known: dict[object, MemoryReport] = {}

    def report(self, group: Group, option: Values) -> MemoryReport:
        """Asked once for all groups of one size, whose uses are as many, and which the rule treats alike."""
        default = self.choices.defaults.of(group.name)
        key = (group.numel, group.num_trainable, len(group.uses), default, tuple(option.items()))
        if key not in self.known:
            alone = replace(self.layers, groups=(group,))
            self.known[key] = group_memory(alone, self.choices.decided(group.name, option))
        return self.known[key]

    def total(self, place: str) -> Linear:
        """What is a sum over the groups. State in HBM has all of its share; the options linked to it are as the default."""

        def summed(report: MemoryReport) -> int:
            uses: dict[str, int] = getattr(report, place)
            return sum(size for use, size in uses.items() if use not in SHARED_BUFFERS and use != CONSTANT)

        total = Linear(summed(self.base) + getattr(self.base, place).get(CONSTANT, 0))
        for i, family in self.own.values():
            sums = [summed(self.report(self.layers.group(family.group), option)) for option in family.options]
            if len(set(sums)) > 1:
                total = total + Linear(0, ((i, tuple(own - sums[0] for own in sums)),))
        return total

    def maxima(self, place: str) -> tuple[tuple[Linear, ...], ...]:
        out = []
        for use, owner in SHARED_BUFFERS.items():
            if use not in getattr(self.base, place):
                continue
            linears = [Linear(0)]
            for group in self.layers.groups:
                i, family = self.own.get((group.name, owner), (-1, Family(group.name, owner, ({},))))
                options = [option or {"state": "hbm"} if i >= 0 else option for option in family.options]
                sizes = tuple(self.count(use) * getattr(self.report(group, option), place)[use] for option in options)
                linears.append(Linear(0, ((i, sizes),)) if len(set(sizes)) > 1 else Linear(sizes[0]))
            out.append(tuple(dict.fromkeys(linears)))
        return tuple(out)

    def count(self, use: str) -> int:
        """A graph with one group has one weight slot; the window has as many as there can be groups to fill it."""
        if use != "weight slots":
            return 1
        return min(self.choices.defaults.window, sum(self.layers.streams(g) for g in self.layers.groups))


class _Stages:
    """What each option of a layer's `act` means for the activations."""

    def __init__(self, layers: LayerGraph, choices: Choices) -> None:
        self.layers, self.defaults = layers, choices.defaults
        act = {f.group: (i, f) for i, f in enumerate(choices.families) if f.name == "act"}
        self.options: dict[str, tuple[int, tuple[Decisions, ...]]] = {}
        for s in layers.layers:
            i, family = act.get(s.groups[0], (-1, None)) if s.groups else (-1, None)
            decided = tuple(choices.decided(family.group, o) for o in family.options) if family else (choices.defaults,)
            self.options[s.name] = i, decided

    def linear(self, stage: Stage, sizes: Sequence[int]) -> Linear:
        i = self.options[stage.name][0]
        return Linear(0, ((i, tuple(sizes)),)) if len(set(sizes)) > 1 else Linear(sizes[0])

    def peaks(self) -> tuple[Linear, ...]:
        """The moments: what earlier layers keep and their boundaries, and what the stage at work adds."""
        layers, below, out = self.layers, Linear(0), []
        stages = layers.stages[1:]
        for s, after in pairwise(stages):
            _, decided = self.options[s.name]
            running = [0 if d.activation(s) is Activation.OFFLOAD else s.activation_bytes for d in decided]
            out.append(below + self.linear(s, running) + s.boundary_bytes + after.boundary_bytes)
            below = below + self.linear(s, [kept_bytes(s, d) + s.boundary_bytes * (not d.moves_boundary(s)) for d in decided])
        out.append(below + stages[-1].boundary_bytes + sum(epilogue_bytes(layers, self.defaults)))
        first = layers.stages[0]
        if any(layers.group(name).trainable for name in first.groups):
            out.append(Linear(stages[0].boundary_bytes + first.activation_bytes))
        return tuple(dict.fromkeys(out))

    def moved(self, head: str) -> Iterator[tuple[Stage, list[int]]]:
        """(layer, bytes that go to the host, an option) for each layer that may move its value."""
        for s in self.layers.layers:
            _, decided = self.options[s.name]
            moves = [d.activation(s) is Activation.OFFLOAD if head == "act" else d.moves_boundary(s) for d in decided]
            if any(moves):
                yield s, [moved_bytes(s, head) * go for go in moves]

    def windows(self) -> tuple[tuple[Linear, ...], ...]:
        """Places out and back, if all layers go that may."""
        out = []
        for head in ("act", "h"):
            may = list(self.moved(head))
            n = num_places(self.defaults, head)
            places = min(n, len(may)) + min(n, max(len(may) - n, 0))
            if may:
                out.append((Linear(0), *dict.fromkeys(self.linear(s, [places * size for size in sizes]) for s, sizes in may)))
        return tuple(out)

    def offloaded(self) -> Linear:
        """Host memory of what leaves: all but the last, for which it would be too late."""
        total = Linear(0)
        for head in ("act", "h"):
            for s, sizes in list(self.moved(head))[: -num_places(self.defaults, head)]:
                total = total + self.linear(s, [self.layers.world_size * size for size in sizes])
        return total
