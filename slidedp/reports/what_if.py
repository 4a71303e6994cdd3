"""What can be computed again from a plan file, without the model: ops, costs, timeline and memory, as planned or changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.measured import Measurement
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.footprint.memory import MemoryReport
from slidedp.compiler.layergraph import LayerGraph, recut
from slidedp.compiler.ops import OpGraph
from slidedp.compiler.planfile.planfile import Budgets, PlanFile
from slidedp.compiler.simulation.predict import cost_model_of, predict, price
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.compiler.solver.defaults import check_budgets
from slidedp.hardware import builtin_profiles, load_profile
from slidedp.passes.pipeline import lower


@dataclass(frozen=True, eq=False)
class Outcome:
    """What some decisions lead to, on paper."""

    layers: LayerGraph
    decisions: Decisions
    graph: OpGraph
    timeline: Timeline
    memory: MemoryReport


@dataclass(frozen=True)
class WhatIf:
    """The model, machine and costs of a plan; :meth:`outcome` is what any decisions would lead to there."""

    layers: LayerGraph
    hw: HardwareProfile
    budgets: Budgets
    cost_model: CostModel | None = None
    measurement: Measurement | None = None

    def outcome(self, decisions: Decisions, *, verified: bool = True) -> Outcome:
        """Raises ValueError, saying why, for decisions that do not fit the budgets or (`verified`) make no sound graph."""
        layers = recut(self.layers, decisions.slices)
        memory = check_budgets(layers, decisions, self.budgets.hbm_bytes, self.budgets.host_bytes)
        graph = lower(layers, decisions, hbm_budget=self.budgets.hbm_bytes, verified=verified)
        costs = price(graph, cost_model_of(layers, cost_model=self.cost_model, measurement=self.measurement), self.hw)
        return Outcome(layers, decisions, graph, predict(graph, costs, self.hw), memory)


def what_if(
    plan: PlanFile, hw: str | Path | HardwareProfile | None = None, cost_model: CostModel | None = None
) -> tuple[WhatIf, tuple[str, ...]]:
    """For `plan`, and what a reader should know about how far it can be trusted, a sentence each.

    `hw`: the machine; default: the built-in profile that the plan was made with, or this machine's. `cost_model`: the
    plan's own, if it had one: it is not in the file. Raises ValueError for a plan whose machine is neither.
    """
    profile = profile_of(plan) if hw is None else load_profile(hw)
    notes = []
    if profile.content_hash() != plan.hardware.hash:
        notes.append(f"computed for the hardware profile {profile.name} ({profile.content_hash()}); the plan was made with "
                     f"{plan.hardware}")
    if cost_model is None and plan.cost_model.name != "analytic":
        notes.append(f"the plan was made with the cost model {plan.cost_model.name}, which is not in the file: these times are "
                     "of the analytic one")
    if plan.edited:
        notes.append("decisions were edited since the plan was made: these figures are of the decisions as they are now")
    measurement = plan.costs.measurement if plan.costs else None
    return WhatIf(plan.layers, profile, plan.budgets, cost_model, measurement), tuple(notes)


def profile_of(plan: PlanFile) -> HardwareProfile:
    """The profile that `plan` was made with, if it can be had by its name: built in, or what ``auto`` is on this machine.

    Of a built-in name the profile as it is now, whatever it was then. ValueError, saying what to do, if there is none.
    """
    if plan.hardware.name in builtin_profiles():
        return load_profile(plan.hardware.name)
    here = load_profile("auto")
    if here.content_hash() == plan.hardware.hash:
        return here
    raise ValueError(f"the plan was made for hardware {plan.hardware}, which is neither built in nor this machine: pass its "
                     f"profile with --hw (built in: {', '.join(builtin_profiles())})")
