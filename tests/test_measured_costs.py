"""Plans by measured costs: where each came from, the cache, and that training stays the same."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import measure_cases
import pytest
import torch
import yaml
from stacks import stack
from stage_bench import AWKWARD, made
from test_planfile import make_plan
from tiny_models import PlainGPT, classification_loss, family, lm_batch, mlp_batch
from torch import nn
from training import state_of

import slidedp
from slidedp.cache import cache_folder, machine_hash
from slidedp.commands.cli import main
from slidedp.compiler.costmodel.measured import (
    LONGEST_US,
    MeasuredCosts,
    Measurement,
    PhaseCost,
    read_measurement,
    slowest,
    times_us,
)
from slidedp.compiler.decisions import Activation
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.planfile.costrecord import CostRecord
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.executor.measure.stages import measure_stages
from slidedp.reports.report import summary
from slidedp.trial import calibrate

pytestmark = pytest.mark.cpu


def compiled(model, batch, cache_dir, measure="cached", **options):
    return slidedp.compile(model, "cpu", device="cpu", example=batch, measure=measure, cache_dir=cache_dir, **options)


@pytest.fixture
def measuring(monkeypatch):
    """How often stages have been measured."""
    calls = []

    def counted(*args):
        calls.append(len(calls))
        return measure_stages(*args)

    monkeypatch.setattr(calibrate, "measure_stages", counted)
    return lambda: len(calls)


CASES = {name: (made(cls), mlp_batch, classification_loss) for name, cls in AWKWARD.items()}
CASES["qwen3"] = (lambda: family("qwen3", attention_dropout=0.1), lambda seed: lm_batch("padded", seed), None)


@pytest.mark.parametrize("name", CASES)
def test_a_measured_plan_trains_the_same_bits(name, tmp_path):
    make, batch, loss_fn = CASES[name]
    trained = []
    for measure in (False, True):
        model = make()
        torch.manual_seed(5)
        with compiled(model, batch(1), tmp_path, measure, loss_fn=loss_fn, optimizer=slidedp.AdamW(lr=1e-2)) as plan:
            assert bool(plan._spec.measurement) is measure
            losses = [plan.run(batch(seed)).loss for seed in (1, 1, 1)]
            trained.append((losses, state_of(plan).digest(), [b.tolist() for b in plan.model.buffers()], torch.rand(3).tolist()))
    assert trained[0] == trained[1]


# ---- where costs come from ----


class KnowsTheEpilogue:
    def duration_us(self, op, hw):
        return 123 if op.kind is OpKind.EPILOGUE else None

    def bytes(self, op, hw):
        return None


def test_user_over_measured_over_analytic(tmp_path):
    with compiled(PlainGPT(), lm_batch(), tmp_path, cost_model=KnowsTheEpilogue()) as plan:
        costs, rows = plan._spec.costs, {(r.kind_key, r.phase): r for r in plan._spec.measurement.phases}
        layers = plan._spec.layers
        for op in plan._spec.graph:
            want = "user" if op.kind is OpKind.EPILOGUE else "measured" if op.stream is Stream.GPU else "analytic"
            assert costs.source(op) == want, op.name
            if want == "measured":
                assert costs.duration_us(op) == rows[layers.stage(op.layer).kind_key, op.kind].duration_us
        assert costs.durations_us["epilogue"] == 123
        record = plan.to_planfile().costs
        assert record.sources == {s: list(costs.sources.values()).count(s) for s in ("analytic", "measured", "user")}
        assert plan.to_planfile().cost_model.name.endswith("KnowsTheEpilogue with measured stages")


def test_unmeasured_kinds_stay_analytic():
    row = PhaseCost("A-1", OpKind.FORWARD, Activation.RECOMPUTE, 7)
    costs = MeasuredCosts(Measurement((row,), 0.1), {"L00": "A-1", "L01": "B-1"})
    graph = make_plan(stack(2)).layers
    assert costs.phase("L00", OpKind.FORWARD) is row
    assert costs.phase("L01", OpKind.FORWARD) is costs.phase("L00", OpKind.BACKWARD) is None
    assert MeasuredCosts.of(Measurement(), graph).phase("L00", OpKind.FORWARD) is None


def test_plan_files_hold_what_was_measured(tmp_path, capsys):
    with compiled(PlainGPT(), lm_batch(), tmp_path) as plan:
        plan.dump(tmp_path / "plan.yaml")
        text = str(plan)
    loaded = PlanFile.load(tmp_path / "plan.yaml")
    assert loaded.to_yaml() == plan.to_planfile().to_yaml()
    assert loaded.costs.measurement == plan._spec.measurement
    assert "measured" in text
    assert "the default plan is as fast" in text.replace("\n          ", " ")
    assert main(["show", str(tmp_path / "plan.yaml"), "--costs"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows[1:-1]] == [[p.kind_key, p.phase] for p in loaded.costs.measurement.phases]
    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    for row in content["costs"]["measured"]["phases"]:
        assert row.pop("issue_us") is None
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content))
    assert PlanFile.load(tmp_path / "plan.yaml").costs == loaded.costs, "files from before issuing was measured are read"
    content["costs"]["measured"]["phases"][0]["phase"] = "sideways"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"costs: measured: phases: entry 0: phase: 'sideways' is unknown"):
        PlanFile.load(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"issue_us": -1}, "issue_us: -1 is less than 0"), ({"issue_us": 1.5}, r"issue_us: expected a whole number, got 1\.5"),
     ({"issue_us": 10**400}, "issue_us: a number of 1329 bits is more than"), ({"issue_us": LONGEST_US + 1}, "issue_us: a"),
     ({"duration_us": 10**400}, "duration_us: a number of 1329 bits"), ({"peak_bytes": 10**400}, "peak_bytes: a number of 1329"),
     ({"seconds": 10**400}, "seconds: a number of 1329 bits is too")])  # fmt: skip
def test_no_times_that_nobody_can_compute_with(change, message):
    row = PhaseCost("A-1", OpKind.FORWARD, Activation.RECOMPUTE, 7)
    content = Measurement((row,), 1.5).to_content()
    (content if "seconds" in change else content["phases"][0]).update(change)
    with pytest.raises(ValueError, match=message):
        read_measurement(content, "here")


@pytest.mark.parametrize(
    ("default_us", "step_us", "steps", "words"),
    [(2_000_000, 1_500_000, 3, "paid back after 3 steps"), (1000, 1000, None, "as fast"), (None, 1000, None, "does not fit")],
)
def test_when_choosing_has_paid_for_itself(default_us, step_us, steps, words):
    row = PhaseCost("A-1", OpKind.FORWARD, Activation.RECOMPUTE, 7, issue_us=9)
    record = CostRecord({"measured": 1}, Measurement((row,), 1.5), default_us)
    assert record.pays_back_after(step_us) == steps
    plan = make_plan(stack(2))
    plan = replace(plan, costs=record, predictions=replace(plan.predictions, step_us=step_us))
    assert words in summary(plan).replace("\n          ", " ")
    assert PlanFile.parse(plan.to_yaml()) == plan
    content = yaml.safe_load(plan.to_yaml())
    del content["costs"]["measured"]["phases"][0]["issue_us"]  # as it was written before that was measured
    (older,) = PlanFile.parse(yaml.safe_dump(content)).costs.measurement.phases
    assert older == replace(row, issue_us=None)


def test_the_slowest_rank_counts_at_issuing_too():
    """Each is another's: the rank whose device is slower need not be the one whose host is."""
    one, other = (Measurement((PhaseCost("layer", OpKind.FORWARD, Activation.RECOMPUTE, duration, 5, 6, issue),
                               PhaseCost("layer", OpKind.BACKWARD, Activation.RECOMPUTE, 30 + duration)), 1.5)
                  for duration, issue in ((10, 8), (20, 7)))
    agreed = [slowest([times_us(one), times_us(other)], mine) for mine in (one, other)]
    assert agreed[0] == agreed[1]
    assert [(p.duration_us, p.peak_bytes, p.issue_us) for p in agreed[0].phases] == [(20, 5, 8), (50, None, None)]


