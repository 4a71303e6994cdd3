"""AutoPolicy on paper: never slower than the rule, the same every time, cached by what it depends on, quiet about toys."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from stacks import stack
from test_solver import Slow

import slidedp
from slidedp.compiler.costmodel.costs import WithFallback
from slidedp.compiler.costmodel.measured import LONGEST_US, Measurement, PhaseCost
from slidedp.compiler.decisions import Activation, Decisions, Residence, Route
from slidedp.compiler.eventgraph.eventgraph import EventGraph
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.simulation.simulate import Timeline
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.hardware import load_profile
from slidedp.planning import autopolicy
from slidedp.planning import decide as deciding
from slidedp.planning.autopolicy import ASKED_GAP, AutoPlan, correct, is_tiny, polished
from slidedp.planning.decide import decide, problem_of
from slidedp.settings import Settings

pytestmark = pytest.mark.null


def settings(hw: str = "h200x1", world_size: int = 1, **kw: Any) -> Settings:
    return Settings(load_profile(hw), torch.bfloat16, torch.bfloat16, world_size, solver="cp-sat", **kw)


def big(world_size: int = 1, layers: int = 3) -> LayerGraph:
    return stack(layers, 300_000_000, 400_000_000, world_size=world_size, tokens=4096, width=4096)


@pytest.fixture(autouse=True)
def _a_quarter_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the very plans that all of it does: these models are small."""
    monkeypatch.setattr("slidedp.planning.autopolicy.LIMIT", 1.0)


@cache
def plan(hw: str, world_size: int) -> AutoPlan:
    return decide(big(world_size), settings(hw, world_size))


@pytest.mark.parametrize(("hw", "world_size"), [("h200x1", 1), ("a800x4-pcie", 4)])
def test_never_slower_than_the_rule(hw: str, world_size: int) -> None:
    layers, s = big(world_size), settings(hw, world_size)
    chosen, problem = plan(hw, world_size), problem_of(layers, s)
    rule_us = problem.simulate(default_decisions(layers, s.hw)).step_us
    chosen_us = problem.simulate(chosen.decisions).step_us
    record = chosen.record
    assert record is not None
    assert chosen_us <= rule_us
    assert (record.simulated_us, record.rule_us) == (chosen_us, rule_us)
    assert record.bound_us <= record.step_us
    if world_size == 1:  # without links collectives compete with copies for the host's memory, which only the simulation sees
        assert record.step_us == pytest.approx(chosen_us, rel=0.05)
        assert record.gap <= ASKED_GAP == 5e-3
    assert chosen.solve_s > 0
    memory = estimate_memory(layers, chosen.decisions)
    assert (memory.hbm_bytes, memory.host_bytes) <= (s.hw.hbm_bytes, s.hw.host_bytes)


def test_the_rule_is_kept_when_the_solver_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the solver says, the simulation decides: a plan that simulates slower than the rule's is not taken."""
    layers, s = big(), settings()
    rule = default_decisions(layers, s.hw)
    bad = default_decisions(layers, replace(s.hw, host_task_us=0.0), policy={"chunks": 64, "window": 1, "grad_slots": 1})

    def wrong(graph: EventGraph, rows: object, **kw: Any) -> Any:
        return replace(solved, decisions=bad)

    problem = problem_of(layers, s)
    choices = problem.choices(rule)
    solved = autopolicy.solve(problem.graph(choices), problem.rows(choices))
    monkeypatch.setattr(autopolicy, "solve", wrong)
    monkeypatch.setattr(autopolicy, "polished", lambda *args: (bad, problem.simulate(bad).step_us))
    kept = decide(layers, s)
    assert kept.decisions == rule
    assert kept.record is not None
    assert kept.record.name == "rule"
    assert kept.record.simulated_us == kept.record.rule_us
    assert kept.pays_after is None


