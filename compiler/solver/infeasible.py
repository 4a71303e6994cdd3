"""Why no plan fits: which budgets, by how many bytes, and what would be the cheapest way out. Seconds before any solving.

Memory rows are sums over the groups, so the least that a budget must be is the sum of each group's least; a pin is responsible
when the least without it fits. Two budgets can each be met and not both, when what relieves one burdens the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slidedp.compiler.errors import BudgetError
from slidedp.compiler.eventgraph.choices import Choices
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.footprint.memory import MemoryReport, estimate_memory
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.units import format_bytes

BUDGETS = {"hbm": "hbm_budget", "host": "host_budget"}
PLACES = {"hbm": "HBM", "host": "host memory"}


def least(row: MemoryRow, rows: Sequence[MemoryRow], choices: Choices) -> tuple[int, ...]:
    """The selection that needs least of `row`: of options that need the same, the one with least of the other rows.

    Exact: for every size that a shared buffer could have, the options that do not ask for more.
    """
    sizes = {value for each in row.maxima for linear in each for _, values in linear.terms for value in values}
    constants = {linear.const for each in row.maxima for linear in each}
    found = [x for size in sorted(sizes | constants) or [0] if (x := _least_within(size, row, rows, choices)) is not None]
    return min(found, key=row.needed)


def _least_within(size: int, row: MemoryRow, rows: Sequence[MemoryRow], choices: Choices) -> tuple[int, ...] | None:
    """The least of `row` while no shared buffer is larger than `size` bytes; None if that cannot be."""
    totals = [dict(row.total.terms), *(dict(r.total.terms) for r in rows if r is not row)]
    buffers = [dict(linear.terms) for each in row.maxima for linear in each]
    peaks = [dict(linear.terms) for linear in row.peaks]
    selection = []
    for i, family in enumerate(choices.families):
        resident = family.resident if family.name != "state" and len(family.options) > 1 else None
        small = [o for o in range(len(family.options)) if o != resident and all(b[i][o] <= size for b in buffers if i in b)]
        if not small:
            return None
        highest = [max((peak[i][o] for peak in peaks if i in peak), default=0) for o in range(len(family.options))]
        sums = [[total.get(i, (0,) * len(highest))[o] for total in totals] for o in range(len(highest))]
        selection.append(min(small, key=lambda o: (sums[o][0] + highest[o], *sums[o][1:])))
    for link in choices.links:
        if selection[link.a] == link.a_option:
            selection[link.b] = link.b_option
    return tuple(selection)


def fitting_start(rows: Sequence[MemoryRow], choices: Choices) -> tuple[int, ...] | None:
    """A selection that fits all rows, from the least of each; None if neither does."""
    for row in rows:
        selection = least(row, rows, choices)
        if all(r.fits(selection) for r in rows):
            return selection
    return None


def explain(layers: LayerGraph, choices: Choices, rows: Sequence[MemoryRow], unpinned: Callable[[], bool]) -> BudgetError:
    """The error for rows that nothing fits. `unpinned()`: whether something would fit without the user's pins."""
    short = []
    for row in rows:
        selection = least(row, rows, choices)
        if (need := row.needed(selection)) > row.budget:
            short.append((row, need, selection))
    name = layers.model or "model"
    if not short:
        return BudgetError(f"{name}: {_conflict(rows, choices)}")
    parts = []
    for row, need, selection in short:
        report = estimate_memory(layers, choices.decode(selection))
        parts.append(f"needs {format_bytes(need)} of {PLACES[row.place]}, {format_bytes(need - row.budget)} more than the budget "
                     f"of {format_bytes(row.budget)} ({BUDGETS[row.place]}; {largest(report, row.place)})")  # fmt: skip
    out = [f"raise {' and '.join(f'{BUDGETS[row.place]} to {format_bytes(need)}' for row, need, _ in short)}"]
    if unpinned():
        out.insert(0, "drop what the policy pins: without it a plan fits")
    elif [row.place for row, _, _ in short] == ["hbm"]:
        out.insert(0, _fewer_tokens(layers, choices, short[0][0], short[0][1], short[0][2]))
    return BudgetError(f"{name}: no plan fits, whatever is chosen: even the smallest {' and '.join(parts)}. "
                       f"Cheapest way out: {', or '.join(o for o in out if o)}")  # fmt: skip


def _fewer_tokens(layers: LayerGraph, choices: Choices, row: MemoryRow, need: int, selection: Sequence[int]) -> str:
    """What shrinks with the batch, if that is enough."""
    report = estimate_memory(layers, choices.decode(selection))
    scaling = sum(size for use, size in report.hbm.items() if "activations" in use)
    left = row.budget - (need - scaling)
    share = int(100 * left / scaling)
    return f"use at most {share} % of the tokens a step (fewer or shorter sequences)" if 0 < left < scaling else ""


def _conflict(rows: Sequence[MemoryRow], choices: Choices) -> str:
    """Each budget alone can be met. What the other then misses is the price."""
    ways = []
    for row in rows:
        selection = least(row, rows, choices)
        for other in rows:
            if (missing := other.needed(selection) - other.budget) > 0:
                ways.append((missing, f"raise {BUDGETS[other.place]} by {format_bytes(missing)}"))
    missing, way = min(ways)
    names = " and ".join(f"{BUDGETS[row.place]}={format_bytes(row.budget)}" for row in rows)
    return f"{names} conflict: each alone can be met, both together miss {format_bytes(missing)}. Cheapest way out: {way}"


def largest(report: MemoryReport, place: str, num: int = 3) -> str:
    uses: dict[str, int] = getattr(report, place)
    top = sorted(uses.items(), key=lambda use: -use[1])[:num]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in top if size)
