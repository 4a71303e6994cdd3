"""What differs between two plans: decisions in run-length form, what they were made for, and what it does to the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.policy import GROUP_FIELDS, PLAN_KEYS
from slidedp.compiler.runlength import runs
from slidedp.compiler.units import format_bytes


class HasPlanFile(Protocol):
    """A plan that can be written: ``slidedp.Plan``."""

    def to_planfile(self) -> PlanFile: ...


PlanLike = PlanFile | HasPlanFile | str | Path


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `section`: ``decisions``, ``plan``, ``model``, …; `where`: the layer or key; None: not there."""

    section: str
    where: str
    before: Any
    after: Any


@dataclass(frozen=True)
class PlanDiff:
    """All differences between two plans, true when there is one; `str()` is a table, before -> after."""

    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "the plans are equal"
        lines = []
        for section, group in groupby(self.changes, key=lambda c: c.section):
            rows = [(c.where, _show(c.where, c.before), _show(c.where, c.after) + _percent(c)) for c in group]
            name, before = (max(len(row[i]) for row in rows) for i in (0, 1))
            lines.append(section)
            lines += [f"  {w:<{name}}  {b:>{before}} -> {a}" for w, b, a in rows]
        return "\n".join(lines)


def diff(a: PlanLike, b: PlanLike) -> PlanDiff:
    """What changed from plan `a` to plan `b`: each a plan, a loaded plan or the path of one. ValueError if a file is no plan."""
    before, after = planfile(a), planfile(b)
    return PlanDiff((*_decisions(before, after), *_plan(before, after), *_model(before, after), *_made_for(before, after),
                     *_predictions(before, after)))


def planfile(plan: PlanLike) -> PlanFile:
    if isinstance(plan, PlanFile):
        return plan
    return PlanFile.load(plan) if isinstance(plan, str | Path) else plan.to_planfile()


def _decisions(a: PlanFile, b: PlanFile) -> Iterator[Change]:
    """Groups of both plans, field by field, neighbouring layers with the same change as one."""
    names = [name for name in a.decisions.groups if name in b.decisions.groups]
    for field in GROUP_FIELDS:
        pairs = [(n, (getattr(a.decisions.of(n), field), getattr(b.decisions.of(n), field))) for n in names]
        for run, (before, after) in runs(pairs):
            if before != after:
                yield Change("decisions", f"{run}.{field}", before, after)


def _plan(a: PlanFile, b: PlanFile) -> Iterator[Change]:
    for key in PLAN_KEYS:
        yield from _changed("plan", key, getattr(a.decisions, key), getattr(b.decisions, key))


def _model(a: PlanFile, b: PlanFile) -> Iterator[Change]:
    yield from _changed("model", "name", a.layers.model, b.layers.model)
    if a.model_hash != b.model_hash:
        yield Change("model", "hash", a.model_hash, b.model_hash)
        names = list(dict.fromkeys([*a.layers.group_by_name, *b.layers.group_by_name]))
        for run, (before, after) in runs([(name, (_size(a, name), _size(b, name))) for name in names]):
            yield from _changed("model", f"{run} elements", before, after)
    elif a.layers.stages != b.layers.stages:
        yield Change("model", "layer table", _totals(a), _totals(b))
    yield from _changed("model", "params_hash", a.params_hash, b.params_hash)


def _made_for(a: PlanFile, b: PlanFile) -> Iterator[Change]:
    for key in ("world_size", "compute_dtype", "grad_dtype"):
        yield from _changed("made for", key, getattr(a.layers, key), getattr(b.layers, key))
    for key in ("hardware", "cost_model", "slidedp"):
        yield from _changed("made for", key, getattr(a, key), getattr(b, key))
    for key in ("hbm_bytes", "host_bytes"):
        yield from _changed("budgets", key, getattr(a.budgets, key), getattr(b.budgets, key))
    for key in dict.fromkeys([*a.specialisation, *b.specialisation]):
        yield from _changed("batch", key, a.specialisation.get(key), b.specialisation.get(key))


def _predictions(a: PlanFile, b: PlanFile) -> Iterator[Change]:
    after = asdict(b.predictions)
    for key, before in asdict(a.predictions).items():
        yield from _changed("predictions", key, before, after[key])
    if a.decisions == b.decisions and a.layers == b.layers:  # else they differ anyway
        yield from _changed("ops", "hash", a.ops_hash, b.ops_hash)
        yield from _changed("ops", "decisions_hash", a.decisions_hash, b.decisions_hash)


def _changed(section: str, where: str, before: Any, after: Any) -> Iterator[Change]:
    if before != after:
        yield Change(section, where, before, after)


def _totals(plan: PlanFile) -> str:
    stages = plan.layers.stages
    return (f"{sum(s.flops for s in stages) / 1e12:.2f} Tflop forward, {format_bytes(sum(s.boundary_bytes for s in stages))} of "
            "boundaries")


def _size(plan: PlanFile, name: str) -> int | None:
    group = plan.layers.group_by_name.get(name)
    return group.numel if group else None


def _show(where: str, value: Any) -> str:
    if value is None:
        return "(none)"
    if where == "step_us":
        return f"{value / 1e3:.2f} ms"
    if where.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _percent(change: Change) -> str:
    numbers = (change.before, change.after)
    measured = change.section in ("predictions", "budgets") and all(isinstance(x, int | float) for x in numbers)
    if not measured or not change.before:
        return ""
    return f"  ({change.after / change.before - 1:+.1%})"
