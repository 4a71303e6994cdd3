"""What a plan says about itself: the plan file, a summary of it, and memory by place."""

from __future__ import annotations

from slidedp.compiler.memory import MemoryReport, estimate_memory
from slidedp.compiler.planfile import Budgets, PlanFile, Predictions, make_planfile
from slidedp.compiler.planyaml import write_decisions
from slidedp.compiler.units import format_bytes
from slidedp.planner import Specialisation
from slidedp.version import __version__


def memory_of(spec: Specialisation) -> MemoryReport:
    return estimate_memory(spec.layers, spec.decisions)


def planfile_of(spec: Specialisation) -> PlanFile:
    """The plan file of one specialisation: decisions, predictions, and hashes of all that they rest on."""
    s, memory, timeline = spec.settings, memory_of(spec), spec.timeline
    budgets = Budgets(s.hbm_budget or s.hw.hbm_bytes, s.host_budget or s.hw.host_bytes)
    predictions = Predictions(
        step_us=timeline.step_us, tokens_per_s=predicted_tokens_per_s(spec), hbm_bytes=memory.hbm_bytes,
        host_bytes=memory.host_bytes, bottleneck=str(timeline.bottleneck))
    shapes = {key: "x".join(map(str, shape)) for key, shape in spec.shapes.items()}
    return make_planfile(__version__, spec.layers, s.hw, spec.decisions, spec.costs, spec.graph, budgets, predictions, shapes)


def predicted_tokens_per_s(spec: Specialisation) -> float:
    """Of all ranks, if each has as many valid tokens as the batch that was planned for."""
    return spec.num_tokens * spec.layers.world_size / max(spec.timeline.step_us, 1) * 1e6


def describe(spec: Specialisation) -> str:
    """A few lines about one specialisation: those of its plan file."""
    return summary(planfile_of(spec))


def summary(plan: PlanFile) -> str:
    """A plan in a screenful: the model, how it moves, what it needs, how long a step should take and what binds it."""
    layers, p, ranks = plan.layers, plan.predictions, plan.world_size
    batch = ", ".join(f"{key} {value}" for key, value in plan.specialisation.items())
    rows = write_decisions(plan.decisions)
    width = max(map(len, rows["decisions"]))
    lines = [
        f"{layers.model or 'model'}: {len(layers.layers)} layers, {sum(g.numel for g in layers.groups) / 1e6:,.1f} M elements, "
        f"{layers.compute_dtype}, {ranks} rank{'s' * (ranks > 1)}; {batch}",
        f"hardware {plan.hardware}, cost model {plan.cost_model}",
        "plan " + ", ".join(f"{key} {value}" for key, value in rows["plan"].items()),
        *(f"  {name:<{width}}  {', '.join(f'{k} {v}' for k, v in row.items())}" for name, row in rows["decisions"].items()),
        f"predicted step {p.step_us / 1e3:.1f} ms, {p.tokens_per_s:,.0f} tokens/s, bound by {p.bottleneck}",
        f"HBM {format_bytes(p.hbm_bytes)} of {format_bytes(plan.budgets.hbm_bytes)} a GPU, "
        f"host {format_bytes(p.host_bytes)} of {format_bytes(plan.budgets.host_bytes)} (once, for all ranks)",
    ]
    return "\n".join(lines + ["decisions were edited: the predictions are of those before"] * plan.edited)
