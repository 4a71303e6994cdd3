"""Device memory that ends in a step: layers keep less, the step goes on with the same bits, one warning; else an error."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import oom_cases
import pytest
import tiny_models
import torch
from limits import Limit, beyond, once, once_in_each
from oom_cases import NUM_STEPS, OPTIMIZER, Run
from stage_bench import AWKWARD, made
from tiny_models import PlainGPT, lm_batch, mlp_batch

import slidedp
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.ops import OpKind
from slidedp.executor.devices.backend import CpuBackend
from slidedp.executor.stages import selective
from slidedp.executor.stages.fallback import OutOfMemory, is_out_of_memory
from slidedp.executor.stages.gradients import GradientSlots

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

RETAIN = {"act": "retain"}
MIXED = {"act_slots": 1, "window": 2, "layers": {
    "L0": {"act": "retain"}, "L1": {"act": "selective"}, "L2": {"act": "offload"}, "L3": {"act": "recompute", "boundary": "host"},
    "L4": {"act": "offload"}}}  # fmt: skip


@pytest.fixture
def limit(monkeypatch):
    return Limit().install(monkeypatch)


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    return PlainGPT(width=16, layers=5, dropout=0.2)


class DropsFirst(torch.nn.Module):
    """Draws before it needs memory for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.up, self.down = torch.nn.Dropout(0.3), torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(torch.tanh(self.up(self.drop(x)))))


def train(policy: dict[str, Any], limit: Limit, **how: Any) -> Run:
    return oom_cases.train(gpt(), [lm_batch(seed=t) for t in range(NUM_STEPS)], limit, policy=policy, **how)


# ---- a device of some size ----


@pytest.fixture(scope="module")
def without_limit():
    """Digest and peak of undisturbed runs."""
    with pytest.MonkeyPatch.context() as patch:
        runs = {act: train({"act": act}, Limit().install(patch)) for act in ("recompute", "retain")}
        assert runs["recompute"].digest == runs["retain"].digest
        assert runs["retain"].peak > 3 * runs["recompute"].peak
        return runs


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("policy", [RETAIN, {"act": "offload", "act_slots": 2}], ids=["retain", "offload"])
def test_a_device_too_small_for_the_plan(limit, without_limit, policy, share):
    """Down to what a plan that recomputes everything needs: the same bits, one warning in the first step, none later."""
    low, high = (without_limit[act].peak for act in ("recompute", "retain"))
    limit.refuse = beyond(int(low + share * (high - low)))
    run = train(policy, limit)
    assert run.digest == without_limit["recompute"].digest
    assert run.peak <= low + share * (high - low)
    assert [step for step, num in enumerate(run.refused) if num] == [0] * bool(run.recomputed)
    assert len(run.warnings) == bool(run.recomputed)
    if policy == RETAIN or share == 0:
        assert run.recomputed, "it does not fit"
    if policy == RETAIN:
        assert set(run.recomputed) == {(0, f"L{i:02}") for i in range(len(run.recomputed))}, "the first layers"
        told = str(run.warnings[0].message)
        assert run.warnings[0].category is RuntimeWarning
        assert run.warnings[0].filename == oom_cases.__file__, "where the user called the plan"
        assert f"ran out of memory in {run.refused_in[0]}" in told
        assert "Tried to allocate" in told
        assert "planned 264.9 KiB of a budget of" in told
        assert f"{'L00-' * (len(run.recomputed) > 1)}L{len(run.recomputed) - 1:02} (planned: retain) recompute from" in told
        (note,) = run.memory.notes
        assert note.startswith("since step 1, for want of memory: L00")
        assert note in str(run.memory)
        assert note in " ".join(run.described.split())


