"""A plan in use: what may be done with the model between steps, several shapes, failures that leave it usable, its end."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

import failure_cases
import pytest
import torch
from tiny_models import PlainGPT, family, lm_batch
from torch import nn
from training import loss_of_output, state_of, train_plainly

import slidedp
from slidedp.executor.devices.backend import CpuBackend, Sent
from slidedp.executor.failures.failure import Failure
from slidedp.executor.options import MachineOptions

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)


def compiled(model=None, **options):
    return slidedp.compile(model or PlainGPT(), "cpu", optimizer=OPTIMIZER, **{"update_kernel": "torch", **options})


@pytest.mark.parametrize("source", ["cast", "shadow"])
def test_weights_written_between_steps_count(source):
    model = PlainGPT()
    initial = copy.deepcopy(model.state_dict())
    with compiled(model, policy={"source": source}) as plan:
        first = plan.run(lm_batch()).loss
        plan.run(lm_batch())
        plan.model.load_state_dict(initial)
        assert plan.evaluate(lm_batch()) == first
        assert plan.run(lm_batch()).loss == first


def test_a_batch_may_be_refilled_at_once():
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(4)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output).losses
    buffer = {k: torch.empty_like(v) for k, v in batches[0].items()}
    with compiled(model) as plan:
        got = []
        for batch in batches:
            for key, value in batch.items():
                buffer[key].numpy()[:] = value.numpy()
            got.append(plan.run(buffer).loss)
            buffer["input_ids"].numpy()[:] = 0
    assert got == want


def test_a_kept_result_keeps_no_batch():
    with compiled() as plan:
        result = plan.run(lm_batch())
        plan.synchronize()
        assert [(lane.batch, lane.sent) for lane in result._step.lanes] == [({}, {})]


def test_so_much_of_the_batches_goes_ahead_and_no_more(monkeypatch):
    ahead = []
    monkeypatch.setattr(CpuBackend, "send", lambda self, value: ahead.append(value.nbytes) or Sent(value))
    batches = [lm_batch(seed=i, batch=rows) for i, rows in enumerate([2, 3, 2])]
    sizes = [value.nbytes for batch in batches for value in batch.values()]
    with compiled() as plan:
        want = plan.evaluate(batches)
        for room, gone in ((sum(sizes), sizes), (sum(sizes) - 1, sizes[:-1]), (sizes[0], sizes[:1]), (0, [])):
            monkeypatch.setattr("slidedp.executor.machine.step.MOST_AHEAD", room)
            ahead.clear()
            assert plan.evaluate(batches) == want
            assert ahead == gone


def test_exposed_time_is_that_of_all_compute_of_a_step(monkeypatch):
    monkeypatch.setattr("slidedp.executor.streams.streams.OpStream.stall_s", lambda stream, op: 0.25)  # see test_streams.py
    with compiled() as plan:
        result = plan.run(lm_batch())
        assert result.exposed_s == 0.25 * plan.ops.count("@gpu")


def test_mode_switched_under_a_running_step():
    """Forward and recompute of a step agree, whatever the user's own reference to the model is told meanwhile."""
    model, batches = PlainGPT(dropout=0.5), [lm_batch(seed=i) for i in range(3)]
    torch.manual_seed(1)
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output).losses
    torch.manual_seed(1)
    with compiled(model) as plan:
        got = []
        for batch in batches:
            got.append(plan.run(batch).loss)
            model.eval()
            plan.synchronize()
            assert not any(m.training for m in model.modules())
            model.train()
    assert got == want


def test_random_numbers_after_run_are_the_users():
    """Dropout only in the last layer: its recompute must not own the generator when `run` has returned."""
    model = PlainGPT()
    model.blocks[-1].mlp[-1].p = 0.5
    torch.manual_seed(3)
    eager = copy.deepcopy(model)
    want = []
    for i in range(6):
        loss_of_output(eager, lm_batch(seed=i)).backward()
        want.append(torch.rand(3).tolist())
    torch.manual_seed(3)
    with compiled(model) as plan:
        got = []
        for i in range(6):
            plan.run(lm_batch(seed=i))
            got.append(torch.rand(3).tolist())
    assert got == want


