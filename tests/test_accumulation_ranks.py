"""Micro-batches on several ranks: the mean is over the tokens of all, and what differs between ranks never hangs."""

from __future__ import annotations

import lane_cases
import pytest

pytestmark = pytest.mark.cpu
BOUNDS = {"losses": 1e-6, "grads": 5e-6, "moments": 1e-5, "weight_change": 1e-3}


def test_micro_batches_of_two_ranks(run_ranks):
    """Unlike sizes and numbers of valid tokens, ranks without any; every route, delays and all, gives the same bits."""
    results = [r.value for r in run_ranks(lane_cases.micro_batches, 2, timeout=170)]
    assert {k: v for k, v in results[0]["worst"].items() if not v < BOUNDS[k]} == {}
    assert len({digest for r in results for digest in r["digests"]}) == 1
    assert results[0]["sliced"] < 1e-5


def test_ranks_must_give_as_many(run_ranks):
    results = [r.value for r in run_ranks(lane_cases.unlike_numbers, 2, timeout=120)]
    assert all("rank 1 was given 2 micro-batches, rank 0 1" in r["told"] or
               "rank 0 was given 1 micro-batch, rank 1 2" in r["told"] for r in results)  # fmt: skip
    assert [r["step"] for r in results] == [2, 2]
    assert results[0]["norm"] == results[1]["norm"]
    assert results[0]["loss"] == results[1]["loss"]
