"""Why a plan takes as long as it does, and what else it could do: `plan.explain()`, ``slidedp explain plan.yaml [L17.act]``.

Every alternative is computed, not argued: the decision is pinned to another value, all else as planned, and the plan is
lowered and simulated again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions, GroupDecision, Update
from slidedp.compiler.drawing.binds import Link, links, longest
from slidedp.compiler.drawing.gantt import duration
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import LayerGraph, recut
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.policy import apply_policy, match_groups
from slidedp.compiler.residency import speculating_groups
from slidedp.compiler.simulation.timeline import covered_us
from slidedp.compiler.units import format_bytes
from slidedp.reports.report import bound_by, validation_lines, wrapped
from slidedp.reports.what_if import Outcome, WhatIf, what_if

TIE = 1e-3
"""Steps that differ by less than this part of the planned one are equally long."""

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Values of a count that are tried beside the planned one."""

NUM_MATTERING = 6
SAME_OPS = "no op changes"

GROUP_FIELDS = tuple(f.name for f in fields(GroupDecision))
PLAN_FIELDS = tuple(f.name for f in fields(Decisions) if f.name != "groups")


class Verdict(StrEnum):
    CHOSEN = "chosen"
    TIE = "tie"
    FASTER = "faster"
    SLOWER = "slower"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Alternative:
    """`decision` (``L17.act``, ``*.delivery``, ``window``) at `value`, all else as planned.

    Changes are against the plan: of the step in microseconds (None: unavailable), of the memory of each device and of the
    host in bytes. `why`: what makes it unavailable, or that it changes no op.
    """

    decision: str
    value: str
    verdict: Verdict
    step_change_us: int | None = None
    hbm_change_bytes: int = 0
    host_change_bytes: int = 0
    why: str = ""


@dataclass(frozen=True)
class Report:
    """What binds a step, and what other decisions would change. `str()` is at most 80 columns wide, names permitting.

    `chain`: the critical cycle, over `cycle_steps` steps, its longest link `bound_by`. `waits_us`: of the time that the GPU
    waits, by the kind of op it waits for. `question`: the decision asked about, or '' for those that matter most.
    `norm_us`: what it costs that updates wait for the norm of all gradients, against the same plan whose updates do not; None if
    they do not. `speculating`: how many groups make up for it, and `candidate_bytes` of the host with what. `redone_us`: of the
    CPU, for a step whose norm is over the limit: one more update of these groups; a step is longer by that at most.
    `validation`: lines on what real steps have said.
    """

    title: str
    step_us: int
    exposed_us: int
    bottleneck: str
    bound_by: Link | None
    chain: tuple[Link, ...]
    busy_us: Mapping[Stream, int]
    waits_us: Mapping[OpKind, int]
    question: str
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()
    cycle_steps: int = 1
    norm_us: int | None = None
    speculating: int = 0
    candidate_bytes: int = 0
    redone_us: int = 0
    validation: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self._binding(), *self._norm(), *self.validation, *([] if self.question else self._streams()),
                          *self._alternatives(),
                          *(line for note in self.notes for line in wrapped(f"note: {note}", "  "))])  # fmt: skip

    def _binding(self) -> Iterator[str]:
        yield from wrapped(f"{self.title}: {duration(self.step_us)} a step, GPU idle {duration(self.exposed_us)}", "  ")
        if self.bound_by:
            yield from wrapped(f"bound by {self.bound_by}: {duration(self.bound_by.time_us)} of the critical cycle", "  ")
        else:
            yield f"bound by {bound_by(self.bottleneck)}"

    def _norm(self) -> Iterator[str]:
        if self.norm_us is None:
            return
        sign = "-" if self.norm_us < 0 else "+"
        means = f"{self.speculating} groups speculate, in {format_bytes(self.candidate_bytes)} of host memory"
        redone = f", and a clipped one by {duration(self.redone_us)} more at most, for their updates anew"
        yield from wrapped(f"updates wait for the norm of all gradients: {sign}{duration(abs(self.norm_us))} a step "
                           f"({self.norm_us / max(self.step_us - self.norm_us, 1):+.1%}){redone if self.speculating else ''}; "
                           f"{means if self.speculating else 'no group speculates'}", "  ")

    def _streams(self) -> Iterator[str]:
        over = f" of {self.cycle_steps} steps" if self.cycle_steps > 1 else ""
        yield from ("", f"critical cycle{over}, each waiting for the one before, round to the first")
        for link in self.chain:
            yield f"  {duration(link.time_us):>9}  {self._share(link.time_us / max(self.cycle_steps, 1))}  {link}"
        yield from ("", "streams, busy")
        for stream, busy in self.busy_us.items():
            yield f"  {duration(busy):>9}  {self._share(busy)}  {stream}: {bound_by(stream)}"
        if self.waits_us:
            yield from ("", "the GPU waits for")
            for kind, time in self.waits_us.items():
                yield f"  {duration(time):>9}  {self._share(time)}  {kind}"

    def _share(self, us: float) -> str:
        return f"{us / max(self.step_us, 1):6.1%}"

    def _alternatives(self) -> Iterator[str]:
        if not self.alternatives:
            return
        yield from ("", f"{self.question or 'decisions that matter most, of all groups at once'}, the rest as planned")
        group = f"{self.question}."  # of a question about one group the title says which
        rows = [("", "value", "step", "device", "host", "verdict"), *(self._row(a) for a in self.alternatives)]
        rows = [(name.removeprefix(group), *cells) for name, *cells in rows]
        first = 1 if self.question and len({a.decision for a in self.alternatives}) == 1 else 0
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row, alternative in zip(rows, (None, *self.alternatives), strict=True):
            cells = [f"{cell:{side}{w}}" for cell, side, w in zip(row, "<<>>><", widths, strict=True)]
            yield "  " + "  ".join(cells[first:]).rstrip()
            if alternative and alternative.why:
                yield from wrapped(f"      {alternative.why}", " " * 6)

    def _row(self, a: Alternative) -> tuple[str, ...]:
        memory = (format_change(a.hbm_change_bytes), format_change(a.host_change_bytes))
        if a.step_change_us is None:
            return a.decision, a.value, "", *memory, str(a.verdict)
        part = a.step_change_us / max(self.step_us, 1)
        by = f" by {abs(part):.1%}" if a.verdict in (Verdict.FASTER, Verdict.SLOWER) else ""
        step = f"{'+' if a.step_change_us > 0 else '-'}{duration(abs(a.step_change_us))}" if a.step_change_us else "="
        return a.decision, a.value, step, *memory, f"{a.verdict}{by}"


