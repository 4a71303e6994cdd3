"""A plan as one HTML page that needs nothing else: timeline, memory, what binds, decisions, predictions, sensitivity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path

from slidedp.compiler.decisions import GroupDecision
from slidedp.compiler.drawing.binds import links, longest
from slidedp.compiler.drawing.gantt import duration
from slidedp.compiler.drawing.svg import colour, memory_svg, ticks, timeline_rows
from slidedp.compiler.footprint.memory_over_time import memory_over_time
from slidedp.compiler.ops import OpKind
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.policy import PLAN_KEYS
from slidedp.compiler.runlength import runs
from slidedp.compiler.units import format_bytes
from slidedp.reports.report import bound_by
from slidedp.reports.sensitivity import Point, over_batches, over_budgets
from slidedp.reports.what_if import Outcome, WhatIf

USE_COLOURS = ("#4c6fa5", "#b5651d", "#7d93b8", "#d19a66", "#9c8bb0", "#5a9a68", "#c97b8a", "#c2a83e", "#5c6b7a", "#a05a78")

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c2126, #dfe4e8); --dim: light-dark(#66707a, #98a2ab);
  --idle: light-dark(#f0f2f4, #23292e); --page: light-dark(#ffffff, #171b1f); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; }
.dim, th { color: var(--dim); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
td, th { padding: .15rem 1rem .15rem 0; vertical-align: top; text-align: left; }
th { font-weight: normal; }
td.n, th.n { text-align: right; white-space: nowrap; }
tr.here { font-weight: 600; }
td.bar { min-width: 8rem; }
td.bar i { display: block; height: .7rem; margin-top: .35rem; background: #3b82c4; }
.scroller { overflow-x: auto; }
.strips { min-width: 100%; }
.row { display: grid; grid-template-columns: 9.5rem 1fr; align-items: center; margin: 2px 0; }
.row > b { position: sticky; left: 0; z-index: 1; background: var(--page); font-weight: normal; padding-right: .5rem;
  white-space: nowrap; display: flex; justify-content: space-between; }
.row svg { display: block; width: 100%; height: 1.4rem; background: var(--idle); }
.row.memory svg { height: 11rem; }
.row.memory > b { align-self: stretch; flex-direction: column; }
.ticks { position: relative; height: 1.3rem; overflow: hidden; }
.ticks span { position: absolute; border-left: 1px solid var(--dim); padding-left: 3px; font-size: .8rem; color: var(--dim); }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem; }
rect:hover, polygon:hover { opacity: .7; }
line.budget { stroke: #c4473b; stroke-width: 2; vector-effect: non-scaling-stroke; }
"""

SCRIPT = """
const zoom = document.getElementById('zoom'), strips = document.querySelector('.strips');
const view = document.querySelector('.scroller');
zoom.addEventListener('input', () => {
  const middle = (view.scrollLeft + view.clientWidth / 2) / strips.clientWidth;
  strips.style.width = 100 * zoom.value + '%';
  view.scrollLeft = middle * strips.clientWidth - view.clientWidth / 2;
});
"""


def write_page(path: str | Path, plan: PlanFile, world: WhatIf, notes: Sequence[str] = (), *, model: str | None = None) -> None:
    """Write :func:`page` to `path`."""
    Path(path).write_text(page(plan, world, notes, model=model), encoding="utf-8")


