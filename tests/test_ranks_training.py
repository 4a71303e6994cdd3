"""Several ranks over gloo: the same result as one process, the same bits on every datapath, one host state, no hang."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import family_cases
import memory_cases
import pytest
import rank_cases
from tiny_models import FAMILIES

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("world", [2])
def test_against_plain_pytorch(run_ranks, world):
    """Uneven valid tokens, one rank with none, tied embedding: the bounds of the contract, norm-wise."""
    for result in run_ranks(rank_cases.against_plain_pytorch, world, 3, timeout=150):
        worst = result.value
        assert worst["losses"] < 1e-6
        assert worst["grads"] < 5e-6
        assert worst["moments"] < 1e-5
        assert worst["weight_change"] < 1e-3


BOUNDS = {"losses": 1e-6, "grads": 5e-6, "moments": 1e-5, "weight_change": 1e-3}


@pytest.mark.parametrize("world", [2, 4])
def test_every_family_against_plain_pytorch(run_ranks, world):
    """Mixed padding, uneven valid tokens, one rank with none: within the contract's bounds, and one state on all ranks."""
    results = [r.value for r in run_ranks(family_cases.families, world, timeout=170)]
    for name in FAMILIES:
        assert len({r[name]["digest"] for r in results}) == 1
        outside = {k: (v, where) for k, (v, where) in results[0][name]["worst"].items() if not v < BOUNDS[k]}
        assert outside == {}, name


@pytest.mark.slow
@pytest.mark.parametrize(("world", "full"), [(2, True), (3, False), (4, False)])
def test_datapaths_give_identical_bits(run_ranks, world, full):
    results = run_ranks(rank_cases.datapaths, world, full, timeout=170)
    for result in results:
        assert result.value["runs"] == (72 if full else 16)
        assert len(result.value["digests"]) == 1, result.value["odd"]
    assert len({r.value["digests"][0] for r in results}) == 1


@pytest.mark.slow
def test_random_delays_change_no_bit(run_ranks):
    """Delays that differ by rank and seed, ten seeds on each of the four datapaths: one digest for all of them, on both ranks."""
    results = [r.value for r in run_ranks(rank_cases.races, 2, 10, timeout=150)]
    assert len({r["undisturbed"] for r in results}) == 1
    for r in results:
        assert r["runs"] == 40
        assert r["odd"] == []
    for datapath, kinds in results[0]["kinds"].items():
        assert {k for r in results for k in r["slowed"][datapath]} == set(kinds), datapath


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


@pytest.mark.slow
def test_host_state_is_there_once(run_ranks):
    """Measured over whole processes: FP32 master and two moments, gradients and staging once, not once a rank.

    One private copy of the weights on any one rank would fail, kept or made in passing.
    """
    env = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}  # freed memory goes back: what is left is held
    results = [r.value for r in run_ranks(memory_cases.memory, 3, 256, 20, timeout=120, env=env)]
    weights, state = results[0]["parameters"], results[0]["state"]
    assert weights > 60 << 20
    assert results[0]["master"] + results[0]["moments"] >= 3 * weights
    assert sum(r["pss"] - r["slots"] for r in results) < state + weights * 3 // 4
    assert sum(r["pss"] for r in results) > state
    for rank, r in enumerate(results):
        model = weights if rank == 0 else 0  # the user's own, on rank 0, until it has been copied into place
        assert r["peak_private"] < model + r["slots"] + weights // 2
        assert r["peak_resident"] < model + state + r["slots"] + weights // 2


def test_bad_batch_on_one_rank(run_ranks):
    messages = [r.value for r in run_ranks(rank_cases.bad_batch_on_one_rank, 2)]
    assert "rank 1" in messages[0]
    assert "9999" in messages[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named(start_ranks, tmp_path, victim):
    """SIGKILL one rank in the middle of training: the others end, name it, and leave nothing behind.

    The shared state has no name in any file system: what would be left is a process that maps it or holds it open. Of
    /dev/shm it is what these ranks use that counts: other tests' processes come and go there.
    """
    ready = tmp_path / "ready"
    ranks = start_ranks(rank_cases.until_killed, 3, str(ready))
    deadline = time.monotonic() + 90
    while not all(Path(f"{ready}.{r}").exists() for r in range(3)):
        assert time.monotonic() < deadline, [ranks.output(r) for r in range(3)]
        time.sleep(0.1)
    segments = {pid: segments_of(pid) for pid in ranks.pids}
    ours = segments[ranks.pids[0]]
    assert len(ours) == 6
    assert all(held == ours for held in segments.values())
    named = set().union(*(names_in_shm(pid) for pid in ranks.pids))
    os.kill(ranks.pids[victim], signal.SIGKILL)
    ranks.wait(60, check=False)
    for rank in set(range(3)) - {victim}:
        assert ranks.poll()[rank] not in (0, None)
        assert f"rank {victim}" in ranks.output(rank), ranks.output(rank)
    assert not any(map(os.path.exists, named))
    assert {int(pid) for pid in os.listdir("/proc") if pid.isdigit() and segments_of(int(pid)) & ours} == set()


def segments_of(pid: int) -> set[int]:
    """Inodes of the shared segments (executor/shared/segment.py) that a process maps or has open; none of one that has gone."""
    return {inode for name, inode in files_of(pid) if name.startswith("/memfd:slidedp-")}


def names_in_shm(pid: int) -> set[str]:
    """Files in /dev/shm that a process maps or has open."""
    return {name for name, _ in files_of(pid) if name.startswith("/dev/shm/")}


def files_of(pid: int) -> set[tuple[str, int]]:
    """Path and inode of what a process maps or has open."""
    found = set()
    with suppress(OSError):  # gone, or another user's
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/" in line:
                found.add((line.split(maxsplit=5)[5], int(line.split()[4])))
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add((os.readlink(f"/proc/{pid}/fd/{fd}"), os.stat(f"/proc/{pid}/fd/{fd}").st_ino))
    return found
