"""The verifier: sound graphs pass, every single fault is named, and an oracle with hostile timing agrees both ways."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from adversary import Adversary
from toys import DATAPATHS, HAND_WRITTEN, Toy, wired, without

from slidedp.compiler.dsl import GraphBuilder
from slidedp.compiler.ops import Edge, OpGraph, Reason
from slidedp.compiler.reach import Reach
from slidedp.compiler.text import parse_graph
from slidedp.passes.prune import prune
from slidedp.passes.verify import VerifyError, Violation, check, verify

pytestmark = pytest.mark.null


def toy(path: tuple[int, str, str, str]) -> OpGraph:
    return prune(wired(Toy(*path).build()))


def assert_real(graph: OpGraph, violations: tuple[Violation, ...], why: object) -> None:
    """Some timing on some rank makes the graph misread: delay the op that should have been waited for."""
    assert violations, f"the verifier does not object: {why}"
    for violation in violations:
        assert violation.rule == "ordered"
        for rank in range(graph.world_size):
            for seed in range(3):
                if Adversary(graph, slow=[(violation.ops[0], rank)], seed=seed).misread():
                    return
    pytest.fail(f"no timing breaks it: {why}: {violations[0]}")


# Whole graphs


@pytest.mark.parametrize("path", DATAPATHS, ids=lambda p: "-".join(map(str, p)))
def test_sound_graphs_survive_any_timing(path):
    graph = toy(path)
    verify(graph)
    for seed in range(8):
        assert Adversary(graph, seed=seed).misread() is None
    for op in random.Random(0).sample(graph.ops, 12):
        assert Adversary(graph, slow=[(op.name, graph.world_size - 1)]).misread() is None


@pytest.mark.parametrize("path", DATAPATHS, ids=lambda p: "-".join(map(str, p)))
def test_every_edge_of_a_pruned_graph_is_needed(path):
    """The mutation test: delete any one edge, or its word to the other ranks, and the verifier objects, rightly."""
    graph = toy(path)
    assert graph.edges
    for edge in graph.edges:
        mutant = without(graph, edge)
        assert_real(mutant, check(mutant), edge)
        if edge.all_ranks:
            mutant = mutant.with_(edges=(*mutant.edges, replace(edge, all_ranks=False)))
            violations = check(mutant)
            assert any("on the other ranks" in v.message for v in violations)
            assert_real(mutant, violations, edge)


@pytest.mark.parametrize("path", DATAPATHS, ids=lambda p: "-".join(map(str, p)))
def test_verdict_agrees_with_the_oracle_on_random_subsets_of_edges(path):
    """Where edges are redundant, deleting one may be harmless: then no timing may break the graph."""
    graph, rng = wired(Toy(*path).build(layers=2)), random.Random(1)
    verdicts = set()
    for _ in range(12):
        mutant = graph
        for edge in rng.sample(graph.edges, 2):
            mutant = without(mutant, edge)
        violations = check(mutant)
        verdicts.add(bool(violations))
        if violations:
            assert_real(mutant, violations, "random")
        else:
            assert all(Adversary(mutant, seed=seed).misread() is None for seed in range(3))
    assert False in verdicts


def test_hand_written_graph_and_what_each_of_its_edges_is_for():
    graph = parse_graph(HAND_WRITTEN)
    verify(graph)
    assert prune(graph) == graph
    for edge in graph.edges:
        violations = check(without(graph, edge))
        assert (edge.src, edge.dst) in {v.ops for v in violations}, edge
        assert all(edge.src in str(v) and edge.dst in str(v) for v in violations if v.ops == (edge.src, edge.dst))
        assert_real(without(graph, edge), violations, edge)


def test_reordering_legal_ops_stays_legal():
    """Neighbours on different streams that do not wait for one another may change places in the text."""
    graph = toy((2, "cast", "sharded", "gpu"))
    reach, moved = Reach(graph), 0
    for i, (a, b) in enumerate(zip(graph.ops, graph.ops[1:], strict=False)):
        if a.stream is not b.stream and not reach.precedes(a.name, b.name):
            verify(graph.with_(ops=(*graph.ops[:i], b, a, *graph.ops[i + 2 :])))
            moved += 1
    assert moved > 5


def test_reordering_within_a_stream_is_legal_only_if_no_one_relied_on_it():
    """A pruned graph lets `fwd` wait for the last chunk alone; issued first, that chunk no longer speaks for the others."""
    full = wired(Toy(1, "shadow", "replicated", "gpu").build())
    for graph, legal in ((full, True), (prune(full), False)):
        c0, c1 = graph.index["h2d.fwd.L0.c0"], graph.index["h2d.fwd.L0.c1"]
        ops = list(graph.ops)
        ops[c0], ops[c1] = ops[c1], ops[c0]
        violations = check(graph.with_(ops=tuple(ops)))
        assert (not violations) is legal
        if not legal:
            assert ("h2d.fwd.L0.c0", "fwd.L0") in {v.ops for v in violations}


def test_collectives_carry_order_between_ranks():
    """With the reduction on the GPUs, an update needs no other word from the ranks that read its weights."""
    text = """\
    world 2
    group L0 : 256 of 256 uses L0
    host_cast.fwd.L0 host_cast @cast P.L0@0 -> T.fwd.L0 after version:cpu_update.L0@-1*
    bwd.L0 backward @gpu T.fwd.L0 -> G.L0@1 after data:host_cast.fwd.L0
    reduce.L0 reduce @comm G.L0@1 -> R.L0[r] after data:bwd.L0
    d2h.L0 d2h @d2h R.L0[r] -> H.L0[r] after data:reduce.L0
    cpu_update.L0 cpu_update @cpu H.L0[r], P.L0@0[r] -> P.L0@1[r] after data:d2h.L0
    """
    verify(parse_graph(text))
    violations = check(parse_graph(text.replace("reduce.L0 reduce", "reduce.L0 grad_norm")))
    assert violations
    assert all("on the other ranks" in v.message for v in violations)
    assert ("host_cast.fwd.L0", "cpu_update.L0") in {v.ops for v in violations}


# Single faults


def base(world: int = 1) -> GraphBuilder:
    return GraphBuilder(world).group("L0", 256 * world).slot("w", 2, 512 * world).slot("stage", 1, 512 * world, "pinned")


def found(graph: OpGraph, **budgets: int) -> dict[str, str]:
    """Rule -> first message."""
    out: dict[str, str] = {}
    for v in check(graph, **budgets):
        out.setdefault(v.rule, v.message)
    return out


FORM = {
    "names": (base().op("prologue", "batch -> h.L0").op("prologue", "batch -> h.L1"), "prologue stands twice"),
    "edges": (base().op("prologue", "batch -> h.L0", after="data:fwd.L9"), "there is no op fwd.L9"),
    "edges ": (base().op("prologue", "batch -> h.L0", after="data:prologue@-2"), "distance 2"),
    "chunks": (base().op("h2d.x", "P.L1@0 -> W.fwd.L1:w[0]"), "no group L1"),
    "chunks ": (base().op("h2d.x", "P.L0@0[c4/5,*] -> W.fwd.L0:w[0]"), "group L0 does not have that many chunks"),
    "chunks  ": (base().op("fwd.x", "batch[c0/2,*] -> h.L0"), "a value without a group has no chunks"),
    "places": (base().op("h2d.x", "P.L0@0 -> W.fwd.L0:v[0]"), "no slots v are declared"),
    "places ": (base().op("h2d.x", "P.L0@0 -> W.fwd.L0:w[2]"), "w has slots 0 to 1"),
    "places  ": (base().op("h2d.x", "P.L0@0 -> W.fwd.L0:w"), "w has slots 0 to 1"),
}


@pytest.mark.parametrize("rule", FORM)
def test_broken_form_is_all_that_is_reported(rule):
    builder, message = FORM[rule]
    faults = found(builder.build())
    assert list(faults) == [rule.strip()]
    assert message in faults[rule.strip()]


@pytest.mark.parametrize(
    ("after", "ops"),
    [
        ("data:d2h.b", {"fwd.a", "d2h.b"}),
        ("data:fwd.c", {"fwd.a", "fwd.c"}),  # against the stream's own order
        ("data:fwd.a", {"fwd.a"}),
        ("data:d2h.b*", {"fwd.a", "d2h.b"}),
    ],
)
def test_ops_that_wait_for_one_another_are_named(after, ops):
    b = GraphBuilder(2).op("fwd.a", "batch -> h.a", after=after).op("d2h.b", "h.a -> h.b", after="data:fwd.a")
    graph = b.op("fwd.c", "h.b -> h.c").build()
    (violation,) = check(graph)
    assert violation.rule == "acyclic"
    assert set(violation.ops) == ops


def test_an_edge_of_the_step_before_closes_no_cycle():
    b = GraphBuilder().op("fwd.a", "batch -> h.a", after="data:d2h.b@-1").op("d2h.b", "h.a -> h.b", after="data:fwd.a")
    assert check(b.build()) == ()


@pytest.mark.parametrize(
    ("io", "message"),
    [
        ("batch -> G.L0@2", "nothing writes @1"),
        ("batch -> P.L0@2", "a step makes @1 of @0"),
        ("batch -> P.L0@0", "a step makes @1 of @0"),
    ],
)
def test_versions_count_up_by_one(io, message):
    assert message in found(base().op("bwd.L0", io).build())["versions"]


def test_two_writers_of_the_same_elements():
    b = base().op("h2d.a", "S.L0@0[c0/2,*] -> W.fwd.L0[c0/2,*]:w[0]").op("h2d.b", "S.L0@0 -> W.fwd.L0:w[0]")
    assert "h2d.a and h2d.b write the same elements of W.fwd.L0@0" in found(b.build())["one_writer"]


def test_every_rank_writing_all_of_a_shared_value():
    for scope, sound in (("r", True), ("*", False)):
        b = base(2).op("bwd.L0", "batch -> G.L0@1").op("d2h.L0", f"G.L0@1 -> H.L0[{scope}]", after="data:bwd.L0")
        assert ("one_writer" not in found(b.build())) is sound


def test_what_is_read_has_been_written():
    b = base().op("h2d.a", "S.L0@0[c0/2,*] -> W.fwd.L0[c0/2,*]:w[0]").op("fwd.L0", "batch, W.fwd.L0:w[0] -> h.L1")
    assert "nothing writes elements [128, 256) of W.fwd.L0@0" in found(b.build())["covered"]
    assert "nothing writes h.L0@0" in found(base().op("fwd.L0", "h.L0 -> h.L1").build())["covered"]


def test_a_shard_without_its_all_gather_is_not_the_layer():
    b = base(2).op("h2d.a", "S.L0@0[c0/1,r] -> W.fwd.L0[c0/1,r]:w[0]")
    b.op("fwd.L0", "batch, W.fwd.L0:w[0] -> h.L1", after="data:h2d.a")
    assert "of W.fwd.L0@0" in found(b.build())["covered"]
    b.op("all_gather.a", "W.fwd.L0[c0/1,r]:w[0] -> W.fwd.L0[c0/1,o]:w[0]")
    assert "covered" not in found(b.build())


@pytest.mark.parametrize(("trainable", "source", "sound"), [(128, "P", True), (256, "P", False), (128, "S", False)])
def test_only_frozen_parameters_may_go_without_an_update(trainable, source, sound):
    """Also: a shadow that nobody rewrites while the master moves on is stale."""
    b = GraphBuilder().group("L0", 256, trainable).op("fwd.L0", f"{source}.L0@0 -> h.L1", after="version:cpu_update.L0@-1")
    b.op("cpu_update.L0", "P.L0@0[c0/2,*] -> P.L0@1[c0/2,*]", after="reuse:fwd.L0 version:cpu_update.L0@-1")
    assert ("covered" not in found(b.build())) is sound


def test_without_updates_all_parameters_are_as_they_were():
    assert check(base().op("fwd.L0", "S.L0@0 -> h.L1").build()) == ()


def test_a_read_looks_where_the_write_went():
    b = base().op("h2d.a", "S.L0@0 -> W.fwd.L0:w[0]").op("fwd.L0", "W.fwd.L0:w[1] -> h.L1", after="data:h2d.a")
    assert "not the same place" in found(b.build())["same_place"]


def test_a_staging_slot_is_read_by_the_chunk_that_was_staged():
    b = base().op("host_cast.a", "P.L0@0[c0/2,*] -> T.fwd.L0[c0/2,*]:stage[0]")
    b.op("h2d.a", "T.fwd.L0[c0/4,*]:stage[0] -> W.fwd.L0[c0/4,*]:w[0]", after="data:host_cast.a")
    assert "not the same place" in found(b.build())["same_place"]


def test_the_only_slot_of_a_pool_goes_by_two_names():
    b = base().op("h2d.a", "S.L0@0 -> T.fwd.L0:stage[0]").op("fwd.L0", "T.fwd.L0:stage -> h.L1", after="data:h2d.a")
    assert "same_place" not in found(b.build())
    assert ("fwd.L0", "h2d.a") in {v.ops for v in check(b.build())}  # of the next step: the slot is refilled under the reader


def test_chunks_lie_side_by_side_in_a_weight_slot_but_not_in_a_staging_slot():
    b = base().op("h2d.a", "S.L0@0[c0/2,*] -> W.fwd.L0[c0/2,*]:w[0]").op("d2h.b", "S.L0@0[c1/2,*] -> W.fwd.L0[c1/2,*]:w[0]")
    assert check(b.build()) == ()
    b = base().op("h2d.a", "S.L0@0[c0/2,*] -> T.fwd.L0[c0/2,*]:stage[0]")
    b.op("d2h.b", "S.L0@0[c1/2,*] -> T.fwd.L0[c1/2,*]:stage[0]")
    assert {v.ops for v in check(b.build())} == {("h2d.a", "d2h.b"), ("d2h.b", "h2d.a")}


def test_both_tied_gradients_before_the_update():
    b = base().op("epilogue", "batch -> d.L0, G.L0@1").op("bwd.prologue", "d.L0, G.L0@1 -> G.L0@2")
    b.op("d2h.L0", "G.L0@1 -> H.L0", after="data:epilogue")
    message = found(b.build())["last_version"]
    assert "d2h.L0 takes G.L0@1 before bwd.prologue has added its part" in message


def test_own_part_of_a_shared_value_needs_only_this_rank():
    for scope, cross in (("r", False), ("*", True)):
        b = base(2).op("d2h.a", "batch -> H.L0[r]", after="reuse:host_cast.b@-1*")
        b.op("host_cast.b", f"H.L0[{scope}] -> h.x", after="data:d2h.a")
        assert any("on the other ranks" in v.message for v in check(b.build())) is cross


def test_shards_of_unlike_chunkings_belong_to_several_ranks():
    """Rank 0's half of one chunk of two is rank 0's and rank 1's quarter of the whole."""
    b = base(2).op("d2h.a0", "batch -> H.L0[c0/2,r]").op("d2h.a1", "batch -> H.L0[c1/2,r]")
    b.op("host_cast.b", "H.L0[r] -> h.x", after="data:d2h.a1")
    missing = {(v.ops, "on the other ranks" in v.message) for v in check(b.build()) if v.ops[1] == "host_cast.b"}
    assert missing == {(("d2h.a0", "host_cast.b"), True), (("d2h.a1", "host_cast.b"), True)}


