"""``slidedp estimate``: what is printed is what a plan takes; whether it fits, and what would make it fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_cli import TINY, one_error

from slidedp.commands.cli import main
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.units import parse_bytes
from slidedp.hardware import load_profile
from slidedp.paper import plan_on_paper
from slidedp.reports.estimate import estimate

pytestmark = pytest.mark.null


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A config whose logits are large enough to be made in chunks."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 40000, "max_position_embeddings": 4096}))
    return str(tmp_path)


def test_it_is_what_the_rules_plan_takes(tiny):
    got = estimate(tiny, load_profile("a800x4-nvlink"), batch=2, seq=64)
    plan = plan_on_paper(tiny, "a800x4-nvlink", batch=2, seq=64, solver="rule")
    assert got.planned == estimate_memory(plan.layers, plan.decisions)
    assert (got.planned.hbm_bytes, got.planned.host_bytes) == (plan.predictions.hbm_bytes, plan.predictions.host_bytes)
    assert got.checkpoint_bytes == 12 * sum(g.numel for g in plan.layers.groups)
    assert "4 ranks of 2 x 64 tokens" in got.title
    assert not got.misfit


@pytest.mark.parametrize("place", ["hbm", "host"])
def test_the_least_is_enough_and_less_is_not(tiny, place):
    hw = load_profile("h200x1")
    least = estimate(tiny, hw, batch=2, seq=2048).least[place]
    assert not estimate(tiny, hw, batch=2, seq=2048, **{f"{place}_budget": least}).misfit
    short = estimate(tiny, hw, batch=2, seq=2048, **{f"{place}_budget": int(0.99 * least)})
    assert f"raise {place}_budget to" in short.misfit
    assert "too much" in str(short)


def test_on_the_command_line(tiny, capsys):
    ask = ["estimate", "--model", tiny, "--hw", "h200x1", "--batch", "2", "--seq", "2048"]
    assert main(ask) == 0
    out = capsys.readouterr().out
    assert "It fits." in out
    assert len(re.findall(r"  fits$", out, re.MULTILINE)) == 2
    assert max(map(len, out.splitlines())) <= 80
    assert main([*ask, "--hbm-budget", "10MiB"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"device memory, each rank .* 10\.0 MiB  .* too much", out)
    assert "It does not fit. Qwen3ForCausalLM: no plan fits" in out
    remedy = re.search(r"raise\s+hbm_budget\s+to\s+([\d.]+\s\wiB)", out)
    assert remedy
    assert parse_bytes(remedy[1]) > parse_bytes("10MiB")
    assert main([*ask, "--hbm-budget", "much"]) == 2
    assert "'much' is not a size" in one_error(capsys)
