"""What a plan file records of its costs: their sources, what was measured, and whether choosing by them has paid for itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slidedp.compiler.costmodel.measured import Measurement, read_measurement
from slidedp.compiler.strict import as_int, as_mapping, check_keys


@dataclass(frozen=True)
class CostRecord:
    """`sources`: number of ops by source of their duration. `default_step_us`: of the default rule's plan under the same
    costs, None where that plan does not fit.
    """

    sources: Mapping[str, int] = field(default_factory=dict)
    measurement: Measurement = field(default_factory=Measurement)
    default_step_us: int | None = None

    def pays_back_after(self, step_us: int) -> int | None:
        """Steps of `step_us` after which choosing has saved what measuring took; None without such a saving."""
        gain_us = (self.default_step_us or 0) - step_us
        return math.ceil(self.measurement.seconds * 1e6 / gain_us) if gain_us > 0 else None

    def to_content(self) -> dict[str, Any]:
        return {"sources": dict(self.sources), "default_step_us": self.default_step_us, "measured": self.measurement.to_content()}


def read_costs(content: object, where: str) -> CostRecord:
    """The inverse of :meth:`CostRecord.to_content`. ValueError, naming the place, for anything else."""
    top = as_mapping(content, where)
    check_keys(top, ("sources", "default_step_us", "measured"), where)
    sources = {k: as_int(v, f"{where}: sources: {k}") for k, v in as_mapping(top["sources"], f"{where}: sources").items()}
    default = None if top["default_step_us"] is None else as_int(top["default_step_us"], f"{where}: default_step_us")
    return CostRecord(sources, read_measurement(top["measured"], f"{where}: measured"), default)
