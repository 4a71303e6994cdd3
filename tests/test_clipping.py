"""Clipping by the norm of all gradients, and steps that are left out because something in them is not finite."""

from __future__ import annotations

import math

import pytest
from test_bitwise import CASES, OPTIMIZER, loss_of_case
from training import assert_same_bits, train_plainly, train_planned

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, math.inf])
@pytest.mark.parametrize("name", ["gpt", "qwen3-padded", "qwen3_moe-none", "vit"])
def test_equals_torch_bit_for_bit(name, max_norm):
    """Losses, norms, weights and moments of clip_grad_norm_ and torch.optim.AdamW: tied weights, experts without a gradient."""
    case = CASES[name]
    model, batches = case.model(), [case.batch(seed) for seed in range(1, 5)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_case(case), max_grad_norm=max_norm)
    got = train_planned(model, batches, OPTIMIZER, loss_fn=case.loss_fn, update_kernel="torch", max_grad_norm=max_norm)
    assert got.norms == want.norms
    assert_same_bits(got, want)
