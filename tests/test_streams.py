"""Streams and tickets: order, waits across streams, failure, and what is kept alive. A fake device stands in for CUDA."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from functools import partial
from queue import SimpleQueue

import pytest

from slidedp.compiler.ops import COMPUTE_AHEAD, Stream
from slidedp.executor.streams import turns
from slidedp.executor.streams.streams import Streams
from slidedp.executor.streams.tickets import Aborted, Ticket

pytestmark = pytest.mark.cpu

WAIT_S = 60  # for what must come; nothing waits for so long, however busy the machine is


class FakeEvent:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.time_s = 0.0
        self.error: Exception | None = None

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error

    def reach(self) -> None:
        self.time_s = time.perf_counter()
        self.reached.set()


class FakeDevice:
    """An in-order queue with a thread of its own, like a CUDA stream: launching returns at once."""

    def __init__(self) -> None:
        self.queue: SimpleQueue = SimpleQueue()
        self.num_waits = 0
        self.fail_next_event: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (work := self.queue.get()) is not None:
            work()

    def launch(self, work) -> None:
        self.queue.put(work)

    def wait(self, event: FakeEvent) -> None:
        self.num_waits += 1
        self.queue.put(event.reached.wait)

    def record(self, *, blocking: bool, timing: bool) -> FakeEvent:
        event = FakeEvent()
        event.error, self.fail_next_event = self.fail_next_event, None
        self.queue.put(event.reach)
        return event

    def pause(self, seconds: float) -> None:
        self.queue.put(partial(time.sleep, seconds))

    def time_s(self, event: FakeEvent) -> float:
        return event.time_s

    def elapsed_s(self, begin: FakeEvent, end: FakeEvent) -> float:
        return end.time_s - begin.time_s


@pytest.fixture
def streams():
    made: list[Streams] = []

    def make(**kwargs) -> Streams:
        made.append(Streams(**kwargs))
        return made[-1]

    yield make
    for s in made:
        s.close()


@pytest.fixture
def devices():
    made = {stream: FakeDevice() for stream in (Stream.GPU, Stream.H2D)}
    yield made
    for device in made.values():
        device.queue.put(None)


def test_fifo_order_and_waits_across_streams(streams):
    s, log, rng = streams(delay=lambda name: rng.random() * 2e-3), [], random.Random(0)
    tickets: list[Ticket] = []
    hosts = [Stream.GPU, Stream.H2D, Stream.D2H, Stream.CAST]
    for i in range(80):  # op i waits for op i-1, on another stream
        tickets.append(s.submit(hosts[i % 4], lambda i=i: log.append(i), tickets[-1:], name=str(i)))
    assert tickets[-1].wait_done(WAIT_S)
    assert log == list(range(80))


def test_without_waits_streams_run_beside_one_another(streams):
    s, gate = streams(), threading.Event()
    blocked = s.submit(Stream.GPU, lambda: gate.wait(WAIT_S))
    assert s.submit(Stream.H2D, lambda: None).wait_done(WAIT_S)
    assert not blocked.done
    gate.set()
    assert blocked.wait_done(WAIT_S)


def test_priority_stream_takes_the_earliest_deadline_of_what_is_ready(streams):
    s, gate, log = streams(), threading.Event(), []
    late_input = threading.Event()
    first = s.submit(Stream.CPU, lambda: gate.wait(WAIT_S), deadline=0)
    waiting = s.submit(Stream.H2D, lambda: late_input.wait(WAIT_S))
    urgent = s.submit(Stream.CPU, lambda: log.append("urgent"), [waiting], deadline=1)
    others = [s.submit(Stream.CPU, lambda n=n: log.append(n), [first], deadline=d) for n, d in [("c", 9), ("a", 5), ("b", 5)]]
    gate.set()
    for t in others:
        assert t.wait_done(WAIT_S)
    assert log == ["a", "b", "c"]  # the urgent one's input is missing: it blocks nobody
    late_input.set()
    assert urgent.wait_done(WAIT_S)


def test_priority_stream_runs_others_while_a_condition_is_false(streams):
    s, remote, log = streams(), threading.Event(), []
    a = s.submit(Stream.CPU, lambda: log.append("a"), deadline=0, before=remote.is_set)
    b = s.submit(Stream.CPU, lambda: log.append("b"), deadline=1)
    assert b.wait_done(WAIT_S)
    assert not a.done
    remote.set()
    assert a.wait_done(WAIT_S)
    assert log == ["b", "a"]


def test_fifo_condition_is_polled_and_none_means_go(streams):
    s, looks = streams(), []
    t = s.submit(Stream.HOST, lambda: None, before=lambda: looks.append(0) or len(looks) >= 3)
    assert t.wait_done(WAIT_S)
    assert len(looks) == 3
    assert s.submit(Stream.HOST, lambda: None, before=lambda: None).wait_done(WAIT_S)


def test_device_op_is_issued_before_it_is_done(streams, devices):
    s, gate = streams(devices=devices), threading.Event()
    gpu = devices[Stream.GPU]
    t = s.submit(Stream.GPU, lambda: gpu.launch(gate.wait), need_done=True)
    assert t.wait_issued(WAIT_S)
    assert not t.done
    assert not t.wait_done(0.01)
    gate.set()
    assert t.wait_done(WAIT_S)


def test_device_stream_waits_on_the_device_and_host_stream_on_the_host(streams, devices):
    s, gate, log = streams(devices=devices), threading.Event(), []
    gpu, h2d = devices[Stream.GPU], devices[Stream.H2D]

    def slow() -> None:
        gpu.launch(gate.wait)
        gpu.launch(lambda: log.append("gpu"))

    first = s.submit(Stream.GPU, slow)
    copy = s.submit(Stream.H2D, lambda: h2d.launch(lambda: log.append("h2d")), [first])
    host = s.submit(Stream.HOST, lambda: log.append("host"), [copy])  # of an op not marked `need_done`
    cpu = s.submit(Stream.CPU, lambda: log.append("cpu"), [host, copy])
    assert copy.wait_issued(WAIT_S)  # the host went on
    assert h2d.num_waits == 1
    assert log == []
    gate.set()
    assert cpu.wait_done(WAIT_S)
    assert log == ["gpu", "h2d", "host", "cpu"]


def test_wait_on_an_event_comes_only_after_its_record(streams, devices):
    """The awaited op's host thread is slow: a wait on its event before the record would be a no-op in CUDA."""
    s = streams(devices=devices, delay=lambda name: 0.05 if name == "slow" else 0.0)
    log: list[str] = []
    a = s.submit(Stream.GPU, lambda: devices[Stream.GPU].launch(lambda: log.append("a")), name="slow")
    b = s.submit(Stream.H2D, lambda: devices[Stream.H2D].launch(lambda: log.append("b")), [a], need_done=True)
    assert b.wait_done(WAIT_S)
    assert log == ["a", "b"]


