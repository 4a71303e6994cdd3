"""What binds a step, and what other decisions would change: every figure against a computation of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from enum import StrEnum

import pytest
from stacks import qwen3_4b, stack
from test_gantt import planned
from test_planfile import make_plan
from test_simulate import graph, us

from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions, GroupDecision, Route, Source
from slidedp.compiler.drawing.binds import Link, links, longest
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.ops import Op, OpKind, Stream
from slidedp.compiler.planfile.planfile import Budgets, PlanFile
from slidedp.compiler.simulation.predict import cost_model_of, predict, price
from slidedp.compiler.simulation.simulate import simulate
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower
from slidedp.reports.explanation import COUNTS, Alternative, Report, Verdict, explain

pytestmark = pytest.mark.null
CYCLE = graph([("copy", "h2d", 5), ("run", "gpu", 8), ("update", "cpu", 7)],
              [("copy", "run", 0), ("run", "update", 0), ("update", "copy", 1)])  # fmt: skip
HOST_BOUND = stack(8, layer_numel=2**24, vocab_numel=2**25, tokens=1024, width=1024, model="A model with a name of some length")
SMALL = stack(4, layer_numel=2**22, vocab_numel=2**22, world_size=2, tokens=4096, width=1024)


def step_us(plan: PlanFile, decisions: Decisions, hw_name: str, user: CostModel | None = None) -> int:
    ops = lower(plan.layers, decisions)
    hw = load_profile(hw_name)
    return predict(ops, price(ops, cost_model_of(plan.layers, cost_model=user), hw), hw).step_us


def by_value(report: Report) -> dict[str, Alternative]:
    return {a.value: a for a in report.alternatives}


# ---- what binds ----


def test_the_gpu_waits_for_those_that_work_meanwhile() -> None:
    """It waits 12 us for a copy: for 5 of them the copy runs, for 7 the update that the copy waits for."""
    assert simulate(CYCLE, us).exposed_by == {OpKind.CPU_UPDATE: 7, OpKind.H2D: 5}


def test_a_wait_inside_the_step() -> None:
    made = graph([("copy", "h2d", 5), ("other", "gpu", 3), ("run", "gpu", 8)], [("copy", "run", 0), ("run", "copy", 1)])
    line = simulate(made, us)
    assert (line.step_us, line.exposed_us) == (13, 2)  # run ends; copy runs for 5, other beside it for 3
    assert line.exposed_by == {OpKind.H2D: 2}


@pytest.mark.parametrize(
    ("layers", "hw_name", "policy"),
    [
        (qwen3_4b(4), "h200x1", None),
        (qwen3_4b(64), "h200x1", None),
        (qwen3_4b(8, world_size=4), "a800x4-nvlink", {"source": "cast", "delivery": "replicated", "chunks": 2}),
    ],
)
def test_waits_add_up_to_what_is_exposed(layers, hw_name: str, policy: dict[str, object] | None) -> None:
    line = planned(layers, hw_name, policy)[-1]
    found = line.exposed_by
    assert sum(found.values()) == pytest.approx(line.exposed_us, abs=line.step_us / 1000)
    assert OpKind.FORWARD not in found


def test_links_of_the_critical_cycle() -> None:
    assert links(simulate(CYCLE, us)) == (
        Link((OpKind.H2D,), ("L00",), 5), Link((OpKind.FORWARD,), ("L00",), 8), Link((OpKind.CPU_UPDATE,), ("L00",), 7))
    line = planned(qwen3_4b(64))[-1]
    chain = links(line)
    most = longest(chain)
    assert most is not None
    assert most.kinds == (OpKind.BACKWARD,)
    assert most.where == "L35…L00"
    assert 0.5 * line.step_us < most.time_us < line.step_us
    assert len(links(line, at_most=2)) == 2
    assert links(replace(line, cycle=())) == ()


def test_copies_and_compute_in_turn_are_one_link() -> None:
    """One slot: each layer's copy waits for the layer before, and 40 links of 10 or 9 us say one thing."""
    ops = [(f"{what}{i}", stream, us) for i in range(20) for what, stream, us in (("copy", "h2d", 10), ("run", "gpu", 9))]
    flow = [(f"copy{i}", f"run{i}", 0) for i in range(20)]
    reuse = [(f"run{i}", f"copy{(i + 1) % 20}", int(i == 19)) for i in range(20)]
    made = graph(ops, flow + reuse)
    [link] = links(simulate(made, us))
    assert (link.kinds, link.time_us) == ((OpKind.H2D, OpKind.FORWARD), 380)


