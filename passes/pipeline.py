"""The pipeline: LayerGraph and decisions in, verified OpGraph out. One place that dumps, times and verifies.

    compute -> slots -> delivery -> gradients -> updates -> dependences -> prune -> (verify)

Gradients come after deliveries because both are inserted right behind a backward: a reduction must not queue behind the
delivery of a layer that is needed later.
"""

from __future__ import annotations

from collections.abc import Callable

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import OpGraph
from slidedp.passes.base import Pass
from slidedp.passes.compute import Compute
from slidedp.passes.delivery import Delivery
from slidedp.passes.dependences import Dependences
from slidedp.passes.gradients import Gradients
from slidedp.passes.prune import Prune
from slidedp.passes.slots import Slots
from slidedp.passes.updates import Updates
from slidedp.passes.verify import verify

PIPELINE: tuple[type[Pass], ...] = (Compute, Slots, Delivery, Gradients, Updates, Dependences, Prune)


def draft(layers: LayerGraph, decisions: Decisions) -> OpGraph:
    """The ops of a training step with every edge, neither pruned nor verified: takes a tenth of the time, runs in the same.

    For simulating plans that may never be used; what runs is lowered by :func:`lower`.
    """
    graph = OpGraph()
    for cls in PIPELINE:
        if cls is not Prune:
            graph = cls(layers, decisions).run(graph)
    return graph


def lower(
    layers: LayerGraph,
    decisions: Decisions,
    *,
    hbm_budget: int | None = None,
    training: bool = True,
    dump: Callable[[str, OpGraph], None] | None = None,
) -> OpGraph:
    """Lower `layers` under `decisions` and verify the result. `dump` is called with each pass's name and output.

    Raises:
        VerifyError: the lowered graph is not sound, or does not fit `hbm_budget` (bytes).
    """
    graph, have = OpGraph(), frozenset[str]()
    for cls in PIPELINE:
        assert cls.requires <= have, f"pass {cls.name} needs {sorted(cls.requires - have)} first"
        graph = cls(layers, decisions, training).run(graph)
        have |= cls.provides
        if dump:
            dump(cls.name, graph)
    verify(graph, hbm_budget=hbm_budget)
    return graph