def test_a_paused_op_is_issued_at_once_and_begins_later(streams, devices):
    gpu, over, asked, log = devices[Stream.GPU], threading.Event(), [], []
    gpu.pause = lambda seconds: (asked.append(seconds), gpu.launch(lambda: over.wait(WAIT_S)))
    s = streams(devices=devices, pause=lambda name: 0.2 if name == "paused" else 0.0)
    paused = s.submit(Stream.GPU, lambda: gpu.launch(lambda: log.append("ran")), name="paused", need_done=True)
    assert paused.wait_issued(WAIT_S)
    assert (asked, log, paused.done) == ([0.2], [], False)
    over.set()
    assert paused.wait_done(WAIT_S)
    assert log == ["ran"]


@pytest.mark.parametrize("failing", list(Stream))
def test_an_error_unblocks_everything_and_surfaces_once(streams, failing):
    s, gate = streams(), threading.Event()

    def fail() -> None:
        gate.wait(WAIT_S)
        raise KeyError("boom")

    bad = s.submit(failing, fail, name="bad")
    tickets = [s.submit(stream, lambda: None, [bad], name=str(stream)) for stream in Stream for _ in range(3)]
    gate.set()
    for t in [bad, *tickets]:
        with pytest.raises(Aborted) as caught:
            t.wait_done(WAIT_S)
        assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(s.error, KeyError)
    with pytest.raises(Aborted):
        s.submit(Stream.GPU, lambda: None)


