"""``slidedp show`` and ``slidedp explain``: a plan to look at, from its file alone."""

from __future__ import annotations

import argparse
import shutil

from slidedp.compiler.drawing.gantt import gantt
from slidedp.compiler.drawing.memory_chart import memory_chart
from slidedp.compiler.drawing.trace_events import write_trace
from slidedp.compiler.footprint.memory_over_time import memory_over_time
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.text import print_graph
from slidedp.passes.pipeline import lower
from slidedp.reports.explanation import explain
from slidedp.reports.page import write_page
from slidedp.reports.report import stage_table, summary, wrapped
from slidedp.reports.what_if import Outcome, what_if


def add_show_arguments(show: argparse.ArgumentParser) -> None:
    show.set_defaults(run=run_show)
    show.add_argument("plan")
    show.add_argument("--ops", action="store_true", help="print its ops, derived anew")
    show.add_argument("--costs", action="store_true", help="print what was measured of its stages")
    show.add_argument("--gantt", action="store_true", help="draw the predicted step, a row a stream")
    show.add_argument("--memory", action="store_true", help="draw device memory over the predicted step")
    show.add_argument("--trace", metavar="JSON", help="write the predicted steps for ui.perfetto.dev or chrome://tracing")
    show.add_argument("--html", metavar="FILE", help="write all of it as one page")
    show.add_argument("--model", metavar="PRESET|CONFIG", help="plans the page's other batches; default: a preset that fits")
    add_hw_argument(show)
    show.add_argument("--width", type=int, help="columns of a drawing; default: the terminal's")


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_explain)
    parser.add_argument("plan")
    parser.add_argument("decision", nargs="?", default="",
                        help="try every value of it: L17.act, L00-L05.source, '*.delivery', window; L17: all decisions of L17")
    add_hw_argument(parser)


def add_hw_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hw", metavar="NAME|YAML", help="hardware profile; default: the built-in one that the plan names")


def run_show(args: argparse.Namespace) -> int:
    plan = PlanFile.load(args.plan)
    if args.ops:
        print(print_graph(lower(plan.layers, plan.decisions)))
    if args.costs:
        print(stage_table(plan))
    if args.gantt or args.memory or args.trace or args.html:
        show_predicted(args, plan)
    elif not (args.ops or args.costs):
        print(summary(plan))
    return 0


def show_predicted(args: argparse.Namespace, plan: PlanFile) -> None:
    """Prints and writes all that needs the step to be simulated anew."""
    width = args.width or shutil.get_terminal_size().columns
    world, notes = what_if(plan, args.hw)
    outcome = world.outcome(plan.decisions)
    drawings = [gantt(outcome.graph, outcome.timeline, width)] if args.gantt else []
    if args.memory:
        drawings.append(draw_memory(outcome, plan.budgets.hbm_bytes, width))
    for drawing in drawings:
        print(drawing, end="\n\n" if drawing is not drawings[-1] else "\n")
    if args.trace:
        title = f"{plan.layers.model} on {world.hw.name}"
        write_trace(args.trace, outcome.graph, outcome.timeline, outcome.layers, outcome.decisions, title=title)
        print(f"wrote {args.trace}")
    if args.html:
        write_page(args.html, plan, world, notes, model=args.model)
        print(f"wrote {args.html}")
    for note in notes:
        print("\n".join(wrapped(f"note: {note}", "  ")))


def draw_memory(outcome: Outcome, budget_bytes: int, width: int) -> str:
    curve = memory_over_time(outcome.layers, outcome.decisions, outcome.graph, outcome.timeline)
    return memory_chart(curve, width, budget_bytes=budget_bytes)


def run_explain(args: argparse.Namespace) -> int:
    print(explain(args.plan, args.decision, hw=args.hw))
    return 0
