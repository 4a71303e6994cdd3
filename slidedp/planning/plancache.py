"""Solved decisions, cached under all that they depend on: one small YAML file a problem, read strictly and never trusted.

The key is a hash of the solver's whole input. Model, machine, shape, costs, budgets and pins enter it through what they do to
durations and memory, and measured stages as they are, for the simulation alone knows how long the host takes to issue them: two
problems with equal keys have equal plans.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from slidedp.compiler.costmodel.measured import MeasuredCosts
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.eventgraph.eventgraph import EventGraph
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.planfile.planfile import decisions_hash, read_solver_record
from slidedp.compiler.planfile.planyaml import read_decisions, to_text, write_decisions
from slidedp.compiler.solver.proven import Proven
from slidedp.compiler.strict import as_mapping, check_keys, content_hash, load_yaml
from slidedp.planning.autopolicy import AutoPlan
from slidedp.version import __version__

SOLVER_VERSION = 6
"""Raised whenever the same problem may get another plan."""


def fingerprint(graph: EventGraph, rows: Sequence[MemoryRow], measured: MeasuredCosts | None, hint: Decisions | None,
                proven: Proven | None = None) -> str:  # fmt: skip
    """Hash of everything that a solved plan depends on."""
    families = [[f.group, f.name, str([dict(o) for o in f.options])] for f in graph.choices.families]
    return content_hash([
        __version__, SOLVER_VERSION, families, str(graph.events), str(graph.edges), str(graph.works), str(rows),
        measured.content_hash() if measured else "", decisions_hash(graph.choices.defaults), decisions_hash(hint) if hint else "",
        proven.seal if proven else "",
    ])  # fmt: skip


def load_plan_for(cache_dir: Path, key: str, layers: LayerGraph) -> AutoPlan | None:
    """The plan stored under `key`; None if there is none, or if what is there is damaged or of another version."""
    path = cache_dir / f"solved-{key}.yaml"
    if not path.is_file():
        return None
    with suppress(ValueError):
        content = as_mapping(load_yaml(path), str(path))
        check_keys(content, ("slidedp", "plan", "decisions", "solver"), str(path))
        decisions = read_decisions(content, str(path), layers)
        return AutoPlan(decisions, read_solver_record(content["solver"], str(path)), cached=True)
    return None


def store_plan(cache_dir: Path, key: str, plan: AutoPlan) -> None:
    """Write `plan` under `key`, whole or not at all. A directory that cannot be written costs only the next solve."""
    if plan.record is None:
        return
    content = {"slidedp": __version__, **write_decisions(plan.decisions), "solver": asdict(plan.record)}
    path = cache_dir / f"solved-{key}.yaml"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        draft.write_text(to_text(content), encoding="utf-8")
        draft.replace(path)
