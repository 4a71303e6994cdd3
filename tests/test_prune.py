"""Reachability against a spelled-out unrolling over ranks and steps, and pruning: nothing lost, nothing left over."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from toys import DATAPATHS, Toy, wired, without

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import COLLECTIVES, Edge, Op, OpGraph, OpKind, Reason, Stream
from slidedp.compiler.reach import Reach
from slidedp.passes.prune import Prune, prune

pytestmark = pytest.mark.null


def random_graph(seed: int, num_ops: int = 9, num_edges: int = 12) -> OpGraph:
    """Ops on few streams, edges forward in the text within a step and anywhere between steps, some collectives."""
    rng = random.Random(seed)
    kinds = [OpKind.FORWARD, OpKind.CPU_UPDATE, OpKind.ALL_GATHER]
    ops = tuple(Op(f"op{i}", rng.choice(kinds), rng.choice([Stream.GPU, Stream.CPU, Stream.COMM]), "L0") for i in range(num_ops))
    edges = set()
    for _ in range(num_edges):
        a, b = sorted(rng.sample(range(num_ops), 2))
        distance = rng.random() < 0.3
        if distance and rng.random() < 0.7:
            a, b = b, a
        reason = rng.choice([Reason.DATA, Reason.VERSION, Reason.REUSE])
        edges.add(Edge(f"op{a}", f"op{b}", reason, int(distance), rng.random() < 0.25))
    return OpGraph(ops, tuple(edges), world_size=rng.choice([1, 2, 3]))


def unrolled(graph: OpGraph) -> nx.DiGraph:
    """Every start and end of every op on every rank in two steps. A collective has one start for all ranks."""
    out = nx.DiGraph()
    ranks = range(graph.world_size)

    def start(name: str, step: int, rank: int) -> tuple[object, ...]:
        return ("start", name, step, "all" if graph[name].kind in COLLECTIVES else rank)

    for step in range(2):
        for rank in ranks:
            for op in graph.ops:
                out.add_edge(start(op.name, step, rank), ("end", op.name, step, rank))
            for e in (*graph.edges, *graph.stream_edges()):
                for q in ranks if e.all_ranks else [rank]:
                    if step >= e.distance:
                        out.add_edge(("end", e.src, step - e.distance, q), start(e.dst, step, rank))
    return out


def answers(graph: OpGraph) -> dict[tuple[str, str, int, bool], bool]:
    """What the unrolled graph says to every question."""
    big = unrolled(graph)
    assert nx.is_directed_acyclic_graph(big)
    out = {}
    for dst in graph.ops:
        before = nx.ancestors(big, ("start", dst.name, 1, "all" if dst.kind in COLLECTIVES else 0))
        for src in graph.ops:
            for distance in range(2):
                out[src.name, dst.name, distance, False] = ("end", src.name, 1 - distance, 0) in before
                if graph.world_size > 1:
                    cross = [("end", src.name, 1 - distance, q) in before for q in range(1, graph.world_size)]
                    assert len(set(cross)) == 1, "other ranks are alike"
                    out[src.name, dst.name, distance, True] = cross[0]
    return out


@pytest.mark.parametrize("seed", range(40))
def test_reachability_equals_the_unrolled_graph(seed):
    graph = random_graph(seed)
    reach = Reach(graph)
    assert reach.cycle() is None
    for question, answer in answers(graph).items():
        assert reach.precedes(*question) is answer, question


@pytest.mark.parametrize("seed", range(12))
def test_reachability_without_an_edge_equals_the_graph_without_it(seed):
    graph = random_graph(seed, num_ops=7, num_edges=10)
    reach = Reach(graph)
    for edge in graph.edges:
        for question, answer in answers(without(graph, edge)).items():
            assert reach.precedes(*question, without=edge) is answer, (edge, question)


def test_a_cycle_is_spelled_in_order():
    ops = tuple(Op(name, OpKind.FORWARD, stream, "L0") for name, stream in zip("abcd", ["gpu", "h2d", "d2h", "gpu"], strict=True))
    edges = tuple(Edge(a, b, Reason.DATA) for a, b in ["ab", "bc", "ca", "cd"])
    cycle = Reach(OpGraph(ops, edges)).cycle()
    assert cycle is not None
    assert sorted(cycle) == ["a", "b", "c"]
    assert all(b in {e.dst for e in edges if e.src == a} for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True))


def test_large_graphs_take_little():
    """8000 ops in a chain with skips: tables of 8 MB each, no recursion."""
    ops = tuple(Op(f"op{i}", OpKind.CPU_UPDATE, Stream.CPU, "L0") for i in range(8000))
    edges = tuple(Edge(f"op{i}", f"op{j}", Reason.DATA) for i in range(8000) for j in (i + 1, i + 7) if j < 8000)
    graph = OpGraph(ops, edges, world_size=2)
    assert Reach(graph).precedes("op0", "op7999")
    assert len(prune(graph).edges) == 7999


@pytest.mark.parametrize("seed", range(40))
def test_pruning_loses_no_order_and_leaves_nothing_over(seed):
    graph = random_graph(seed, num_edges=20)
    pruned = prune(graph)
    assert answers(pruned) == answers(graph)
    for edge in pruned.edges:
        assert answers(without(pruned, edge)) != answers(pruned), edge
    assert prune(pruned) == pruned


@pytest.mark.parametrize("path", DATAPATHS, ids=lambda p: "-".join(map(str, p)))
def test_pruning_does_not_depend_on_the_order_of_edges(path):
    graph = wired(Toy(*path).build())
    shuffled = random.Random(0).sample(graph.edges, len(graph.edges))
    pruned = Prune(LayerGraph((), ()), Decisions()).run(graph)
    assert prune(graph.with_(edges=tuple(shuffled))) == pruned
    assert 3 * len(pruned.edges) < len(graph.edges)


def test_of_two_edges_between_the_same_ops_the_better_reason_stays():
    ops = tuple(Op(name, OpKind.CPU_UPDATE, Stream.CPU, "L0") for name in "ab")
    reuse, data = Edge("a", "b", Reason.REUSE, slot="w[0]", all_ranks=True), Edge("a", "b", Reason.DATA)
    later = Edge("a", "b", Reason.VERSION, 1)
    pruned = prune(OpGraph(ops, (reuse, data, later), world_size=2))
    assert set(pruned.edges) == {Edge("a", "b", Reason.DATA, all_ranks=True), later}


def test_an_edge_over_all_ranks_is_not_implied_by_one_rank():
    ops = tuple(Op(name, OpKind.CPU_UPDATE, Stream.CPU, "L0") for name in "abc")
    path = (Edge("a", "b", Reason.DATA), Edge("b", "c", Reason.DATA))
    wide = Edge("a", "c", Reason.DATA, all_ranks=True)
    assert wide in prune(OpGraph(ops, (*path, wide), world_size=2)).edges
    assert wide not in prune(OpGraph(ops, (*path, wide), world_size=1)).edges
    crossing = (path[0], Edge("b", "c", Reason.DATA, all_ranks=True))
    assert wide not in prune(OpGraph(ops, (*crossing, wide), world_size=2)).edges


def test_a_cyclic_graph_is_left_for_the_verifier():
    ops = tuple(Op(name, OpKind.CPU_UPDATE, Stream.CPU, "L0") for name in "ab")
    graph = OpGraph(ops, (Edge("a", "b", Reason.DATA), Edge("b", "a", Reason.DATA)))
    assert prune(graph) == graph
