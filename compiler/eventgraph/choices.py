"""What may be chosen for each group: families of options, the rule's choice first, pinned fields with one value.

A family is a set of fields of GroupDecision that are chosen together, because their effect on time is not a sum:

==============  ========================================================================================================
`weights`       delivery, source, delivery_chunks (and `weights`: stream or hold, where decisions have it)
`gradients`     reduction, return_chunks
`act`           what a layer keeps for its backward
`state`         where master and moments live; `hbm` leaves nothing to deliver, return or update on the host, which is the
                option RESIDENT of the first two families: :class:`Link` ties the three together
==============  ========================================================================================================

Data-driven: a value that an enum of :mod:`slidedp.compiler.decisions` does not have is never offered, and one that is
added there is offered at once, but for `act` (:data:`OFFERED`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import product
from typing import Any, get_type_hints

from slidedp.compiler.decisions import Activation, Decisions, GroupDecision
from slidedp.compiler.layergraph import Group, LayerGraph, StageKind
from slidedp.compiler.policy import GROUP_FIELDS, PLAN_KEYS, apply_policy

Values = Mapping[str, str | int]

FAMILY_FIELDS: dict[str, tuple[str, ...]] = {
    "weights": ("delivery", "source", "delivery_chunks", "weights"),
    "gradients": ("reduction", "return_chunks"),
    "act": ("act",),
    "state": ("state",),
}
RESIDENT: dict[str, str | int] = {}
"""The option of `weights` and `gradients` for a group whose state is in HBM: nothing moves."""
OFFERED = (Activation.RETAIN, Activation.OFFLOAD, Activation.RECOMPUTE)
"""What a layer may keep. `selective` only where it is pinned: what it saves of the recompute is not measured yet."""
CHUNK_COUNTS = (1, 4, 16)
MIN_CHUNK_BYTES = 16 * 2**20
"""Below this a task's fixed cost outweighs what a finer pipeline could save (prototypes: 8 MB chunks cost a third), and copies
begin to run below their full rate. Each op also takes the host's Python some 0.1 ms, which no plan counts."""


