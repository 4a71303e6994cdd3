"""Hardware profiles: every shipped number has its source, YAML round-trips, and what is wrong is named."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.costmodel.tables import Curve, Load, Quantity, Tables
from slidedp.compiler.units import format_bytes, parse_bytes
from slidedp.hardware import builtin_profiles, detect, load_profile, nearest_profile

pytestmark = pytest.mark.null
TABLES = Tables((Curve(Quantity.H2D_GBPS, Load.ALONE, ((1000, 1.0),)),))
SHIPPED = ("a800x4-nvlink", "a800x4-pcie", "a800x8-nvlink", "cpu", "h100x4-nvlink", "h200x1", "h200x4", "rtx4090x4")


def test_shipped_names() -> None:
    assert builtin_profiles() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_has_a_source(name: str, repo_root: Path) -> None:
    text = (repo_root / "slidedp/profiles" / f"{name}.yaml").read_text()
    numbers = [f.name for f in fields(HardwareProfile) if f.name not in ("name", "gpu_name", "num_gpus", "tables")]
    for key in numbers:
        assert re.search(rf"^{key}: \S+ +# \S.*$", text, re.MULTILINE), f"{key} has no source"
    assert load_profile(name).name == name


@pytest.mark.parametrize("name", SHIPPED)
def test_yaml_round_trip(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    (tmp_path / "copy.yaml").write_text(profile.to_yaml())
    copy = load_profile(tmp_path / "copy.yaml")
    assert copy == profile
    assert copy.content_hash() == profile.content_hash()
    assert load_profile(profile) is profile


@pytest.mark.parametrize("name", SHIPPED)
def test_figures_are_consistent(name: str) -> None:
    p = load_profile(name)
    assert p.duplex_gbps <= min(p.h2d_all_gbps, p.d2h_all_gbps)
    assert p.h2d_all_gbps <= p.h2d_gbps
    assert p.d2h_all_gbps <= p.d2h_gbps
    assert 2 * p.num_gpus * p.duplex_gbps <= 1.02 * p.host_dram_gbps
    assert p.cpu_adam_gparams * 28 <= 1.01 * p.host_dram_gbps
    assert p.cast_gbps <= p.cast_total_gbps


def test_hash_sees_every_field() -> None:
    p = load_profile("h200x4")
    for f in fields(HardwareProfile):
        value = getattr(p, f.name)
        new = TABLES if f.name == "tables" else value + "x" if isinstance(value, str) else value + 1
        changed = replace(p, **{f.name: new})
        assert changed.content_hash() != p.content_hash(), f.name


def test_measured_figures() -> None:
    one, four = load_profile("h200x1"), load_profile("h200x4")
    assert (one.h2d_gbps, one.duplex_gbps, one.cpu_adam_gparams, one.host_dram_gbps) == (55, 48, 5.2, 200)
    assert (four.h2d_all_gbps, four.d2h_all_gbps, four.duplex_gbps, four.cpu_adam_gparams) == (37, 32, 18.9, 5.2)


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"'h300'.*a800x4-nvlink, .*rtx4090x4"):
        load_profile("h300")
    with pytest.raises(ValueError, match="no built-in name"):
        load_profile("../profiles/h200x1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h2d_gbs": 3}, "unknown key 'h2d_gbs'"),
        ({"h2d_gbps": None}, "missing key 'h2d_gbps'"),
        ({"num_gpus": 1.5}, "num_gpus: expected a whole number"),
        ({"num_gpus": True}, "num_gpus: expected a whole number"),
        ({"num_cores": 0}, "num_cores: 0 is less than 1"),
        ({"h2d_gbps": "fast"}, "h2d_gbps: expected a number"),
        ({"h2d_gbps": float("nan")}, "h2d_gbps: expected a number"),
        ({"h2d_gbps": 0}, "h2d_gbps: 0.0 must be more than 0"),
        ({"h2d_gbps": -1}, "h2d_gbps: -1 is less than 0"),
        ({"hbm_bytes": "80 pounds"}, "hbm_bytes: '80 pounds' is not a size"),
        ({"name": 3}, "name: expected a string"),
    ],
)
def test_bad_profiles_name_key_and_file(change: dict[str, object], message: str, tmp_path: Path) -> None:
    content = yaml.safe_load(load_profile("h200x1").to_yaml()) | change
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        load_profile(path)
    assert str(path) in str(e.value)


def test_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("a: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_profile(path)
    path.write_text("num_gpus: 1\nnum_gpus: 2\n")
    with pytest.raises(ValueError, match="'num_gpus' is given twice"):
        load_profile(path)


def test_detect_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profile = load_profile("auto", cache_dir=tmp_path)
    assert profile == detect()
    assert profile.name == "cpu (this machine)"
    assert profile.hbm_bytes == profile.host_bytes // 2


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "expected"),
    [("NVIDIA H200", 1, "h200x1"), ("NVIDIA H200", 8, "h200x4"), ("NVIDIA H100 80GB HBM3", 4, "h100x4-nvlink"),
     ("NVIDIA A800-SXM4-80GB", 8, "a800x8-nvlink"), ("NVIDIA GeForce RTX 4090", 1, "rtx4090x4"), ("NVIDIA L4", 1, "h200x1")],
)  # fmt: skip
def test_nearest_profile(gpu: str, num_gpus: int, expected: str) -> None:
    assert nearest_profile(gpu, num_gpus, [load_profile(n) for n in SHIPPED]).name == expected


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("20GiB", 20 * 2**30), ("512 mib", 512 * 2**20), ("1e9", 10**9), ("1.5KiB", 1536), (12, 12), ("12", 12), ("2TB", 2 * 10**12),
     ("3b", 3), (1e9, 10**9), ("12345678901234567", 12345678901234567)],
)  # fmt: skip
def test_parse_bytes(text: str | int | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiB extra", "1e400", "nan", True, None, -3, [1]])
def test_parse_bytes_names_what_is_wrong(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size in bytes"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 974 * 2**20, 20 * 2**30, 3 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "974.0 MiB", "20.0 GiB", "3.0 TiB"]  # fmt: skip