def format_change(num_bytes: int) -> str:
    return "=" if not num_bytes else f"{'+' if num_bytes > 0 else '-'}{format_bytes(abs(num_bytes))}"


def explain(
    plan: PlanFile | str | Path,
    decision: str = "",
    *,
    hw: str | Path | HardwareProfile | None = None,
    cost_model: CostModel | None = None,
) -> Report:
    """What binds `plan`'s step, and what else it could decide.

    Args:
        decision: ``L17.act``, ``L00-L05.source``, ``*.delivery`` (or ``delivery``), ``window``: every value of it; ``L17``:
            every field of that group. Default: of each decision, for all groups at once, the value that matters most.
        hw, cost_model: as for :func:`slidedp.reports.what_if.what_if`.

    Raises ValueError for a decision that the plan does not have, and for one of a machine that is not known here.
    """
    plan = plan if isinstance(plan, PlanFile) else PlanFile.load(plan)
    world, notes = what_if(plan, hw, cost_model)
    asked = decisions_asked(decision, plan.layers)
    planned = world.outcome(plan.decisions)
    if not plan.edited and abs(planned.timeline.step_us - plan.predictions.step_us) > TIE * plan.predictions.step_us:
        notes = (*notes, f"the plan's own prediction is {duration(plan.predictions.step_us)} a step")
    if decision:
        found = tuple(a for target, field in asked for a in alternatives(world, planned, target, field))
    else:
        found = mattering(world, planned)
    if plan.sliced and not plan.edited:
        notes = (*notes, f"the batch goes through in {plan.decisions.slices} slices: {plan.sliced}")
    line = planned.timeline
    chain = links(line)
    norm_us = None
    if planned.decisions.update is Update.DEFERRED:
        unwaiting = world.outcome(replace(planned.decisions, update=Update.IN_BACKWARD), verified=False)
        norm_us = line.step_us - unwaiting.timeline.step_us
    again = [g.name for g in speculating_groups(plan.layers, planned.decisions)]
    redone = {op.name for op in planned.graph if op.kind is OpKind.CPU_UPDATE and op.layer in again}
    return Report(
        title=f"{plan.layers.model or 'model'} on {world.hw.name}", step_us=line.step_us, exposed_us=line.exposed_us,
        bottleneck=str(line.bottleneck), bound_by=longest(chain), chain=chain, busy_us=line.busy_us,
        waits_us=line.exposed_by, question=decision, alternatives=found, notes=notes, cycle_steps=line.cycle_steps,
        norm_us=norm_us, speculating=len(again), candidate_bytes=planned.memory.host["candidates"],
        redone_us=covered_us([span for span in line.spans if span.op in redone]),
        validation=tuple(validation_lines(plan)))


