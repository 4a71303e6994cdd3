"""What the ranks of the test of host memory run: new processes, which import little, and count what they take."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from plain_models import PlainGPT, lm_batch

import slidedp


def memory(width: int, layers: int) -> dict[str, int]:
    """Bytes of this rank beyond what the process had before the model was built, and what the state should take.

    `pss`: whole process but for mapped files (libraries), each page as 1/n where n processes map it. `peak_private`,
    `peak_resident`: the most since then, of memory that is its own (sampled each millisecond) and of all that it has mapped
    (from the kernel). `slots`: window, gradient and staging buffers, which on a GPU would be device memory.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_once(rank, 32, 2).close()  # so that no module is imported and no thread pool made later
    dist.barrier()
    reset_peak()
    pss, private, resident = anonymous_pss(), status("RssAnon"), status("VmRSS")
    with PeakPrivate() as peak:
        plan = train_once(rank, width, layers)
        dist.barrier()
        host = plan._machine.state.bytes_by_place()
        slots = sum(slot.count * slot.bytes for slot in plan._spec.graph.slots)
        result = {"pss": anonymous_pss() - pss, "peak_resident": status("VmHWM") - resident,
                  "master": host["master"], "moments": host["moments"], "state": sum(host.values()), "slots": slots,
                  "parameters": sum(p.nbytes for p in plan.model.parameters())}
        dist.barrier()
    plan.close()
    return result | {"peak_private": peak.bytes - private}


def train_once(rank: int, width: int, layers: int) -> slidedp.Plan:
    with torch.device("cpu" if rank == 0 else "meta"):
        gpt = PlainGPT(width=width, layers=layers)
    policy = {"source": "cast", "window": 1, "chunks": 4, "grad_slots": 1, "state": "host", "act": "recompute"}
    plan = slidedp.compile(gpt, "cpu", policy=policy, solver="rule")
    plan.run(lm_batch())
    plan.synchronize()
    return plan


class PeakPrivate:
    """Samples anonymous memory of this process while the block runs. `bytes`: the most seen."""

    def __init__(self) -> None:
        self.bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._end.wait(1e-3):
            self.bytes = max(self.bytes, status("RssAnon"))

    def __enter__(self) -> PeakPrivate:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def anonymous_pss() -> int:
    """Private and shared anonymous memory. Not files: their share grows when an unrelated process with torch ends."""
    return sum(_kilobytes("/proc/self/smaps_rollup", key) for key in ("Pss_Anon", "Pss_Shmem"))


def status(key: str) -> int:
    return _kilobytes("/proc/self/status", key)


def _kilobytes(path: str, key: str) -> int:
    with open(path) as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith(key + ":"))


def reset_peak() -> None:
    """VmHWM starts anew (Linux, proc_pid_clear_refs(5))."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
