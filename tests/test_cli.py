"""The command line, in process: plans of tiny Hugging Face configs, exit statuses, and errors in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from stacks import stack
from test_planfile import make_plan

from slidedp.commands.cli import main
from slidedp.presets import PRESETS, build_meta_model, load_config
from slidedp.version import __version__

pytestmark = pytest.mark.null
TINY = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
        "tie_word_embeddings": True}  # fmt: skip
NUM_PARAMS_M = {"qwen3-0.6b": 596, "qwen3-1.7b": 1721, "qwen3-4b": 4022, "qwen3-8b": 8191, "qwen3-14b": 14768, "qwen3-32b": 32762,
                "qwen2.5-7b": 7616, "qwen2.5-72b": 72706, "llama3.1-8b": 8030, "llama3.1-70b": 70554}  # fmt: skip
"""Published parameter counts, in millions."""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A directory with a config.json."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "tiny")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A sound plan of four plain layers."""
    path = tmp_path / "stack.yaml"
    make_plan(stack(4), policy={"act": "recompute"}).dump(path)
    return path


def plan(tiny: str, out: Path, *more: str) -> int:
    return main(["plan", "--model", tiny, "--hw", "h200x1", "--batch", "2", "--seq", "16", "-o", str(out), *more])


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("slidedp: error: ")
    return lines[0]


# ---- plan ----


def test_plan_then_check_show_and_diff(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert plan(tiny, a) == 0
    assert plan(tiny, b, "--fix", "L1.source=cast", "--fix", "window=2") == 0
    assert main(["check", str(a)]) == 0
    assert main(["check", str(b)]) == 0
    assert main(["diff", str(a), str(a)]) == 0
    capsys.readouterr()
    assert main(["diff", str(a), str(b)]) == 1
    assert "L01.source" in capsys.readouterr().out
    assert main(["show", str(a), "--ops"]) == 0
    assert "bwd.L00" in capsys.readouterr().out


def test_plan_is_the_same_twice(tiny: str, tmp_path: Path) -> None:
    assert plan(tiny, tmp_path / "a.yaml") == plan(tiny, tmp_path / "b.yaml") == 0
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()


def test_plan_for_several_ranks(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    assert main(["plan", "--model", tiny + "/config.json", "--hw", "h200x4", "--batch", "2", "--seq", "16", "-o", str(out)]) == 0
    assert yaml.safe_load(out.read_text())["world_size"] == 4
    assert plan(tiny, out, "--ranks", "2") == 0
    assert yaml.safe_load(out.read_text())["world_size"] == 2
    assert main(["check", str(out)]) == 0


def test_plan_takes_a_policy_and_a_plan_as_policy(tiny: str, tmp_path: Path) -> None:
    policy, a, b = tmp_path / "policy.yaml", tmp_path / "a.yaml", tmp_path / "b.yaml"
    policy.write_text("window: 2\nlayers: {L00-L01: {chunks: 3}}\n")
    assert plan(tiny, a, "--policy", str(policy), "--fix", "L01.chunks=5") == 0
    content = yaml.safe_load(a.read_text())
    assert content["plan"]["window"] == 2
    assert [content["decisions"][name]["return_chunks"] for name in ("L00", "L01")] == [3, 5]
    assert plan(tiny, b, "--policy", str(a)) == 0
    assert a.read_bytes() == b.read_bytes()


def test_more_ranks_than_gpus_is_a_warning(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny, tmp_path / "a.yaml", "--ranks", "1") == 0
    assert plan(tiny, tmp_path / "a.yaml", "--hw", "cpu", "--ranks", "3") == 0
    assert not capsys.readouterr().err
    assert plan(tiny, tmp_path / "a.yaml", "--ranks", "2") == 0
    assert re.fullmatch(r"slidedp: warning: 2 ranks, but the profile h200x1 has 1 GPU.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("more", [["--hw", "h200x4"], ["--hw", "auto", "--ranks", "2"]])
def test_a_summary_fits_80_columns(more: list[str], tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny, tmp_path / "a.yaml", "--fix", "L01.source=cast", "--fix", "L02.act=recompute", *more) == 0
    assert main(["show", str(tmp_path / "a.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("wrote")), lines
    assert any("shared0: used by prologue and epilogue" in line for line in lines)
    assert any("bound by" in line for line in lines)
    assert not any("by gpu" in line for line in lines)


def test_check_does_not_mind_this_machine(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny, tmp_path / "a.yaml", "--hw", "auto") == 0
    assert main(["check", str(tmp_path / "a.yaml")]) == 0
    assert "hardware profile" not in capsys.readouterr().out
    assert plan(tiny, tmp_path / "a.yaml", "--hw", "cpu") == 0
    text = (tmp_path / "a.yaml").read_text()
    (tmp_path / "a.yaml").write_text(re.sub(r"hardware: {name: cpu, hash: \w+}", "hardware: {name: cpu, hash: abc}", text))
    assert main(["check", str(tmp_path / "a.yaml")]) == 0
    assert "the hardware profile cpu is not the built-in one" in capsys.readouterr().out


def test_dump_after(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tiny, tmp_path / "plan.yaml", "--dump-after", "compute") == 0
    out = capsys.readouterr().out
    assert "# after compute" in out
    assert "# after slots" not in out
    assert plan(tiny, tmp_path / "plan.yaml", "--dump-after", "all") == 0
    assert "# after slots" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fix", "L3.act=sometimes"], "act: 'sometimes' is unknown; allowed: retain, offload, recompute, selective"),
        (["--fix", "L9.chunks=2"], "the model has no group 'L09'|the model has no group 'L9'"),
        (["--fix", "colour=2"], "unknown key 'colour'"),
        (["--hbm-budget", "1KiB"], "needs .* of HBM, .* more than the budget of 1.0 KiB"),
        (["--host-budget", "1KiB"], "needs .* of host memory, .* more than the budget of 1.0 KiB"),
        (["--hbm-budget", "much"], "'much' is not a size"),
        (["--dump-after", "nothing"], "no such pass; passes: compute"),
        (["--policy", "/nonexistent.yaml"], "cannot be read"),
        (["--ranks", "0"], "not a whole number of 1 or more"),
        (["--compute-dtype", "int8"], "invalid choice"),
    ],
)
def test_plan_mistakes(more: list[str], message: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = plan(tiny, tmp_path / "plan.yaml", *more)
    except SystemExit as e:  # argparse's own
        status = int(e.code or 0)
    assert status == 2
    assert re.search(message, one_error(capsys))
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "gpt-9", "--hw", "h200x1"], "model 'gpt-9': no such preset"),
        (["--model", "qwen3-0.6b", "--hw", "h300"], "hardware profile 'h300': no file and no built-in name"),
    ],
)
def test_unknown_names(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args, "--batch", "1", "--seq", "8"]) == 2
    assert message in one_error(capsys)


