"""The text form: prints stably, parses back to the same graph, and says where and why it does not parse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from toys import DATAPATHS, HAND_WRITTEN, Toy, wired

from slidedp.compiler.dsl import GraphBuilder
from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Chunk, Edge, Op, OpGraph, OpKind, Reason, Ref, Scope, Slot, Stream
from slidedp.compiler.text import TextError, format_bytes, parse_edge, parse_graph, parse_ref, print_edge, print_graph, print_ref
from slidedp.passes.prune import prune

pytestmark = pytest.mark.null

SMALL = """\
world 2
group L03 : 256 of 384 uses L03
group tied : 0 of 128 uses prologue epilogue
slot hbm.w[3] : 2048  # 2.0 KiB
slot hbm.held.tied[1] : 256  # 256 B

  h2d.fwd.L03.c0        h2d @h2d              S.L03@0[c0/2,r] -> W.fwd.L03[c0/2,r]:w[0]     bytes=1536  after reuse(w[0]):fwd.L03@-1 version:cpu_update.L03.c0@-1*  # 1.5 KiB
  fwd.L03               forward @gpu          h.L03, W.fwd.L03:w[0] -> h.L04                flops=1000000  after data:h2d.fwd.L03.c0
  host_reduce.L03       host_reduce @host     peers(Q.L03[c1/2t,r]) -> H.L03[c1/2t,r]
  cpu_update.L03.c0     cpu_update @cpu       H.L03[c0/2t,r] -> P.L03@1[c0/2t,r]            deadline=7
  barrier               barrier @comm         () -> ()                                      layer=all
