"""Which groups speculate, in a plan whose updates wait for the norm of all gradients: the fewest that give the shortest step.

A group that speculates has its state on the host twice (compiler/footprint/memory.py), so there may not be room for all. The last
layers, whose gradients come first, gain most: their updates would wait longest. So groups are taken in that order, and their
number is found by simulating the steps.
"""

from __future__ import annotations

from dataclasses import replace

from slidedp.compiler.decisions import Decisions, Update
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import Group, LayerGraph
from slidedp.compiler.residency import can_speculate
from slidedp.planning.autopolicy import AutoPlan, Problem

WORTH = 0.005
"""Share of a step that more groups, or any, must save."""


def in_order_of_arrival(layers: LayerGraph, decisions: Decisions) -> list[Group]:
    """The groups that can speculate, those whose gradients are complete first before the others."""
    place = {s.name: i for i, s in enumerate(layers.stages)}
    able = [g for g in layers.groups if g.uses and can_speculate(g, decisions.of(g.name))]
    return sorted(able, key=lambda g: -min(place[s] for s in g.uses))


def speculating(layers: LayerGraph, decisions: Decisions, number: int) -> Decisions:
    """`decisions` with the first `number` groups, in order of arrival, speculating, and no other."""
    chosen = {g.name for g in in_order_of_arrival(layers, decisions)[:number]}
    groups = {name: replace(d, update=Update.SPECULATIVE if name in chosen else Update.DEFERRED)
              for name, d in decisions.groups.items()}
    return replace(decisions, groups=groups)


def most_that_fit(problem: Problem, decisions: Decisions) -> int:
    """How many groups the host has room for."""

    def fits(number: int) -> bool:
        return estimate_memory(problem.layers, speculating(problem.layers, decisions, number)).host_bytes <= problem.host_budget

    low, high = 0, len(in_order_of_arrival(problem.layers, decisions))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def with_most(problem: Problem, decisions: Decisions) -> Decisions:
    """As many groups of `decisions` speculating as there is room for: what a solver starts from."""
    return speculating(problem.layers, decisions, most_that_fit(problem, decisions))


def with_fewest(problem: Problem, plan: AutoPlan) -> AutoPlan:
    """`plan` with the fewest groups speculating whose step is within WORTH of that with the most. Simulates about six steps."""
    known: dict[int, int] = {}

    def step_us(number: int) -> int:
        if number not in known:
            known[number] = problem.simulate(speculating(problem.layers, plan.decisions, number)).step_us
        return known[number]

    most = most_that_fit(problem, plan.decisions)
    enough_us = step_us(most) * (1 + WORTH)
    low, high = 0, most  # a step gets no longer with more of them, or hardly
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if step_us(middle) <= enough_us else (middle + 1, high)
    record = plan.record and replace(plan.record, simulated_us=step_us(low))
    return replace(plan, decisions=speculating(problem.layers, plan.decisions, low), record=record)