# ---- the cache ----


def test_measured_once_then_kept(tmp_path, measuring):
    dumps = []
    for i, measure in enumerate(("cached", "cached", True, "cached", False)):
        with compiled(PlainGPT(), lm_batch(), tmp_path, measure) as plan:
            plan.dump(tmp_path / f"{i}.yaml")
            dumps.append((tmp_path / f"{i}.yaml").read_bytes())
    assert measuring() == 2
    assert dumps[0] == dumps[1]
    assert dumps[2] == dumps[3]
    assert PlanFile.load(tmp_path / "4.yaml").costs is None


def test_other_shapes_and_other_code_are_measured_anew(tmp_path, measuring, monkeypatch):
    with compiled(PlainGPT(), lm_batch(), tmp_path) as plan:
        plan.run(lm_batch(seq=12))  # not measured under way
        assert "analytic" in {plan._spec.costs.sources[op.name] for op in plan._spec.graph.on(Stream.GPU)}
    compiled(PlainGPT(), lm_batch(seq=12), tmp_path).close()
    assert measuring() == 2
    with compiled(PlainGPT(), lm_batch(), tmp_path) as plan:
        plan.run(lm_batch(seq=12))  # but known from before
        assert {plan._spec.costs.sources[op.name] for op in plan._spec.graph.on(Stream.GPU)} == {"measured"}
    assert measuring() == 2
    original = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: original(self, x))  # as kernels are patched in
    compiled(PlainGPT(), lm_batch(), tmp_path).close()
    assert measuring() == 3