def test_links_of_next_to_no_time_are_left_out() -> None:
    ops = [("copy", "h2d", 1), ("run", "gpu", 500), ("back", "d2h", 2), ("update", "cpu", 497)]
    made = graph(ops, [("copy", "run", 0), ("run", "back", 0), ("back", "update", 0), ("update", "copy", 1)])
    chain = links(simulate(made, us), at_most=2)
    assert [(link.kinds, link.time_us) for link in chain] == [((OpKind.FORWARD,), 500), ((OpKind.CPU_UPDATE,), 497)]


def test_layers_of_a_link_in_words() -> None:
    def where(*layers: str) -> str:
        return Link((OpKind.FORWARD,), layers, 1).where

    assert where("L03") == "L03"
    assert where("L00", "L01", "L02") == "L00…L02"
    assert where("epilogue", "L35", "L34", "prologue") == "epilogue, L35…L34, prologue"
    assert where("L00", "L02", "L01") == "L00, L02…L01"
    assert where("L00", "L02", "L04", "L06") == "L00 to L06 (4 groups)"
    assert str(Link((OpKind.EPILOGUE,), ("epilogue",), 1)) == "epilogue"
    assert str(Link((OpKind.H2D,), ("epilogue",), 1)) == "h2d epilogue"


def test_the_report_without_a_question() -> None:
    plan = make_plan(HOST_BOUND)
    report = explain(plan)
    assert (report.step_us, report.bottleneck) == (plan.predictions.step_us, "cpu")
    assert report.bound_by is not None
    assert report.bound_by.kinds == (OpKind.CPU_UPDATE,)
    assert report.bound_by in report.chain
    assert sum(report.waits_us.values()) == pytest.approx(report.exposed_us, abs=len(report.waits_us))  # each rounded
    assert not report.notes
    changes = [abs(a.step_change_us) for a in report.alternatives if a.step_change_us is not None]
    assert changes == sorted(changes, reverse=True)
    assert all(a.decision.startswith("*.") or a.decision in ("window", "grad_slots", "update") for a in report.alternatives)
    assert [a.value for a in report.alternatives if a.decision == "*.source"] == ["cast"]
    assert "bound by cpu_update" in str(report)


# ---- alternatives ----


@pytest.mark.parametrize("decision", ["delivery", "L02.source", "L00-L01.return_chunks", "reduction"])
def test_alternatives_are_what_planning_with_them_says(decision: str) -> None:
    plan = make_plan(SMALL, "h200x4")
    target, _, field = decision.rpartition(".")
    groups = {"": list(plan.decisions.groups), "L02": ["L02"], "L00-L01": ["L00", "L01"]}[target]
    report = explain(plan, decision)
    kind = type(getattr(plan.decisions.of("L00"), field))
    assert {a.value for a in report.alternatives} >= {str(v) for v in (kind if issubclass(kind, StrEnum) else COUNTS)}
    for a in report.alternatives:
        pinned = {name: replace(plan.decisions.of(name), **{field: kind(a.value)}) for name in groups}
        decisions = replace(plan.decisions, groups=plan.decisions.groups | pinned)
        was, now = (estimate_memory(plan.layers, d) for d in (plan.decisions, decisions))
        assert a.step_change_us == step_us(plan, decisions, "h200x4") - report.step_us
        assert (a.hbm_change_bytes, a.host_change_bytes) == (now.hbm_bytes - was.hbm_bytes, now.host_bytes - was.host_bytes)
        assert (a.verdict is Verdict.CHOSEN) == (decisions == plan.decisions)
    assert [a.verdict for a in report.alternatives].count(Verdict.CHOSEN) == 1


