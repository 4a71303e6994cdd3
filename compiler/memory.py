"""Bytes by place that a plan needs, from the LayerGraph and the decisions alone: no graph is lowered for it.

Slots are counted as the passes make them; a test holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from slidedp.compiler.decisions import Decisions, Reduction, Route, Source
from slidedp.compiler.layergraph import Group, LayerGraph, cut_chunks


@dataclass(frozen=True)
class Memory:
    """Bytes by use: `hbm` on each GPU, `host` on the whole host, all ranks together."""

    hbm: dict[str, int]
    host: dict[str, int]

    @property
    def hbm_bytes(self) -> int:
        return sum(self.hbm.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def estimate_memory(graph: LayerGraph, decisions: Decisions) -> Memory:
    """What training with `decisions` needs. Activations: all boundaries, and the largest stage's while it runs."""
    return Memory(_hbm(graph, decisions), _host(graph, decisions))


def num_window_slots(graph: LayerGraph, decisions: Decisions) -> int:
    """Weight slots that exist: no more than there are groups to stream."""
    return min(decisions.window, sum(graph.streams(g) for g in graph.groups))


def _hbm(graph: LayerGraph, decisions: Decisions) -> dict[str, int]:
    streamed = [g for g in graph.groups if graph.streams(g)]
    held = [g for g in graph.groups if not graph.streams(g)]
    weight, grad = graph.compute_itemsize, graph.grad_itemsize
    pieces = [hi - lo for g in graph.groups if decisions.of(g.name).reduction is Reduction.GPU
              for lo, hi in cut_chunks(g.num_trainable, decisions.of(g.name).return_chunks, graph.world_size)]
    reduced = max(pieces, default=0) // graph.world_size if graph.world_size > 1 else 0
    return {
        "weight slots": num_window_slots(graph, decisions) * weight * max((g.numel for g in streamed), default=0),
        "gradient slots": decisions.grad_slots * grad * max((g.num_trainable for g in streamed), default=0),
        "held weights": sum(weight * g.numel for g in held),
        "held gradients": sum(grad * g.num_trainable for g in held),
        "reduce slots": decisions.reduce_slots * grad * reduced,
        "boundary activations": sum(s.boundary_bytes for s in graph.stages),
        "largest stage's activations": max((s.activation_bytes for s in graph.stages), default=0),
    }


def _host(graph: LayerGraph, decisions: Decisions) -> dict[str, int]:
    shadowed = [g for g in graph.groups if decisions.of(g.name).source is Source.SHADOW]
    on_host = [g for g in graph.groups if decisions.of(g.name).reduction is Reduction.CPU] if graph.world_size > 1 else []
    staging = max((_largest_cast(graph, decisions, g) for g in graph.groups), default=0)
    return {
        "master weights": sum(4 * g.numel for g in graph.groups),
        "moments": sum(8 * g.num_trainable for g in graph.groups),
        "shadow": sum(graph.compute_itemsize * g.numel for g in shadowed),
        "gradients": sum(graph.grad_itemsize * g.num_trainable for g in graph.groups),
        "unreduced gradients": graph.world_size * sum(graph.grad_itemsize * g.num_trainable for g in on_host),
        "cast staging": graph.world_size * decisions.staging_slots * graph.compute_itemsize * staging,
    }


def _largest_cast(graph: LayerGraph, decisions: Decisions, group: Group) -> int:
    """Elements of the largest piece that one rank casts at a time."""
    decision = decisions.of(group.name)
    if decision.source is not Source.CAST:
        return 0
    chunks = cut_chunks(group.numel, decision.delivery_chunks, graph.world_size)
    ranks = graph.world_size if decision.delivery is Route.SHARDED else 1
    return max((hi - lo for lo, hi in chunks), default=0) // ranks
