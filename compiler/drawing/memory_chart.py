"""Memory over time as text: a column is a stretch of time, a row a slice of memory, a letter who holds most of it."""

from __future__ import annotations

from slidedp.compiler.drawing.gantt import MIN_COLUMNS, duration, scale
from slidedp.compiler.footprint.memory_over_time import MemoryCurve
from slidedp.compiler.units import format_bytes

ROWS = 12
LETTERS = "#=%+o:*x@&"
"""One a use, in the order of the curve: what is always there first."""


def memory_chart(curve: MemoryCurve, width: int = 80, *, budget_bytes: int | None = None, rows: int = ROWS) -> str:
    """`curve` drawn `width` columns wide and `rows` high, stacked, and a table of its uses at the peak.

    Each column is the highest moment of its stretch of time. `budget_bytes`: said in the title.
    """
    if not curve.end_us or not curve.peak_bytes:
        return "nothing is held on the device"
    label = 10
    columns = max(MIN_COLUMNS, width - label - 2)
    stacks = [curve.highest_in(curve.end_us * c // columns, curve.end_us * (c + 1) // columns) for c in range(columns)]
    budget = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
    lines = [f"device memory: peak {format_bytes(curve.peak_bytes)}{budget}, first at {duration(curve.peak_us)}"]
    for r in reversed(range(rows)):
        level = curve.peak_bytes * (2 * r + 1) // (2 * rows)
        top = format_bytes(curve.peak_bytes * (r + 1) // rows) if (r + 1) % 3 == 0 else ""
        lines.append(f"{top:>{label}} |{''.join(mark(stack, level) for stack in stacks)}".rstrip())
    lines.append(f"{'0 B':>{label}} |{scale(curve.end_us, columns)}")
    return "\n".join([*lines, *uses_at_peak(curve)])


def mark(stack: dict[str, int], level: int) -> str:
    """The letter of the use that holds the byte `level` of a stack of uses; a blank above the last."""
    top = 0
    for letter, size in zip(letters(stack), stack.values(), strict=True):
        top += size
        if level < top:
            return letter
    return " "


def letters(stack: dict[str, int]) -> str:
    return (LETTERS * (1 + len(stack) // len(LETTERS)))[: len(stack)]


def uses_at_peak(curve: MemoryCurve) -> list[str]:
    """A line for each use: its letter, its bytes at the peak, and its own range where it changes."""
    peak = curve.at(curve.peak_us)
    width = max(map(len, peak))
    lines = [f"  {'':<{width}}  {'at the peak':>11}"]
    for letter, (use, size) in zip(letters(peak), peak.items(), strict=True):
        series = curve.num_bytes[use]
        moves = f"   {format_bytes(min(series))} to {format_bytes(max(series))}" if len(set(series)) > 1 else ""
        if max(series):
            lines.append(f"{letter} {use:<{width}}  {format_bytes(size):>11}{moves}")
    return lines
