"""Saving beside training: the bytes of a save that everybody waits for, and a training run that nobody can tell apart."""

from __future__ import annotations

import math
import re
import threading
import zlib
from functools import cache

import pytest
import rank_cases
import torch
from async_save_cases import POLICIES, SMALL, HeldFiles, SlowFiles, compiled, files_of, frozen_in_part
from delays import Delays
from safetensors.torch import load_file
from tiny_models import lm_batch
from training import state_of

from slidedp.executor.checkpoints.checkpoint_files import complete
from slidedp.executor.checkpoints.snapshot import SMALLEST_BUFFER_BYTES
from slidedp.executor.options import MachineOptions

pytestmark = pytest.mark.cpu


def train(plan, save, then=lambda handle: None, steps=5, at=2):
    """Digest of losses and final state; what `save(plan)` gave after step `at`, with the other steps at once behind it.

    `then`: called with that, after the first of them.
    """
    torch.manual_seed(5)
    with plan:
        losses = []
        for step in range(steps):
            losses.append(plan.run(lm_batch(seed=step)).loss)
            if step + 1 == at:
                handle = save(plan)
            if step == at:
                then(handle)
        trained = state_of(plan)
        trained.losses = losses
    return trained.digest(), handle


@pytest.fixture(scope="module")
def saved_alone(tmp_path_factory):
    """By policy and kernel: the files of a save that training waited for, and the digest of the run."""
    known = {}

    def get(policy, kernel):
        if (policy, kernel) not in known:
            folder = tmp_path_factory.mktemp("alone")
            plan = compiled(POLICIES[policy], update_kernel=kernel)
            digest, path = train(plan, lambda p: p.save(folder, extra={"position": 2}))
            known[policy, kernel] = files_of(path), digest
        return known[policy, kernel]

    return get


def beside(folder, **options):
    return lambda plan: plan.save(folder, extra={"position": 2}, wait=False, **options)


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bytes_and_same_training(tmp_path, saved_alone, monkeypatch, policy, kernel):
    """The buffer is small and the disk not ready, so that updates have to wait for it, which is told."""
    files = HeldFiles()
    monkeypatch.setattr("slidedp.plan.FileLayer", lambda: files)
    plan = compiled(POLICIES[policy], update_kernel=kernel)
    digest, handle = train(plan, beside(tmp_path, save_buffer=SMALL), files.release)
    assert plan.counters()["save_stall_us"] == int(1e6 * handle.stall_s)
    want_files, want_digest = saved_alone(policy, kernel)
    assert digest == want_digest
    assert handle.done
    assert files_of(handle.path) == want_files
    assert 0 < handle.stall_s < 60
    assert handle.num_bytes == 4 * sum(
        p.numel() * (3 if p.requires_grad else 1) for p in frozen_in_part().parameters())


@pytest.mark.parametrize("seed", range(6))
def test_random_delays_change_no_byte(tmp_path, saved_alone, seed):
    delays = Delays(kinds_of_ops("host"), turn=seed + 4 * (seed % 2), seed=seed)
    plan = compiled(POLICIES["host"], MachineOptions(delay=delays, poison=True, update_kernel="torch"))
    digest, handle = train(plan, beside(tmp_path, save_buffer=(SMALLEST_BUFFER_BYTES, SMALL, "1GiB")[seed % 3]))
    want_files, want_digest = saved_alone("host", "torch")
    assert digest == want_digest
    assert files_of(handle.path) == want_files


@cache
def kinds_of_ops(policy):
    with compiled(POLICIES[policy], example=lm_batch()) as plan:
        return {op.name: op.kind for op in plan._spec.saving_graph}


def test_without_its_edges_the_files_are_of_another_step(tmp_path, saved_alone, monkeypatch):
    """The tests above can fail: updates that do not wait for their snapshot overwrite what it was to read."""
    files, updated = HeldFiles(), threading.Event()
    monkeypatch.setattr("slidedp.plan.FileLayer", lambda: files)

    def watch(name, stream, start, end):
        if name.startswith("cpu_update.L00") and complete_or_begun(tmp_path):
            updated.set()

    plan = compiled(POLICIES["host"], MachineOptions(trace=watch, update_kernel="native"))
    plan._start(lm_batch(seed=0))
    graph = plan._current.saving_graph
    cut = tuple(e for e in graph.edges if not e.src.startswith("snapshot"))
    plan._current.__dict__["saving_graph"] = graph.with_(edges=cut)

    digest, handle = train(plan, beside(tmp_path, save_buffer=SMALLEST_BUFFER_BYTES),
                           lambda handle: updated.wait(60) and files.go_on.set())
    want_files, want_digest = saved_alone("host", "native")
    assert digest == want_digest
    assert files_of(handle.path).keys() == want_files.keys()
    assert files_of(handle.path) != want_files


