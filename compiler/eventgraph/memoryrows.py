"""Memory of a plan as rows that are linear in its choices: what :func:`estimate_memory` says, for the solver.

Little is counted here. A group's share is read off :func:`group_memory` of a graph that has only that group, once for each
option, so that both always agree. A buffer that serves all groups in turn is a maximum over them, and activations are a
maximum over the moments of the step (moments.py). Never less than the estimate, and equal to it unless so few layers stream,
or go to the host, that a window is not filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from slidedp.compiler.decisions import Activation, Decisions
from slidedp.compiler.eventgraph.choices import Choices, Family, Values
from slidedp.compiler.eventgraph.eventgraph import Linear
from slidedp.compiler.footprint.memory import MemoryReport, group_memory, moved_bytes, num_places, num_places_back
from slidedp.compiler.footprint.moments import epilogue_bytes, kept_bytes
from slidedp.compiler.layergraph import Group, LayerGraph, Stage

SHARED_BUFFERS = {"weight slots": "weights", "cast staging": "weights", "reduce slots": "gradients", "update workspace": "state"}
"""Uses of memory that are as large as the largest group asks for, and the family whose choice says so."""

CONSTANTS = ("gradient slots", "gradient sums")


class _Sums:
    """The sum of each tuple's largest linear, for all linears at once: a search asks thousands of selections for it."""

    def __init__(self, maxima: Sequence[tuple[Linear, ...]]) -> None:
        assert all(maxima)
        linears = [linear for each in maxima for linear in each]
        widths: dict[int, int] = {}
        for family, values in (term for linear in linears for term in linear.terms):
            widths[family] = max(widths.get(family, 0), len(values))
        self._families = np.array(list(widths), dtype=np.int64)
        self._starts = np.cumsum([0, *widths.values()])[:-1]  # of each family's options among all columns
        column = dict(zip(widths, self._starts.tolist(), strict=True))
        self._of_option = np.zeros((sum(widths.values()), len(linears)), dtype=np.int64)
        self._const = np.array([linear.const for linear in linears], dtype=np.int64)
        self._begins = np.cumsum([0, *map(len, maxima)])[:-1]  # of each maximum's linears among all
        for i, linear in enumerate(linears):
            for family, values in linear.terms:
                self._of_option[column[family] : column[family] + len(values), i] += values

    def of(self, selection: Sequence[int]) -> int:
        chosen = self._starts + np.array(selection, dtype=np.int64)[self._families]
        return int(np.maximum.reduceat(self._const + self._of_option[chosen].sum(axis=0), self._begins).sum())


@dataclass(frozen=True)
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
        return self._sums.of(selection)

    def fits(self, selection: Sequence[int]) -> bool:
        return self.needed(selection) <= self.budget

    @cached_property
    def _sums(self) -> _Sums:
        return _Sums([(self.total,), *self.largest])


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
            return sum(size for use, size in uses.items() if use not in SHARED_BUFFERS and use not in CONSTANTS)

        total = Linear(summed(self.base) + sum(getattr(self.base, place).get(use, 0) for use in CONSTANTS))
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
        for i, s in list(enumerate(layers.stages))[1:-1]:
            out += [below + self.running(i, k) for k in self.unlike_lanes]
            _, decided = self.options[s.name]
            below = below + self.linear(s, [sum(self.left_by(lane[i], d) for lane in layers.each_lane) for d in decided])
        ends = [sum(epilogue_bytes(lane[-1], self.defaults)) for lane in layers.each_lane]
        out.append(below + layers.stages[-1].boundary_bytes + max(ends))
        first = layers.stages[0]
        for k in self.unlike_lanes if any(layers.group(name).trainable for name in first.groups) else ():
            lanes = layers.each_lane[k:]
            out.append(Linear(sum(lane[1].boundary_bytes for lane in lanes) + lanes[0][0].activation_bytes))
        return tuple(dict.fromkeys(out))

    @property
    def unlike_lanes(self) -> list[int]:
        """Micro-batches that may be at work at the peak: of equal ones, it is with the first or the last."""
        lanes = self.layers.each_lane
        return [k for k, lane in enumerate(lanes) if k in (0, len(lanes) - 1) or lane != lanes[0]]

    @staticmethod
    def left_by(stage: Stage, d: Decisions) -> int:
        """What one micro-batch's forward of `stage` leaves for its backward."""
        return kept_bytes(stage, d) + stage.boundary_bytes * (not d.moves_boundary(stage))

    def running(self, i: int, k: int) -> Linear:
        """Stage `i` of all micro-batches while it runs backward for number `k`: as :func:`moments`."""
        lanes = self.layers.each_lane
        done, here, left = [lane[i] for lane in lanes[:k]], lanes[k][i], [lane[i] for lane in lanes[k + 1 :]]
        gradients = sum(s.boundary_bytes for s in (*done, here)) + sum(lane[i + 1].boundary_bytes for lane in lanes[k:])
        sizes = [here.activation_bytes * (d.activation(here) is not Activation.OFFLOAD) + sum(self.left_by(s, d) for s in left)
                 for d in self.options[here.name][1]]
        return self.linear(here, sizes) + (gradients + here.workspace_bytes)

    def moved(self, head: str) -> Iterator[tuple[Stage, list[int]]]:
        """(layer of a micro-batch, bytes that go to the host, an option) for each that may move its value, in forward order."""
        for i, s in enumerate(self.layers.stages):
            _, decided = self.options.get(s.name, (-1, ()))
            moves = [d.activation(s) is Activation.OFFLOAD if head == "act" else d.moves_boundary(s) for d in decided]
            for lane in self.layers.each_lane if any(moves) else ():
                yield lane[i], [moved_bytes(lane[i], head) * go for go in moves]

    def windows(self) -> tuple[tuple[Linear, ...], ...]:
        """Places out and back, if all layers go that may."""
        out = []
        for head in ("act", "h"):
            may = list(self.moved(head))
            n = num_places(self.layers, self.defaults, head)
            places = min(n, len(may)) + min(num_places_back(self.defaults, head), max(len(may) - n, 0))
            if may:
                out.append((Linear(0), *dict.fromkeys(self.linear(s, [places * size for size in sizes]) for s, sizes in may)))
        return tuple(out)

    def offloaded(self) -> Linear:
        """Host memory of what leaves: all but the last, for which it would be too late."""
        total = Linear(0)
        for head in ("act", "h"):
            for s, sizes in list(self.moved(head))[: -num_places(self.layers, self.defaults, head)]:
                total = total + self.linear(s, [self.layers.world_size * size for size in sizes])
        return total
