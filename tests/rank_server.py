"""Forks ranks from a process that has imported what they import: a rank begins in milliseconds, not after 5 s of imports.

    RankServer   in pytest: starts that process, and asks it to start ranks
    ForkedRank   one of them, with the methods of a `subprocess.Popen` that tests use
    serve        in that process: answers; returns in a rank

The server never runs torch, so that no thread and no CUDA context is there at a fork. What it has imported is frozen
(`gc.freeze`): collections, and above all the one with which Python ends, would look at all of it in every rank, and copy its
pages, which takes longer than most ranks do anything else. Requests and answers are one line of JSON each; a rank's end is for
the server to see, since it is the parent.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PRELOADED = ("torch.distributed", "torch.utils.cpp_extension", "safetensors.torch", "tiny_models", "slidedp", "pytest")
"""`tiny_models`: the Hugging Face models. `torch.utils.cpp_extension`: what the update's kernel is looked for with."""


class RankServer:
    """Started by the first rank; ended by :meth:`close`, and with pytest."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, program: Path, arguments: list[str], env: dict[str, str], log: Path) -> ForkedRank:
        """A fork that goes on as ``python program arguments``. Both of its streams go to `log`."""
        if self._process is None:
            command = [sys.executable, str(program), "--serve"]
            # NVML: asking whether there is a GPU must not leave a CUDA context, which no fork could use
            self._process = subprocess.Popen(command, env={**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, text=True,
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        return ForkedRank(self, self.ask("start", arguments, env, str(log)))

    def ask(self, *request: object) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of ranks has ended with {self._process.wait()}; its own words are above")
        return json.loads(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


class ForkedRank:
    def __init__(self, server: RankServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask("poll", self.pid)
        return self.returncode

    def wait(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask("wait", self.pid)
        return self.returncode


def serve() -> list[str]:
    """Answers requests until there are no more. In a rank: returns what it is to do, as its ``sys.argv[1:]``."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    requests, answers = os.fdopen(os.dup(0)), os.dup(1)
    for line in requests:
        what, *rest = json.loads(line)
        if what == "start":
            arguments, env, log = rest
            answer = os.fork()
            if answer == 0:
                requests.close()
                os.close(answers)
                _become_rank(env, log)
                return arguments
        else:
            pid, status = os.waitpid(rest[0], os.WNOHANG if what == "poll" else 0)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        os.write(answers, json.dumps(answer).encode() + b"\n")
    os._exit(0)  # at once: nothing that was imported has anything to finish


def _become_rank(env: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for number, file, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        opened = os.open(file, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