"""  # noqa: E501


def small() -> OpGraph:
    b = GraphBuilder(2).group("L03", 384, 256).group("tied", 128, 0, uses=("prologue", "epilogue"))
    b.slot("w", 3, 2048).slot("held.tied", 1, 256)
    after = "version:cpu_update.L03.c0@-1* reuse(w[0]):fwd.L03@-1"
    b.op("h2d.fwd.L03.c0", "S.L03@0[c0/2,r] -> W.fwd.L03[c0/2,r]:w[0]", after=after, bytes=1536)
    b.op("fwd.L03", "h.L03, W.fwd.L03:w[0] -> h.L04", after="data:h2d.fwd.L03.c0", flops=10**6)
    b.op("host_reduce.L03", "peers(Q.L03[c1/2t,r]) -> H.L03[c1/2t,r]")
    b.op("cpu_update.L03.c0", "H.L03[c0/2t,r] -> P.L03@1[c0/2t,r]", deadline=7)
    return b.op("barrier", "() -> ()", layer="all").build()


def test_prints_what_it_says_it_prints():
    assert print_graph(small()) == SMALL
    assert parse_graph(SMALL) == small()


def test_columns_are_aligned():
    lines = print_graph(small()).splitlines()[6:]
    assert len({line.index(f" {op.kind} @") for line, op in zip(lines, small().ops, strict=True)}) == 1
    assert all(line == line.rstrip() for line in lines)


def test_a_builder_infers_kind_stream_layer_and_chunk():
    op = small()["h2d.fwd.L03.c0"]
    assert (op.kind, op.stream, op.layer, op.chunk) == (OpKind.H2D, Stream.H2D, "L03", Chunk(0, 2))
    own = GraphBuilder().op("odd", "() -> ()", kind=OpKind.SNAPSHOT, stream=Stream.HOST, layer="x", chunk=Chunk(1, 2)).build()
    assert own.ops == (Op("odd", OpKind.SNAPSHOT, Stream.HOST, "x", Chunk(1, 2)),)
    with pytest.raises(TextError, match="op odd: nothing known about 'odd'"):
        GraphBuilder().op("odd", "() -> ()")


@pytest.mark.parametrize("path", DATAPATHS, ids=lambda p: "-".join(map(str, p)))
def test_graphs_come_back(path):
    graph = prune(wired(Toy(*path).build()))
    text = print_graph(graph)
    assert parse_graph(text) == graph
    assert print_graph(parse_graph(text)) == text


def test_everything_an_op_may_hold_comes_back():
    rng = random.Random(0)

    def chunk() -> Chunk | None:
        return rng.choice([None, Chunk(rng.randrange(3), 3, rng.random() < 0.5)])

    def refs() -> tuple[Ref, ...]:
        values, places = ["P.L0", "Q.model.layers-0", "h.L_0", "const"], ["", "w[12]", "held.tied"]
        return tuple(
            Ref(rng.choice(values), rng.randrange(3), chunk(), rng.choice(list(Scope)), rng.choice(places), rng.random() < 0.2)
            for _ in range(rng.randrange(4))
        )

    def number() -> int:
        return rng.choice([0, rng.randrange(10**13)])

    names = [f"op.{i}.c{i % 3}" for i in range(200)]
    ops = [
        Op(name, rng.choice(list(OpKind)), rng.choice(list(Stream)), rng.choice(["", "3", "L0"]), chunk(), refs(), refs(),
           number(), number(), number())
        for name in names
    ]
    edges = [
        Edge(rng.choice(names), rng.choice(names), rng.choice(list(Reason)), rng.randrange(2), rng.random() < 0.5,
             rng.choice(["", "w[3]", "H.L0"]))
        for _ in range(500)
    ]
    slots = (Slot("w", 3, 10**12), Slot("held.x", 1, 1, "pinned"))
    graph = OpGraph(tuple(ops), tuple(edges), slots, (Group("L0", 128, 0, ()), Group("m.0", 64, 64, ("a", "b"))), 8, {"x": "y"})
    assert parse_graph(print_graph(graph)) == graph
    for ref in {ref for op in ops for ref in (*op.reads, *op.writes)}:
        assert parse_ref(print_ref(ref)) == ref
    for edge in edges:
        assert parse_edge(print_edge(edge), edge.dst) == edge


def test_text_depends_on_the_graph_alone():
    graph = wired(Toy(2, "cast", "sharded", "gpu").build())
    other = graph.with_(edges=tuple(reversed(graph.edges)), meta={"from": "elsewhere"})
    assert other == graph
    assert print_graph(other) == print_graph(graph)


def test_comments_blanks_and_spacing_do_not_matter():
    text = "# a graph\n\n" + HAND_WRITTEN.replace("  after", "\tafter") + "\n   # the end\n"
    assert parse_graph(text) == parse_graph(HAND_WRITTEN)


def test_an_empty_graph():
    assert print_graph(OpGraph()) == "world 1\n"
    assert parse_graph("") == OpGraph()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("world zero", "expected world NUMBER-OF-RANKS"),
        ("group L0 : 3", "expected group NAME"),
        ("slot hbm.w : 3", "expected slot MEMORY.NAME"),
        ("fwd.L0 forward", "expected NAME KIND @STREAM"),
        ("fwd.L0 forwards @gpu h.L0 -> h.L1", "expected an op kind .*found 'forwards'"),
        ("fwd.L0 forward @gpus h.L0 -> h.L1", "expected a stream .*found 'gpus'"),
        ("fwd:L0 forward @gpu h.L0 -> h.L1", "expected an op name, found 'fwd:L0'"),
        ("fwd.L0 forward @gpu h.L0", "expected READS -> WRITES"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 -> h.L2", "expected READS -> WRITES"),
        ("fwd.L0 forward @gpu h.L0, -> h.L1", "expected a value .*found ''"),
        ("fwd.L0 forward @gpu h.L0[c1,r] -> h.L1", r"expected a value .*found 'h.L0\[c1,r\]'"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 bytes=many", "expected layer=.*found 'bytes=many'"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 colour=red", "expected layer=.*found 'colour=red'"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 chunk=3", "expected a chunk such as c0/4 or c0/4t, found '3'"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 after", "expected edges behind 'after'"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 after h2d.L0", "expected an edge .*found 'h2d.L0'"),
        ("fwd.L0 forward @gpu h.L0 -> h.L1 after love:h2d.L0", "expected an edge .*found 'love:h2d.L0'"),
        ("loss epilogue @gpu () -> ()", "expected a new op name, found 'loss' again"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(line, message):
    with pytest.raises(TextError, match=f"^line 3: {message}") as error:
        parse_graph(f"world 1\nloss epilogue @gpu () -> ()\n{line}\n")
    assert error.value.line == 3
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("name", ["model layers", "h,0", "x:y", "a[0]", "", "group", "after", "p@q", "(x)", "#1", "a->b", "a=b"])
def test_names_that_would_not_come_back_are_refused(name):
    op = Op(name, OpKind.FORWARD, Stream.GPU, "L0")
    with pytest.raises(ValueError, match="cannot stand in the text"):
        print_graph(OpGraph((op,)))
    with pytest.raises(ValueError, match="cannot stand in the text"):
        print_graph(OpGraph((replace(op, name="fwd", reads=(Ref(name),)),)))


def test_an_edge_into_nowhere_is_refused():
    with pytest.raises(ValueError, match="edge a -> b: no op 'b'"):
        print_graph(OpGraph(edges=(Edge("a", "b", Reason.DATA),)))


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1021313024, "974.0 MiB"), (3 << 50, "3072.0 TiB")]
)
def test_bytes_in_words(num_bytes, text):
    assert format_bytes(num_bytes) == text
