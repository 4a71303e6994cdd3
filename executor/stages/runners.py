"""The stage runners of a plan: one a trace, and more where several micro-batches of a step share a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from slidedp.executor.devices.backend import Backend
from slidedp.executor.stages.binding import Binding
from slidedp.executor.stages.gradients import GradientSlots
from slidedp.executor.stages.stages import StageRunner

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import Trace


class Runners:
    """Made when first asked for, and kept. `slots`: what all of them write gradients through."""

    def __init__(self, binding: Binding, backend: Backend) -> None:
        self._binding, self._backend = binding, backend
        self.slots = GradientSlots(binding.groups)
        self._of: dict[int, list[StageRunner]] = {}  # by identity of their trace, which they keep alive

    def of(self, traces: Sequence[Trace]) -> list[StageRunner]:
        """One for each micro-batch of a step."""
        used: Counter[int] = Counter()
        out = []
        for trace in traces:
            known = self._of.setdefault(id(trace), [])
            if used[id(trace)] == len(known):
                known.append(StageRunner(trace, self._binding, self._backend, self.slots))
            out.append(known[used[id(trace)]])
            used[id(trace)] += 1
        return out

    def clear(self) -> None:
        """Results of steps may be kept for long, and keep their runners: these let go of the slots, and of what a step that has
        failed has left.
        """
        for runner in chain(*self._of.values()):
            runner.clear()
        self._of.clear()
        self.slots.clear()
