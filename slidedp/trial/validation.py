"""AutoPolicy's last stage: the first real steps run the solver's plan and the rule's in turns, and the faster one stays.

These are the user's own training steps; none is lost or done twice. Both plans train alike, bit for bit, unless their states
live in different places and the user has asked for that to be compared too: the GPU's AdamW rounds differently from the CPU's.

    rival_of       the default plan that a solved one is timed against, if there is one and the host has room for both
    prepare_trial  whether there will be a trial, or an earlier verdict holds: kept by model, shapes, machine and the two plans
    Trial          whose turn it is; the switch from one to the other (executor/machine/switching.py); the verdict

One plan runs for a step that does not count and `num_steps` that do, then the other. With several ranks the slowest counts;
all ranks get all times, and so reach the same verdict. Steps of another shape than the one planned for run as they come and do
not count; if there are too many of them, the solver's plan stays, not validated. What the switch costs (draining, other slots,
state that moves between HBM and host) is counted as a cost of selection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from slidedp.agreement import agree_on_decisions
from slidedp.cache import machine_hash, read_cached, write_cached
from slidedp.compiler.decisions import Decisions, StateHome
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.planfile.planfile import PlanFile, decisions_hash, model_hash, params_hash, read_verdict
from slidedp.compiler.planfile.planyaml import to_text
from slidedp.compiler.planfile.verdict import DEFAULT, PLAN, Verdict
from slidedp.compiler.policy import merge_policies
from slidedp.compiler.solver.defaults import check_budgets
from slidedp.compiler.strict import content_hash, load_yaml, parse_yaml
from slidedp.executor.machine.machine import Machine
from slidedp.executor.machine.step import Step
from slidedp.executor.machine.switching import Lowered, SwitchError, switch
from slidedp.executor.ranks.collectives import Collectives
from slidedp.executor.shared.words import NUM_VALUES
from slidedp.executor.state.state_layout import layout_state
from slidedp.planning.autopolicy import AutoPlan
from slidedp.planning.candidate import Candidate
from slidedp.planning.decide import by_the_rule
from slidedp.planning.planner import with_possible_rows
from slidedp.planning.recheck import Recheck
from slidedp.reports.report import validation_facts
from slidedp.trial.calibrate import code_of
from slidedp.version import __version__

if TYPE_CHECKING:
    from slidedp.planning.planner import Planner
    from slidedp.planning.specialisation import Draft, Specialisation
    from slidedp.settings import Settings

NUM_STEPS = 3
"""Timed steps of either plan, unless the user says otherwise."""

MOST_OTHERS = 50
"""Steps of other shapes after which either plan is given up timing: where every batch has its own shape, it would never end."""

TOLERANCE = 0.02
"""Share of a step by which the default must be faster to be kept: less is within what steps differ by anyway."""

METHOD = 2
"""Of running a plan; raised when one may have become faster than another, so that earlier verdicts do not count."""

CONTROL_BYTES = 16 << 20
"""Host memory for the words of the control segment, more than there are."""

ALIKE = ("update", "slices", "head_chunks")
"""Fields of the whole plan that change bits, or what lives as long as the machine: the two plans have them in common."""

log = logging.getLogger("slidedp")


# ---- whom to compare with ----


def rival_of(layers: LayerGraph, settings: Settings, chosen: AutoPlan) -> Decisions | None:
    """The default that `chosen` is to be timed against; None if there is nothing to validate, or no room to.

    Unless the user has asked for a validation (`same_bits` False), its optimizer states live where those of `chosen` do, and need
    not move.
    """
    rule, plan = chosen.rule, chosen.decisions
    if not settings.validate or chosen.record is None or rule is None:
        return None
    if settings.same_bits:
        rule = with_homes_of(plan, rule, layers, settings)
    if rule is None or with_possible_rows(layers, rule) == with_possible_rows(layers, plan):
        return None
    if any(getattr(rule, key) != getattr(plan, key) for key in ALIKE):
        return None
    return rule if fit_together(layers, settings, (plan, rule)) else None


def with_homes_of(plan: Decisions, rule: Decisions, layers: LayerGraph, settings: Settings) -> Decisions | None:
    """The rule's decisions with optimizer states where `plan` has them, those in HBM cut alike; None if that has no room."""
    homes = {name: d.state for name, d in plan.groups.items()}
    if homes != {name: d.state for name, d in rule.groups.items()}:
        assert not isinstance(settings.policy, PlanFile), "a whole plan is not solved for"
        pins = {"layers": {name: {"state": str(home)} for name, home in homes.items()}}
        try:
            rule = by_the_rule(layers, replace(settings, policy=merge_policies(settings.policy, pins)))
            check_budgets(layers, rule, settings.hbm_bytes, settings.host_bytes)
        except BudgetError:
            return None
    cut = {name: replace(d, return_chunks=plan.of(name).return_chunks) for name, d in rule.groups.items()
           if d.state is StateHome.HBM}
    return replace(rule, groups=rule.groups | cut)


