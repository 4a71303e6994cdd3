"""How a step's ops run updates: as Python functions, or through the native queue.

    Updates       Python functions, for state on the host or in HBM; also which parameters have a gradient to be updated by
    StepUpdates   one step's updates on the CPU, through the native queue
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from slidedp.compiler.ops import Op, RowSet
from slidedp.executor.machine.step import Step
from slidedp.executor.native.build import SKIPPED, StepConstants, What
from slidedp.executor.optim.adam import BoundUpdate
from slidedp.executor.streams.tickets import Ticket

if TYPE_CHECKING:
    from slidedp.executor.machine.machine import Machine


class Updates:
    """Runs the updates of one machine, as Python functions."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def update(self, group: str, lo: int, hi: int, step: Step, scale: float, what: What = What.UPDATE, **rows: Any) -> None:
        """AdamW on this rank's part of a returned gradient chunk, times `scale`. `rows`: options of :meth:`CpuAdam.update`."""
        with noting(step, group) if what is not What.SPECULATE else nullcontext():
            present = None if rows else self.present(group, step)
            self._machine.adam.update(group, lo, hi, step.number, present, scale, what=what, **rows)

    def native(self, step: Step) -> StepUpdates | None:
        """Where the step's updates go; None if they must run as Python functions."""
        return StepUpdates(self._machine, step) if step.training and self._machine.streams.updates.takes_updates else None

    def update_resident(self, group: str, lo: int, gradient: Tensor, weights: Tensor, step: Step, scale: float) -> None:
        """The same as :meth:`update` in HBM, issued to the device."""
        resident = self._machine.resident
        assert resident is not None
        with noting(step, group):
            resident.adam.update(group, lo, gradient, weights, step.number, self.present(group, step),
                                 None if self._machine.clipping is None else scale)

    def present(self, group: str, step: Step) -> np.ndarray:
        """Which of the group's trainable parameters have had a gradient on any rank."""
        return self._machine.words.any_present(step.number, *self.param_span(group))

    def param_span(self, group: str) -> tuple[int, int]:
        """Presence flags of the group's trainable parameters, which come first in it."""
        state = self._machine.state
        params = state.groups[group].params
        if not params:
            return 0, 0
        first = state.param_index[params[0].name]
        return first, first + sum(p.trainable for p in params)

    def mark_present(self, step: int, present: Mapping[str, bool]) -> None:
        """Which parameters (by name) have had a gradient on this rank."""
        flags = self._machine.words.present(step)[self._machine.rank]
        for name, value in present.items():
            flags[self._machine.state.param_index[name]] |= value


class StepUpdates:
    """Passes a step's updates to the native queue, which checks for itself what a Python update would ask.

    That is: that the ranks' words have been reached, that the loss is finite, which parameters have a gradient, and what to
    multiply gradients by; also where the state is.
    """

    def __init__(self, machine: Machine, step: Step) -> None:
        self._stream, self._words, self._adam, self._step = machine.streams.updates, machine.words, machine.adam, step
        self._present = self._words.address_of_present(step.number, 0)
        losses = self._words.address_of_losses(step.turn)
        scale, candidate = (cell.ctypes.data if machine.clipping else None for cell in (step.scale_cell, step.candidate_cell))
        self._constants = {
            what: StepConstants(step.number, self._adam.lr(step.number), step.turn + 1, losses,
                                candidate if what is What.SPECULATE else scale)
            for what in What}

    def submit(self, op: Op, bound: BoundUpdate, first_param: int | None, waits: Sequence[Ticket],
               expected: Sequence[tuple[int, int]]) -> Ticket:
        """`first_param`: the group's first, of all with presence flags; None: all have a gradient.

        `expected`: (word, step) that all ranks must reach.
        """
        gates = [(self._words.address_of_word(word), at_least) for word, at_least in expected] if expected else ()
        return self._stream.submit_update(
            bound.handle, self._constants[bound.what], waits, gates=gates,
            present=0 if first_param is None else self._present + first_param,
            finished=partial(self.finished, bound), name=op.name, deadline=op.deadline)

    def finished(self, bound: BoundUpdate, result: int) -> None:
        if result == SKIPPED:
            return  # on every rank alike; `run` raises for the loss, and the weights stay as they are
        if bound.what is not What.SPECULATE:
            with noting(self._step, bound.group):
                self._adam.raise_nonfinite(bound.group, result, self._step.number)
        if bound.rows is not RowSet.UNTOUCHED:
            count_update(self._step, bound.what, bound.hi - bound.lo)


def count_update(step: Step, what: What, numel: int) -> None:
    """A candidate that is taken was counted when it was made."""
    if what is What.SETTLE:
        if step.clip is None or step.clip.scale == 1.0:
            return
        step.count("redone_update", numel)
    step.count("cpu_update", numel)


@contextmanager
def noting(step: Step, group: str) -> Iterator[None]:
    """Notes that the group has been updated, or tells what had been before its gradient turned out not to be finite."""
    with step.says_what_moved():
        yield
    step.updated.add(group)
