"""A plan that takes part in a trial (trial/validation.py), with what the planner knows of it and its steps' times."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slidedp.compiler.decisions import Decisions
from slidedp.executor.machine.switching import Lowered

if TYPE_CHECKING:
    from slidedp.planning.specialisation import Specialisation


@dataclass(eq=False)
class Candidate:
    """`spec`: its first specialisation; `known`: all of them, by the micro-batches that they are for (see `Planner`).

    `times_us`: of its steps on trial; the first one does not count.
    """

    decisions: Decisions
    spec: Specialisation
    known: dict[tuple[int, ...], Specialisation]
    times_us: list[int] = field(default_factory=list)

    @property
    def lowered(self) -> Lowered:
        return self.spec.lowered

    @property
    def median_us(self) -> int:
        """Median time of the steps that count; at least 1."""
        return max(statistics.median_low(self.times_us[1:]), 1)
