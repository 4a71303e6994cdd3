"""The CPU update alone: parameters per second by threads, what a queue adds to a task, and both with the links busy.

    python examples/benchmarks/update_bench.py                     # on the machine to be known; 30 bytes of memory a parameter
    python examples/benchmarks/update_bench.py --params 50 --threads 1,2
    python examples/benchmarks/update_bench.py --threads 14,16 --baselines ../shared/baselines  # host_limits.py's beside it

One JSON line a measurement:

``kernel``     one call over everything, BF16 gradient in, BF16 shadow out; `reference`: the simplest kernel that vectorises,
               OpenMP with equal shares (as in a plain CPU Adam), on the same memory. The two take turns; medians
``apart``      the same update out of place, as of a group that speculates: new state and shadow in buffers of their own
``queue``      the same elements in tasks of so many MB of gradient, all ready: by the native queue and by the Python worker.
               `idle_us`: what a task takes beyond its share of `kernel`. `busy`: while another Python thread never rests.
               `alone_us`: from submitting to done of one update of 64 parameters, when nothing else is queued
``links``      (with a GPU) every kernel while both DMA directions copy; GB/s of each. `pace` 0: without pause, so that a kernel
               that takes more of the memory leaves less for the copies; else at so many GB/s each way, the same beside every
               kernel: its `ratio`, its time over ours, is the one at equal DMA bytes

`--baselines DIR`: the kernel of DIR/host_limits.py as ``host_limits``, on memory like its own: ordinary pages, pinned where a GPU
copies.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from slidedp.compiler.decisions import Decisions, GroupDecision, Source, Update
from slidedp.compiler.layergraph import Group, Param
from slidedp.compiler.ops import Stream
from slidedp.compiler.optimizer import AdamW
from slidedp.executor.native.build import StepConstants, What
from slidedp.executor.optim.adam import CpuAdam
from slidedp.executor.state.host_state import HostState
from slidedp.executor.streams.streams import Streams
from slidedp.executor.streams.updates import UpdateQueue

REFERENCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
extern "C" void adamw(float* p, float* m, float* v, const uint16_t* g, uint16_t* out, int64_t n, float lr, float b1, float b2,
                      float eps, float wd, float step_size, float inv_bias2_sqrt, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = uint32_t(g[i]) << 16;
    float grad;
    std::memcpy(&grad, &bits, 4);
    float mean = m[i] * b1 + grad * (1 - b1), square = v[i] * b2 + grad * grad * (1 - b2);
    float param = p[i] * (1 - lr * wd) - step_size * mean / (std::sqrt(square) * inv_bias2_sqrt + eps);
    m[i] = mean, v[i] = square, p[i] = param;
    uint32_t w;
    std::memcpy(&w, &param, 4);
    out[i] = uint16_t((w + 0x7fff + ((w >> 16) & 1)) >> 16);
  }
}
"""
NAME = "G"
BYTES_PER_PARAM = 28  # read and written: master and two moments 24, gradient 2, shadow 2
OPTIMIZER = AdamW(lr=1e-5)


def main() -> None:
    args = parse_arguments()
    numel = args.params * 1_000_000 // 64 * 64
    group = Group(NAME, numel, numel, (NAME,), (Param(("weight",), (numel,), 0),))
    decision = GroupDecision(source=Source.SHADOW, update=Update.SPECULATIVE)
    state = HostState((group,), Decisions({NAME: decision}, update=Update.DEFERRED), rank=0, world_size=1,
                      compute_dtype=torch.bfloat16, grad_dtype=torch.bfloat16, num_words=1)
    for i in range(0, numel, 1 << 24):  # not zeros: their square roots may be faster than others
        state.master[NAME][i : i + (1 << 24)].normal_()
        state.grad[NAME][i : i + (1 << 24)].normal_()
    reference = build_reference(state)
    baseline = build_baseline(args.baselines, numel) if args.baselines else None
    for threads in args.threads:
        adam = CpuAdam(state, [group], OPTIMIZER, kernel="native", num_threads=threads)
        ours = numbered(lambda step, adam=adam: adam.update(NAME, 0, numel, step))
        theirs = lambda threads=threads: reference(threads)  # noqa: E731
        mine_s, theirs_s = in_turns(ours, theirs, args.repeats)
        report("kernel", threads, numel, mine_s, reference_gparams=round(numel / theirs_s / 1e9, 3),
               ratio=round(theirs_s / mine_s, 3))
        apart = numbered(lambda step, adam=adam: adam.update(NAME, 0, numel, step, what=What.SPECULATE))
        mine_s, apart_s = in_turns(ours, apart, args.repeats)
        report("apart", threads, numel, apart_s, ratio=round(mine_s / apart_s, 3))
        kernels = {"ours": ours, "reference": theirs, "apart": apart}
        if baseline is not None:
            kernels["host_limits"] = lambda threads=threads: baseline(threads)
            mine_s, theirs_s = in_turns(ours, kernels["host_limits"], args.repeats)
            report("host_limits", threads, numel, theirs_s, ours_gparams=round(numel / mine_s / 1e9, 3),
                   ratio=round(theirs_s / mine_s, 3))
        if threads in args.queue_threads:
            for megabytes in args.megabytes:
                measure_queues(adam, state, threads, megabytes, args.repeats)
        if torch.cuda.is_available():
            for pace in args.paces:
                links(threads, numel, kernels, args.repeats, pace)
    state.close(keep_master=False)


def parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--params", type=int, default=400, help="millions")
    p.add_argument("--threads", type=numbers, default=[1, 4, 8, 12, 14, 16])
    p.add_argument("--queue-threads", type=numbers, default=[14], help="those of --threads to measure the queues with")
    p.add_argument("--megabytes", type=numbers, default=[4, 8, 16, 32], help="of BF16 gradient a task")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--paces", type=numbers, default=[0, 20], help="GB/s of each DMA direction beside the kernels; 0: all it can")
    p.add_argument("--baselines", type=Path, help="a folder with host_limits.py")
    return p.parse_args()


def measure_queues(adam: CpuAdam, state: HostState, threads: int, megabytes: int, repeats: int) -> None:
    """Every task is ready from the start: what goes by between two is the queue's."""
    numel, size = state.grad[NAME].numel(), megabytes * 500_000 // 64 * 64
    bounds = [(lo, min(lo + size, numel)) for lo in range(0, numel, size)]
    streams = Streams()
    streams.updates.open_queue(UpdateQueue(adam.kernels.library, threads, state.words.shape()))

    def native(step: int, bounds: list[tuple[int, int]] = bounds) -> None:
        constants = StepConstants(step, OPTIMIZER.lr, 0, None)
        tickets = [streams.updates.submit_update(adam.bind(NAME, *b).handle, constants, (), present=0, gates=(), name="",
                                                 deadline=0, finished=lambda result: None) for b in bounds]
        for ticket in tickets:
            ticket.wait_done()

    def python(step: int, bounds: list[tuple[int, int]] = bounds) -> None:
        tickets = [streams.submit(Stream.CPU, lambda b=b: adam.update(NAME, *b, step)) for b in bounds]
        for ticket in tickets:
            ticket.wait_done()

    whole = numbered(lambda step: adam.update(NAME, 0, numel, step))
    for busy in (False, True):
        with busy_python() if busy else nothing():
            for queue, run in (("native", native), ("python", python)):
                queue_s, kernel_s = in_turns(numbered(run), whole, repeats)
                idle_us = (queue_s - kernel_s) / len(bounds) * 1e6
                alone = numbered(lambda step, run=run: run(step, [(0, 64)]))
                alone_us = statistics.median(timed(alone) for _ in range(20)) * 1e6
                report("queue", threads, numel, queue_s, queue=queue, megabytes=megabytes, busy=busy, tasks=len(bounds),
                       task_us=round(queue_s / len(bounds) * 1e6), idle_us=round(idle_us, 1), alone_us=round(alone_us, 1))
    streams.close()


def links(threads: int, numel: int, kernels: dict[str, Callable[[], object]], repeats: int, pace: int) -> None:
    ours_s = 0.0
    for name, run in kernels.items():
        with both_directions(2 * numel, pace) as moved:
            while not all(moved):  # until both copy: their memory takes a while to pin
                run()
            before, began = list(moved), time.perf_counter()
            seconds = statistics.median([timed(run) for _ in range(repeats)])
            wall_s = time.perf_counter() - began
            h2d, d2h = ((after - b) / wall_s / 1e9 for after, b in zip(moved, before, strict=True))
        ours_s = ours_s or seconds
        report("links", threads, numel, seconds, kernel=name, pace=pace, h2d_gbps=round(h2d, 1), d2h_gbps=round(d2h, 1),
               ratio=round(seconds / ours_s, 3))


