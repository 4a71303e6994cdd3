"""The bound: what it knows of waiting holds for every plan, and no plan of small models is shorter than it says."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from stacks import looking_up, stack
from test_eventgraph import medium

from slidedp.compiler.costmodel.contention import Contention
from slidedp.compiler.costmodel.costs import AnalyticCostModel, WithFallback
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.eventgraph.choices import Choices, find_choices
from slidedp.compiler.eventgraph.eventbuild import build_event_graph
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.eventgraph import OFF, EventGraph, Linear
from slidedp.compiler.eventgraph.maxplus import is_period, max_cycle_ratio, start_times
from slidedp.compiler.eventgraph.memoryrows import MemoryRow, memory_rows
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Op, Stream
from slidedp.compiler.solver.counts import Counts, count_bound
from slidedp.compiler.solver.cyclebound import cycle_bound
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.compiler.solver.detours import Detours, always, tightened
from slidedp.compiler.solver.infeasible import fitting_start
from slidedp.compiler.solver.nested import Nested
from slidedp.compiler.solver.queues import Queued, Queues, widened
from slidedp.compiler.solver.relaxation import Proposal, Relaxation, tighten
from slidedp.compiler.solver.search import choose, feasible, partners_of, period_of
from slidedp.compiler.solver.solver import solve
from slidedp.compiler.solver.structured import search_structured
from slidedp.hardware import load_profile

pytestmark = pytest.mark.null


class Dice:
    """Every kind of op of every layer some factor slower or faster than the profile says, those on `slow` five times slower."""

    def __init__(self, seed: int, world_size: int, slow: Stream | None = None) -> None:
        self.seed, self.analytic, self.slow = seed, AnalyticCostModel(world_size), slow

    def duration_us(self, op: Op, hw: HardwareProfile) -> int | None:
        factor = random.Random(f"{self.seed} {op.kind} {op.layer}").choice((0.1, 0.5, 1.0, 1.0, 2.0, 6.0))
        return round(factor * (5 if op.stream is self.slow else 1) * self.analytic.exact_us(op, hw))

    def bytes(self, op: Op, hw: HardwareProfile) -> int | None:
        return None


def diced(layers: LayerGraph, hw_name: str, seed: int, policy: dict[str, Any] | None = None,
          chunk_counts: tuple[int, ...] = (1, 4), slow: Stream | None = None) -> tuple[EventGraph, Choices]:  # fmt: skip
    hw = load_profile(hw_name)
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy, chunk_counts=chunk_counts)
    costs = WithFallback(AnalyticCostModel(layers.world_size, layers.compute_dtype), Dice(seed, layers.world_size, slow))
    contention = Contention(hw, layers.world_size)
    return build_event_graph(layers, choices, OptionCosts(layers, hw, costs, contention)), choices


def any_selection(choices: Choices, rng: random.Random) -> tuple[int, ...]:
    """Options at random, with those that are linked to them."""
    selection, partners = list(choices.default), partners_of_choices(choices)
    for i, family in enumerate(choices.families):
        choose(selection, i, rng.randrange(len(family.options)), partners)
    return tuple(selection)


def partners_of_choices(choices: Choices) -> Any:
    return partners_of(EventGraph(choices, (), ()))


@pytest.mark.parametrize(("hw_name", "world_size"), [("h200x1", 1), ("a800x4-pcie", 4)])
def test_all_that_is_known_of_waiting_holds_for_every_plan(hw_name: str, world_size: int) -> None:
    """For random plans and costs, at the times of their own shortest step: every detour, learned or short, twin, and stall."""
    rng, binding, stalling, twins, missed = random.Random(1), 0, 0, 0, 0
    for seed in range(4):
        layers = stack(5, 60_000_000, 90_000_000, world_size=world_size, tokens=60_000, width=2048)
        graph, choices = diced(layers, hw_name, seed)
        relaxation = Relaxation(graph, ())
        num_short = len(relaxation.inequalities)
        assert num_short
        for _ in range(4):
            relaxation.learn(any_selection(choices, rng), 0)
            selection = any_selection(choices, rng)
            period = period_of(graph, selection)
            times = [start_times(graph, selection, period)[i] * 9 // 10 for i in relaxation.detours.chain]
            missed += relaxation.learn_timetable(Proposal(selection, tuple(times), period * 9 // 10), 0)
        twins += len(relaxation.inequalities) - num_short - len(relaxation.known)
        chain = relaxation.detours.chain
        for _ in range(12):
            selection = any_selection(choices, rng)
            period = period_of(graph, selection)
            times, busy = start_times(graph, selection, period), [graph.events[i].busy.at(selection) for i in chain]
            begins = [times[i] for i in chain]
            gaps = [after - begin - us for begin, after, us in zip(begins, [*begins[1:], begins[0] + period], busy, strict=True)]
            assert min(gaps) >= 0
            for i in relaxation.inequalities:
                have = sum(gaps[k] for k in i.links) + i.laps * period
                assert have >= i.need.at(selection), i
                binding += have == i.need.at(selection)
            for each in relaxation.stalls:
                excess = sum(max(0, *(need.at(selection) for need in stall.needs)) for stall in each)
                assert excess <= sum(gaps)
                stalling += excess > 0
    assert binding > 20
    assert stalling > 10
    assert twins > 0
    assert missed > 4


@pytest.mark.parametrize("slow", [Stream.COMM, Stream.H2D])
def test_queues_hold_for_every_plan(slow: Stream) -> None:
    """What lies in the windows of a run of tasks takes no more time than there is, for every run around the step."""
    rng, binding, num_tasks = random.Random(2), 0, 0
    layers = stack(5, 60_000_000, 90_000_000, world_size=2, tokens=60_000, width=2048)
    for seed in range(4):
        graph, choices = diced(layers, "a800x4-pcie", seed, slow=slow)
        queues = Queues(Detours(graph))
        chain, n = queues.detours.chain, len(queues.detours.chain)
        known = [queue for stream in graph.streams if stream is not Stream.GPU and (queue := queues.on(stream))]
        num_tasks = sum(map(len, known))
        for _ in range(12):
            selection = any_selection(choices, rng)
            period = period_of(graph, selection)
            times = start_times(graph, selection, period)
            begins = [times[i] + lap * period for lap in range(-3, 5) for i in chain]
            ends = [b + graph.events[i].busy.at(selection) for b, i in zip(begins, chain * 8, strict=True)]
            for queue in known:
                around = [Queued(q.event, q.behind + k, q.before + k, q.due + k) for k in (0, n) for q in queue]
                for first in range(len(queue)):
                    busy = 0
                    for q in around[first : first + len(queue)]:
                        busy += graph.events[q.event].busy.at(selection)
                        spare = begins[q.before + 3 * n] - ends[around[first].behind + 3 * n] - busy
                        assert spare >= 0
                        binding += busy > 0 == spare
                        if graph.events[q.event].busy.at(selection):  # what takes time is done when it is due
                            assert begins[q.due + 3 * n] - ends[around[first].behind + 3 * n] - busy >= 0
    assert num_tasks > 40
    assert binding > 20


@pytest.mark.parametrize(("hw_name", "world_size"), [("h200x1", 1), ("a800x4-pcie", 4)])
def test_what_is_counted_holds_for_every_plan(hw_name: str, world_size: int) -> None:
    """Random plans and costs at their own shortest step: every demand, by the counts and by the gaps of blocks, and every window
    of updates. Also where a table's rows are split, and where updates wait for the norm.
    """
    rng, binding, stalling, together, waiting = random.Random(4), 0, 0, 0, 0
    for seed in range(4):
        layers = stack(6, 60_000_000, 90_000_000, world_size=world_size, tokens=60_000, width=2048)
        layers = looking_up(layers, 2000) if seed % 2 else layers
        graph, choices = even(layers, hw_name, seed, {"update": "deferred"} if seed > 1 else None)
        hw = load_profile(hw_name)
        counts = Counts(graph, memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes))
        demands, chain = counts.demands(), counts.detours.chain
        together += max(map(len, counts.kinds)) > 1
        for _ in range(20):
            selection = any_selection(choices, rng)
            period = period_of(graph, selection)
            begins = [start_times(graph, selection, period)[i] for i in chain]
            busy = [graph.events[i].busy.at(selection) for i in chain]
            gaps = [after - begin - us for begin, after, us in zip(begins, [*begins[1:], begins[0] + period], busy, strict=True)]
            blocks = [sum(g for g, b in zip(gaps, counts.block, strict=True) if b == k) for k in range(max(counts.block) + 1)]
            assert counted_at(counts, counts.counted(counts.busy), selection) + sum(blocks) == period
            for demand in demands:
                need = counted_at(counts, demand.need, selection)
                have = demand.steps * period + sum(times * blocks[k] for k, times in demand.gaps)
                assert have >= need, demand
                binding += have == need
                stalling += need > 0 < len(demand.gaps)
            for i in Nested(counts.detours).inequalities():
                assert sum(gaps[k] for k in i.links) >= i.need.at(selection)
                waiting += i.need.at(selection) > 0
            for row in counts.rows:
                assert counted_at(counts, counts.counted(row.total), selection) == row.total.at(selection)
                assert all(counted_at(counts, counts.counted(peak), selection) <= peak.at(selection) for peak in row.peaks)
    assert binding > 20
    assert stalling > 40
    assert waiting > 100
    assert together == 4


def even(layers: LayerGraph, hw_name: str, seed: int, policy: dict[str, Any] | None = None) -> tuple[EventGraph, Choices]:
    """Costs as of `Dice`, but equal for all layers."""
    hw = load_profile(hw_name)
    choices = find_choices(layers, default_decisions(layers, hw, policy=policy), policy, chunk_counts=(1, 4))
    costs = WithFallback(AnalyticCostModel(layers.world_size, layers.compute_dtype), EqualDice(seed, layers.world_size))
    return build_event_graph(layers, choices, OptionCosts(layers, hw, costs, Contention(hw, layers.world_size))), choices


class EqualDice(Dice):
    def duration_us(self, op: Op, hw: HardwareProfile) -> int | None:
        factor = random.Random(f"{self.seed} {op.kind}").choice((0.1, 0.5, 1.0, 2.0, 6.0))
        return round(factor * self.analytic.exact_us(op, hw))


def counted_at(counts: Counts, linear: Linear, selection: tuple[int, ...]) -> int:
    """`linear` of the counts that `selection` has."""
    return linear.const + sum(values[selection[i]] for f, values in linear.terms for i in counts.first if counts.first[i] == f)


def test_windows_of_updates() -> None:
    """Of all prefixes of the updates: from the backward of the last to its next forward. Rows updated early are outside of that,
    or their windows widen those of all that come behind them.
    """
    layers = stack(5, 60_000_000, 90_000_000, tokens=60_000, width=2048)
    plain, _ = diced(layers, "h200x1", 0)
    assert windows_of(plain, False) == {
        **{f"L{i:02}": (f"bwd.L{i:02}", f"fwd.L{i:02}", 1) for i in range(5)},
        "prologue": ("bwd.prologue", "prologue", 1), "epilogue": ("epilogue", "epilogue", 1)}  # fmt: skip
    split, _ = diced(looking_up(layers, 2000), "h200x1", 2)
    assert windows_of(split, True) == windows_of(plain, False)
    assert windows_of(split, False)["L00"] == ("epilogue", "fwd.L00", 1)


def windows_of(graph: EventGraph, outside: bool) -> dict[str, tuple[str, str, int]]:
    """Group -> the GPU ops that its window is behind and before, and the steps between them; those with something `outside`."""
    chain = Detours(graph).chain
    name, n = [graph.events[i].name for i in chain], len(chain)
    return {graph.works[w.last].group: (name[w.behind % n], name[w.before % n], w.before // n - w.behind // n)
            for w in Nested(Detours(graph)).windows() if bool(w.outside) == outside}  # fmt: skip


def test_counting_proves_at_once_what_layers_of_their_own_do_not() -> None:
    """Of 80 layers few have room in HBM: whichever they are, the others keep the host as busy."""
    layers = stack(80, 856_000_000, 1_245_000_000, tokens=4096, width=8192)
    hw = replace(load_profile("h200x1"), host_bytes=2**42)
    graph, rows = analytic(layers, hw)
    found = search_structured(graph, rows)
    assert found is not None
    sums, target = cycle_bound(graph, rows, found[0]), int(found[1] / 1.005)
    bound, work, none = count_bound(graph, rows, sums, target, 5e-3, 0.5)
    assert none is None
    assert sums < bound == target + 1
    assert work < 0.5
    assert count_bound(graph, rows, sums, target, 5e-3, 0.5) == (bound, pytest.approx(work), None)
    assert Relaxation(graph, rows, ()).propose(found[0], target, sums, 5e-3, 0.5)[1] < bound


def analytic(layers: LayerGraph, hw: HardwareProfile) -> tuple[EventGraph, tuple[MemoryRow, ...]]:
    choices = find_choices(layers, default_decisions(layers, hw))
    costs = AnalyticCostModel(layers.world_size, layers.compute_dtype)
    graph = build_event_graph(layers, choices, OptionCosts(layers, hw, costs, Contention(hw, layers.world_size)))
    return graph, memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)


SMALL: list[tuple[str, int, Stream | None, dict[str, Any]]] = [
    ("h200x1", 1, None, {"chunks": 4, "source": "shadow"}),  # what is kept, held and resident
    ("a800x4-pcie", 2, Stream.COMM, {"chunks": 1, "source": "shadow", "weights": "stream", "act": "recompute", "layers": {
        "prologue": {"delivery": "replicated"}, "epilogue": {"delivery": "replicated"}}}),  # what the collectives carry
    ("a800x4-pcie", 4, None, {"chunks": 1, "state": "host", "weights": "stream", "layers": {
        "prologue": {"delivery": "sharded", "reduction": "gpu", "source": "shadow"},
        "epilogue": {"delivery": "sharded", "reduction": "gpu", "source": "shadow"}, "L01": {"source": "cast"}}}),  # routes
]  # fmt: skip


@cache
def plans(case: int) -> tuple[LayerGraph, Choices, tuple[tuple[int, ...], ...]]:
    """A model of two layers, and all plans of it."""
    hw_name, world_size, _, policy = SMALL[case]
    layers = stack(2, 60_000_000, 90_000_000, world_size=world_size, tokens=40_000, width=2048)
    _, choices = diced(layers, hw_name, 0, policy)
    every = product(*(range(len(f.options)) for f in choices.families))
    linked = (s for s in every if all((s[k.a] == k.a_option) == (s[k.b] == k.b_option) for k in choices.links))
    return layers, choices, tuple(linked)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", range(len(SMALL)))
def test_no_plan_is_shorter_than_the_bound(case: int, seed: int) -> None:
    """All plans of two layers, random costs, budgets from the least up: the gap reported is no less than the true one.

    A tenth of the usual time is enough for the bounds that all of it gives: they are within the gap.
    """
    (hw_name, _, slow, policy), (layers, choices, every) = SMALL[case], plans(case)
    graph, _ = diced(layers, hw_name, seed, policy, slow=slow)
    hw = load_profile(hw_name)
    rows = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    least = rows[0].needed(fitting_start((replace(rows[0], budget=0), rows[1]), choices) or choices.default)
    most = max(rows[0].needed(s) for s in every)
    for room in (0.0, 0.3, 1.0):
        some = (replace(rows[0], budget=round(least + room * (most - least))), rows[1])
        fitting = [s for s in every if feasible(some, s)]
        solution = solve(graph, some, gap=1e-3, time_limit=0.4)
        assert solution.selection in fitting
        assert solution.gap <= 1e-3
        assert solution.step_us == -(-max_cycle_ratio(graph, solution.selection).ratio // 1)
        start = min(fitting, key=graph.floor)
        tightened_from = tighten(graph, some, start, period_of(graph, start), 0, 0.0, 0.4)
        counted, *_ = count_bound(graph, some, 0, period_of(graph, start), 0.0, 0.4)
        bound = max(solution.bound_us, tightened_from.bound, counted)
        assert tightened_from.selection in fitting
        assert not any(graph.floor(s) < bound and is_period(graph, s, bound - 1) for s in fitting)


def test_the_bound_is_near_where_offloads_would_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reloads longer than the backwards that they hide behind: sums alone would let all layers offload, and prove nothing."""
    layers, hw = stack(8, 60_000_000, 90_000_000, tokens=40_000, width=4096), load_profile("h200x1")
    choices = find_choices(layers, default_decisions(layers, hw))
    costs = WithFallback(AnalyticCostModel(1, layers.compute_dtype))
    graph = build_event_graph(layers, choices, OptionCosts(layers, hw, costs, Contention(hw)))
    free = memory_rows(layers, choices, hw.hbm_bytes, hw.host_bytes)
    need = free[0].needed(choices.default) + 3 * layers.stage("L00").activation_bytes
    rows: tuple[MemoryRow, ...] = (replace(free[0], budget=need), free[1])
    solution = solve(graph, rows, gap=5e-3)
    assert solution.gap <= 5e-3
    assert solution.work <= 1.0
    assert sum(d.act == "recompute" for d in solution.decisions.groups.values()) > 2
    without = Relaxation(graph, rows)
    without.stalls, without.inequalities, without.queues = [], [], []
    _, sums_alone, _ = without.propose(solution.selection, solution.step_us, 0, 5e-3, 4.0)
    assert sums_alone < 0.97 * solution.step_us
    again = solve(graph, rows, gap=5e-3)
    assert replace(again, work=solution.work) == solution  # deterministic, work included but for the order of its sum
    assert again.work == pytest.approx(solution.work)
    monkeypatch.setattr("slidedp.compiler.solver.solver.StructuredSearch", None)  # a good enough hint is kept without a search
    hinted = solve(graph, rows, hint=solution.decisions, gap=5e-3)
    assert (hinted.selection, hinted.bound_us) == (solution.selection, solution.bound_us)
    assert hinted.work <= solution.work * (1 + 1e-9)


