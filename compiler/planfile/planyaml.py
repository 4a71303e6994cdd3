"""Decisions and the layer table ⇄ plain YAML content. Reading is strict: what is wrong is named, gaps and overlaps too.

Consecutive layers that share everything are one line: ``L00-L35``. In a run, ``self`` stands for the member's own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

import yaml

from slidedp.compiler.decisions import Boundary, Decisions, GroupDecision, Residence, Rows, StateHome, Update
from slidedp.compiler.layergraph import ALIGN, Group, LayerGraph, Lookup, LossHead, Stage, StageKind
from slidedp.compiler.policy import GROUP_FIELDS, PLAN_KEYS, group_fields, plan_fields
from slidedp.compiler.runlength import expand, runs
from slidedp.compiler.strict import as_int, as_list, as_mapping, as_str, check_keys

STAGE_KEYS = ("name", "kind", "groups", "kind_key", "flops", "boundary_bytes", "activation_bytes", "head")
GROUP_KEYS = ("name", "numel", "num_trainable", "uses")
OMITTED = {"boundary": Boundary.HBM, "weights": Residence.STREAM, "state": StateHome.HOST,
           "update": Update.DEFERRED, "rows": Rows.WHOLE}
OMITTED_OF_PLAN = {"update": Update.IN_BACKWARD, "slices": 1}
"""Fields of groups, and of the plan, that are written only where they say otherwise."""


def is_plan(content: object) -> bool:
    """True for the YAML content of a plan file, false for that of a policy."""
    return isinstance(content, Mapping) and "format" in content and "decisions" in content


def to_text(content: object) -> str:
    """YAML with short mappings on one line each."""
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=160, allow_unicode=True)


def write_decisions(decisions: Decisions) -> dict[str, Any]:
    """``plan``: the counts; ``decisions``: name or range of layers -> fields."""
    rows = [(name, {key: v if isinstance(v, int) else str(v) for key, v in asdict(d).items() if OMITTED.get(key) != v})
            for name, d in decisions.groups.items()]
    plan = {key: v if isinstance(v, int) else str(v) for key, v in plan_values(decisions).items()}
    return {"plan": plan, "decisions": dict(runs(rows))}


def plan_values(decisions: Decisions) -> dict[str, Any]:
    """The plan-level decisions that are written: all but those left at what goes without saying."""
    return {key: v for key in PLAN_KEYS if OMITTED_OF_PLAN.get(key) != (v := getattr(decisions, key))}


def read_decisions(top: Mapping[str, Any], where: str, layers: LayerGraph) -> Decisions:
    """The inverse of :func:`write_decisions`: exactly the groups of `layers` must be decided, each once."""
    at = f"{where}: decisions"
    groups: dict[str, GroupDecision] = {}
    for run, row in as_mapping(top["decisions"], at).items():
        values = as_mapping(row, f"{at}: {run}")
        check_keys(values, GROUP_FIELDS, f"{at}: {run}", required=[key for key in GROUP_FIELDS if key not in OMITTED])
        decision = GroupDecision(**group_fields(values, f"{at}: {run}"))
        for name in expand(run, at):
            if name in groups:
                raise ValueError(f"{at}: {name} is decided twice: ranges overlap at {run}")
            if name not in layers.group_by_name:
                raise ValueError(f"{at}: {run}: the model has no group {name}")
            groups[name] = decision
    missing = [(g.name, None) for g in layers.groups if g.name not in groups]
    if missing:
        raise ValueError(f"{at}: {runs(missing)[0][0]} is not decided: ranges leave a gap")
    plan = as_mapping(top["plan"], f"{where}: plan")
    check_keys(plan, PLAN_KEYS, f"{where}: plan", required=[key for key in PLAN_KEYS if key not in OMITTED_OF_PLAN])
    return Decisions({g.name: groups[g.name] for g in layers.groups}, **plan_fields(plan, f"{where}: plan"))


def write_layers(layers: LayerGraph) -> dict[str, Any]:
    """The compact layer table. `lanes`: the stages of each micro-batch, where they are not those of the step."""
    groups = [{"name": g.name, "numel": g.numel, "num_trainable": g.num_trainable, "uses": list(g.uses)} for g in layers.groups]
    table: dict[str, Any] = {"stages": _write_stages(layers.stages), "groups": _compact(groups)}
    if layers.num_lanes > 1 or layers.slices > 1:
        each = [{"count": len(list(same)), "stages": _write_stages(lane)} for lane, same in groupby(layers.lanes)]
        table["lanes"] = {"slices": layers.slices, "each": each}
    return table


def _write_stages(stages: tuple[Stage, ...]) -> list[dict[str, Any]]:
    rows = [{"name": s.name, "kind": str(s.kind), "groups": list(s.groups), "kind_key": s.kind_key, "flops": s.flops,
               "boundary_bytes": s.boundary_bytes, "activation_bytes": s.activation_bytes, "head": _write_head(s.head),
               **({"workspace_bytes": s.workspace_bytes} if s.workspace_bytes else {}),
               **({"lookups": [asdict(x) | {"keys": list(x.keys)} for x in s.lookups]} if s.lookups else {})}
              for s in stages]
    return _compact(rows)


def read_layers(table: Mapping[str, Any], world_size: int, where: str) -> tuple[tuple[Stage, ...], tuple[Group, ...]]:
    """The inverse of :func:`write_layers`."""
    stages = _read_stages(table["stages"], f"{where}: stages")
    rows = _expanded(table["groups"], GROUP_KEYS, f"{where}: groups")
    groups = tuple(_group(row, world_size, f"{where}: groups") for row in rows)
    stage_names, group_names = {s.name for s in stages}, {g.name for g in groups}
    for stage in stages:
        for name in stage.groups:
            if name not in group_names:
                raise ValueError(f"{where}: stages: {stage.name}: there is no group {name!r}")
    for group in groups:
        for name in group.uses:
            if name not in stage_names:
                raise ValueError(f"{where}: groups: {group.name}: there is no stage {name!r}")
    kinds = [s.kind for s in stages]
    if len(kinds) < 2 or kinds != [StageKind.PROLOGUE, *[StageKind.LAYER] * (len(kinds) - 2), StageKind.EPILOGUE]:
        raise ValueError(f"{where}: stages: expected a prologue, layers and an epilogue, in this order")
    return stages, groups


def read_lanes(table: Mapping[str, Any], stages: tuple[Stage, ...], where: str) -> tuple[tuple[tuple[Stage, ...], ...], int]:
    """What :func:`write_layers` has written of micro-batches: each one's stages, and the slices that they were made with."""
    if "lanes" not in table:
        return (), 1
    at = f"{where}: lanes"
    top = as_mapping(table["lanes"], at)
    check_keys(top, ("slices", "each"), at)
    lanes: list[tuple[Stage, ...]] = []
    for entry in as_list(top["each"], f"{at}: each"):
        row = as_mapping(entry, f"{at}: each")
        check_keys(row, ("count", "stages"), f"{at}: each")
        lane = _read_stages(row["stages"], f"{at}: each: stages")
        if [(s.name, s.kind, s.groups) for s in lane] != [(s.name, s.kind, s.groups) for s in stages]:
            raise ValueError(f"{at}: each: stages: names, kinds and groups must be those of the step's stages")
        lanes += [lane] * as_int(row["count"], f"{at}: each: count", 1)
    if len(lanes) == 1:
        raise ValueError(f"{at}: each: one micro-batch is the step's own: its stages stand under stages")
    return tuple(lanes), as_int(top["slices"], f"{at}: slices", 1)


