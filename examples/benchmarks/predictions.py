"""What plans are predicted to do on a machine that need not be here, beside the compute alone. No GPU, no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from device import TINY

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.footprint.memory import MemoryReport
from slidedp.compiler.ops import Stream
from slidedp.compiler.residency import is_resident
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.paper import draft_on_paper, settings_on_paper
from slidedp.passes.pipeline import lower
from slidedp.planning.decide import NO_BUDGET
from slidedp.planning.specialisation import Specialisation
from slidedp.presets import PRESETS
from slidedp.reports.report import memory_of

PRESETS.setdefault("qwen3-tiny", {"model_type": "qwen3", **TINY})


@dataclass(frozen=True)
class Prediction:
    """Of one plan. `compute_us`: forward, recompute and backward of the same batch on one GPU, every layer recomputed."""

    step_us: int
    compute_us: int
    timeline: Timeline
    memory: MemoryReport
    choices: str

    @property
    def of_compute_only(self) -> float:
        return self.compute_us / self.step_us


def predict_plan(size: str, batch: int, seq: int, ranks: int, hw: HardwareProfile, policy: Mapping[str, Any],
                 solver: str) -> Prediction:
    """Raises BudgetError, saying why, if no plan fits."""
    settings = settings_on_paper(hw, ranks, policy=dict(policy) or None, solver=solver)
    planner, draft = draft_on_paper(f"qwen3-{size.lower()}", settings, batch, seq)
    spec = planner.finish(draft, planner.decide(draft))
    alone_us = compute_only_us(size, batch, seq, hw)
    return Prediction(spec.timeline.step_us, alone_us, spec.timeline, memory_of(spec), choices_of(spec))


def compute_only_us(size: str, batch: int, seq: int, hw: HardwareProfile) -> int:
    """The GPU's ops of a plan that recomputes every layer, one after the other: memory, copies and updates do not count."""
    settings = settings_on_paper(hw, 1, policy={"state": "host", "act": "recompute"}, solver="rule", hbm_budget=NO_BUDGET,
                                 host_budget=NO_BUDGET)
    planner, draft = draft_on_paper(f"qwen3-{size.lower()}", settings, batch, seq)
    spec = Specialisation(draft.traces, draft.layers, planner.decide(draft), draft.num_tokens, draft.shapes, settings)
    graph = lower(spec.layers, spec.decisions, verified=False)
    costs = spec.costs_of(graph)
    return sum(costs.duration_us(op) for op in graph.ops if op.stream is Stream.GPU)


def choices_of(spec: Specialisation) -> str:
    """How many layers take which delivery (or have their state in HBM), and what becomes of their activations."""
    layers, decisions = spec.layers, spec.decisions
    routes: Counter[str] = Counter()
    acts: Counter[str] = Counter()
    for stage in layers.layers:
        acts[str(decisions.activation(stage))] += 1
        for name in stage.groups:
            group, d = layers.group_by_name[name], decisions.of(name)
            routes["state in HBM" if is_resident(group, d) else f"{d.delivery} {d.source}"] += 1
    boundaries = sum(decisions.of(name).boundary == "host" for stage in layers.layers for name in stage.groups)
    parts = [", ".join(f"{n} {what}" for what, n in counter.most_common()) for counter in (routes, acts)]
    if boundaries:
        parts.append(f"{boundaries} boundaries on the host")
    if decisions.slices > 1:
        parts.append(f"{decisions.slices} slices")
    return "; ".join(parts)