def test_weights_are_held_where_host_memory_binds_and_hbm_is_free() -> None:
    """The graph sees nothing in it: the copies that it spares are hidden, but updates run slower beside them."""
    layers = stack(12, 100_930_560, 50_000_000, tokens=4096, width=2560)
    hw, pins = replace(load_profile("h200x1"), host_dram_gbps=170.0), {"state": "host", "act": "recompute", "slices": 1}
    streamed, free = (decide(layers, replace(settings(policy=p), hw=hw)) for p in (pins | {"weights": "stream"}, pins))
    held = [d.weights for name, d in free.decisions.groups.items() if name.startswith("L")]
    assert set(held) == {Residence.HOLD}
    assert streamed.record is not None
    assert free.record is not None
    gain, seen = (getattr(streamed.record, us) / getattr(free.record, us) for us in ("simulated_us", "bound_us"))
    assert gain > 1.03 > 1.001 > seen


def test_polishing_simulates_no_plan_twice_and_no_more_than_asked_for() -> None:
    layers, s = big(4, layers=6), settings("a800x4-pcie", 4)
    problem, seen = problem_of(layers, s), list[str]()

    def simulate(decisions: Decisions) -> Timeline:
        seen.append(repr(decisions))
        return problem.simulate(decisions)

    watched, scale = replace(problem, simulate=simulate), {str(Stream.H2D): 1.01}
    choices = watched.choices(default_decisions(layers, s.hw))
    best = polished(watched, choices, scale, 0)
    assert best is not None
    assert best[1] == problem.simulate(best[0]).step_us
    assert 2 < len(seen) == len(set(seen))
    seen.clear()
    start = polished(watched, choices, scale, math.inf)  # any start is enough
    assert start is not None
    assert start[1] >= best[1]
    assert 1 <= len(seen) <= 2


def test_twice_the_same() -> None:
    again = decide(big(), settings())
    assert (again.decisions, again.record) == (plan("h200x1", 1).decisions, plan("h200x1", 1).record)


def test_tiny_steps_are_left_to_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "auto_plan", None)
    toy = stack(3)
    assert is_tiny(problem_of(toy, settings()), default_decisions(toy, load_profile("h200x1")))
    assert decide(toy, settings()) == AutoPlan(default_decisions(toy, load_profile("h200x1")))


def test_rule_when_asked() -> None:
    layers = big()
    assert decide(layers, replace(settings(), solver="rule")) == AutoPlan(default_decisions(layers, load_profile("h200x1")))


def test_without_ortools_the_rule_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "find_spec", lambda name: None)
    layers = big()
    with pytest.warns(UserWarning, match="ortools is not installed"):
        assert decide(layers, settings()).decisions == default_decisions(layers, load_profile("h200x1"))


def test_pins_are_kept() -> None:
    policy = {"source": "cast", "window": 2, "layers": {"L01": {"return_chunks": 3}}}
    chosen = decide(big(), settings(policy=policy)).decisions
    assert {str(d.source) for d in chosen.groups.values()} == {"cast"}
    assert chosen.of("L01").return_chunks == 3
    assert chosen.window == 2


