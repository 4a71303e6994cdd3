"""Ranks that disagree or fail while their processes live: the others say so instead of waiting."""

from __future__ import annotations

import failure_cases
import pytest
import torch

pytestmark = pytest.mark.cpu


def test_one_rank_evaluates_where_the_other_trains(run_ranks, tmp_path):
    zero, one = (r.value for r in run_ranks(failure_cases.one_evaluates, 2, str(tmp_path)))
    assert "rank 1 evaluates" in zero[0]
    assert "rank 0 trains" in one[0]
    assert "rank 1 cannot save: its model's parameters are no longer the plan's" in zero[1]
    assert "is no longer the plan's (was the model converted or moved" in one[1]
    assert not list(tmp_path.glob("step-*"))
    assert "rank 1 could not plan its first batch" in zero[2]
    assert one[2] == "no room for this batch"
    assert all("the ranks have diverged" in r[3] for r in (zero, one))


def test_first_batches_that_differ(run_ranks):
    zero, one = (r.value for r in run_ranks(failure_cases.starts_differ, 2))
    assert "rank 1 was given 2 micro-batches, rank 0 1" in zero["messages"][0]
    assert "rank 0 was given 1 micro-batch, rank 1 2" in one["messages"][0]
    assert "the batch of rank 1 uses other layers than that of rank 0" in zero["messages"][1]
    assert "the batch of rank 0 uses other layers than that of rank 1" in one["messages"][1]
    assert zero["losses"] == one["losses"]
    assert zero["losses"][2] == pytest.approx(zero["losses"][1], rel=1e-6)


def test_a_rank_that_cannot_start_is_named_whatever_its_error(run_ranks):
    """It lives on, and so the others would wait for it."""
    results = [r.value for r in run_ranks(failure_cases.starts_break, 2, timeout=100)]
    assert results[0].pop("trains") == results[1].pop("trains")
    for place, kind in failure_cases.BREAKS.items():
        failing = int(not place.endswith("_create"))
        own, other = results[failing][place], results[1 - failing][place]
        assert own.startswith(kind.__name__), (place, own)
        assert "broken here" in own
        assert other.startswith("PeerError"), (place, other)
        assert f"rank {failing}" in other
        assert kind.__name__ in other, (place, other)
        assert "broken here" in other


@pytest.mark.parametrize("delivery", ["sharded", "replicated"])
def test_a_rank_that_fails_and_lives_is_named(run_ranks, tmp_path, delivery):
    """While it lives: after its end it would be named anyway, but not with what it said."""
    told = str(tmp_path / "told")
    zero, one = (r.value for r in run_ranks(failure_cases.one_fails_and_lives, 2, delivery, told, timeout=120))
    assert one["kind"] == "RuntimeError"
    assert "broken" in one["message"]
    assert zero["kind"] == "PeerError"
    assert "rank 1" in zero["message"]
    assert "broken" in zero["message"]


@pytest.mark.parametrize("reduction", ["gpu", "cpu"])
def test_layers_that_come_and_go(run_ranks, reduction):
    zero, one = (r.value for r in run_ranks(failure_cases.layers_come_and_go, 2, reduction, timeout=100))
    assert zero["losses"] == one["losses"]
    assert zero["weight"] == one["weight"]
    assert "other layers" in zero["message"]
    assert "other layers" in one["message"]
    torch.manual_seed(0)
    model = failure_cases.Optional()
    adam = torch.optim.AdamW([{"params": [p for n, p in model.named_parameters() if "bias" not in n], "weight_decay": 0.1},
                              {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0}],
                             lr=1e-2, betas=(0.9, 0.95))
    torch.manual_seed(1)
    for step, got in enumerate(zero["losses"]):
        x, y = torch.randn(4, 8), torch.randn(4, 1)
        adam.zero_grad(set_to_none=True)
        loss = model(x, y, torch.ones(1) if step in (1, 2, 4) else None)
        loss.backward()
        adam.step()
        assert got == pytest.approx(loss.item(), rel=1e-5)
