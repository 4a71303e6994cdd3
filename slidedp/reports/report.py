"""What a plan says about itself: the plan file, a summary of it, and memory by place."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from slidedp.compiler.costmodel.tablecosts import MEASURED_TABLE
from slidedp.compiler.decisions import Boundary, GroupDecision, Residence, Rows, StateHome, Update
from slidedp.compiler.footprint.memory import MemoryReport, estimate_memory
from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Stream
from slidedp.compiler.planfile.costrecord import CostRecord
from slidedp.compiler.planfile.planfile import Budgets, PlanFile, Predictions, make_planfile
from slidedp.compiler.planfile.planyaml import plan_values
from slidedp.compiler.planfile.verdict import PLAN, Verdict
from slidedp.compiler.residency import is_resident
from slidedp.compiler.runlength import runs
from slidedp.compiler.units import format_bytes
from slidedp.version import __version__

if TYPE_CHECKING:
    from slidedp.planning.specialisation import Specialisation

WIDTH = 80
"""Columns of a summary. `HEADINGS` follow the fields of a GroupDecision: whence and how weights come, and gradients go."""

HEADINGS = ("delivery", "source", "chunks", "reduction", "chunks", "activations")

RESIDENCE = {"boundary": Boundary.HBM, "weights": Residence.STREAM, "state": StateHome.HOST, "update": Update.DEFERRED,
             "rows": Rows.WHOLE}
"""Further columns, there if anything in them differs from this."""

BOUND_BY = {
    Stream.GPU: "compute", Stream.H2D: "copies to the device", Stream.D2H: "copies from the device", Stream.COMM: "collectives",
    Stream.UPDATE: "the update on the device",
    Stream.CAST: "casts", Stream.HOST: "sums on the host", Stream.CPU: "the update",
}  # fmt: skip


def memory_of(spec: Specialisation) -> MemoryReport:
    """Memory as planned, with a note of what has turned out not to fit."""
    return replace(estimate_memory(spec.layers, spec.decisions), notes=notes_of(spec))


def notes_of(spec: Specialisation) -> tuple[str, ...]:
    """Notes on what runs differently from the plan."""
    return spec.fallback.notes(spec.layers.num_lanes)


def planfile_of(spec: Specialisation) -> PlanFile:
    """The plan file of one specialisation: decisions, predictions, and hashes of all that they rest on."""
    s, memory, timeline = spec.settings, memory_of(spec), spec.timeline
    budgets = Budgets(s.hbm_budget or s.hw.hbm_bytes, s.host_budget or s.hw.host_bytes)
    predictions = Predictions(
        step_us=timeline.step_us, tokens_per_s=predicted_tokens_per_s(spec), hbm_bytes=memory.hbm_bytes,
        host_bytes=memory.host_bytes, bottleneck=str(timeline.bottleneck))
    shapes: dict[str, str | int] = {key: "x".join(map(str, shape)) for key, shape in spec.shapes.items()}
    if len(spec.traces) > 1:
        shapes["micro_batches"] = len(spec.traces)
    return make_planfile(__version__, spec.layers, s.hw, spec.decisions, spec.costs, spec.graph, budgets, predictions, shapes,
                         cost_record(spec), spec.solver, spec.sliced)


def cost_record(spec: Specialisation) -> CostRecord | None:
    """Where the costs came from, and what choosing by them has brought; None if all are analytic or the user's."""
    sources = Counter(spec.costs.sources.values())
    if not spec.measurement and MEASURED_TABLE not in sources:
        return None
    return CostRecord(dict(sorted(sources.items())), spec.measurement, spec.default_step_us)


def predicted_tokens_per_s(spec: Specialisation) -> float:
    """Tokens per second of all ranks, if each has as many valid tokens as the batch that was planned for."""
    return spec.num_tokens * spec.layers.world_size / max(spec.timeline.step_us, 1) * 1e6


def describe(plan: PlanFile, notes: Iterable[str]) -> str:
    """A few lines about a plan: its summary, and what runs otherwise."""
    return "\n".join([summary(plan), *(line for note in notes for line in wrapped(note, "  "))])


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
        "buffers": ", ".join(f"{key}\N{NO-BREAK SPACE}{value}" for key, value in plan_values(plan.decisions).items()),
    }
    predicted = {
        **({"slices": f"{plan.decisions.slices}: {plan.sliced}"} if plan.sliced and not plan.edited else {}),
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
        *(line for key, text in measured_facts(plan).items() for line in wrapped(f"{key:<10}{text}")),
        *validation_lines(plan),
        *["decisions were edited: the predictions are of those before"] * plan.edited,
    ])  # fmt: skip


def measured_facts(plan: PlanFile) -> dict[str, str]:
    """Where costs came from, and what measuring took and brought; nothing for a plan on analytic costs."""
    if plan.costs is None:
        return {}
    facts = {"costs": ", ".join(f"{n} {source}" for source, n in plan.costs.sources.items()) + " (ops)"}
    if plan.costs.measurement and plan.validation is None:  # else that says it better
        steps = plan.costs.pays_back_after(plan.predictions.step_us)
        no_gain = "the default plan does not fit" if plan.costs.default_step_us is None else "the default plan is as fast"
        gain = no_gain if steps is None else f"paid back after {steps} steps"
        facts["choosing"] = f"measuring stages took {plan.costs.measurement.seconds:.1f} s; {gain}"
    return facts


