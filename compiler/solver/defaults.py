"""The rule that decides what nobody pinned, until the solver does: simple, documented, the same on every rank.

- delivery: `sharded` when there are several ranks and casting and copying 1/N of a chunk and gathering the rest takes less
  time, one after the other, than casting and copying the whole; else `replicated`. A cost model that makes a link slower
  turns it around;
- reduction: `gpu`: one sum returns, so the host moves and adds least;
- source: `shadow`, a copy of the same bytes without a cast; `cast` when the host has no room for the shadow;
- chunks of about 32 MiB, where a copy runs at full rate and a task's fixed cost is a few percent, at most 8 a group;
- window: 4 weight slots, fewer when HBM has no room, never fewer than 2; 2 gradient slots;
- activations: the last layer retains its own, for only the loss lies between its forward and its backward; the others
  recompute. So does the last when HBM has no room.
- head chunks: 1, all logits at once, while these are under 256 MiB in FP32; else chunks of 2048 tokens, where the head's
  products are bound by compute, not by reading and writing the sum of the weight's gradient. If HBM has no room even with the
  smallest window, chunks of 256 tokens.
- boundaries: in HBM; where HBM has no room for them even then, as many on the host as must be, those of the first layers, which
  have most time until their backward. If the host has no room for these beside a shadow, weights are cast;
- HBM counts as full where budgets.py says so, short of the budget; so does the host for boundaries;
- rows: `split`, the untouched ones of an embedding updated early, where fewer than half are touched (rows.py);
- state: on the host; with `spare_hbm`, in HBM where that pays and fits (spare_hbm.py). Weights are streamed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from slidedp.compiler.costmodel.costs import AnalyticCostModel, CostModel, WithFallback
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Activation, Boundary, Decisions, GroupDecision, Reduction, Route, Source
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.footprint.budgets import host_room, room_to_fill
from slidedp.compiler.footprint.memory import MemoryReport, estimate_memory
from slidedp.compiler.layergraph import Group, LayerGraph, cut_chunks
from slidedp.compiler.ops import Chunk, Op, OpKind, Stream
from slidedp.compiler.policy import apply_policy
from slidedp.compiler.rows import rows_rule
from slidedp.compiler.solver.spare_hbm import spare_hbm_rule
from slidedp.compiler.units import format_bytes

CHUNK_BYTES = 32 * 2**20
MAX_CHUNKS = 8
WINDOWS = (4, 3, 2)
WHOLE_LOGITS_BYTES = 256 * 2**20
HEAD_ROWS = (2048, 256)


def default_decisions(
    graph: LayerGraph,
    hw: HardwareProfile,
    *,
    policy: Mapping[str, Any] | None = None,
    hbm_budget: int | None = None,
    host_budget: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    cost_model: CostModel | None = None,
    spare_hbm: bool = False,
) -> Decisions:
    """One decision for every group of `graph`, and the plan's slots. Budgets are bytes; None: what the machine has.

    `policy`: what the user pins (:mod:`slidedp.compiler.policy`), kept while the rule chooses the rest. `cost_model`: what
    decides the route; default the analytic one. `spare_hbm`: let the rule use HBM that is left. Raises ValueError with the
    bytes needed and the budget when the smallest window, or the state on the host, has no room.
    """
    room = room_to_fill(hw, hbm_budget)
    hbm_budget = hw.hbm_bytes if hbm_budget is None else hbm_budget
    host_budget = hw.host_bytes if host_budget is None else host_budget
    costs = WithFallback(AnalyticCostModel(graph.world_size, graph.compute_dtype), cost_model)

    def decide(source: Source, window: int, last: Activation = Activation.RETAIN, rows: int = HEAD_ROWS[0],
               num_away: int = 0) -> Decisions:
        bare = apply_policy(Decisions({g.name: GroupDecision(source=source) for g in graph.groups}), policy, graph)
        groups = {g.name: rule(graph, g, bare.of(g.name).source, hw, costs, chunk_bytes) for g in graph.groups}
        for own in {name for stage in graph.layers[:num_away] for name in stage.groups[:1]}:
            groups[own] = replace(groups[own], boundary=Boundary.HOST)
        if (name := group_of_last_layer(graph)) is not None:
            groups[name] = replace(groups[name], act=last)
        plan = Decisions(groups, window=window, head_chunks=num_head_chunks(graph, rows), slices=graph.slices)
        return apply_policy(plan, policy, graph)

    fits_host = estimate_memory(graph, decide(Source.SHADOW, WINDOWS[0])).host_bytes <= host_budget
    source = Source.SHADOW if fits_host else Source.CAST
    options = [(window, last, HEAD_ROWS[0]) for window, last in product(WINDOWS, (Activation.RETAIN, Activation.RECOMPUTE))]
    options.append((WINDOWS[-1], Activation.RECOMPUTE, HEAD_ROWS[1]))
    all_there = (decide(source, *option) for option in options)
    decisions = next((d for d in all_there if estimate_memory(graph, d).hbm_bytes <= room), None)
    if decisions is None:
        limits = (room, host_room(host_budget)), (hbm_budget, host_budget)
        some_away = ((with_fewest_away(graph, partial(decide, origin, *option), hbm), hbm, host)
                     for hbm, host in limits for origin in dict.fromkeys((source, Source.CAST)) for option in options)
        fitting = (d for d, hbm, host in some_away if fits(estimate_memory(graph, d), hbm, host))
        decisions = next(fitting, decide(source, *options[-1], len(graph.layers)))
    check_head(graph, decisions)
    if spare_hbm:
        decisions = apply_policy(spare_hbm_rule(graph, decisions, hw, costs, room), policy, graph)
    check_budgets(graph, decisions, hbm_budget, host_budget)
    return decisions


def fits(memory: MemoryReport, hbm_budget: int, host_budget: int) -> bool:
    return memory.hbm_bytes <= hbm_budget and memory.host_bytes <= host_budget


def with_fewest_away(graph: LayerGraph, decide: Callable[[int], Decisions], room: int) -> Decisions:
    """What `decide` says of the fewest boundaries on the host with which the plan needs no more HBM than `room`; of all of them
    if it needs more even then."""
    def enough(num_away: int) -> bool:
        return estimate_memory(graph, decide(num_away)).hbm_bytes <= room

    most = len(graph.layers)
    if enough(0) or not enough(most):  # apart from the others: the first that goes needs places to come back to
        return decide(0 if enough(0) else most)
    return decide(1 + bisect_left(range(1, most), True, key=enough))


def rule(
    graph: LayerGraph, group: Group, source: Source, hw: HardwareProfile, costs: CostModel, chunk_bytes: int = CHUNK_BYTES
) -> GroupDecision:
    """The decision of one group whose weights come from `source`."""
    chunks = num_chunks(group.numel * graph.compute_itemsize, chunk_bytes)
    return GroupDecision(
        delivery=Route.SHARDED if sharding_pays(graph, group, chunks, source, hw, costs) else Route.REPLICATED,
        source=source,
        reduction=Reduction.GPU,
        delivery_chunks=chunks,
        return_chunks=num_chunks(group.num_trainable * graph.grad_itemsize, chunk_bytes),
        rows=rows_rule(graph, group),
    )


def group_of_last_layer(graph: LayerGraph) -> str | None:
    """The group whose decision is the last layer's alone."""
    for name in graph.layers[-1].groups[:1]:
        if len(graph.group(name).uses) == 1:
            return name
    return None


