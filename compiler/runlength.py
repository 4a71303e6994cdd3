"""Names of layers in short: ``L00-L35`` for consecutive layers, in plan files, policies and diffs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_LAYER = re.compile(r"L(\d+)")
_RANGE = re.compile(r"L(\d+)-L?(\d+)")


def layer_index(name: str) -> int | None:
    """3 for ``L03``; None for a name that is not a layer's."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def runs(rows: Sequence[tuple[str, T]]) -> list[tuple[str, T]]:
    """Rows of (name, value) with consecutive layers of equal value made one: ``[("L00-L35", value)]``. Order is kept."""
    out: list[tuple[str, T]] = []
    first = 0
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i][1] == rows[first][1] and _follows(rows[i - 1][0], rows[i][0]):
            continue
        name, value = rows[first]
        out.append((name if i - first == 1 else f"{name}-{rows[i - 1][0]}", value))
        first = i
    return out


def expand(run: str, where: str) -> list[str]:
    """The names that ``L00-L35`` stands for, with the digits as wide as its first has them; any other name is itself."""
    match = _RANGE.fullmatch(run)
    if not match:
        return [run]
    lo, hi, width = int(match[1]), int(match[2]), len(match[1])
    if hi < lo:
        raise ValueError(f"{where}: the range {run} ends before it begins")
    return [f"L{i:0{width}}" for i in range(lo, hi + 1)]


def _follows(a: str, b: str) -> bool:
    i, j = layer_index(a), layer_index(b)
    return i is not None and j is not None and j == i + 1 and len(a) <= len(b)