def test_a_plan_explains_itself_and_traces_what_was_measured(tmp_path):
    with compiled(example=lm_batch(), policy={"window": 2}) as plan:
        report = plan.explain("window")
        assert report.step_us == plan.simulate().step_us
        assert [a.value for a in report.alternatives if a.verdict == "chosen"] == ["2"]
        assert not report.notes
        plan.write_trace(tmp_path / "predicted.json")
        measured = plan.measure([lm_batch(seed=i) for i in range(3)])
        plan.write_trace(tmp_path / "measured.json", measured)
        rows = [[line.split()[0] for line in plan.gantt(t).splitlines() if line.endswith("%")] for t in (None, measured)]
        assert rows[0] == rows[1]
        assert plan.gantt(plan.measure([lm_batch()])).startswith("1 step measured, ")
        for wrong, text in (([], "has been given none"), (lm_batch(), r"measure\(\[batch\]\)")):
            with pytest.raises(ValueError, match=text):
                plan.measure(wrong)
    with pytest.raises(RuntimeError, match="closed"):
        plan.measure([lm_batch()])
    traces = [json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"] for name in ("predicted", "measured")]
    slices = [Counter(e["name"] for e in events if e["ph"] == "X") for events in traces]
    assert slices[0] == slices[1]  # three steps each, of the same ops
    assert {e["args"]["step"] for e in traces[1] if e["ph"] == "X"} == {0, 1, 2}
    assert sum(e["ph"] == "s" for e in traces[0]) == sum(e["ph"] == "s" for e in traces[1]) > 0


def test_non_finite_loss_leaves_the_plan_usable():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 1)}
    with compiled(model, loss_fn=lambda out, b: (((out - b["y"]) ** 2).sum(), out.numel())) as plan:
        plan.run(batch)
        before = state_of(plan).digest()
        with pytest.raises(slidedp.NonFiniteLoss, match="nothing has been updated"):
            plan.run({**batch, "x": batch["x"] * float("nan")})
        assert state_of(plan).digest() == before
        plan.run(batch)
        assert state_of(plan).digest() != before


def test_converting_the_plans_model_is_refused_and_undone():
    with compiled() as plan:
        plan.run(lm_batch())
        plan.model.to(torch.float64)
        with pytest.raises(ValueError, match=r"deepcopy"):
            plan.run(lm_batch())
        before = {n: p.clone() for n, p in plan.model.named_parameters()}
        plan.run(lm_batch())
        assert any(not torch.equal(p, before[n]) for n, p in plan.model.named_parameters())


def test_a_model_has_one_open_plan():
    model = PlainGPT()
    with compiled(model, example=lm_batch()) as plan:
        with pytest.raises(ValueError, match="still open"):
            compiled(model, example=lm_batch())
        plan.run(lm_batch())
        with pytest.raises(ValueError, match=r"its blocks.0 belongs to a plan|it belongs to a plan|PlainGPT cannot be compiled"):
            compiled(model)  # its weights are in slots, perhaps
        with compiled(copy.deepcopy(plan.model), example=lm_batch()) as copied:
            copied.run(lm_batch())
    with compiled(model, example=lm_batch()) as again:
        again.run(lm_batch())


def test_frozen_later_is_refused():
    model = PlainGPT()
    with compiled(model) as plan:
        plan.run(lm_batch())
        plan.synchronize()
        model.blocks[1].requires_grad_(False)
        with pytest.raises(ValueError, match="requires_grad"):
            plan.run(lm_batch())
        model.blocks[1].requires_grad_(True)
        plan.run(lm_batch())


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        compiled(PlainGPT().requires_grad_(False), example=lm_batch())


