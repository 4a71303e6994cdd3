"""Out of memory in a step: layers keep less of what they have saved, and the op that failed is tried again.

What a layer keeps concerns its own rank alone and changes no bit of the result (stages.py). So nothing of the step is lost or
done twice, the other ranks need not know, and later steps begin with what fits:

    a layer that keeps what its forward saved     drops it, and is run again for its backward. The first layers are asked first,
                                                  since their backward comes last; twice as many if the op fails again
    a layer whose copy to the host is under way   finishes it and frees its memory early; from the next step on it recomputes
    the layer whose forward fails                 keeps nothing itself, if no other layer has anything left
    a rerun that is timed, to learn what to keep  is not timed, and layers of its kind keep nothing

If none of these is left, garbage is collected once; after that it is an error. This handles allocations that compute ops are
refused. All other ops work on slots, which exist before the first step.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from slidedp.compiler.decisions import Activation
from slidedp.compiler.layergraph import StageKind
from slidedp.compiler.ops import Op, OpKind, in_lane
from slidedp.compiler.runlength import runs
from slidedp.compiler.units import format_bytes
from slidedp.executor.devices import garbage

if TYPE_CHECKING:
    from slidedp.executor.machine.step import Step

T = TypeVar("T")

Layers = dict[tuple[int, str], Activation]
"""Micro-batch and layer -> what the plan has the layer keep."""

SAID_BY_OTHERS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""How libraries put it that allocate beside torch."""


