"""The page of a plan: whole, self-contained, and with the figures of the plan on it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from stacks import stack
from test_cli import TINY
from test_gantt import planned, twice
from test_planfile import make_plan

from slidedp.compiler.drawing.gantt import duration
from slidedp.compiler.drawing.svg import bars, colour, memory_svg, ticks, timeline_rows
from slidedp.compiler.footprint.memory_over_time import MemoryCurve, memory_over_time
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.simulation.unroll import picture
from slidedp.compiler.units import format_bytes
from slidedp.paper import plan_on_paper
from slidedp.reports.page import batches, page
from slidedp.reports.sensitivity import batch_of, candidates, over_batches, over_budgets
from slidedp.reports.what_if import what_if

pytestmark = pytest.mark.null
VOID = {"meta", "input", "br", "link", "img"}


class Reader(HTMLParser):
    """Every element, its text, and whether tags close in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def written(plan: PlanFile, **options: str) -> str:
    world, notes = what_if(plan)
    return page(plan, world, notes, **options)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A model config."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "config.json")


# ---- the page ----


@pytest.mark.parametrize("ranks", [1, 4])
def test_it_is_whole_and_needs_nothing_else(ranks: int) -> None:
    plan = make_plan(stack(6, world_size=ranks), "h200x4" if ranks > 1 else "h200x1", {"source": "cast"})
    text = written(plan)
    assert text == written(plan)
    read = Reader(text)
    assert {"svg", "table", "style", "script", "title", "h2"} <= read.elements.keys()
    assert not {"link", "img", "iframe", "object", "embed"} & read.elements.keys()
    assert not {"src", "href", "action", "srcset"} & {name for name, _ in read.attributes}
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp", text)
    said = " ".join(read.texts)
    for heading in ("Timeline and memory", "What binds", "Decisions", "Predictions", "to the batch", "to the device budget"):
        assert heading in said
    assert f"A step takes {duration(plan.predictions.step_us)}" in said
    assert f"Peak of device memory: {format_bytes(plan.predictions.hbm_bytes)} of" in said
    assert {"L00-L04", "L05", "retain"} <= set(read.texts)
    streams = {op.stream for op in planned(plan.layers, plan.hardware.name, {"source": "cast"})[2].ops}
    assert read.elements["svg"] == len(streams) + 2


def test_names_are_text() -> None:
    text = written(make_plan(stack(2, model="Model<script>alert(1)</script>&")))
    assert "<script>alert" not in text
    assert "Model&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in text
    Reader(text)


def test_notes_and_edits_are_on_it() -> None:
    plan = make_plan(stack(3))
    assert "decisions were edited" in written(replace(plan, decisions=replace(plan.decisions, window=2)))


# ---- drawings ----