def test_too_small_from_a_later_step_on_and_smaller_still(limit, without_limit):
    """Each step in which something changes has a warning of its own, and reports say how it is by then."""
    low, high = (without_limit[act].peak for act in ("recompute", "retain"))
    caps = [None, (low + high) // 2, (low + high) // 2, low]
    batches = [lm_batch(seed=t) for t in range(len(caps))]

    def before(step: int) -> None:
        limit.refuse = beyond(caps[step] or 10**9)

    def after(plan: slidedp.Plan) -> None:
        if plan._machine.num_steps in (1, 2):
            reports.append(plan.explain("window").notes)

    reports: list[tuple[str, ...]] = []
    want = oom_cases.train(gpt(), batches, Limit(), policy=RETAIN)
    run = oom_cases.train(gpt(), batches, limit, before=before, after=after, policy=RETAIN)
    assert run.digest == want.digest
    assert [step for step, num in enumerate(run.refused) if num] == [1, 3]
    assert ["step 2 ran" in str(run.warnings[0].message), "step 4 ran" in str(run.warnings[1].message)] == [True, True]
    assert len(run.warnings) == 2
    first, second = (str(w.message).partition(" (planned: retain)")[0].rpartition(" ")[2] for w in run.warnings)
    assert first.startswith("L00-L")
    assert reports == [(), (f"since step 2, for want of memory: {first} (planned: retain) recompute",)]
    assert int(second[1:3]) == int(first[-2:]) + 1, "what recomputes already is no news"


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.BACKWARD, OpKind.EPILOGUE])
def test_too_small_in_one_kind_of_op(limit, without_limit, kind):
    """Where the shortage comes first decides what is half done: nothing of it may show."""
    low, high = (without_limit[act].peak for act in ("recompute", "retain"))
    limit.refuse = beyond((low + high) // 2, kind)
    run = train(RETAIN, limit)
    assert run.digest == without_limit["recompute"].digest
    heads = {OpKind.FORWARD: "fwd", OpKind.BACKWARD: "bwd", OpKind.EPILOGUE: "epilogue"}
    assert {name.partition(".")[0] for name in run.refused_in} == {heads[kind]}
    assert len(run.warnings) == 1


def test_nothing_left_to_drop_is_an_error_with_the_numbers(limit, without_limit):
    limit.refuse = beyond(without_limit["recompute"].peak // 2, OpKind.FORWARD, OpKind.BACKWARD)
    model = gpt()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    plan = slidedp.compile(model, "cpu", optimizer=OPTIMIZER, policy=RETAIN)
    with pytest.raises(OutOfMemory, match=(
            r"^layer L\d\d \(GPTBlock\), step 1: no memory for fwd.L\d\d: CUDA out of memory. Tried to allocate \d+ bytes "
            r"\(planned 264.9 KiB of a budget of .*\). since step 1, for want of memory: L0.* recompute; no layer keeps anything "
            r".* Use a smaller batch, run the batch through each layer in pieces \(policy: slices=2\), or compile ")) as caught:
        plan.run(lm_batch(seed=0))
    assert isinstance(caught.value, torch.OutOfMemoryError), "what loops that look for it catch"
    with pytest.raises(OutOfMemory):
        plan.run(lm_batch(seed=0))
    plan.close()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_evaluate_has_nothing_to_drop(limit, without_limit):
    with slidedp.compile(gpt(), "cpu", optimizer=OPTIMIZER, policy=RETAIN, example=lm_batch()) as plan:
        limit.refuse = beyond(1000, OpKind.FORWARD)
        with pytest.raises(OutOfMemory, match=r"no memory for fwd.L00: CUDA out of memory"):
            plan.evaluate(lm_batch())
        assert not plan._current.fallback.recomputed, "training is as planned"


# ---- any allocation of a step ----


def gpts(count: int = 1) -> list[Any]:
    lanes = [[lm_batch(seed=10 * t + i, batch=1 + (t + i) % 2) for i in range(count)] for t in range(2)]
    return [lanes[t % 2] if count > 1 else lanes[t % 2][0] for t in range(4)]


ANYWHERE: dict[str, tuple[Callable[[], Any], list[Any], dict[str, Any]]] = {
    "mixed": (gpt, gpts(), {"policy": MIXED}),
    "micro-batches": (gpt, gpts(2)[:3], {"policy": {**MIXED, "act_slots": 2}, "compute_dtype": torch.bfloat16}),
    "draws": (made(lambda: torch.nn.Sequential(*(DropsFirst() for _ in range(3)), torch.nn.Linear(12, 10))),
              [mlp_batch(seed=t % 2) for t in range(4)], {"policy": RETAIN, "loss_fn": tiny_models.classification_loss}),
    **{name: (made(AWKWARD[name]), [mlp_batch(seed=t % 2) for t in range(4)],
              {"policy": RETAIN, "loss_fn": tiny_models.classification_loss})
       for name in ("batch_norm", "own_statistics", "skips", "shared")},
}  # fmt: skip


@pytest.mark.parametrize("name", ANYWHERE)
def test_any_allocation_may_fail(limit, monkeypatch, name):
    """One in every op, drawn at random: dropout, statistics, sums over uses and micro-batches are those of undisturbed steps."""
    monkeypatch.setattr(selective, "choose", lambda *_: frozenset(range(0, 200, 2)))  # not by time, so that runs are alike
    make, batches, how = ANYWHERE[name]
    made_in: list[dict[str, int]] = []
    want = oom_cases.train(make(), batches, limit, after=lambda plan: made_in.append(dict(limit.made_in)), **how)
    draw = random.Random(name)

    def before(step: int) -> None:
        limit.refuse = once_in_each({op: draw.randint(1, num) for op, num in made_in[step].items() if num})

    def after(plan: slidedp.Plan) -> None:
        if draw.random() < 0.5:
            plan._current.fallback.recomputed = {}  # as planned again

    got = oom_cases.train(make(), batches, limit, before=before, after=after, **how)
    assert sum(want.refused) == 0
    assert sum(got.refused) > 0.8 * sum(map(len, made_in)), "few ops allocate less than they have, for what is kept"
    assert {op.split(".")[0] for op in got.refused_in} >= {"prologue", "fwd", "bwd", "epilogue"}
    assert got.losses == want.losses
    assert got.digest == want.digest


def test_measuring_what_to_keep_may_not_fit(limit, monkeypatch):
    """Then nothing is kept of layers of that kind, from that step on, and nothing else is given up for it."""
    policy = {"layers": {"L0": {"act": "retain"}, "L1-L4": {"act": "selective"}}}
    want = train(policy, limit)
    limit.refuse = once(OpKind.RECOMPUTE)
    run = train(policy, limit)
    assert run.digest == want.digest
    assert set(run.recomputed) == {(0, f"L0{i}") for i in (1, 2, 3, 4)}
    assert len(run.warnings) == 1
    assert "L01-L04 (planned: selective) recompute" in str(run.warnings[0].message)


def test_a_gradient_is_never_written_twice(limit, monkeypatch):
    """Writing it takes no memory. If it did, trying again would add it again."""
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with slidedp.compile(gpt(), "cpu", optimizer=OPTIMIZER, policy=RETAIN, example=lm_batch()) as plan:
        monkeypatch.setattr(GradientSlots, "write", full)
        with pytest.raises(RuntimeError, match="a gradient that is there cannot be written"):
            plan.run(lm_batch())
    assert not limit.num_refused


def test_other_errors_are_not_taken_for_it():
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(MemoryError("host"))


# ---- before the first step; and several ranks ----


def test_no_room_for_the_plans_buffers(monkeypatch):
    def empty(self: CpuBackend, numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB")

    plan = slidedp.compile(gpt(), "cpu", optimizer=OPTIMIZER)
    monkeypatch.setattr(CpuBackend, "empty", empty)
    with pytest.raises(BudgetError, match=(
            r"device memory: there is no room for buffer \w+\[0\] of .* KiB, one of those that the plan takes before its first "
            r"step, .* in all \(CUDA out of memory. Tried to allocate 2.00 GiB\); free memory .* smaller hbm_budget")):
        plan.run(lm_batch())
    monkeypatch.undo()
    assert plan._planner.decisions is None, "nothing is settled"
    with plan:
        assert plan.run(lm_batch()).step == 1


def test_one_of_two_ranks_runs_out_of_memory(run_ranks):
    """The other one need not know; then it has no room for its buffers at all, and both say so."""
    results = [r.value for r in run_ranks(oom_cases.one_rank, 2, timeout=120)]
    assert len({r["undisturbed"] for r in results} | {r["digest"] for r in results}) == 1
    assert [r["refused"] > 0 for r in results] == [False, True]
    assert results[0]["warnings"] == []
    assert len(results[1]["warnings"]) == 1
    assert "slidedp: rank 1, step 1 ran out of memory in" in results[1]["warnings"][0]
    assert "rank 1 could not" in results[0]["told"]
    assert "there is no room for buffer" in results[1]["told"]


@pytest.mark.parametrize("delivery", ["sharded", "replicated"])
def test_a_rank_without_any_memory_leaves_no_thread_of_another_waiting(run_ranks, tmp_path, delivery):
    """One in a collective would be waiting still when Python ends, and end the process with an abort."""
    zero, one = run_ranks(oom_cases.fatal_on_one, 2, delivery, str(tmp_path / "done"), timeout=100)
    assert one.value["told"].startswith("OutOfMemory: layer L02")
    assert zero.value["told"].startswith("PeerError: rank 1 stopped the run: OutOfMemory: layer L02")
    assert zero.value["left"] == one.value["left"] == []
    assert "terminate" not in zero.output + one.output


def test_warnings_come_once_the_backward_is_over(limit):
    """Of one in the backward the user hears at the latest when the plan is closed."""
    limit.refuse = once(OpKind.BACKWARD)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with slidedp.compile(gpt(), "cpu", optimizer=OPTIMIZER, policy=RETAIN) as plan:
            plan.run(lm_batch())
    assert [w.category for w in told] == [RuntimeWarning]