def test_an_error_on_the_device_is_found_by_the_completion_thread(streams, devices):
    s = streams(devices=devices)

    def fail() -> None:
        devices[Stream.GPU].fail_next_event = RuntimeError("device assert")

    bad = s.submit(Stream.GPU, fail, need_done=True)
    after = s.submit(Stream.CPU, lambda: None, [bad])
    with pytest.raises(Aborted, match="device assert"):
        after.wait_done(WAIT_S)
    assert "device assert" in str(s.error)


def test_abort_from_outside_wakes_streams_that_poll_or_wait(streams, devices):
    s, never = streams(devices=devices), threading.Event()
    devices[Stream.GPU].launch(lambda: never.wait(WAIT_S))
    stuck = s.submit(Stream.GPU, lambda: None, need_done=True)
    waiting = [s.submit(Stream.HOST, lambda: None, [stuck]), s.submit(Stream.CPU, lambda: None, [stuck])]
    waiting += [s.submit(stream, lambda: None, before=lambda: False) for stream in (Stream.D2H, Stream.CPU)]
    s.abort(TimeoutError("a peer is gone"))
    for t in [stuck, *waiting]:
        with pytest.raises(Aborted, match="peer"):
            t.wait_done(WAIT_S)
    never.set()


@pytest.mark.parametrize("stream", [Stream.HOST, Stream.CPU, Stream.GPU])
def test_a_callback_that_raises_aborts_and_leaves_nobody_waiting(streams, devices, stream):
    s, gate = streams(devices=devices), threading.Event()
    t = s.submit(stream, lambda: gate.wait(WAIT_S), need_done=True)
    t.add_done_callback(lambda: None)
    t.add_done_callback(lambda: 1 / 0)
    waiter = s.submit(Stream.CAST, lambda: None, [t])
    t.add_done_callback(lambda: 1 / 0)
    gate.set()
    until = time.monotonic() + WAIT_S  # not `waiter.wait_done`, which would add a callback of its own and so wake the others
    while not (waiter.done and s.error is not None) and time.monotonic() < until:
        time.sleep(1e-3)
    assert waiter.done
    assert isinstance(s.error, ZeroDivisionError)


def test_error_in_a_condition_aborts(streams):
    for stream in (Stream.HOST, Stream.CPU):
        s = streams()
        t = s.submit(stream, lambda: None, before=lambda: 1 / 0)
        with pytest.raises(Aborted):
            t.wait_done(WAIT_S)
        assert isinstance(s.error, ZeroDivisionError)


def test_done_tickets_and_idle_streams_keep_nothing_alive(streams, devices):
    class Big:
        pass

    s, refs, tickets = streams(devices=devices), [], []
    for stream in Stream:
        big = Big()
        refs.append(weakref.ref(big))
        tickets.append(s.submit(stream, lambda big=big: None, tickets[-1:], need_done=True, name=str(stream)))
    del big
    for t in tickets:
        assert t.wait_done(WAIT_S)
    until = time.monotonic() + WAIT_S  # the threads drop their last item just after they have marked the ticket
    while any(r() for r in refs) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.005)
    assert not any(r() for r in refs)


def test_trace_times_host_and_device_ops_on_one_clock(streams, devices):
    seen: dict[str, tuple[Stream, float, float]] = {}
    s = streams(devices=devices, trace=lambda name, stream, start, end: seen.update({name: (stream, start, end)}))
    t0 = time.perf_counter()
    gpu = devices[Stream.GPU]
    a = s.submit(Stream.GPU, lambda: gpu.launch(lambda: time.sleep(0.02)), name="a")
    b = s.submit(Stream.CPU, lambda: None, [a], name="b")
    assert b.wait_done(WAIT_S)
    s.close()
    assert seen["a"][0] is Stream.GPU
    assert t0 <= seen["a"][1] < seen["a"][2] <= seen["b"][1] <= seen["b"][2] <= time.perf_counter()
    assert seen["a"][2] - seen["a"][1] >= 0.015  # time on the device, not of issuing


