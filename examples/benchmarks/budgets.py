"""HBM budgets for a sweep: from the smallest in which some plan of a model and batch fits, to all that the GPU has."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

import slidedp
from slidedp.compiler.budgets import RESERVE, RESERVE_BYTES, WHOLE
from slidedp.compiler.layergraph import recut
from slidedp.decide import least_bytes
from slidedp.paper import draft_on_paper, settings_on_paper
from slidedp.slicing import COUNTS

GRAIN = 2**20
"""Bytes that budgets are multiples of."""


def budgets(model: nn.Module, profile: slidedp.HardwareProfile, batch: int, seq: int, number: int) -> list[int]:
    """`number` of them, ascending, each larger than the one before by the same factor."""
    low, high = smallest_budget(model, profile, batch, seq), profile.hbm_bytes
    steps = [low * (high / low) ** (i / max(number - 1, 1)) for i in range(number)]
    return sorted({min(high, -(-round(size) // GRAIN) * GRAIN) for size in steps[:-1]} | {high})


def smallest_budget(model: nn.Module, profile: slidedp.HardwareProfile, batch: int, seq: int) -> int:
    """With the reserve that a budget keeps free, in whatever slices need least."""
    settings = settings_on_paper(profile, 1, policy={"slices": 1})
    _, draft = draft_on_paper(model, settings, batch, seq)
    open_ = replace(settings, policy=None)
    least = min(least_bytes(recut(draft.layers, k), open_)["hbm"] for k in (1, *COUNTS) if k <= batch)
    if profile.gpu_name == "cpu":
        return least
    return min(round(least / WHOLE), max(round(least / (1 - RESERVE)), least + RESERVE_BYTES))
