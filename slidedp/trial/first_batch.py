"""The first batch: every rank plans for its own, the ranks agree on one plan, and each builds the machine that runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slidedp.agreement import Posted, agree_on_decisions, refuse_if_options_differ, refuse_if_ranks_differ
from slidedp.batch import BatchError, Batches, check_lanes, num_batches
from slidedp.checkpoints import Checkpoint, require_same_model
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.tracing.tracer import Trace
from slidedp.executor.machine.machine import Machine
from slidedp.executor.options import MachineOptions
from slidedp.executor.ranks.collectives import Collectives, PeerFailed, together
from slidedp.executor.shared.segment import HostMemoryError
from slidedp.executor.shared.words import PeerError
from slidedp.executor.stages.binding import refuse_owned
from slidedp.planning.planner import Planner
from slidedp.planning.slicing import Slicing
from slidedp.planning.specialisation import Draft, Specialisation
from slidedp.trial.calibrate import measured_stages
from slidedp.trial.validation import Trial, prepare_trial


@dataclass(frozen=True, eq=False)
class Started:
    """A machine, the specialisation of the first batch, and the validation that its first steps are for, if they are."""

    machine: Machine
    spec: Specialisation
    trial: Trial | None


def start(planner: Planner, batch: Batches, collectives: Collectives, optimizer: AdamW, options: MachineOptions,
          resume_from: Checkpoint | None) -> Started:
    """Plans, measures, decides and builds. What goes wrong on one rank ends it on all, and nothing is settled. Collective.

    Raises BatchError where another rank has a ValueError, PeerError where it has another error.
    """
    try:
        with together(collectives), torch.inference_mode(False):
            return settle(planner, batch, collectives, optimizer, options, resume_from)
    except BaseException as e:
        planner.forget()
        if isinstance(e, PeerFailed):
            told = f"rank {e.rank} could not plan its first batch: {e.text}"
            raise (BatchError(told) if e.refused else PeerError(e.rank, told)) from None
        raise


def settle(planner: Planner, batch: Batches, collectives: Collectives, optimizer: AdamW, options: MachineOptions,
           resume_from: Checkpoint | None) -> Started:
    lanes, draft, to_measure = draft_together(planner, batch, collectives)
    refuse_if_starts_differ(collectives, batch, draft.signature)
    times_s = [time.perf_counter()]
    planner.measurement = measured_stages(planner.model, to_measure, lanes[0], planner.settings, collectives)
    times_s.append(time.perf_counter())
    opinion = planner.decide(draft)
    times_s.append(time.perf_counter())
    spec, trial = plan_together(planner, draft, opinion, options, collectives, resume_from, times_s)
    refuse_if_starts_differ(collectives, batch, spec.signature(training=True))
    return build(planner, spec, trial, collectives, optimizer, options)


def draft_together(planner: Planner, batch: Batches, collectives: Collectives) -> tuple[list[dict[str, Tensor]], Draft, Trace]:
    """This rank's batch, cut into as many slices as any rank needs, traced and checked; and the trace to measure. Collective."""
    refuse_owned(planner.model)
    lanes, draft = planner.first_draft(batch)
    slices = planner.slices
    most = max(n for (n,) in collectives.gather_ints([slices]))
    if slices < most:
        lanes, draft = planner.in_slices(batch, Slicing(most, "the batch of another rank is in as many"))
    check_lanes(lanes, draft.traces)
    return lanes, draft, planner.to_measure(draft)


def refuse_if_starts_differ(collectives: Collectives, batch: Batches, signature: int) -> None:
    """BatchError, on every rank, where the ranks' first batches would make other plans, or other steps. Collective."""
    rows = collectives.gather_ints([num_batches(batch), signature])
    refuse_if_ranks_differ([Posted(valid=1, num_batches=num, signature=ops) for num, ops in rows], collectives.rank)


def plan_together(planner: Planner, draft: Draft, opinion: Decisions, options: MachineOptions, collectives: Collectives,
                  resume_from: Checkpoint | None, times_s: Sequence[float]) -> tuple[Specialisation, Trial | None]:
    """The agreed plan for this rank's batch, which may have less room for it than rank 0's, and its validation, if all ranks
    can have it. Collective."""
    refuse_if_options_differ(options, collectives)
    prepared = prepare_trial(planner, draft, opinion, collectives, times_s)
    spec = planner.finish(draft, agree_on_decisions(prepared.plan, draft.layers, collectives))
    if resume_from is not None:
        require_same_model(resume_from, draft.layers.groups)
    trial = prepared.begin(spec)
    on_all = all(flag for (flag,) in collectives.gather_ints([int(trial is not None)]))
    return spec, trial if on_all else None


def build(planner: Planner, spec: Specialisation, trial: Trial | None, collectives: Collectives, optimizer: AdamW,
          options: MachineOptions) -> Started:
    """A machine with room for both plans of `trial`, or if the host has none, for the one; there on all ranks. Collective."""
    s = planner.settings
    try:
        machine = Machine(
            planner.model, spec.lowered, others=trial.others if trial else [], collectives=collectives, device=s.device,
            optimizer=optimizer, compute_dtype=s.compute_dtype, grad_dtype=s.grad_dtype, hbm_budget=s.hbm_budget,
            host_budget=s.host_budget, options=options)
    except HostMemoryError:
        if trial is None:
            raise
        return build(planner, spec, None, collectives, optimizer, options)
    try:
        started = Started(machine, spec, trial)
        collectives.barrier()
    except BaseException as e:
        machine.abandon(e)
        machine.close()
        raise
    return started
