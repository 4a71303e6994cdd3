"""Measured tables: what lies between their points, YAML and hash, and what the analytic model makes of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slidedp.compiler.costmodel.costs import AnalyticCostModel, resolve
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.tables import Curve, Load, Quantity, Tables, read_tables
from slidedp.compiler.ops import Op, OpKind, Ref, Stream
from slidedp.hardware import load_profile

pytestmark = pytest.mark.null

KB, MB = 1000, 1_000_000


def curve(quantity: Quantity, load: Load, *points: tuple[int, float]) -> Curve:
    return Curve(quantity, load, points)


ONE_GPU = Tables((
    curve(Quantity.H2D_GBPS, Load.ALONE, (100 * KB, 10.0), (MB, 40.0), (10 * MB, 50.0)),
    curve(Quantity.H2D_GBPS, Load.DUPLEX, (MB, 20.0)),
    curve(Quantity.D2H_GBPS, Load.DUPLEX, (MB, 25.0)),
    curve(Quantity.CAST_GBPS, Load.ALONE, (MB, 10.0)),
    curve(Quantity.CPU_ADAM_GPARAMS, Load.ALONE, (1, 0.5), (8, 4.0), (16, 3.0)),
    curve(Quantity.CPU_ADAM_GPARAMS, Load.BUSY, (1, 0.4)),
))  # fmt: skip
PROFILE = replace(load_profile("h200x1"), host_task_us=100.0, tables=ONE_GPU)


def test_time_is_linear_between_sizes() -> None:
    points = ONE_GPU.curves[0]
    assert points.us(100 * KB) == pytest.approx(10)
    assert points.us(MB) == pytest.approx(25)
    assert points.us(550 * KB) == pytest.approx(17.5)  # half way
    assert points.us(20 * MB) == pytest.approx(400)  # the rate of the last
    assert points.us(1) == points.us(0) == pytest.approx(10)  # a fixed cost, as far as is known


def test_rate_over_threads() -> None:
    threads = ONE_GPU.curves[4]
    assert [threads.rate(n) for n in (1, 4.5, 8, 12, 16, 64)] == pytest.approx([0.5, 2.25, 4.0, 3.5, 3.0, 3.0])
    assert threads.rate(0.5) == 0.5


def op(kind: OpKind, stream: Stream = Stream.GPU, **fields: Any) -> Op:
    return Op(f"{kind}.L00", kind, stream, "L00", **fields)


@pytest.mark.parametrize(
    ("what", "expected_us"),
    [
        (op(OpKind.H2D, bytes=MB), 25),
        (op(OpKind.H2D, bytes=2 * MB, writes=(Ref("W.bwd.L00"),)), 100),  # beside the gradients
        (op(OpKind.D2H, bytes=MB), 40),
        (op(OpKind.HOST_CAST, bytes=6 * MB), 200),  # 2 MB written; measured from cast to cast
        (op(OpKind.CPU_UPDATE, bytes=28 * 4 * MB), 100 + 1000),  # 4 M parameters at the best number of threads
    ],
)
def test_durations_come_from_the_tables(what: Op, expected_us: int) -> None:
    model = AnalyticCostModel(1)
    assert model.duration_us(what, PROFILE) == expected_us
    assert model.source(what, PROFILE) == "measured table"
    assert model.source(what, replace(PROFILE, tables=Tables())) == "analytic"


def test_update_threads_pick_the_rate() -> None:
    update = op(OpKind.CPU_UPDATE, bytes=28 * 3 * MB)
    assert AnalyticCostModel(1, update_threads=16).duration_us(update, PROFILE) == 100 + 1000
    assert AnalyticCostModel(1, update_threads=1).duration_us(update, PROFILE) == 100 + 6000


def test_what_no_table_has_stays_analytic() -> None:
    without, model = replace(PROFILE, tables=Tables()), AnalyticCostModel(1)
    for what in (op(OpKind.FORWARD, flops=10**12), op(OpKind.ALL_GATHER, bytes=MB), op(OpKind.HOST_REDUCE, bytes=MB)):
        assert model.source(what, PROFILE) == "analytic"
        assert model.duration_us(what, PROFILE) == model.duration_us(what, without)
    h2d, forward = op(OpKind.H2D, bytes=MB), op(OpKind.FORWARD)
    assert resolve([h2d, forward], PROFILE, model).sources == {"h2d.L00": "measured table", "forward.L00": "analytic"}


def test_several_ranks_use_what_all_at_once_gave() -> None:
    tables = Tables((
        curve(Quantity.H2D_GBPS, Load.ALONE, (MB, 50.0)), curve(Quantity.H2D_GBPS, Load.ALL, (MB, 25.0)),
        curve(Quantity.ALL_GATHER_GBPS, Load.ALL, (MB, 100.0)), curve(Quantity.CPU_ADAM_GPARAMS, Load.ALONE, (64, 4.0)),
    ))  # fmt: skip
    hw = replace(load_profile("h200x4"), host_task_us=0.0, tables=tables)
    four, one = AnalyticCostModel(4), AnalyticCostModel(1)
    assert four.duration_us(op(OpKind.H2D, bytes=MB), hw) == 40
    assert one.duration_us(op(OpKind.H2D, bytes=MB), hw) == 20
    assert four.duration_us(op(OpKind.ALL_GATHER, bytes=MB), hw) == 10
    assert four.duration_us(op(OpKind.CPU_UPDATE, bytes=28 * MB), hw) == 1000  # four ranks update a million each
    assert four.source(op(OpKind.D2H, bytes=MB), hw) == "analytic"


def test_the_order_of_measuring_does_not_matter(tmp_path: Path) -> None:
    profile = replace(PROFILE, tables=Tables((*ONE_GPU.curves[3:], *ONE_GPU.curves[:3])))
    assert profile == PROFILE
    (tmp_path / "measured.yaml").write_text(profile.to_yaml())
    assert load_profile(tmp_path / "measured.yaml") == profile


def test_yaml_round_trip_and_hash(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(PROFILE.to_yaml())
    loaded = load_profile(tmp_path / "my.yaml")
    assert loaded == PROFILE
    assert loaded.content_hash() == PROFILE.content_hash()
    slower = replace(PROFILE, tables=Tables((curve(Quantity.H2D_GBPS, Load.ALONE, (MB, 39.0)),)))
    assert len({PROFILE.content_hash(), slower.content_hash(), replace(PROFILE, tables=Tables()).content_hash()}) == 3
    assert replace(load_profile("h200x1"), tables=Tables()).content_hash() == load_profile("h200x1").content_hash()
    assert "tables" not in load_profile("h200x1").to_yaml()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"h2d": {}}, "tables: unknown key 'h2d'"),
        ({"h2d_gbps": {"idle": []}}, "tables: h2d_gbps: unknown key 'idle'"),
        ({"h2d_gbps": {"alone": []}}, "tables: h2d_gbps: alone: no points"),
        ({"h2d_gbps": {"alone": [[1, 2, 3]]}}, "expected [x, rate], got [1, 2, 3]"),
        ({"h2d_gbps": {"alone": [[1.5, 2]]}}, "expected a whole number"),
        ({"h2d_gbps": {"alone": [[10, "fast"]]}}, "expected a number"),
        ({"h2d_gbps": {"alone": [[10, 0]]}}, "both must be more than 0"),
        ({"h2d_gbps": {"alone": [[10, 1], [10, 2]]}}, "10 follows 10: sizes must ascend"),
        ([], "expected a mapping"),
    ],
)
def test_bad_tables_are_named(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tables(content, "tables")
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(PROFILE.to_yaml()) | {"tables": content}))
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        HardwareProfile.from_yaml(path)
    assert str(path) in str(e.value)


def test_curves_are_finite() -> None:
    assert all(math.isfinite(c.us(n)) for c in ONE_GPU.curves for n in (0, 1, 2**40))