@contextmanager
def both_directions(nbytes: int, pace: int, piece: int = 32 << 20) -> Iterator[list[int]]:
    """Copies between host and GPU, both ways, piece by piece through `nbytes` of host memory, until the block ends: more than a
    cache holds. `pace`: GB/s of each way; 0: as fast as they go. Yields the bytes moved so far, up and down.
    """
    moved, stop = [0, 0], threading.Event()

    def copy(way: int) -> None:
        parts = torch.zeros(nbytes // piece * piece or nbytes, dtype=torch.uint8, pin_memory=True).split(piece)
        device = torch.zeros_like(parts[0], device="cuda")
        begun = time.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream()):
            for host in itertools.cycle(parts):
                if stop.is_set():
                    return
                done = torch.cuda.Event(blocking=True)
                (device.copy_(host, non_blocking=True) if way == 0 else host.copy_(device, non_blocking=True))
                done.record()
                done.synchronize()
                moved[way] += len(host)
                if pace:
                    stop.wait(begun + moved[way] / (pace * 1e9) - time.perf_counter())

    threads = [threading.Thread(target=copy, args=(way,)) for way in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield moved
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def busy_python() -> Iterator[None]:
    """Another thread runs Python all the time, as the one that issues a step's ops does."""
    stop = False

    def spin() -> None:
        while not stop:
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


@contextmanager
def nothing() -> Iterator[None]:
    yield


def build_reference(state: HostState) -> Callable[[int], None]:
    """A function of the number of threads."""
    kernel = compiled(REFERENCE)
    buffers = (state.master, state.exp_avg, state.exp_avg_sq, state.grad, state.shadow)
    pointers = [ctypes.c_void_p(b[NAME].data_ptr()) for b in buffers]
    floats = [ctypes.c_float(x) for x in (OPTIMIZER.lr, *OPTIMIZER.betas, OPTIMIZER.eps, OPTIMIZER.weight_decay, 1e-4, 4.0)]
    return lambda threads: kernel(*pointers, ctypes.c_int64(state.grad[NAME].numel()), *floats, threads)


def build_baseline(folder: Path, numel: int) -> Callable[[int], None]:
    """The kernel that host_limits.py measures, on memory as it makes it; a function of the number of threads."""
    spec = importlib.util.spec_from_file_location("host_limits", folder / "host_limits.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    kernel, cuda = compiled(module.SOURCE), torch.cuda.is_available()
    tensors = [torch.randn(numel), torch.zeros(numel), torch.zeros(numel), torch.randn(numel).bfloat16(),
               torch.empty(numel, dtype=torch.bfloat16)]
    tensors[3:] = [t.pin_memory() if cuda else t for t in tensors[3:]]

    def run(threads: int) -> None:
        floats = (1e-5, 0.9, 0.95, 1e-8, 0.1, 10.0, 4.0)
        kernel(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), ctypes.c_int64(numel), *map(ctypes.c_float, floats), threads)

    return run


def compiled(source: str) -> Callable[..., None]:
    """The function `adamw` of C++ `source`."""
    folder = Path(tempfile.mkdtemp(prefix="slidedp-reference-"))
    (folder / "adamw.cpp").write_text(source)
    flags = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"]
    subprocess.check_call(["g++", *flags, str(folder / "adamw.cpp"), "-o", str(folder / "adamw.so")])
    kernel: Callable[..., None] = ctypes.CDLL(str(folder / "adamw.so")).adamw
    return kernel


def numbered(run: Callable[[int], object]) -> Callable[[], object]:
    """`run` with a step number that goes up."""
    steps = iter(range(1, 1 << 30))
    return lambda: run(next(steps))


def in_turns(a: Callable[[], object], b: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of each; one call of each warms up. In turns, so that both see the same machine."""
    a(), b()
    seconds = [(timed(a), timed(b)) for _ in range(repeats)]
    return statistics.median(s[0] for s in seconds), statistics.median(s[1] for s in seconds)


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def report(what: str, threads: int, numel: int, seconds: float, **extra: object) -> None:
    line = {"what": what, "threads": threads, "gparams": round(numel / seconds / 1e9, 3),
            "host_gbps": round(BYTES_PER_PARAM * numel / seconds / 1e9, 1), **extra}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
