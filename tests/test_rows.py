"""Rows of an embedding that no batch looks up are updated early: which can be, sound graphs, and less on the step boundary."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from stacks import looking_up, qwen3_4b
from test_eventgraph import tied, timeline
from test_passes import ROUTES, tiny, uniform
from tiny_models import family, lm_batch
from torch import nn

from slidedp.compiler.decisions import Rows, Update
from slidedp.compiler.layergraph import LayerGraph, Lookup
from slidedp.compiler.ops import OpKind, RowSet
from slidedp.compiler.planfile.planyaml import read_layers, write_decisions, write_layers
from slidedp.compiler.rows import find_splits
from slidedp.compiler.solver.defaults import default_decisions
from slidedp.compiler.text import parse_graph, print_graph
from slidedp.compiler.tracing.tracer import trace
from slidedp.hardware import load_profile
from slidedp.passes.pipeline import lower
from slidedp.passes.snapshot import Snapshot
from slidedp.passes.verify import check

pytestmark = pytest.mark.null


# ---- graphs


def table(world: int, is_tied: bool) -> LayerGraph:
    """The tiny stack with a table of 100 rows, of which the batches of all ranks look at most 10 * world up."""
    layers = tiny(3, world, layer=64 * 12 * 7, frozen=64 * 12)
    stages, groups = list(layers.stages), list(layers.groups)
    stages[0] = replace(stages[0], lookups=(Lookup("shared0", ("input_ids",), 100, 10),))
    if not is_tied:
        groups[0] = replace(groups[0], uses=("prologue",))
        stages[-1] = replace(stages[-1], groups=("epilogue",))
    return replace(layers, stages=tuple(stages), groups=tuple(groups))


KINDS = list(product((1, 2, 3), (True, False)))


@pytest.mark.parametrize(("world", "is_tied"), KINDS)
def test_every_route_is_sound(world, is_tied):
    for route in ROUTES[world + is_tied :: 5]:
        layers = table(world, is_tied)
        graph = lower(layers, uniform(layers, rows=Rows.SPLIT, **route))
        assert parse_graph(print_graph(graph)) == graph
        updates = [op for op in graph if op.kind is OpKind.CPU_UPDATE and op.layer == "shared0"]
        assert {op.writes[0].rows for op in updates} == {RowSet.TOUCHED, RowSet.UNTOUCHED}
        whole = [op for op in lower(layers, uniform(layers, **route)) if op.kind is OpKind.CPU_UPDATE and op.layer == "shared0"]
        late = sum(op.bytes for op in updates if op.writes[0].rows is RowSet.TOUCHED)
        assert late == pytest.approx(sum(op.bytes for op in whole) * 0.1 * world, abs=len(whole))


@pytest.mark.parametrize(("world", "is_tied", "route"), [(1, True, 4), (1, False, 1), (2, True, 10), (2, False, 16)])
def test_every_edge_is_needed(world, is_tied, route):
    layers = table(world, is_tied)
    graph = lower(layers, uniform(layers, rows=Rows.SPLIT, **ROUTES[route]))
    for edge in graph.edges:
        assert check(graph.with_(edges=tuple(e for e in graph.edges if e is not edge))), f"{edge} is not needed"


@pytest.mark.parametrize(("world", "is_tied"), KINDS)
def test_a_snapshot_is_read_before_either_half(world, is_tied):
    """One read of a part, whichever of its two updates comes first."""
    layers = table(world, is_tied)
    decisions = uniform(layers, rows=Rows.SPLIT, return_chunks=2)
    graph = Snapshot(layers, decisions).run(lower(layers, decisions))
    assert check(graph) == ()
    assert [op.name for op in graph if op.kind is OpKind.SNAPSHOT and op.layer == "shared0"] == [
        "snapshot.shared0.c0", "snapshot.shared0.c1"]  # fmt: skip


def test_touched_rows_must_not_be_updated_from_the_first_gradient():
    """The verifier lets only the untouched rows go without the prologue's contribution."""
    layers = table(1, True)
    text = print_graph(lower(layers, uniform(layers, rows=Rows.SPLIT)))
    edits = [(",untouched]", ",touched]", "last_version"),
             ("H.shared0[c0/1t,r,untouched], P", "H.shared0[c0/1t,r], P", "last_version"),
             ("S.shared0@1[c0/1t,r,touched]", "S.shared0@1[c0/1t,r,untouched]", "covered")]
    for before, after, rule in edits:
        assert before in text
        assert rule in {v.rule for v in check(parse_graph(text.replace(before, after)))}


