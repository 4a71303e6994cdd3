"""Optimizer state in the HBM of several ranks: sharded, the same bits, and one rank alone may read or write the model."""

from __future__ import annotations

import pytest
import resident_cases

pytestmark = pytest.mark.cpu


def test_the_same_bits_as_on_the_host(run_ranks):
    """Whatever lives where, and under delays that differ by rank."""
    results = [r.value for r in run_ranks(resident_cases.bits, 2, timeout=120)]
    assert len({r["digest"] for r in results}) == 1
    for r in results:
        assert r["odd"] == []
    assert {k for r in results for k in r["slowed"]} == set(results[0]["kinds"])


def test_the_fused_update_and_the_model(run_ranks):
    """Within the contract's bounds, half a rank, nothing over the host; and rank 0 alone reads and writes the model."""
    zero, one = (r.value for r in run_ranks(resident_cases.fused_and_model, 2, timeout=90))
    for worst in (zero["fused"], one["fused"]):
        assert worst["losses"] < 1e-6
        assert worst["moments"] < 1e-5
        assert worst["weight_change"] < 1e-3
        assert set(worst["counters"]) == {"gpu_update", "reduce", "all_gather"}
        assert worst["counters"]["all_gather"] == 4 * worst["counters"]["gpu_update"], "FP32: as many bytes as the other half has"
    zero, one = zero["model"], one["model"]
    assert zero["moved"]
    assert zero["closed"]
    for seen in (zero, one):
        assert seen["again"] == seen["first"] == zero["first"]
    assert zero["evaluated"] == one["evaluated"] != zero["first"]
