"""What a plan says about itself: a short description, memory by place, and the plan file."""

from __future__ import annotations

from slidedp import __version__
from slidedp.compiler.memory import Memory, estimate_memory
from slidedp.compiler.planfile import Budgets, PlanFile, Predictions, make_planfile
from slidedp.compiler.runlength import runs
from slidedp.compiler.units import format_bytes
from slidedp.planner import DTYPE_NAMES, Specialisation


def memory_of(spec: Specialisation) -> Memory:
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
    """A few lines: the model, how it moves, what it needs, how long a step should take and what binds it."""
    layers, d, memory, timeline = spec.layers, spec.decisions, memory_of(spec), spec.timeline
    num_params = sum(p.numel for g in layers.groups for p in g.params)
    lines = [
        f"SlideDP plan: {layers.model}, {num_params / 1e6:.1f} M parameters, {len(layers.layers)} layers, "
        f"{layers.world_size} rank{'s' if layers.world_size > 1 else ''}, {DTYPE_NAMES[spec.settings.compute_dtype]} compute, "
        f"profile {spec.settings.hw.name}",
        f"  window {d.window} weight slots, {d.grad_slots} gradient slots; {len(spec.graph.ops)} ops, "
        f"{len(spec.graph.edges)} edges",
    ]
    for names, decision in runs([(g.name, d.of(g.name)) for g in layers.groups]):
        lines.append(f"  {names}: {decision.source} -> {decision.delivery} x{decision.delivery_chunks}, gradients "
                     f"{decision.reduction} x{decision.return_chunks}, activations {decision.act}")
    lines += [
        f"  device {format_bytes(memory.hbm_bytes)}, host {format_bytes(memory.host_bytes)} (once, for all ranks)",
        f"  predicted step {timeline.step_us / 1e3:.1f} ms, {predicted_tokens_per_s(spec):.0f} tokens/s, "
        f"bound by {timeline.bottleneck}",
    ]
    return "\n".join(lines)