def validation_lines(plan: PlanFile) -> list[str]:
    facts = {} if plan.validation is None else validation_facts(plan.validation)
    return [line for key, text in facts.items() for line in wrapped(f"{key:<10}{text}")]


def validation_facts(v: Verdict) -> dict[str, str]:
    """What real steps have said: predicted, simulated and measured side by side; what selection cost, and when it has paid."""
    kept, off = "the plan is kept" if v.kept == PLAN else "the default is kept", f"{v.off:+.1%}"
    plan = (f"plan {format_duration(v.plan_measured_us)} a step (simulated {format_duration(v.plan_simulated_us)}, predicted "
            f"{format_duration(v.plan_predicted_us)})")
    default = f"default {format_duration(v.default_measured_us)} (simulated {format_duration(v.default_simulated_us)})"
    steps = v.pays_back_after
    gain = "nothing is saved against the default" if steps is None else (
        f"{format_duration(v.gain_us)} saved a step: paid back after {steps} step{'s' * (steps != 1)}")
    cost = (f"took {format_duration(v.cost_us)} (measuring {format_duration(v.measuring_us)}, solving "
            f"{format_duration(v.solving_us)}, trying {format_duration(v.trying_us)})")
    return {"validated": f"{plan}, {default}, medians of {v.num_steps}: {kept}, {off} from its simulation",
            "selection": f"{cost}; {gain}"}


def stage_table(plan: PlanFile) -> str:
    """What was measured of each kind of stage, by phase: time of the device, and of the host that issues it; device memory at
    most, and left at the end.
    """
    if plan.costs is None or not plan.costs.measurement:
        return "no stage was measured: the costs of compute are analytic"
    rows: list[tuple[str, ...]] = [("stage kind", "phase", "act", "time", "issuing", "peak", "kept")]
    for p in plan.costs.measurement.phases:
        sizes = ["-" if size is None else format_bytes(size) for size in (p.peak_bytes, p.kept_bytes)]
        times = ["-" if us is None else f"{us / 1e3:.3f} ms" for us in (p.duration_us, p.issue_us)]
        rows.append((p.kind_key, str(p.phase), str(p.act), *times, *sizes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(f"{cell:<{w}}" if i < 3 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows]
    return "\n".join([*text, f"measured in {plan.costs.measurement.seconds:.1f} s"])


def solver_facts(plan: PlanFile) -> dict[str, str]:
    """How near to the best the plan is proven to be, and what the rule's would take; nothing for one that was not solved."""
    s = plan.solver
    if s is None:
        return {}
    kept = "the rule's plan kept" if s.name == "rule" else f"the rule's plan would take {format_duration(s.rule_us)}"
    return {"solver": f"within {s.gap:.2%} of the bound {format_duration(s.bound_us)}, {kept}"}


def decision_table(plan: PlanFile) -> Iterator[str]:
    """A line for each run of groups with the same decision."""
    decisions, groups = plan.decisions.groups, plan.layers.group_by_name
    rows = [(name, describe_decision(groups[name], d)) for name, d in decisions.items()]
    away = [key for key, default in RESIDENCE.items() if any(row[key] not in (default, "-") for _, row in rows)]
    shown = [(name, tuple(v for key, v in row.items() if key not in RESIDENCE or key in away)) for name, row in rows]
    headings = (*HEADINGS, *away)
    table = [("", *headings), *((name, *map(str, row)) for name, row in runs(shown))]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(f"{cell:>{w}}" if headings[i - 1] == "chunks" and i else f"{cell:<{w}}"
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()  # fmt: skip


def describe_decision(group: Group, d: GroupDecision) -> dict[str, object]:
    """Cells of a row, by field. What is resident neither comes nor goes."""
    cells = {f.name: getattr(d, f.name) for f in fields(d)}
    if is_resident(group, d):
        cells |= dict.fromkeys(("delivery", "source", "delivery_chunks", "reduction", "weights"), "-")
    return cells


def shared_groups(plan: PlanFile) -> Iterator[str]:
    """What the groups of several stages are: their parameters, where those are known (not in a plan that was read)."""
    for group in plan.layers.groups:
        if len(group.uses) > 1:
            names = ", ".join([p.name for p in group.params[:2]] + ["..."] * (len(group.params) > 2))
            yield from wrapped(f"  {group.name}: {names + ', ' if names else ''}used by {' and '.join(group.uses)}", "    ")


def bound_by(stream: str) -> str:
    """What bounds the step, in words that are also true where the CPU plays the device."""
    return BOUND_BY[Stream(stream)] if stream in tuple(Stream) else stream


def format_duration(us: float) -> str:
    """ "5.5 s", "12.3 ms"."""
    return f"{us / 1e6:.1f} s" if us >= 1e6 else f"{us / 1e3:.1f} ms"


def wrapped(text: str, indent: str = " " * 10) -> list[str]:
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, drop_whitespace=True, replace_whitespace=False,
                          break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
