"""Hardware profiles by name: the built-in ones, and the nearest to the machine at hand."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import torch

from slidedp.compiler.hardware import HardwareProfile, builtin_names


def builtin_profiles() -> tuple[str, ...]:
    """Names that :func:`load_profile` knows."""
    with as_file(files("slidedp") / "profiles") as folder:
        return builtin_names(folder)


def load_profile(profile: str | Path | HardwareProfile) -> HardwareProfile:
    """A built-in name, a path to a YAML file, a profile, or ``"auto"``: the built-in one nearest to this machine.

    Raises ValueError for anything else, listing the built-in names.
    """
    if isinstance(profile, str) and profile == "auto":
        return detect()
    with as_file(files("slidedp") / "profiles") as folder:
        return HardwareProfile.load(profile, folder)


def detect() -> HardwareProfile:
    """The built-in profile nearest to this machine, with its real number of GPUs, memory and cores: ``NAME (this machine)``.

    Without a GPU: ``cpu``, half of the memory playing HBM. With one: of the profiles whose `gpu_name` shares most words
    with the device's, the one with the nearest number of GPUs. Rates are the profile's: nothing is measured here.
    """
    host_bytes = host_memory_bytes()
    num_cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return fit(load_profile("cpu"), num_gpus=1, hbm_bytes=host_bytes // 2, host_bytes=host_bytes, num_cores=num_cores)
    num_gpus = torch.cuda.device_count()
    nearest = nearest_profile(torch.cuda.get_device_name(), num_gpus, [load_profile(n) for n in builtin_profiles()])
    hbm_bytes = torch.cuda.get_device_properties(0).total_memory
    return fit(nearest, num_gpus=num_gpus, hbm_bytes=hbm_bytes, host_bytes=host_bytes, num_cores=num_cores)


def fit(profile: HardwareProfile, **sizes: int) -> HardwareProfile:
    """`profile` with this machine's sizes. Its name says so: it is no longer the built-in one, and its hash is another."""
    return replace(profile, name=f"{profile.name} (this machine)", **sizes)


def host_memory_bytes() -> int:
    """Physical memory, or the limit of this process's control group (a container's) if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(physical, int(limit.read_text()))
    except (OSError, ValueError):  # no control groups v2, or "max"
        return physical


def nearest_profile(gpu_name: str, num_gpus: int, profiles: list[HardwareProfile]) -> HardwareProfile:
    """Of `profiles` with a GPU, the nearest: words of the GPU's name first, then the number of GPUs, then the name's order."""
    words = set(gpu_name.lower().split())
    gpus = [p for p in profiles if p.gpu_name != "cpu"]
    return min(gpus, key=lambda p: (-len(words & set(p.gpu_name.lower().split())), abs(p.num_gpus - num_gpus), p.name))