def page(plan: PlanFile, world: WhatIf, notes: Sequence[str] = (), *, model: str | None = None) -> str:
    """The page of `plan`, its step computed anew in `world`; `notes` are sentences to print on it.

    `model`: preset or config that the plan is of, for the table of batches; default: a preset that fits, else no such table.
    Raises ValueError for a plan that no longer fits its budgets.
    """
    outcome = world.outcome(plan.decisions)
    title = f"{plan.layers.model or 'model'} on {world.hw.name}"
    sections = [
        ("Timeline and memory of one step", drawings(outcome, world.budgets.hbm_bytes)),
        ("What binds the step", binding(outcome)),
        ("Decisions", decisions(plan)),
        ("Predictions", predictions(plan, outcome)),
        ("Sensitivity to the batch", batches(plan, world, model)),
        ("Sensitivity to the device budget", budgets(plan, world)),
    ]
    body = "".join(f"<h2>{escape(heading)}</h2>{''.join(content)}" for heading, content in sections)
    facts = ", ".join(f"{key} {value}" for key, value in plan.specialisation.items())
    subtitle = (f"{len(plan.layers.layers)} layers, {sum(g.numel for g in plan.layers.groups) / 1e6:,.1f} M elements, "
                f"{plan.layers.compute_dtype}, {plan.world_size} rank{'s' * (plan.world_size > 1)}; {facts} a rank")
    remarks = "".join(f'<p class="dim">{escape(note)}</p>' for note in notes)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
            f'<p class="dim">{escape(subtitle)}</p>{remarks}{body}<script>{SCRIPT}</script></body></html>\n')


def drawings(outcome: Outcome, budget_bytes: int) -> Iterator[str]:
    """Streams above, memory below, over one scale of time, with what the colours mean."""
    graph, timeline = outcome.graph, outcome.timeline
    allocated = memory_over_time(outcome.layers, outcome.decisions, graph, timeline)
    in_use = memory_over_time(outcome.layers, outcome.decisions, graph, timeline, occupied=True)
    yield ('<p class="dim">One period of the steady state, from the start of its forward: updates of the step before run under '
           'it, deliveries for the next one at its end. <label>Zoom <input id="zoom" type="range" min="1" max="20" step="0.5" '
           'value="1"></label></p>')
    yield '<div class="scroller"><div class="strips">'
    for stream, busy, svg in timeline_rows(graph, timeline):
        yield f'<div class="row"><b>{stream} <span class="dim">{busy:.0%}</span></b>{svg}</div>'
    marks = "".join(f'<span style="left:{at:.2%}">{escape(text)}</span>' for at, text in ticks(allocated.end_us))
    yield f'<div class="row"><b></b><div class="ticks">{marks}</div></div>'
    near = budget_bytes if budget_bytes <= 1.5 * allocated.peak_bytes else 0
    for name, curve in (("allocated", allocated), ("in use", in_use)):
        top = format_bytes(max(curve.peak_bytes, near))
        yield (f'<div class="row memory"><b><span>{top}</span><span>memory {name}</span><span>0</span></b>'
               f"{memory_svg(curve, colours(len(curve.num_bytes)), near)}</div>")
    yield "</div></div>"
    kinds = {op.kind for op in graph.ops}
    yield legend((str(kind), colour(kind)) for kind in OpKind if kind in kinds)
    yield legend(zip(allocated.num_bytes, colours(len(allocated.num_bytes)), strict=True))
    yield (f"<p>Peak of device memory: {format_bytes(allocated.peak_bytes)} of {format_bytes(budget_bytes)}, first at "
           f"{duration(allocated.peak_us)}. Slots are allocated once; {format_bytes(in_use.peak_bytes)} at most are in use.</p>")


def colours(num: int) -> list[str]:
    return [USE_COLOURS[i % len(USE_COLOURS)] for i in range(num)]


def legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{fill}"></i>{escape(name)}</span>' for name, fill in entries)
    return f'<p class="legend">{items}</p>'


