"""Memory of a plan as rows that are linear in its choices: what :func:`estimate_memory` says, for the solver.

Nothing is counted here. A group's share is read off the same functions for a graph that has only that group, once for each
option, so that both always agree; a use of which one buffer serves all groups in turn is a maximum over them, and activations
are one over the moments of a step (moments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slidedp.compiler.choices import Choices
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.eventgraph import Linear
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.memory import ON_THEIR_WAY, device_buffers, host_buffers
from slidedp.compiler.moments import moments

Buffers = Callable[[LayerGraph, Decisions], dict[str, int]]

SHARED_BUFFERS = ("reduce slots", "update workspace", "cast staging", ON_THEIR_WAY)
"""Uses of memory that are as large as the largest group asks for; every other use is a sum over the groups."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """``total + sum over maxima of their largest <= budget``, in bytes, in `place` (``hbm`` of a GPU, ``host`` of all ranks)."""

    place: str
    budget: int
    total: Linear
    maxima: tuple[tuple[Linear, ...], ...] = ()

    def needed(self, selection: Sequence[int]) -> int:
        return self.total.at(selection) + sum(max(x.at(selection) for x in each) for each in self.maxima)

    def fits(self, selection: Sequence[int]) -> bool:
        return self.needed(selection) <= self.budget


def memory_rows(layers: LayerGraph, choices: Choices, hbm_budget: int, host_budget: int) -> tuple[MemoryRow, ...]:
    """The rows of HBM and host for the slots and defaults of `choices`."""
    hbm = _row("hbm", hbm_budget, layers, choices, device_buffers)
    hbm = replace(hbm, maxima=(*hbm.maxima, activations(layers, choices)))
    return hbm, _row("host", host_budget, layers, choices, host_buffers)


def _row(place: str, budget: int, layers: LayerGraph, choices: Choices, buffers: Buffers) -> MemoryRow:
    base = buffers(layers, choices.defaults)
    total = Linear(sum(size for use, size in base.items() if use not in SHARED_BUFFERS))
    maxima: dict[str, list[Linear]] = {use: [Linear(0)] for use in SHARED_BUFFERS if use in base}
    for index, family in enumerate(choices.families):
        alone = replace(layers, groups=(layers.group(family.group),))
        each = [buffers(alone, choices.decided(family.group, option)) for option in family.options]
        sums = [sum(size for use, size in have.items() if use not in SHARED_BUFFERS) for have in each]
        shares = tuple(own - sums[0] for own in sums)
        if any(shares):
            total = total + Linear(0, ((index, shares),))
        for use, linears in maxima.items():
            sizes = tuple(have[use] for have in each)
            if len(set(sizes)) > 1:
                linears.append(Linear(0, ((index, sizes),)))
            elif _owns(use, family.name):
                linears.append(Linear(sizes[0]))
    return MemoryRow(place, budget, total, tuple(tuple(each) for each in maxima.values()))


def activations(layers: LayerGraph, choices: Choices) -> tuple[Linear, ...]:
    """The moments of a step of which the largest counts, each linear in what layers keep."""
    base = [m.total for m in moments(layers, choices.defaults)]
    terms: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in base]
    for index, family in enumerate(choices.families):
        if family.name != "act":
            continue
        each = [[m.total for m in moments(layers, choices.decided(family.group, option))] for option in family.options]
        for k, start in enumerate(base):
            shares = tuple(totals[k] - start for totals in each)
            if any(shares):
                terms[k].append((index, shares))
    return tuple(dict.fromkeys(Linear(start, tuple(more)) for start, more in zip(base, terms, strict=True)))


def _owns(use: str, family: str) -> bool:
    """True for the family whose fields set the size of a shared buffer: the others would count its default once more."""
    return family == {"reduce slots": "gradients", "update workspace": "gradients", ON_THEIR_WAY: "act"}.get(use, "weights")
