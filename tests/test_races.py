"""Races are found by injected delays, not by luck: any timing of the ops gives the same bits; and the text is what runs."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
import torch
from delays import Delays
from tiny_models import PlainGPT, lm_batch
from training import begin_again, state_of

import slidedp
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.text import parse_graph, print_graph
from slidedp.executor.options import MachineOptions
from slidedp.passes.verify import check

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2)
POLICIES = [
    {"window": 2, "chunks": 3, "source": "cast", "staging_slots": 2},
    {"window": 1, "delivery_chunks": 1, "return_chunks": 5, "source": "shadow"},
    {"window": 3, "delivery_chunks": 4, "return_chunks": 2, "grad_slots": 1, "source": "cast", "staging_slots": 1},
]


def plan_of(policy, options=MachineOptions()):  # noqa: B008  (frozen)
    torch.manual_seed(0)
    plan = slidedp.compile(PlainGPT(width=32), "cpu", optimizer=OPTIMIZER, policy=policy)
    plan._options = options
    return plan


def steps_of(plan, steps=3):
    losses = [plan.run(lm_batch(seed=t)).loss for t in range(steps)]
    trained = state_of(plan)
    trained.losses = losses
    return trained


def train(plan):
    with plan:
        return steps_of(plan)


@pytest.fixture(scope="module")
def plain_runs():
    """Digest of an undisturbed run, one for all policies; and of each policy's graph, op name -> kind."""
    digests, kinds = set(), []
    for policy in POLICIES:
        plan = plan_of(policy)
        digests.add(train(plan).digest())
        kinds.append({op.name: op.kind for op in plan._spec.graph})
    assert len(digests) == 1
    return digests.pop(), kinds


@pytest.fixture(scope="module")
def undisturbed(plain_runs):
    return plain_runs[0]


@pytest.mark.parametrize("block", range(4))
def test_random_delays_change_no_bit(plain_runs, block):
    """50 seeds a block, 200 in all, over three policies; released slots are filled with NaN.

    Every kind of op that a policy's graph has is the slow one in some seeds of each block.
    """
    undisturbed, kinds_of = plain_runs
    slowed = [set() for _ in POLICIES]
    with ExitStack() as stack:
        plans = [stack.enter_context(plan_of(p, MachineOptions(delay=lambda op: 0.0, poison=True))) for p in POLICIES]
        weights = {name: p.detach().clone() for name, p in plans[0].model.named_parameters()}
        for i, seed in enumerate(range(50 * block, 50 * block + 50)):
            which = i % len(POLICIES)
            plan, delays = plans[which], Delays(kinds_of[which], turn=i // len(POLICIES), seed=seed)
            if plan._machine is None:
                plan._start(lm_batch(seed=0))
            begin_again(plan, weights)
            plan._machine.streams.delay = delays
            assert steps_of(plan).digest() == undisturbed, f"seed {seed}, slow {delays.slow}"
            slowed[which] |= delays.slowed
    assert slowed == [set(kinds.values()) for kinds in kinds_of]


def test_a_missing_edge_is_found_by_delays(undisturbed):
    """The test above can fail: without the edges from updates, a delivery brings the weights of the step before.

    The update of a layer is held until the next step's delivery of it is over, or has ended in an error.
    """
    delivered, moved = [], threading.Event()

    def hold(name):
        while name.startswith("cpu_update.L01") and not moved.wait(0.01) and plan._machine.streams.error is None:
            assert time.monotonic() < until
        return 0.0

    def watch(name, stream, start, end):
        if name == "h2d.fwd.L01.c0":
            delivered.append(name)
            if len(delivered) == 2:
                moved.set()

    plan, until = plan_of({"window": 2, "chunks": 1}, MachineOptions(delay=hold, trace=watch)), time.monotonic() + 90
    plan._start(lm_batch(seed=0))
    spec = plan._current
    cut = tuple(e for e in spec.graph.edges if not e.src.startswith("cpu_update"))
    assert check(spec.graph.with_(edges=cut))
    object.__setattr__(spec, "graph", spec.graph.with_(edges=cut))
    try:
        outcome = train(plan).digest()
    except RuntimeError as e:  # autograd noticed that a slot was refilled under it
        outcome = str(e)
    assert len(delivered) > 1 or plan._machine.streams.error is not None
    assert outcome != undisturbed


def test_reordered_text_reorders_the_issue_and_no_bit(undisturbed):
    """Swap two deliveries in the text: what is issued follows the text, the result does not care."""
    plan = plan_of({"window": 3, "chunks": 1})
    plan._start(lm_batch(seed=0))
    spec = plan._current
    lines = print_graph(spec.graph).splitlines()
    first, second = (next(i for i, s in enumerate(lines) if s.strip().startswith(f"h2d.fwd.{n}.c0 ")) for n in ("L00", "L01"))
    lines[first], lines[second] = lines[second], lines[first]
    edited = parse_graph("\n".join(lines))
    assert check(edited) == ()
    object.__setattr__(spec, "graph", edited)
    issued = []
    plan._machine.streams.trace = lambda name, stream, start, end: issued.append(name) if stream is Stream.H2D else None
    assert train(plan).digest() == undisturbed
    order = [n for n in issued if n.startswith("h2d.fwd")][:3]
    assert order == ["h2d.fwd.L01.c0", "h2d.fwd.L00.c0", "h2d.fwd.L02.c0"]


def test_updates_run_under_the_next_forward(undisturbed):
    """The last layer's update of step 1 is held until forward 2 has begun: it begins, and no bit changes.

    The first update, the epilogue's, is held until all others are in the queue, so that it takes the earliest deadlines first;
    and the next layer's gradient comes home only once that update has begun, so that it is the first.
    """
    first_update, second_forward, overlapped, forwards = threading.Event(), threading.Event(), [], []
    plan = plan_of({"window": 2, "chunks": 2, "rows": "whole"}, MachineOptions(delay=lambda name: hold(name)))

    def hold(name):
        if name == "fwd.L00":
            forwards.append(name)
            if len(forwards) == 2:
                second_forward.set()
        if name == "d2h.L02.c0":
            first_update.wait(60)
        if name == "cpu_update.epilogue.c0" and not first_update.is_set():
            first_update.set()
            others = sum(op.kind is OpKind.CPU_UPDATE for op in plan._spec.graph) - 1
            until = time.monotonic() + 60
            while len(plan._machine.streams.updates._heap) < others and time.monotonic() < until:
                time.sleep(0.001)
        if name.startswith("cpu_update.L02") and len(overlapped) < 2:  # the two chunks of step 1
            overlapped.append(second_forward.wait(60))
        return 0.0

    trained = train(plan)
    assert trained.digest() == undisturbed
    assert overlapped == [True, True], "forward 2 waits for an update that it does not need yet"


def test_the_python_queue_gives_the_same_bits(undisturbed):
    """Updates of the undisturbed runs went to the native queue, where there is one."""
    assert train(plan_of(POLICIES[0], MachineOptions(native_queue=False))).digest() == undisturbed


def test_measure_records_every_op():
    plan = plan_of({"window": 2, "chunks": 2})
    with plan:
        timeline = plan.measure(lm_batch(seed=t) for t in range(3))
        predicted = plan.simulate()
    assert sorted(s.op for s in timeline.spans) == sorted(3 * [s.op for s in predicted.spans])
    assert set(timeline.busy_us) <= set(predicted.busy_us)
    assert timeline.step_us > 0