def _read_stages(rows: object, where: str) -> tuple[Stage, ...]:
    return tuple(_stage(row, where) for row in _expanded(rows, STAGE_KEYS, where, optional=("workspace_bytes", "lookups")))


def _stage(row: dict[str, Any], where: str) -> Stage:
    at = f"{where}: {row['name']}"
    if row["kind"] not in tuple(StageKind):
        raise ValueError(f"{at}: kind: {row['kind']!r} is unknown; allowed: {', '.join(StageKind)}")
    groups = tuple(as_str(g, f"{at}: groups") for g in as_list(row["groups"], f"{at}: groups"))
    keys = ("flops", "boundary_bytes", "activation_bytes", "workspace_bytes")
    numbers = {key: as_int(row.get(key, 0), f"{at}: {key}") for key in keys}
    head = _read_head(row["head"], f"{at}: head")
    lookups = tuple(_lookup(x, f"{at}: lookups") for x in as_list(row.get("lookups", []), f"{at}: lookups"))
    return Stage(row["name"], StageKind(row["kind"]), groups, as_str(row["kind_key"], f"{at}: kind_key"), **numbers, head=head,
                 lookups=lookups)


def _lookup(value: object, where: str) -> Lookup:
    row = as_mapping(value, where)
    check_keys(row, ("group", "keys", "num_rows", "num_ids"), where)
    keys = tuple(as_str(key, f"{where}: keys") for key in as_list(row["keys"], f"{where}: keys"))
    num_rows, num_ids = (as_int(row[key], f"{where}: {key}", 1) for key in ("num_rows", "num_ids"))
    return Lookup(as_str(row["group"], f"{where}: group"), keys, num_rows, num_ids)


