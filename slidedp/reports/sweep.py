"""What a model would do on a machine over batches, ranks and routes, each simulated. No GPU, no weights, and nothing runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions, Route
from slidedp.compiler.footprint.memory import MemoryReport
from slidedp.compiler.ops import Stream
from slidedp.compiler.policy import merge_policies
from slidedp.compiler.simulation.timeline import Timeline
from slidedp.compiler.units import format_bytes
from slidedp.planning.decide import by_the_rule
from slidedp.planning.planner import Planner
from slidedp.planning.specialisation import Draft, Specialisation, with_costs_of
from slidedp.presets import build_meta_model
from slidedp.reports.report import format_duration, memory_of, predicted_tokens_per_s
from slidedp.settings import Settings

UNLIMITED = 2**62
"""Bytes: a budget that never binds, for tracing before anything is decided."""


@dataclass(frozen=True)
class Case:
    """One point of a sweep. `batch`: sequences a rank. `chosen`: the rule, left alone, takes `route` for the layers.

    `tokens_per_s`: of all ranks. `problem`: what does not fit, in words; then there is no timeline.
    """

    batch: int
    ranks: int
    route: Route
    chosen: bool = False
    timeline: Timeline | None = None
    memory: MemoryReport | None = None
    tokens_per_s: float = 0.0
    problem: str = ""


class Sweep:
    """Simulates `model` (a preset's name, a config, or a module) on `hw`; `policy` pins what is not swept.

    Raises ValueError for a model or policy that is wrong by itself; what merely does not fit is a Case with a problem.
    """

    def __init__(self, model: str | Path | nn.Module, hw: HardwareProfile, *, seq: int, policy: Mapping[str, Any] | None = None,
                 hbm_budget: int | None = None, host_budget: int | None = None) -> None:
        self.model = model if isinstance(model, nn.Module) else build_meta_model(model)
        self.hw, self.seq, self.policy = hw, seq, dict(policy or {})
        self.hbm_budget, self.host_budget = hbm_budget or hw.hbm_bytes, host_budget or hw.host_bytes
        self.traced: dict[tuple[int, int], Draft] = {}  # (batch, ranks) -> the latest draft, for the other routes
        self.lowered: dict[tuple[int, Route], Specialisation] = {}  # (ranks, route) -> a graph that another batch may share

    def on(self, hw: HardwareProfile) -> Sweep:
        """The same model on another machine: what was traced and lowered for this one serves there, too."""
        other = Sweep(self.model, hw, seq=self.seq, policy=self.policy)
        other.traced, other.lowered = self.traced, self.lowered
        return other

    def cases(self, batches: Sequence[int], ranks: Sequence[int], routes: Sequence[Route]) -> Iterator[Case]:
        """In this order, routes innermost. One rank has one route: there is nothing to shard."""
        for world_size in ranks:
            for batch in batches:
                for route in routes if world_size > 1 else [Route.REPLICATED]:
                    yield self.case(batch, world_size, route)

    def case(self, batch: int, ranks: int, route: Route) -> Case:
        """Layers, prologue and epilogue take `route` unless the policy pins another; the rule decides the rest."""
        draft = self.draft(batch, ranks)
        settings = self.settings(ranks, self.hbm_budget, self.host_budget, {"delivery": str(route)})
        try:
            decisions = by_the_rule(draft.layers, settings)
        except ValueError as e:
            boundless = replace(settings, hbm_budget=UNLIMITED, host_budget=UNLIMITED)
            by_the_rule(draft.layers, boundless)  # a wrong policy raises here
            return Case(batch, ranks, route, problem=str(e))
        alone = by_the_rule(draft.layers, self.settings(ranks, self.hbm_budget, self.host_budget))
        chosen = {alone.of(g.name).delivery for g in draft.layers.groups if draft.layers.streams(g)} == {route}
        spec = self.specialise(draft, decisions, settings, (ranks, route))
        return Case(batch, ranks, route, chosen, spec.timeline, memory_of(spec), predicted_tokens_per_s(spec))

    def settings(self, ranks: int, hbm_budget: int, host_budget: int, pinned: Mapping[str, Any] | None = None) -> Settings:
        dtype = torch.float32 if self.hw.gpu_name == "cpu" else torch.bfloat16
        return Settings(self.hw, dtype, dtype, ranks, policy=merge_policies(pinned, self.policy), hbm_budget=hbm_budget,
                        host_budget=host_budget)

    def draft(self, batch: int, ranks: int) -> Draft:
        """The model traced for this batch; budgets come later."""
        if (batch, ranks) not in self.traced:
            planner = Planner(self.model, self.settings(ranks, UNLIMITED, UNLIMITED))
            tokens = torch.zeros(batch, self.seq, dtype=torch.long)  # only the shape matters
            self.traced.clear()
            self.traced[batch, ranks] = planner.draft(planner.lanes({"input_ids": tokens, "labels": tokens}))
        return self.traced[batch, ranks]

    def specialise(self, draft: Draft, decisions: Decisions, settings: Settings, key: tuple[int, Route]) -> Specialisation:
        """Another batch changes no op and no edge, only how long ops take: the graph is lowered once for equal decisions."""
        spec = Specialisation(draft.traces, draft.layers, decisions, draft.num_tokens, draft.shapes, settings)
        like = self.lowered.get(key)
        if like and like.decisions == decisions:
            spec.__dict__["graph"] = with_costs_of(like.graph, spec)
        self.lowered[key] = spec
        return spec


HEADINGS = ("ranks", "batch", "route", "step", "tokens/s", "GPU busy", "host busy", "HBM", "host memory", "bound by", "")
WIDTHS = (5, 5, 10, 9, 9, 8, 9, 9, 11, 18, 0)
WORDS = ("route", "bound by", "")


def table(cases: Iterable[Case], *, words: bool = False) -> Iterator[str]:
    """Lines, as the cases come: for each batch and number of ranks its routes, the best first. `words`: and their timelines."""
    yield aligned(HEADINGS)
    for _, group in groupby(cases, key=lambda case: (case.ranks, case.batch)):
        routes = sorted(group, key=lambda case: -case.tokens_per_s)
        for case in routes:
            yield row(case, routes)
            if words and case.timeline:
                yield textwrap.indent(f"{case.timeline}\n", "    ")


def row(case: Case, routes: Sequence[Case]) -> str:
    """One case; `routes`: all of its batch and ranks, the best first."""
    head = (str(case.ranks), str(case.batch), str(case.route))
    if case.timeline is None or case.memory is None:
        return f"{aligned(head)}  does not fit: {case.problem.partition(': ')[2].partition(' (')[0]}"
    line, notes = case.timeline, []
    host = max((line.utilisation[s] for s in line.busy_us if s is not Stream.GPU), default=0.0)
    if case is routes[0] and len(routes) > 1 and routes[1].timeline:
        notes.append(f"best, by {case.tokens_per_s / routes[1].tokens_per_s - 1:.1%}")
    if case.chosen:
        notes.append("the rule's choice")
    return aligned((*head, format_duration(line.step_us), f"{case.tokens_per_s:,.0f}", f"{line.utilisation[Stream.GPU]:.0%}",
                    f"{host:.0%}", format_bytes(case.memory.hbm_bytes), format_bytes(case.memory.host_bytes),
                    f"{'GPU' if line.gpu_bound else 'host'}: {line.binds}", ", ".join(notes)))  # fmt: skip


def aligned(cells: Sequence[str]) -> str:
    """Numbers to the right, words to the left."""
    columns = zip(HEADINGS, WIDTHS, cells, strict=False)
    return "  ".join(f"{cell:<{w}}" if h in WORDS else f"{cell:>{w}}" for h, w, cell in columns).rstrip()