def sharding_pays(
    graph: LayerGraph, group: Group, chunks: int, source: Source, hw: HardwareProfile, costs: CostModel
) -> bool:
    """True if a chunk of `group` arrives sooner by (casting and) copying 1/N and gathering the rest than by copying all."""
    world, item = graph.world_size, graph.compute_itemsize
    cut = cut_chunks(group.numel, chunks, world)
    if world == 1 or not cut:
        return False
    whole = cut[0][1] - cut[0][0]
    chunk, tag = Chunk(0, len(cut)), f"fwd.{group.name}.c0"

    def us(kind: OpKind, stream: Stream, num_bytes: int) -> int:
        return costs.duration_us(Op(f"{kind}.{tag}", kind, stream, group.name, chunk, bytes=num_bytes), hw)

    def to_gpu(numel: int) -> int:
        cast = us(OpKind.HOST_CAST, Stream.CAST, numel * (4 + item)) if source is Source.CAST else 0
        return cast + us(OpKind.H2D, Stream.H2D, numel * item)

    share = whole // world
    return to_gpu(share) + us(OpKind.ALL_GATHER, Stream.COMM, share * item * (world - 1)) < to_gpu(whole)


def num_chunks(num_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    return max(1, min(MAX_CHUNKS, round(num_bytes / chunk_bytes)))


def num_head_chunks(graph: LayerGraph, rows: int = HEAD_ROWS[0]) -> int:
    """In how many chunks of `rows` tokens the logits are made."""
    head = graph.head
    if head is None or head.logits_bytes < WHOLE_LOGITS_BYTES:
        return 1
    return -(-head.rows // rows)


def check_head(graph: LayerGraph, decisions: Decisions) -> None:
    """ValueError, with the reason, for head chunks of a model whose logits cannot be cut."""
    if decisions.head_chunks > 1 and graph.head and graph.head.whole:
        raise ValueError(f"head_chunks={decisions.head_chunks}: the logits of {graph.model or 'this model'} cannot be made in "
                         f"chunks, since {graph.head.whole}; use head_chunks=1")


def check_budgets(graph: LayerGraph, decisions: Decisions, hbm_budget: int, host_budget: int) -> MemoryReport:
    """What the plan needs. BudgetError with bytes needed, budget, the largest uses and the remedy when it does not fit."""
    memory = estimate_memory(graph, decisions)
    if memory.hbm_bytes > hbm_budget:
        fewer = f"fewer weight buffers (policy: window={WINDOWS[-1]}, now {decisions.window}), "
        raise BudgetError(
            f"{graph.model or 'model'}: a step needs {format_bytes(memory.hbm_bytes)} of GPU memory, "
            f"{format_bytes(memory.hbm_bytes - hbm_budget)} more than the {format_bytes(hbm_budget)} that it may use "
            f"({_largest(memory.hbm)}); what helps: fewer or shorter sequences, the batch cut into more slices (policy: "
            f"slices={2 * graph.slices}), {fewer if decisions.window > WINDOWS[-1] else ''}a larger hbm_budget"
        )
    if memory.host_bytes > host_budget:
        remedy = ("leave out the BF16 copy of the weights (policy: source=cast) " if memory.host["shadow"] else
                  "use a host with more memory ")
        raise BudgetError(
            f"{graph.model or 'model'}: the training state needs {format_bytes(memory.host_bytes)} of host memory, "
            f"{format_bytes(memory.host_bytes - host_budget)} more than the budget of {format_bytes(host_budget)} "
            f"({_largest(memory.host)}); {remedy}or raise host_budget"
        )
    return memory


def _largest(uses: dict[str, int]) -> str:
    top = sorted(uses.items(), key=lambda use: -use[1])[:3]
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in top if size)
