"""Shared test set-up: offline, two threads at most, `--update-golden`, and `run_ranks` for tests of several processes.

Marks say what a test needs: `null` nothing (pure compiler), `cpu` threads or gloo ranks, `gpu` a CUDA device.
"""

from __future__ import annotations

import os

# Before anything imports huggingface_hub or an OpenMP runtime: both read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else threads that wait take a core from the worker beside them
os.environ["SLIDEDP_CACHE"] = ""  # no test sees another's plans, and nothing is left in the home directory
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matmuls for the tests that ask for them

import difflib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rank_server import RankServer
from ranks import RankResult, Ranks, RunRanks, Target, launch, start_script

REPO = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden instead of comparing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow` tests come first. A `gpu` test is skipped, with its reason, where there is no CUDA device."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Two threads at most, one beside another worker: more would only fight over the cores that CI has."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(min(2, os.cpu_count() or 1) // workers, 1))


@pytest.fixture(autouse=True, scope="session")
def _imports_frozen() -> None:
    """What all test modules have imported stays: tests that collect garbage need not look at it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of tiny models: a second thread would only spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Also what a test before, which has failed, may have left of torch's modes."""
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


@pytest.fixture
def repo_root() -> Path:
    return REPO


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` equals tests/golden/`name`; `--update-golden` writes it there instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"{path} does not exist; run pytest --update-golden and read the new file before committing it")
        want = path.read_text()
        if want != text:
            lines = difflib.unified_diff(want.splitlines(), text.splitlines(), str(path), "now", lineterm="")
            pytest.fail("\n".join(lines) + "\n(pytest --update-golden accepts the new text)", pytrace=False)

    return check


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def start_ranks(tmp_path: Path, rank_server: RankServer) -> Iterator[Callable[..., Ranks]]:
    """`start_ranks(target, n, *args, env=None)`: the live `Ranks`, for tests that kill one. Killed at the test's end."""
    started: list[Ranks] = []

    def start(target: Target, num_ranks: int, *args: object, env: Mapping[str, str] | None = None) -> Ranks:
        ranks = launch(target, num_ranks, *args, log_dir=tmp_path / f"ranks{len(started)}", server=rank_server, env=env)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture
def run_ranks(start_ranks: Callable[..., Ranks]) -> RunRanks:
    """`run_ranks(target, n, *args, timeout=60, env=None)`: what torchrun does, with every rank's log in the failure.

    `target`: a script's path (args become its argv) or a module-level function (args and result travel as JSON).
    Returns one `RankResult` a rank, in rank order. A rank that fails or hangs fails the test, all processes killed.
    """

    def run(
        target: Target, num_ranks: int, *args: object, timeout: float = 60, env: Mapping[str, str] | None = None
    ) -> list[RankResult]:
        return start_ranks(target, num_ranks, *args, env=env).wait(timeout)

    return run


@pytest.fixture
def run_script(tmp_path: Path, rank_server: RankServer) -> Callable[..., str]:
    """`run_script(path, *args, timeout=150)`: all that the program has written, run alone. If it fails the test does."""

    def run(path: Path, *args: object, timeout: float = 150) -> str:
        return start_script(path, *args, log_dir=tmp_path / "script", server=rank_server).wait(timeout)[0].output

    return run


@pytest.fixture
def quick_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF files are read as they are, in a fifth of the time: once and not for configuration, tokenizer and model each; through
    a plain array, for a memmap is slow to slice; and a name map is made once, not for each submodule. The test that runs the
    quickstart does without the array, as the quickstart does.
    """

    import gguf  # not above: GPU machines do without it

    def mapped(*args: object, **how: object) -> np.ndarray:
        return np.memmap(*args, **how).view(np.ndarray)

    monkeypatch.setattr("gguf.gguf_reader.np", SimpleNamespace(**{**vars(np), "memmap": mapped}))
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
