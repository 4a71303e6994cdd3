"""Benchmarks of several GPUs, in small on CPU ranks: what a rank does, and what becomes of those that fail or take too long."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import RankResult, RunRanks

pytestmark = pytest.mark.cpu

BENCHMARKS = Path(__file__).resolve().parent.parent / "examples" / "benchmarks"


@pytest.fixture(autouse=True)
def _neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def lines_of(result: RankResult) -> list[dict]:
    return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]


def test_plans_of_the_headline_on_two_ranks(run_ranks: RunRanks) -> None:
    """A plan on random weights that nobody held whole, and its row in the table beside a reference."""
    from headline import CASES, in_small, rows
    from processes import Outcome

    case = in_small(next(case for case in CASES if case.name == "ours-14b-2-gpus"))
    first, second = run_ranks(BENCHMARKS / "headline.py", 2, "--tiny", "--worker", case.name, timeout=120)
    [result] = lines_of(first)
    assert not lines_of(second)
    assert result["losses"][0] == pytest.approx(6.2383, abs=0.05), "log 512: the weights are small and random"
    assert len(set(result["losses"])) == 4
    assert result["step_s"] > 0
    reference = {"system": "compute-only", "size": "tiny", "seq": 16, "batch": 1, "tokens_per_s_per_gpu": 1000}
    [row] = rows(case, Outcome([result]), [reference])
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:3] == ["ours-14b-2-gpus", "2 x 1 x 16"]
    assert float(cells[5]) == pytest.approx(result["tokens_per_s_per_gpu"] / 1000, abs=1e-3)


def test_compute_only_of_the_headline(run_ranks: RunRanks) -> None:
    [result] = run_ranks(BENCHMARKS / "headline.py", 1, "--tiny", "--worker", "compute-only-14b", timeout=120)
    assert [(r["batch"], r["step_s"] > 0) for r in lines_of(result)] == [(1, True), (2, True)]


def test_cases_that_take_too_long_are_recorded(tmp_path: Path, run_script: Callable[..., str]) -> None:
    results, record = tmp_path / "RESULTS.md", tmp_path / "record.jsonl"
    results.write_text("# Measured\n")
    run_script(BENCHMARKS / "headline.py", "--tiny", "--limit-s", "0", "--cases", "ours-14b-b16,3", "--results", results,
               "--record", record)  # fmt: skip
    recorded = [json.loads(line) for line in record.read_text().splitlines()]
    assert [r["case"] for r in recorded] == ["ours-14b-b16", "compute-only-32b", "ours-32b-b32"]
    assert {r["problem"] for r in recorded} == {"not done after 0 s: ended"}
    table = [line for line in results.read_text().splitlines() if line.startswith("| ") and "not done" in line]
    assert [line.split()[1] for line in table] == [r["case"] for r in recorded]
    assert results.read_text().startswith("# Measured\n\n## Headline, ")


def test_a_rank_that_fails_is_named_and_the_others_are_ended() -> None:
    """Rank 1 fails once rank 0 has printed, and rank 0 would never end."""
    from processes import run_ranks

    program = """
import json, os, signal, sys
print(json.dumps({"rank": int(os.environ["RANK"])}), flush=True)
if os.environ["RANK"] == "1":
    sys.exit("out of memory")
signal.pause()
"""
    outcome = run_ranks([sys.executable, "-c", program], 2, limit_s=600, grace_s=1)
    assert outcome.problem == "rank 1 ended with 1: out of memory"
    assert outcome.codes == [-9, 1]
    assert outcome.others == [{"rank": 1}]


def test_datapaths_of_multi_gpu_give_identical_bits(run_ranks: RunRanks, capsys: pytest.CaptureFixture[str]) -> None:
    from verdicts import correct

    given = ("correctness", "--tiny", "--global-batch", "2", "--every", "5", "--worker", "correctness")
    first, _ = run_ranks(BENCHMARKS / "multi_gpu.py", 2, *given, timeout=120)
    cases = lines_of(first)
    assert len({json.dumps(c["policy"]) for c in cases}) == 4
    assert correct(cases, Namespace(gpus=[2]))
    assert "4 datapaths, identical bits" in capsys.readouterr().out
    assert not correct([*cases[1:], cases[0] | {"digest": "00000000"}], Namespace(gpus=[2]))


def test_a_peers_script_learns_sizes_and_may_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One result, then the script's last word, as the baselines' `resident.py` has it."""
    import peers

    (tmp_path / "common.py").write_text('SIZES = {"4B": {}}')
    (tmp_path / "resident.py").write_text("""
import json, sys
from common import SIZES
_, _, size, _, batches, *_ = sys.argv
print(json.dumps({"system": "alone", "batch": int(batches.split(",")[0]), "step_s": 1.0, "times": [1.0],
                  "tokens_per_s": SIZES[size]["hidden_size"], "peak_hbm_gib": 2.0}))
print("out of memory at batch 64")
""")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    found = peers.script(tmp_path, "resident.py", "14B", (16, 64), 1024)
    first = next(found)
    assert (first["batch"], first["tokens_per_s_per_gpu"]) == (16, 5120)
    with pytest.raises(RuntimeError, match=r"resident.py: out of memory at batch 64"):
        next(found)
    monkeypatch.delitem(sys.modules, "common")
