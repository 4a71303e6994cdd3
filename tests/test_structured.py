"""Searches over plans: by counts of layers, by exchanging options of single ones, and where they start."""

from __future__ import annotations

import random

import pytest
from stacks import qwen3_4b, stack
from test_relaxation import analytic, any_selection, diced

from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.eventgraph.memoryrows import memory_rows
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Stream
from slidedp.compiler.solver.counts import count_bound
from slidedp.compiler.solver.exchange import exchange
from slidedp.compiler.solver.search import feasible, interchange, period_of
from slidedp.compiler.solver.structured import COUNTS, Shape, StructuredSearch, search_structured
from slidedp.hardware import load_profile

pytestmark = pytest.mark.null


def test_exchange_makes_plans_shorter() -> None:
    """From the rule's plan: what comes fits, keeps the links, is as long as it says, and is the same every time."""
    layers, hw = stack(5, 60_000_000, 90_000_000, world_size=2, tokens=60_000, width=2048), load_profile("a800x4-pcie")
    graph, choices = diced(layers, "a800x4-pcie", 0, slow=Stream.COMM)
    rows = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    start = search_structured(graph, rows)
    assert start is not None
    best, period, work = exchange(graph, rows, *start, 0, 0.2)
    assert period == period_of(graph, best) < start[1]
    assert feasible(rows, best)
    assert all((best[k.a] == k.a_option) == (best[k.b] == k.b_option) for k in choices.links)
    assert exchange(graph, rows, *start, 0, 0.2) == (best, period, work)
    assert exchange(graph, rows, *start, start[1], 0.2) == (*start, 0.0)


def test_interchange_mixes_the_layers_of_plans() -> None:
    """Layers of two plans of which neither is short: what comes of them is shorter than both, and each layer is as in one."""
    layers, hw = stack(5, 60_000_000, 90_000_000, world_size=2, tokens=60_000, width=2048), load_profile("a800x4-pcie")
    graph, choices = diced(layers, "a800x4-pcie", 1, slow=Stream.COMM)
    rows = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    rng = random.Random(3)
    plans = [s for _ in range(20) if feasible(rows, s := any_selection(choices, rng))][:4]
    start = plans[0]
    best, period = interchange(graph, rows, start, period_of(graph, start), plans)
    assert feasible(rows, best)
    assert period == period_of(graph, best) < period_of(graph, start)
    for a, b in zip(choices.families, best, strict=True):
        same = [s[i] for s in plans for i, f in enumerate(choices.families) if (f.name, f.options) == (a.name, a.options)]
        assert b in same


def test_a_second_start_sums_gradients_elsewhere() -> None:
    """The rule's options but for the reduction; one GPU has no second route."""
    graph, choices = diced(stack(3, 60_000_000, 90_000_000, world_size=2, tokens=4_000, width=2048), "a800x4-pcie", 0)
    search = StructuredSearch(graph, ())
    alike = search.rerouted()
    assert alike is not None
    for members, option in zip(search.kinds, alike, strict=True):
        family = choices.families[members[0]]
        differ = {k for k, v in family.options[option].items() if v != family.options[0][k]}
        assert differ == ({"reduction"} if family.name == "gradients" else set())
    alone, _ = diced(stack(3, 60_000_000, 90_000_000, tokens=4_000, width=2048), "h200x1", 0)
    assert StructuredSearch(alone, ()).rerouted() is None


def searched(layers: LayerGraph, hw: HardwareProfile) -> tuple[StructuredSearch, Shape]:
    """A search of the analytic plans of `layers`, and what it finds."""
    graph, rows = analytic(layers, hw)
    search = StructuredSearch(graph, rows)
    shape = search.run()
    assert shape is not None
    return search, shape


def test_two_counts_together_make_a_plan_shorter() -> None:
    """Where no count alone does: one resident layer less, and more weights cast. It fits, and the search ends at the target."""
    search, shape = searched(qwen3_4b(16), load_profile("h200x1"))
    for count in COUNTS:
        assert search.period(search.best_count(shape, count)) == search.period(shape)
    better = search.nearby(shape, 0)
    assert search.period(better) == period_of(search.graph, search.selection(better)) < search.period(shape) * 0.999
    assert search.fits(better)
    assert search.nearby(shape, search.period(shape)) == shape
    assert search.nearby(better, 0) == better


def test_a_start_has_the_counts_of_the_program() -> None:
    """What the counting program proposes fits its links and rows in counts, and a shape is made of it; a plan has its own."""
    search, shape = searched(qwen3_4b(4), load_profile("h200x1"))
    choices = search.graph.choices
    _, _, counts = count_bound(search.graph, search.rows, 0, search.period(shape), 5e-3, 0.5)
    assert counts is not None
    assert all((counts[k.a] == k.a_option) == (counts[k.b] == k.b_option) for k in choices.links)
    start = next(search.other_starts(counts))
    families = choices.families
    assert start.resident + start.scattered == sum(counts[i] == families[i].resident for i in search.states) > 0
    assert start.other_source == sum(families[i].options[counts[i]].get("source") == "cast" for i in search.sources)
    assert search.fits(start)
    own = search.counted(search.selection(shape))
    assert own is not None
    assert (own.resident + own.scattered, own.ends, own.held) == (shape.resident + shape.scattered, shape.ends, shape.held)
    assert search.period(own) <= search.period(shape)


def test_a_start_may_have_all_its_resident_layers_in_front() -> None:
    """However many they are, also where what the starts are apart does not divide their number."""
    layers, hw = qwen3_4b(4, world_size=4), load_profile("h200x4")
    graph, rows = analytic(layers, hw)
    search = StructuredSearch(graph, rows)
    for num in (7, 16, 17, 23):
        shape = search.filled(Shape((0,) * len(search.kinds), resident=num, ends=search.most("ends")))
        assert shape is not None
        own = search.counted(search.selection(shape))
        assert own is not None
        assert search.period(own) <= search.period(shape), num