class Optional(nn.Module):
    """Uses its last block only when the batch has `extra`."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 1)

    def forward(self, x, y, extra=None):
        for block in self.blocks[: None if extra is not None else 3]:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(self.out(x), y)


def test_a_layer_that_only_some_batches_use():
    torch.manual_seed(0)
    model = Optional()
    batches = [{"x": torch.randn(4, 8), "y": torch.randn(4, 1)} for _ in range(6)]
    for i in (0, 2, 3):
        batches[i]["extra"] = torch.ones(1)
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    with compiled(model, layers=[f"blocks.{i}" for i in range(4)]) as plan:
        losses = [plan.run(b).loss for b in batches]
        got = state_of(plan)
    assert losses == want.losses
    assert all(torch.equal(p, got.params[n]) for n, p in want.params.items())


def test_a_longer_batch_retains_less():
    """Planned on a short batch, whose last layer retains; a longer one fits by recomputing, and gives the bits that it should."""
    model, batches = PlainGPT(), [lm_batch(seed=0, seq=8), lm_batch(seed=1, seq=48), lm_batch(seed=2, seq=8)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output).losses
    with compiled(copy.deepcopy(model), policy={"act": "recompute"}, example=batches[1]) as plan:
        budget = plan.memory().hbm_bytes
    got, last = [], []
    with compiled(copy.deepcopy(model), hbm_budget=budget) as plan:
        for batch in batches:
            got.append(plan.run(batch).loss)
            last.append(plan.decisions.of("L02").act)
            assert plan.memory().hbm_bytes <= budget
    assert got == want
    assert last == ["retain", "recompute", "retain"]


def test_memory_budget_holds_for_later_shapes():
    with compiled(hbm_budget="400KiB") as plan:
        plan.run(lm_batch(batch=1, seq=8))
        with pytest.raises(ValueError, match="budget"):
            plan.run(lm_batch(batch=64, seq=60))
        plan.run(lm_batch(batch=1, seq=8))


def test_results_keep_no_tickets():
    with compiled() as plan:
        results = [plan.run(lm_batch(seed=i)) for i in range(3)]
        plan.synchronize()
        assert all(not r._step.tickets and not any(lane.batch for lane in r._step.lanes) for r in results)
        assert all(r.tokens_per_s > 0 and r.num_tokens == 18 for r in results)


def test_close_and_drop_leave_nothing():
    def held():
        """Our threads, and inodes of shared memory. Of all that there is: others' threads and files come and go."""
        memory = set()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if "memfd:slidedp" in os.readlink(f"/proc/self/fd/{fd}"):
                    memory.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
        return {t for t in threading.enumerate() if t.name.startswith("slidedp")}, memory

    before = held()
    for _ in range(3):
        compiled(example=lm_batch()).close()
        dropped = compiled(example=lm_batch())
        dropped.run(lm_batch())
        del dropped
        gc.collect()
    assert [now - then for now, then in zip(held(), before, strict=True)] == [set(), set()]


@pytest.mark.parametrize("op", ["bwd.L01", "cpu_update"])
def test_a_plan_may_be_collected_in_a_thread_of_its_own(op):
    """Garbage is collected wherever something is allocated: the step under way ends all the same, and so does the plan."""
    def stepped(drop):
        torch.manual_seed(0)
        model = PlainGPT()
        box, left = [compiled(model)], threading.Event()

        def delay(name):
            if drop and name.startswith(op) and box and left.wait(60):
                box.clear()
            return 0.0

        box[0]._options = MachineOptions(update_kernel="torch", delay=delay, native_queue=False)
        box[0].run(lm_batch())
        machine = box[0]._machine
        left.set()
        if not drop:
            box.pop().close()
        deadline = time.monotonic() + 60
        while machine.failure.watchdog._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        return model, machine

    (model, machine), (want, _) = stepped(True), stepped(False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))
    assert machine.closed
    compiled(model, example=lm_batch()).close()


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exit", 3), ("error", 1)])
def test_a_process_may_end_with_an_open_plan(start_ranks, how, code):
    (ended,) = start_ranks(failure_cases.end_with_an_open_plan, 1, how).wait(100, check=False)
    assert ended.returncode == code, ended.output
    assert "terminate called" not in ended.output


@pytest.fixture
def ctrl_c():
    """SIGINT is as in a terminal: a shell has its background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupt_reaches_the_user():
    """Ctrl-C while `run` waits is a KeyboardInterrupt, and the plan can go on. What it waits for comes only after that."""
    plan, user, armed, heard = compiled(), threading.get_ident(), threading.Event(), threading.Event()

    def waiting():
        frame = sys._current_frames()[user]
        while frame is not None and frame.f_code is not Failure.wait_event.__code__:
            frame = frame.f_back
        return frame is not None

    def delay(name):
        if name == "fwd.L01" and armed.is_set():
            armed.clear()
            while not waiting():
                time.sleep(1e-3)
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait(60)
        return 0.0

    plan._options = MachineOptions(update_kernel="torch", delay=delay)
    plan.run(lm_batch())
    armed.set()
    with pytest.raises(KeyboardInterrupt):
        plan.run(lm_batch())
    heard.set()
    plan.run(lm_batch())
    plan.close()


def test_evaluate_and_several_shapes():
    model = family("llama", attention_dropout=0.0)
    shapes = [("none", 10), ("padded", 12), ("ones", 10), ("padded", 10)]
    batches = [lm_batch(padding, seed=i, seq=seq) for i, (padding, seq) in enumerate(shapes)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    eager = copy.deepcopy(model).eval()
    with compiled(model) as plan:
        assert plan.evaluate(batches[1]) == loss_of_output(eager, batches[1]).item()
        losses = []
        for batch in batches:
            losses.append(plan.run(batch).loss)
            plan.evaluate(batches[0])
        got = state_of(plan)
    assert losses == want.losses
    assert all(torch.equal(p, got.params[n]) for n, p in want.params.items())
