"""The verdict of real steps on a plan: timed against the default rule's plan, and whether choosing it has paid for itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

PLAN, DEFAULT = "plan", "default"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kept`: the solver's plan, or the default rule's. Times in microseconds.

    Of one step, the median of `num_steps` of the slowest rank: `plan_measured_us`, `default_measured_us`; beside it what the
    simulator says of either, and the solver's own model of its plan (`plan_predicted_us`).
    What selection has cost: `measuring_us` stages and `solving_us`, next to nothing where that came from the cache; `trying_us`:
    how much longer than the faster plan's the steps of the slower one took, and putting the one in the place of the other.
    """

    kept: str
    num_steps: int
    plan_predicted_us: int
    plan_simulated_us: int
    plan_measured_us: int
    default_simulated_us: int
    default_measured_us: int
    measuring_us: int
    solving_us: int
    trying_us: int

    @property
    def cost_us(self) -> int:
        return self.measuring_us + self.solving_us + self.trying_us

    @property
    def gain_us(self) -> int:
        """What the plan that is kept saves a step, against the default."""
        return self.default_measured_us - self.plan_measured_us if self.kept == PLAN else 0

    @property
    def pays_back_after(self) -> int | None:
        """Steps after which selection has saved what it cost; None if it saves nothing."""
        return math.ceil(self.cost_us / self.gain_us) if self.gain_us > 0 else None

    @property
    def kept_us(self) -> int:
        """What a step of the plan that is kept took."""
        return self.plan_measured_us if self.kept == PLAN else self.default_measured_us

    @property
    def off(self) -> float:
        """Measured over simulated step of the plan that is kept, less 1: how far the cost model is from the clock."""
        simulated = self.plan_simulated_us if self.kept == PLAN else self.default_simulated_us
        return self.kept_us / max(simulated, 1) - 1
