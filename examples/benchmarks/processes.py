"""One process a rank, as torchrun starts them but without its agent, which ends the others when one is killed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.2
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass
class Outcome:
    """`lines`: the JSON that rank 0 has printed; `others`: what the other ranks have. `problem`: "" if all ranks have ended well.
    `host_gib`: the most by which the memory that the machine had available went down meanwhile, whoever took it.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    problem: str = ""
    host_gib: float = 0.0


def run_ranks(command: Sequence[str], world: int, *, limit_s: float, grace_s: float = 20,
              on_line: Callable[[str], object] | None = None) -> Outcome:
    """Runs `command` once a rank, and kills what is left of them after `limit_s`, or `grace_s` after one has failed.

    `on_line`: is told each line of rank 0 as it comes. Of the others' lines only JSON and the last words of a failure are kept.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world),
           "LOCAL_WORLD_SIZE": str(world), "PYTHONUNBUFFERED": "1"}
    outcome, began_with = Outcome(), available_gib()
    with tempfile.TemporaryDirectory(prefix="slidedp-bench-") as folder:
        logs = [Path(folder) / f"rank{r}" for r in range(world)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for r, log in enumerate(logs):
                with open(log, "wb") as file:
                    ranks.append(subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=file,
                                                  stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
            deadline, failed = time.monotonic() + limit_s, False
            with open(logs[0]) as output:
                rest = ""
                while True:
                    running = any(rank.poll() is None for rank in ranks)  # before the last look at what they wrote
                    outcome.host_gib = max(outcome.host_gib, began_with - available_gib())
                    *lines, rest = (rest + output.read()).split("\n")
                    for line in lines:
                        if on_line:
                            on_line(line)
                        if line.startswith("{"):
                            outcome.lines.append(json.loads(line))
                    if not running or time.monotonic() >= deadline:
                        break
                    if not failed and any(rank.poll() for rank in ranks):
                        failed, deadline = True, min(deadline, time.monotonic() + grace_s)
                    time.sleep(POLL_S)
        finally:
            in_time = [rank.poll() for rank in ranks]
            for rank in ranks:
                rank.kill()
            outcome.codes = [rank.wait() for rank in ranks]
        outcome.problem = problem_of(in_time, logs, limit_s)
        outcome.others = [json.loads(line) for log in logs[1:] for line in log.read_text(errors="replace").splitlines()
                          if line.startswith("{")]
    return outcome


def problem_of(codes: Sequence[int | None], logs: Sequence[Path], limit_s: float) -> str:
    """In one line: who failed first in rank order, and its last words; or that time was up."""
    for rank, (code, log) in enumerate(zip(codes, logs, strict=True)):
        if code:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not line.startswith("{")]
            return f"rank {rank} ended with {code}: {said[-1].strip() if said else 'it has said nothing'}"
    return f"not done after {limit_s:g} s: ended" if None in codes else ""


def this_rank() -> tuple[int, int]:
    """Rank and number of ranks of a process that :func:`run_ranks` has started; it dies with the one that did."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def available_gib() -> float:
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("MemAvailable:")) / 2**20