@dataclass(frozen=True, slots=True)
class Family:
    """Options of one group for the fields of one family; the first is the default's."""

    group: str
    name: str
    options: tuple[Values, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.group, self.name

    @property
    def resident(self) -> int | None:
        """Index of the option RESIDENT (of `state`: of hbm), if there is one."""
        if self.name == "state":
            return next((i for i, o in enumerate(self.options) if o["state"] == "hbm"), None)
        return next((i for i, o in enumerate(self.options) if not o), None)


@dataclass(frozen=True, slots=True)
class Link:
    """Option `b_option` of family `b` is chosen exactly when `a_option` of family `a` is. Families by their position."""

    a: int
    a_option: int
    b: int
    b_option: int


@dataclass(frozen=True)
class Choices:
    """All families of a plan, in the order of the groups. A selection is one option's index for each family."""

    families: tuple[Family, ...]
    links: tuple[Link, ...]
    defaults: Decisions

    @property
    def default(self) -> tuple[int, ...]:
        return (0,) * len(self.families)

    @property
    def open(self) -> int:
        """Families with something to choose."""
        return sum(len(f.options) > 1 for f in self.families)

    def decode(self, selection: Sequence[int]) -> Decisions:
        """The decisions that a selection stands for."""
        values: dict[str, dict[str, Any]] = {}
        for family, chosen in zip(self.families, selection, strict=True):
            values.setdefault(family.group, {}).update(family.options[chosen])
        groups = {name: replace(d, **_typed(values.get(name, {}))) for name, d in self.defaults.groups.items()}
        return replace(self.defaults, groups=groups)

    def decided(self, group: str, values: Values) -> Decisions:
        """The defaults with some fields of one group changed."""
        changed = replace(self.defaults.of(group), **_typed(values))
        return replace(self.defaults, groups={**self.defaults.groups, group: changed})

    def encode(self, decisions: Decisions) -> tuple[int, ...]:
        """The selection nearest to `decisions`: where a family lacks the very option, the one with most fields equal."""
        selection = []
        for family in self.families:
            have = decisions.groups.get(family.group)
            resident = str(getattr(have, "state", "host")) == "hbm"
            scores = [_score(option, have, resident) for option in family.options]
            selection.append(scores.index(max(scores)))
        for link in self.links:
            if (selection[link.a] == link.a_option) != (selection[link.b] == link.b_option):
                selection[link.b] = link.b_option if selection[link.a] == link.a_option else 0
        return tuple(selection)

    def with_frame(self, frame: Decisions) -> Choices:
        """The same choices with the slots of `frame`."""
        slots: dict[str, Any] = {key: getattr(frame, key) for key in PLAN_KEYS if key not in ("update", "slices")}
        return replace(self, defaults=replace(self.defaults, **slots))


def find_choices(
    layers: LayerGraph,
    defaults: Decisions,
    policy: Mapping[str, Any] | None = None,
    *,
    chunk_counts: Sequence[int] = CHUNK_COUNTS,
    min_chunk_bytes: int = MIN_CHUNK_BYTES,
) -> Choices:
    """What is open in `layers` beside what `policy` pins. `defaults`: the rule's decisions, which have the pins in them."""
    pinned = pinned_fields(layers, defaults, policy)
    families: list[Family] = []
    links: list[Link] = []
    for group in layers.groups:
        if not group.uses:
            continue
        fixed, default = pinned[group.name], defaults.of(group.name)
        values = {key: _values(key, group, layers, default, fixed, chunk_counts, min_chunk_bytes) for key in GROUP_FIELDS}
        first = len(families)
        families += [f for name in FAMILY_FIELDS if (f := _family(name, group, layers, values)) is not None]
        links += _links(families, first)
    return Choices(tuple(families), tuple(links), defaults)


def pinned_fields(layers: LayerGraph, defaults: Decisions, policy: Mapping[str, Any] | None) -> dict[str, frozenset[str]]:
    """Fields of each group that `policy` sets, whatever they were before: found by laying it over two unlike decisions."""
    a = GroupDecision()
    others: dict[str, Any] = {key: _other(key, getattr(a, key)) for key in GROUP_FIELDS}
    b = replace(a, **others)
    names = list(defaults.groups)
    over_a = apply_policy(Decisions(dict.fromkeys(names, a)), policy, layers)
    over_b = apply_policy(Decisions(dict.fromkeys(names, b)), policy, layers)
    return {name: frozenset(key for key in GROUP_FIELDS if getattr(over_a.of(name), key) == getattr(over_b.of(name), key)
                            and len(_all_values(key)) != 1) for name in names}  # fmt: skip


def pinned_slots(policy: Mapping[str, Any] | None) -> frozenset[str]:
    """Plan-level counts that `policy` sets."""
    return frozenset(key for key in PLAN_KEYS if policy and key in policy)


def _values(key: str, group: Group, layers: LayerGraph, default: GroupDecision, fixed: frozenset[str],
            chunk_counts: Sequence[int], min_chunk_bytes: int) -> list[str | int]:
    """Values of one field, the default's first."""
    first = getattr(default, key)
    if key in fixed:
        return [first]
    if key.endswith("_chunks"):
        delivered = key == "delivery_chunks"
        num_bytes = group.numel * layers.compute_itemsize if delivered else group.num_trainable * layers.grad_itemsize
        more: list[Any] = [n for n in chunk_counts if n == 1 or num_bytes // n >= min_chunk_bytes]
    elif layers.world_size == 1 and key in ("delivery", "reduction"):
        more = []
    elif key == "act":
        more = list(OFFERED) if _own_layer(group, layers) else []
    elif key == "weights" and not _own_layer(group, layers):
        more = []  # a held group's weights are in HBM for the whole step as it is
    else:
        more = list(_all_values(key))
    return [first, *(v for v in more if v != first)]


def _own_layer(group: Group, layers: LayerGraph) -> bool:
    """True if `group` is what a layer is named by: the first of the groups it reads, and used there first."""
    stage = layers.stage(group.uses[0])
    return stage.kind is StageKind.LAYER and stage.groups[0] == group.name and layers.streams(group)


def _family(name: str, group: Group, layers: LayerGraph, values: Mapping[str, list[str | int]]) -> Family | None:
    keys = [key for key in FAMILY_FIELDS[name] if key in values]
    if not keys or (name == "gradients" and not group.trainable) or (name == "act" and not _own_layer(group, layers)):
        return None
    if name == "state" and (not group.trainable or len(values["state"]) == 1):
        return None
    options: list[Values] = [dict(zip(keys, combination, strict=True)) for combination in product(*(values[k] for k in keys))]
    if name in ("weights", "gradients") and "hbm" in values.get("state", ()) and group.trainable:
        options = [*options, RESIDENT] if len(values["state"]) > 1 else [RESIDENT]
    return Family(group.name, name, tuple(options))


def _links(families: Sequence[Family], first: int) -> list[Link]:
    """Links among the families from `first` on, which are those of one group."""
    state = next((i for i in range(first, len(families)) if families[i].name == "state"), None)
    hbm = families[state].resident if state is not None else None
    if state is None or hbm is None:
        return []
    others = [(i, families[i].resident) for i in range(first, len(families)) if families[i].name in ("weights", "gradients")]
    return [Link(state, hbm, i, option) for i, option in others if option is not None]


@cache
def _hints() -> dict[str, Any]:
    """The types of a decision's fields. Evaluated once: it takes longer than all else that is done with an option."""
    return get_type_hints(GroupDecision)


def _all_values(key: str) -> Sequence[Any]:
    hint = _hints()[key]
    return list(hint) if isinstance(hint, type) and issubclass(hint, StrEnum) else (1, 2)


def _other(key: str, value: object) -> object:
    return next((v for v in _all_values(key) if v != value), value)


def exists(key: str, value: str | int) -> bool:
    """True if decisions of this version can hold `value` as their field `key`."""
    return key in GROUP_FIELDS and (isinstance(value, int) or value in _all_values(key))


def _typed(values: Values) -> dict[str, Any]:
    hints = _hints()
    return {key: value if isinstance(value, int) else hints[key](value) for key, value in values.items() if exists(key, value)}


def _score(option: Values, have: GroupDecision | None, resident: bool) -> float:
    if have is None:
        return 0
    if not option:
        return 100 if resident else -1
    near = 0.0
    for key, value in option.items():
        mine = getattr(have, key, None)
        if isinstance(value, int) and isinstance(mine, int):
            near += 1 / (1 + abs(value - mine))
        else:
            near += 2 * (str(mine) == str(value))
    return near