def _write_head(head: LossHead | None) -> dict[str, Any]:
    if head is None:
        return {}
    return {"rows": head.rows, "vocab": head.vocab, "peaks": [list(peak) for peak in head.peaks], "whole": head.whole}


def _read_head(value: object, where: str) -> LossHead | None:
    row = as_mapping(value, where)
    if not row:
        return None
    check_keys(row, ("rows", "vocab", "peaks", "whole"), where)
    pairs = [[as_int(x, f"{where}: peaks") for x in as_list(pair, f"{where}: peaks")] for pair in as_list(row["peaks"], where)]
    chunks = [pair[0] for pair in pairs if len(pair) == 2]
    if len(chunks) < len(pairs) or chunks[:1] != [1] or chunks != sorted(set(chunks)):
        raise ValueError(f"{where}: peaks: expected pairs of a number of chunks, ascending from 1, and bytes")
    rows, vocab = (as_int(row[key], f"{where}: {key}") for key in ("rows", "vocab"))
    return LossHead(rows, vocab, tuple((n, size) for n, size in pairs), as_str(row["whole"], f"{where}: whole"))


def _group(row: dict[str, Any], world_size: int, where: str) -> Group:
    at = f"{where}: {row['name']}"
    uses = tuple(as_str(u, f"{at}: uses") for u in as_list(row["uses"], f"{at}: uses"))
    numel, trainable = (as_int(row[key], f"{at}: {key}") for key in ("numel", "num_trainable"))
    if trainable > numel or numel % (ALIGN * world_size) or trainable % (ALIGN * world_size):
        raise ValueError(f"{at}: numel {numel} and num_trainable {trainable} must be multiples of {ALIGN} elements for each "
                         f"of {world_size} ranks, the second no more than the first; for other ranks plan anew with --ranks")
    return Group(row["name"], numel, trainable, uses)


def _compact(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of consecutive layers that differ in their own name only become one."""
    bare = [(row["name"], {key: ["self" if v == row["name"] else v for v in value] if isinstance(value, list) else value
                           for key, value in row.items() if key != "name"}) for row in rows]
    return [{"name": run} | row for run, row in runs(bare)]


def _expanded(rows: object, keys: tuple[str, ...], where: str, optional: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The inverse of :func:`_compact`, in order; names given twice are errors."""
    out: dict[str, dict[str, Any]] = {}
    for i, entry in enumerate(as_list(rows, where)):
        row = as_mapping(entry, f"{where}: entry {i}")
        check_keys(row, (*keys, *optional), f"{where}: entry {i}", required=keys)
        for name in expand(as_str(row["name"], f"{where}: entry {i}: name"), where):
            if name in out:
                raise ValueError(f"{where}: {name} is listed twice")
            out[name] = {key: [name if v == "self" else v for v in value] if isinstance(value, list) else value
                         for key, value in row.items()} | {"name": name}
    return list(out.values())
