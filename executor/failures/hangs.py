"""Tells that a rank hangs: alive, so that nothing breaks, but the others wait for it in vain.

Steps are synchronous. If one rank hangs in a step, the others come to a standstill within that step too; so what is watched is
all of them together. Two rules, looked at by every rank's watchdog:

standstill   a step is under way, and for `peer_timeout_s` no op has ended on any rank. The one at fault is, in this order: a rank
             that is not scheduled (stopped, or its interpreter locked up: its watchdog does not beat either); one that is in an
             op that waits for nobody (its own code: a layer, `loss_fn`); the one that has got least far.
absence      some ranks have called `run`, and another one has not for `peer_absence_s`. It is in its caller's code, and may well
             be doing something sensible there (evaluating, saving on rank 0), and so it has longer, and `peer_timeout_s` only
             brings a warning that says where it is. A stopped process has no such excuse, nor has one that has said that it
             waits for its next batch (`Plan.loading`), when others have theirs: both hang after `peer_timeout_s`. So does one
             that is stopped while a checkpoint is written or read, by any rank.

A graph's first step (kernels are built and loaded) and steps under a save (updates may wait for the disk) have `peer_absence_s`
for a standstill too. Time is counted only while this process itself is scheduled, so that a job that is suspended as a whole
(Ctrl-Z, a paused machine) finds nobody at fault when it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slidedp.compiler.ops import Stream
from slidedp.executor.streams.pulse import Pulse, Reading, lowest

LATER_LOOKS = 2
"""The rank at fault says so itself, for it knows best where it is; the others so many looks later, if it cannot."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`rank` keeps the others waiting. `fatal`: it hangs; else it is to be warned of."""

    rank: int
    text: str
    fatal: bool = True


