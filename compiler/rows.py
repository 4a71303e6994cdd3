"""An embedding whose untouched rows are updated early: where that can be, and what each part costs.

The gradient of a row that no batch of the step looks up is known long before the backward ends: it is the head's alone where
the table is the head's too (tied), else zero. Asked by passes/rows.py, the solver's event graph and the executor alike, so that
they agree on which groups are split.
"""

from __future__ import annotations

from dataclasses import dataclass

from slidedp.compiler.decisions import Decisions, Rows, StateHome, Update
from slidedp.compiler.layergraph import Group, LayerGraph, Lookup

WORTH_SPLITTING = 0.5
"""Share of rows touched from which on splitting saves less of the step boundary than its second trip home is worth."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the rows of one group are split. `touched`: the share of rows that the step's batches look up, at most."""

    lookup: Lookup
    touched: float
    tied: bool

    def update_bytes(self, num_bytes: int, gradient_bytes: int) -> tuple[int, int]:
        """Splits an update of `num_bytes`, its gradient included: bytes for the untouched rows, and for the touched rows.

        A gradient of zero is not read.
        """
        late = round(num_bytes * self.touched)
        unread = 0 if self.tied else gradient_bytes - round(gradient_bytes * self.touched)
        return num_bytes - late - unread, late


def possible_split(layers: LayerGraph, group: Group) -> Split | None:
    """How `group` could be split; None for anything but a table that the prologue looks up and at most the epilogue reads, and
    for steps of several micro-batches, or that may be: a batch of one row cannot be cut, but the next one may.
    """
    first, last = layers.stages[0], layers.stages[-1]
    lookup = next((x for x in first.lookups if x.group == group.name), None)
    if lookup is None or max(layers.num_lanes, layers.slices) > 1 or not group.trainable:
        return None
    if group.uses not in ((first.name,), (first.name, last.name)):
        return None
    return Split(lookup, min(1.0, layers.world_size * lookup.num_ids / lookup.num_rows), len(group.uses) > 1)


def split_on_host(layers: LayerGraph, decisions: Decisions) -> dict[str, Split]:
    """How groups are split where their state is on the host, wherever that is: so decided, possible, updated in the backward."""
    if decisions.update is not Update.IN_BACKWARD:
        return {}
    wanted = [g for g in layers.groups if decisions.of(g.name).rows is Rows.SPLIT]
    return {g.name: split for g in wanted if (split := possible_split(layers, g)) is not None}


def find_splits(layers: LayerGraph, decisions: Decisions) -> dict[str, Split]:
    """By group, of all that are split."""
    splits = split_on_host(layers, decisions)
    return {name: split for name, split in splits.items() if decisions.of(name).state is StateHome.HOST}


def rows_rule(layers: LayerGraph, group: Group) -> Rows:
    """The rule's decision: `split` where it can be and fewer than half of the rows are touched."""
    split = possible_split(layers, group)
    return Rows.SPLIT if split is not None and split.touched < WORTH_SPLITTING else Rows.WHOLE
