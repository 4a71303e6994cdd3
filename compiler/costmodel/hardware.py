"""What a machine can do, as a small set of rates: a frozen dataclass ⇄ YAML, with units in every name.

The analytic cost model (:mod:`slidedp.compiler.costmodel.costs`) uses these numbers and nothing else. Rates are in 10^9 bytes a
second (`_gbps`), *achieved* figures of long transfers, not peaks. Built-in profiles are YAML files of the package
``slidedp``, which says by argument where they are: this module knows no path of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from slidedp.compiler.costmodel.tables import Tables, read_tables
from slidedp.compiler.strict import as_float, as_int, as_mapping, as_str, check_keys, content_hash, load_yaml
from slidedp.compiler.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """One host with `num_gpus` GPUs. A profile of a machine without GPUs has `num_gpus` 1: the CPU plays the device."""

    name: str
    gpu_name: str
    """As `torch.cuda.get_device_name()` says it, or a part of it: what `"auto"` compares; ``cpu`` for no GPU."""
    num_gpus: int
    hbm_bytes: int
    """Device memory of one GPU that a process can use."""
    gpu_bf16_tflops: float
    """Dense matrix products in BF16 or FP16, achieved, 10^12 operations a second (multiply and add count as two)."""
    gpu_fp32_tflops: float
    """The same in FP32, without TF32."""
    hbm_gbps: float
    """Device memory bandwidth: the floor of every op on the GPU."""
    gpu_launch_us: float
    """Fixed cost of one op on a GPU stream."""
    h2d_gbps: float
    """Host to device, pinned, one GPU and one direction alone."""
    d2h_gbps: float
    h2d_all_gbps: float
    """Host to device, each GPU, all GPUs at once, one direction."""
    d2h_all_gbps: float
    duplex_gbps: float
    """Each GPU, *each* direction, all GPUs and both directions at once."""
    link_latency_us: float
    """Fixed cost of one copy over the host link."""
    gpu_link_gbps: float
    """Bytes a GPU receives from the others per second of an all-gather (bus rate); 0 if there is no direct link, in which
    case collectives cross the host links."""
    collective_latency_us: float
    host_bytes: int
    """Host memory that training state may take."""
    num_cores: int
    host_dram_gbps: float
    """Host memory traffic, reads plus writes, of CPU and copies together: what all ranks share."""
    cpu_adam_gparams: float
    """Fused AdamW (BF16 gradient in, BF16 shadow out) on all cores, links idle, 10^9 parameters a second."""
    cast_gbps: float
    """FP32 master to BF16 staging, *bytes written* a second, one rank alone."""
    cast_total_gbps: float
    """The same summed over all ranks casting at once."""
    host_task_us: float
    """Fixed cost of handing one task to a host worker."""
    tables: Tables = field(default_factory=Tables)
    """Rates by size, load and threads, of a measured profile: what the cost model reads where there are any."""

    measure: ClassVar[Callable[..., HardwareProfile]]
    """``HardwareProfile.measure()``: this machine's profile. Put in by ``slidedp.hardware``, as every import of the package
    does: what measures needs a device, threads and ranks, of which nothing in compiler/ may know."""

    def __post_init__(self) -> None:
        for key in _RATES_ABOVE_ZERO:
            if not getattr(self, key) > 0:
                raise ValueError(f"hardware profile {self.name!r}: {key}: {getattr(self, key)!r} must be more than 0")

    @staticmethod
    def load(profile: str | Path | HardwareProfile, builtin_dir: Path) -> HardwareProfile:
        """A built-in name, a path to a YAML file, or a profile, which is returned as it is.

        Raises ValueError for a name that is neither, listing the built-in names.
        """
        if isinstance(profile, HardwareProfile):
            return profile
        builtin = builtin_dir / f"{profile}.yaml"
        if isinstance(profile, str) and builtin.parent == builtin_dir and builtin.is_file():
            return HardwareProfile.from_yaml(builtin)
        if Path(profile).is_file():
            return HardwareProfile.from_yaml(Path(profile))
        raise ValueError(
            f"hardware profile {str(profile)!r}: no file and no built-in name; built in: {', '.join(builtin_names(builtin_dir))}"
        )

    @staticmethod
    def from_yaml(path: Path) -> HardwareProfile:
        """The profile in a YAML file. ValueError, naming key and file, for unknown, missing and wrongly typed keys."""
        return HardwareProfile.from_dict(load_yaml(path), str(path))

    @staticmethod
    def from_dict(content: object, where: str = "hardware profile") -> HardwareProfile:
        mapping = as_mapping(content, where)
        types = {f.name: str(f.type) for f in fields(HardwareProfile)}
        check_keys(mapping, list(types), where, required=[key for key in types if key != "tables"])
        values: dict[str, Any] = {}
        try:
            values["tables"] = read_tables(mapping.get("tables", {}), "tables")
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e
        for key, kind in types.items():
            if key == "tables":
                continue
            at = f"{where}: {key}"
            if key.endswith("_bytes"):
                values[key] = _size(mapping[key], at)
            elif kind == "int":
                values[key] = as_int(mapping[key], at, minimum=1)
            elif kind == "float":
                values[key] = as_float(mapping[key], at)
            else:
                values[key] = as_str(mapping[key], at)
        try:
            return HardwareProfile(**values)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from e

    def to_yaml(self) -> str:
        tables = yaml.safe_dump({"tables": self.tables.to_content()}, sort_keys=False, default_flow_style=None, width=130)
        scalars = {key: value for key, value in self._content().items() if key != "tables"}
        return yaml.safe_dump(scalars, sort_keys=False) + (tables if self.tables else "")

    def content_hash(self) -> str:
        """A hash of every number and name in the profile: two profiles predict the same only if it is equal."""
        return content_hash(self._content())

    def _content(self) -> dict[str, Any]:
        """Plain values by field; `tables` only where there are any, so that a profile without has the hash it always had."""
        scalars = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tables"}
        return scalars | ({"tables": self.tables.to_content()} if self.tables else {})

    def tflops(self, compute_dtype: str) -> float:
        """Achieved 10^12 operations a second of one GPU in `compute_dtype` (``float32`` or ``bfloat16``)."""
        return self.gpu_fp32_tflops if compute_dtype == "float32" else self.gpu_bf16_tflops


_MAY_BE_ZERO = ("gpu_launch_us", "link_latency_us", "gpu_link_gbps", "collective_latency_us", "host_task_us")
_RATES_ABOVE_ZERO = tuple(
    f.name for f in fields(HardwareProfile) if f.name not in ("name", "gpu_name", "tables", *_MAY_BE_ZERO)
)


def builtin_names(builtin_dir: Path) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in builtin_dir.glob("*.yaml")))


def _size(value: object, where: str) -> int:
    try:
        size = parse_bytes(value)  # type: ignore[arg-type]  # parse_bytes rejects what it does not take
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    return as_int(size, where, minimum=1)