def test_bars_hold_the_busy_time_of_each_stream() -> None:
    _, _, ops, line = planned(stack(5, world_size=2), "h200x4")
    rows = list(timeline_rows(ops, line))
    assert [stream for stream, _, _ in rows] == [s for s in Stream if s in line.busy_us]
    for stream, busy, svg in rows:
        lasted = sum(s.end_us - s.start_us for s in line.spans if s.stream is stream)
        assert busy == pytest.approx(lasted / line.step_us)
        spans = [(int(x), int(w)) for x, w in re.findall(r'<rect x="(\d+)" width="(\d+)"', svg)]
        assert all(x >= 0 and x + w <= line.step_us for x, w in spans)
        assert sum(w for _, w in spans) == pytest.approx(lasted, abs=len(spans) * (1 + line.step_us // 1000))
        exact = list(bars(ops, picture(line), stream, 0))
        assert sum(b.end_us - b.start_us for b in exact) == lasted


def test_chunks_of_a_layer_are_one_bar() -> None:
    _, _, ops, line = planned(stack(3, layer_numel=2**20), policy={"chunks": 4})
    h2d = list(bars(ops, picture(line), Stream.H2D, 10**9))
    whole = [b for b in h2d if b.layer == "L01" and b.num_ops == 4]
    assert whole
    assert re.fullmatch(r"h2d L01 \(4 ops\)(, for the next step)?: .* to .*, .*", whole[0].title)


def test_every_kind_has_a_colour() -> None:
    assert len({colour(kind) for kind in OpKind}) == len(OpKind)
    assert colour(None) not in {colour(kind) for kind in OpKind}


def test_memory_is_stacked_to_its_total() -> None:
    curve = MemoryCurve((0, 10, 20), 40, {"a": (1, 3, 1), "b": (1, 1, 0), "nothing": (0, 0, 0)})
    svg = memory_svg(curve, ["red", "blue", "grey"])
    a, b = re.findall(r'points="([^"]*)"', svg)
    assert a.startswith("0,750.0 10,750.0 10,250.0 20,250.0 20,750.0 40,750.0 40,1000.0")
    assert b.startswith("0,500.0 10,500.0 10,0.0 20,0.0 20,750.0 40,750.0 40,750.0")
    assert "budget" not in svg
    assert 'y1="500.0"' in memory_svg(curve, ["red", "blue", "grey"], budget_bytes=2).replace('y1="0.0"', "")  # 2 of 4
    assert 'y1="0.0"' in memory_svg(curve, ["red", "blue", "grey"], budget_bytes=8)  # the top is the budget


def test_a_measured_run_has_rows_too() -> None:
    layers, decisions, ops, line = planned(stack(3))
    measured = twice(line)
    rows = list(timeline_rows(ops, measured))
    assert len(rows) == len(line.busy_us)
    assert "step 1" in rows[0][2]
    assert memory_over_time(layers, decisions, ops, measured).end_us == max(s.end_us for s in measured.spans)


def test_ticks() -> None:
    assert list(ticks(1000, 4)) == [(0.0, "0"), (0.5, "500 us")]


# ---- sensitivity ----


def test_budgets_from_too_small_to_all_there_is() -> None:
    plan = make_plan(stack(6, layer_numel=2**20))
    world, _ = what_if(plan)
    points = over_budgets(plan, world)
    assert points[-1].label == format_bytes(world.hw.hbm_bytes)
    assert points[-1].step_us == plan.predictions.step_us
    assert "that it may use" in points[0].why
    fitting = [p for p in points if not p.why]
    assert all(p.hbm_bytes <= plan.predictions.hbm_bytes for p in fitting)
    [here] = [p for p in points if p.label == format_bytes(plan.predictions.hbm_bytes)]
    assert here.tokens_per_s == pytest.approx(plan.predictions.tokens_per_s, rel=0.05), "all but the reserve of so small a budget"


def test_batches_are_planned_anew(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slidedp.reports.sensitivity.BATCH_FACTORS", (0.5, 1))
    plan = plan_on_paper(tiny, "h200x1", batch=4, seq=16)
    world, _ = what_if(plan)
    half, same = over_batches(plan, world, tiny)
    assert (half.label, same.label) == ("2 x 16", "4 x 16")
    for point, again in ((half, plan_on_paper(tiny, "h200x1", batch=2, seq=16).predictions), (same, plan.predictions)):
        assert (point.step_us, point.tokens_per_s, point.hbm_bytes) == (again.step_us, again.tokens_per_s, again.hbm_bytes)
    [roomy] = [p for p in over_budgets(plan, world) if p.label == format_bytes(plan.budgets.hbm_bytes)]
    assert (roomy.step_us, roomy.hbm_bytes) == (plan.predictions.step_us, plan.predictions.hbm_bytes)
    text = "".join(batches(plan, world, tiny))
    assert '<tr class="here"><td class="n">4 x 16</td>' in text
    Reader(text)


def test_no_table_of_batches_without_the_model(tiny: str) -> None:
    stacked = make_plan(stack(3))
    assert "Left out: the plan&#x27;s model (Stack) is none of the presets: name it with --model." in written(stacked)
    assert "Left out: the plan is not of the model" in written(stacked, model=tiny)
    strange = replace(stacked, specialisation={"x": "3x4"})
    with pytest.raises(ValueError, match="no input_ids"):
        batch_of(strange)


def test_the_preset_is_found_by_class_and_layers() -> None:
    layers = stack(36, model="Qwen3ForCausalLM")
    assert list(candidates(make_plan(layers))) == ["qwen3-4b", "qwen3-8b"]
    assert list(candidates(make_plan(stack(36)))) == []
