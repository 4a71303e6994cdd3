"""What was measured or solved once, kept as YAML in a directory: ``~/.cache/slidedp``, or ``$XDG_CACHE_HOME/slidedp``.

A damaged file is a warning and as good as none. Files appear by a rename: nobody ever reads half of one.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from slidedp.compiler.strict import content_hash

T = TypeVar("T")


def cache_folder(folder: str | Path | None = None) -> Path | None:
    """`folder`, else ``$SLIDEDP_CACHE``, else the user's cache; None, for no cache, if the first given is "".

    Asked where users enter (api, command line), nowhere deeper.
    """
    given = os.environ.get("SLIDEDP_CACHE") if folder is None else folder
    if given is not None:
        return Path(given) if given != "" else None
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "slidedp"


def machine_hash(device_type: str, num_ranks: int) -> str:
    """A hash of what measurements depend on: processor, cores, GPUs, torch, and how many ranks measure."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device_type == "cuda" else []
    return content_hash([os.uname().nodename, processor(), len(os.sched_getaffinity(0)), gpus, torch.__version__, num_ranks])


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine


def read_cached(path: Path | None, read: Callable[[Path], T]) -> T | None:
    """`read(path)`; None where there is no file, and, with a warning, where `read` raises ValueError."""
    if path is None or not path.is_file():
        return None
    try:
        return read(path)
    except ValueError as e:
        warnings.warn(f"slidedp: a cached measurement cannot be used and is made anew: {e}", stacklevel=2)
        return None


def write_cached(path: Path | None, text: str) -> None:
    """Keeps `text`. A directory that cannot be written is a warning: the measurement itself is good."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, suffix=".part", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as e:
        warnings.warn(f"slidedp: the measurement cannot be kept in {path.parent}: {e}", stacklevel=2)
