"""How large the last-level caches are, so that what is measured as memory is memory."""

from __future__ import annotations

import os
from pathlib import Path

from slidedp.compiler.units import parse_bytes

_CPUS = Path("/sys/devices/system/cpu")


def last_level_cache_bytes(cpus: Path = _CPUS) -> int:
    """Total bytes of the last-level caches of this process's cores; 0 where the kernel does not say.

    A virtual machine may say less than there is. Source: Documentation/ABI/testing/sysfs-devices-system-cpu of Linux.
    """
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        caches = [_read(index) for index in (cpus / f"cpu{cpu}" / "cache").glob("index*")]
        if data := [c for c in caches if c and c[1] != "Instruction"]:
            _, _, nbytes, shared = max(data)
            found[shared] = nbytes
    return sum(found.values())


def _read(index: Path) -> tuple[int, str, int, str] | None:
    """(level, type, bytes, which cores share it); None for what is not there or not understood."""
    try:
        level, kind, size, shared = ((index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list"))
        return int(level), kind, parse_bytes(f"{size}iB"), shared
    except (OSError, ValueError):
        return None
