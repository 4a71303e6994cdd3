"""Measuring: the machine's profile, a model's stages, and what is said meanwhile."""

from __future__ import annotations

import io
import os
import random
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import PlainGPT, classification_loss, family, lm_batch, mlp_batch
from torch import nn

import slidedp
from slidedp import hardware
from slidedp.commands.cli import main
from slidedp.compiler.costmodel.tables import Load, Quantity
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.tracing.minipipeline import mini_pipeline, reached
from slidedp.compiler.tracing.tracer import trace
from slidedp.executor.devices.backend import CpuBackend
from slidedp.executor.measure.caches import last_level_cache_bytes
from slidedp.executor.measure.host import measure_task_us, measure_update
from slidedp.executor.measure.lab import Lab, num_ops, one_op, overlapping
from slidedp.executor.measure.machine import FULL_CPU, FULL_CUDA, QUICK_CPU, QUICK_CUDA, MachineFigures, state_numel
from slidedp.executor.measure.rig import STATE_BYTES_PER_PARAM, Rig, enough
from slidedp.executor.measure.stages import _Pipeline, layers_in_a_row, measure_stages, num_in_a_row
from slidedp.executor.optim.adam import CpuAdam
from slidedp.executor.ranks.collectives import SingleRank
from slidedp.executor.stages.binding import Binding
from slidedp.executor.stages.stages import StageRunner
from slidedp.executor.streams.updates import UpdateStream
from slidedp.hardware import detect, load_profile
from slidedp.progress import progress_bar

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
FP32 = torch.float32, torch.float32


