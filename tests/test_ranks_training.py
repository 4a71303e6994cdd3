"""Several ranks over gloo: the same result as one process, the same bits on every datapath, one host state, no hang."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import rank_cases

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("world", [2, 4])
def test_against_plain_pytorch(run_ranks, world):
    """Uneven valid tokens, one rank with none, tied embedding: the bounds of the contract, norm-wise."""
    for result in run_ranks(rank_cases.against_plain_pytorch, world, 3, timeout=150):
        worst = result.value
        assert worst["losses"] < 1e-6
        assert worst["grads"] < 5e-6
        assert worst["moments"] < 1e-5
        assert worst["weight_change"] < 1e-3


@pytest.mark.parametrize(("world", "full"), [(2, True), (3, False), (4, False)])
def test_datapaths_give_identical_bits(run_ranks, world, full):
    results = run_ranks(rank_cases.datapaths, world, full, timeout=170)
    for result in results:
        assert result.value["runs"] == (72 if full else 32)
        assert len(result.value["digests"]) == 1, result.value["odd"]
    assert len({r.value["digests"][0] for r in results}) == 1


def test_each_rank_delivers_and_updates_its_part(run_ranks):
    """Counted where copies and kernels are called: 1/N of the deliveries (sharded), of the returns and of the updates."""
    half = partial(pytest.approx, rel=0.01)  # groups are padded to whole shards
    one = run_ranks(rank_cases.counters, 1)[0].value
    two = [r.value for r in run_ranks(rank_cases.counters, 2)]
    for value in two:
        assert value["sharded"]["h2d"] == half(one["sharded"]["h2d"] / 2)
        assert value["sharded"]["all_gather"] == half(one["sharded"]["h2d"] / 2)
        assert value["replicated"]["h2d"] == half(one["replicated"]["h2d"])
        for delivery in ("sharded", "replicated"):
            assert value[delivery]["d2h"] == half(one[delivery]["d2h"] / 2)
            assert value[delivery]["cpu_update"] == half(one[delivery]["cpu_update"] / 2)
    assert one["sharded"]["cpu_update"] >= 2 * one["model"]["params"]


def test_host_state_is_there_once(run_ranks):
    """Proportional set size over all ranks: FP32 master and two moments, gradients and staging once, not once a rank."""
    results = [r.value for r in run_ranks(rank_cases.memory, 3, 512, 4, timeout=120)]
    total, everything = sum(r["pss"] for r in results), results[0]["all"]
    assert results[0]["master"] + results[0]["moments"] >= 12 * results[0]["params"]
    assert total < 1.1 * everything + (8 << 20)
    assert total > 0.9 * 12 * results[0]["params"]


def test_bad_batch_on_one_rank(run_ranks):
    messages = [r.value for r in run_ranks(rank_cases.bad_batch_on_one_rank, 2)]
    assert "rank 1" in messages[0]
    assert "9999" in messages[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named(start_ranks, tmp_path, victim):
    """SIGKILL one rank in the middle of training: the others end within 30 s, name it, and leave nothing behind."""
    before = set(os.listdir("/dev/shm"))
    ready = tmp_path / "ready"
    ranks = start_ranks(rank_cases.until_killed, 3, str(ready))
    deadline = time.monotonic() + 90
    while not all(Path(f"{ready}.{r}").exists() for r in range(3)):
        assert time.monotonic() < deadline, [ranks.output(r) for r in range(3)]
        time.sleep(0.1)
    os.kill(ranks.pids[victim], signal.SIGKILL)
    ranks.wait(30, check=False)
    for rank in set(range(3)) - {victim}:
        assert ranks.poll()[rank] not in (0, None)
        assert f"rank {victim}" in ranks.output(rank), ranks.output(rank)
    assert set(os.listdir("/dev/shm")) <= before
