"""Where a group's weights and state are: held in HBM beyond the window of weight slots, living there, or twice on the host.

Asked by memory.py, the passes and the executor alike, so that a plan's sizes, ops and buffers agree.
"""

from __future__ import annotations

from slidedp.compiler.decisions import Decisions, GroupDecision, Residence, StateHome, Update
from slidedp.compiler.layergraph import Group, LayerGraph

STATE_BYTES = 12
"""Bytes of state for a trainable element: FP32 master and two moments."""


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
