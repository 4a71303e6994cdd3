"""The CPU updates of one step: how each goes to the native queue, and what its end means for the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from slidedp.compiler.ops import Op, RowSet
from slidedp.executor.adam import BoundUpdate
from slidedp.executor.native.build import SKIPPED, StepConstants, What
from slidedp.executor.step import Step
from slidedp.executor.tickets import Ticket

if TYPE_CHECKING:
    from slidedp.executor.machine import Machine


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
