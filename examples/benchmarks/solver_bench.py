"""How long plans take to solve, and how near to the best they are: 36 and 80 layers, with and without the earlier plan as a hint.

    python examples/benchmarks/solver_bench.py             # all cases, some minutes
    python examples/benchmarks/solver_bench.py --layers 36
    python examples/benchmarks/solver_bench.py --layers 80 --machine h200x1 --limit 12

No GPU and no weights: stacks of layers of the sizes of Qwen3-4B and Qwen2.5-72B, every family of decisions open. Columns: the
rule's step, the solved one, the gap to the proven bound, CP-SAT's deterministic seconds, those on the clock and of this process,
the same with the solved plan as a hint, and whether all three gave the same plan. Seconds of the process are what counts on a
machine that others use.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from slidedp.compiler.costmodel.contention import Contention
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.eventgraph.choices import find_choices
from slidedp.compiler.eventgraph.eventbuild import build_event_graph
from slidedp.compiler.eventgraph.eventcosts import OptionCosts
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio
from slidedp.compiler.eventgraph.memoryrows import memory_rows
from slidedp.compiler.footprint.budgets import room_to_fill
from slidedp.compiler.layergraph import ALIGN, Group, LayerGraph, Stage, StageKind, aligned
from slidedp.compiler.simulation.predict import cost_model_of
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.compiler.solver.solver import Solution, import_cp_model, solve
from slidedp.hardware import load_profile
from slidedp.planning.autopolicy import ASKED_GAP, LIMIT

SHAPES = {36: (100_930_560, 151936 * 2560, 2560, 9728, 1024), 80: (856_000_000, 152064 * 8192, 8192, 29568, 1024)}
"""Layers -> elements of a layer and of embedding or head, hidden and intermediate width, sequence length."""

CASES = [(36, "h200x1", 8, None), (36, "h200x1", 16, None), (36, "h200x1", 32, None), (36, "h200x1", 64, None),
         (36, "h200x1", 64, 40), (36, "h200x4", 4, None), (36, "a800x4-nvlink", 16, None), (36, "a800x4-pcie", 2, None),
         (80, "h200x1", 4, None), (80, "h200x1", 16, None), (80, "h200x4", 4, None), (80, "h200x4", 16, 80),
         (80, "a800x4-nvlink", 16, None), (80, "a800x4-pcie", 2, None), (80, "rtx4090x4", 1, None)]  # fmt: skip
"""Layers, machine, sequences a rank, GiB of HBM if fewer than the machine has."""


def stack(num_layers: int, batch: int, world_size: int) -> LayerGraph:
    """A decoder of `num_layers`, each with its own embedding and head, for `batch` sequences a rank."""
    layer, vocab, hidden, intermediate, seq = SHAPES[num_layers]
    unit, tokens = ALIGN * world_size, batch * seq
    sizes = {"prologue": vocab, **{f"L{i:02}": layer for i in range(num_layers)}, "epilogue": vocab}
    groups = [Group(name, aligned(n, unit), aligned(n, unit), (name,)) for name, n in sizes.items()]
    boundary = tokens * hidden * 2
    kept = boundary * 10 + tokens * intermediate * 2 * 3
    stages = [Stage("prologue", StageKind.PROLOGUE, ("prologue",), "Embedding"),
              *(Stage(n, StageKind.LAYER, (n,), "Block", 2 * tokens * layer, boundary, kept) for n in sizes if n[0] == "L"),
              Stage("epilogue", StageKind.EPILOGUE, ("epilogue",), "Head", 2 * tokens * vocab, boundary, kept)]  # fmt: skip
    return LayerGraph(tuple(stages), tuple(groups), world_size, "bfloat16", "bfloat16", f"{num_layers} layers")


def run(num_layers: int, hw: HardwareProfile, batch: int, hbm_budget: int | None, limit: float,
        earlier: Solution | None = None) -> tuple[Solution, int, float, float]:  # fmt: skip
    """(solution, step of the rule's plan in us, seconds on the clock, seconds of this process), graph and rows included."""
    layers = stack(num_layers, batch, hw.num_gpus)
    clock, process = time.perf_counter(), time.process_time()
    choices = find_choices(layers, default_decisions(layers, hw, hbm_budget=hbm_budget))
    costs = OptionCosts(layers, hw, cost_model_of(layers), Contention(hw, layers.world_size))
    graph = build_event_graph(layers, choices, costs)
    rows = memory_rows(layers, choices, room_to_fill(hw, hbm_budget), hw.host_bytes)
    hint, proven = (earlier.decisions, earlier.proven) if earlier else (None, None)
    solution = solve(graph, rows, hint=hint, proven=proven, gap=ASKED_GAP, time_limit=limit, near=True)
    seconds = time.perf_counter() - clock, time.process_time() - process
    return solution, round(max_cycle_ratio(graph, choices.default).ratio), *seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, choices=sorted(SHAPES), help="only these")
    parser.add_argument("--machine", help="only this one")
    parser.add_argument("--limit", type=float, default=LIMIT, help="deterministic seconds of CP-SAT (default: as AutoPolicy)")
    args = parser.parse_args()
    import_cp_model()  # a second or two that solving is not to blame for
    print(f"{'layers':>6} {'machine':<14} {'batch':>5} {'HBM':>4} {'rule ms':>9} {'solved ms':>9} {'gap':>7} {'det s':>6} "
          f"{'clock s':>8} {'cpu s':>6} | {'hinted':>7} {'det s':>6} {'clock s':>8} {'cpu s':>6}  same")  # fmt: skip
    for num_layers, machine, batch, gib in CASES:
        if args.layers not in (None, num_layers) or args.machine not in (None, machine):
            continue
        hw = replace(load_profile(machine), host_bytes=2**42)  # no machine here is too small: what is timed is the solver
        budget = gib * 2**30 if gib else None
        solution, rule_us, clock, process = run(num_layers, hw, batch, budget, args.limit)
        again = run(num_layers, hw, batch, budget, args.limit)[0]
        hinted, _, hint_clock, hint_process = run(num_layers, hw, batch, budget, args.limit, solution)
        same = again.decisions == solution.decisions == hinted.decisions
        print(f"{num_layers:>6} {machine:<14} {batch:>5} {gib or '':>4} {rule_us / 1e3:>9.1f} {solution.step_us / 1e3:>9.1f} "
              f"{solution.gap:>7.2%} {solution.work:>6.2f} {clock:>8.1f} {process:>6.1f} | "
              f"{hinted.gap:>7.2%} {hinted.work:>6.2f} {hint_clock:>8.1f} {hint_process:>6.1f}  {'yes' if same else 'NO'}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