@pytest.mark.parametrize(("num_bytes", "slot", "sound"), [(512, 512, True), (512, 511, False), (0, 1, True)])
def test_a_layer_fits_its_slot_judging_by_its_first_chunk(num_bytes, slot, sound):
    b = GraphBuilder().group("L0", 256).slot("w", 1, slot)
    b.op("h2d.a", "S.L0@0[c0/2,*] -> W.fwd.L0[c0/2,*]:w[0]", bytes=num_bytes // 2)
    assert ("fits" not in found(b.build())) is sound


def test_budgets_name_the_largest_slots():
    graph = base().build()
    assert check(graph, hbm_budget=1024, pinned_budget=512) == ()
    assert "hbm budget 1023 B; largest: w 2 x 512 B" in found(graph, hbm_budget=1023)["budgets"]
    assert "pinned budget 511 B; largest: stage 1 x 512 B" in found(graph, pinned_budget=511)["budgets"]


def test_the_error_lists_and_counts_violations():
    graph = wired(Toy(1, "shadow", "replicated", "gpu").build()).with_(edges=())
    with pytest.raises(VerifyError, match=r"not sound \(\d+ violations\)") as error:
        verify(graph)
    assert len(error.value.violations) > 12
    assert f"and {len(error.value.violations) - 12} more" in str(error.value)
    assert isinstance(error.value, ValueError)


def test_reasons_of_edges_are_not_trusted():
    """Same order, other words: sound. Same words, other order: not."""
    graph = parse_graph(HAND_WRITTEN)
    assert check(graph.with_(edges=tuple(replace(e, reason=Reason.STREAM, slot="") for e in graph.edges))) == ()
    wrong = Edge("h2d.fwd.L00.c0", "fwd.L01", Reason.DATA)
    assert check(graph.with_(edges=tuple(wrong if e.dst == "fwd.L01" else e for e in graph.edges)))