class Hangs:
    """What one rank's watchdog sees. `drained`: each rank's last turn without anything left to do. `pids`: by rank, <= 0: none.

    `where`: of this rank, what a stream's thread is at; "" if that is not known.
    """

    def __init__(self, pulse: Pulse, drained: Callable[[], list[int]], pids: Callable[[], list[int]],
                 where: Callable[[Stream], str], *, peer_timeout_s: float, peer_absence_s: float) -> None:
        self._pulse, self._drained, self._pids, self._where = pulse, drained, pids, where
        self.peer_timeout_s, self.peer_absence_s = peer_timeout_s, max(peer_absence_s, peer_timeout_s)
        n = pulse.world_size
        self._seen: list[tuple[int, ...]] = [()] * n
        self._beats = [0] * n
        self._still_s, self._silent_s, self._absent_s = [0.0] * n, [0.0] * n, [0.0] * n
        self._loading_s, self._in_loop = [0.0] * n, [(0, 0)] * n
        self._warned: set[tuple[int, int]] = set()

    def look(self, elapsed_s: float, interval_s: float) -> Finding | None:
        """To be called every `interval_s`, `elapsed_s` after the last time."""
        passed_s = min(elapsed_s, 2 * interval_s)
        pids = self._pids()
        ranks = [r for r, pid in enumerate(pids) if pid > 0]
        readings = [self._pulse.read(r) for r in range(self._pulse.world_size)]
        newest = max(reading.arrived for reading in readings)
        foremost = max((reading.place_in_loop for reading in readings if not reading.loading), default=(0, 0))
        for r in ranks:
            reading = readings[r]
            moved, beats = reading.progress != self._seen[r], reading.beat != self._beats[r]
            self._seen[r], self._beats[r] = reading.progress, reading.beat
            self._still_s[r] = 0.0 if moved else self._still_s[r] + passed_s
            self._silent_s[r] = 0.0 if beats or r == self._pulse.rank else self._silent_s[r] + passed_s
            self._absent_s[r] = 0.0 if reading.arrived == newest else self._absent_s[r] + passed_s
            awaited = reading.loading and reading.place_in_loop == self._in_loop[r] < foremost
            self._loading_s[r], self._in_loop[r] = self._loading_s[r] + passed_s if awaited else 0.0, reading.place_in_loop
        later_s = LATER_LOOKS * interval_s
        return (self._standstill(ranks, readings, later_s) or self._stopped(ranks, readings, pids)
                or self._absence(ranks, readings, later_s))

    def _standstill(self, ranks: list[int], readings: list[Reading], later_s: float) -> Finding | None:
        drained = self._drained()
        under_way = [r for r in ranks if readings[r].turn > drained[r]]
        if not under_way:
            return None
        slow = any(readings[r].saving or readings[r].fresh > drained[r] for r in ranks)
        limit_s = self.peer_absence_s if slow else self.peer_timeout_s
        still_s = min(self._still_s[r] for r in ranks)
        if still_s < limit_s:
            return None
        at_fault = self._at_fault(ranks, under_way, readings)
        if at_fault != self._pulse.rank and still_s < limit_s + later_s:
            return None
        return Finding(at_fault, self._in_step(at_fault, readings[at_fault], still_s, max(readings[r].step for r in under_way)))

    def _at_fault(self, ranks: list[int], under_way: list[int], readings: list[Reading]) -> int:
        silent = [r for r in ranks if self._is_silent(r)]
        working = [r for r in under_way if readings[r].working_on is not None]
        return lowest(silent or working or ranks, readings)

    def _is_silent(self, rank: int) -> bool:
        """Its watchdog has not beaten for much of the time; it may have done so after its last op."""
        return self._silent_s[rank] >= self.peer_timeout_s / 2

    def _in_step(self, rank: int, reading: Reading, still_s: float, step: int) -> str:
        stream_op = reading.working_on or next(iter(reading.ops.items()), None)
        op = f"op {stream_op[1]}" if stream_op else "no op of its own"
        if self._is_silent(rank):
            return (f"rank {rank} hangs in step {step}: its process has not run for {self._silent_s[rank]:.0f} s "
                    f"(stopped, or locked up); it was last in {op}")
        place = self._where(stream_op[0]) if stream_op and rank == self._pulse.rank else ""
        return (f"rank {rank} hangs in step {step}: in {op}{f', at {place}' if place else ''}, with nothing done on any rank for "
                f"{still_s:.0f} s; raise peer_timeout_s if an op may take that long")

    def _stopped(self, ranks: list[int], readings: list[Reading], pids: list[int]) -> Finding | None:
        """A stopped process that others wait for, between steps or at files."""
        at_files = any(readings[r].saving for r in ranks)
        for r in ranks:
            reading = readings[r]
            awaited_s = max(self._absent_s[r], self._silent_s[r] if at_files else 0.0)
            if awaited_s >= self.peer_timeout_s and self._is_silent(r) and is_stopped(pids[r]):
                doing = "a checkpoint was being written or read" if at_files else "it was between steps"
                at = f", at {reading.place}" if reading.place else ""
                return Finding(r, f"rank {r} hangs: its process (pid {pids[r]}) has been stopped for {self._silent_s[r]:.0f} s; "
                                  f"{doing}, after step {reading.step}{at}")
        return None

    def _absence(self, ranks: list[int], readings: list[Reading], later_s: float) -> Finding | None:
        for r in ranks:
            reading, absent_s, own = readings[r], self._absent_s[r], r == self._pulse.rank
            at = f", at {reading.place}" if reading.place else ""
            if self._loading_s[r] >= self.peer_timeout_s + (0 if own else later_s):
                return Finding(r, f"rank {r} hangs in its data loader{at}: others have had their batch after step {reading.step} "
                                  f"for {self._loading_s[r]:.0f} s; raise peer_timeout_s if one may take that long")
            if absent_s < self.peer_timeout_s:
                continue
            since = (f"rank {r} has not called run, evaluate or save for {absent_s:.0f} s, since step {reading.step}, while "
                     "others wait for it")
            if absent_s >= self.peer_absence_s + (0 if own else later_s):
                return Finding(r, f"{since}: it hangs in its caller's code{at} (a data loader?); raise peer_absence_s if that "
                                  "may take so long")
            if reading.loading or self._pulse.rank != self._first_waiting(ranks, readings):
                continue
            if (r, reading.step) not in self._warned:
                self._warned.add((r, reading.step))
                return Finding(r, f"{since}; it is in its caller's code{at}. Waiting up to {self.peer_absence_s:.0f} s for it "
                                  "(peer_absence_s)", fatal=False)
        return None

    @staticmethod
    def _first_waiting(ranks: list[int], readings: list[Reading]) -> int:
        newest = max(readings[r].arrived for r in ranks)
        return next(r for r in ranks if readings[r].arrived == newest)


def is_stopped(pid: int) -> bool:
    """True for a process that SIGSTOP, SIGTSTP or a debugger holds."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] in "Tt" and pid != os.getpid()
