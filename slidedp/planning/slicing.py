"""How many slices a batch is cut into, unless pinned: settled first, on paper, so that a slice is what gets measured.

    to fit      the fewest slices with which some plan leaves the reserve of budgets.py free, if none does with the whole batch
    to be safe  the fewest with which running layers lose no more to the allocator's fragmentation than that reserve
    to be fast  what a layer and the head need while they run may leave no room in HBM for what would shorten the step: a few
                counts are planned by the structured search, but only if a plan with that room were clearly faster

Source: DESIGN §6. Counts are enumerated outside the solver, as windows are, since another count is another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slidedp.batch import Batches
from slidedp.compiler.decisions import Activation, Decisions, StateHome
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.footprint.budgets import room_to_fill
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.footprint.moments import moments
from slidedp.compiler.layergraph import LayerGraph, recut
from slidedp.compiler.solver.search import feasible
from slidedp.compiler.solver.structured import search_structured
from slidedp.compiler.units import format_bytes
from slidedp.planning.autopolicy import TOLERANCE, Problem, is_tiny
from slidedp.planning.decide import least_bytes, problem_and_rule

if TYPE_CHECKING:
    from slidedp.settings import Settings

COUNTS = (2, 4, 8, 16, 32, 64)
FAST_TOKENS = 4096
"""A slice of fewer keeps a GPU less busy than any cost model here says: smaller ones only to fit."""
SUM_BYTES = 10
"""Device memory traffic of a parameter's gradient for each further slice: an FP32 sum read and written, a gradient read."""
FRAGMENTS = 0.6
"""Reserved beyond what is allocated, as a share of what a layer takes while it runs. Measured on one H200, Qwen3-4B, every layer
recomputed: 13.3 of 23.2 GiB at 128 x 1024 tokens, 7.9 of 11.6 at 64 x 1024.
"""
ON_THE_WAY = "activations on their way"


@dataclass(frozen=True, slots=True)
class Slicing:
    """`why`: in words, "" for a batch that stays whole."""

    slices: int = 1
    why: str = ""


def why_whole(model: nn.Module, loss_fn: Callable[..., object] | None) -> str:
    """Why a slice by itself may not give what it gives within its batch; "" if nothing is known that couples rows."""
    if loss_fn is not None:
        return "a loss_fn may look at its rows together"
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{name} normalises over the rows of a batch"
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        return "the auxiliary loss of its routers is over a batch"
    return ""


def most_slices(batches: Batches) -> int:
    """The largest number of slices that the batch, or some micro-batch, can be cut into."""
    return max(map(num_rows, (batches,) if isinstance(batches, Mapping) else batches), default=1)


def num_rows(batch: Mapping[str, Tensor]) -> int:
    """Rows that `batch` can be cut along; 1 where entries have unlike numbers of them, or it is no batch."""
    tensors = [t for t in batch.values() if isinstance(t, Tensor)] if isinstance(batch, Mapping) else []
    rows = {t.shape[0] for t in tensors if t.dim() and t.shape[0] > 1}
    return rows.pop() if len(rows) == 1 else 1