def binding(outcome: Outcome) -> Iterator[str]:
    line = outcome.timeline
    chain = links(line)
    most = longest(chain)
    by = f"{most}, {duration(most.time_us)} of the critical cycle" if most else bound_by(str(line.bottleneck))
    idle_us = duration(line.exposed_us)
    yield f"<p>A step takes {duration(line.step_us)}, bound by {escape(by)}. The GPU waits for {idle_us} of it.</p>"
    share, cycle = max(line.step_us, 1), max(line.step_us * line.cycle_steps, 1)
    over = f"critical cycle of {line.cycle_steps} steps" if line.cycle_steps > 1 else "critical cycle"
    yield table((over, "time", "share"), [(str(x), duration(x.time_us), f"{x.time_us / cycle:.1%}") for x in chain])
    if line.exposed_by:
        rows = [(str(kind), duration(us), f"{us / share:.1%}") for kind, us in line.exposed_by.items()]
        yield table(("the GPU waits for", "time", "share"), rows)


def decisions(plan: PlanFile) -> Iterator[str]:
    names = tuple(f.name for f in fields(GroupDecision))
    rows = [(group, tuple(str(getattr(d, name)) for name in names)) for group, d in plan.decisions.groups.items()]
    yield table(("groups", *names), [(group, *row) for group, row in runs(rows)], numbers=False)
    yield table(PLAN_KEYS, [tuple(str(getattr(plan.decisions, key)) for key in PLAN_KEYS)], numbers=False)


def predictions(plan: PlanFile, outcome: Outcome) -> Iterator[str]:
    p, line, memory = plan.predictions, outcome.timeline, outcome.memory
    tokens = p.tokens_per_s * p.step_us / max(line.step_us, 1)
    yield table(("", "in the plan", "computed anew"), [
        ("step", duration(p.step_us), duration(line.step_us)),
        ("tokens a second, all ranks", f"{p.tokens_per_s:,.0f}", f"{tokens:,.0f}"),
        ("bound by", bound_by(p.bottleneck), bound_by(str(line.bottleneck))),
        ("device memory, each", format_bytes(p.hbm_bytes), format_bytes(memory.hbm_bytes)),
        ("host memory, all ranks", format_bytes(p.host_bytes), format_bytes(memory.host_bytes)),
    ])  # fmt: skip
    places = {"device": memory.hbm, "host": memory.host}
    for place, sizes in places.items():
        yield table((f"{place} memory", "bytes"), [(use, format_bytes(size)) for use, size in sizes.items() if size])


def batches(plan: PlanFile, world: WhatIf, model: str | None) -> Iterator[str]:
    try:
        points = over_batches(plan, world, model)
    except ValueError as e:
        yield f'<p class="dim">Left out: {escape(str(e))}.</p>'
        return
    yield '<p class="dim">Sequences a rank x tokens; every decision made anew for each.</p>'
    yield points_table("batch", points, f"{plan.specialisation.get('input_ids')}".replace("x", " x "))


def budgets(plan: PlanFile, world: WhatIf) -> Iterator[str]:
    yield '<p class="dim">The same batch with less and more device memory; every decision made anew for each.</p>'
    yield points_table("budget", over_budgets(plan, world), format_bytes(plan.predictions.hbm_bytes))


def points_table(what: str, points: Sequence[Point], here: str) -> str:
    """A row a point, with a bar for its tokens a second."""
    most = max((p.tokens_per_s for p in points), default=0) or 1
    head = "".join(f'<th class="n">{h}</th>' for h in (what, "step", "tokens/s", "device", "host")) + "<th>bound by</th><th></th>"
    rows = []
    for p in points:
        mark = ' class="here"' if p.label == here else ""
        if p.why:
            rows.append(f'<tr{mark}><td class="n">{escape(p.label)}</td><td colspan="6" class="dim">{escape(p.why)}</td></tr>')
            continue
        cells = (p.label, duration(p.step_us), f"{p.tokens_per_s:,.0f}", format_bytes(p.hbm_bytes), format_bytes(p.host_bytes))
        numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        rows.append(f"<tr{mark}>{numbers}<td>{escape(bound_by(p.bottleneck))}</td>"
                    f'<td class="bar"><i style="width:{p.tokens_per_s / most:.1%}"></i></td></tr>')
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """All cells as text; `numbers`: every column but the first to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' * (numbers and i > 0)}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>{body}</table>"
