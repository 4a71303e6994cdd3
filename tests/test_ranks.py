"""The launcher that other tests lean on: results in rank order, logs in the failure, nothing left running."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Ranks, RunRanks

pytestmark = pytest.mark.cpu


def _sum_of_ranks(scale: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() * scale)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def _one_fails_one_hangs() -> None:
    if os.environ["RANK"] == "0":
        sys.exit("rank 0 says why")
    time.sleep(60)


def _sleep() -> None:
    time.sleep(60)


def test_ranks_meet_and_return_values(run_ranks: RunRanks) -> None:
    assert [result.value for result in run_ranks(_sum_of_ranks, 2, 10)] == [10, 10]


def test_script_gets_its_arguments(run_ranks: RunRanks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['RANK'], os.environ['WORLD_SIZE'])")
    results = run_ranks(script, 2, "--steps", 3)
    assert [result.output.strip() for result in results] == [f"['--steps', '3'] {rank} 2" for rank in range(2)]


def test_failure_shows_the_logs_and_ends_the_rest(start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks(_one_fails_one_hangs, 2)
    with pytest.raises(AssertionError, match="rank 0 says why"):
        ranks.wait(30, grace=0.2)
    assert ranks.poll() == [1, -9]


def test_time_limit_kills_every_rank(start_ranks: Callable[..., Ranks]) -> None:
    ranks = start_ranks(_sleep, 2)
    with pytest.raises(AssertionError, match="None, None"):
        ranks.wait(0.5)
    assert ranks.poll() == [-9, -9]
