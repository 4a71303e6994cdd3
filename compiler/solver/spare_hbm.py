"""The rule that spends spare HBM on optimizer state, where the host's update would hold the GPU up.

Groups are taken in the order of their first use. The embedding and the first layer get their gradients last and are needed
first: their updates sit between two steps, however fast the host is. Beyond them, state in HBM pays as long as the host has
more to update than the GPU can hide behind its compute.
"""

from __future__ import annotations

from dataclasses import replace

from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions, StateHome
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import Group, LayerGraph, StageKind, cut_chunks
from slidedp.compiler.ops import Chunk, Op, OpKind, Stream

HIDDEN = 0.6
"""Update over compute time below which the update is hidden: it is 1.6 times slower while copies run both ways (h200x1.yaml)."""

NUM_BOUNDARY_STAGES = 2
"""The prologue and the first layer: their updates come last, with nothing to hide behind."""


def spare_hbm_rule(
    layers: LayerGraph, decisions: Decisions, hw: HardwareProfile, costs: CostModel, room: int
) -> Decisions:
    """`decisions` with the state of as many groups in HBM as pay and fit, the most useful first; pure and deterministic.

    Groups already there stay there. `room`: bytes of one GPU that may be filled (budgets.py).
    """
    compute_us = sum(_compute_us(layers, hw, costs))
    first_use = {g.name: min(layers.stages.index(layers.stage(s)) for s in g.uses) for g in layers.groups if g.uses}
    for group in sorted((g for g in layers.groups if g.trainable and g.uses), key=lambda g: first_use[g.name]):
        if decisions.of(group.name).state is StateHome.HBM:
            continue
        boundary = first_use[group.name] < NUM_BOUNDARY_STAGES
        at_home = [g for g in layers.groups if decisions.of(g.name).state is StateHome.HOST]
        if not boundary and sum(update_us(layers, decisions, g, hw, costs) for g in at_home) <= HIDDEN * compute_us:
            break
        moved = replace(decisions.of(group.name), state=StateHome.HBM)
        candidate = replace(decisions, groups=decisions.groups | {group.name: moved})
        if estimate_memory(layers, candidate).hbm_bytes <= room:
            decisions = candidate
    return decisions


def update_us(layers: LayerGraph, decisions: Decisions, group: Group, hw: HardwareProfile, costs: CostModel) -> int:
    """Time of the host's update of a rank's part of the group."""
    cut = cut_chunks(group.num_trainable, decisions.of(group.name).return_chunks, layers.world_size)
    per_param = 24 + layers.grad_itemsize + layers.compute_itemsize
    return sum(
        costs.duration_us(Op(f"cpu_update.{group.name}.c{c}", OpKind.CPU_UPDATE, Stream.CPU, group.name, Chunk(c, len(cut), True),
                             bytes=(hi - lo) // layers.world_size * per_param), hw)
        for c, (lo, hi) in enumerate(cut))  # fmt: skip


def _compute_us(layers: LayerGraph, hw: HardwareProfile, costs: CostModel) -> list[int]:
    """Time of each stage's forward and backward, with recompute."""
    ops = []
    for s in layers.stages:
        if s.kind is StageKind.LAYER:
            ops += [Op(f"fwd.{s.name}", OpKind.FORWARD, Stream.GPU, s.name, flops=s.flops),
                    Op(f"recompute.{s.name}", OpKind.RECOMPUTE, Stream.GPU, s.name, flops=s.flops),
                    Op(f"bwd.{s.name}", OpKind.BACKWARD, Stream.GPU, s.name, flops=2 * s.flops)]
        else:
            kind = OpKind.PROLOGUE if s.kind is StageKind.PROLOGUE else OpKind.EPILOGUE
            ops.append(Op(s.name, kind, Stream.GPU, s.name, flops=3 * s.flops))
    return [costs.duration_us(op, hw) for op in ops]