def test_whole_where_it_cannot_be_split():
    layers = table(1, True)
    split = uniform(layers, rows=Rows.SPLIT)
    assert find_splits(layers, split)
    assert not find_splits(layers, replace(split, update=Update.DEFERRED))
    assert not find_splits(layers, uniform(layers, rows=Rows.SPLIT, state="hbm"))
    frozen = replace(layers, groups=(replace(layers.groups[0], num_trainable=0), *layers.groups[1:]))
    assert not find_splits(frozen, split)
    in_a_layer = replace(layers, groups=(replace(layers.groups[0], uses=("prologue", "L01", "epilogue")), *layers.groups[1:]))
    assert not find_splits(in_a_layer, split)
    assert not find_splits(layers, uniform(layers))


@pytest.mark.parametrize("is_tied", [True, False])
def test_prediction_shrinks_by_the_untouched_part(is_tied):
    """At batch 64 the GPU binds: nearly all of the table's update was exposed at the step boundary."""
    layers, hw = looking_up((tied if is_tied else lambda x: x)(qwen3_4b(64)), 64 * 1024 // 4), load_profile("h200x1")
    policy = {"state": "host", "act": "recompute"}
    decisions = {rows: default_decisions(layers, hw, policy=policy | {"rows": rows}) for rows in Rows}
    assert default_decisions(layers, hw, policy=policy) == replace(decisions[Rows.SPLIT], groups={
        n: replace(d, rows=Rows.SPLIT if n == layers.groups[0].name else Rows.WHOLE)
        for n, d in decisions[Rows.SPLIT].groups.items()})  # fmt: skip
    split, whole = (timeline(layers, hw, decisions[rows]).step_us for rows in (Rows.SPLIT, Rows.WHOLE))
    update_us = layers.groups[0].numel / hw.cpu_adam_gparams / 1e3
    assert whole - split == pytest.approx(update_us * (1 - 16384 / 151936), rel=0.1)


def test_rule_and_plan_file():
    layers, hw = looking_up(qwen3_4b(8), 8192), load_profile("h200x1")
    decisions = default_decisions(layers, hw)
    written = write_decisions(decisions)["decisions"]
    assert written["prologue"]["rows"] == "split"
    assert "rows" not in written["L00-L34"]
    many = default_decisions(looking_up(qwen3_4b(8), 76000), hw)
    assert many.of("prologue").rows is Rows.WHOLE
    stages, _ = read_layers(write_layers(layers), 1, "here")
    assert stages == layers.stages
    with pytest.raises(ValueError, match=r"rows: 'half' is unknown; allowed: whole, split"):
        default_decisions(layers, hw, policy={"rows": "half"})


# ---- what is a lookup


class Odd(nn.Module):
    """Blocks over an embedding that `embed` computes from its table."""

    def __init__(self, embed):
        super().__init__()
        self.tok, self.embed = nn.Embedding(50, 16), embed
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids):
        h = self.embed(self, input_ids)
        for block in self.blocks:
            h = block(h)
        return h


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3


class Normed(nn.Embedding):
    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight / self.weight.norm())


def with_table(kind):
    model = Odd(lambda m, ids: m.tok(ids))
    model.tok = kind(50, 16)
    return model


LOOKUPS = {
    "plain": (Odd(lambda m, ids: m.tok(ids)), True),
    "function": (Odd(lambda m, ids: nn.functional.embedding(ids.view(-1, 5), m.tok.weight, padding_idx=0).view(2, 5, 16)), True),
    "twice": (Odd(lambda m, ids: m.tok(ids) + m.tok(ids.flatten()).view(2, 5, 16)), True),
    "scaled": (with_table(Scaled), True),
    "computed ids": (Odd(lambda m, ids: m.tok(ids + 1)), False),
    "also added": (Odd(lambda m, ids: m.tok(ids) + m.tok.weight.mean()), False),
    "normed": (with_table(Normed), False),
    "detached": (Odd(lambda m, ids: m.tok(ids).detach()), False),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_what_is_a_lookup(name):
    model, found = LOOKUPS[name]
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    traced = trace(model, batch, loss_fn=lambda out, batch: (out.square().sum(), torch.tensor(2)))
    lookups = traced.graph.stages[0].lookups
    assert lookups == ((Lookup("prologue", ("input_ids",), 50, 10),) if found else ())


@pytest.mark.parametrize(("name", "found"), [("qwen3", "shared0"), ("llama", "prologue"), ("gemma3", "shared0")])
def test_families_have_one(name, found):
    lookups = trace(family(name), lm_batch("padded")).graph.stages[0].lookups
    assert [x.group for x in lookups] == [found]
