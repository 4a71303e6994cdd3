"""Pinned buffers through which batches go to a GPU. The device is played."""

from __future__ import annotations

import pytest
import torch

from slidedp.executor.devices.cuda import _StagingPool

pytestmark = pytest.mark.cpu


class Event:
    """Done once the next but one has been recorded; as CUDA has it, one that has not been recorded counts as done."""

    recorded: list[Event] = []  # noqa: RUF012

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self not in self.recorded[-2:]


class Memory:
    def __init__(self) -> None:
        self.allocated: list[int] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated.append(numel)
        return torch.zeros(numel, dtype=dtype)


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(Event, "recorded", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return _StagingPool(torch.device("cpu"), Memory())


@pytest.mark.parametrize("lengths", [range(100, 4000, 10), range(4000, 100, -10), [300, 200] * 100])
def test_batches_of_many_lengths_share_a_few_buffers(pool, lengths):
    for length in lengths:
        batch = torch.arange(length)
        assert torch.equal(pool.to_device(batch), batch)
    assert len(pool._memory.allocated) <= 3 * 7
    assert sum(pool._memory.allocated) <= 3 * 2 * 2 * 8 * max(lengths)


def test_a_buffer_is_not_given_away_while_its_copy_is_under_way(pool, monkeypatch):
    seen = []
    record = Event.record

    def looking(event):
        """Another thread looks for a buffer just before the copy can be waited for."""
        seen.append([buffer.data_ptr() for buffer, done in pool._buffers if done.query()])
        record(event)

    monkeypatch.setattr(Event, "record", looking)
    for _ in range(4):
        pool.to_device(torch.arange(9))
    assert [len(free) for free in seen] == [0, 0, 0, 0]
