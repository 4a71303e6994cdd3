"""The command line: ``slidedp plan | show | diff | check | passes``. It plans and reads plans: no GPU, no weights.

The user's mistakes are one line on stderr and exit status 2. `diff` exits 1 when the plans differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from slidedp.compiler.defaults import check_budgets
from slidedp.compiler.diff import diff
from slidedp.compiler.ops import OpGraph
from slidedp.compiler.planfile import PlanFile, ops_hash
from slidedp.compiler.planyaml import is_plan, write_decisions
from slidedp.compiler.policy import merge_policies, parse_fixes
from slidedp.compiler.strict import as_mapping, load_yaml
from slidedp.compiler.text import print_graph
from slidedp.compiler.units import format_bytes, parse_bytes
from slidedp.hardware import builtin_profiles, load_profile
from slidedp.passes.pipeline import PIPELINE, lower
from slidedp.planner import DTYPE_NAMES, Planner, Settings, Specialisation
from slidedp.presets import PRESETS, build_meta_model
from slidedp.report import describe, planfile_of

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    args = make_parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except (ValueError, OSError) as e:
        if isinstance(e, BrokenPipeError):  # `slidedp show plan.yaml --ops | head`: whoever read has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"slidedp: error: {one_line(e)}", file=sys.stderr)
        return 2


def one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other mistake is said."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slidedp: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="slidedp", description="Plans full-parameter fine-tuning of models larger than GPU memory.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_plan_arguments(commands.add_parser("plan", help="plan a model on a machine and write the plan"))

    show = commands.add_parser("show", help="a plan in short")
    show.set_defaults(run=run_show)
    show.add_argument("plan")
    show.add_argument("--ops", action="store_true", help="print its ops, derived anew")

    compare = commands.add_parser("diff", help="what differs between two plans; exit status 1 if anything does")
    compare.set_defaults(run=run_diff)
    compare.add_argument("before")
    compare.add_argument("after")

    check = commands.add_parser("check", help="derive a plan's ops anew and verify them; exit status 2 if it is not sound")
    check.set_defaults(run=run_check)
    check.add_argument("plan")

    commands.add_parser("passes", help="the lowering pipeline").set_defaults(run=run_passes)
    return parser


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.set_defaults(run=run_plan)
    plan.add_argument("--model", required=True, metavar="PRESET|CONFIG",
                      help="Hugging Face config (directory or file) or " + ", ".join(PRESETS))
    plan.add_argument("--hw", required=True, metavar="NAME|YAML", help="auto, a YAML file or " + ", ".join(builtin_profiles()))
    plan.add_argument("--batch", type=positive, required=True, help="sequences per rank")
    plan.add_argument("--seq", type=positive, required=True, help="tokens per sequence")
    plan.add_argument("--ranks", type=positive, help="default: the machine's number of GPUs")
    plan.add_argument("--policy", metavar="YAML", help="choices to pin: a policy, or a plan whose decisions to take over")
    plan.add_argument("--fix", action="append", default=[], metavar="[LAYER.]KEY=VALUE", help="pin one choice, e.g. L03.chunks=4")
    plan.add_argument("--hbm-budget", type=parse_size, metavar="SIZE", help="of each GPU, e.g. 20GiB")
    plan.add_argument("--host-budget", type=parse_size, metavar="SIZE", help="of the host, all ranks together")
    plan.add_argument("--compute-dtype", choices=sorted(DTYPES), help="default: bfloat16 (float32 without a GPU)")
    plan.add_argument("--grad-dtype", choices=sorted(DTYPES), help="of returned gradients; default: the compute dtype")
    plan.add_argument("--dump-after", metavar="PASS|all", help="print the ops after a pass")
    plan.add_argument("-o", "--output", metavar="FILE", help="where to write the plan")


def run_plan(args: argparse.Namespace) -> int:
    dump = dumper(args.dump_after) if args.dump_after else None  # before the slow part: the pass may not exist
    spec = plan_model(args)
    if dump:
        lower(spec.layers, spec.decisions, hbm_budget=args.hbm_budget, dump=dump)
    print(describe(spec))
    if args.output:
        planfile_of(spec).dump(args.output)
        print(f"wrote {args.output}")
    return 0


def plan_model(args: argparse.Namespace) -> Specialisation:
    """The specialisation for a batch of ``--batch`` full sequences of ``--seq`` tokens."""
    hw = load_profile(args.hw)
    compute = args.compute_dtype or ("float32" if hw.gpu_name == "cpu" else "bfloat16")
    settings = Settings(
        hw=hw, compute_dtype=DTYPES[compute], grad_dtype=DTYPES[args.grad_dtype or compute], world_size=args.ranks or hw.num_gpus,
        policy=merge_policies(read_policy(args.policy), parse_fixes(args.fix)), hbm_budget=args.hbm_budget,
        host_budget=args.host_budget)
    tokens = torch.zeros(args.batch, args.seq, dtype=torch.long)
    planner = Planner(build_meta_model(args.model), settings)
    draft = planner.draft({"input_ids": tokens, "labels": tokens.clone()})
    return planner.finish(draft, draft.decisions)


def read_policy(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    content = load_yaml(path)
    return PlanFile.load(path).policy() if is_plan(content) else as_mapping(content, path)


def dumper(after: str) -> Callable[[str, OpGraph], None]:
    names = [p.name for p in PIPELINE]
    if after not in (*names, "all"):
        raise ValueError(f"--dump-after {after!r}: no such pass; passes: {', '.join(names)}, all")

    def dump(name: str, graph: OpGraph) -> None:
        if after in (name, "all"):
            print(f"# after {name}\n{print_graph(graph)}")

    return dump


def run_show(args: argparse.Namespace) -> int:
    plan = PlanFile.load(args.plan)
    print(print_graph(lower(plan.layers, plan.decisions)) if args.ops else summary(plan))
    return 0


def summary(plan: PlanFile) -> str:
    """A plan file in a screenful."""
    layers, p = plan.layers, plan.predictions
    batch = ", ".join(f"{key} {value}" for key, value in plan.specialisation.items())
    rows = write_decisions(plan.decisions)
    width = max(map(len, rows["decisions"]))
    decisions = [f"  {name:<{width}}  {', '.join(f'{k} {v}' for k, v in row.items())}" for name, row in rows["decisions"].items()]
    lines = [
        f"{layers.model or 'model'}: {len(layers.layers)} layers, {sum(g.numel for g in layers.groups) / 1e9:.2f} G elements, "
        f"{layers.compute_dtype}, {plan.world_size} rank{'s' * (plan.world_size > 1)}; {batch}",
        f"hardware {plan.hardware}, cost model {plan.cost_model}",
        "plan " + ", ".join(f"{key} {value}" for key, value in rows["plan"].items()),
        *decisions,
        f"predicted step {p.step_us / 1e3:.1f} ms, {p.tokens_per_s:,.0f} tokens/s, bound by {p.bottleneck}",
        f"HBM {format_bytes(p.hbm_bytes)} of {format_bytes(plan.budgets.hbm_bytes)} a GPU, "
        f"host {format_bytes(p.host_bytes)} of {format_bytes(plan.budgets.host_bytes)}",
    ]
    return "\n".join(lines + ["decisions were edited: the predictions are of those before"] * plan.edited)


def run_diff(args: argparse.Namespace) -> int:
    changes = diff(args.before, args.after)
    print(changes)
    return 1 if changes else 0


def run_check(args: argparse.Namespace) -> int:
    plan = PlanFile.load(args.plan)
    graph = lower(plan.layers, plan.decisions, hbm_budget=plan.budgets.hbm_bytes)
    check_budgets(plan.layers, plan.decisions, plan.budgets.hbm_bytes, plan.budgets.host_bytes)
    if not plan.edited and (derived := ops_hash(graph)) != plan.ops_hash:
        raise ValueError(f"{args.plan}: its decisions lower to other ops ({derived}) than slidedp {plan.slidedp} planned "
                         f"({plan.ops_hash}): plan anew")
    print(f"{args.plan}: sound: {len(graph.ops)} ops, {len(graph.edges)} edges")
    if plan.edited:
        print(f"decisions were edited: the predictions are of those before; refresh them with slidedp plan --policy {args.plan}")
    if plan.hardware.name in builtin_profiles() and load_profile(plan.hardware.name).content_hash() != plan.hardware.hash:
        print(f"the hardware profile {plan.hardware.name} is not the built-in one: predictions may differ")
    return 0


def run_passes(args: argparse.Namespace) -> int:
    width = max(len(p.name) for p in PIPELINE)
    for p in PIPELINE:
        print(f"{p.name:<{width}}  {(p.__doc__ or '').strip().splitlines()[0]}")
    return 0


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