def test_issues_are_times_of_the_host_and_of_device_ops_only(streams, devices):
    issues: list[tuple[str, Stream, float, float]] = []
    s = streams(devices=devices, trace=lambda *event: None)
    s.issues = lambda *event: issues.append(event)
    gpu, blocked = devices[Stream.GPU], threading.Event()
    a = s.submit(Stream.GPU, lambda: gpu.launch(blocked.wait), name="a")
    assert a.wait_issued(WAIT_S)
    issued_by = time.perf_counter()
    blocked.set()
    s.submit(Stream.CPU, lambda: None, [a], name="b").wait_done(WAIT_S)
    s.close()
    assert [(name, stream) for name, stream, *_ in issues] == [("a", Stream.GPU)]
    assert issues[0][2] <= issues[0][3]
    assert issues[0][2] <= issued_by


@pytest.mark.parametrize("on_device", [False, True])
def test_what_holds_compute_up_is_timed(streams, devices, on_device, monkeypatch):
    """A copy takes 7 s, and does not end before compute has begun to wait for it."""
    s, now, begun = streams(devices=devices if on_device else None), [100.0], threading.Event()
    own = {s.compute._thread, devices[Stream.GPU].thread}

    def clock() -> float:
        if threading.current_thread() in own:
            begun.set()
        return now[0]

    def work() -> None:
        assert begun.wait(WAIT_S)
        now[0] += 7

    free = s.submit(Stream.GPU, lambda: None, need_done=True)
    assert free.wait_done(WAIT_S)
    monkeypatch.setattr(time, "perf_counter", clock)  # what looks at it next is the beginning of the wait
    copy = s.submit(Stream.H2D, partial(devices[Stream.H2D].launch, work) if on_device else work)
    held = s.submit(Stream.GPU, lambda: None, [free, copy], need_done=True)
    assert held.wait_done(WAIT_S)
    assert [s.compute.stall_s(t) for t in (free, held)] == [0, 7]


def test_close_runs_what_was_submitted_and_is_idempotent(streams):
    others = set(threading.enumerate())
    s, log = streams(delay=lambda name: 1e-3), []
    threads = set(threading.enumerate()) - others
    assert len(threads) >= len(Stream)
    last: list[Ticket] = []
    for i in range(20):
        last = [s.submit(list(Stream)[i % 7], lambda i=i: log.append(i), last, name="x")]
    s.close()
    s.close()
    assert log == list(range(20))
    assert not any(t.is_alive() for t in threads)
    with pytest.raises(RuntimeError, match="closed"):
        s.submit(Stream.GPU, lambda: None)


@pytest.mark.parametrize(("own", "shortened"), [(5e-3, 5e-4), (1e-4, 1e-4)])
def test_threads_take_short_turns_until_the_last_streams_are_closed(streams, monkeypatch, own, shortened):
    monkeypatch.setattr(turns, "_owners", set())  # whatever another test has left open
    monkeypatch.setattr(turns, "_before", [])
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(own)
        first, second = streams(), streams()
        for s in (first, first, second):
            assert sys.getswitchinterval() == pytest.approx(shortened, abs=2e-6)  # whole microseconds, rounded down
            s.close()
        assert sys.getswitchinterval() == pytest.approx(own, abs=2e-6)
    finally:
        sys.setswitchinterval(before)


