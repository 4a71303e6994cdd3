"""Collectives over gloo ranks: the reduction's bits, delivery's all-gather, and what hosts tell one another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import RunRanks
from torch import nn

from slidedp.compiler.layergraph import cut_chunks, shard
from slidedp.compiler.ops import Stream
from slidedp.compiler.simulation.timeline import measured_timeline
from slidedp.executor.devices.cuda import PinnedMemory
from slidedp.executor.ranks.collectives import RankCollectives, SingleRank, StagedGloo, open_collectives
from slidedp.executor.ranks.skew import peer_wait_s

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = 64 * 12  # 1 to 4 ranks cut it evenly


def gradient(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of mixed size, so that the order of summation shows in the bits."""
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(NUMEL, generator=g) * 10 ** torch.randint(-4, 3, (NUMEL,), generator=g)).to(dtype)


def rank_main(world: int) -> bool:
    """Everything in one process per rank, since starting them is what costs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    c = open_collectives(CPU, rank, world)
    for dtype in DTYPES:
        check_reduce(c, rank, world, dtype)
        check_all_gather(c, rank, world, dtype)
    check_host_messages(c, rank, world)
    check_share_buffers(c, rank)
    check_peer_wait(c, rank, world)
    c.close()
    c.close()
    dist.barrier()  # the default group is the user's, and still there
    dist.destroy_process_group()
    return True


def check_peer_wait(c, rank: int, world: int) -> None:
    """Each rank reaches the first collective a second after the one before it, the second one in the opposite order."""
    late = world - 1
    events = [("fwd", Stream.GPU, 0.0, 50.0 + rank), ("a", Stream.COMM, 10.0 + rank, 15.0 + late),
              ("b", Stream.COMM, 30.0 - rank, 32.0)]  # fmt: skip
    waited = peer_wait_s(events, c)
    assert waited == pytest.approx(late)
    line = measured_timeline(events, 2, waited)
    assert line.peer_wait_us == round(late * 1e6) // 2
    assert line.busy_us[Stream.COMM] == pytest.approx((5 + 2) * 1e6 / 2, abs=2)
    assert peer_wait_s(events[:1], c) == 0


def check_reduce(c, rank: int, world: int, dtype: torch.dtype) -> None:
    grads = [gradient(r, dtype) for r in range(world)]
    total = grads[0].float()
    for g in grads[1:]:
        total = total + g.float()
    want = total.to(dtype)
    for num_chunks in (1, 3, 7):
        got = torch.full_like(want, float("nan"))
        c.reserve(NUMEL, dtype)
        for lo, hi in cut_chunks(NUMEL, num_chunks, world):
            a, b = shard(lo, hi, rank, world)
            out = torch.empty(b - a, dtype=dtype)
            c.reduce(grads[rank][lo:hi], out)
            got[a:b] = out
            assert torch.equal(out, want[a:b]), (dtype, num_chunks)
        assert torch.equal(grads[rank], gradient(rank, dtype))  # inputs untouched


def check_all_gather(c, rank: int, world: int, dtype: torch.dtype) -> None:
    for num_chunks in (1, 3):
        slot = torch.full((NUMEL + 64,), float("nan"), dtype=dtype)  # a slot is larger than the group in it
        for lo, hi in cut_chunks(NUMEL, num_chunks, world):
            a, b = shard(lo, hi, rank, world)
            slot[a:b] = gradient(99, dtype)[a:b]
            c.all_gather(slot[lo:hi])
        assert torch.equal(slot[:NUMEL], gradient(99, dtype))
        assert slot[NUMEL:].isnan().all()


def check_host_messages(c, rank: int, world: int) -> None:
    assert c.exchange_ints([10 + rank, -1, 1 << 62]) == [10, -1, 1 << 62]
    assert c.gather_ints([rank, rank * rank]) == [[r, r * r] for r in range(world)]
    assert c.broadcast_bytes(b"plan \x00\xff" if rank == 0 else b"") == b"plan \x00\xff"
    assert c.broadcast_bytes(b"") == b""
    tensor = torch.arange(6.0).view(2, 3).t() + rank  # not contiguous
    c.broadcast(tensor)
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3).t())
    c.barrier()


def check_share_buffers(c, rank: int) -> None:
    from slidedp.executor.stages.binding import share_buffers

    with torch.device("meta" if rank else "cpu"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if rank == 0:
        model[1].running_mean.fill_(3.0)
    share_buffers(model, c)
    assert model[1].running_mean.tolist() == [3.0, 3.0]
    assert model[1].num_batches_tracked.item() == 0
    with torch.device("meta"):
        everywhere = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match="running_mean"):
        share_buffers(everywhere, c)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks(run_ranks: RunRanks, world: int) -> None:
    assert all(r.value for r in run_ranks(rank_main, world, world))


def test_one_rank_needs_no_process_group() -> None:
    c = open_collectives(CPU, 0, 1)
    assert type(c) is SingleRank
    g, out = gradient(0, torch.bfloat16), torch.empty(NUMEL, dtype=torch.bfloat16)
    c.reduce(g, out)
    assert torch.equal(g, out)
    c.all_gather(g)
    assert torch.equal(g, out)
    assert (c.exchange_ints([7]), c.gather_ints([7]), c.broadcast_bytes(b"x")) == ([7], [[7]], b"x")


def test_several_ranks_without_torch_distributed_are_refused() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        open_collectives(CPU, 0, 2)


@pytest.mark.parametrize(("backend", "aborted"), [("nccl", ["data"]), ("gloo", [])])
def test_what_is_under_way_on_a_device_is_ended_once(monkeypatch, backend, aborted) -> None:
    """Gloo's waits end by themselves. What is aborted is not destroyed after it. The group is played."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: groups.pop(0))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    ended: list[str] = []
    destroyed: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", ended.append)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    groups = ["control", "data"]
    c = RankCollectives(backend)
    c.abort()
    c.abort()
    c.close(healthy=False)
    c.close(healthy=False)
    assert ended == aborted
    assert destroyed == (["control"] if aborted else ["data", "control"])


def test_a_device_that_has_failed_fails_no_second_time_when_its_ranks_groups_are_closed(monkeypatch) -> None:
    """Ranks that share a GPU stage through pinned memory, and to give that back asks the device."""
    monkeypatch.setattr(PinnedMemory, "close", lambda self: dead())

    def dead() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    c = StagedGloo.__new__(StagedGloo)
    c._data = c._control = None
    c._scratch, c._as_bytes, c._left, c._memory = {}, True, False, PinnedMemory(CPU)
    c.close(healthy=False)
    with pytest.raises(RuntimeError, match="device-side"):
        c.close()
