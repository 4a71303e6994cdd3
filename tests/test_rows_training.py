"""Rows of an embedding that no batch looks up are updated early: the same bits as of whole tables."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import groupby, pairwise, product

import pytest
import torch
from delays import Delays, each_kind_slow
from ranks import RunRanks
from test_adam import needs_native
from tiny_models import Blocks, PlainGPT, family, lm_batch, no_glue
from torch import Tensor, nn
from training import state_of, traced_once

import slidedp
from slidedp.compiler.decisions import Decisions, GroupDecision, Rows, Source
from slidedp.compiler.layergraph import Group, Lookup, Param
from slidedp.compiler.ops import OpKind, RowSet
from slidedp.compiler.optimizer import AdamW
from slidedp.executor.optim.adam import CpuAdam, NonFiniteGradient
from slidedp.executor.options import MachineOptions
from slidedp.executor.stages.stages import StageRunner
from slidedp.executor.state.host_state import HostState

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)


# ---- the kernel

NUM_ROWS, WIDTH = 3000, 50
NUMEL = -(-NUM_ROWS * WIDTH // 64) * 64


def table_state() -> tuple[HostState, CpuAdam]:
    group = Group("E", NUMEL, NUMEL, ("prologue",), (Param(("E.weight",), (NUM_ROWS, WIDTH), 0),))
    state = HostState((group,), Decisions({"E": GroupDecision(source=Source.SHADOW)}), rank=0, world_size=1,
                      compute_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, num_words=1, split_rows=("E",))
    generator = torch.Generator().manual_seed(0)
    state.load({"E.weight": torch.randn(NUM_ROWS, WIDTH, generator=generator)})
    return state, CpuAdam(state, [group], AdamW(lr=3e-3), kernel="native", num_threads=2)


@needs_native
@pytest.mark.parametrize("no_gradient", [False, True])
def test_halves_are_the_whole_to_the_bit(no_gradient):
    """Neither half reads the other's gradient, which is NaN meanwhile; chunks are cut within rows; every step has other rows."""
    (halves, adam), (whole, reference) = table_state(), table_state()
    generator = torch.Generator().manual_seed(1)
    cuts = [0, 64 * 700, 64 * 701, NUMEL]
    for step in range(1, 5):
        ids = torch.randint(NUM_ROWS, (300,), generator=generator)
        touched = torch.zeros(NUM_ROWS, dtype=torch.bool)
        touched[ids] = True
        touched = touched.repeat_interleave(WIDTH)
        gradient = torch.randn(NUM_ROWS * WIDTH, generator=generator).bfloat16() * (touched if no_gradient else 1)
        whole.grad["E"][: NUM_ROWS * WIDTH] = gradient
        halves.mark_rows(step, [Lookup("E", ("a", "b"), NUM_ROWS, 300)], {"a": ids[:100].view(10, 10), "b": ids[100:].int()})
        for lo, hi in pairwise(cuts):
            reference.update("E", lo, hi, step)
        for rows, wanted in ((RowSet.UNTOUCHED, ~touched), (RowSet.TOUCHED, touched)):
            missing = no_gradient and rows is RowSet.UNTOUCHED
            halves.grad["E"][: NUM_ROWS * WIDTH] = torch.where(wanted & (not missing), gradient, torch.nan)
            for lo, hi in pairwise(cuts):
                adam.update("E", lo, hi, step, rows=rows, no_gradient=missing)
        for part in ("master", "exp_avg", "exp_avg_sq", "shadow"):
            assert torch.equal(getattr(halves, part)["E"], getattr(whole, part)["E"]), (step, part)
        assert adam.steps == reference.steps == {"E.weight": step}
    halves.close()
    whole.close()