def test_callbacks_run_once_from_whichever_side_comes_last():
    rng = random.Random(0)
    for _ in range(300):
        ticket, calls = Ticket("x"), SimpleQueue()
        threads = [threading.Thread(target=ticket.add_done_callback, args=(partial(calls.put, 1),)) for _ in range(3)]
        threads.append(threading.Thread(target=ticket._mark_done))
        rng.shuffle(threads)
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert calls.qsize() == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_with_random_delays_keep_every_dependence(streams, devices, seed):
    """Ops of three steps submitted at once; each checks that all it waits for, of this step and the last, has ended."""
    rng = random.Random(seed)
    late = lambda name: rng.random() * 4e-4 if rng.random() < 0.5 else 0.0  # noqa: E731
    s = streams(devices=devices, delay=late, pause=late)
    ended: set[tuple[int, int]] = set()
    wrong: list[str] = []

    def body(key, needs, device):
        def check() -> None:
            wrong.extend(f"{key} before {n}" for n in needs if n not in ended)
            ended.add(key)

        return (lambda: device.launch(check)) if device else check

    plan = [(rng.choice(list(Stream)), rng.randrange(5)) for _ in range(25)]
    edges = [sorted(rng.sample(range(i), min(i, 3))) for i in range(25)]
    back = [rng.sample(range(25), 2) for _ in range(25)]
    previous: dict[int, Ticket] = {}
    every: list[Ticket] = []
    for step in range(3):
        tickets: dict[int, Ticket] = {}
        for i, (stream, deadline) in enumerate(plan):
            needs = [(step, j) for j in edges[i]] + [(step - 1, j) for j in back[i] if step]
            waits = [tickets[j] for j in edges[i]] + [previous[j] for j in back[i] if step]
            fn = body((step, i), needs, devices.get(stream))
            tickets[i] = s.submit(stream, fn, waits, name=f"{step}.{i}", deadline=deadline, need_done=rng.random() < 0.5)
            every.append(tickets[i])
        previous = tickets
    for t in every:
        assert t.wait_done(WAIT_S)
    assert not wrong
    assert len(ended) == 75


def test_compute_is_issued_a_few_ops_ahead_of_the_device(streams, devices):
    """Copies are not held up: they are few, and a device's queue takes a thousand."""
    s, gate, issued = streams(devices=devices), threading.Event(), []
    devices[Stream.GPU].launch(lambda: gate.wait(WAIT_S))
    devices[Stream.H2D].launch(lambda: gate.wait(WAIT_S))
    compute = [s.submit(Stream.GPU, lambda i=i: issued.append(i)) for i in range(3 * COMPUTE_AHEAD)]
    copies = [s.submit(Stream.H2D, lambda: None) for _ in range(3 * COMPUTE_AHEAD)]
    assert compute[COMPUTE_AHEAD - 1].wait_issued(WAIT_S)
    assert copies[-1].wait_issued(WAIT_S)
    assert not compute[COMPUTE_AHEAD].wait_issued(0.05)
    assert issued == list(range(COMPUTE_AHEAD))
    gate.set()
    assert compute[-1].wait_done(WAIT_S)
    assert issued == list(range(3 * COMPUTE_AHEAD))


@pytest.mark.parametrize("cause", ["a peer", "an op", "the device"])
def test_an_error_while_the_device_is_stuck_and_its_queue_as_full_as_may_be(streams, devices, cause):
    """What is queued fails at once, as far as the device has nothing to say to it; threads end as soon as it goes on."""
    s, gate, issued = streams(devices=devices), threading.Event(), []
    gpu = devices[Stream.GPU]

    def first() -> None:
        gpu.launch(lambda: gate.wait(WAIT_S))
        gpu.fail_next_event = RuntimeError("boom") if cause == "the device" else None

    compute = [s.submit(Stream.GPU, first)]  # nobody asks for its event but who counts how many are ahead
    compute += [s.submit(Stream.GPU, lambda i=i: issued.append(i)) for i in range(1, 3 * COMPUTE_AHEAD)]
    after = [s.submit(stream, lambda: None, [compute[-1]]) for stream in (Stream.H2D, Stream.HOST, Stream.CPU)]
    assert compute[COMPUTE_AHEAD - 1].wait_issued(WAIT_S)
    if cause == "the device":
        gate.set()
    elif cause == "a peer":
        s.abort(RuntimeError("boom"))
    else:
        s.submit(Stream.D2H, lambda: (_ for _ in ()).throw(RuntimeError("boom")))
    for t in (*compute[COMPUTE_AHEAD:], *after):
        with pytest.raises(Aborted, match="boom"):
            t.wait_done(WAIT_S)
    assert gate.is_set() is (cause == "the device")
    gate.set()
    s.close()
    assert not any(thread.is_alive() for worker in s.values() for thread in worker._threads())
    assert issued == list(range(1, COMPUTE_AHEAD))
