"""Every pass on small graphs: text before, the pass, the expected text; and what holds for whole pipelines."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from slidedp.compiler.decisions import Decisions, GroupDecision, Reduction, Residence, Route, Source, StateHome, Update
from slidedp.compiler.footprint.memory import estimate_memory
from slidedp.compiler.layergraph import Group, LayerGraph, Stage, StageKind
from slidedp.compiler.ops import OpGraph, OpKind, Stream
from slidedp.compiler.reach import Reach
from slidedp.compiler.text import parse_graph, print_graph
from slidedp.passes.pipeline import PIPELINE, lower
from slidedp.passes.verify import check

pytestmark = pytest.mark.null


def tiny(num_layers: int = 3, world: int = 2, *, layer: int = 1024, frozen: int = 0) -> LayerGraph:
    """A tied embedding, `num_layers` equal layers (`frozen` elements of each), a norm in the epilogue."""
    names = [f"L{i:02}" for i in range(num_layers)]
    stages = [Stage("prologue", StageKind.PROLOGUE, ("shared0",), flops=10, boundary_bytes=0)]
    stages += [Stage(n, StageKind.LAYER, (n,), flops=100, boundary_bytes=64, activation_bytes=256) for n in names]
    stages += [Stage("epilogue", StageKind.EPILOGUE, ("epilogue", "shared0"), flops=50, boundary_bytes=64)]
    groups = [Group("shared0", 3072, 3072, ("prologue", "epilogue"))]
    groups += [Group(n, layer, layer - frozen, (n,)) for n in names]
    groups += [Group("epilogue", 64 * world, 64 * world, ("epilogue",))]
    return LayerGraph(tuple(stages), tuple(groups), world, "bfloat16", "bfloat16", "Tiny")


def uniform(layers: LayerGraph, window: int = 2, update: Update = Update.IN_BACKWARD, **decision: object) -> Decisions:
    """`update`: speculative of all groups but L00."""
    groups = {g.name: GroupDecision(**decision) for g in layers.groups}
    if update is Update.SPECULATIVE:
        groups = {name: replace(d, update=update) if name != "L00" else d for name, d in groups.items()}
        update = Update.DEFERRED
    return Decisions(groups, window=window, update=update)


CASES = {
    "one_rank_shadow": (tiny(3, 1), dict(delivery_chunks=2, return_chunks=1)),
    "sharded_cast": (tiny(2, 2), dict(delivery=Route.SHARDED, source=Source.CAST, delivery_chunks=2, return_chunks=2)),
    "replicated_host_reduce": (tiny(2, 2), dict(reduction=Reduction.CPU, delivery_chunks=1, return_chunks=2)),
    "resident": (tiny(2, 2), dict(state=StateHome.HBM, return_chunks=2)),
    "deferred": (tiny(2, 2), dict(update=Update.DEFERRED, return_chunks=2)),
    "deferred_resident": (tiny(2, 1), dict(update=Update.DEFERRED, state=StateHome.HBM)),
    "speculative": (tiny(2, 2), dict(update=Update.SPECULATIVE, return_chunks=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_golden(case, golden):
    """One file a case: the graph after each pass that changes it. Each is run on the *parsed text* of the one before it."""
    layers, decision = CASES[case]
    decisions = uniform(layers, **decision)
    graph, parts = OpGraph(), []
    for cls in PIPELINE:
        before, graph = graph, parse_graph(print_graph(cls(layers, decisions).run(graph)))
        parts += [f"---- after {cls.name}\n{print_graph(graph)}"] * (graph != before)
    assert check(graph) == ()
    golden(f"passes_{case}.txt", "\n".join(parts))


def test_evaluation_graph_is_the_forward(golden):
    layers = tiny(3, 2)
    graph = lower(layers, uniform(layers, delivery=Route.SHARDED, source=Source.CAST), training=False)
    deliveries = {OpKind.HOST_CAST, OpKind.H2D, OpKind.ALL_GATHER}
    assert {op.kind for op in graph} == deliveries | {OpKind.PROLOGUE, OpKind.FORWARD, OpKind.EPILOGUE}
    golden("passes_evaluation.txt", print_graph(graph))


ROUTES = [
    dict(delivery=d, source=s, reduction=r, delivery_chunks=c, return_chunks=k)
    for d, s, r, (c, k) in product(Route, Source, Reduction, [(1, 1), (3, 2), (7, 7)])
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 99])
def test_every_combination_is_sound(world, window):
    for route in ROUTES:
        layers = tiny(4, world, layer=64 * 12 * 7, frozen=64 * 12)
        graph = lower(layers, uniform(layers, window=window, **route))
        assert parse_graph(print_graph(graph)) == graph
        assert {op.stream for op in graph} >= {Stream.GPU, Stream.H2D, Stream.D2H, Stream.CPU}


MUTATED = [(1, 4, "in_backward"), (2, 1, "in_backward"), (2, 10, "in_backward"), (3, 13, "in_backward"), (2, 16, "in_backward"),
           (4, 22, "in_backward"), (1, 4, "deferred"), (2, 1, "deferred"), (3, 16, "deferred"), (1, 4, "speculative"),
           (2, 1, "speculative"), (2, 13, "speculative"), (3, 16, "speculative")]


@pytest.mark.parametrize(("world", "route", "update"), MUTATED)
def test_every_edge_is_needed(world, route, update):
    """The mutation contract: delete any single edge of a lowered plan and the verifier names what breaks."""
    layers = tiny(3, world, layer=64 * 12 * 7, frozen=64 * 12 * (update != "speculative"))
    graph = lower(layers, uniform(layers, update=Update(update), **ROUTES[route]))
    for edge in graph.edges:
        mutant = graph.with_(edges=tuple(e for e in graph.edges if e is not edge))
        violations = check(mutant)
        assert violations, f"{edge} is not needed"


HBM, HOLD = dict(state=StateHome.HBM), dict(weights=Residence.HOLD)
RESIDENCE = {  # by group; the rest as the route says
    "all": dict.fromkeys(("shared0", "L00", "L01", "L02", "epilogue"), HBM),
    "tied": {"shared0": HBM, "L01": HOLD},
    "first": {"L00": HBM, "L01": HBM, "L02": HOLD},
    "held": dict.fromkeys(("L00", "L01", "L02"), HOLD),
}


def residence(world, where, route, window=2, update="in_backward"):
    layers = tiny(3, world, layer=64 * 12 * 7, frozen=64 * 12)
    decisions = uniform(layers, window=window, update=Update(update), **route)
    groups = {name: replace(d, **RESIDENCE[where].get(name, {})) for name, d in decisions.groups.items()}
    return layers, replace(decisions, groups=groups)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("where", RESIDENCE)
def test_residence_with_every_route(world, where):
    """Sound, in training and evaluation; nothing of resident groups is delivered, returned or updated on the host.

    Windows and updates in turns: every route meets each on one of the numbers of ranks.
    """
    turns = [(1, "in_backward"), (2, "in_backward"), (2, "deferred")]
    for i, route in enumerate(ROUTES[::2]):
        window, update = turns[(i + world) % len(turns)]
        layers, decisions = residence(world, where, route, window, update)
        graph = lower(layers, decisions)
        assert parse_graph(print_graph(graph)) == graph
        evaluation = lower(layers, decisions, training=False)
        assert not [slot for slot in evaluation.slots if slot not in graph.slots and slot.name != "stage"]
        slots = sum(slot.count * slot.bytes for slot in graph.slots if slot.memory == "hbm")
        rows = estimate_memory(layers, decisions).hbm
        others = ("boundary activations", "running stage's activations", "update workspace")
        assert slots == sum(size for use, size in rows.items() if use not in others)
        for g in layers.groups:
            kinds = {op.kind for op in graph if op.layer == g.name}
            resident = decisions.of(g.name).state is StateHome.HBM
            assert (OpKind.CPU_UPDATE in kinds) is not resident
            updated = sum(op.bytes for op in graph if op.kind is OpKind.GPU_UPDATE and op.layer == g.name)
            assert updated == (g.num_trainable * 28 // world if resident else 0)
            assert not resident or not kinds & {OpKind.H2D, OpKind.D2H, OpKind.HOST_CAST, OpKind.HOST_REDUCE}


RESIDENT_CASES = [(1, "all", 4, "in_backward"), (1, "tied", 10, "in_backward"), (2, "all", 1, "in_backward"),
                  (2, "first", 13, "in_backward"), (3, "tied", 22, "in_backward"), (2, "held", 19, "in_backward"),
                  (1, "first", 4, "deferred"), (2, "all", 1, "deferred"), (2, "tied", 13, "deferred"),
                  (2, "tied", 13, "speculative")]


@pytest.mark.parametrize(("world", "where", "route", "update"), RESIDENT_CASES)
def test_every_edge_is_needed_with_residence(world, where, route, update):
    graph = lower(*residence(world, where, ROUTES[route], update=update))
    for edge in graph.edges:
        assert check(graph.with_(edges=tuple(e for e in graph.edges if e is not edge))), f"{edge} is not needed"


def test_a_shard_that_no_rank_sends_is_missed():
    """Without one of its all-gathers, a resident layer would be run with other ranks' weights of a step earlier."""
    graph = lower(*residence(2, "all", ROUTES[1]))
    gather = next(op for op in graph if op.name.startswith("all_gather.resident.L01"))
    ops = tuple(op for op in graph.ops if op is not gather)
    edges = tuple(e for e in graph.edges if gather.name not in (e.src, e.dst))
    messages = [v.message for v in check(graph.with_(ops=ops, edges=edges)) if v.rule == "covered"]
    assert any("fwd.L01 reads W.resident.L01@0" in message for message in messages)


