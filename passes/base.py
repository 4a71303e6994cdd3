"""What every pass shares: its shape, inserting ops, and the names of values and ops.

A pass is a frozen dataclass with what it needs as fields and a pure ``run(graph) -> graph``. `requires` and `provides`
name the properties of the graph it relies on and establishes; the pipeline checks that the order satisfies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, OpGraph


@dataclass(frozen=True)
class Pass:
    """Base of the lowering passes. `training`: lower a whole step; else a forward for evaluation."""

    layers: LayerGraph
    decisions: Decisions
    training: bool = True

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: OpGraph) -> OpGraph:
        raise AssertionError(f"{type(self).__name__} has no run")  # every pass defines its own


def insert_after(ops: Iterable[Op], after: Mapping[str, Iterable[Op]]) -> tuple[Op, ...]:
    """`ops` with new ones right behind those named in `after`; the key '' puts them at the start."""
    out = list(after.get("", ()))
    for op in ops:
        out.append(op)
        out += after.get(op.name, ())
    return tuple(out)


def weights(use: str, group: str) -> str:
    """Value name of weights in HBM; `use` is fwd, bwd, step or resident."""
    return f"W.{use}.{group}"
