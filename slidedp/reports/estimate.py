"""``slidedp estimate``: bytes by place that a training run needs, within seconds: no weights, no solving, nothing runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.footprint.memory import MemoryReport, estimate_memory
from slidedp.compiler.units import format_bytes, parse_bytes
from slidedp.hardware import builtin_profiles, load_profile
from slidedp.paper import draft_on_paper, settings_on_paper
from slidedp.planning.decide import NO_BUDGET, by_the_rule, least_bytes, problem_and_rule
from slidedp.presets import PRESETS
from slidedp.reports.report import wrapped

PLACES = {"hbm": "device memory, each rank", "host": "host memory, all ranks"}
NUM_USES = 3


FITS = "It fits. By the rule all state is on the host; `slidedp plan` uses the HBM there is, and less of the host."


@dataclass(frozen=True, slots=True)
class Estimate:
    """`planned`: of the rule's plan, which fits if any does. `least`, `has`: bytes by place (``hbm``, ``host``); `least` is what
    no plan can do without, of each place alone. `misfit`: why nothing fits and what would be the cheapest way out, "" if it does.
    """

    title: str
    planned: MemoryReport
    least: dict[str, int]
    has: dict[str, int]
    checkpoint_bytes: int
    misfit: str = ""

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "at least", "by the rule", "there is", "")]
        for place, name in PLACES.items():
            uses: dict[str, int] = getattr(self.planned, place)
            sizes = self.least[place], sum(uses.values()), self.has[place]
            missing = sizes[1] - self.has[place]
            rows.append((name, *map(format_bytes, sizes), "fits" if missing <= 0 else f"{format_bytes(missing)} too much"))
        rows.append(("disk, each checkpoint", format_bytes(self.checkpoint_bytes), "", "", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:4], widths[1:4], strict=True)),
                            row[4]]).rstrip() for row in rows]  # fmt: skip
        mostly = [f"{name.partition(',')[0]}: {largest(getattr(self.planned, place))}" for place, name in PLACES.items()]
        verdict = f"It does not fit. {self.misfit}" if self.misfit else FITS
        text = [line for part in (*mostly, verdict) for line in wrapped(part, "  ")]
        return "\n".join([self.title, *table, *text])


def largest(uses: dict[str, int]) -> str:
    top = sorted(uses.items(), key=lambda use: -use[1])[:NUM_USES]
    return ", ".join(f"{name} {format_bytes(size)}".replace(" ", "\N{NO-BREAK SPACE}") for name, size in top if size)


def estimate(model: str | Path, hw: HardwareProfile, *, batch: int = 1, seq: int = 1024, ranks: int | None = None,
             hbm_budget: int | None = None, host_budget: int | None = None) -> Estimate:
    """What training `model` takes on `hw`, with `batch` sequences of `seq` tokens a rank. Budgets in bytes; None: all there is.

    Raises ValueError: no such model, or it cannot be traced.
    """
    settings = settings_on_paper(hw, ranks, hbm_budget=hbm_budget, host_budget=host_budget, solver="cp-sat")
    _, draft = draft_on_paper(model, settings, batch, seq)
    layers, misfit = draft.layers, ""
    try:
        _, decisions = problem_and_rule(layers, settings)
    except BudgetError as e:
        decisions, misfit = by_the_rule(layers, replace(settings, hbm_budget=NO_BUDGET, host_budget=NO_BUDGET)), str(e)
    numel = sum(g.numel for g in layers.groups)
    title = (f"{layers.model} of {numel / 1e6:,.0f} M parameters on {hw.name}: {settings.world_size} rank"
             f"{'s' * (settings.world_size > 1)} of {batch} x {seq} tokens")
    has = {"hbm": hw.hbm_bytes if hbm_budget is None else hbm_budget,
           "host": hw.host_bytes if host_budget is None else host_budget}
    return Estimate(
        title, estimate_memory(layers, decisions), least_bytes(layers, settings), has,
        4 * numel + 8 * sum(g.num_trainable for g in layers.groups), misfit)  # fmt: skip


def add_estimate_arguments(parser: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    parser.set_defaults(run=run_estimate)
    parser.description = ("Bytes by place: the least that any plan needs, and what the default rule's takes. "
                          "Exit status 1: no plan fits.")
    parser.add_argument("--model", required=True, metavar="PRESET|CONFIG",
                        help="Hugging Face config (directory or file) or " + ", ".join(PRESETS))
    parser.add_argument("--hw", required=True, metavar="NAME|YAML", help="auto, YAML or " + ", ".join(builtin_profiles()))
    parser.add_argument("--ranks", type=positive, help="default: the machine's number of GPUs")
    parser.add_argument("--batch", type=positive, default=1, help="sequences per rank; default: 1")
    parser.add_argument("--seq", type=positive, default=1024, help="tokens per sequence; default: 1024")
    parser.add_argument("--hbm-budget", metavar="SIZE", help="of each GPU, e.g. 20GiB")
    parser.add_argument("--host-budget", metavar="SIZE", help="of the host, all ranks together")


def run_estimate(args: argparse.Namespace) -> int:
    budgets = {key: None if (size := getattr(args, key)) is None else parse_bytes(size) for key in ("hbm_budget", "host_budget")}
    result = estimate(args.model, load_profile(args.hw), batch=args.batch, seq=args.seq, ranks=args.ranks, **budgets)
    print(result)
    return 1 if result.misfit else 0