@needs_native
@pytest.mark.parametrize("rows", [RowSet.TOUCHED, RowSet.UNTOUCHED])
def test_a_gradient_that_is_not_finite_is_found_in_its_half(rows):
    state, adam = table_state()
    state.grad["E"].fill_(1.0)
    ids = torch.arange(0, NUM_ROWS, 2)
    state.mark_rows(1, [Lookup("E", ("ids",), NUM_ROWS, len(ids))], {"ids": ids})
    bad = 1000 if rows is RowSet.TOUCHED else 1001
    state.grad["E"][bad * WIDTH + 7] = torch.inf
    before = state.master["E"].clone()
    with pytest.raises(NonFiniteGradient, match=r"E\.weight"):
        adam.update("E", 0, NUMEL, 1, rows=rows)
    assert torch.equal(state.master["E"][bad * WIDTH : (bad + 1) * WIDTH], before[bad * WIDTH : (bad + 1) * WIDTH])
    other = RowSet.UNTOUCHED if rows is RowSet.TOUCHED else RowSet.TOUCHED
    adam.update("E", 0, NUMEL, 1, rows=other)
    state.close()


# ---- training


def batch_of(step: int, rank: int = 0, padding: str = "none") -> dict[str, Tensor]:
    """Ids from a window that moves with the step and comes back, some of them many times."""
    batch = lm_batch(padding, seed=10 * step + rank)
    batch["input_ids"] = 3 + 30 * ((step + rank) % 3) + batch["input_ids"] % 20
    batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], batch["input_ids"])
    return batch


MODELS = {"gpt": lambda: PlainGPT(width=36), "untied": lambda: Blocks(no_glue), "qwen3": lambda: family("qwen3"),
          "llama": lambda: family("llama"), "gpt2": lambda: family("gpt2")}  # fmt: skip


def plan_of(name, rows, options, kernel="native", **policy):
    torch.manual_seed(0)
    plan = slidedp.compile(MODELS[name](), "cpu", optimizer=OPTIMIZER, policy={"chunks": 3, **policy, "rows": rows},
                           update_kernel=kernel)
    plan._options = replace(options, update_kernel=kernel)
    return plan


def digest_of(plan, padding="none"):
    """Of four steps with nothing between them that waits."""
    losses = [plan.run(batch_of(t, padding=padding)).loss for t in range(4)]
    trained = state_of(plan)
    trained.losses = losses
    return trained.digest()


def run(name, rows, options=MachineOptions(), padding="none", **how):  # noqa: B008  (frozen)
    with plan_of(name, rows, options, **how) as plan:
        return digest_of(plan, padding), plan._spec.graph


@needs_native
@pytest.mark.parametrize(("name", "padding"), [("gpt", "none"), ("untied", "none"), ("gpt2", "none"), ("qwen3", "padded"),
                                               ("llama", "padded")])
def test_bits_are_those_of_the_whole_update(name, padding):
    want, whole = run(name, "whole", padding=padding)
    assert not any(ref.rows for op in whole for ref in op.writes)
    for source in Source:
        got, graph = run(name, "split", padding=padding, source=source)
        assert any(op.name.startswith("cpu_update.early.") for op in graph)
        assert got == want


@needs_native
@pytest.mark.parametrize("name", ["gpt", "untied"])
def test_random_delays_change_no_bit(name):
    """Every kind of op is the slow one in some run; released slots are filled with NaN. And the queues give the same bits."""
    want, _ = run(name, "whole")
    for source in Source:
        assert run(name, "split", MachineOptions(native_queue=False), window=2, source=source)[0] == want
        with plan_of(name, "split", MachineOptions(), window=2, source=source) as plan:
            assert each_kind_slow(plan, batch_of(0), digest_of) == dict.fromkeys({op.kind for op in plan._spec.graph}, want)
    assert run(name, "split", MachineOptions(poison=True))[0] == want


@pytest.mark.parametrize("name", ["gpt", "untied"])
def test_torch_kernel_updates_the_whole(name):
    assert run(name, "split", kernel="torch")[0] == run(name, "whole", kernel="torch")[0]


@needs_native
@pytest.mark.parametrize("name", ["gpt", "untied"])
def test_early_updates_run_before_the_backward_ends(name, monkeypatch):
    """The prologue's backward of the first step is held until every early update is done: they wait for nothing of it."""
    early, in_time = threading.Semaphore(0), []
    backward = StageRunner.backward

    def held(self, stage, *args):
        if stage == "prologue" and not in_time:
            in_time.append(all(early.acquire(timeout=60) for _ in range(3)))
        return backward(self, stage, *args)

    def watch(op, stream, start, end):
        if op.startswith("cpu_update.early."):
            early.release()

    monkeypatch.setattr(StageRunner, "backward", held)
    got, _ = run(name, "split", MachineOptions(trace=watch))
    assert in_time == [True]
    monkeypatch.undo()
    assert got == run(name, "whole")[0]


