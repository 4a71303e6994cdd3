"""Costs of a model's stages as they were measured on the machine: between a user's cost model and the analytic one.

A stage is measured once for each `kind_key` (class and shapes), phase by phase; all stages of that kind cost the same. What
was measured is YAML: in the cache directory, and in plan files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from slidedp.compiler.decisions import Activation
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpKind, in_lane
from slidedp.compiler.strict import as_float, as_int, as_list, as_mapping, as_str, check_keys, content_hash

MEASURED = "measured"
"""The source of a cost that came from here."""

LONGEST_US = 10**13
"""Of an op, four months: steps are added up from a few thousand of them in 64 bits."""

PHASES = (OpKind.PROLOGUE, OpKind.FORWARD, OpKind.EPILOGUE, OpKind.RECOMPUTE, OpKind.BACKWARD)
ROW_KEYS = ("kind", "phase", "act", "duration_us", "peak_bytes", "kept_bytes", "issue_us")


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """One phase of the stages of one kind under an activation choice.

    `peak_bytes`: device memory in use at most during the phase, beyond what was at its start; `kept_bytes`: what is still there
    at its end, negative for a phase that frees more than it makes. Both None where nothing counts them (the CPU).
    `duration_us`: on a device that is busy ahead and never waits to be told what to do; `issue_us`: how long a host thread takes
    to issue the phase, None where the host is the device.
    """

    kind_key: str
    phase: OpKind
    act: Activation
    duration_us: int
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    issue_us: int | None = None

    def to_content(self) -> dict[str, Any]:
        key = (self.kind_key, str(self.phase), str(self.act))
        values = (*key, self.duration_us, self.peak_bytes, self.kept_bytes, self.issue_us)
        return dict(zip(ROW_KEYS, values, strict=True))


@dataclass(frozen=True)
class Measurement:
    """The phases that were measured, and how long that took. Without phases it is false: nothing is known."""

    phases: tuple[PhaseCost, ...] = ()
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.phases)

    def also(self, other: Measurement) -> Measurement:
        """What either knows; `seconds` stay."""
        known = {(p.kind_key, p.phase, p.act) for p in self.phases}
        return Measurement((*self.phases, *(p for p in other.phases if (p.kind_key, p.phase, p.act) not in known)), self.seconds)

    def to_content(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "phases": [p.to_content() for p in self.phases]}


@dataclass(frozen=True)
class MeasuredCosts:
    """Durations of the ops that are phases of measured stages; None for any other op, and for stages of unmeasured kinds."""

    measurement: Measurement
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Stage (``L03.s1``: of a micro-batch) -> kind_key."""

    @staticmethod
    def of(measurement: Measurement, layers: LayerGraph) -> MeasuredCosts:
        lanes = enumerate(layers.each_lane)
        return MeasuredCosts(measurement, {in_lane(s.name, k, layers.num_lanes): s.kind_key for k, lane in lanes for s in lane})

    def phase(self, stage: str, phase: OpKind, act: Activation = Activation.RECOMPUTE) -> PhaseCost | None:
        """What was measured of `stage`, if anything was."""
        return self._by_key.get((self.kinds.get(stage, ""), phase, act))

    @cached_property
    def _by_key(self) -> dict[tuple[str, OpKind, Activation], PhaseCost]:
        return {(p.kind_key, p.phase, p.act): p for p in self.measurement.phases}

    def duration_us(self, op: Op) -> int | None:
        cost = self.phase(op.stage, op.kind) if op.kind in PHASES else None
        return None if cost is None else cost.duration_us

    def issue_us(self, op: Op) -> int:
        """0 if it is not known."""
        cost = self.phase(op.stage, op.kind) if op.kind in PHASES else None
        return 0 if cost is None else cost.issue_us or 0

    def content_hash(self) -> str:
        """A hash of the costs, not of the time that measuring them took."""
        return content_hash([p.to_content() for p in self.measurement.phases])


NOT_ISSUED = -1
"""Among numbers, an `issue_us` of None."""


def times_us(measurement: Measurement) -> list[int]:
    """Of each phase the duration and what issuing it takes."""
    return [us for p in measurement.phases for us in (p.duration_us, NOT_ISSUED if p.issue_us is None else p.issue_us)]


def slowest(ranks: list[list[int]], mine: Measurement) -> Measurement:
    """`mine` with the longest times of any rank. `ranks`: the `times_us` of each, in the order of `mine`."""
    longest = [max(values) for values in zip(*ranks, strict=True)]
    pairs = zip(longest[::2], longest[1::2], strict=True)
    phases = (replace(p, duration_us=duration, issue_us=None if issue == NOT_ISSUED else issue)
              for p, (duration, issue) in zip(mine.phases, pairs, strict=True))  # fmt: skip
    return Measurement(tuple(phases), mine.seconds)


def read_measurement(content: object, where: str) -> Measurement:
    """The inverse of :meth:`Measurement.to_content`. ValueError, naming the place, for anything else."""
    top = as_mapping(content, where)
    check_keys(top, ("seconds", "phases"), where)
    rows = [_phase(row, f"{where}: phases: entry {i}") for i, row in enumerate(as_list(top["phases"], f"{where}: phases"))]
    return Measurement(tuple(rows), as_float(top["seconds"], f"{where}: seconds"))


def _phase(content: object, where: str) -> PhaseCost:
    row = as_mapping(content, where)
    check_keys(row, ROW_KEYS, where, required=ROW_KEYS[:-1])
    if row["phase"] not in PHASES:
        raise ValueError(f"{where}: phase: {row['phase']!r} is unknown; allowed: {', '.join(PHASES)}")
    if row["act"] not in tuple(Activation):
        raise ValueError(f"{where}: act: {row['act']!r} is unknown; allowed: {', '.join(Activation)}")
    duration = as_int(row["duration_us"], f"{where}: duration_us", maximum=LONGEST_US)
    peak = None if row["peak_bytes"] is None else as_int(row["peak_bytes"], f"{where}: peak_bytes")
    kept = None if row["kept_bytes"] is None else as_int(row["kept_bytes"], f"{where}: kept_bytes", minimum=-(2**62))
    issue = None if row.get("issue_us") is None else as_int(row["issue_us"], f"{where}: issue_us", maximum=LONGEST_US)
    key = as_str(row["kind"], f"{where}: kind"), OpKind(row["phase"]), Activation(row["act"])
    return PhaseCost(*key, duration, peak, kept, issue)
