"""What a plan says about itself: the plan file, a summary of it, and memory by place."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from slidedp.compiler.memory import MemoryReport, estimate_memory
from slidedp.compiler.ops import Stream
from slidedp.compiler.planfile import Budgets, PlanFile, Predictions, make_planfile
from slidedp.compiler.policy import PLAN_KEYS
from slidedp.compiler.runlength import runs
from slidedp.compiler.units import format_bytes
from slidedp.planner import Specialisation
from slidedp.version import __version__

WIDTH = 80
"""Columns of a summary. `HEADINGS` follow the fields of a GroupDecision: whence and how weights come, and gradients go."""

HEADINGS = ("delivery", "source", "chunks", "reduction", "chunks", "activations")

BOUND_BY = {
    Stream.GPU: "compute", Stream.H2D: "copies to the device", Stream.D2H: "copies from the device", Stream.COMM: "collectives",
    Stream.CAST: "casts", Stream.HOST: "sums on the host", Stream.CPU: "the update",
}  # fmt: skip


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
    return make_planfile(__version__, spec.layers, s.hw, spec.decisions, spec.costs, spec.graph, budgets, predictions, shapes,
                         spec.solver)


def predicted_tokens_per_s(spec: Specialisation) -> float:
    """Of all ranks, if each has as many valid tokens as the batch that was planned for."""
    return spec.num_tokens * spec.layers.world_size / max(spec.timeline.step_us, 1) * 1e6


def describe(spec: Specialisation) -> str:
    """A few lines about one specialisation: those of its plan file."""
    return summary(planfile_of(spec))


def summary(plan: PlanFile) -> str:
    """A plan in a screenful: the model, how it moves, what it needs, how long a step should take and what binds it.

    No line is longer than `WIDTH` columns, unless one name in it is.
    """
    layers, p, ranks = plan.layers, plan.predictions, plan.world_size
    numel = sum(g.numel for g in layers.groups)
    elements = f"{numel / 1e6:,.1f} M" if numel >= 1e6 else f"{numel:,}"
    each, together = (" each", " in all") if ranks > 1 else ("", "")
    facts = {
        "batch": ", ".join(f"{key} {value}" for key, value in plan.specialisation.items()) + " a rank" * (ranks > 1),
        "hardware": f"{plan.hardware.name}, cost model {plan.cost_model.name}",
        "buffers": ", ".join(f"{key} {getattr(plan.decisions, key)}" for key in PLAN_KEYS),
    }
    predicted = {
        **solver_facts(plan),
        "predicted": f"{format_duration(p.step_us)} a step, {p.tokens_per_s:,.0f} tokens/s, bound by {bound_by(p.bottleneck)}",
        "memory": f"device {format_bytes(p.hbm_bytes)} of {format_bytes(plan.budgets.hbm_bytes)}{each}, "
                  f"host {format_bytes(p.host_bytes)} of {format_bytes(plan.budgets.host_bytes)}{together}",
    }
    return "\n".join([
        *wrapped(f"{layers.model or 'model'}: {len(layers.layers)} layers, {elements} elements, {layers.compute_dtype}, "
                 f"{ranks} rank{'s' * (ranks > 1)}", "  "),
        *(line for key, text in facts.items() for line in wrapped(f"{key:<10}{text}")),
        *decision_table(plan),
        *shared_groups(plan),
        *(line for key, text in predicted.items() for line in wrapped(f"{key:<10}{text}")),
        *["decisions were edited: the predictions are of those before"] * plan.edited,
    ])  # fmt: skip


def solver_facts(plan: PlanFile) -> dict[str, str]:
    """How near to the best the plan is proven to be, and what the rule's would take; nothing for one that was not solved."""
    s = plan.solver
    if s is None:
        return {}
    kept = "the rule's plan kept" if s.name == "rule" else f"the rule's plan would take {format_duration(s.rule_us)}"
    return {"solver": f"within {s.gap:.2%} of the bound {format_duration(s.bound_us)}, {kept}"}


def decision_table(plan: PlanFile) -> Iterator[str]:
    """A line for each run of groups with the same decision."""
    rows = [(name, (d.delivery, d.source, d.delivery_chunks, d.reduction, d.return_chunks, d.act))
            for name, d in plan.decisions.groups.items()]
    table = [("", *HEADINGS), *((name, *map(str, row)) for name, row in runs(rows))]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(f"{cell:>{w}}" if HEADINGS[i - 1] == "chunks" and i else f"{cell:<{w}}"
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()  # fmt: skip


def shared_groups(plan: PlanFile) -> Iterator[str]:
    """What the groups of several stages are: their parameters, where those are known (not in a plan that was read)."""
    for group in plan.layers.groups:
        if len(group.uses) > 1:
            names = ", ".join([p.name for p in group.params[:2]] + ["..."] * (len(group.params) > 2))
            yield from wrapped(f"  {group.name}: {names + ', ' if names else ''}used by {' and '.join(group.uses)}", "    ")


def bound_by(stream: str) -> str:
    """In words that are also true where the CPU plays the device."""
    return BOUND_BY[Stream(stream)] if stream in tuple(Stream) else stream


def format_duration(us: float) -> str:
    """ "5.5 s", "12.3 ms"."""
    return f"{us / 1e6:.1f} s" if us >= 1e6 else f"{us / 1e3:.1f} ms"


def wrapped(text: str, indent: str = " " * 10) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip
