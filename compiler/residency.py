"""Where a group's weights and state are: held in HBM beyond the window of weight slots, living there, or twice on the host.

Asked by memory.py, the passes and the executor alike, so that a plan's sizes, ops and buffers agree.
"""

from __future__ import annotations

from slidedp.compiler.decisions import Decisions, GroupDecision, Residence, StateHome, Update
from slidedp.compiler.layergraph import Group, LayerGraph, cut_chunks

STATE_BYTES = 12
"""Bytes of state for a trainable element: FP32 master and two moments."""

WHOLE_UPDATE = 1 << 26
"""Elements that one rank updates in HBM at a time, if it has so many. Each update takes time of Python's, for which other threads
wait, and 4 bytes an element of workspace for the gradient in FP32.
"""


def is_resident(group: Group, decision: GroupDecision) -> bool:
    """True if the group's state, and with it its weights, lives in HBM. What no stage uses stays on the host."""
    return decision.state is StateHome.HBM and bool(group.uses)


def is_windowed(layers: LayerGraph, decisions: Decisions, group: Group) -> bool:
    """True if the group is delivered through the window of weight slots: a layer's own that nothing keeps in HBM."""
    decision = decisions.of(group.name)
    return layers.streams(group) and decision.weights is Residence.STREAM and not is_resident(group, decision)


def windowed_groups(layers: LayerGraph, decisions: Decisions) -> list[Group]:
    return [g for g in layers.groups if is_windowed(layers, decisions, g)]


def held_groups(layers: LayerGraph, decisions: Decisions) -> list[Group]:
    """Groups with a weight buffer of their own: delivered once a step, or resident."""
    return [g for g in layers.groups if g.uses and not is_windowed(layers, decisions, g)]


def resident_groups(layers: LayerGraph, decisions: Decisions) -> list[Group]:
    return [g for g in layers.groups if is_resident(g, decisions.of(g.name))]


def update_chunks(group: Group, decision: GroupDecision, world_size: int) -> tuple[tuple[int, int], ...]:
    """Elements ``[lo, hi)`` of each update of the group, all ranks together: those of a returned chunk. State in HBM of one rank
    only, where no chunk is waited for, is updated in as few as `WHOLE_UPDATE` allows.
    """
    num = decision.return_chunks
    if world_size == 1 and is_resident(group, decision):
        num = min(num, -(-group.num_trainable // WHOLE_UPDATE))
    return cut_chunks(group.num_trainable, num, world_size)


def speculates(decisions: Decisions, group: Group) -> bool:
    """True if the group's update is computed before the norm is known, into a second set of buffers on the host.

    State in HBM is deferred: its update takes the GPU's time, not the host's. So are groups with frozen parameters, which
    only one set of buffers holds.
    """
    decision = decisions.of(group.name)
    wanted = decisions.update is Update.DEFERRED and decision.update is Update.SPECULATIVE
    return wanted and can_speculate(group, decision)


def can_speculate(group: Group, decision: GroupDecision) -> bool:
    return group.trainable and group.num_trainable == group.numel and not is_resident(group, decision)


def speculating_groups(layers: LayerGraph, decisions: Decisions) -> list[Group]:
    return [g for g in layers.groups if speculates(decisions, g)]


def waits_in_hbm(decisions: Decisions, group: Group) -> bool:
    """True if the group's gradient stays in HBM until all gradients are there: its update is deferred, and happens there."""
    return decisions.update is Update.DEFERRED and group.trainable and is_resident(group, decisions.of(group.name))


def state_bytes(group: Group, world_size: int) -> int:
    """HBM that one rank's part of a resident group's state takes."""
    return STATE_BYTES * group.num_trainable // world_size