# ---- the machine ----


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A quick profile by the command line, and where it is kept."""
    folder = tmp_path_factory.mktemp("profile")
    out, kept = folder / "my.yaml", folder / "kept"
    assert main(["profile", "--quick", "--device", "cpu", "--cache-dir", str(kept), "-o", str(out)]) == 0
    return load_profile(out), kept


def test_profile_has_what_a_cost_model_needs(profiled):
    profile, _ = profiled
    assert profile.name == "cpu x1 (measured)"
    assert (profile.host_bytes, profile.num_cores) == (detect("cpu").host_bytes, detect("cpu").num_cores)
    have = {(c.quantity, c.load) for c in profile.tables.curves}
    links, adam = (Quantity.H2D_GBPS, Quantity.D2H_GBPS), Quantity.CPU_ADAM_GPARAMS
    assert have == {*((q, load) for q in links for load in (Load.ALONE, Load.DUPLEX, Load.BUSY)), (adam, Load.ALONE),
                    (adam, Load.BUSY), (Quantity.CAST_GBPS, Load.ALONE)}  # fmt: skip
    assert profile.tables.find(Quantity.H2D_GBPS, Load.ALONE).points[-1][1] == profile.h2d_gbps
    assert max(rate for _, rate in profile.tables.find(adam, Load.ALONE).points) == profile.cpu_adam_gparams
    assert profile.host_dram_gbps >= 28 * profile.cpu_adam_gparams * 0.999
    plan = slidedp.plan_on_paper("qwen3-0.6b", profile, batch=1, seq=64, solver="rule")
    assert set(plan.costs.sources) == {"analytic", "measured table"}


def test_auto_is_what_was_measured_here(profiled):
    profile, kept = profiled
    if not torch.cuda.is_available():
        assert load_profile("auto", cache_dir=kept) == profile


def test_measure_by_name(profiled, tmp_path, monkeypatch):
    """ "measure" measures every time, and is "auto" from then on; so is `HardwareProfile.measure()`."""
    known, _ = profiled
    rates = {f: getattr(known, f) for f in ("h2d_gbps", "cpu_adam_gparams")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "measure_machine", lambda *_, **options: MachineFigures(rates, known.tables))
    found = load_profile("measure", cache_dir=tmp_path)
    assert (found.h2d_gbps, found.tables) == (known.h2d_gbps, known.tables)
    assert load_profile("auto", cache_dir=tmp_path) == found
    rates["h2d_gbps"] = 3.5
    assert slidedp.HardwareProfile.measure(cache_dir=tmp_path, keep=False).h2d_gbps == 3.5
    assert load_profile("auto", cache_dir=tmp_path) == found
    assert load_profile("measure", cache_dir=tmp_path) != found
    assert load_profile("auto", cache_dir=tmp_path).h2d_gbps == 3.5


def test_a_damaged_profile_is_a_warning(profiled, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, kept = profiled
    (file,) = kept.iterdir()
    (tmp_path / file.name).write_text(file.read_text().replace("h2d_gbps", "h2d_gbs", 1))
    with pytest.warns(UserWarning, match=r"cannot be used.*h2d_gbs"):
        assert load_profile("auto", cache_dir=tmp_path) == detect()


def test_overlap_counts_only_what_ran_beside_the_others():
    spans = {Stream.H2D: [(0, 1), (1, 3), (3, 5), (5, 6)], Stream.CPU: [(0.5, 2), (2, 4.9)]}
    assert overlapping(spans) == {Stream.H2D: [(1, 3)], Stream.CPU: [(0.5, 2), (2, 4.9)]}
    apart = {Stream.H2D: [(0, 1)], Stream.CPU: [(2, 3)]}
    assert overlapping(apart) == apart
    assert [num_ops(1.0, s) for s in (10.0, 0.1, 1e-6)] == [4, 10, 200]


def test_an_update_lasts_until_the_next_one_ends():
    """It begins while the last blocks of the one before run, and whatever lies between two costs as much."""
    spans = [(0.0, 1.0), (0.5, 2.0), (3.0, 3.9), (3.5, 5.5)]
    assert one_op(Stream.CPU, spans) == 1.5
    assert one_op(Stream.CPU, spans[:1]) == 1.0
    assert one_op(Stream.H2D, spans) == 1.25


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_updates_are_measured_as_a_plan_runs_them(kernel, monkeypatch):
    """The native kernel's through its queue, with as many threads as the point says; torch's in the stream's own thread."""
    queues, native, python = [], [], []
    monkeypatch.setattr(UpdateStream, "open_queue", wrapped(UpdateStream.open_queue, lambda _, queue: queues.append(queue)))
    monkeypatch.setattr(UpdateStream, "submit_update", wrapped(UpdateStream.submit_update, lambda _, handle, *args, **kwargs:
                                                               native.append(handle)))
    monkeypatch.setattr(CpuAdam, "update", wrapped(CpuAdam.update, lambda _, *args: python.append(args)))
    with closing(CpuBackend()) as backend, closing(Lab(backend, SingleRank(), 0.001)) as lab:
        rig = Rig(backend, SingleRank(), 1 << 16, 1 << 14, kernel)
        curves, most_gbps = measure_update(lab, rig, [1, 2], 4096, 2, crossings=2)
        assert measure_task_us(lab, rig, 4096, 1) > 0
    assert [x for x, _ in curves[0].points] == ([1, 2] if kernel == "native" else [2])
    assert most_gbps >= 28 * max(rate for curve in curves[:2] for _, rate in curve.points)
    assert len(queues) == (4 if kernel == "native" else 0)  # two threads twice
    assert bool(native) == (kernel == "native")
    assert bool(python) == (kernel == "torch")
    rig.close()


def wrapped(function, note):
    """`function`, with `note` called first, alike."""

    def both(*args, **kwargs):
        note(*args, **kwargs)
        return function(*args, **kwargs)

    return both


