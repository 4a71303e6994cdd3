"""The native queue of CPU updates: order, gates, what failures leave behind; and the bits of updates done one by one."""

import contextlib
import itertools
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_adam import needs_native

from slidedp.compiler.decisions import Decisions, GroupDecision, Source
from slidedp.compiler.layergraph import Group, Param
from slidedp.compiler.ops import Stream
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.simulation.timeline import measured_timeline
from slidedp.executor.native.build import DONE, SKIPPED, Ranks, StepConstants, load_library
from slidedp.executor.optim.adam import CpuAdam, NonFiniteGradient
from slidedp.executor.optim.kernels import HostKernels
from slidedp.executor.state.host_state import HostState
from slidedp.executor.streams.streams import Streams
from slidedp.executor.streams.tickets import Aborted, Ticket
from slidedp.executor.streams.updates import UpdateQueue

pytestmark = [pytest.mark.cpu, needs_native]

OPTIMIZER = AdamW(lr=3e-3)
NUM_PARAMS, PARAM_SIZE = 12, 1000  # each at a multiple of 1024
NUMEL = NUM_PARAMS * 1024
WAIT_S = 60  # for what must come; nothing waits for so long, however busy the machine is


class Rig:
    """One group of small parameters, an update for each, and streams whose CPU updates are native."""

    def __init__(self, threads: int = 2, numel: int = PARAM_SIZE, **options) -> None:
        stride = -(-numel // 1024) * 1024
        params = tuple(Param((f"p{i}.{'bias' if i % 3 else 'weight'}",), (numel,), i * stride) for i in range(NUM_PARAMS))
        group = Group("L00", NUM_PARAMS * stride, NUM_PARAMS * stride, ("L00",), params)
        decisions = Decisions({"L00": GroupDecision(source=Source.SHADOW)})
        self.state = HostState((group,), decisions, rank=0, world_size=1, compute_dtype=torch.bfloat16,
                               grad_dtype=torch.bfloat16, num_words=1)
        generator = torch.Generator().manual_seed(0)
        self.state.load({p.name: torch.randn(p.shape, generator=generator) for p in params})
        self.state.grad["L00"].fill_(1.0)
        self.adam = CpuAdam(self.state, [group], OPTIMIZER, kernel="native", num_threads=1)
        self.bound = [self.adam.bind("L00", p.offset, p.offset + stride) for p in params]
        self.loss = np.zeros(8, dtype=np.int64)  # (stamp, bits of the loss)
        self.word = np.zeros(1, dtype=np.int64)
        self.present = np.ones(NUM_PARAMS, dtype=np.uint8)
        self.results: list[tuple[int, int]] = []
        self.streams = Streams(**options)
        self.queue = UpdateQueue(self.adam.kernels.library, threads, Ranks(1, NUM_PARAMS, 8))
        self.streams.updates.open_queue(self.queue)

    def submit(self, i: int, waits=(), *, step: int = 1, deadline: int = 0, gate: int = 0, stamp: int = 0) -> Ticket:
        """Update of parameter `i`. `gate`: what the word must reach; `stamp`: of the loss to wait for."""
        constants = StepConstants(step, self.adam.lr(step), stamp, self.loss.ctypes.data if stamp else None)
        gates = [(self.word.ctypes.data, gate)] if gate else ()
        return self.streams.updates.submit_update(
            self.bound[i].handle, constants, waits, present=self.present.ctypes.data, gates=gates,
            finished=lambda result: self.finished(i, result), name=f"update.{i}", deadline=deadline)

    def finished(self, i: int, result: int) -> None:
        self.results.append((i, result))
        self.adam.raise_nonfinite("L00", result, 1)

    def open_gate(self, value: int = 1) -> None:
        self.word[0] = value

    def post_loss(self, stamp: int, value: float) -> None:
        self.loss[1:2].view(np.float64)[0] = value
        self.loss[0] = stamp

    def copies(self) -> list[torch.Tensor]:
        return [t["L00"].clone() for t in (self.state.master, self.state.exp_avg, self.state.exp_avg_sq, self.state.shadow)]

    def moved(self) -> list[bool]:
        """Which parameters' first moments have left 0."""
        return [bool(self.state.exp_avg["L00"][b.lo : b.lo + PARAM_SIZE].any()) for b in self.bound]


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(*args, **kwargs) -> Rig:
        made.append(Rig(*args, **kwargs))
        return made[-1]

    yield make
    for r in made:
        r.streams.close()
        r.state.close()


def test_earliest_deadline_first_whatever_arrives_first(rig):
    """200 updates that arrive in random order, held by one gate until all are there; one thread runs them."""
    r, rng = rig(threads=1), random.Random(0)
    order, tickets = [], []
    r.finished = lambda i, result: None
    arrivals = [Ticket(str(n)) for n in range(200)]
    deadlines = [rng.randrange(40) for _ in arrivals]
    r.streams.trace = lambda name, stream, start, end: order.append((name, start, end))
    for n, arrival in enumerate(arrivals):
        constants = StepConstants(1 + n // NUM_PARAMS, 1e-3, 0, None)
        tickets.append(r.streams.updates.submit_update(
            r.bound[n % NUM_PARAMS].handle, constants, [arrival], present=0, gates=[(r.word.ctypes.data, 1)],
            finished=lambda result: None, name=str(n), deadline=deadlines[n]))
    for arrival in rng.sample(arrivals, len(arrivals)):
        arrival._mark_done()
    assert not any(t.done for t in tickets)
    r.open_gate()
    for t in tickets:
        assert t.wait_done(WAIT_S)
    want = sorted(range(200), key=lambda n: (deadlines[n], n))
    assert [int(name) for name, _, _ in order] == want
    assert all(start <= end for _, start, end in order)
    assert all(before[2] <= after[1] for before, after in itertools.pairwise(order))


def test_an_update_makes_way_for_one_of_an_earlier_deadline(rig):
    """Between two blocks, not behind the last: what opens the urgent one's gate is what the other's first block writes."""
    r, spans = rig(threads=1, numel=1_000_000), {}
    r.streams.trace = lambda name, stream, start, end: spans.update({name: (start, end)})
    r.word = r.state.exp_avg["L00"].numpy()[r.bound[0].lo :].view(np.int64)  # two positive floats are a positive number
    least = r.submit(2, deadline=9, gate=1)
    urgent, equal = r.submit(1, deadline=0, gate=1), r.submit(3, deadline=5, gate=1)
    begun = r.submit(0, deadline=5)  # alone may begin
    for t in (least, urgent, equal, begun):
        assert t.wait_done(WAIT_S)
    assert [i for i, _ in r.results] == [1, 0, 3, 2]
    assert spans["update.0"][0] < spans["update.1"][0] < spans["update.1"][1] < spans["update.0"][1] <= spans["update.3"][0]
    busy = measured_timeline([(name, Stream.CPU, *span) for name, span in spans.items()], 1).busy_us[Stream.CPU]
    assert busy == pytest.approx(1e6 * sum(spans[f"update.{i}"][1] - spans[f"update.{i}"][0] for i in (0, 2, 3)), abs=5)
    assert r.moved()[:4] == [True] * 4


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_of_updates_done_one_by_one(rig, threads):
    """Five steps with gradients made by another stream in random order, some parameters absent, against `CpuAdam.update`."""
    r, plain, rng = rig(threads=threads, numel=150_000), rig(numel=150_000), random.Random(threads)
    previous: list[Ticket] = []
    flags = []
    for step in range(1, 6):
        present = np.array([(i + step) % 4 != 0 for i in range(NUM_PARAMS)], dtype=np.uint8)
        flags.append(present)  # kept: native code reads it
        grads = torch.randn(NUM_PARAMS, 150_000, generator=torch.Generator().manual_seed(step)).bfloat16()
        r.present = present
        tickets = [Ticket()] * NUM_PARAMS

        def arrive(i, grads=grads):
            r.state.grad["L00"][r.bound[i].lo : r.bound[i].lo + 150_000] = grads[i]

        for i in rng.sample(range(NUM_PARAMS), NUM_PARAMS):
            home = r.streams.submit(rng.choice([Stream.D2H, Stream.HOST]), lambda i=i, arrive=arrive: arrive(i), previous)
            tickets[i] = r.submit(i, [home], step=step, deadline=rng.randrange(5))
        previous = tickets
        for i in range(NUM_PARAMS):
            plain.state.grad["L00"][r.bound[i].lo : r.bound[i].lo + 150_000] = grads[i]
        for b in plain.bound:
            plain.adam.update("L00", b.lo, b.hi, step, present)
    for t in previous:
        assert t.wait_done(WAIT_S)
    assert all(result == DONE for _, result in r.results)
    assert len(r.results) == 5 * NUM_PARAMS
    assert all(torch.equal(a, b) for a, b in zip(r.copies(), plain.copies(), strict=True))
    assert r.adam.steps == plain.adam.steps
    assert len(set(r.adam.steps.values())) > 1


def test_a_closed_gate_holds_up_nobody_else(rig):
    r = rig()
    held, free = r.submit(0, deadline=0, gate=3), r.submit(1, deadline=9)
    assert free.wait_done(WAIT_S)
    r.open_gate(2)
    assert not held.wait_done(0.02)
    r.open_gate(3)
    assert held.wait_done(WAIT_S)
    assert [i for i, _ in r.results] == [1, 0]


@pytest.mark.parametrize("loss", [1.5, float("nan"), float("inf")])
def test_nothing_is_updated_before_the_loss_is_known_to_be_finite(rig, loss):
    r = rig()
    before = r.copies()
    tickets = [r.submit(i, stamp=7) for i in range(NUM_PARAMS)]
    assert not tickets[0].wait_done(0.02)
    assert all(torch.equal(a, b) for a, b in zip(r.copies(), before, strict=True))
    r.post_loss(7, loss)
    for t in tickets:
        assert t.wait_done(WAIT_S)
    finite = np.isfinite(loss)
    assert {result for _, result in r.results} == {DONE if finite else SKIPPED}
    assert r.moved() == [finite] * NUM_PARAMS
    assert set(r.adam.steps.values()) == {int(finite)}


def test_a_gradient_that_is_not_finite_is_named_and_stops_the_rest(rig):
    """Told after all that has begun, so that what has moved is known; what had not begun never does."""
    r = rig(numel=150_000)
    place = r.bound[2].lo + 140_000  # in its second block
    r.state.grad["L00"][place] = float("nan")
    tickets = [r.submit(i, gate=1 if i <= 2 else 2, deadline=i) for i in range(NUM_PARAMS)]
    r.open_gate(1)
    with pytest.raises(Aborted):
        tickets[2].wait_done(WAIT_S)
    r.open_gate(2)  # too late
    for t in tickets[3:]:
        with pytest.raises(Aborted):
            t.wait_done(WAIT_S)
    assert isinstance(r.streams.error, NonFiniteGradient)
    assert "p2.bias" in str(r.streams.error)
    r.streams.close()
    assert sorted(i for i, _ in r.results[:-1]) == [0, 1]
    assert r.results[-1] == (2, r.bound[2].lo + 140_000 // 512 * 512)
    moved = [i for i, b in enumerate(r.bound) if r.state.exp_avg["L00"][b.lo : b.hi].any()]
    assert moved == [0, 1, 2]


def test_an_op_that_fails_is_no_arrival(rig):
    """The failing op's ticket ends all waiting on it: an update must not take that for its gradient."""
    for _ in range(30):
        r = rig()
        before = r.copies()
        bad = r.streams.submit(Stream.D2H, lambda: 1 / 0)
        with contextlib.suppress(Aborted):  # it may have failed already
            r.submit(0, [bad])
        r.streams.close()
        assert isinstance(r.streams.error, ZeroDivisionError)
        assert all(torch.equal(a, b) for a, b in zip(r.copies(), before, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_an_abort_in_the_middle_ends_every_wait(rig, seed):
    """An update is done, untouched, or (begun when the abort came) whole; never in part; and every ticket ends.

    One that had just been collected when the abort came may end well after it.
    """
    r, rng = rig(threads=3, numel=150_000), random.Random(seed)
    never = [Ticket("never") for _ in range(3)]
    home = [r.streams.submit(Stream.HOST, lambda: time.sleep(rng.random() * 1e-3)) for _ in range(NUM_PARAMS)]
    tickets = [r.submit(i, [home[i], *([never[i]] if i < 3 else [])], deadline=rng.randrange(5)) for i in range(NUM_PARAMS)]
    time.sleep(rng.random() * 6e-3)
    r.streams.abort(TimeoutError("a peer is gone"))
    done = [ends_well(t) for t in tickets]
    assert [t.error for t in tickets] == [None if d else r.streams.error for d in done]
    assert isinstance(r.streams.error, TimeoutError)
    for t in never:
        t._mark_done()
    r.streams.close()
    moved = [int((r.state.exp_avg["L00"][b.lo : b.hi] != 0).sum()) for b in r.bound]
    assert set(moved) <= {0, 150_000}
    assert all(n for n, d in zip(moved, done, strict=True) if d)
    assert not any(moved[:3])
    with pytest.raises(Aborted):
        r.submit(0)


def ends_well(ticket: Ticket) -> bool:
    """False if it was cancelled."""
    try:
        return ticket.wait_done(WAIT_S)
    except Aborted:
        return False


def test_close_runs_what_is_queued(rig):
    others = set(threading.enumerate())
    r = rig(threads=2)
    own, gate = set(threading.enumerate()) - others, threading.Event()
    home = r.streams.submit(Stream.HOST, lambda: gate.wait(WAIT_S))
    tickets = [r.submit(i, [home], deadline=-i) for i in range(NUM_PARAMS)]
    gate.set()
    r.streams.close()
    r.streams.close()
    assert all(t.done and t.error is None for t in tickets)
    assert all(r.moved())
    assert own
    assert not any(t.is_alive() for t in own if t.name.startswith("slidedp"))


def test_a_callback_that_raises_aborts(rig):
    r = rig()
    t = r.submit(0, gate=1)
    t.add_done_callback(lambda: 1 / 0)
    after = r.streams.submit(Stream.HOST, lambda: None, [r.submit(1, [t])])
    r.open_gate()
    with pytest.raises(Aborted):
        after.wait_done(WAIT_S)
    assert isinstance(r.streams.error, ZeroDivisionError)


def test_delayed_streams_take_updates_as_functions(rig):
    assert rig().streams.updates.takes_updates
    assert not rig(delay=lambda name: 0.0).streams.updates.takes_updates


@pytest.mark.parametrize("niceness", [0, 10])
def test_the_threads_of_the_queue_alone_give_way_to_others(niceness):
    before = niceness_of_threads()
    queue = UpdateQueue(load_library(), 3, Ranks(1, 1, 8), niceness)
    wanted = [os.nice(0) + niceness] * 3
    for _ in range(1000):  # each thread takes its own niceness, soon after it has begun
        started = {tid: nice for tid, nice in niceness_of_threads().items() if tid not in before}
        if sorted(started.values()) == wanted:
            break
        time.sleep(0.01)
    assert sorted(started.values()) == wanted
    queue.close()
    assert niceness_of_threads().items() <= before.items()


def niceness_of_threads() -> dict[str, int]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            found[task.name] = int((task / "stat").read_text().rpartition(")")[2].split()[16])  # field 19 of proc_pid_stat(5)
    return found


def test_casts_and_sums_on_the_threads_of_the_updates_change_no_bit(rig):
    """Two callers at once, over and over, while updates of twenty steps come and go; then with the queue closed."""
    r = rig(threads=2, numel=1 << 18)
    generator = torch.Generator().manual_seed(1)
    source = torch.randn((1 << 20) + 77, generator=generator)
    parts = [torch.randn((1 << 20) + 5, generator=generator).bfloat16() for _ in range(3)]
    total = (parts[0].float() + parts[1].float() + parts[2].float()).bfloat16()
    wrong, stop = [], threading.Event()

    def repeat(what) -> None:
        while not stop.is_set():
            wrong.extend([] if what() else [what])

    casting, summing = (HostKernels("native", queue=r.queue) for _ in range(2))
    converted, added = torch.empty_like(source, dtype=torch.bfloat16), torch.empty_like(total)

    def cast() -> bool:
        casting.cast(source, converted.zero_())
        return torch.equal(converted, source.bfloat16())

    def reduce() -> bool:
        summing.reduce(parts, added.zero_())
        return torch.equal(added, total)

    callers = [threading.Thread(target=repeat, args=(what,)) for what in (cast, reduce)]
    for caller in callers:
        caller.start()
    for step in range(1, 21):
        for ticket in [r.submit(i, step=step) for i in range(NUM_PARAMS)]:
            assert ticket.wait_done(WAIT_S)
    stop.set()
    for caller in callers:
        caller.join()
    assert not wrong
    alone = rig(threads=1, numel=1 << 18)
    for step in range(1, 21):
        for ticket in [alone.submit(i, step=step) for i in range(NUM_PARAMS)]:
            assert ticket.wait_done(WAIT_S)
    assert all(torch.equal(a, b) for a, b in zip(r.copies(), alone.copies(), strict=True))
    r.streams.close()
    assert cast()
    assert reduce()
