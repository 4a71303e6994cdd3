"""Byte sizes as users write and read them: "20GiB", "512MiB", "1e9", plain integers."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | float | str) -> int:
    """Bytes of `size`: an integer, a whole float, or a string with an optional unit (decimal MB, binary MiB).

    Raises ValueError for anything else, naming it.
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise ValueError(f"{size!r} is not a size in bytes; write an integer or a string such as '20GiB'")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if not match or match[2].lower() not in _UNITS:
            raise ValueError(f"{size!r} is not a size in bytes; write an integer or a string such as '20GiB', '512MiB' or '1e9'")
        size = float(match[1]) * _UNITS[match[2].lower()] if not match[1].isdigit() else int(match[1]) * _UNITS[match[2].lower()]
    if not math.isfinite(size) or size < 0:
        raise ValueError(f"{size!r} is not a size in bytes; it must be finite and not negative")
    return int(size)


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` with the binary unit that leaves one to four digits before the point: "974.0 MiB", "12 B"."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"
