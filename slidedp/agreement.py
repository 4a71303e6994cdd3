"""What ranks agree on: once, on one set of decisions, rank 0's; and before each step, that there is one, and which.

Costs and budgets may differ between ranks, routes and chunks must not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from slidedp.batch import BatchError
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.policy import PLAN_KEYS, apply_policy
from slidedp.executor.errors import CheckpointError
from slidedp.executor.machine.machine import Machine
from slidedp.executor.options import MachineOptions
from slidedp.executor.ranks.collectives import Collectives
from slidedp.schedule import as_int

CALLS = ("evaluates", "trains", "saves")
SAVES = 2
SAVE_FAILED = 2


class StopAsked(Exception):
    """`Plan.ask_to_stop` was called on some rank. Raised on all, before the same step; the one before it is the last."""


class Posted(NamedTuple):
    """One rank's part of the exchange before a step.

    `failed`: 1 if the batch does not fit, SAVE_FAILED if a save beside training has. `valid`: loss-bearing tokens.
    `call`: place in CALLS. `signature`: of the ops that concern other ranks. `lr`: the bits of a double. `changed`: masters
    were written. `as_planned`: the batch is of the shapes that the plan was made for, and nothing is being recorded.
    """

    failed: int = 0
    valid: int = 0
    call: int = 0
    signature: int = 0
    lr: int = 0
    changed: int = 0
    num_batches: int = 0
    stop_asked: int = 0
    as_planned: int = 0


def agree_on_decisions(decisions: Decisions, layers: LayerGraph, collectives: Collectives) -> Decisions:
    """Rank 0's `decisions` on every rank, sent as text: no pickle. Collective."""
    if collectives.world_size == 1:
        return decisions
    pins = {key: getattr(decisions, key) for key in PLAN_KEYS}
    pins["layers"] = {name: asdict(d) for name, d in decisions.groups.items()}
    received = json.loads(collectives.broadcast_bytes(json.dumps(pins).encode()))
    return apply_policy(decisions, received, layers, where="rank 0's decisions")


def refuse_if_options_differ(options: MachineOptions, collectives: Collectives) -> None:
    """ValueError, on every rank, unless all have the same clipping options: otherwise their models would differ. Collective."""
    limit = options.max_grad_norm
    asked = collectives.gather_ints([as_int(0.0 if limit is None else limit), int(options.skip_nonfinite)])
    for other, theirs in enumerate(asked):
        if theirs != asked[0]:
            raise ValueError(f"rank {other} has another max_grad_norm or skip_nonfinite than rank 0: give all ranks the same")


def exchange(machine: Machine, mine: Posted) -> list[Posted]:
    """Every rank's `Posted`, by rank. Collective; the first thing in a step, an evaluation, and a save beside training."""
    return [Posted(*row[: len(mine)]) for row in machine.agree(mine)]


def agree_on_step(machine: Machine, own: Posted, problem: BaseException | None) -> list[Posted]:
    """Every rank's part of the exchange before a step or an evaluation, by rank, once all are found to go together. Collective.

    `problem`: this rank's own error, raised here once the other ranks know of it. On all ranks: raises StopAsked if one has been
    asked to stop, and what :func:`refuse_if_ranks_differ` raises; uploads masters that live in HBM if a user has written to them.
    """
    posted = exchange(machine, own)
    if any(row.failed == SAVE_FAILED for row in posted):
        problem = problem or machine.saves.heard()
    if problem is not None:
        raise problem
    refuse_if_ranks_differ(posted, machine.rank)
    if any(row.changed for row in posted):
        machine.exposure.refresh()
    if any(row.stop_asked for row in posted):
        raise StopAsked("a rank has been asked to stop: nothing of this step has been done, on any rank")
    return posted


def refuse_if_ranks_differ(posted: Sequence[Posted], rank: int) -> None:
    """BatchError, on every rank, unless all make the same call, with batches of one kind and a token to learn from."""
    own = posted[rank]
    for other, its in enumerate(posted):
        if its.failed == SAVE_FAILED:
            raise CheckpointError(f"saving beside training has failed on rank {other}; see its own error. No rank has run a step")
        if its.failed and its.call == SAVES:
            raise CheckpointError(f"rank {other} cannot save: its model's parameters are no longer the plan's (its own error "
                                  "says which one); no rank has begun a checkpoint, and training can go on")
        if its.failed:
            raise BatchError(f"rank {other} was given a batch that it cannot run (its own error says why); no rank has run it")
        if its.call != own.call:
            raise BatchError(f"rank {other} {CALLS[its.call]} while rank {rank} {CALLS[own.call]}: all ranks must make the same "
                             "calls in the same order; no rank has done it")
        if its.num_batches != own.num_batches:
            raise BatchError(f"rank {other} was given {its.num_batches} micro-batch{'es' * (its.num_batches != 1)}, rank {rank} "
                             f"{own.num_batches}: all ranks must give a step as many, some without a valid label if need be; no "
                             "rank has run it")
        if its.signature != own.signature:
            raise BatchError(f"the batch of rank {other} uses other layers than that of rank {rank}, so that their steps would "
                             "move other weights; give all ranks batches of one kind; no rank has run it")
    if own.call != SAVES and not any(its.valid for its in posted):
        raise BatchError("no valid token in the global batch (all labels are ignored, on every rank): the loss would be 0/0; "
                         "skip this batch")
