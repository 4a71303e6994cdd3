"""A graph's costs and its timeline: the one way from ops to a predicted step, for plans that run and for those on paper."""

from __future__ import annotations

from slidedp.compiler.costmodel.contention import Contention
from slidedp.compiler.costmodel.costs import AnalyticCostModel, CostModel, ResolvedCosts, WithFallback, resolve
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.measured import MeasuredCosts, Measurement
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import OpGraph
from slidedp.compiler.simulation.simulate import simulate
from slidedp.compiler.simulation.timeline import Timeline


def cost_model_of(
    layers: LayerGraph,
    *,
    cost_model: CostModel | None = None,
    measurement: Measurement | None = None,
    update_threads: int | None = None,
) -> WithFallback:
    """What every op of a plan of `layers` costs alone: the user's word, else as measured, else analytic.

    `update_threads`: of all ranks together, where known.
    """
    analytic = AnalyticCostModel(layers.world_size, layers.compute_dtype, alone=True, update_threads=update_threads)
    return WithFallback(analytic, cost_model, MeasuredCosts.of(measurement or Measurement(), layers))


def price(graph: OpGraph, model: WithFallback, hw: HardwareProfile) -> ResolvedCosts:
    """The costs of one graph. Raises as :func:`~slidedp.compiler.costmodel.costs.resolve`."""
    return resolve(graph.ops, hw, model.analytic, model.user, model.measured)


def predict(graph: OpGraph, costs: ResolvedCosts, hw: HardwareProfile) -> Timeline:
    """The steady step of `graph`: ops that run at once share what the machine has."""
    contention = Contention(hw, graph.world_size, costs.num_bytes)
    return simulate(graph, costs.duration_us, contention=contention, issue_us=costs.issue_us)
