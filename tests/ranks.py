"""Several ranks as plain processes, for tests: what torchrun does, with every log kept and nothing left behind.

Run as a program, `python ranks.py TARGET [FUNCTION]`, this file is also the entry point of one rank, and with ``--serve`` the
server that forks ranks (rank_server.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rank_server import ForkedRank, RankServer, serve

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>: the signal a process gets when its parent dies

Target = str | Path | Callable[..., object]


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. `output`: both streams. `value`: what the function returned, through JSON; None for a script."""

    rank: int
    returncode: int
    output: str
    value: Any


class RunRanks(Protocol):
    """The type of the `run_ranks` fixture, for annotations in tests."""

    def __call__(
        self, target: Target, num_ranks: int, *args: object, timeout: float = 60, env: Mapping[str, str] | None = None
    ) -> list[RankResult]: ...


class Ranks:
    """Live rank processes, each in a session of its own so that its children die with it.

    `port`: where they meet; kept from everybody else until they are killed.
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes] | ForkedRank], log_dir: Path, port: socket.socket | None = None
    ) -> None:
        self.processes = processes
        self.log_dir = log_dir
        self._port = port
        self._killed = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def poll(self) -> list[int | None]:
        """Exit codes so far; None for a rank that still runs."""
        return [process.poll() for process in self.processes]

    def output(self, rank: int) -> str:
        """What the rank has written so far, both streams together."""
        return (self.log_dir / f"rank{rank}.log").read_text(errors="replace")

    def kill(self) -> None:
        """Kill every rank with its children, and reap it. Idempotent: the ids are soon somebody else's."""
        if self._killed:
            return
        self._killed = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # ended already, its children too
                os.killpg(process.pid, signal.SIGKILL)
            if process.poll() is None:  # a fork that has no session of its own yet
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self._port is not None:
            self._port.close()

    def wait(self, timeout: float = 60, *, check: bool = True, grace: float = 10) -> list[RankResult]:
        """Wait until all have ended, then kill what they left running.

        Raises AssertionError with every log when time runs out or, with `check`, when any rank fails; the others then
        get `grace` seconds to say why they stopped too.
        """
        deadline = time.monotonic() + timeout
        first_failure: float | None = None
        while None in (codes := self.poll()) and time.monotonic() < deadline:
            if check and first_failure is None and any(codes):
                first_failure = time.monotonic()
                deadline = min(deadline, first_failure + grace)
            time.sleep(0.02)
        self.kill()
        if None in codes or (check and any(codes)):
            raise AssertionError(self._report(codes, timeout))
        return [RankResult(rank, code or 0, self.output(rank), self._value(rank)) for rank, code in enumerate(codes)]

    def _value(self, rank: int) -> Any:
        path = self.log_dir / f"rank{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _report(self, codes: list[int | None], timeout: float) -> str:
        parts = [f"ranks ended with {codes} (None: still running, killed; limit {timeout:g} s)"]
        for rank in range(len(codes)):
            parts.append(f"----- rank {rank} -----\n{self.output(rank)[-4000:]}")
        return "\n".join(parts)


def launch(
    target: Target, num_ranks: int, *args: object, log_dir: Path, server: RankServer, env: Mapping[str, str] | None = None
) -> Ranks:
    """Start `num_ranks` processes with torchrun's environment on a free local port; logs go to `log_dir`.

    They are forks of `server`; with an `env` of the test's own, which libraries may read at their start, new processes.
    """
    log_dir.mkdir(parents=True)
    if callable(target):
        if "<locals>" in target.__qualname__:
            raise ValueError(f"{target.__qualname__}: a rank can only run a module-level function")
        command = [inspect.getfile(target), target.__qualname__, json.dumps(args)]
    else:
        command = [str(target), "", json.dumps([str(arg) for arg in args])]
    port = _reserved_port()
    shared_env = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # the host's own name need not resolve in a sandbox
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port.getsockname()[1]),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    processes: list[subprocess.Popen[bytes] | ForkedRank] = []
    ranks = Ranks(processes, log_dir, port)
    try:
        for rank in range(num_ranks):
            rank_env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "SLIDEDP_TEST_RESULT": str(log_dir / f"rank{rank}.json")}
            whole_env, log = {**shared_env, **rank_env, **(env or {})}, log_dir / f"rank{rank}.log"
            if env:
                processes.append(_new_process(command, whole_env, log))
            else:
                processes.append(server.start(Path(__file__), command, whole_env, log))
    except BaseException:
        ranks.kill()
        raise
    return ranks


def start_script(path: Path, *args: object, log_dir: Path, server: RankServer) -> Ranks:
    """One process that knows of no ranks."""
    log_dir.mkdir(parents=True, exist_ok=True)
    command = [str(path), "", json.dumps([str(arg) for arg in args])]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return Ranks([server.start(Path(__file__), command, env, log_dir / "rank0.log")], log_dir)


def _new_process(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen([sys.executable, __file__, *command], stdin=subprocess.DEVNULL, stdout=file,
                                stderr=subprocess.STDOUT, env=env, start_new_session=True)


def _reserved_port() -> socket.socket:
    """A local port that the system gives to nobody who asks for any while the socket is open; rank 0 can listen on it all the
    same, for both allow the address to be used again and this one does not listen. (Of a port that is only known to have been
    free, another test's ranks, or a connection of theirs, would sometimes have got hold before rank 0.)
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port


def _die_with_parent() -> None:
    """A killed pytest leaves no ranks behind, and no server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _main(path: str, function: str, json_args: str) -> None:
    """One rank: run the script, or call the function and leave its result where the parent looks for it."""
    _die_with_parent()
    args = json.loads(json_args)
    if not function:
        sys.argv = [path, *args]
        sys.path.insert(0, str(Path(path).parent))  # as for any script: its neighbours can be imported
        runpy.run_path(path, run_name="__main__")
        return
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    value = getattr(module, function)(*args)
    Path(os.environ["SLIDEDP_TEST_RESULT"]).write_text(json.dumps(value))


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _die_with_parent()
        sys.argv[1:] = serve()
    _main(*sys.argv[1:])
