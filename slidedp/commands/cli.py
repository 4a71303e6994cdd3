"""The command line: ``slidedp train | plan | estimate | simulate | show | explain | diff | check | profile | passes``.

Only `train` and `profile` run anything.
The user's mistakes are one line on stderr and exit status 2. `diff` exits 1 when the plans differ.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from slidedp.api import load_policy
from slidedp.commands.show import add_explain_arguments, add_show_arguments
from slidedp.commands.train import add_train_arguments
from slidedp.compiler.decisions import Route
from slidedp.compiler.ops import OpGraph
from slidedp.compiler.planfile.diff import diff
from slidedp.compiler.planfile.planfile import PlanFile, ops_hash
from slidedp.compiler.policy import merge_policies, parse_fixes
from slidedp.compiler.solver.defaults import check_budgets, check_head
from slidedp.compiler.text import print_graph
from slidedp.compiler.units import parse_bytes
from slidedp.hardware import builtin_profiles, load_profile, measure_hardware
from slidedp.paper import plan_on_paper
from slidedp.passes.pipeline import PIPELINE, lower
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.decide import SOLVERS
from slidedp.presets import PRESETS
from slidedp.ranks import find_ranks
from slidedp.reports.estimate import add_estimate_arguments
from slidedp.reports.report import summary
from slidedp.reports.sweep import Sweep, table
from slidedp.settings import DTYPE_NAMES
from slidedp.version import __version__

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
    """Reports mistakes in one line, like all other errors of the command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"slidedp: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="slidedp", description="Plans full-parameter fine-tuning of models larger than GPU memory.")
    parser.add_argument("--version", action="version", version=f"slidedp {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_train_arguments(commands.add_parser("train", help="train a model as a YAML file says; under torchrun on several ranks"))
    add_estimate_arguments(commands.add_parser("estimate", help="bytes of device and host that training a model takes"), positive)
    add_plan_arguments(commands.add_parser("plan", help="plan a model on a machine and write the plan"))

    add_simulate_arguments(commands.add_parser("simulate", help="the step over batches, ranks and routes, and what binds it"))
    add_show_arguments(commands.add_parser("show", help="a plan in short; its ops, timeline or memory; a trace or a page of it"))
    add_explain_arguments(commands.add_parser("explain", help="what binds a plan's step, and what other decisions would change"))

    compare = commands.add_parser("diff", help="what differs between two plans; exit status 1 if anything does")
    compare.set_defaults(run=run_diff)
    compare.add_argument("before")
    compare.add_argument("after")

    check = commands.add_parser("check", help="derive a plan's ops anew and verify them; exit status 2 if it is not sound")
    check.set_defaults(run=run_check)
    check.add_argument("plan")

    profile = commands.add_parser("profile", help="measure this machine; under torchrun with all ranks at once")
    profile.set_defaults(run=run_profile)
    profile.add_argument("-o", "--output", metavar="FILE", help="where to write the profile; default: print it")
    profile.add_argument("--quick", action="store_true", help="a few seconds, less exact")
    profile.add_argument("--device", help="cuda or cpu; default: this rank's GPU if there is one")
    profile.add_argument("--threads", type=positive, metavar="N", help="of each rank's update; default: as the runtime takes")
    profile.add_argument("--cache-dir", metavar="DIR", help="where --hw auto will find it; default: ~/.cache/slidedp")

    commands.add_parser("passes", help="the lowering pipeline").set_defaults(run=run_passes)
    return parser


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.set_defaults(run=run_plan)
    plan.add_argument("--model", required=True, metavar="PRESET|CONFIG",
                      help="Hugging Face config (directory or file) or " + ", ".join(PRESETS))
    plan.add_argument("--hw", required=True, metavar="NAME|YAML", help="auto, measure, YAML or " + ", ".join(builtin_profiles()))
    plan.add_argument("--batch", type=positive, default=1, help="sequences per rank; default: 1")
    plan.add_argument("--seq", type=positive, default=1024, help="tokens per sequence; default: 1024")
    plan.add_argument("--ranks", type=positive, help="default: the machine's number of GPUs")
    plan.add_argument("--policy", metavar="YAML", help="choices to pin: a policy, or a plan whose decisions to take over")
    plan.add_argument("--fix", action="append", default=[], metavar="[LAYER.]KEY=VALUE", help="pin one choice, e.g. L03.chunks=4")
    plan.add_argument("--hbm-budget", type=parse_size, metavar="SIZE", help="of each GPU, e.g. 20GiB")
    plan.add_argument("--host-budget", type=parse_size, metavar="SIZE", help="of the host, all ranks together")
    plan.add_argument("--compute-dtype", choices=sorted(DTYPES), help="default: bfloat16 (float32 without a GPU)")
    plan.add_argument("--grad-dtype", choices=sorted(DTYPES), help="of returned gradients; default: the compute dtype")
    plan.add_argument("--max-grad-norm", type=float, metavar="X", help="plan for clipping by the norm of all gradients")
    plan.add_argument("--solver", choices=SOLVERS, default="cp-sat", help="default: %(default)s")
    plan.add_argument("--hint", metavar="PLAN", help="an earlier plan to start the solver from")
    plan.add_argument("--cache-dir", metavar="DIR", help="of solved plans; default $SLIDEDP_CACHE or ~/.cache/slidedp; '': none")
    plan.add_argument("--dump-after", metavar="PASS|all", help="print the ops after a pass")
    plan.add_argument("-o", "--output", metavar="FILE", help="where to write the plan")


def add_simulate_arguments(simulate: argparse.ArgumentParser) -> None:
    simulate.set_defaults(run=run_simulate)
    simulate.description = ("Simulates a step for each batch, number of ranks and route. 'host busy' is the busiest of all that "
                            "is not the GPU; 'bound by' the kind of op that takes most of the critical cycle.")
    simulate.add_argument("--model", required=True, metavar="PRESET|CONFIG", help="as for slidedp plan")
    simulate.add_argument("--hw", required=True, metavar="NAME|YAML", help="as for slidedp plan")
    simulate.add_argument("--batch", type=positives, required=True, metavar="B,...",
                          help="sequences per rank; 8..64 stands for 8,16,32,64")
    simulate.add_argument("--seq", type=positive, required=True, help="tokens per sequence")
    simulate.add_argument("--ranks", type=positives, metavar="N,...", help="default: the machine's number of GPUs")
    simulate.add_argument("--routes", type=routes, default=list(Route), metavar="ROUTE,...",
                          help="delivery of weights: " + ", ".join(Route) + "; default: both")
    simulate.add_argument("--policy", metavar="YAML", help="as for slidedp plan")
    simulate.add_argument("--fix", action="append", default=[], metavar="[LAYER.]KEY=VALUE", help="as for slidedp plan")
    simulate.add_argument("--hbm-budget", type=parse_size, metavar="SIZE", help="of each GPU, e.g. 20GiB")
    simulate.add_argument("--host-budget", type=parse_size, metavar="SIZE", help="of the host, all ranks together")
    simulate.add_argument("--words", action="store_true", help="under each line, what the GPU waits for and the critical cycle")


def run_simulate(args: argparse.Namespace) -> int:
    hw = load_profile(args.hw)
    sweep = Sweep(args.model, hw, seq=args.seq, policy=read_policy(args.policy, args.fix), hbm_budget=args.hbm_budget,
                  host_budget=args.host_budget)
    for ranks in args.ranks or [hw.num_gpus]:
        warn_of_missing_gpus(args.hw, ranks)
    print(f"{args.model} on {hw.name}, sequence {args.seq}")
    for line in table(sweep.cases(args.batch, args.ranks or [hw.num_gpus], args.routes), words=args.words):
        print(line, flush=True)  # each takes seconds
    return 0


def run_plan(args: argparse.Namespace) -> int:
    dump = dumper(args.dump_after) if args.dump_after else None  # before the slow part: the pass may not exist
    chosen: list[AutoPlan] = []
    if sys.stderr.isatty():
        print(f"slidedp: planning {args.model} for {args.hw}; what was planned before takes seconds, a new solve up to a minute",
              file=sys.stderr, flush=True)  # fmt: skip
    plan = plan_on_paper(
        args.model, args.hw, batch=args.batch, seq=args.seq, ranks=args.ranks, policy=read_policy(args.policy, args.fix),
        hbm_budget=args.hbm_budget, host_budget=args.host_budget, compute_dtype=DTYPES.get(args.compute_dtype),
        grad_dtype=DTYPES.get(args.grad_dtype), max_grad_norm=args.max_grad_norm, solver=args.solver, hint=args.hint,
        cache_dir=args.cache_dir, on_choice=chosen.append)
    warn_of_missing_gpus(args.hw, plan.world_size)
    if dump:
        lower(plan.layers, plan.decisions, hbm_budget=args.hbm_budget, dump=dump)
    print(summary(plan))
    if overhead := overhead_of(chosen[0]):
        print(overhead)
    if args.output:
        plan.dump(args.output)
        print(f"wrote {args.output}")
    return 0


def overhead_of(chosen: AutoPlan) -> str:
    """What choosing took, and when it has paid for itself."""
    if chosen.record is None:
        return ""
    if chosen.cached:
        return "solved before: taken from the cache"
    pays = f", which pays for itself after {chosen.pays_after:,.0f} steps" if chosen.pays_after is not None else ""
    return f"solved in {chosen.solve_s:.1f} s{pays}"


def warn_of_missing_gpus(hw_profile: str, ranks: int) -> None:
    """Warns if there are more ranks than GPUs; on the CPU, ranks are processes, of which there may be any number."""
    hw = load_profile(hw_profile)
    if ranks > hw.num_gpus and hw.gpu_name != "cpu":
        print(f"slidedp: warning: {ranks} ranks, but the profile {hw.name} has {hw.num_gpus} GPU{'s' * (hw.num_gpus > 1)}: its "
              "rates for all GPUs at once are those of so many", file=sys.stderr)  # fmt: skip


def read_policy(path: str | None, fixes: Sequence[str]) -> dict[str, Any]:
    """The pins of ``--policy`` (a plan pins everything), overridden by those of ``--fix``."""
    policy = load_policy(path) or {}
    return merge_policies(policy.policy() if isinstance(policy, PlanFile) else policy, parse_fixes(fixes))


def dumper(after: str) -> Callable[[str, OpGraph], None]:
    names = [p.name for p in PIPELINE]
    if after not in (*names, "all"):
        raise ValueError(f"--dump-after {after!r}: no such pass; passes: {', '.join(names)}, all")

    def dump(name: str, graph: OpGraph) -> None:
        if after in (name, "all"):
            print(f"# after {name}\n{print_graph(graph)}")

    return dump


def run_diff(args: argparse.Namespace) -> int:
    changes = diff(args.before, args.after)
    print(changes)
    return 1 if changes else 0


def run_check(args: argparse.Namespace) -> int:
    plan = PlanFile.load(args.plan)
    graph = lower(plan.layers, plan.decisions, hbm_budget=plan.budgets.hbm_bytes)
    check_head(plan.layers, plan.decisions)
    check_budgets(plan.layers, plan.decisions, plan.budgets.hbm_bytes, plan.budgets.host_bytes)
    if not plan.edited and (derived := ops_hash(graph)) != plan.ops_hash:
        raise ValueError(f"{args.plan}: its decisions lower to other ops ({derived}) than slidedp {plan.slidedp} planned "
                         f"({plan.ops_hash}); only `plan` and `decisions` may be edited: plan anew, for other ranks with --ranks")
    print(f"{args.plan}: sound: {len(graph.ops)} ops, {len(graph.edges)} edges")
    if plan.edited:
        print(f"decisions were edited: the predictions are of those before; refresh them with slidedp plan --policy {args.plan}")
    if plan.hardware.name in builtin_profiles() and load_profile(plan.hardware.name).content_hash() != plan.hardware.hash:
        print(f"the hardware profile {plan.hardware.name} is not the built-in one: predictions may differ")
    return 0


def run_profile(args: argparse.Namespace) -> int:
    ranks = find_ranks(args.device)
    profile = measure_hardware(quick=args.quick, num_threads=args.threads, ranks=ranks, cache_dir=args.cache_dir)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if ranks.rank:
        return 0
    if ranks.device.type == "cuda" and (gpus := torch.cuda.device_count()) > ranks.world_size:
        print(f"slidedp: warning: {ranks.world_size} of {gpus} GPUs measured; for all at once: torchrun --nproc-per-node {gpus} "
              "-m slidedp profile", file=sys.stderr)  # fmt: skip
    if args.output:
        Path(args.output).write_text(profile.to_yaml(), encoding="utf-8")
        print(f"wrote {args.output}: {profile.name}")
    else:
        print(profile.to_yaml(), end="")
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


def positives(text: str) -> list[int]:
    """``8,16`` as it says; ``8..64``: doubling from 8 to 64."""
    first, dots, last = text.partition("..")
    if not dots:
        return [positive(part) for part in text.split(",")]
    numbers = [positive(first)]
    if positive(last) < numbers[0]:
        raise argparse.ArgumentTypeError(f"{text!r} counts down")
    while 2 * numbers[-1] <= positive(last):
        numbers.append(2 * numbers[-1])
    return numbers


def routes(text: str) -> list[Route]:
    try:
        return [Route(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: routes are {' and '.join(Route)}") from None


def parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
