"""`slidedp simulate`: a sweep without a GPU, what it prints, and that published behaviour follows from the shipped profiles."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_cli import TINY, one_error

from slidedp.commands.cli import main
from slidedp.compiler.decisions import Route
from slidedp.compiler.solver.defaults import check_budgets, default_decisions
from slidedp.hardware import load_profile
from slidedp.paper import plan_on_paper
from slidedp.presets import build_meta_model
from slidedp.reports.sweep import Sweep, table

pytestmark = pytest.mark.null


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "tiny")


def simulate(tiny: str, *more: str) -> int:
    return main(["simulate", "--model", tiny, "--hw", "h200x4", "--seq", "16", *more])


def test_a_sweep_is_a_table(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tiny, "--batch", "1..4", "--ranks", "1,4") == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{tiny} on h200x4, sequence 16"
    assert head.split()[:5] == ["ranks", "batch", "route", "step", "tokens/s"]
    assert [tuple(row.split()[:2]) for row in rows] == [
        ("1", "1"), ("1", "2"), ("1", "4"), *(("4", b) for b in ("1", "1", "2", "2", "4", "4"))]  # fmt: skip
    assert {row.split()[2] for row in rows[:3]} == {"replicated"}
    assert all("host: " in row or "GPU: " in row for row in rows)
    pairs = [rows[i : i + 2] for i in (3, 5, 7)]
    assert all("best, by" in best and "best" not in other for best, other in pairs)
    assert all(sum("the rule's choice" in row for row in pair) == 1 for pair in pairs)


def test_lists_and_words(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tiny, "--batch", "2", "--routes", "sharded", "--fix", "source=cast", "--words") == 0
    out = capsys.readouterr().out
    assert out.count("sharded") == 1
    assert "critical cycle: " in out
    assert "the GPU waits for " in out
    assert "cast" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--batch", "0"], "'0' is not a whole number"), (["--batch", "4..x"], "'x' is not"), (["--batch", "2,"], "'' is not"),
     (["--batch", "8..4"], "'8..4' counts down"), (["--batch", "2", "--routes", "direct"], "routes are replicated and sharded"),
     (["--batch", "2", "--fix", "sauce=cast"], "sauce"), (["--batch", "2", "--fix", "L9.source=cast"], "no group 'L9'")],
)  # fmt: skip
def test_mistakes_are_one_line(more: list[str], message: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):  # argparse's way out, or else ours
        raise SystemExit(simulate(tiny, *more))
    assert message in one_error(capsys)


def test_what_does_not_fit_is_a_line_of_its_own(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tiny, "--batch", "1,64", "--hbm-budget", "1MiB") == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 4
    missing = [line for line in lines if "does not fit" in line]
    assert len(missing) == 2
    assert all(line.endswith("more than the 1.0 MiB that it may use") and line.split()[1] == "64" for line in missing)


def test_more_ranks_than_gpus_is_a_warning(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(tiny, "--batch", "1", "--ranks", "8") == 0
    assert "8 ranks, but the profile h200x4 has 4 GPUs" in capsys.readouterr().err


def test_a_case_is_what_a_plan_predicts(tiny: str) -> None:
    """Also when its graph was lowered for another batch."""
    hw = load_profile("a800x4-nvlink")
    model = build_meta_model(tiny)
    cases = list(Sweep(model, hw, seq=16).cases([1, 8], [4], list(Route)))
    for case in cases:
        plan = plan_on_paper(model, hw, batch=case.batch, seq=16, policy={"delivery": str(case.route)})
        assert case.timeline
        assert case.memory
        assert case.timeline.step_us == plan.predictions.step_us
        assert case.tokens_per_s == pytest.approx(plan.predictions.tokens_per_s, rel=1e-3)
        assert (case.memory.hbm_bytes, case.memory.host_bytes) == (plan.predictions.hbm_bytes, plan.predictions.host_bytes)


def test_the_better_route_turns_with_the_gpu_link(tiny: str) -> None:
    """And the table marks it: the same model on the same host."""
    model = build_meta_model(tiny)
    hw = replace(load_profile("h200x4"), collective_latency_us=0.0, h2d_all_gbps=0.01, duplex_gbps=0.01)
    for link, best in ((300.0, Route.SHARDED), (0.001, Route.REPLICATED)):
        cases = list(Sweep(model, replace(hw, gpu_link_gbps=link), seq=16).cases([1], [4], list(Route)))
        assert max(cases, key=lambda case: case.tokens_per_s).route is best
        assert str(best) in next(line for line in table(cases) if "best, by" in line)


def test_published_behaviour_follows_from_the_profiles(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direction, and at least half the size, of what was published; assumptions are stated in the example."""
    monkeypatch.syspath_prepend(str(repo_root / "examples"))
    findings = importlib.import_module("published_behaviour").findings
    bridged, unbridged, compute, step, routes = findings()
    assert bridged.simulated >= 17 / 2
    assert bridged.by_the_rule
    assert unbridged.simulated >= 26 / 2
    assert unbridged.by_the_rule
    assert compute.simulated == pytest.approx(27.2, rel=0.01)  # what the GPU's rate was fitted to
    assert step.simulated == pytest.approx(14.4, rel=0.03)
    assert abs(routes.simulated) < 2.5


def test_a_model_of_72_b_fits_four_gpus_of_24_gb() -> None:
    """Qwen2.5-72B at one sequence of 1024 a GPU. The host's 1 TiB has no room for a shadow, so masters are cast."""
    hw = load_profile("rtx4090x4")
    draft = Sweep("qwen2.5-72b", hw, seq=1024).draft(1, 4)
    budget = 24 * 10**9  # the card has some more, and the rule would use it
    memory = check_budgets(draft.layers, default_decisions(draft.layers, hw, hbm_budget=budget), budget, hw.host_bytes)
    assert memory.hbm_bytes <= budget < hw.hbm_bytes
    assert memory.host["shadow"] == 0
    assert memory.host_bytes > 14 * 72.7e9