class Recorder(CpuBackend):
    """Keeps where the host side of each copy was: its address, and bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def copy(self, dst, src):
        mine = min(dst, src, key=lambda t: t.untyped_storage().nbytes())  # the device's buffers are of one piece
        host = src if mine is dst else dst
        self.seen.append((host.data_ptr(), host.nbytes))


def test_copies_walk_through_more_than_the_caches_hold():
    """As much as is promised lies between two copies of one place, either way, and a task goes on where the last one ended."""
    sizes = replace(QUICK_CPU, numel=1 << 12, link_bytes=(4096, 8192), caches=3, cache_bytes=last_level_cache_bytes() // 64)
    numel = enough(sizes.numel, 4096, 1, sizes.caches * sizes.cache_bytes)
    backend = Recorder()
    rig = Rig(backend, SingleRank(), numel, 4096, "torch")
    for make in (rig.to_device, rig.to_host):
        for _ in range(2):
            task = make(8192)
            for _ in range(STATE_BYTES_PER_PARAM * numel // 8192 // 2):
                task()
        places = [address for address, _ in backend.seen]
        assert len(set(places)) == len(places)
        assert sum(nbytes for _, nbytes in backend.seen) * 1.01 > sizes.caches * sizes.cache_bytes
        task()
        assert backend.seen[-1][0] == places[0]
        backend.seen.clear()
    rig.close()


@pytest.mark.parametrize("sizes", [FULL_CPU, FULL_CUDA, QUICK_CUDA])
def test_what_is_measured_does_not_fit_the_caches(sizes):
    one = STATE_BYTES_PER_PARAM * state_numel(sizes, SingleRank())
    assert one >= sizes.caches * max(last_level_cache_bytes(), sizes.cache_bytes)
    assert sizes.caches >= 4
    assert one % (STATE_BYTES_PER_PARAM * sizes.link_bytes[-1] // 2) == 0


def test_caches_are_counted_once_and_instructions_not(tmp_path, monkeypatch):
    cpus = {0: "0-1", 1: "0-1", 2: "2-3"}
    for cpu, shared in cpus.items():
        for index, (level, kind, size, of) in enumerate([(1, "Data", "48K", str(cpu)), (1, "Instruction", "64K", str(cpu)),
                                                         (2, "Unified", "2048K", str(cpu)), (3, "Unified", "32M", shared)]):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", of)):
                (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    assert last_level_cache_bytes(tmp_path) == 64 << 20
    (tmp_path / "cpu2/cache/index3/size").write_text("lots")
    assert last_level_cache_bytes(tmp_path) == (32 << 20) + (2 << 20)
    assert last_level_cache_bytes(tmp_path / "none") == 0


# ---- stages ----


def test_every_kind_of_stage_is_measured():
    model, batch = family("gemma3"), lm_batch()  # sliding and full attention in turn
    traced = trace(model, batch)
    assert [p.name for p in mini_pipeline(traced).programs] == [s.name for s in traced.graph.stages]  # two of each of two kinds
    mini = mini_pipeline(traced, per_kind=1)
    assert [p.name for p in mini.programs] == ["prologue", "L00", "L01", "epilogue"]
    assert traced.programs[-1].inputs != mini.programs[-1].inputs
    assert reached(mini) == {"prologue", "L00", "L01", "epilogue"}
    kinds = {s.name: s.kind_key for s in mini.graph.stages}
    both = ("L00", "L01")
    want = {(kinds["prologue"], OpKind.PROLOGUE), (kinds["epilogue"], OpKind.EPILOGUE), (kinds["prologue"], OpKind.BACKWARD)}
    want |= {(kinds[s], phase) for s in both for phase in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD)}
    rows = measure_stages(model, traced, batch, CPU, FP32)
    assert {(r.kind_key, r.phase) for r in rows} == want
    assert len(rows) == len(want)
    assert all(r.duration_us > 0 and r.peak_bytes is None for r in rows)


def test_as_many_layers_in_a_row_as_a_step_has_or_for_half_a_second():
    assert num_in_a_row(18, 0.02) == 18
    assert num_in_a_row(18, 0.1) == 5
    assert num_in_a_row(0.5, 7.0) == 1


def test_layers_in_a_row_have_their_backwards_and_are_told_apart(monkeypatch):
    """As a GPU's are timed: twice a run with the head and three without; of the last three each part has its own times."""
    ran = []
    for name in ("forward", "epilogue", "_commit"):
        whole = getattr(StageRunner, name)
        monkeypatch.setattr(StageRunner, name, lambda *args, name=name, whole=whole: (ran.append(name), whole(*args))[1])

    class Numbered(Lab):
        def spans(self, work):
            super().spans(work)
            return {stream: [(0.0, float(i)) for i in range(len(tasks))] for stream, tasks in work.items()}

    model, batch = PlainGPT(), lm_batch()
    mini = mini_pipeline(trace(model, batch))
    with closing(CpuBackend()) as backend, closing(Numbered(backend, SingleRank(), 0.0)) as lab:
        pipeline = _Pipeline(mini, Binding(model, mini.graph.groups), backend, batch, FP32)
        parts = pipeline.parts()
        got = layers_in_a_row(lab, pipeline, parts, 3)
    row = ["forward", "forward", "_commit", "_commit"]
    step = ["forward", "forward", "epilogue", *["_commit"] * 4, *row * 3]
    assert ran == step * 2
    assert [(parts[i].stage, parts[i].phase) for i in got] == [
        (stage, OpKind(phase)) for stage, phase in (("L00", "forward"), ("L01", "forward"), ("L01", "recompute"),
                                                    ("L01", "backward"), ("L00", "recompute"), ("L00", "backward"))]
    length, first = 1 + len(parts) + 3 * 8, [1, 2, 4, 5, 6, 7]  # tasks; of a row, after the prologue, around the head's place
    begin = length + 1 + len(parts)
    assert list(got.values()) == [[begin + n + 8.0 * k for k in range(3)] for n in first]


