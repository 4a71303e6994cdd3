"""Shared memory: seen by all ranks, counted once, allocated or refused in full, private after close, never left behind."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slidedp.executor.shared.host_memory import available_bytes
from slidedp.executor.shared.segment import GIB, HostMemoryError, SharedSegment

pytestmark = pytest.mark.cpu

MIB = 1 << 20


def is_open(name: str) -> bool:
    """True if this process has a segment's file open. (It may open and close other files at any time.)"""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return any(f"slidedp-{name}" in link for link in found)


def mapped_bytes(name: str, field: str = "Pss") -> int:
    """A field of this process's mappings of a memfd; `Pss` is its proportional share of them."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = name in line
        elif inside and line.startswith(f"{field}:"):
            total += int(line.split()[1]) << 10
    return total


def exchange(ints: list[int]) -> list[int]:
    tensor = torch.tensor(ints, dtype=torch.int64)
    dist.broadcast(tensor, src=0)
    return tensor.tolist()


def test_views_start_zeroed_and_share_memory():
    segment = SharedSegment("t", 1 * MIB)
    whole = segment.tensor(torch.float32, 0, MIB // 4)
    part = segment.tensor(torch.bfloat16, 4096, 8)
    assert not whole.any()
    part.fill_(1.0)
    assert whole.count_nonzero() == 4
    assert segment.tensor(torch.float32, 4096, 0).numel() == 0
    segment.close()


def test_close_frees_the_memory_and_keeps_living_views():
    segment = SharedSegment("closing", 4096)
    assert is_open("closing")
    view = segment.tensor(torch.int64, 0, 512)
    segment.close()
    segment.close()
    view.fill_(7)  # still mapped
    assert "closing" in Path("/proc/self/maps").read_text()
    assert not is_open("closing")
    del view
    assert "closing" not in Path("/proc/self/maps").read_text()


def test_memory_is_in_huge_pages_where_the_kernel_has_them():
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(int(x) for x in os.uname().release.split("-")[0].split(".")[:2])
    if release < (6, 1) or not setting.exists() or "[deny]" in setting.read_text():
        pytest.skip("no MADV_COLLAPSE for shared memory here")
    segment = SharedSegment("huge", 9 * MIB)
    view = segment.tensor(torch.float32, 0, 9 * MIB // 4)
    assert view.data_ptr() % (2 * MIB) == 0
    assert not view.any()
    assert mapped_bytes("slidedp-huge", "ShmemPmdMapped") == 8 * MIB
    segment.close()


def test_private_mapping_survives_and_copies_on_write():
    segment = SharedSegment("t", 8192)
    shared = segment.tensor(torch.float32, 0, 2048)
    shared.fill_(3.0)
    private = segment.remap_private().tensor(torch.float32, 0, 2048)
    private[0] = 5.0
    assert shared[0] == 3.0
    segment.close()
    del shared
    assert private[0] == 5.0
    assert (private[1:] == 3.0).all()


def test_shortage_names_both_numbers_and_keeps_nothing():
    with pytest.raises(HostMemoryError, match=r"toobig needs 3\.00 GiB, 0\.25 GiB are available; free host memory") as caught:
        SharedSegment("toobig", 3 * GIB, available=lambda: GIB // 4, wait_s=0.0)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MemoryError)
    assert not is_open("toobig")
    assert "toobig" not in Path("/proc/self/maps").read_text()


def test_a_machine_that_grows_is_waited_for():
    readings = iter([0, 0, 0, GIB])
    SharedSegment("t", MIB, available=lambda: next(readings), wait_s=10.0).close()
    assert next(readings, None) is None


def test_available_memory_honours_control_groups(tmp_path):
    def tree(name: str, files: dict[str, str]) -> Path:
        for path, text in {"proc/meminfo": f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 24} kB\n", **files}.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        return tmp_path / name

    group = "sys/fs/cgroup"
    machine = available_bytes(tree("machine", {}))
    assert 15 * GIB < machine < 16 * GIB
    v2 = {"proc/self/cgroup": "0::/a/b\n", f"{group}/a/b/memory.max": "max\n", f"{group}/a/b/memory.current": "5\n"}
    assert available_bytes(tree("unlimited", v2)) == machine
    limited = {  # by the parent; one of its 3 GiB is file cache, which can be dropped
        **v2,
        f"{group}/a/memory.max": f"{4 * GIB}\n",
        f"{group}/a/memory.current": f"{3 * GIB}\n",
        f"{group}/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert GIB < available_bytes(tree("v2", limited)) < 2 * GIB
    v1 = {  # the path is the host's, our group is mounted at the root
        "proc/self/cgroup": "4:cpu,memory:/docker/xyz\n3:cpuset:/\n",
        f"{group}/memory/memory.limit_in_bytes": f"{GIB}\n",
        f"{group}/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
    }
    assert 0 < available_bytes(tree("v1", v1)) < GIB // 2
    over = {**v1, f"{group}/memory/memory.usage_in_bytes": f"{2 * GIB}\n"}
    assert available_bytes(tree("over", over)) == 0


def share(size_mib: int) -> dict:
    """One of two ranks: a segment made by rank 0, seen, counted and closed by both; then one that rank 0 cannot make."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    numel = size_mib * MIB // 8
    segment = SharedSegment("both", size_mib * MIB, rank=rank, exchange=exchange)
    dist.barrier()
    data = segment.tensor(torch.int64, 0, numel)
    data[rank * numel // 2 : (rank + 1) * numel // 2] = rank + 1
    dist.barrier()
    total = int(data.sum())
    dist.barrier()  # both have touched all of it by now
    pss = mapped_bytes("slidedp-both")
    private = segment.remap_private().tensor(torch.int64, 0, numel)
    dist.barrier()
    del data
    segment.close()
    private[0] = 100 + rank
    dist.barrier()
    error = ""
    try:
        SharedSegment("huge", 5 * GIB, rank=rank, exchange=exchange, available=lambda: 0, wait_s=0.0)
    except HostMemoryError as e:
        error = str(e)
    dist.barrier()
    dist.destroy_process_group()
    return {"total": total, "pss": pss, "first": int(private[0]), "last": int(private[-1]), "error": error}


def test_two_ranks_share_one_copy(run_ranks):
    ranks = [r.value for r in run_ranks(share, 2, 32)]
    assert [r["total"] for r in ranks] == [32 * MIB // 16 * 3] * 2
    assert 0.95 * 32 * MIB < sum(r["pss"] for r in ranks) < 1.05 * 32 * MIB
    assert [(r["first"], r["last"]) for r in ranks] == [(100, 2), (101, 2)]
    assert all("huge needs 5.00 GiB, 0.00 GiB" in r["error"] for r in ranks)
    assert not [f for f in os.listdir("/dev/shm") if "slidedp" in f]
