"""What lives as long as a plan is no business of the garbage collector's."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny_models import PlainGPT, lm_batch

import slidedp
from slidedp.executor.devices import cuda, garbage
from slidedp.executor.devices.backend import CpuBackend
from slidedp.executor.devices.cuda import CudaBackend


class Cycle:
    def __init__(self) -> None:
        self.me = self


def is_frozen() -> bool:
    """Whether what is alive is frozen: with torch imported some 200 000 objects. The count need not be 0 otherwise: each full
    collection of Python 3.12 puts what is immortal among the frozen ones, 375 tuples of the built-in types.
    """
    return gc.get_freeze_count() > 10_000


@pytest.fixture(autouse=True)
def thawed(monkeypatch):
    """Whatever plans of tests that have failed before are still open."""
    monkeypatch.setattr(garbage, "_owners", set())
    gc.unfreeze()
    yield
    assert not is_frozen()
    gc.enable()
    gc.collect()
    gc.freeze()  # as conftest.py has it


def test_held_until_the_last_owner_lets_go():
    one, other = object(), object()
    garbage.hold(one)
    garbage.hold(other)
    garbage.hold(one)
    assert is_frozen()
    garbage.release(one)
    garbage.release(one)
    assert is_frozen()
    garbage.release(other)
    assert not is_frozen()


def test_what_is_garbage_is_collected_all_the_same():
    old = Cycle()
    dead = weakref.ref(old)
    owner = object()
    garbage.hold(owner)
    del old
    gc.collect()
    assert dead() is not None  # out of an ordinary collection's sight
    garbage.collect()
    assert dead() is None
    assert is_frozen()
    young = weakref.ref(Cycle())
    gc.collect()
    assert young() is None
    garbage.release(owner)


def test_let_go_of_though_something_was_frozen_before():
    """Python 3.12 begins with some 400 frozen objects of its own."""
    gc.freeze()
    old = Cycle()
    dead = weakref.ref(old)
    garbage.hold(owner := object())
    del old
    garbage.release(owner)
    gc.collect()
    assert dead() is None


def test_collection_turned_off_is_left_off():
    gc.disable()
    garbage.hold(owner := object())
    assert not is_frozen()
    garbage.release(owner)
    assert not gc.isenabled()


def test_a_plan_that_nobody_holds_or_has_closed_ends_when_the_next_one_opens_its_device(monkeypatch):
    """It was frozen alive, as part of a cycle (a Trainer's, say), and nothing but its own end would thaw it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(cuda, "Clock", lambda device: None)
    trainer, backend = Cycle(), object()
    weakref.finalize(trainer, garbage.release, backend)
    garbage.hold(backend)
    del trainer
    gc.collect()
    assert is_frozen()
    CudaBackend(0)
    assert not is_frozen()


def test_settles_after_the_first_step_of_each_graph_and_not_again(monkeypatch):
    """A plan calls for it where a step has just shown what stays: once, and once for evaluation."""
    calls = []
    monkeypatch.setattr(CpuBackend, "settle", lambda self: calls.append(len(calls)))
    with slidedp.compile(PlainGPT(), optimizer=slidedp.AdamW(lr=1e-3)) as plan:
        for seed in range(3):
            plan.run(lm_batch(seed=seed))
        assert len(calls) == 1
        plan.evaluate(lm_batch())
        plan.evaluate(lm_batch())
        plan.run(lm_batch())
        assert len(calls) == 2


@pytest.mark.gpu
def test_nothing_of_a_closed_plan_stays_on_the_device():
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        with slidedp.compile(PlainGPT(width=256), device="cuda", optimizer=slidedp.AdamW(lr=1e-3), measure=False) as plan:
            plan.run(lm_batch())
            plan.synchronize()
            assert is_frozen()
            assert torch.cuda.memory_allocated() > before + (1 << 20)
        del plan
        gc.collect()
        assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
def test_a_plan_left_in_a_cycle_gives_the_device_back_to_the_next_one():
    def compiled() -> slidedp.Plan:
        return slidedp.compile(PlainGPT(width=256), device="cuda", optimizer=slidedp.AdamW(lr=1e-3), measure=False)

    cycle = Cycle()
    cycle.plan = compiled()
    cycle.plan.run(lm_batch())
    machine = weakref.ref(cycle.plan._machine)
    del cycle
    gc.collect()
    assert machine() is not None
    with compiled() as plan:
        plan.run(lm_batch())
        assert machine() is None or machine().closed