def test_layers_that_need_one_left_out_take_it_in():
    """Widths alternate: the third block's input comes only from a block of the first's kind, the head's from the last's."""

    class Zigzag(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in ((12, 16), (16, 12), (12, 16), (16, 20)))
            self.head = nn.Linear(20, 10)

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return self.head(x)

    model, batch = Zigzag(), mlp_batch()
    traced = trace(model, batch, loss_fn=classification_loss)
    measured = {(r.kind_key, r.phase) for r in measure_stages(model, traced, batch, CPU, FP32)}
    for stage in traced.graph.layers:
        assert {(stage.kind_key, p) for p in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD)} <= measured


class Counts(nn.Module):
    """Draws from every generator, and changes buffers and attributes of its own when it runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.history = 0, []

    def forward(self, x):
        self.seen += 1
        self.calls += 1
        self.history.append(self.calls)
        return self.linear(torch.nn.functional.dropout(x, 0.1)) + np.random.rand() * 0 + self.seen * 0


def test_measuring_leaves_nothing_behind():
    model = nn.Sequential(*(Counts() for _ in range(3)), nn.Linear(12, 10))
    traced = trace(model, mlp_batch(), loss_fn=classification_loss)
    before = {n: (t, t.clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert measure_stages(model, traced, mlp_batch(), CPU, FP32)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert [(m.calls, m.history) for m in model if isinstance(m, Counts)] == [(0, [])] * 3


def test_errors_in_a_stream_come_out_as_they_are():
    model, batch = PlainGPT(), lm_batch()
    traced = trace(model, batch)
    model.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_stages(model, traced, batch, CPU, FP32)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


# ---- the bar ----


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_says_what_is_measured(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_bar("measuring") as report:
        for i, part in enumerate(("links", "casts")):
            report(part, i, 2)
        report("done", 2, 2)
    assert all(word in screen.getvalue() for word in ("measuring", "links", "casts", "2/2"))


def test_without_tqdm_a_line_a_part(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_bar("measuring") as report:
        report("links", 0, 2)
    assert screen.getvalue() == "measuring: 0/2 links\n"


def test_off_a_terminal_nothing_is_said(capsys):
    with progress_bar("measuring") as report:
        report("links", 0, 2)
    assert capsys.readouterr() == ("", "")