# ---- the parts ----


def test_tightened() -> None:
    """No option's part turns the right side to less than nothing; what never asks for anything is None."""
    linear = Linear(10, ((0, (5, OFF, -4)), (1, (0, -30))))
    assert tightened(linear) == Linear(15, ((0, (0, -15, -9)), (1, (0, -15))))
    assert tightened(linear, base=12) == Linear(15, ((0, (0, -3, -3)), (1, (0, -3))))
    assert tightened(Linear(-5, ((0, (5, OFF)),))) is None


def test_a_wait_counts_only_if_it_holds_whenever_the_transfer_takes_time() -> None:
    busy = Linear(0, ((3, (0, 7, 9)),))
    assert always(busy, Linear(4, ((3, (OFF, 0, 0)),)), Linear(4))
    assert not always(busy, Linear(4, ((3, (0, OFF, 0)),)), Linear(4))
    assert not always(busy, Linear(4, ((2, (OFF, 0)),)), Linear(4))


def test_windows_of_reloads() -> None:
    """Every layer's reload has one, between the backward two layers above and its own recompute."""
    graph, _ = diced(medium(5), "h200x1", 0)
    detours = Detours(graph)
    name = {event: e.name for event, e in enumerate(graph.events)}
    reloads = {name[i]: detours.window(i) for i in name if name[i].startswith("act_reload")}
    assert len(reloads) == 5
    begin, end = reloads["act_reload.L01"] or (0, 0)
    assert (name[detours.chain[begin]], name[detours.chain[end]]) == ("bwd.L03", "recompute.L01")


