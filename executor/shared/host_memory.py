"""How much memory this process may still take: the machine's, and what the control groups above it allow."""

from __future__ import annotations

from pathlib import Path

_RESERVE_BYTES = 128 << 20  # never the last of it: the kernel starts killing before it has given everything away


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: MemAvailable, or less where a control group (v1 or v2) limits this process."""
    left = [_meminfo(root, "MemAvailable"), *_cgroup_left(root)]
    return max(min(left) - _RESERVE_BYTES, 0)


def total_bytes(root: Path = Path("/")) -> int:
    """MemTotal; it grows on machines with a balloon."""
    return _meminfo(root, "MemTotal")


def _meminfo(root: Path, field: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"{root}proc/meminfo has no {field}")


def _cgroup_left(root: Path) -> list[int]:
    """What each limiting control group above this process has left; cached file pages count as free (they can be dropped)."""
    left = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inside = base / path.lstrip("/")
        # In a container the path may be the host's and the mount show our own group at its root: hence also `base`.
        for folder in dict.fromkeys([inside, *inside.parents, base]):
            if folder == base or base in folder.parents:
                left += _group_left(folder, *names)
    return left


def _group_left(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    limit, usage = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit():  # "max", or no such file
        return []
    cache = 0
    for line in _read(folder / "memory.stat").splitlines():
        if line.startswith(cache_name + " "):
            cache = int(line.split()[1])
    return [int(limit) - int(usage) + cache]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
