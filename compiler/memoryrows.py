"""Memory of a plan as rows that are linear in its choices: what :func:`estimate_memory` says, for the solver.

Nothing is counted here. A group's share is read off :func:`estimate_memory` of a graph that has only that group, once for
each option, so that both always agree; a use of which one buffer serves all groups in turn is a maximum over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slidedp.compiler.choices import Choices, Values, exists
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.eventgraph import Linear
from slidedp.compiler.layergraph import Group, LayerGraph
from slidedp.compiler.memory import estimate_memory

SHARED_BUFFERS = ("reduce slots", "cast staging")
"""Uses of memory that are as large as the largest group asks for; every other use is a sum over the groups."""

HBM_STATE_BYTES = 12
"""FP32 master and two moments of a parameter whose state lives in HBM, beside its weights and its gradient."""


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
    base = estimate_memory(layers, choices.defaults)
    rows = []
    for place, budget in (("hbm", hbm_budget), ("host", host_budget)):
        uses: dict[str, int] = getattr(base, place)
        total = Linear(sum(size for use, size in uses.items() if use not in SHARED_BUFFERS))
        maxima: dict[str, list[Linear]] = {use: [Linear(0)] for use in SHARED_BUFFERS if use in uses}
        for index, family in enumerate(choices.families):
            group = layers.group(family.group)
            each = [_alone(layers, choices.defaults, group, option)[place] for option in family.options]
            sums = [sum(size for use, size in have.items() if use not in SHARED_BUFFERS) for have in each]
            assumed = [_assumed(layers, choices, group, option)[place] for option in family.options]
            shares = tuple(own - sums[0] + more for own, more in zip(sums, assumed, strict=True))
            if any(shares):
                total = total + Linear(0, ((index, shares),))
            for use, linears in maxima.items():
                sizes = tuple(have[use] for have in each)
                if len(set(sizes)) > 1:
                    linears.append(Linear(0, ((index, sizes),)))
                elif _owns(use, family.name):
                    linears.append(Linear(sizes[0]))
        rows.append(MemoryRow(place, budget, total, tuple(tuple(each) for each in maxima.values())))
    return tuple(rows)


def _owns(use: str, family: str) -> bool:
    """True for the family whose fields set the size of a shared buffer: the others would count its default once more."""
    return family == ("gradients" if use == "reduce slots" else "weights")


def _alone(layers: LayerGraph, defaults: Decisions, group: Group, option: Values) -> dict[str, dict[str, int]]:
    """Uses of a graph with one group, decided by `option`, between all the stages."""
    decided = Choices((), (), defaults).decided(group.name, option)
    report = estimate_memory(replace(layers, groups=(group,)), decided)
    return {"hbm": report.hbm, "host": report.host}


def _assumed(layers: LayerGraph, choices: Choices, group: Group, option: Values) -> dict[str, int]:
    """Bytes of values that decisions do not have yet."""
    hbm = host = 0
    stage = layers.stage(group.uses[0])
    for key, value in option.items():
        if exists(key, value):
            continue
        if (key, value) == ("act", "retain"):
            hbm += stage.activation_bytes
        elif (key, value) == ("act", "offload"):
            host += stage.activation_bytes * layers.world_size
        elif (key, value) == ("state", "hbm"):
            resident = HBM_STATE_BYTES * group.num_trainable
            hbm += resident + layers.compute_itemsize * group.numel + layers.grad_itemsize * group.num_trainable
        elif (key, value) == ("weights", "hold"):
            hbm += layers.compute_itemsize * group.numel
    return {"hbm": hbm, "host": host}
