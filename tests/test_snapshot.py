"""The pass that reads the state for a checkpoint before a step overwrites it: sound, and no edge of it to spare."""

from __future__ import annotations

import pytest
from test_passes import CASES, uniform

from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.text import parse_graph, print_graph
from slidedp.passes.pipeline import lower
from slidedp.passes.snapshot import Snapshot, overwrites
from slidedp.passes.verify import check

pytestmark = pytest.mark.null


def lowered(case):
    layers, decision = CASES[case]
    decisions = uniform(layers, **decision)
    before = lower(layers, decisions)
    return before, Snapshot(layers, decisions).run(before)


@pytest.mark.parametrize("case", CASES)
def test_every_part_that_is_overwritten_is_read_first(case):
    before, graph = lowered(case)
    assert check(graph) == ()
    assert parse_graph(print_graph(graph)) == graph
    snapshots = [op for op in graph if op.kind is OpKind.SNAPSHOT]
    assert {op.stream for op in snapshots} == {Stream.CPU}
    assert [(op.layer, op.chunk) for op in snapshots] == [(ref.group, ref.chunk) for ref in overwrites(graph)]
    assert len(snapshots) == sum(op.kind in (OpKind.CPU_UPDATE, OpKind.GPU_UPDATE) for op in before) > 0
    assert tuple(op for op in graph if op not in snapshots) == before.ops
    assert set(before.edges) < set(graph.edges)


@pytest.mark.parametrize("case", CASES)
def test_without_any_one_of_its_edges_the_graph_is_not_sound(case):
    before, graph = lowered(case)
    added = set(graph.edges) - set(before.edges)
    assert len(added) == 2 * sum(op.kind is OpKind.SNAPSHOT for op in graph)
    for edge in added:
        found = check(graph.with_(edges=tuple(e for e in graph.edges if e != edge)))
        assert any(set(v.ops) == {edge.src, edge.dst} for v in found), edge
