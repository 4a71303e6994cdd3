"""Compiles ``adamw.cpp`` at first use with torch's extension builder and declares its functions to ctypes.

The library is kept under torch's extension cache, in a folder named by a hash of everything its bits depend on: the
source, the flags, the processor's features and torch's version. Any number of processes may ask at once: a file lock
lets one build, and the finished library appears by a rename, so nobody ever loads half of it. (torch's own lock file
outlives a killed process and then blocks all others for good; ``flock`` ends with its holder.)
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

SOURCE = Path(__file__).with_name("adamw.cpp")

SEGMENT = np.dtype(
    [("start", "<i8"), ("end", "<i8"), ("keep", "<f4"), ("step_size", "<f4"), ("inv_bias2_sqrt", "<f4"), ("unused", "<f4")]
)
"""Mirrors ``struct Segment``: elements ``[start, end)`` of a group that share their coefficients."""

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2}
"""Mirrors ``enum Dtype``; 0 stands for no tensor."""

_POINTER, _INT32, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "slidedp_pool_create": (_POINTER, [_INT32]),
    "slidedp_pool_destroy": (None, [_POINTER]),
    "slidedp_adamw": (
        _INT64,
        [_POINTER] * 5 + [_INT32, _POINTER, _INT32, _POINTER, _INT64] + [_FLOAT] * 5,
    ),
    "slidedp_cast": (None, [_POINTER, _POINTER, _POINTER, _INT32, _INT64]),
    "slidedp_reduce": (None, [_POINTER, _POINTER, _INT64, _POINTER, _INT32, _INT64]),
    "slidedp_store_release": (None, [_POINTER, _INT64]),
    "slidedp_load_min": (_INT64, [_POINTER, _INT64]),
}


class NativeUnavailable(RuntimeError):
    """The native library cannot be built or loaded here; the message says why and what would help."""


@functools.cache
def load_library(build_root: Path | None = None) -> ctypes.CDLL:
    """The compiled library, built if need be (about 3 s, once a machine). Raises NativeUnavailable.

    `build_root`: the folder to build under; default: torch's extension cache.
    """
    try:
        from torch.utils import cpp_extension  # imports setuptools, which an environment may lack
    except ImportError as error:
        raise NativeUnavailable(f"torch.utils.cpp_extension: {error}; install setuptools") from error
    flags = _flags()
    root = build_root or Path(cpp_extension.get_default_build_root())
    key = _key(flags)
    folder = root / f"slidedp_host_{key}"
    library = folder / "slidedp_host.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "build.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two ranks at first use: the second finds the first one's library
                if not library.exists():
                    _build(cpp_extension, f"slidedp_host_{key}", flags, folder, library)
        return _declare(ctypes.CDLL(str(library)))
    except OSError as error:
        raise NativeUnavailable(f"{library}: {error}") from error


def _build(cpp_extension: Any, name: str, flags: list[str], folder: Path, library: Path) -> None:
    if not cpp_extension.is_ninja_available():
        raise NativeUnavailable("ninja is not installed; `pip install ninja`")
    if not shutil.which(cpp_extension.get_cxx_compiler()):
        raise NativeUnavailable("no C++ compiler found; install g++ or set CXX")
    # A folder of its own, so that what a killed build left (torch's lock file above all) cannot matter.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as workspace:
        try:
            cpp_extension.load(
                name,
                [str(SOURCE)],
                extra_cflags=flags,
                build_directory=workspace,
                with_cuda=False,
                is_python_module=False,
            )
        except (RuntimeError, ImportError) as error:
            raise NativeUnavailable(f"compiling {SOURCE.name} failed: {str(error).strip()[-2000:]}") from error
        os.replace(Path(workspace) / f"{name}.so", library)


def _flags() -> list[str]:
    # No contraction and no fast-math: see the head of adamw.cpp. The two -fno flags only drop errno and trap handling,
    # without which sqrt and conditional moves do not vectorise; values are untouched.
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return ["-O3", native, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def _key(flags: list[str]) -> str:
    """-march=native code must not be found by another processor that shares the home directory."""
    try:
        features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    parts = [SOURCE.read_bytes(), " ".join(flags).encode(), features.encode(), torch.__version__.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