def test_lowering_without_verifying_gives_the_same_timeline() -> None:
    plan = make_plan(SMALL, "h200x4", {"source": "cast"})
    hw = load_profile("h200x4")
    rough, sound = (lower(plan.layers, plan.decisions, verified=verified) for verified in (False, True))
    assert (rough.ops, rough.slots) == (sound.ops, sound.slots)
    assert len(rough.edges) > len(sound.edges)
    rough_line, line = (predict(g, price(g, cost_model_of(plan.layers), hw), hw) for g in (rough, sound))
    assert (rough_line.step_us, rough_line.spans) == (line.step_us, line.spans)


def test_verdicts() -> None:
    """A machine whose links between GPUs make gathering pay, a plan that does not: the alternative is faster, and told so."""
    plan = make_plan(SMALL, "h200x4", {"delivery": "replicated"})
    found = by_value(explain(plan, "*.delivery"))
    assert found["replicated"].verdict is Verdict.CHOSEN
    assert found["sharded"].verdict is Verdict.FASTER
    other = by_value(explain(make_plan(SMALL, "h200x4", {"delivery": "sharded"}), "*.delivery"))
    assert other["replicated"].verdict is Verdict.SLOWER
    assert other["replicated"].step_change_us == -(found["sharded"].step_change_us or 0)
    alone = by_value(explain(make_plan(stack(4)), "*.delivery"))
    assert (alone["sharded"].verdict, alone["sharded"].why) == (Verdict.TIE, "no op changes")


def test_what_does_not_fit_says_why() -> None:
    plan = make_plan(stack(6, layer_numel=2**20), policy={"window": 2, "source": "cast"})
    tight = replace(plan, budgets=Budgets(plan.predictions.hbm_bytes + 2**20, plan.predictions.host_bytes))
    windows = by_value(explain(tight, "window"))
    assert windows["1"].verdict is not Verdict.UNAVAILABLE
    assert windows["3"].verdict is Verdict.UNAVAILABLE
    assert windows["3"].step_change_us is None
    assert windows["3"].hbm_change_bytes == 2**21
    assert "of GPU memory, 1.0 MiB more than the" in windows["3"].why
    source = by_value(explain(tight, "source"))["shadow"]
    assert (source.verdict, source.hbm_change_bytes) == (Verdict.UNAVAILABLE, 0)
    assert "of host memory" in source.why
    assert "needs" in str(explain(tight, "window"))


def test_groups_that_are_decided_differently() -> None:
    plan = make_plan(SMALL, "h200x4", {"delivery": "sharded", "layers": {"L01": {"delivery": "replicated"}}})
    found = by_value(explain(plan, "delivery"))
    assert found["as planned: replicated, sharded"].verdict is Verdict.CHOSEN
    assert found["replicated"].verdict is Verdict.SLOWER
    assert by_value(explain(plan, "L01.delivery"))["replicated"].verdict is Verdict.CHOSEN