def decisions_asked(decision: str, layers: LayerGraph) -> list[tuple[str, str]]:
    """(pattern of groups, field) for each decision that `decision` names; the pattern is '' for one of the whole plan."""
    target, dot, field = decision.rpartition(".")
    if not decision:
        return []
    if not dot and field in PLAN_FIELDS:
        return [("", field)]
    try:
        if not dot and field not in GROUP_FIELDS:  # a group: all of its fields
            match_groups(field, layers, "explain")
            return [(field, name) for name in GROUP_FIELDS]
        match_groups(target or "*", layers, "explain")
        if field in GROUP_FIELDS:
            return [(target or "*", field)]
        raise ValueError(f"explain: {decision}: there is no decision {field!r} of a group")
    except ValueError as e:
        have = f"decisions are, of a group: {', '.join(GROUP_FIELDS)}; of the plan: {', '.join(PLAN_FIELDS)}"
        raise ValueError(f"{e}; {have}") from e


def alternatives(world: WhatIf, planned: Outcome, target: str, field: str, thorough: bool = True) -> Iterator[Alternative]:
    """One for every value of a decision, in order. `thorough`: verified, and of a number, all of COUNTS, not only its half and
    its double."""
    name = f"{target}.{field}" if target else field
    current = current_values(planned, target, field)
    if len(current) > 1:
        yield Alternative(name, f"as planned: {', '.join(map(str, current))}", Verdict.CHOSEN, 0)
    for value in values(current, thorough):
        if target and value is Update.IN_BACKWARD:
            continue  # the plan's decision, not a group's
        if current == [value]:
            yield Alternative(name, str(value), Verdict.CHOSEN, 0)
        else:
            yield forced(world, planned, target, field, value, verified=thorough)


def current_values(planned: Outcome, target: str, field: str) -> list[Any]:
    if not target and field == "update" and planned.decisions.update is Update.DEFERRED:
        return sorted({d.update for d in planned.decisions.groups.values()})  # how they wait is each group's
    if not target:
        return [getattr(planned.decisions, field)]
    groups = match_groups(target, planned.layers, "explain")
    return sorted({getattr(planned.decisions.of(g), field) for g in groups})


def values(current: list[Any], thorough: bool) -> list[Any]:
    """What a decision may be: every member of its enum, both truths, or the counts planned and others."""
    one = current[0]
    if isinstance(one, StrEnum):
        return list(type(one))
    if isinstance(one, bool):
        return [False, True]
    halves_and_doubles = {n for c in current for n in (c // 2, 2 * c) if n >= 1}
    return sorted({*current, *(COUNTS if thorough else halves_and_doubles)})


def forced(world: WhatIf, planned: Outcome, target: str, field: str, value: Any, *, verified: bool = True) -> Alternative:
    """The plan with one decision pinned. Whatever says no, of policy, budgets, passes or simulator, is the reason why."""
    bare = Alternative(f"{target}.{field}" if target else field, str(value), Verdict.UNAVAILABLE)
    pin = {field: value if isinstance(value, int) else str(value)}
    try:
        decisions = apply_policy(planned.decisions, {"layers": {target: pin}} if target else pin, world.layers, "explain")
    except ValueError as e:
        return replace(bare, why=first_line(e))
    memory = estimate_memory(recut(world.layers, decisions.slices), decisions)
    bare = replace(bare, hbm_change_bytes=memory.hbm_bytes - planned.memory.hbm_bytes,
                   host_change_bytes=memory.host_bytes - planned.memory.host_bytes)
    try:
        outcome = world.outcome(decisions, verified=verified)
    except ValueError as e:
        return replace(bare, why=first_line(e))
    change = outcome.timeline.step_us - planned.timeline.step_us
    verdict = Verdict.FASTER if change < 0 else Verdict.SLOWER
    if abs(change) <= TIE * planned.timeline.step_us:
        verdict = Verdict.TIE
    same = (outcome.graph.ops, outcome.graph.slots) == (planned.graph.ops, planned.graph.slots)
    why = SAME_OPS if same else ""
    return replace(bare, verdict=verdict, step_change_us=change, why=why)


def mattering(world: WhatIf, planned: Outcome) -> tuple[Alternative, ...]:
    """For each decision, taken for all groups at once, the value that helps most, or else hurts most; largest changes first."""
    found = []
    for target, field in [*(("*", f) for f in GROUP_FIELDS), *(("", f) for f in PLAN_FIELDS)]:
        others = [a for a in alternatives(world, planned, target, field, thorough=False)
                  if a.verdict is not Verdict.CHOSEN and a.why != SAME_OPS]
        possible = [a for a in others if a.step_change_us is not None]
        if possible:
            found.append(min(possible, key=lambda a: (a.verdict is not Verdict.FASTER, -abs(a.step_change_us or 0))))
        elif others:
            found.append(others[0])
    found.sort(key=lambda a: (a.step_change_us is None, -abs(a.step_change_us or 0)))
    return tuple(found[:NUM_MATTERING])


def first_line(error: ValueError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2])
