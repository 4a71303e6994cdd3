"""Choices the user pins: a mapping (or the ``--fix`` strings of the command line) laid over the decisions of the rule.

    window: 3                      plan: window, grad_slots, staging_slots, reduce_slots, head_chunks, act_slots, slices, and
                                   update: in_backward, deferred, or speculative (deferred, and speculative of every group)
    source: cast                   every group: delivery, source, delivery_chunks, reduction, return_chunks, act, boundary,
    chunks: 4                      weights, state, rows, and chunks, which is both delivery_chunks and return_chunks
                                   (and `update` of layers: deferred or speculative, if the plan's is not in_backward)
    layers:
      "*": {delivery: sharded}     every group, then, in the order written, one or several of them:
      L00-L05: {chunks: 1}
      prologue: {reduction: cpu}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any

from slidedp.compiler.decisions import (
    Activation,
    Boundary,
    Decisions,
    GroupDecision,
    Reduction,
    Residence,
    Route,
    Rows,
    Source,
    StateHome,
    Update,
)
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.runlength import expand, layer_index, runs
from slidedp.compiler.strict import as_int, as_mapping, check_keys, closest

CHOICES: dict[str, type[StrEnum]] = {
    "delivery": Route, "source": Source, "reduction": Reduction, "act": Activation, "boundary": Boundary,
    "weights": Residence, "state": StateHome, "update": Update, "rows": Rows,
}  # fmt: skip
GROUP_FIELDS = tuple(f.name for f in fields(GroupDecision))
GROUP_KEYS = (*GROUP_FIELDS, "chunks")
PLAN_KEYS = ("window", "grad_slots", "staging_slots", "reduce_slots", "head_chunks", "act_slots", "update", "slices")


def apply_policy(
    defaults: Decisions, policy: Mapping[str, Any] | None, layer_graph: LayerGraph, where: str = "policy"
) -> Decisions:
    """`defaults` with what `policy` pins.

    Raises ValueError, naming it and what is allowed, for a key, value or layer that does not exist.
    """
    if policy is None:
        return defaults
    policy = as_mapping(policy, where)
    check_keys(policy, (*PLAN_KEYS, *(k for k in GROUP_KEYS if k not in PLAN_KEYS), "layers"), where, required=())
    everywhere = group_fields({k: v for k, v in policy.items() if k in GROUP_KEYS and k not in PLAN_KEYS}, where)
    if (update := policy.get("update", Update.IN_BACKWARD)) != Update.IN_BACKWARD:
        everywhere |= group_fields({"update": update}, where)
    groups = {name: replace(d, **everywhere) for name, d in defaults.groups.items()}
    layers = as_mapping(policy.get("layers") or {}, f"{where}: layers")
    for pattern in sorted(layers, key=lambda p: p != "*"):  # stable: '*' first, the rest as written
        at = f"{where}: layers: {pattern}"
        pinned = group_fields(as_mapping(layers[pattern], at), at)
        for name in match_groups(pattern, layer_graph, at):
            groups[name] = replace(groups[name], **pinned)
    plan = plan_fields({k: v for k, v in policy.items() if k in PLAN_KEYS}, where)
    if plan.get("update") is Update.SPECULATIVE:
        plan["update"] = Update.DEFERRED
    return replace(defaults, groups=groups, **plan)


def parse_fixes(fixes: Iterable[str]) -> dict[str, Any]:
    """The policy that ``L3.act=recompute``, ``L00-L05.chunks=2``, ``delivery=sharded``, ``window=3`` write in short."""
    policy: dict[str, Any] = {}
    for fix in fixes:
        left, equals, value = fix.partition("=")
        layer, dot, key = left.strip().rpartition(".")
        if not equals or not key or (dot and not layer):
            raise ValueError(f"--fix {fix!r}: write LAYER.KEY=VALUE or KEY=VALUE, for example L03.delivery_chunks=4")
        target = policy.setdefault("layers", {}).setdefault(layer, {}) if dot else policy
        value = value.strip()
        target[key] = int(value) if value.isdigit() else value
    return policy


def merge_policies(*policies: Mapping[str, Any] | None) -> dict[str, Any]:
    """Later policies win over earlier ones, key by key and layer by layer, as if written below them."""
    merged: dict[str, Any] = {}
    for policy in policies:
        for key, value in (policy or {}).items():
            if key == "layers" and isinstance(value, Mapping):
                layers = merged.setdefault("layers", {})
                for name, pins in value.items():
                    layers[name] = {**layers.pop(name, {}), **pins} if isinstance(pins, Mapping) else pins
            else:
                merged[key] = value
    return merged


def group_fields(pins: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checked fields of a GroupDecision; ``chunks`` becomes the two chunk counts, either of which may be pinned beside it."""
    check_keys(pins, GROUP_KEYS, where, required=())
    chunks = {"delivery_chunks": pins["chunks"], "return_chunks": pins["chunks"]} if "chunks" in pins else {}
    out: dict[str, Any] = {}
    for key, value in {**chunks, **{k: v for k, v in pins.items() if k != "chunks"}}.items():
        out[key] = field_value(key, value, where)
        if out[key] is Update.IN_BACKWARD:
            raise ValueError(f"{where}: update: in_backward is for the whole plan; allowed here: deferred, speculative")
    return out


def plan_fields(pins: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checked plan-level fields of Decisions."""
    return {key: field_value(key, value, where) for key, value in pins.items()}


def field_value(key: str, value: object, where: str) -> StrEnum | int:
    return choice(CHOICES[key], key, value, where) if key in CHOICES else as_int(value, f"{where}: {key}", 1)


def choice(kind: type[StrEnum], key: str, value: object, where: str) -> StrEnum:
    allowed = [str(c) for c in kind]
    if value not in allowed:
        raise ValueError(f"{where}: {key}: {value!r} is unknown; {closest(value, allowed)}allowed: {', '.join(allowed)}")
    return kind(str(value))


def match_groups(pattern: str, layer_graph: LayerGraph, where: str) -> list[str]:
    """Names of the groups that a policy's key stands for. ``L3`` and ``L03`` are the same layer."""
    names = [g.name for g in layer_graph.groups]
    if pattern == "*":
        return names
    by_key = {_key(name): name for name in names}
    out = []
    for part in expand(pattern, where):
        if _key(part) not in by_key:
            have = ", ".join(run for run, _ in runs([(name, None) for name in names]))
            raise ValueError(f"{where}: the model has no group {part!r}; it has {have} (and '*', all of them)")
        out.append(by_key[_key(part)])
    return out


def _key(name: str) -> int | str:
    index = layer_index(name)
    return name if index is None else index