def test_where_the_rule_has_no_room_something_else_has() -> None:
    """The rule takes 2 gradient slots and never asks whether 1 would fit: what needs least does, and what fits is chosen."""
    layers, s = big(), settings()
    small = replace(default_decisions(layers, s.hw), window=2, grad_slots=1)
    budget = estimate_memory(layers, small).hbm_bytes
    with pytest.raises(ValueError, match=r"a step needs .* of GPU memory"):
        default_decisions(layers, s.hw, hbm_budget=budget)
    chosen = decide(layers, replace(s, hbm_budget=budget)).decisions
    assert estimate_memory(layers, chosen).hbm_bytes <= budget
    with pytest.raises(ValueError, match=r"no plan fits.* more than the budget.*Cheapest way out.*hbm_budget"):
        decide(layers, replace(s, hbm_budget=budget // 2))


def test_a_pin_in_the_way_is_named() -> None:
    layers, s = big(), settings()
    need = estimate_memory(layers, default_decisions(layers, s.hw)).host_bytes
    with pytest.raises(ValueError, match="drop what the policy pins"):
        decide(layers, replace(s, host_budget=need - 2**20, policy={"source": "shadow", "state": "host"}))


# ---- the cache ----


def test_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By everything that matters: the same problem is not solved twice, another one is; a damaged file is solved anew."""
    layers, s = big(layers=2), replace(settings(), cache_dir=tmp_path / "new" / "cache")
    first = decide(layers, s)
    again = decide(layers, s)
    assert again.cached
    assert not first.cached
    assert (again.decisions, again.record) == (first.decisions, first.record)
    solved = []
    monkeypatch.setattr(deciding, "auto_plan", lambda problem, rule, **_: solved.append(rule) or AutoPlan(rule))
    decide(layers, s)
    assert not solved
    others = [replace(s, hbm_budget=2**40), replace(s, policy={"window": 3}), replace(s, hw=replace(s.hw, host_task_us=251.0)),
              replace(s, cost_model=Slow(OpKind.H2D, 1.5, 1))]  # fmt: skip
    for other in others:
        decide(layers, other)
    decide(big(layers=3), s)
    assert len(solved) == len(others) + 1
    (file,) = (tmp_path / "new" / "cache").glob("*.yaml")
    file.write_text(file.read_text().replace("delivery_chunks", "chunks_of_delivery"))
    decide(layers, s)
    assert len(solved) == len(others) + 2


def test_plans_are_cached_by_how_long_the_host_takes_to_issue_compute(tmp_path: Path) -> None:
    """Which only the simulation knows: durations and memory are the same."""
    layers, s = big(layers=2), replace(settings(), cache_dir=tmp_path)
    slow, quick = (PhaseCost(layers.layers[0].kind_key, OpKind.BACKWARD, Activation.RECOMPUTE, 100_000, issue_us=us)
                   for us in (200_000, 1000))  # fmt: skip
    assert [decide(layers, s, Measurement((row,))).cached for row in (slow, quick, slow, quick)] == [False, False, True, True]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chosen = decide(big(layers=2), replace(settings(), cache_dir=tmp_path / "file"))
    assert chosen.record is not None


# ---- the loop ----


def test_correction_scales_the_streams_that_took_longer() -> None:
    layers, s = big(), settings(policy={"state": "host"})
    problem = problem_of(layers, s)
    rule = default_decisions(layers, s.hw, policy={"state": "host"})
    choices = problem.choices(rule)
    solution = autopolicy.solve(problem.graph(choices), problem.rows(choices))
    busy = problem.graph(choices).busy_us(solution.selection)
    scale: dict[str, float] = {}
    same = Timeline(0, (), busy, ())
    assert not correct(scale, problem, choices, solution, same)
    slower = Timeline(10**9, (), busy | {Stream.CPU: 2 * busy[Stream.CPU]}, ())
    assert correct(scale, problem, choices, solution, slower)
    assert scale == {Stream.CPU: 2.0}
    scaled = problem.graph(choices, scale).busy_us(solution.selection)
    assert scaled[Stream.CPU] == pytest.approx(2 * busy[Stream.CPU], rel=1e-3)
    assert not correct(scale, problem, choices, solution, replace(slower, busy_us=scaled))


@pytest.mark.parametrize("late_us", [1, 10**9, LONGEST_US])
def test_compute_that_is_nothing_but_late_is_corrected_for(late_us: int) -> None:
    """Stages that take next to no time on the device, however long it takes to issue them."""
    layers, s = big(), settings(policy={"state": "host"})
    problem = problem_of(layers, s)
    choices = problem.choices(default_decisions(layers, s.hw, policy={"state": "host"}))
    solution = autopolicy.solve(problem.graph(choices), problem.rows(choices))
    scale: dict[str, float] = {}
    line = Timeline(2 * late_us, (), {Stream.GPU: late_us}, (), late_us=late_us)
    assert correct(scale, problem, choices, solution, line) is (late_us > 1)
    assert late_us == 1 or scale[Stream.GPU] > 1


def test_correction_goes_no_further_than_the_simulated_step() -> None:
    """An update that takes twice as long, in a step that takes a tenth longer: most of it must have been under other work."""
    layers, s = big(), settings(policy={"state": "host"})
    problem = problem_of(layers, s)
    choices = problem.choices(default_decisions(layers, s.hw, policy={"state": "host"}))
    solution = autopolicy.solve(problem.graph(choices), problem.rows(choices))
    busy = problem.graph(choices).busy_us(solution.selection)
    step_us = round(1.1 * solution.step_us)
    scale: dict[Stream, float] = {}
    assert correct(scale, problem, choices, solution, Timeline(step_us, (), busy | {Stream.CPU: 2 * busy[Stream.CPU]}, ()))
    assert 1 < scale[Stream.CPU] < 2
    assert max_cycle_ratio(problem.graph(choices, scale), solution.selection).ratio == pytest.approx(step_us, rel=0.02)


def test_compute_is_as_long_as_the_host_is_late_and_no_longer_where_it_is_not() -> None:
    layers, s = big(), settings(policy={"state": "host"})
    problem = problem_of(layers, s)
    choices = problem.choices(default_decisions(layers, s.hw, policy={"state": "host"}))
    solution = autopolicy.solve(problem.graph(choices), problem.rows(choices))
    busy = problem.graph(choices).busy_us(solution.selection)
    late = Timeline(10**9, (), busy | {Stream.GPU: 2 * busy[Stream.GPU]}, (), late_us=busy[Stream.GPU])
    scale: dict[str, float] = {}
    assert correct(scale, problem, choices, solution, late)
    assert scale == {Stream.GPU: 2.0}
    assert not correct(scale, problem, choices, solution, late)
    assert correct(scale, problem, choices, solution, Timeline(10**9, (), busy, ()))
    assert scale == {Stream.GPU: 1.0}


def test_contention_in_the_simulation_is_corrected_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that finds the update to take half as long again: the loop closes on it."""
    layers, s = big(), settings(policy={"state": "host"})
    usual = decide(layers, s).record
    plain = deciding.simulate_decisions

    def contended(layers: LayerGraph, s: Settings, costs: WithFallback, decisions: Any) -> Timeline:
        return plain(layers, s, replace(costs, user=Slow(OpKind.CPU_UPDATE, 1.5, 1)), decisions)

    monkeypatch.setattr(deciding, "simulate_decisions", contended)
    chosen = decide(layers, s)
    assert chosen.record is not None
    assert chosen.record.rounds > 1
    assert chosen.record.simulated_us <= chosen.record.rule_us
    assert usual is not None
    assert chosen.record.simulated_us > 1.3 * usual.simulated_us


# ---- from outside ----


def test_a_custom_cost_model_flips_the_route(tmp_path: Path) -> None:
    """Links between GPUs 400 times slower: the solver sends whole copies, and the diff says so."""
    layers, hw = big(4, 2), settings("h200x4", 4)
    usual = decide(layers, hw).decisions
    slow = decide(layers, replace(hw, cost_model=Slow(OpKind.ALL_GATHER, 400, 4))).decisions
    assert usual.of("L01").delivery is Route.SHARDED
    assert slow.of("L01").delivery is Route.REPLICATED


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="solver='simplex': use 'cp-sat' or 'rule'"):
        slidedp.plan_on_paper("qwen3-0.6b", "h200x1", batch=1, seq=8, solver="simplex")
    with pytest.raises(ValueError, match="cannot be read"):
        slidedp.plan_on_paper("qwen3-0.6b", "h200x1", batch=1, seq=8, hint="/nonexistent.yaml")


def test_plan_files_record_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line, with a toy that is made to look worth it: the proof, the overhead, the hint and the cache."""
    import slidedp.planning.autopolicy as autopolicy
    from slidedp.commands.cli import main

    monkeypatch.setattr(autopolicy, "TINY_STEP_US", 0)
    monkeypatch.setattr(autopolicy, "LIMIT", 0.2)  # nothing here asks for a good plan
    config = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 128, "architectures": ["Qwen3ForCausalLM"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["plan", "--model", str(tmp_path / "config.json"), "--hw", "h200x1", "--batch", "2", "--seq", "8",
            "--cache-dir", str(tmp_path / "c")]  # fmt: skip
    assert main([*args, "-o", str(tmp_path / "a.yaml")]) == 0
    said = capsys.readouterr().out
    assert "of the bound" in said
    assert "solved in" in said
    solved = PlanFile.load(tmp_path / "a.yaml")
    assert solved.solver is not None
    assert PlanFile.parse(solved.to_yaml()) == solved
    assert main([*args, "-o", str(tmp_path / "b.yaml"), "--hint", str(tmp_path / "a.yaml")]) == 0
    assert PlanFile.load(tmp_path / "b.yaml").decisions == solved.decisions
    assert main([*args, "-o", str(tmp_path / "c.yaml")]) == 0
    assert "taken from the cache" in capsys.readouterr().out
    assert (tmp_path / "c.yaml").read_bytes() == (tmp_path / "a.yaml").read_bytes()