@pytest.mark.parametrize("damage", ["", "phases: [", "seconds: 1\nphases: [{kind: 3}]", "!!python/object:os.system {}"])
def test_a_damaged_cache_is_a_warning_and_measured_anew(damage, tmp_path, measuring):
    compiled(PlainGPT(), lm_batch(), tmp_path).close()
    (file,) = tmp_path.glob("stages-*.yaml")
    good = file.read_text()
    file.write_text(damage)
    with pytest.warns(UserWarning, match=r"cannot be used and is made anew"):
        compiled(PlainGPT(), lm_batch(), tmp_path).close()
    assert measuring() == 2
    assert yaml.safe_load(file.read_text()).keys() == yaml.safe_load(good).keys()


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"cannot be kept"):
        compiled(PlainGPT(), lm_batch(), tmp_path / "file" / "folder").close()


def test_what_cannot_be_measured_is_a_warning(tmp_path, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(calibrate, "measure_stages", no_room)
    with pytest.warns(UserWarning, match=r"could not be measured.*no room"):
        plan = compiled(PlainGPT(), lm_batch(), tmp_path)
    with plan:
        assert plan._spec.costs.name == "analytic"
        plan.run(lm_batch())
    assert not list(tmp_path.iterdir())


def test_the_cpu_measures_only_when_asked(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compiled(PlainGPT(), lm_batch(), tmp_path, None)._spec.measurement
    with pytest.raises(ValueError, match=r"measure='often': use True, False or 'cached'"):
        compiled(PlainGPT(), lm_batch(), tmp_path, "often")


def test_ranks_measure_together_and_the_slowest_counts(run_ranks, tmp_path):
    one, two = (r.value for r in run_ranks(measure_cases.measure_and_train, 2, str(tmp_path), timeout=120))
    assert one == two
    assert {"alone", "all", "duplex", "busy"} == set(one["loads"])
    assert {"all_gather_gbps", "reduce_gbps"} < set(one["quantities"])
    assert one["auto"] == one["profile"]
    assert one["phases True"] == one["phases cached"] != []
    assert one["phases False"] == []
    assert one["trained True"] == one["trained cached"] == one["trained False"]


def test_ranks_that_differ_measure_alike_and_hear_of_one_that_fails(run_ranks):
    one, two = (r.value for r in run_ranks(measure_cases.measure_unalike, 2, timeout=120))
    assert one["rates"] == two["rates"]
    assert one["threads"] == two["threads"] == [4]
    assert one["error"] == "PeerFailed: rank 1 has failed: OSError: no thread"
    assert two["error"] == "OSError: no thread"


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    assert cache_folder() is None, "conftest.py asks for no cache"
    monkeypatch.delenv("SLIDEDP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "slidedp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/slidedp"
    assert cache_folder(tmp_path / "mine") == tmp_path / "mine"
    assert len({machine_hash("cpu", n) for n in (1, 2)}) == 2