@pytest.mark.parametrize("world", [1, 2])
def test_a_deferred_update_waits_for_every_gradient(world):
    """Whatever the route: no update may begin before the last gradient's norm, and all of them are in it once."""
    for route in ROUTES:
        layers = tiny(3, world, layer=64 * 12 * 7)
        graph = lower(layers, uniform(layers, update=Update.DEFERRED, **route))
        norms = [op for op in graph if op.kind is OpKind.GRAD_NORM and op.writes[0].value.startswith("norm.")]
        assert sum(op.bytes for op in norms) == sum(g.num_trainable * 2 // world for g in layers.groups)
        reach = Reach(graph)
        for update in (op for op in graph if op.kind is OpKind.CPU_UPDATE):
            assert all(reach.precedes(norm.name, update.name, 0, other) for norm in norms for other in (False, True)[:world])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_candidate_is_made_before_the_norm_is_known_and_taken_after(world):
    """Whatever the route: it is settled behind the norm, and after it is there on this rank; frozen parts are never in one."""
    for route in ROUTES:
        layers = tiny(3, world, layer=64 * 12 * 7)
        layers = replace(layers, groups=tuple(replace(g, num_trainable=g.numel - 64 * 12) if g.name == "L01" else g
                                              for g in layers.groups))
        graph = lower(layers, uniform(layers, update=Update.SPECULATIVE, **route))
        reach = Reach(graph)
        settled = {op.layer for op in graph if op.kind is OpKind.SETTLE}
        assert settled == {"shared0", "L02", "epilogue"}
        for update in (op for op in graph if op.kind is OpKind.CPU_UPDATE):
            assert reach.precedes("clip", update.name) is (update.layer not in settled)
            if update.layer in settled:
                settle = update.name.replace("cpu_update", "settle")
                assert reach.precedes("clip", settle)
                assert reach.precedes(update.name, settle)
                assert reach.precedes(settle, update.name, 1), "it writes over what the settled step has left"


def test_mutation_names_both_ops():
    layers = tiny(3, 1)
    graph = lower(layers, uniform(layers))
    edge = next(e for e in graph.edges if e.src.startswith("cpu_update.L01") and e.distance == 1)
    message = " ".join(v.message for v in check(graph.with_(edges=tuple(e for e in graph.edges if e != edge))))
    assert edge.src in message
    assert edge.dst in message


def test_bytes_are_conserved():
    """Whatever the route and the chunks, a step delivers each layer once or twice, and returns each gradient once."""
    for world, route in product((1, 2, 4), ROUTES):
        layers = tiny(4, world, layer=64 * 12 * 7)
        graph = lower(layers, uniform(layers, window=2, **route))
        sharded = route["delivery"] is Route.SHARDED
        on_host = route["reduction"] is Reduction.CPU and world > 1
        for g in layers.groups:
            delivered = sum(op.bytes for op in graph if op.kind is OpKind.H2D and op.layer == g.name)
            times = 2 if g.name in ("L00", "L01") else 1  # the last two stay in the window at the turn
            assert delivered == times * g.numel * 2 // (world if sharded else 1)
            returned = sum(op.bytes for op in graph if op.kind is OpKind.D2H and op.layer == g.name)
            assert returned == g.num_trainable * 2 // (1 if on_host else world)
            updated = sum(op.bytes for op in graph if op.kind is OpKind.CPU_UPDATE and op.layer == g.name)
            assert updated == g.num_trainable * (26 + 2 * (route["source"] is Source.SHADOW)) // world


def test_updates_have_the_next_forward_as_deadline():
    layers = tiny(4, 1)
    graph = lower(layers, uniform(layers))
    deadlines = {op.layer: op.deadline for op in graph if op.kind is OpKind.CPU_UPDATE}
    order = sorted(deadlines, key=deadlines.__getitem__)
    assert order[:3] == ["shared0", "L00", "L01"]
    assert all(graph.ops[deadlines[layer]].layer == layer for layer in deadlines)


def test_frozen_groups_are_delivered_but_never_updated():
    layers = tiny(3, 2, layer=1024)
    frozen = replace(layers, groups=tuple(replace(g, num_trainable=0) if g.name == "L01" else g for g in layers.groups))
    graph = lower(frozen, uniform(frozen))
    kinds = {op.kind for op in graph if op.layer == "L01"}
    assert kinds == {OpKind.H2D, OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD}


def test_staging_slots_are_not_refilled_too_early():
    """More chunks than staging or reduce slots: two chunks of one value meet in a slot, and must be ordered."""
    layers = tiny(2, 2, layer=64 * 2 * 9)
    nine = dict(source=Source.CAST, delivery=Route.SHARDED, delivery_chunks=9, return_chunks=9)
    decisions = replace(uniform(layers, **nine), staging_slots=2)
    graph = lower(layers, decisions)
    waits = {(e.src, e.dst) for e in graph.edges}
    assert ("h2d.fwd.L00.c0", "host_cast.fwd.L00.c2") in waits
    assert ("d2h.L01.c0", "reduce.L01.c2") in waits