@needs_native
def test_shapes_share_the_masks():
    """Further specialisations, with other numbers of rows touched, and an evaluation between steps."""

    def train(rows):
        torch.manual_seed(0)
        with slidedp.compile(PlainGPT(), "cpu", optimizer=OPTIMIZER, policy={"rows": rows}, update_kernel="native") as plan:
            for t, (batch, seq) in enumerate([(2, 10), (8, 30), (1, 5), (2, 10)]):
                plan.run(lm_batch(seed=t, batch=batch, seq=seq))
                plan.evaluate(lm_batch(seed=99))
            return state_of(plan).digest()

    assert train("split") == train("whole")


class Deaf(nn.Module):
    """A layer whose result does not depend on what it is given."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x):
        return self.lin(x.detach())


@needs_native
def test_a_plan_that_begins_with_several_micro_batches_keeps_its_tables_whole():
    policy = {"rows": "split"}
    with slidedp.compile(PlainGPT(), "cpu", optimizer=OPTIMIZER, policy=policy, update_kernel="native") as plan:
        plan.run([batch_of(0), batch_of(1)])
        plan.run(batch_of(2))
        assert {d.rows for d in plan.decisions.groups.values()} == {Rows.WHOLE}


def test_rows_without_a_gradient_are_an_error_and_whole_tables_are_not():
    def plan_of(rows):
        return slidedp.compile(Blocks(no_glue, block=Deaf), "cpu", optimizer=OPTIMIZER, policy={"rows": rows})

    plan = plan_of("split")
    with pytest.raises(RuntimeError, match=r"tok\.weight has no gradient.*'rows': 'whole'"):  # noqa: PT012  (whichever notices)
        plan.run(lm_batch())
        plan.synchronize()
    plan.close()
    with plan_of("whole") as plan:
        plan.run(lm_batch())
        plan.synchronize()


def on_a_datapath(name: str, d: str, r: str, rank: int, turns: int) -> list[str]:
    digests = []
    kinds: dict[str, OpKind] = {}
    for rows in ("whole", "split", *["delayed"] * turns):
        torch.manual_seed(0)
        policy = {"delivery": d, "reduction": r, "chunks": 3, "rows": "whole" if rows == "whole" else "split"}
        plan = slidedp.compile(MODELS[name](), "cpu", optimizer=OPTIMIZER, policy=policy, update_kernel="native")
        if rows == "delayed":
            plan._options = replace(plan._options, delay=Delays(kinds, 3 * rank + len(d + r), f"{name}{rank}"), poison=True)
        losses = [plan.run(batch_of(t, rank)).loss for t in range(3)]
        done = state_of(plan)
        done.losses = losses
        kinds = {op.name: op.kind for op in plan._spec.graph}
        plan.close()
        digests.append(done.digest())
    return digests


def on_ranks(names: list[str], turns: int) -> dict[str, list[str]]:
    """Digests by model of the same steps on every datapath, whole and split, and split with random delays."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, digests = dist.get_rank(), dict[str, list[str]]()
    paths = product(names, ("replicated", "sharded"), ("gpu", "cpu"))
    for name, group in groupby((path for i, path in enumerate(paths) if i % 4 in ((0, 3) if path[0] == "gpt" else (1, 2))),
                               key=lambda path: path[0]):  # fmt: skip
        with traced_once():
            digests[name] = [digest for _, d, r in group for digest in on_a_datapath(name, d, r, rank, turns)]
    return digests


@needs_native
def test_two_ranks_with_different_rows(run_ranks: RunRanks):
    """A row is touched if it occurs in any rank's batch; each rank looks up others, which change with every step."""
    for result in run_ranks(on_ranks, 2, ["gpt", "untied"], 1, timeout=150):
        for name, digests in result.value.items():
            assert len(digests) == 6, name
            assert len(set(digests)) == 1, name