def choose_slices(layers: LayerGraph, most: int, num_tokens: int, settings: Settings,
                  cut: Callable[[int], LayerGraph]) -> Slicing:
    """`layers`: of the batch in one piece, of `num_tokens`; `most`: rows it has. `cut`: traces it in so many slices.

    In one piece, if no number of slices fits: the error is then about that.
    """
    counts = [k for k in COUNTS if k <= most]
    budget = settings.hbm_bytes
    room = room_to_fill(settings.hw, settings.hbm_budget)
    whole = plan_of(layers, settings)
    if whole is not None and whole[0].hbm_budget <= room:
        if budget >= settings.hw.hbm_bytes and room < budget and (sure := surer(layers, counts, settings, budget - room)):
            return sure
        return faster(layers, [k for k in counts if num_tokens // k >= FAST_TOKENS], settings, *whole)
    least = least_bytes(layers, settings)
    if whole is None and least["host"] > settings.host_bytes:
        return Slicing()
    needs = f"in one piece the smallest plan needs {format_bytes(least['hbm'])} of HBM"
    tight = None if whole is None else Slicing()
    for k in counts:
        found = plan_of(cut(k), settings)
        if found is not None and found[0].hbm_budget <= room:
            reserve = "" if budget == room else f", of which {format_bytes(budget - room)} are a reserve"
            return Slicing(k, f"{needs}, the budget is {format_bytes(budget)}{reserve}")
        if found is not None and tight is None:
            tight = Slicing(k, f"{needs}, the budget is {format_bytes(budget)}, of which even so no reserve is left")
    return tight or Slicing()


def surer(layers: LayerGraph, counts: list[int], settings: Settings, reserve: int) -> Slicing | None:
    """The fewest slices whose fragmentation fits the reserve; None if the whole batch's does, or no number's does."""

    def fragments(k: int) -> int:
        parts = recut(layers, k)
        return int(FRAGMENTS * max(s.activation_bytes + s.workspace_bytes for lane in parts.each_lane for s in lane[1:-1]))

    if fragments(1) <= reserve:
        return None
    why = (f"in one piece the allocator may lose {format_bytes(fragments(1))} between the blocks of a layer that runs, more than "
           f"the reserve of {format_bytes(reserve)}")  # fmt: skip
    fitting = (k for k in counts if fragments(k) <= reserve and plan_of(recut(layers, k), settings) is not None)
    return next((Slicing(k, why) for k in fitting), None)


def plan_of(layers: LayerGraph, settings: Settings) -> tuple[Problem, Decisions] | None:
    """A problem and decisions that fit it; None where nothing does."""
    try:
        return problem_and_rule(layers, settings)
    except BudgetError:
        return None


def faster(layers: LayerGraph, counts: list[int], settings: Settings, problem: Problem, rule: Decisions) -> Slicing:
    """One piece, unless slices make the step shorter by more than the tolerance to which plans are compared."""
    if settings.solver == "rule" or not counts or fits_entirely(problem, rule) or is_tiny(problem, rule):
        return Slicing()
    whole = good_plan(problem, rule)
    if whole is None:
        return Slicing()
    decisions, whole_us = whole
    transients = estimate_memory(layers, decisions).hbm[ON_THE_WAY] + max(m.running + m.head for m in moments(layers, decisions))
    with_room = good_plan(replace(problem, hbm_budget=problem.hbm_budget + transients), rule)
    worth = whole_us * (1 - TOLERANCE)
    if with_room is None or with_room[1] > worth:
        return Slicing()
    best, best_us = Slicing(), whole_us
    for k in counts:
        cut = plan_of(recut(layers, k), settings)
        found = good_plan(*cut) if cut is not None else None
        if found is None:
            continue
        us = found[1] + summing_us(layers, k, settings)
        if us >= best_us:
            break
        best_us = us
        best = Slicing(k, f"the step is predicted {1 - us / whole_us:.0%} shorter than in one piece, where what runs takes "
                          f"{format_bytes(transients)} of HBM that others make better use of")  # fmt: skip
    return best if best_us <= worth else Slicing()


def good_plan(problem: Problem, rule: Decisions) -> tuple[Decisions, int] | None:
    """The plan of the structured search with the rule's slots, and its period in microseconds."""
    choices = problem.choices(rule)
    found = search_structured(problem.graph(choices), problem.rows(choices))
    return (choices.decode(found[0]), found[1]) if found else None


def fits_entirely(problem: Problem, rule: Decisions) -> bool:
    """True if HBM has room for all state and all activations: there is nothing to crowd out."""
    choices = problem.choices(rule)
    everything = {name: replace(d, act=Activation.RETAIN, state=StateHome.HBM) for name, d in rule.groups.items()}
    return feasible(problem.rows(choices), choices.encode(replace(rule, groups=everything)))


def summing_us(layers: LayerGraph, slices: int, settings: Settings) -> int:
    """Microseconds to sum the gradients of all slices but the first."""
    numel = sum(g.num_trainable * len(g.uses) for g in layers.groups)
    return int((slices - 1) * SUM_BYTES * numel / settings.hw.hbm_gbps / 1e3)


