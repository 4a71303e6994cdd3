"""What a plan says of itself: its decisions, predictions and reports, as of the specialisation that ran last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.drawing.gantt import gantt
from slidedp.compiler.drawing.trace_events import write_trace
from slidedp.compiler.footprint.memory import MemoryReport
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.planfile.verdict import Verdict
from slidedp.compiler.simulation.simulate import Timeline
from slidedp.compiler.text import print_graph
from slidedp.reports.explanation import Report, explain
from slidedp.reports.report import describe, memory_of, notes_of, planfile_of

if TYPE_CHECKING:
    from slidedp.planning.planner import Planner
    from slidedp.planning.specialisation import Specialisation
    from slidedp.settings import Settings


class Artefact:
    """The part of :class:`slidedp.Plan` that runs nothing. RuntimeError, saying so, before there is a specialisation."""

    _settings: Settings
    _planner: Planner
    _current: Specialisation | None

    @property
    def decisions(self) -> Decisions:
        """Routes, sources and chunks of every group, and the numbers of slots."""
        return self._spec.decisions

    @property
    def ops(self) -> str:
        """The ops of the current specialisation, as text (see `slidedp.compiler.text`)."""
        return print_graph(self._spec.graph)

    @property
    def _spec(self) -> Specialisation:
        if self._current is None:
            raise RuntimeError("this plan has not seen a batch yet: pass example= to slidedp.compile, or call run first")
        return self._current

    def dump(self, path: str | Path) -> None:
        """Write decisions, predictions and hashes as YAML: small, hand-editable, readable by `slidedp.load_plan`."""
        self.to_planfile().dump(path)

    def to_planfile(self) -> PlanFile:
        """What :meth:`dump` writes."""
        return replace(planfile_of(self._spec), validation=self.validation)

    @property
    def validation(self) -> Verdict | None:
        """What the first steps have said of the plan, and of the default's (`validate=` of `compile`); None if they have not."""
        return self._planner.verdict

    def simulate(self) -> Timeline:
        """Predicted steady-state step under the cost model: step time, spans and utilisation by stream, bottleneck."""
        return self._spec.timeline

    def explain(self, decision: str = "") -> Report:
        """What binds the predicted step, and what other values of `decision` would change (see :func:`slidedp.explain`)."""
        report = explain(self.to_planfile(), decision, hw=self._settings.hw, cost_model=self._settings.cost_model)
        return replace(report, notes=(*report.notes, *notes_of(self._spec)))

    def gantt(self, timeline: Timeline | None = None, width: int = 80) -> str:
        """`timeline`, predicted or measured (:meth:`measure`), as text of `width` columns; default: the predicted one."""
        return gantt(self._spec.graph, timeline or self._spec.timeline, width)

    def write_trace(self, path: str | Path, timeline: Timeline | None = None) -> None:
        """Write `timeline`, predicted or measured (:meth:`measure`), for ui.perfetto.dev; default: the predicted one."""
        spec = self._spec
        write_trace(path, spec.graph, timeline or spec.timeline, spec.layers, spec.decisions, title=spec.layers.model)

    def memory(self) -> MemoryReport:
        """Bytes by use, on the device and on the host."""
        return memory_of(self._spec)

    def __str__(self) -> str:
        if self._current is None:
            return "SlideDP plan, not yet specialised"
        return describe(self.to_planfile(), notes_of(self._current))
