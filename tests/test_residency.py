"""Residency: weights held in HBM between their uses, and optimizer state that lives there, are the same training."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from tiny_models import PlainGPT, lm_batch
from training import loss_of_output, norm_wise, state_of, train_plainly, train_planned

import slidedp

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)
PLACES = {
    "all": {"state": "hbm"},
    "some": {"layers": {"L01": {"state": "hbm"}, "shared0": {"state": "hbm"}}},
    "held": {"weights": "hold"},
    "mixed": {"weights": "hold", "layers": {"L00": {"state": "hbm"}, "L02": {"weights": "stream"}}},
}


def train(model, batches, **options):
    """As train_planned, with nothing between the steps that waits."""
    with slidedp.compile(copy.deepcopy(model), "cpu", example=batches[0], optimizer=OPTIMIZER, **options) as plan:
        losses = [plan.run(batch).loss for batch in batches]
        done = replace(state_of(plan), losses=losses, grads=[])
    return done


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("route", [{"chunks": 1}, {"chunks": 5, "window": 1, "source": "cast"}], ids=["whole", "chunks"])
def test_the_same_bits_with_torch_arithmetic(places, route):
    """Losses, weights and moments equal those of state on the host, bit for bit, whichever groups are where."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(4)]
    want = train(model, batches, update_kernel="torch", policy=route)
    got = train(model, batches, update_kernel="torch", policy=route | PLACES[places])
    assert got.digest() == want.digest()


def test_fused_update_over_twenty_steps():
    """The kernel that runs on a GPU: losses within 1e-6 of those of state on the host, and of plain PyTorch."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(20)]
    for block in model.blocks:
        block.qkv.bias.requires_grad_(False)  # those of keys have no gradient but rounding noise, which Adam blows up
    gentle = slidedp.AdamW(lr=1e-3)
    want = train_plainly(model, batches, gentle, loss_of_output)
    host = train_planned(model, batches, gentle, update_kernel="native")
    with slidedp.compile(copy.deepcopy(model), "cpu", optimizer=gentle, policy={"state": "hbm"}) as plan:
        losses = [plan.run(batch).loss for batch in batches]
        got = state_of(plan)
    for reference in (want, host):
        assert max(abs(a - b) / b for a, b in zip(losses, reference.losses, strict=True)) < 1e-6
    for name, start in model.named_parameters():
        assert norm_wise(got.params[name] - start, host.params[name] - start) < 1e-3, name
