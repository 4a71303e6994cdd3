"""Shared rates: progressive filling by its defining property, and what was measured on real hosts from their profiles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from stacks import qwen3_4b
from test_simulate import graph, us

from slidedp.compiler.costmodel.contention import Contention, Draw, Resource, fill
from slidedp.compiler.costmodel.costs import AnalyticCostModel, resolve
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.tables import Curve, Load, Quantity, Tables
from slidedp.compiler.ops import Edge, Op, OpGraph, OpKind, Reason, Stream
from slidedp.compiler.simulation.simulate import simulate
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower

pytestmark = pytest.mark.null
GB = 10**9


def draw(weight: float = 1.0, **parts: float) -> Draw:
    return Draw(tuple((Resource[name], part) for name, part in parts.items()), weight)


# ---- progressive filling ----


def test_what_fits_is_not_slowed() -> None:
    assert fill([draw(DRAM=0.4), draw(DRAM=0.6), Draw()]) == (1.0, 1.0, 1.0)
    assert fill([]) == ()


def test_alike_ops_share_alike() -> None:
    assert fill([draw(DRAM=1.0), draw(DRAM=1.0)]) == pytest.approx((0.5, 0.5))
    assert fill([draw(DRAM=4.0)]) == pytest.approx((0.25,))


def test_what_one_leaves_the_others_take() -> None:
    """The second is held back by its link; the first gets the rest of host memory."""
    assert fill([draw(DRAM=1.0), draw(DRAM=1.0, LINK_IN=5.0)]) == pytest.approx((0.8, 0.2))
    assert fill([draw(weight=3.0, DRAM=1.0), draw(DRAM=1.0)]) == pytest.approx((0.75, 0.25))


@pytest.mark.parametrize("seed", range(30))
def test_max_min(seed: int) -> None:
    """No resource is exceeded, and whoever is slowed draws on a full one on which nobody is faster for its weight."""
    rng = random.Random(seed)
    draws = []
    for _ in range(rng.randrange(1, 8)):
        parts = tuple((r, rng.choice([0.1, 0.5, 1.0, 3.0])) for r in Resource if rng.random() < 0.4)
        draws.append(Draw(parts, rng.choice([0.1, 1.0, 2.5])))
    speeds = fill(draws)
    level = {r: sum(s * part for d, s in zip(draws, speeds, strict=True) for q, part in d.parts if q is r) for r in Resource}
    assert all(total <= 1 + 1e-9 for total in level.values())
    for d, speed in zip(draws, speeds, strict=True):
        assert 0 < speed <= 1
        fastest = {r: max(s / e.weight for e, s in zip(draws, speeds, strict=True) if r in dict(e.parts)) for r in dict(d.parts)}
        assert speed == 1 or any(level[r] > 1 - 1e-9 and fastest[r] <= speed / d.weight + 1e-9 for r in fastest)


# ---- measured hosts ----


STREAMS = {OpKind.H2D: Stream.H2D, OpKind.D2H: Stream.D2H, OpKind.CPU_UPDATE: Stream.CPU, OpKind.HOST_CAST: Stream.CAST,
           OpKind.ALL_GATHER: Stream.COMM}  # fmt: skip


def seconds(hw: HardwareProfile, world_size: int, gbps: dict[OpKind, float]) -> list[float]:
    """How long ops take that move so many GB on each rank, each on a stream of its own, all at once: 1 if those are the rates."""
    ops = tuple(Op(kind, kind, STREAMS[kind], "L00", bytes=round(rate * GB)) for kind, rate in gbps.items())
    model = AnalyticCostModel(world_size, alone=True)
    hw = replace(hw, host_task_us=0.0, link_latency_us=0.0, collective_latency_us=0.0)
    line = simulate(OpGraph(ops), lambda op: model.duration_us(op, hw), contention=Contention(hw, world_size))
    return [(s.end_us - s.start_us) / 1e6 for s in line.spans]


def one(rel: float = 0.001) -> object:
    return pytest.approx([1.0], rel=rel)


def all_one(n: int, rel: float) -> object:
    return pytest.approx([1.0] * n, rel=rel)


FIRST_KERNEL = {"cpu_adam_gparams": 4.4, "host_dram_gbps": 160.0}
"""An H200's host as it was measured with both links idle and busy, before the update's kernel fetched lines ahead."""


def test_one_h200() -> None:
    """55 GB/s alone, 48 both ways; AdamW at 4.4 Gparam/s, 3.49 with both links busy; all traffic stops at 160 GB/s."""
    hw = replace(load_profile("h200x1"), **FIRST_KERNEL)
    assert seconds(hw, 1, {OpKind.H2D: 55}) == one()
    assert seconds(hw, 1, {OpKind.H2D: 48, OpKind.D2H: 48}) == all_one(2, 0.001)
    assert seconds(hw, 1, {OpKind.CPU_UPDATE: 4.4 * 28}) == one()
    busy = 3.49 * 28
    copies = (160 - busy) / 2
    assert seconds(hw, 1, apart(copies) | {OpKind.CPU_UPDATE: busy}) == all_one(3, 0.01)


def apart(copies: float) -> dict[OpKind, float]:
    """Rates of copies to the device and to the host beside work of the cores, `copies` GB/s on average: 1.5 times apart."""
    return {OpKind.H2D: copies * 0.8, OpKind.D2H: copies * 1.2}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_measured_profile_says_who_gets_how_much(world_size: int) -> None:
    """With all three at work, each gets what it got when measured."""
    busy = {Quantity.H2D_GBPS: ((32 << 20, 25.0),), Quantity.D2H_GBPS: ((32 << 20, 40.0),),
            Quantity.CPU_ADAM_GPARAMS: ((1, 0.5), (14, 3.3))}  # fmt: skip
    tables = Tables(tuple(Curve(quantity, Load.BUSY, points) for quantity, points in busy.items()))
    update = 3.3 * 28 / world_size
    hw = replace(load_profile("h200x1"), num_gpus=world_size, tables=tables, host_dram_gbps=world_size * (25 + 40 + update))
    measured = {OpKind.H2D: 25.0, OpKind.D2H: 40.0, OpKind.CPU_UPDATE: update}
    assert seconds(hw, world_size, measured) == all_one(3, 0.001)
    unknown = replace(hw, tables=Tables())
    assert seconds(unknown, world_size, measured) != all_one(3, 0.05)


def test_four_h200s() -> None:
    """H2D 55 GB/s for one, 37 each for four; D2H 32; both ways 18.9 each. AdamW 4.9 Gparam/s, as busy as with one GPU 3.49."""
    hw = replace(load_profile("h200x4"), cpu_adam_gparams=4.9, host_dram_gbps=160.0)
    assert seconds(hw, 1, {OpKind.H2D: 55}) == one()
    assert seconds(hw, 4, {OpKind.H2D: 37}) == one()
    assert seconds(hw, 4, {OpKind.D2H: 32}) == one()
    assert seconds(hw, 4, {OpKind.H2D: 18.9, OpKind.D2H: 18.9}) == all_one(2, 0.01)
    assert seconds(hw, 4, {OpKind.CPU_UPDATE: 4.9 * 28 / 4}) == one()
    busy = 3.49 * 28 / 4
    copies = (160 / 4 - busy) / 2
    assert seconds(hw, 4, apart(copies) | {OpKind.CPU_UPDATE: busy}) == all_one(3, 0.01)


@pytest.mark.parametrize(("rates", "pairs"), [
    ({"host_dram_gbps": 183.0, "cpu_adam_gparams": 5.26, "busy": (30.0, 51.5, 3.4)}, [(119, 35, 0), (139, 0, 54), (104, 30, 50)]),
    ({"host_dram_gbps": 215.0, "cpu_adam_gparams": 6.4, "busy": (27.5, 41.5, 5.0)}, [(172, 42, 0), (180, 0, 48), (143, 31, 43)]),
])
def test_mixtures_of_steps(rates: dict[str, Any], pairs: list[tuple[float, float, float]]) -> None:
    """What an update, copies to the device and copies home got beside each other in steps of Qwen3-4B on two H200 hosts: updates
    within 8 %, copies, whose rates differed by 20 % from plan to plan, within 25 %.
    """
    down, up, adam = rates.pop("busy")
    curves = ((Quantity.H2D_GBPS, down), (Quantity.D2H_GBPS, up), (Quantity.CPU_ADAM_GPARAMS, adam))
    tables = Tables(tuple(Curve(quantity, Load.BUSY, ((14, rate),)) for quantity, rate in curves))
    hw = replace(load_profile("h200x1"), tables=tables, **rates)
    for mixture in pairs:
        got = dict(zip((OpKind.CPU_UPDATE, OpKind.H2D, OpKind.D2H), mixture, strict=True))
        there = {kind: rate for kind, rate in got.items() if rate}
        took = dict(zip(there, seconds(hw, 1, there), strict=True))
        assert took.pop(OpKind.CPU_UPDATE) == pytest.approx(1, abs=0.08)
        assert list(took.values()) == pytest.approx([1] * len(took), abs=0.25)


def test_casts_share_the_cores() -> None:
    """A800: a cast for one rank writes 15.6 GB/s (and reads twice that), 8.7 each for two. With an update it takes turns."""
    hw = load_profile("a800x4-nvlink")
    assert seconds(hw, 1, {OpKind.HOST_CAST: 3 * 15.6}) == one()
    assert seconds(hw, 2, {OpKind.HOST_CAST: 3 * 8.7}) == one()
    cores = replace(load_profile("h200x1"), host_dram_gbps=1e6)
    update = cores.cpu_adam_gparams * 28 / 2
    assert seconds(cores, 1, {OpKind.HOST_CAST: 3 * 17.7 / 2, OpKind.CPU_UPDATE: update}) == all_one(2, 0.001)


def test_collectives_without_a_link_cross_host_memory() -> None:
    """What a rank receives is written to host memory and read from there; all-gathers and copies share that."""
    linked, staged = load_profile("a800x4-nvlink"), load_profile("a800x4-pcie")
    assert seconds(linked, 4, {OpKind.ALL_GATHER: linked.gpu_link_gbps, OpKind.H2D: linked.h2d_all_gbps}) == all_one(2, 0.001)
    staged = replace(staged, host_dram_gbps=60.0, h2d_all_gbps=100.0, d2h_all_gbps=100.0, duplex_gbps=100.0, h2d_gbps=50.0,
                     d2h_gbps=50.0)  # fmt: skip
    assert seconds(staged, 4, {OpKind.ALL_GATHER: 60 / 8}) == one()
    assert seconds(staged, 4, {OpKind.ALL_GATHER: 5, OpKind.H2D: 5}) == all_one(2, 0.001)
    links = replace(staged, host_dram_gbps=1e6, h2d_gbps=10.0)
    assert seconds(links, 4, {OpKind.ALL_GATHER: 5, OpKind.H2D: 5}) == all_one(2, 0.001)


def test_two_collectives_share_the_gpu_link() -> None:
    hw = load_profile("h200x4")
    ops = tuple(Op(kind, kind, stream, "L00", bytes=GB) for kind, stream in
                ((OpKind.ALL_GATHER, Stream.COMM), (OpKind.REDUCE, Stream.HOST)))  # fmt: skip
    line = simulate(OpGraph(ops), lambda op: round(op.bytes / hw.gpu_link_gbps / 1e3), contention=Contention(hw, 4))
    assert line.step_us == pytest.approx(2 * GB / hw.gpu_link_gbps / 1e3, rel=0.001)


@pytest.mark.parametrize(("backward_us", "update_us"), [(6100, 5800), (12_400, 9300)])
def test_an_update_in_hbm_waits_for_the_products_beside_it(backward_us: int, update_us: int) -> None:
    """A layer of Qwen3-4B on an H200 at batch 8 and 16, as measured; alone it takes 1.2 ms, by which the backward is longer."""
    ops = (Op("bwd", OpKind.BACKWARD, Stream.GPU, "L00"), Op("update", OpKind.GPU_UPDATE, Stream.UPDATE, "L00", bytes=GB))
    alone_us = {"bwd": backward_us, "update": 1200}
    together = Edge("bwd", "update", Reason.DATA, 1), Edge("update", "bwd", Reason.DATA, 1)
    line = simulate(OpGraph(ops, together), lambda op: alone_us[op.name], contention=Contention(load_profile("h200x1")))
    assert line.busy_us[Stream.UPDATE] == pytest.approx(update_us, rel=0.08)
    assert line.busy_us[Stream.GPU] == line.step_us == pytest.approx(backward_us + 1200, rel=0.01)


# ---- the simulation ----


def endless(hw: HardwareProfile) -> HardwareProfile:
    shared = ("h2d_gbps", "d2h_gbps", "h2d_all_gbps", "d2h_all_gbps", "duplex_gbps", "host_dram_gbps", "cast_total_gbps",
              "gpu_link_gbps")  # fmt: skip
    return replace(hw, **dict.fromkeys(shared, 1e12))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_scarce_changes_nothing(seed: int) -> None:
    """With capacities without end, contention gives what the simulation without it gives."""
    rng = random.Random(seed)
    ops = [(f"o{i}", rng.choice(["gpu", "h2d", "d2h", "comm"]), rng.randrange(30)) for i in range(25)]
    edges = [(f"o{i}", f"o{j}", 0) for i in range(25) for j in range(i + 1, 25) if rng.random() < 0.1]
    edges += [(f"o{i}", f"o{j}", 1) for i in range(25) for j in range(25) if rng.random() < 0.03]
    g = graph(ops, edges)
    free, shared = simulate(g, us, 24), simulate(g, us, 25, contention=Contention(endless(load_profile("h200x4"))))
    assert [(s.end_us, s.start_us) for s in free.spans] == [(s.end_us, s.start_us) for s in shared.spans]
    assert (free.step_us, free.busy_us, free.exposed_by, free.cycle) == (
        shared.step_us, shared.busy_us, shared.exposed_by, shared.cycle)
    assert not shared.contended_us


def test_nothing_scarce_changes_nothing_in_a_real_plan() -> None:
    layers, hw = qwen3_4b(16), endless(load_profile("h200x1"))
    g = lower(layers, default_decisions(layers, hw))
    costs = resolve(g.ops, hw, AnalyticCostModel())
    free, shared = simulate(g, costs.duration_us), simulate(g, costs.duration_us, contention=Contention(hw))
    assert (free.step_us, free.busy_us, free.exposed_by, free.cycle) == (
        shared.step_us, shared.busy_us, shared.exposed_by, shared.cycle)


def test_a_lone_op_takes_what_its_cost_model_says() -> None:
    """Also when the profile would not let it be that fast."""
    hw = load_profile("h200x1")
    ops = OpGraph((Op("copy", OpKind.H2D, Stream.H2D, "L00", bytes=GB),))
    for alone_us in (1000, 10**6):
        assert simulate(ops, lambda op, us=alone_us: us, contention=Contention(hw)).step_us == alone_us


def test_bytes_may_come_from_the_cost_model() -> None:
    hw = load_profile("h200x1")
    ops = OpGraph(tuple(Op(k, k, s, "L00", bytes=GB) for k, s in ((OpKind.H2D, Stream.H2D), (OpKind.D2H, Stream.D2H))))
    few = {"h2d": 1000, "d2h": 1000}
    full, light = (simulate(ops, lambda op: 20_000, contention=Contention(hw, num_bytes=n)) for n in ({}, few))
    assert full.step_us > light.step_us == 20_000
    assert set(full.contended_us) == {OpKind.H2D, OpKind.D2H}


@pytest.mark.parametrize("batch", [4, 16])
def test_host_memory_bounds_a_real_plan(batch: int) -> None:
    layers, hw = qwen3_4b(batch, world_size=4), load_profile("h200x4")
    g = lower(layers, default_decisions(layers, hw))
    costs = resolve(g.ops, hw, AnalyticCostModel(4, alone=True))
    line = simulate(g, costs.duration_us, contention=Contention(hw, 4))
    through_memory = 4 * sum(op.bytes for op in g if op.kind in (OpKind.H2D, OpKind.D2H, OpKind.CPU_UPDATE))
    assert line.resources[Resource.DRAM] == pytest.approx(through_memory / hw.host_dram_gbps / 1e3 / line.step_us, rel=1e-3)
    assert all(0 < part <= 1 for part in line.resources.values())
    assert f"used: {next(iter(line.resources))} " in str(line)
    assert line.step_us >= simulate(g, costs.duration_us).step_us
    assert line.steady
    assert sum(line.exposed_by.values()) == pytest.approx(line.exposed_us, rel=0.01)
    assert sum(leg.us for leg in line.cycle) == pytest.approx(line.cycle_steps * line.step_us, rel=1e-3)
    assert line.contended_us[OpKind.CPU_UPDATE] > 0
    assert line == simulate(g, costs.duration_us, contention=Contention(hw, 4))