# ---- show, diff, check, passes: no model needed ----


def test_show(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert "Stack: 4 layers" in out
    assert "L00-L03" in out
    assert re.search(r"^predicted .* a step, ", out, re.MULTILINE)
    assert main(["show", str(plan_file), "--ops"]) == 0
    assert "cpu_update.L03.c0" in capsys.readouterr().out


def test_check_accepts_a_sound_hand_edit(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(plan_file)]) == 0
    assert "edited" not in capsys.readouterr().out
    plan_file.write_text(plan_file.read_text().replace("window: 4", "window: 2"))
    assert main(["check", str(plan_file)]) == 0
    assert "decisions were edited" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("window: 4", "window: 0", "window: 0 is less than 1"),
        ("delivery: replicated", "delivery: pigeon", "'pigeon' is unknown; allowed: replicated, sharded"),
        ("L00-L03: {delivery", "L00-L02: {delivery", "L03 is not decided"),
        ("numel: 4096", "numel: 8192", "the table was edited"),
        ("ops: {hash: ", "ops: {hash: 0", "lower to other ops"),
        ("world_size: 1", "world_size: 2", "--ranks"),
        ("world_size: 1", "world_size: 3", "3 ranks.*--ranks"),
        ("budgets: {hbm_bytes: 1", "budgets: {hbm_bytes: 1000, host_bytes: 1} #", "of HBM|HBM budget|hbm"),
    ],
)
def test_check_says_why_not(before: str, after: str, message: str, plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan_file.read_text()
    assert before in text
    plan_file.write_text(text.replace(before, after))
    assert main(["check", str(plan_file)]) == 2
    assert re.search(message, one_error(capsys))


def test_diff_status(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    make_plan(stack(4), policy={"source": "cast"}).dump(other)
    assert main(["diff", str(plan_file), str(plan_file)]) == 0
    assert "the plans are equal" in capsys.readouterr().out
    assert main(["diff", str(plan_file), str(other)]) == 1
    assert "shadow -> cast" in capsys.readouterr().out
    assert main(["diff", str(plan_file), str(tmp_path / "missing.yaml")]) == 2
    assert "missing.yaml: cannot be read" in one_error(capsys)


def test_passes_have_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:3] == ["compute", "slots", "delivery"]
    assert all(len(line.split()) > 3 for line in lines)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"slidedp {__version__}\n"


def test_as_a_program(plan_file: Path, repo_root: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "slidedp", "check", str(plan_file) + "x"], cwd=repo_root, capture_output=True,
                         text=True, check=False)  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.startswith("slidedp: error: ")
    assert "Traceback" not in run.stderr


# ---- presets ----


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_published_sizes(name: str) -> None:
    model = build_meta_model(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(NUM_PARAMS_M[name], abs=1)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_every_preset_is_covered() -> None:
    assert set(NUM_PARAMS_M) == set(PRESETS)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read as JSON"), ("[]", "no 'model_type'"), ('{"hidden_size": 3}', "no 'model_type'"),
     ('{"model_type": "abacus"}', "transformers cannot build it")],
)  # fmt: skip
def test_bad_configs(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        build_meta_model(path)


def test_transformers_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_config("qwen3-4b")["hidden_size"] == 2560
    with pytest.raises(ValueError, match=r"pip install slidedp\[hf\]"):
        build_meta_model("qwen3-4b")
