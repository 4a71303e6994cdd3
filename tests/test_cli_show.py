"""``slidedp show`` and ``slidedp explain`` on plan files, in process: no model needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from stacks import stack
from test_cli import one_error
from test_planfile import make_plan

from slidedp.commands.cli import main
from slidedp.hardware import load_profile

pytestmark = pytest.mark.null


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    make_plan(stack(4)).dump(path)
    return str(path)


def test_drawings(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", plan_file, "--gantt", "--memory", "--width", "100"]) == 0
    gantt, memory = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in gantt.splitlines() if line.endswith("%")] == ["gpu", "h2d", "d2h", "cpu"]
    assert memory.startswith("device memory: peak ")
    assert main(["show", plan_file, "--gantt", "--width", "70"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


def test_a_drawing_is_as_wide_as_the_terminal(
    plan_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    for columns in ("70", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["show", plan_file, "--gantt"]) == 0
        widths.append(max(map(len, capsys.readouterr().out.splitlines())))
    assert widths == [70, 120]


def test_files(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, html = tmp_path / "t.json", tmp_path / "p.html"
    assert main(["show", plan_file, "--trace", str(trace), "--html", str(html)]) == 0
    assert capsys.readouterr().out == f"wrote {trace}\nwrote {html}\n"
    events = json.loads(trace.read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "Stack on h200x1"
    assert html.read_text().startswith("<!doctype html>")


def test_ops_and_summary_as_before(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", plan_file]) == 0
    assert capsys.readouterr().out.startswith("Stack: 4 layers")
    assert main(["show", plan_file, "--ops"]) == 0
    assert capsys.readouterr().out.startswith("world 1")


def test_explain(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", plan_file]) == 0
    assert "decisions that matter most" in capsys.readouterr().out
    assert main(["explain", plan_file, "L02.source"]) == 0
    out = capsys.readouterr().out
    assert "shadow" in out
    assert "chosen" in out
    assert main(["explain", plan_file, "L20.source"]) == 2
    assert "the model has no group 'L20'" in one_error(capsys)


@pytest.mark.parametrize("command", [["show", "--gantt"], ["explain"]])
def test_another_machine(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(stack(4))
    path, profile = tmp_path / "plan.yaml", tmp_path / "cluster.yaml"
    mine = replace(load_profile("h200x1"), name="cluster")
    profile.write_text(mine.to_yaml())
    replace(plan, hardware=replace(plan.hardware, name="cluster", hash=mine.content_hash())).dump(path)
    run = [command[0], str(path), *command[1:]]
    assert main(run) == 2
    assert "made for hardware cluster" in one_error(capsys)
    assert main([*run, "--hw", str(profile)]) == 0
    assert "note: " not in capsys.readouterr().out
    assert main([*run, "--hw", "a800x4-nvlink"]) == 0
    assert "note: computed for the hardware profile a800x4-nvlink" in capsys.readouterr().out


def test_a_plan_that_no_longer_fits(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(plan_file).read_text()
    Path(plan_file).write_text(text.replace("budgets: {hbm_bytes: ", "budgets: {hbm_bytes: 1000, host_bytes: 1} #"))
    assert main(["explain", plan_file]) == 2
    assert "that it may use" in one_error(capsys)
