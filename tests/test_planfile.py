"""Plan files, policies and diffs: round trips, and everything wrong is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from stacks import qwen3_4b, stack

from slidedp.compiler.decisions import Decisions, GroupDecision, Reduction, Route, Source
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import LayerGraph, Param
from slidedp.compiler.planfile.diff import diff
from slidedp.compiler.planfile.planfile import Budgets, PlanFile, Predictions, make_planfile, model_hash, ops_hash, params_hash
from slidedp.compiler.policy import apply_policy, merge_policies, parse_fixes
from slidedp.compiler.runlength import expand, runs
from slidedp.compiler.simulation.predict import cost_model_of, predict, price
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower
from slidedp.reports.report import summary

pytestmark = pytest.mark.null


def make_plan(layers: LayerGraph, hw_name: str = "h200x1", policy: dict[str, Any] | None = None) -> PlanFile:
    hw = load_profile(hw_name)
    decisions = default_decisions(layers, hw, policy=policy)
    ops = lower(layers, decisions)
    costs = price(ops, cost_model_of(layers), hw)
    memory, line = estimate_memory(layers, decisions), predict(ops, costs, hw)
    predictions = Predictions(line.step_us, 1e6 * 1024 / line.step_us, memory.hbm_bytes, memory.host_bytes, str(line.bottleneck))
    return make_planfile("0.1.0", layers, hw, decisions, costs, ops, Budgets(hw.hbm_bytes, hw.host_bytes), predictions,
                         {"input_ids": "1x1024"})


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """A plan file of four layers after a change to its content."""

    def edit(change: Callable[[dict[str, Any]], object]) -> Path:
        content = yaml.safe_load(make_plan(stack(4), policy={"act": "recompute"}).to_yaml())
        change(content)
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return edit


# ---- plan files ----


@pytest.mark.parametrize("layers", [stack(3), stack(12, world_size=4, frozen=(0, 1, 7)), stack(101, dtype="float32")])
def test_round_trip(layers: LayerGraph, tmp_path: Path) -> None:
    plan = make_plan(layers, policy={"layers": {"L01": {"source": "cast"}, "L00": {"state": "hbm"}, "L02": {"weights": "hold"}}})
    plan.dump(tmp_path / "plan.yaml")
    loaded = PlanFile.load(tmp_path / "plan.yaml")
    assert loaded == plan
    assert loaded.layer_graph() == layers
    assert ops_hash(lower(loaded.layer_graph(), loaded.decisions)) == plan.ops_hash
    assert not loaded.edited
    loaded.require(layers, load_profile("h200x1"))


def test_it_is_small_and_readable() -> None:
    text = make_plan(qwen3_4b(1)).to_yaml()
    assert text.startswith("# A SlideDP plan")
    assert len(text) < 4000
    content = yaml.safe_load(text)
    assert list(content["decisions"]) == ["prologue", "L00-L34", "L35", "epilogue"]
    assert content["decisions"]["L35"]["act"] == "retain"
    assert content["decisions"]["L00-L34"] == {"delivery": "replicated", "source": "shadow", "delivery_chunks": 6,
                                               "reduction": "gpu", "return_chunks": 6, "act": "recompute"}  # fmt: skip
    assert [row["name"] for row in content["model"]["stages"]] == ["prologue", "L00-L35", "epilogue"]
    assert content["model"]["groups"][1] == {"name": "L00-L35", "numel": 100930560, "num_trainable": 100930560, "uses": ["self"]}


def test_residence_is_shown_and_written_only_where_it_differs() -> None:
    plain = make_plan(stack(4))
    assert not {"weights", "state"} & set(yaml.safe_load(plain.to_yaml())["decisions"]["L00-L02"])
    assert "state" not in summary(plain)
    pinned = make_plan(stack(4), policy={"layers": {"L00-L01": {"state": "hbm"}, "L02": {"weights": "hold"}}})
    rows = {line.split()[0]: line.split()[1:] for line in summary(pinned).splitlines() if line.startswith("  ")}
    assert rows["L00-L01"] == ["-", "-", "-", "-", "1", "recompute", "-", "hbm"]
    assert rows["L02"][-2:] == ["hold", "host"]
    assert rows["L03"][-2:] == ["stream", "host"]
    changes = {c.where: (str(c.before), str(c.after)) for c in diff(plain, pinned).changes if c.section == "decisions"}
    assert changes == {"L00-L01.state": ("host", "hbm"), "L02.weights": ("stream", "hold")}


def test_shared_groups_survive(tmp_path: Path) -> None:
    """A tied embedding is used by two stages; a layer may read a group that is not its own."""
    layers = stack(4)
    groups = tuple(replace(g, uses=("prologue", "epilogue")) if g.name == "prologue" else g for g in layers.groups)
    stages = tuple(replace(s, groups=("epilogue", "prologue")) if s.name == "epilogue" else s for s in layers.stages)
    tied = replace(layers, groups=groups, stages=stages)
    make_plan(tied).dump(tmp_path / "plan.yaml")
    assert PlanFile.load(tmp_path / "plan.yaml").layers == tied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(colour=1), "unknown key 'colour'"),
        (lambda c: c.pop("plan"), "missing key 'plan'"),
        (lambda c: c.update(format=9), "format: 9 is not one that this version reads (1)"),
        (lambda c: c["plan"].update(windows=3), "plan: unknown key 'windows'; closest: 'window'; allowed: window, grad"),
        (lambda c: c["plan"].update(window=0), "plan: window: 0 is less than 1"),
        (lambda c: c["plan"].update(window="3"), "plan: window: expected a whole number, got '3' (str)"),
        (lambda c: c["decisions"]["L00-L03"].update(delivery="wire"), "'wire' is unknown; allowed: replicated, sharded"),
        (lambda c: c["decisions"]["L00-L03"].update(delivery=["sharded"]), "delivery: ['sharded'] is unknown"),
        (lambda c: c["decisions"]["L00-L03"].update(return_chunks=0), "return_chunks: 0 is less than 1"),
        (lambda c: c["decisions"]["L00-L03"].update(colour=1), "decisions: L00-L03: unknown key 'colour'"),
        (lambda c: c["decisions"]["L00-L03"].pop("source"), "decisions: L00-L03: missing key 'source'"),
        (lambda c: c["decisions"].pop("epilogue"), "epilogue is not decided: ranges leave a gap"),
        (lambda c: c["decisions"].update({"L00-L02": c["decisions"].pop("L00-L03")}), "L03 is not decided: ranges leave a gap"),
        (lambda c: c["decisions"].update({"L02-L03": c["decisions"]["L00-L03"]}), "L02 is decided twice: ranges overlap"),
        (lambda c: c["decisions"].update({"L04": c["decisions"]["L00-L03"]}), "the model has no group L04"),
        (lambda c: c["decisions"].update({"L03-L01": c["decisions"]["L00-L03"]}), "the range L03-L01 ends before it begins"),
        (lambda c: c["decisions"].update({"L00-L03": 3}), "decisions: L00-L03: expected a mapping, got 3"),
        (lambda c: c["model"]["groups"][1].update(numel=8192, num_trainable=8192), "the table was edited"),
        (lambda c: c["model"]["groups"][1].update(numel=100), "must be multiples of 64"),
        (lambda c: c["model"]["stages"][1].update(kind="tower"), "kind: 'tower' is unknown; allowed: prologue, layer, epilogue"),
        (lambda c: c["model"]["stages"][1].update(groups=["L77"]), "stages: L00: there is no group 'L77'"),
        (lambda c: c["model"]["stages"].pop(0), "there is no stage 'prologue'"),
        (lambda c: c["model"]["stages"].append(c["model"]["stages"][1]), "stages: L00 is listed twice"),
        (lambda c: c["model"]["stages"].reverse(), "expected a prologue, layers and an epilogue"),
        (lambda c: c["predictions"].update(step_us=-4), "predictions: step_us: -4 is less than 0"),
        (lambda c: c.update(world_size=0), "world_size: 0 is less than 1"),
        (lambda c: c.update(compute_dtype="int8"), "compute_dtype: 'int8' is unknown; allowed: float32, bfloat16"),
        (lambda c: c.update(specialisation={"x": [1]}), "specialisation: x: expected a string"),
    ],
)
def test_bad_files_name_what_is_wrong(change: Callable[[dict[str, Any]], object], message: str,
                                      edited: Callable[[Callable[[dict[str, Any]], object]], Path]) -> None:  # fmt: skip
    path = edited(change)
    with pytest.raises(ValueError, match=re.escape(message)) as e:
        PlanFile.load(path)
    assert str(path) in str(e.value)


def test_no_python_objects(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("!!python/object/apply:os.system ['true']\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        PlanFile.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        PlanFile.load(tmp_path / "missing.yaml")


def test_hand_edit_is_noticed(edited: Callable[[Callable[[dict[str, Any]], object]], Path]) -> None:
    plan = PlanFile.load(edited(lambda c: c["plan"].update(window=2)))
    assert plan.edited
    assert plan.decisions.window == 2


def test_require_names_what_differs() -> None:
    plan = make_plan(stack(4))
    for other, message in [
        (stack(4, model="Tower"), "made for model 'Stack', this is 'Tower'"),
        (stack(4, world_size=2), "made for 1 rank, this is 2 ranks; plan anew with --ranks 2"),
        (stack(4, dtype="float32"), "made for compute_dtype 'bfloat16', this is 'float32'"),
        (stack(5), "only one of them has a group L04"),
        (stack(4, layer_numel=8192), "L00 had 4096 elements (4096 trainable), here it has 8192 (8192)"),
        (stack(4, frozen=(2,)), "L02 had 4096 elements (4096 trainable), here it has 4096 (0)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            plan.require(other)
    with pytest.raises(ValueError, match=r"made for hardware h200x1 .* this is h200x4"):
        plan.require(stack(4), load_profile("h200x4"))
    plan.require(stack(4, tokens=128))  # another batch is not another model


def test_parameter_names_are_part_of_the_model() -> None:
    def named(name: str) -> LayerGraph:
        layers = stack(1)
        return replace(layers, groups=tuple(replace(g, params=(Param((f"{g.name}.{name}",), (64,), 0),)) for g in layers.groups))

    assert params_hash(stack(1)) == ""
    assert model_hash(named("a")) == model_hash(stack(1))
    plan = make_plan(named("a"))
    plan.require(named("a"))
    plan.require(stack(1))
    with pytest.raises(ValueError, match="parameter names or shapes differ"):
        plan.require(named("b"))


# ---- policies ----


def decide(policy: dict[str, Any] | None, layers: LayerGraph | None = None) -> Decisions:
    layers = layers or stack(12)
    return apply_policy(Decisions({g.name: GroupDecision() for g in layers.groups}), policy, layers)


def test_policy_layers_over_globals() -> None:
    d = decide({
        "window": 2, "grad_slots": 3, "source": "cast", "chunks": 4, "return_chunks": 2,
        "layers": {"L3": {"chunks": 7}, "L02-L04": {"delivery": "sharded"}, "prologue": {"reduction": "cpu"},
                   "*": {"source": "shadow"}, "L04": {"delivery": "replicated"}},
    })  # fmt: skip
    assert (d.window, d.grad_slots) == (2, 3)
    assert d.of("L00") == GroupDecision(Route.REPLICATED, Source.SHADOW, 4, Reduction.GPU, 2)
    assert d.of("L03") == GroupDecision(Route.SHARDED, Source.SHADOW, 7, Reduction.GPU, 7)
    assert d.of("L04").delivery is Route.REPLICATED
    assert d.of("prologue").reduction is Reduction.CPU
    assert decide(None) == decide({})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"windows": 3}, "policy: unknown key 'windows'; closest: 'window'; allowed: window,"),
        ({"window": 0}, "policy: window: 0 is less than 1"),
        ({"chunks": "four"}, "policy: delivery_chunks: expected a whole number"),
        ({"act": "sometimes"}, "act: 'sometimes' is unknown; allowed: retain, offload, recompute, selective"),
        ({"boundary": "disk"}, "boundary: 'disk' is unknown; allowed: hbm, host"),
        ({"layers": {"L12": {"chunks": 1}}}, "no group 'L12'; it has prologue, L00-L11, epilogue"),
        ({"layers": {"L10-L12": {"chunks": 1}}}, "no group 'L12'"),
        ({"layers": {"L05-L03": {"chunks": 1}}}, "the range L05-L03 ends before it begins"),
        ({"layers": {"head": {"chunks": 1}}}, "no group 'head'"),
        ({"layers": {"L03": {"window": 1}}}, "policy: layers: L03: unknown key 'window'"),
        ({"layers": {"L03": "sharded"}}, "policy: layers: L03: expected a mapping"),
        ({"layers": ["L03"]}, "policy: layers: expected a mapping"),
    ],
)
def test_bad_policies_name_what_is_wrong(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        decide(policy)


def test_fixes() -> None:
    fixes = ["L3.act=recompute", "L00-L05.chunks=2", "L3.source=cast", "delivery=sharded", "window=3", "*.reduction=cpu"]
    assert parse_fixes(fixes) == {
        "layers": {"L3": {"act": "recompute", "source": "cast"}, "L00-L05": {"chunks": 2}, "*": {"reduction": "cpu"}},
        "delivery": "sharded", "window": 3}  # fmt: skip
    assert decide(parse_fixes(fixes)).of("L03") == GroupDecision(Route.SHARDED, Source.CAST, 2, Reduction.CPU, 2)
    for bad in ("L3.act", "=3", ".act=retain", "L3.=4"):
        with pytest.raises(ValueError, match="--fix"):
            parse_fixes([bad])


def test_merged_policies() -> None:
    merged = merge_policies({"window": 2, "layers": {"L00": {"chunks": 1}, "L01": {"chunks": 1}}}, None,
                            {"window": 3, "layers": {"L00": {"source": "cast"}}})
    assert merged == {"window": 3, "layers": {"L00": {"chunks": 1, "source": "cast"}, "L01": {"chunks": 1}}}
    assert list(merged["layers"]) == ["L01", "L00"]  # what is written later is applied later


def test_a_plan_is_a_policy() -> None:
    layers = stack(4)
    plan = make_plan(layers, policy={"window": 2, "layers": {"L01": {"source": "cast", "chunks": 5}}})
    assert apply_policy(default_decisions(layers, load_profile("cpu")), plan.policy(), layers) == plan.decisions


# ---- run lengths and diffs ----


def test_runs() -> None:
    rows = [("prologue", 1), ("L00", 1), ("L01", 1), ("L02", 2), ("L04", 2), ("L05", 2), ("epilogue", 2)]
    assert runs(rows) == [("prologue", 1), ("L00-L01", 1), ("L02", 2), ("L04-L05", 2), ("epilogue", 2)]
    assert runs([]) == []
    wide = [(f"L{i:02}", 0) for i in range(98, 102)]
    assert runs(wide) == [("L98-L101", 0)]
    assert expand("L98-L101", "") == [name for name, _ in wide]


def test_equal_plans() -> None:
    plan = make_plan(stack(4))
    changes = diff(plan, make_plan(stack(4)))
    assert not changes
    assert str(changes) == "the plans are equal"


def test_diff_shows_exactly_the_change(tmp_path: Path) -> None:
    layers = qwen3_4b(1)
    make_plan(layers).dump(tmp_path / "a.yaml")
    make_plan(layers, policy={"layers": {"L02-L05": {"source": "cast"}}, "window": 3}).dump(tmp_path / "b.yaml")
    changes = diff(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert changes
    decided = [(c.where, c.before, c.after) for c in changes.changes if c.section in ("decisions", "plan")]
    assert decided == [("L02-L05.source", "shadow", "cast"), ("window", 4, 3)]
    assert {c.section for c in changes.changes} == {"decisions", "plan", "predictions"}
    text = str(changes)
    assert re.search(r"^  L02-L05\.source +shadow -> cast$", text, re.MULTILINE)
    assert re.search(r"^  step_us +[\d.]+ ms -> [\d.]+ ms  \([+-][\d.]+%\)$", text, re.MULTILINE)
    assert re.search(r"^  hbm_bytes +[\d.]+ GiB -> [\d.]+ GiB  \(-[\d.]+%\)$", text, re.MULTILINE)


def test_diff_takes_what_has_a_plan_file() -> None:
    class Plan:
        def to_planfile(self) -> PlanFile:
            return make_plan(stack(4), policy={"source": "cast"})

    assert diff(Plan(), Plan()).changes == ()
    assert diff(make_plan(stack(4)), Plan())


def test_diff_of_batches() -> None:
    changes = diff(make_plan(stack(4)), make_plan(stack(4, tokens=128)))
    assert {c.section for c in changes.changes} == {"model", "predictions"}
    assert "boundaries" in str(changes)


def test_diff_of_models_and_machines() -> None:
    changes = diff(make_plan(stack(4)), make_plan(stack(6, layer_numel=8192), "h200x4"))
    rows = {(c.section, c.where): (c.before, c.after) for c in changes.changes}
    assert rows["model", "L00-L03 elements"] == (4096, 8192)
    assert rows["model", "L04-L05 elements"] == (None, 8192)
    assert str(rows["made for", "hardware"][1]).startswith("h200x4 (")
    assert "(none) -> 8192" in str(changes)


@pytest.mark.parametrize("field", ["slidedp", "hardware", "cost_model", "budgets", "predictions", "ops_hash", "specialisation"])
def test_any_difference_counts(field: str) -> None:
    plan = make_plan(stack(2))
    values = {"slidedp": "9", "hardware": replace(plan.hardware, hash="x"), "cost_model": replace(plan.cost_model, name="x"),
              "budgets": replace(plan.budgets, hbm_bytes=1), "predictions": replace(plan.predictions, bottleneck="x"),
              "ops_hash": "x", "specialisation": {}}  # fmt: skip
    assert diff(plan, replace(plan, **{field: values[field]}))