def test_queue_of_collectives() -> None:
    """A gather waits for its slot and is needed by its layer; a sum is done when its gradient's slot is written again."""
    graph, _ = diced(stack(5, 60_000_000, 90_000_000, world_size=2, tokens=60_000, width=2048), "a800x4-pcie", 0)
    queues = Queues(Detours(graph))
    chain, n = queues.detours.chain, len(queues.detours.chain)
    around = {graph.events[q.event].name: (graph.events[chain[q.behind % n]].name, graph.events[chain[q.before % n]].name)
              for q in queues.on(Stream.COMM)}  # fmt: skip
    assert around["reduce.L04"] == ("bwd.L04", "bwd.L02")
    assert around["all_gather.fwd.L04"][1] == "fwd.L04"
    assert around["all_gather.resident.L00"] == ("bwd.L00", "prologue")


def test_windows_are_widened_until_they_are_in_order() -> None:
    """Around a step of ten ops: a later task's early begin counts for earlier ones, an earlier one's late end for later ones."""
    queue = [Queued(0, 3, 9), Queued(1, 2, 5), Queued(2, 12, 13)]
    assert widened(queue, 10) == [Queued(0, 2, 9, 9), Queued(1, 2, 9, 5), Queued(2, 12, 13, 13)]
    assert widened([Queued(0, 0, 16), Queued(1, 1, 3)], 10) == [Queued(0, 0, 16, 16), Queued(1, 1, 16, 3)]
    assert widened([Queued(0, 5, 7), Queued(1, 4, 18)], 10) == [Queued(0, 4, 8, 7), Queued(1, 4, 18, 18)]
    assert widened([], 10) == []


def test_where_the_collectives_bind_a_queue_says_so() -> None:
    """Sums of streams alone let the collectives run under all of the step; they cannot run under the forward."""
    layers = stack(8, 60_000_000, 90_000_000, world_size=2, tokens=4_000, width=2048)
    policy = {"chunks": 1, "source": "shadow", "reduction": "gpu", "delivery": "replicated", "state": "host"}
    graph, choices = diced(layers, "a800x4-pcie", 0, policy, slow=Stream.COMM)
    period = period_of(graph, choices.default)
    bounds = [tighten_once(graph, streams, period) for streams in ((), (Stream.COMM,))]
    assert bounds[0] < bounds[1] <= period


def tighten_once(graph: EventGraph, queued: tuple[Stream, ...], period: int) -> int:
    relaxation = Relaxation(graph, (), queued)
    relaxation.inequalities, relaxation.stalls = [], []
    return relaxation.propose(graph.choices.default, period, 0, 1e-3, 2.0)[1]


# ---- better plans ----
