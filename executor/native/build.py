"""Compiles this folder's C++ at first use with torch's extension builder and declares its functions to ctypes.

    elements.h   what one thread does to one range of elements
    update.h     one CPU update of a plan, and the blocks that it is cut into
    adamw.cpp    calls that return when the work is done: update, cast, reduction; and words shared with other processes
    queue.cpp    updates that are queued and run without Python, and casts and sums that go before them

The library is kept under torch's extension cache, in a folder named by a hash of everything its bits depend on: the
sources, the flags, the processor's features and torch's version. Any number of processes may ask at once: a file lock
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
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "adamw.cpp", FOLDER / "queue.cpp")

SEGMENT = np.dtype(
    [("start", "<i8"), ("end", "<i8"), ("keep", "<f4"), ("step_size", "<f4"), ("inv_bias2_sqrt", "<f4"), ("scale", "<f4"),
     ("copied", "<i8")]
)
"""Mirrors ``struct Segment``: elements ``[start, end)`` of a group that share their coefficients. `scale`: of the gradient;
`copied`: 1 if there is none."""

PART = np.dtype([("param", "<i8"), ("start", "<i8"), ("end", "<i8"), ("decays", "<i8")])
"""Mirrors ``struct Part``: elements ``[start, end)`` of a group, of its trainable parameter number `param`."""

STATE = np.dtype([("master", "<u8"), ("exp_avg", "<u8"), ("exp_avg_sq", "<u8"), ("shadow", "<u8")])
"""Mirrors ``struct State``: addresses of a group's buffers; `shadow` 0 for none."""

GATE = np.dtype([("words", "<u8"), ("at_least", "<i8")])
"""Mirrors ``struct Gate``: the address of one word a rank, and what each has to reach."""

COMPLETION = np.dtype([("id", "<i8"), ("result", "<i8"), ("start_s", "<f8"), ("end_s", "<f8")])
"""Mirrors ``struct Completion``. `result`: DONE, SKIPPED, or the first element of a tile with a gradient that is not finite."""

DONE, SKIPPED = -1, -2
"""Results of an update: SKIPPED when its step's loss, or scale, is not finite."""

DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2}
"""Mirrors ``enum Dtype``; 0 stands for no tensor."""

_POINTER, _INT32, _INT64, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_double


class What(IntEnum):
    """Mirrors ``enum What``: an update of the state in place; what it would be next, elsewhere; and what becomes of that."""

    UPDATE = 0
    SPECULATE = 1
    SETTLE = 2


class Recipe(ctypes.Structure):
    """Mirrors ``struct Recipe``: what an optimizer keeps for all steps."""

    _fields_ = [("beta1", _DOUBLE), ("beta2", _DOUBLE), ("eps", _DOUBLE), ("weight_decay", _DOUBLE)]


class Rows(ctypes.Structure):
    """Mirrors ``struct Rows``: the rows of a table that an update is of. `masks`: address of rank 0's mask of even steps; the
    others follow at `odd_steps` and `stride` bytes. `touched`: 1 for rows that occur in a mask; `no_gradient`: 1 if it is zero.
    """

    _fields_ = [("masks", _POINTER), ("odd_steps", _INT64), ("num_ranks", _INT64), ("stride", _INT64), ("width", _INT64),
                ("touched", _INT64), ("no_gradient", _INT64)]


class Ranks(ctypes.Structure):
    """Mirrors ``struct Ranks``: how what the ranks share is laid out. Strides: in bytes and in int64s."""

    _fields_ = [("num_ranks", _INT64), ("present_stride", _INT64), ("loss_stride", _INT64)]


