"""The pipeline: LayerGraph and decisions in, verified OpGraph out. One place that dumps, times and verifies.

    compute -> slots -> delivery -> activations -> gradients -> updates -> rows -> residency -> clipping -> dependences
    -> prune -> (verify)

Gradients come after deliveries because both are inserted right behind a backward: a reduction must not queue behind the
delivery of a layer that is needed later. So do activations, which are needed sooner than the weights issued with them.
"""

from __future__ import annotations

from collections.abc import Callable

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import OpGraph
from slidedp.passes.activations import Activations
from slidedp.passes.base import Pass
from slidedp.passes.clipping import Clipping
from slidedp.passes.compute import Compute
from slidedp.passes.delivery import Delivery
from slidedp.passes.dependences import Dependences
from slidedp.passes.gradients import Gradients
from slidedp.passes.prune import Prune
from slidedp.passes.residency import ResidentUpdates
from slidedp.passes.rows import RowUpdates
from slidedp.passes.slots import Slots
from slidedp.passes.updates import Updates
from slidedp.passes.verify import verify

PIPELINE: tuple[type[Pass], ...] = (
    Compute, Slots, Delivery, Activations, Gradients, Updates, RowUpdates, ResidentUpdates, Clipping, Dependences, Prune,
)  # fmt: skip


def lower(
    layers: LayerGraph,
    decisions: Decisions,
    *,
    hbm_budget: int | None = None,
    training: bool = True,
    verified: bool = True,
    dump: Callable[[str, OpGraph], None] | None = None,
) -> OpGraph:
    """Lower `layers` under `decisions` and verify the result. `dump` is called with each pass's name and output.

    `verified` False: neither pruned nor verified, in a third of the time, to compare many decisions on paper. Its timeline is
    the same, but it is not to be run.

    Raises:
        VerifyError: the lowered graph is not sound, or does not fit `hbm_budget` (bytes).
    """
    graph, have = OpGraph(), frozenset[str]()
    for cls in PIPELINE if verified else [p for p in PIPELINE if p is not Prune]:
        assert cls.requires <= have, f"pass {cls.name} needs {sorted(cls.requires - have)} first"
        graph = cls(layers, decisions, training).run(graph)
        have |= cls.provides
        if dump:
            dump(cls.name, graph)
    if verified:
        verify(graph, hbm_budget=hbm_budget)
    return graph
