"""Cuts a recorded graph into stages: prologue, one per layer call, epilogue.

What depends on no layer is the prologue, and runs once. Layer i's stage holds its call and the glue before it that needs an
earlier layer. What only the loss needs is the epilogue. Values that cross are outputs of one stage and inputs of others, so
skip connections, glue between layers and values re-injected into every layer need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from slidedp.compiler.errors import TraceError
from slidedp.compiler.layergraph import StageKind
from slidedp.compiler.tracing.guards import closure, dependencies, describe


@dataclass(frozen=True)
class Segment:
    """One stage's nodes in program order. Batch entries and parameters belong to no stage: each reads its own."""

    name: str
    kind: StageKind
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def cut(graph: fx.Graph, layer_calls: Sequence[fx.Node], loss: fx.Node) -> tuple[Segment, ...]:
    """The stages of the live part of `graph`, in execution order; none if the loss depends on no layer.

    Raises TraceError where an in-place write would reach over a stage boundary.
    """
    if _owner(loss) in layer_calls:  # the epilogue has to have a loss of its own
        loss = _copy_of(graph, loss)
    order = list(graph.nodes)
    live = closure([loss, *(n for n in order if n.meta.get("effect"))])
    order = [n for n in order if n in live]
    calls = [n for n in layer_calls if n in live]
    if not calls:
        return ()
    stage_of = _assign(order, calls)
    _check_writes(order, stage_of)
    readers: dict[fx.Node, set[int]] = {n: set() for n in order}
    for n in stage_of:
        for i in n.all_input_nodes:
            readers[i].add(stage_of[n])
    names = ["prologue", *(f"L{i:02d}" for i in range(len(calls))), "epilogue"]
    kinds = [StageKind.PROLOGUE, *(StageKind.LAYER for _ in calls), StageKind.EPILOGUE]
    segments = []
    for s, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        nodes = tuple(n for n in order if stage_of.get(n) == s)
        read = dict.fromkeys(i for n in nodes for i in n.all_input_nodes)
        inputs = [i for i in read if i.op == "placeholder" or stage_of.get(i, s) != s]
        outputs = [loss] if kind is StageKind.EPILOGUE else [n for n in nodes if any(r > s for r in readers[n])]
        segments.append(Segment(name, kind, nodes, tuple(inputs), tuple(outputs)))
    return tuple(segments)


def _copy_of(graph: fx.Graph, n: fx.Node) -> fx.Node:
    copy = graph.call_method("clone", (n,))
    copy.meta.update(index=len(graph.nodes), val=n.meta["val"])
    return copy


def _owner(n: fx.Node) -> fx.Node:
    """The call whose result `n` is part of."""
    while n.meta.get("projection"):
        n = n.all_input_nodes[0]
    return n


def _assign(order: Sequence[fx.Node], calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Stage number of each node: the first stage that needs it. Placeholders and get_attr nodes have none.

    A node that draws random numbers or writes a buffer keeps its place between the layers instead.
    """
    first = calls[0].meta["index"]
    later: set[fx.Node] = set()
    for n in order:
        pinned = n.meta.get("pinned") and n.meta["index"] > first
        if n in calls or pinned or any(d in later for d in dependencies(n)):
            later.add(n)
    stage_of: dict[fx.Node, int] = {}
    todo = [n for n in order if n.meta.get("pinned") and n in later]
    for s, call in enumerate(calls, start=1):
        roots = [call, *(n for n in todo if n.meta["index"] < call.meta["index"])]
        while roots:
            n = _owner(roots.pop())
            if n not in stage_of and n in later:
                stage_of[n] = s
                roots += dependencies(n)
    for n in order:
        if n.op not in ("placeholder", "get_attr"):
            stage_of.setdefault(n, stage_of.get(_owner(n), len(calls) + 1 if n in later else 0))
    return stage_of


def _check_writes(order: Sequence[fx.Node], stage_of: dict[fx.Node, int]) -> None:
    """Raises TraceError unless each in-place write is in the stage that made the storage, after all who read it before."""
    for w in order:
        before = [n for n in stage_of if n.meta["index"] < w.meta["index"]] if w.meta.get("writes") else []
        for storage in w.meta.get("writes", ()):
            made = {stage_of[n] for n in before if n.meta.get("storage") == storage}
            read = {stage_of[n] for n in before if any(i.meta.get("storage") == storage for i in n.all_input_nodes)}
            if made - {stage_of[w]} or any(s > stage_of[w] for s in read):
                raise TraceError(
                    f"{describe(w)} writes in place a value that an earlier layer made or a later one reads; that layer could "
                    "not be run again for the backward pass: write it out of place (h = h + x)"
                )