def complete_or_begun(folder):
    return next(folder.iterdir(), None) is not None


def test_a_save_needs_no_step_and_close_waits_for_it(tmp_path, monkeypatch):
    files = HeldFiles()
    monkeypatch.setattr("slidedp.plan.FileLayer", lambda: files)
    with compiled({}) as plan:
        plan.run(lm_batch())
        handle = plan.save(tmp_path, wait=False, save_buffer=SMALL)
        assert not handle.done
        assert not complete(tmp_path)
        files.go_on.set()
    assert handle.done
    assert handle.stall_s == 0
    assert complete(tmp_path) == [handle.path] == [handle.wait()]
    with compiled({}) as plan:
        assert plan.resume(tmp_path).step == 1


def test_the_next_save_and_the_model_wait(tmp_path, monkeypatch):
    """What is written into `plan.model` after a save has begun does not get into it."""
    monkeypatch.setattr("slidedp.plan.FileLayer", SlowFiles)
    with compiled({}) as plan:
        plan.run(lm_batch())
        path = plan.save(tmp_path)
        first = plan.save(tmp_path, wait=False, save_buffer=SMALL)
        with torch.no_grad():
            for p in plan.model.parameters():
                p.zero_()
        assert plan.counters().get("save_stall_us", 0) == 0
        second = plan.save(tmp_path, wait=False, keep=3)
        assert first.done
        assert files_of(first.path) == files_of(path)
        assert files_of(second.wait()) != files_of(path)


def test_ranks_save_beside_training(run_ranks, tmp_path):
    """Two ranks, state here and there, random delays: see the function."""
    zero, one = (r.value for r in run_ranks(rank_cases.saves_beside_training, 2, str(tmp_path), timeout=200))
    assert zero["digests"][0] == zero["digests"][1] == one["digests"][1]
    alone, beside_training = (files_of(tmp_path / name / "step-00000002") for name in ("alone", "beside"))
    assert beside_training == alone
    assert "rank 1 trains while rank 0 saves" in zero["misused"]
    assert "rank 0 saves while rank 1 trains" in one["misused"]
    assert "No space left" in one["full"]
    assert re.search("has failed.* rank 1", zero["full"])
    assert [p.name for p in complete(tmp_path / "beside")] == ["step-00000002"]
    assert zero["after"] == one["after"] == 7
    for wait in (True, False):
        assert "JSON" in zero[f"extra {wait}"]
        assert "rank 0 failed; see its own error" in one[f"extra {wait}"]
    assert "has failed on rank 1; see its own error" in zero["heard"]
    assert "No space left" in one["heard"]


def test_one_thread_saves(tmp_path):
    """Nothing is left of it, whether or not a progress bar was the process's first: tqdm keeps a thread from then on."""
    before = threading.enumerate()
    with compiled({}) as plan:
        plan.run(lm_batch())
        plan.save(tmp_path, wait=False)
    assert [t.name for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"] == []


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_save_is_of_the_step_that_it_says(tmp_path, num_steps):
    """Whichever of the two sides of groups that speculate it has left its state on, and whichever was looked at last."""
    with compiled({"update": "speculative"}, max_grad_norm=math.inf, solver="rule", update_kernel="torch") as plan:
        for step in range(num_steps):
            plan.run(lm_batch(seed=step))
        path = plan.save(tmp_path / "beside", wait=False).wait()
        assert weights_and_moments(path) == weights_and_moments(plan.save(tmp_path / "alone"))


@pytest.mark.parametrize("state", ["host", "hbm"])
def test_what_was_written_into_the_model_is_saved(tmp_path, state):
    with compiled({"state": state}, solver="rule") as plan:
        plan.run(lm_batch())
        with torch.no_grad():
            for p in plan.model.parameters():
                p.fill_(0.5)
        path = plan.save(tmp_path, wait=False).wait()
        assert all((t == 0.5).all() for file in path.glob("model*.safetensors") for t in load_file(file).values())
        with torch.no_grad():
            for p in plan.model.parameters():
                p.fill_(0.25)
        plan.run(lm_batch())
        assert all(abs(p - 0.25).max() < 0.1 for p in plan.model.parameters()), "written after the save, and counts"


def test_a_resumed_state_is_saved_without_a_step(tmp_path):
    with compiled(POLICIES["mixed"]) as plan:
        plan.run(lm_batch(seed=0))
        first = plan.save(tmp_path / "first")
        plan.run(lm_batch(seed=1))
        plan.resume(tmp_path / "first")
        again = plan.save(tmp_path / "again", wait=False).wait()
        assert weights_and_moments(again) == weights_and_moments(first)


def weights_and_moments(path):
    return {name: zlib.crc32(t.numpy().tobytes()) for file in path.glob("mo*.safetensors") for name, t in load_file(file).items()}
