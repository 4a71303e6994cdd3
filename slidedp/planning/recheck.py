"""Checks that a plan which an earlier run has timed still takes as long as it did then; if not, that verdict may not hold.

A verdict from the cache may have been measured beside other work, or while the machine was slower or faster than now.
"""

from __future__ import annotations

import logging
import statistics
from pathlib import Path

from slidedp.compiler.planfile.verdict import Verdict
from slidedp.executor.machine.step import Step
from slidedp.planning.specialisation import Specialisation

NUM_STEPS = 20
"""Steps whose median is compared."""

FAR = 0.15
"""Share of a step; less is within what a machine differs by from day to day."""

log = logging.getLogger("slidedp")


class Recheck:
    """`verdict`: from the file `kept`, of the shapes of `spec`. Says so, once, if steps take another time by now."""

    def __init__(self, verdict: Verdict, spec: Specialisation, kept: Path) -> None:
        self.verdict, self.spec, self.kept = verdict, spec, kept
        self._steps: list[Step] = []
        self._times_us: list[float] = []
        self.told = False

    def ran(self, step: Step, spec: Specialisation) -> None:
        """A step has begun. Waits for none: those that have ended count."""
        if self.told or spec is not self.spec:
            return
        self._steps.append(step)
        while self._steps and self._steps[0].compute_ended.is_set():
            self._times_us.append(self._steps.pop(0).wall_s * 1e6)
        if len(self._times_us) < NUM_STEPS:
            return
        now_us, then_us = statistics.median(self._times_us), self.verdict.kept_us
        self._times_us.clear()
        if abs(now_us / then_us - 1) > FAR:
            self.told = True
            log.warning(f"steps take {now_us / 1e6:.3g} s, and took {then_us / 1e6:.3g} s when this plan was timed beside "
                        f"another one, which may be the faster one now; to have both timed again, delete {self.kept}")
