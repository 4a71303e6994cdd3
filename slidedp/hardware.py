"""Hardware profiles by name: the built-in ones, the nearest to the machine at hand, and the machine itself, measured."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from slidedp.cache import cache_folder, machine_hash, read_cached, write_cached
from slidedp.compiler.costmodel.hardware import HardwareProfile, builtin_names
from slidedp.executor.measure.machine import measure_machine
from slidedp.executor.ranks.collectives import open_collectives, together
from slidedp.progress import progress_bar
from slidedp.ranks import Ranks, find_ranks


def builtin_profiles() -> tuple[str, ...]:
    """Names that :func:`load_profile` knows."""
    with as_file(files("slidedp") / "profiles") as folder:
        return builtin_names(folder)


def load_profile(
    profile: str | Path | HardwareProfile, *, ranks: Ranks | None = None, cache_dir: str | Path | None = None
) -> HardwareProfile:
    """A built-in name, a path to a YAML file, a profile, ``"auto"`` or ``"measure"``.

    ``"auto"`` measures nothing: what was measured here before (``"measure"``, ``slidedp profile``) if there is such a profile in
    `cache_dir`, else the built-in one nearest to this machine. ``"measure"`` measures, and keeps the result for ``"auto"``;
    under torchrun all ranks must ask for it. `ranks`: who this process is; default: found out where it matters.

    Raises ValueError for anything else, listing the built-in names.
    """
    if isinstance(profile, str) and profile == "measure":
        return measure_hardware(ranks=ranks, cache_dir=cache_dir)
    if isinstance(profile, str) and profile == "auto":
        here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        path = kept_profile(ranks or Ranks(0, 1, here), cache_dir)
        return read_cached(path, HardwareProfile.from_yaml) or detect()
    with as_file(files("slidedp") / "profiles") as folder:
        return HardwareProfile.load(profile, folder)


def measure_hardware(
    *,
    quick: bool = False,
    device: str | torch.device | None = None,
    num_threads: int | None = None,
    ranks: Ranks | None = None,
    cache_dir: str | Path | None = None,
    keep: bool = True,
    show_progress: bool = True,
) -> HardwareProfile:
    """This machine, measured: rates, and tables by size, load and threads. Also ``HardwareProfile.measure()``.

    Takes some 10 s, and host memory of several times its caches (4 GiB or more with a GPU). Under torchrun it is collective, and
    the profile is of as many GPUs as there are ranks; what is measured by one rank says nothing of several at once.

    Args:
        quick: a few seconds, less exact.
        device: as for `slidedp.compile`.
        num_threads: of the update; default: as many as the runtime takes.
        keep: remember it in `cache_dir` (default: ``~/.cache/slidedp``) as what ``"auto"`` means here.
    """
    ranks = ranks or find_ranks(device)
    collectives = open_collectives(ranks.device, ranks.rank, ranks.world_size)
    try:
        with together(collectives), progress_bar("measuring", show=show_progress and ranks.rank == 0) as report:
            figures = measure_machine(ranks.device, collectives, num_threads=num_threads, quick=quick, report=report)
    finally:
        collectives.close()
    base, cuda = detect(ranks.device.type), ranks.device.type == "cuda"
    gpu_name = torch.cuda.get_device_name(ranks.device) if cuda else base.gpu_name
    rates: dict[str, Any] = dict(figures.rates)
    profile = replace(
        base, name=f"{gpu_name} x{ranks.world_size} (measured)", gpu_name=gpu_name, tables=figures.tables,
        num_gpus=ranks.world_size if cuda else base.num_gpus, **rates)  # fmt: skip
    if keep and ranks.rank == 0:
        write_cached(kept_profile(ranks, cache_dir), profile.to_yaml())
    return profile


HardwareProfile.measure = staticmethod(measure_hardware)


def kept_profile(ranks: Ranks, cache_dir: str | Path | None = None) -> Path | None:
    """Where the measured profile of this machine is kept, for as many ranks."""
    folder = cache_folder(cache_dir)
    return folder / f"hardware-{machine_hash(ranks.device.type, ranks.world_size)}.yaml" if folder else None


def detect(device_type: str | None = None) -> HardwareProfile:
    """The built-in profile nearest to this machine, with its real number of GPUs, memory and cores: ``NAME (this machine)``.

    Without a GPU, or for `device_type` ``cpu``: ``cpu``, half of the memory playing HBM. With one: of the profiles whose
    `gpu_name` shares most words with the device's, the one with the nearest number of GPUs. Rates are the profile's: nothing
    is measured here.
    """
    host_bytes = host_memory_bytes()
    num_cores = len(os.sched_getaffinity(0))
    if device_type == "cpu" or not torch.cuda.is_available():
        return fit(load_profile("cpu"), num_gpus=1, hbm_bytes=host_bytes // 2, host_bytes=host_bytes, num_cores=num_cores)
    num_gpus = torch.cuda.device_count()
    nearest = nearest_profile(torch.cuda.get_device_name(), num_gpus, [load_profile(n) for n in builtin_profiles()])
    hbm_bytes = torch.cuda.get_device_properties(0).total_memory
    return fit(nearest, num_gpus=num_gpus, hbm_bytes=hbm_bytes, host_bytes=host_bytes, num_cores=num_cores)


def fit(profile: HardwareProfile, *, num_gpus: int, hbm_bytes: int, host_bytes: int, num_cores: int) -> HardwareProfile:
    """`profile` with this machine's sizes. Its name says so: it is no longer the built-in one, and its hash is another."""
    return replace(profile, name=f"{profile.name} (this machine)", num_gpus=num_gpus, hbm_bytes=hbm_bytes,
                   host_bytes=host_bytes, num_cores=num_cores)


def host_memory_bytes() -> int:
    """Physical memory, or the limit of this process's control group (a container's) if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        return min(physical, int(limit.read_text()))
    except (OSError, ValueError):  # no control groups v2, or "max"
        return physical


def nearest_profile(gpu_name: str, num_gpus: int, profiles: list[HardwareProfile]) -> HardwareProfile:
    """The nearest of `profiles` with a GPU: by words shared with the GPU's name, then number of GPUs, then name."""
    words = set(gpu_name.lower().split())
    gpus = [p for p in profiles if p.gpu_name != "cpu"]
    return min(gpus, key=lambda p: (-len(words & set(p.gpu_name.lower().split())), abs(p.num_gpus - num_gpus), p.name))