class OutOfMemory(torch.OutOfMemoryError):
    """An op does not fit into the device's memory, and no layer keeps anything that could be dropped for it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a plan was made for, for messages. `rows`: of a step's batch; slices can cut it into as many. `named`: the budget is
    the user's, and the allocator keeps to it.
    """

    hbm_bytes: int = 0
    budget_bytes: int = 0
    rows: int = 1
    named: bool = False

    def __str__(self) -> str:
        return f"planned {format_bytes(self.hbm_bytes)} of a budget of {format_bytes(self.budget_bytes)}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """An op did not fit: what the allocator said, and what was dropped for it, of how many bytes."""

    op: str
    said: str
    dropped: Layers
    freed_bytes: int


@dataclass(eq=False, slots=True)
class Fallback:
    """The state of one specialisation on this rank: `recomputed`, layers that recompute whatever they were planned to keep, and
    `since`, the first step in which one did.
    """

    expected: Expected = field(default_factory=Expected)
    recomputed: Layers = field(default_factory=dict)
    since: int = 0

    def activation(self, lane: int, layer: str, planned: Activation) -> Activation:
        """What becomes of what the layer's forward saves."""
        return Activation.RECOMPUTE if (lane, layer) in self.recomputed else planned

    def run(self, step: Step, op: Op, attempt: Callable[[], T], keeps: Activation = Activation.RECOMPUTE, *,
            once: bool = False) -> T:
        """What `attempt` returns, once it fits. When it fails it leaves everything as it was, unless it can be made only `once`.

        `keeps`: what a forward is planned to keep. In the GPU stream's thread. Raises OutOfMemory.
        """
        num, collected = 1, False
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                numbers = ", ".join(filter(None, [step.machine.backend.memory_in_use(), str(self.expected)]))
                said = f"{first_sentences(error)} ({numbers})"
                traceback.clear_frames(error.__traceback__)  # they hold what was half made
            shortage = None if once else self._make_room(step, op, said, keeps, num)
            if shortage is not None and shortage.dropped:
                self._note(step, shortage)
            elif once or collected:
                raise OutOfMemory(self._refusal(step, op, said))
            else:
                garbage.collect()  # takes long, and mostly finds nothing: the user's modules may leave cycles behind
                collected = True
            step.machine.backend.release_cached()
            num *= 2

    def _make_room(self, step: Step, op: Op, said: str, keeps: Activation, num: int) -> Shortage:
        here = (op.lane, op.layer)
        if op.kind is OpKind.RECOMPUTE and (untimed := step.lanes[op.lane].runner.time_no_more(op.layer)):
            return Shortage(op.name, said, {(op.lane, layer): Activation.SELECTIVE for layer in untimed}, 0)
        dropped: Layers = {}
        freed = 0
        for (lane, layer), size in [item for item in self._held(step).items() if item[0] != here][:num]:
            dropped[lane, layer] = step.lanes[lane].runner.values.drop(layer)
            freed += size
        for lane, layer in () if dropped else self._leaving(step)[:num]:
            step.tickets[step.moved_by[in_lane(f"act.{layer}", lane, len(step.lanes))]].wait_done()
            freed += step.lanes[lane].runner.values.leave_early(layer)
            dropped[lane, layer] = Activation.OFFLOAD
        keeps_less = op.kind is OpKind.FORWARD and step.training  # an evaluation keeps nothing, and decides nothing for training
        if not dropped and keeps_less and self.activation(*here, keeps) is not Activation.RECOMPUTE:
            dropped[here] = keeps
        return Shortage(op.name, said, dropped, freed)

    @staticmethod
    def _held(step: Step) -> dict[tuple[int, str], int]:
        """Bytes that each layer could drop, in the order of the forwards."""
        held = [micro.runner.values.held() for micro in step.lanes]
        found = {(lane, layer): size for lane, layers in enumerate(held) for layer, size in layers.items()}
        position = {(lane, p.name): i for lane, micro in enumerate(step.lanes) for i, p in enumerate(micro.runner.trace.programs)}
        return dict(sorted(found.items(), key=lambda item: (position[item[0]], item[0][0])))

    def _leaving(self, step: Step) -> list[tuple[int, str]]:
        """Layers that still keep what goes to the host, and have not been asked to let go of it: some of it may not fit there."""
        found = [(lane, layer) for lane, micro in enumerate(step.lanes) for layer in micro.runner.values.leaving()]
        copies = [step.moved_by.get(in_lane(f"act.{layer}", lane, len(step.lanes))) for lane, layer in found]
        return [where for where, op in zip(found, copies, strict=True) if op in step.tickets and where not in self.recomputed]

    def _note(self, step: Step, shortage: Shortage) -> None:
        self.recomputed = self.recomputed | shortage.dropped  # a new one: reports may be reading it
        self.since = self.since or step.number
        if not step.shortages:
            step.machine.short_of_memory.append(step)
        step.shortages.append(shortage)

    def _refusal(self, step: Step, op: Op, said: str) -> str:
        runner = step.lanes[op.lane].runner
        layer = f"{runner.labels[op.layer]}, " if runner.trace.graph.stage(op.layer).kind is StageKind.LAYER else ""
        so_far = "".join(f"{note}; " for note in self.notes(len(step.lanes)))
        return (f"{layer}step {step.number}: no memory for {op.name}: {said}. {so_far}no layer keeps anything that could be "
                f"computed again instead. {self.remedy(len(step.lanes))}")

    def remedy(self, num_slices: int) -> str:
        """What the user can do. A layer's own need shrinks with the rows that it runs on at a time."""
        more = [n for n in (2, 4, 8, 16, 32, 64) if num_slices < n <= self.expected.rows]
        slices = f"run the batch through each layer in pieces (policy: slices={more[0]}), " if more else ""
        budget = ("larger hbm_budget" if self.expected.named else
                  "smaller hbm_budget, so that slots and state leave more of the device's memory free")
        return f"Use a smaller batch, {slices}or compile with a {budget}"

    def notes(self, num_lanes: int) -> tuple[str, ...]:
        """For reports: what is not as planned any more."""
        if not self.recomputed:
            return ()
        return (f"since step {self.since}, for want of memory: {named(self.recomputed, num_lanes)} recompute",)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation for the device has been refused, by torch or by a library that it calls."""
    return isinstance(error, torch.OutOfMemoryError) or any(said in str(error) for said in SAID_BY_OTHERS)


def first_sentences(error: BaseException) -> str:
    """What was asked for; the rest of torch's message is numbers that we have, and advice on its settings."""
    return str(error).partition(". GPU ")[0].partition(". If reserved")[0].partition("\n")[0].strip().rstrip(".")


def named(layers: Mapping[tuple[int, str], Activation], num_lanes: int) -> str:
    """``L00-L03 (planned: retain), L00 of micro-batch 2 (planned: offload)``."""
    out = []
    for lane in range(num_lanes):
        of = f" of micro-batch {lane + 1}" if num_lanes > 1 else ""
        rows = sorted((layer, act) for (where, layer), act in layers.items() if where == lane)
        out += [f"{name}{of} (planned: {act})" for name, act in runs(rows)]
    return ", ".join(out)


def warn(step: Step, rank: str, stacklevel: int) -> None:
    """One warning of all that did not fit in a step; in the user's thread, where warnings can be filtered."""
    ops = list(dict.fromkeys(shortage.op for shortage in step.shortages))
    where = ", ".join(ops[:3]) + f" and {len(ops) - 3} more" * (len(ops) > 3)
    dropped: Layers = {}
    for shortage in step.shortages:
        dropped |= shortage.dropped
    freed, lanes = sum(s.freed_bytes for s in step.shortages), len(step.lanes)
    warnings.warn(
        f"slidedp: {rank}step {step.number} ran out of memory in {where}: {step.shortages[0].said}. {named(dropped, lanes)} "
        f"recompute from here on, which freed {format_bytes(freed)}; nothing of the step is lost, and no bit of it changes. "
        f"{step.fallback.remedy(lanes)}", RuntimeWarning, stacklevel=stacklevel)