def fit_together(layers: LayerGraph, settings: Settings, plans: Sequence[Decisions]) -> bool:
    """True if the host has room for what either of the plans keeps there, beside what the other does."""

    def state_bytes(first: Decisions, *others: Decisions) -> int:
        dtypes = {"compute_dtype": settings.compute_dtype, "grad_dtype": settings.grad_dtype}
        layout = layout_state(layers.groups, first, world_size=settings.world_size, control_bytes=CONTROL_BYTES * bool(others),
                              others=others, **dtypes)  # fmt: skip
        return sum(layout.bytes_by_place().values())

    both = state_bytes(*plans)
    return all(estimate_memory(layers, p).host_bytes - state_bytes(p) + both <= settings.host_bytes for p in plans)


# ---- what is known already ----


def verdict_path(model: nn.Module, draft: Draft, settings: Settings, plan: Decisions, rival: Decisions) -> Path | None:
    """Where the verdict on these two plans is kept: by model, shapes, element types, what runs them, and machine."""
    s, layers = settings, draft.layers
    shapes = sorted((key, list(shape)) for key, shape in draft.shapes.items())
    kinds = sorted({stage.kind_key for stage in layers.stages})
    machine = machine_hash(s.device.type, s.world_size)
    key = content_hash([
        METHOD, __version__, model_hash(layers), params_hash(layers), kinds, shapes, layers.num_lanes, str(s.compute_dtype),
        str(s.grad_dtype), code_of(model), machine, s.update_threads, decisions_hash(plan), decisions_hash(rival)])  # fmt: skip
    return s.cache_dir / f"validated-{key}.yaml" if s.cache_dir else None


def read_verdict_at(path: Path | None) -> Verdict | None:
    return read_cached(path, lambda p: read_verdict(load_yaml(p), str(p)))


@dataclass(frozen=True)
class Preparation:
    """Rank 0's proposal: the plan to begin with, and the one to time it against, which may be none or the same."""

    planner: Planner
    num_steps: int
    draft: Draft
    plan: Decisions
    rival: Decisions
    times_s: Sequence[float]
    keep: Path | None

    def begin(self, spec: Specialisation) -> Trial | None:
        """`spec`: of the plan, as agreed; `rival` is agreed too. None, with a warning, where this rank has no room for it."""
        if self.rival == self.plan:
            if self.planner.verdict is not None and self.keep is not None:
                self.planner.recheck = Recheck(self.planner.verdict, spec, self.keep)
            return None
        try:
            plan, default = self.planner.candidates(self.draft, spec, self.rival)
        except ValueError as e:
            log.warning(f"the plan is not validated: the default cannot run this batch ({e})")
            return None
        began, measured, solved = self.times_s
        return Trial(self.planner, plan, default, self.num_steps, measuring_s=measured - began,
                     solving_s=solved - measured, keep=self.keep)


def prepare_trial(planner: Planner, draft: Draft, opinion: Decisions, collectives: Collectives,
                  times_s: Sequence[float]) -> Preparation:
    """Rank 0 says whether and against what its plan is to be validated; or knows already which is faster. Collective."""
    plan = rival = opinion
    path, verdict = None, None
    if collectives.rank == 0 and planner.chosen is not None:
        try:
            other = rival_of(draft.layers, planner.settings, planner.chosen)
        except ValueError as e:  # the other ranks are waiting to hear of it, and training can do without
            log.warning(f"the plan is not validated: there is no default to compare it with ({e})")
            other = None
        if other is not None:
            path = verdict_path(planner.model, draft, planner.settings, plan, other)
            verdict = read_verdict_at(path)
            rival = other if verdict is None else plan
            if verdict is not None and verdict.kept == DEFAULT:
                plan = rival = other
    text = collectives.broadcast_bytes(to_text(asdict(verdict)).encode() if verdict else b"")
    planner.verdict = read_verdict(parse_yaml(text.decode(), "rank 0's verdict"), "rank 0's verdict") if text else None
    plan, rival = (agree_on_decisions(d, draft.layers, collectives) for d in (plan, rival))
    (num_steps,) = collectives.exchange_ints([planner.settings.validate])
    return Preparation(planner, num_steps, draft, plan, rival, times_s, path)


# ---- the first steps ----


def seconds_of(step: Step) -> float:
    """What a step took: from the end of the compute of the one before. Waits for the end of its own."""
    step.machine.wait_compute(step)
    return step.wall_s


def slowest(machine: Machine, times_us: Sequence[int]) -> list[int]:
    """Each value as measured by the slowest rank: the maximum over the ranks. Collective."""
    out: list[int] = []
    for i in range(0, len(times_us), NUM_VALUES):
        part = times_us[i : i + NUM_VALUES]
        rows = machine.agree(part)
        out += [max(column) for column in zip(*rows, strict=True)][: len(part)]
    return out


