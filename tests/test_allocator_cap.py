"""What `hbm_budget` makes of the limit that torch's allocator has for the whole process. The device is played."""

from __future__ import annotations

import threading

import pytest
import torch

from slidedp.executor.devices import allocator
from slidedp.executor.devices.allocator import AllocatorCap

pytestmark = pytest.mark.cpu

GPUS = [torch.device("cuda", i) for i in range(2)]
TOTAL = 80
GROWS: list[bool] = []
"""What the allocator has been told of its segments."""


@pytest.fixture
def limits(monkeypatch):
    """The fraction of each GPU, as torch has it."""
    shares = dict.fromkeys(GPUS, 1.0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: shares[device])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.update({device: share}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, TOTAL))
    monkeypatch.setattr(AllocatorCap, "_parts", {})
    monkeypatch.setattr(allocator, "set_expandable_segments", GROWS.append)
    GROWS.clear()
    return shares


@pytest.mark.parametrize("first_closed", [0, 1])
def test_two_plans_have_the_sum_and_the_one_that_is_left_its_own(limits, first_closed):
    caps, sizes = [AllocatorCap(GPUS[0]) for _ in range(2)], [20, 30]
    caps[0].set(sizes[0])
    assert limits[GPUS[0]] == 20 / TOTAL
    caps[1].set(sizes[1])
    assert limits[GPUS[0]] == 50 / TOTAL
    for _ in range(2):  # closing is idempotent
        caps[first_closed].lift()
        assert limits[GPUS[0]] == sizes[1 - first_closed] / TOTAL
    assert all(GROWS)
    caps[1 - first_closed].lift()
    assert limits == {GPUS[0]: 1.0, GPUS[1]: 1.0}
    assert not GROWS[-1]


def test_more_than_there_is_and_another_gpu(limits):
    caps = [AllocatorCap(GPUS[0]), AllocatorCap(GPUS[0]), AllocatorCap(GPUS[1])]
    for cap in caps:
        cap.set(50)
    assert limits == {GPUS[0]: 1.0, GPUS[1]: 50 / TOTAL}
    caps[0].lift()
    assert limits[GPUS[0]] == 50 / TOTAL, "a sum that was no limit is one again"


def test_the_users_own_limit_stays(limits):
    limits[GPUS[0]] = 0.25
    cap = AllocatorCap(GPUS[0])
    cap.set(50)
    assert limits[GPUS[0]] == 0.25
    cap.lift()
    assert limits[GPUS[0]] == 0.25
    assert not GROWS


def test_the_users_own_configuration_stays(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    allocator.set_expandable_segments(True)
    assert told == []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    allocator.set_expandable_segments(True)
    allocator.set_expandable_segments(False)
    assert told == ["expandable_segments:True", "expandable_segments:False"]


def test_a_plan_may_be_collected_while_another_one_sets_its_part(limits, monkeypatch):
    """Garbage is collected wherever something is allocated, and closes the plan in that thread if it is the main one."""
    caps = [AllocatorCap(GPUS[0]) for _ in range(2)]
    caps[0].set(20)

    def collecting(device):
        caps[0].lift()
        return 0, TOTAL

    monkeypatch.setattr(torch.cuda, "mem_get_info", collecting)
    opening = threading.Thread(target=caps[1].set, args=[30], daemon=True)
    opening.start()
    opening.join(60)
    assert not opening.is_alive()
    assert limits[GPUS[0]] == 30 / TOTAL