class StepConstants(ctypes.Structure):
    """Mirrors ``struct Step``: what all updates of a step share. Addresses, or 0: `losses`, of rank 0's loss cell;
    `scale`, of the double that gradients are multiplied by, which is there when an update may begin; NaN for no update.
    """

    _fields_ = [("step", _INT64), ("lr", _DOUBLE), ("loss_stamp", _INT64), ("losses", _POINTER), ("scale", _POINTER)]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "slidedp_pool_create": (_POINTER, [_INT32]),
    "slidedp_pool_destroy": (None, [_POINTER]),
    "slidedp_adamw": (
        _INT64,
        [_POINTER] * 5 + [_INT32, _POINTER, _INT32, _POINTER, _INT64] + [_FLOAT] * 5,
    ),
    "slidedp_update_create": (
        _POINTER,
        [_INT32, _POINTER, _POINTER, _POINTER, _INT32, _INT32, _POINTER, _INT64, _POINTER, _INT64, _POINTER],
    ),
    "slidedp_update_take_rows": (None, [_POINTER, _POINTER]),
    "slidedp_update_destroy": (None, [_POINTER]),
    "slidedp_update_now": (_INT64, [_POINTER, _POINTER, _INT64, _DOUBLE, _POINTER, _DOUBLE]),
    "slidedp_queue_create": (_POINTER, [_INT32, _INT32, _POINTER]),
    "slidedp_queue_crew": (_POINTER, [_POINTER]),
    "slidedp_queue_close": (None, [_POINTER]),
    "slidedp_queue_destroy": (None, [_POINTER]),
    "slidedp_queue_add": (None, [_POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER, _POINTER, _POINTER, _INT64]),
    "slidedp_queue_arrive": (None, [_POINTER, _INT64]),
    "slidedp_queue_halt": (None, [_POINTER]),
    "slidedp_queue_stop": (None, [_POINTER]),
    "slidedp_queue_collect": (_INT64, [_POINTER, _POINTER, _INT64]),
    "slidedp_cast": (None, [_POINTER, _POINTER, _POINTER, _INT32, _INT64]),
    "slidedp_reduce": (None, [_POINTER, _POINTER, _INT64, _POINTER, _INT32, _INT64]),
    "slidedp_store_release": (None, [_POINTER, _INT64]),
    "slidedp_load_min": (_INT64, [_POINTER, _INT64]),
}

_SHORT = {"slidedp_queue_add", "slidedp_queue_arrive", "slidedp_queue_halt", "slidedp_queue_stop", "slidedp_store_release",
          "slidedp_load_min"}
"""Calls of a microsecond or less: the GIL is kept, for getting it back may take a thousand times as long."""


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
        return _declare(str(library))
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
                [str(source) for source in SOURCES],
                extra_cflags=flags,
                build_directory=workspace,
                with_cuda=False,
                is_python_module=False,
            )
        except (RuntimeError, ImportError) as error:
            raise NativeUnavailable(f"compiling {FOLDER.name} failed: {str(error).strip()[-2000:]}") from error
        os.replace(Path(workspace) / f"{name}.so", library)


def _flags() -> list[str]:
    # No contraction and no fast-math: see the head of elements.h. The two -fno flags only drop errno and trap handling,
    # without which sqrt and conditional moves do not vectorise; values are untouched.
    x86 = platform.machine() in ("x86_64", "AMD64")
    # compilers prefer 256 bits to 512 on processors that would clock lower for it; this loop waits for memory, not the clock
    native = ["-march=native", "-mprefer-vector-width=512"] if x86 else ["-mcpu=native"]
    return ["-O3", *native, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def _key(flags: list[str]) -> str:
    """-march=native code must not be found by another processor that shares the home directory."""
    try:
        features = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    texts = [path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in (".cpp", ".h")]
    parts = [*texts, " ".join(flags).encode(), features.encode(), torch.__version__.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _declare(path: str) -> ctypes.CDLL:
    library, short = ctypes.CDLL(path), ctypes.PyDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(short if name in _SHORT else library, name)
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library


def in_process(pid: int, call: Callable[[int], object], address: int) -> None:
    """Calls `call(address)` in process `pid`, not in a fork of it: that has a copy of the threads' owner, but no threads to wait
    for.
    """
    if os.getpid() == pid:
        call(address)