class Trial:
    """The validation of one plan, from its first step to the verdict. The same on every rank: all count what all have agreed on.

    `measuring_s`, `solving_s`: what selection has cost before. `keep`: where rank 0 keeps the verdict.
    """

    def __init__(self, planner: Planner, plan: Candidate, default: Candidate, num_steps: int, *, measuring_s: float,
                 solving_s: float, keep: Path | None) -> None:
        self.candidates = (plan, default)
        self.at = 0
        self._planner, self._num_steps, self._keep = planner, num_steps, keep
        self._before_us = [round(measuring_s * 1e6), round(solving_s * 1e6)]
        self._steps: list[Step] = []
        self._others = 0
        self._switching_s = 0.0

    @property
    def others(self) -> list[Lowered]:
        """What the machine must have room for beside the first."""
        return [self.candidates[1].lowered]

    def is_of(self, spec: Specialisation) -> bool:
        """True for a step of the shape that was planned for, of the plan whose turn it is."""
        return spec is self.current.spec

    @property
    def current(self) -> Candidate:
        return self.candidates[self.at]

    def ran(self, step: Step) -> None:
        """Counts a step of the shape that was planned for on all ranks."""
        if not self.over:
            self._steps.append(step)

    def passed_by(self) -> None:
        """Counts a step that had another shape on some rank."""
        self._others += 1

    @property
    def over(self) -> bool:
        """True once the current candidate has had its steps: :meth:`turn` is due before the next step that would count."""
        return len(self._steps) > self._num_steps

    @property
    def hopeless(self) -> bool:
        """True if it will not have them soon, for too many steps have another shape: :meth:`turn` is due."""
        return self._others >= MOST_OTHERS

    def turn(self, machine: Machine) -> bool:
        """Switches to the next candidate. False if there is none: the faster plan runs, the planner has the verdict. Collective.

        The caller's step has not begun. Raises PeerError and whatever else ends a plan.
        """
        given_up = not self.over
        self.current.times_us = slowest(machine, [round(seconds_of(step) * 1e6) for step in self._steps])
        self._steps.clear()
        self._others = 0
        began = time.perf_counter()
        kept = 0 if given_up else None if self.at == 0 else self.faster()
        try:
            self._switch_to(machine, 1 if kept is None else kept)
        except SwitchError as e:
            wanted = (DEFAULT, PLAN)[self.at]
            self._end(machine, None, f"the plan is not validated: no change to the {wanted} was possible ({e})", own=e.own)
            return False
        self._switching_s += time.perf_counter() - began
        if kept is None:
            return True
        if given_up:
            self._end(machine, None, f"the plan is not validated: {MOST_OTHERS} steps were of other shapes than the one planned "
                      "for; pad batches to one length, or compile with validate=False")
            return False
        verdict = self._verdict(machine, kept)
        self._end(machine, verdict, "; ".join(map(" ".join, validation_facts(verdict).items())))
        return False

    def faster(self) -> int:
        plan, default = self.candidates
        return int(default.median_us < plan.median_us * (1 - TOLERANCE))

    def _switch_to(self, machine: Machine, index: int) -> None:
        if index == self.at:
            return
        candidate = self.candidates[index]
        switch(machine, candidate.lowered)
        self.at = index
        self._planner.use(candidate)

    def _verdict(self, machine: Machine, kept: int) -> Verdict:
        plan, default = self.candidates
        best_us = self.candidates[kept].median_us
        lost_us = sum(max(us - best_us, 0) for us in self.candidates[1 - kept].times_us)
        record, simulated = plan.spec.solver, [c.spec.timeline.step_us for c in self.candidates]
        measuring, solving, switching, predicted, plan_us, default_us = slowest(
            machine, [*self._before_us, round(self._switching_s * 1e6), record.step_us if record else 0, *simulated])
        return Verdict(
            (PLAN, DEFAULT)[kept], self._num_steps, predicted, plan_us, plan.median_us, default_us, default.median_us,
            measuring, solving, lost_us + switching)  # fmt: skip

    def _end(self, machine: Machine, verdict: Verdict | None, text: str, *, own: bool = False) -> None:
        """Ends the trial and gives back what only the other plan needed. `own`: what `text` says is known to this rank alone."""
        machine.agree([])  # all ranks have left it
        machine.state.settle_on(machine.plan.decisions)
        self._planner.verdict = verdict
        if machine.rank == 0 or own:
            log.log(logging.INFO if verdict else logging.WARNING, f"rank {machine.rank}: {text}" if machine.rank else text)
        if machine.rank == 0 and verdict:
            write_cached(self._keep, to_text(asdict(verdict)))