def test_a_group_alone_means_all_its_decisions() -> None:
    report = explain(make_plan(stack(3)), "L1")
    names = list(dict.fromkeys(a.decision for a in report.alternatives))
    assert names == [f"L1.{f.name}" for f in fields(GroupDecision)]


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ("L9.act", r"the model has no group 'L9'; it has prologue, L00-L02, epilogue .*; decisions are, of a group: delivery"),
        ("L01.colour", r"there is no decision 'colour' of a group; decisions are, .* of the plan: window, grad_slots"),
        ("colour", r"the model has no group 'colour'.*; decisions are"),
        ("L01.window", r"there is no decision 'window' of a group"),
    ],
)
def test_questions_that_make_no_sense(decision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(make_plan(stack(3)), decision)


# ---- what the file does not say ----


class SlowLinks:
    def duration_us(self, op: Op, hw: HardwareProfile) -> int | None:
        return 50_000 if op.kind is OpKind.ALL_GATHER else None

    def bytes(self, op: Op, hw: HardwareProfile) -> int | None:
        return None


def test_a_users_cost_model_is_used_or_missed() -> None:
    plan = make_plan(SMALL, "h200x4", {"delivery": "sharded"})
    assert by_value(explain(plan, "delivery"))["replicated"].verdict is Verdict.SLOWER
    slow = explain(plan, "delivery", cost_model=SlowLinks())
    assert by_value(slow)["replicated"].verdict is Verdict.FASTER
    assert slow.step_us == step_us(plan, plan.decisions, "h200x4", SlowLinks())
    missed = explain(replace(plan, cost_model=replace(plan.cost_model, name="mine.SlowLinks")), "delivery")
    assert "the cost model mine.SlowLinks, which is not in the file" in missed.notes[0]
    assert "note: the plan was made with" in str(missed)


def test_hardware_that_is_not_known_here() -> None:
    plan = make_plan(stack(3))
    foreign = replace(plan, hardware=replace(plan.hardware, name="my cluster"))
    with pytest.raises(ValueError, match=r"made for hardware my cluster .*--hw \(built in: .*h200x1"):
        explain(foreign)
    assert not explain(foreign, "window", hw=load_profile("h200x1")).notes  # the same content by another name
    other = explain(foreign, "window", hw="a800x4-nvlink")
    assert "computed for the hardware profile a800x4-nvlink" in other.notes[0]
    changed = explain(replace(plan, hardware=replace(plan.hardware, hash="0")), "window")
    assert "computed for the hardware profile h200x1" in changed.notes[0]


def test_edited_plans_and_stale_predictions() -> None:
    plan = make_plan(HOST_BOUND)
    edited = replace(plan, decisions=replace(plan.decisions, window=2))
    assert "decisions were edited" in explain(edited, "window").notes[0]
    stale = replace(plan, predictions=replace(plan.predictions, step_us=2 * plan.predictions.step_us))
    assert "the plan's own prediction is" in explain(stale, "window").notes[0]


# ---- how it reads ----


@pytest.mark.parametrize("decision", ["", "L07", "*.source", "window"])
def test_it_fits_80_columns(decision: str) -> None:
    plan = make_plan(HOST_BOUND, "h200x1")
    tight = replace(plan, budgets=Budgets(plan.predictions.hbm_bytes, plan.predictions.host_bytes))
    assert max(map(len, str(explain(tight, decision)).splitlines())) <= 80


def test_how_a_report_reads(golden: Callable[[str, str], None]) -> None:
    chain = (Link((OpKind.FORWARD,), ("L30", "L31"), 300_000), Link((OpKind.CPU_UPDATE,), ("L31", "L30", "L29"), 900_000))
    alternatives = (
        Alternative("*.source", str(Source.CAST), Verdict.FASTER, -60_000, 0, -(2**33)),
        Alternative("*.delivery", str(Route.SHARDED), Verdict.SLOWER, 36_000, 2**20, 0),
        Alternative("window", "2", Verdict.TIE, 10, -(2**28), 0),
        Alternative("grad_slots", "4", Verdict.UNAVAILABLE, None, 2**28, 0, why="needs 20.1 GiB of HBM, 0.1 GiB more than " * 3))
    report = Report(
        title="Stack on h200x1", step_us=1_200_000, exposed_us=100_000, bottleneck="cpu", bound_by=chain[1], chain=chain,
        busy_us={Stream.GPU: 1_100_000, Stream.CPU: 1_150_000}, waits_us={OpKind.CPU_UPDATE: 100_000}, question="",
        alternatives=alternatives, notes=("decisions were edited",))
    golden("report.txt", f"{report}\n\n{replace(report, question='window', alternatives=alternatives[2:3], notes=())}\n")
