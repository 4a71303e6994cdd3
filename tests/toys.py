"""Hand-built graphs for the tests of text, verifier and pruning: a small model in every datapath."""

from __future__ import annotations

from slidedp.compiler.dsl import GraphBuilder
from slidedp.compiler.ops import Edge, OpGraph, Reason
from slidedp.passes.requirements import requirements

UNIT = 64
"""Elements: what everything is cut at."""

# One rank, two layers, one weight slot, cast, a frozen quarter of L01 (which the window still holds for its backward).
HAND_WRITTEN = """\
world 1
group L00 : 128 of 128 uses L00
group L01 : 192 of 256 uses L01
slot hbm.w[1] : 512
slot hbm.g[1] : 512
slot pinned.stage[2] : 512

  prologue            prologue @gpu    batch -> h.L00, const
  host_cast.fwd.L00.c0  host_cast @cast  P.L00@0[c0/1,*] -> T.fwd.L00[c0/1,*]:stage[0]  after version:cpu_update.L00.c0@-1
  h2d.fwd.L00.c0      h2d @h2d         T.fwd.L00[c0/1,*]:stage[0] -> W.fwd.L00[c0/1,*]:w[0]  bytes=256  after data:host_cast.fwd.L00.c0
  fwd.L00             forward @gpu     h.L00, const, W.fwd.L00:w[0] -> h.L01  after data:h2d.fwd.L00.c0
  host_cast.fwd.L01.c0  host_cast @cast  P.L01@0[c0/1,*] -> T.fwd.L01[c0/1,*]:stage[1]  after version:cpu_update.L01.c0@-1
  h2d.fwd.L01.c0      h2d @h2d         T.fwd.L01[c0/1,*]:stage[1] -> W.fwd.L01[c0/1,*]:w[0]  bytes=512  after data:host_cast.fwd.L01.c0 reuse(w[0]):fwd.L00
  fwd.L01             forward @gpu     h.L01, const, W.fwd.L01:w[0] -> h.epilogue  after data:h2d.fwd.L01.c0
  epilogue            epilogue @gpu    h.epilogue -> loss, d.epilogue
  bwd.L01             backward @gpu    h.L01, const, d.epilogue, W.fwd.L01:w[0] -> d.L01, G.L01@1:g[0]
  d2h.L01.c0          d2h @d2h         G.L01@1[c0/1t,*]:g[0] -> H.L01[c0/1t,r]  bytes=384  after data:bwd.L01
  cpu_update.L01.c0   cpu_update @cpu  H.L01[c0/1t,r], P.L01@0[c0/1t,r] -> P.L01@1[c0/1t,r]  deadline=4  after data:d2h.L01.c0
  host_cast.bwd.L00.c0  host_cast @cast  P.L00@0[c0/1,*] -> T.bwd.L00[c0/1,*]:stage[0]  after reuse(stage[0]):h2d.fwd.L00.c0
  h2d.bwd.L00.c0      h2d @h2d         T.bwd.L00[c0/1,*]:stage[0] -> W.bwd.L00[c0/1,*]:w[0]  bytes=256  after data:host_cast.bwd.L00.c0 reuse(w[0]):bwd.L01
  bwd.L00             backward @gpu    h.L00, const, d.L01, W.bwd.L00:w[0] -> d.L00, G.L00@1:g[0]  after data:h2d.bwd.L00.c0 reuse(g[0]):d2h.L01.c0
  d2h.L00.c0          d2h @d2h         G.L00@1[c0/1t,*]:g[0] -> H.L00[c0/1t,r]  bytes=256  after data:bwd.L00
  cpu_update.L00.c0   cpu_update @cpu  H.L00[c0/1t,r], P.L00@0[c0/1t,r] -> P.L00@1[c0/1t,r]  deadline=1  after data:d2h.L00.c0
"""  # noqa: E501


class Toy:
    """A tied embedding and `layers` layers, delivered and returned in chunks, without edges.

    A helper a datapath, so that a graph reads like the step that it is; :func:`wired` adds the edges.
    """

    def __init__(self, world: int, source: str, delivery: str, reduction: str, chunks: int = 2, returns: int = 3) -> None:
        self.world, self.source, self.reduction, self.chunks, self.returns = world, source, reduction, chunks, returns
        self.resident = source == "resident"
        self.sharded = delivery == "sharded" and world > 1
        self.b = GraphBuilder(world)
        self.staged = self.reduced = 0

    def weights(self, use: str, group: str, place: str) -> str:
        return f"W.resident.{group}@0:held.{group}" if self.resident else f"W.{use}.{group}:{place}"

    def deliver(self, tag: str, place: str) -> None:
        if self.resident:
            return
        group, scope = tag.rpartition(".")[2], "r" if self.sharded else "*"
        for c in range(self.chunks):
            source = f"S.{group}@0[c{c}/{self.chunks},{scope}]"
            if self.source == "cast":
                staged = f"T.{tag}[c{c}/{self.chunks},{scope}]:stage[{self.staged % 3}]"
                self.staged += 1
                self.b.op(f"host_cast.{tag}.c{c}", f"P.{group}@0[c{c}/{self.chunks},{scope}] -> {staged}")
                source = staged
            self.b.op(f"h2d.{tag}.c{c}", f"{source} -> W.{tag}[c{c}/{self.chunks},{scope}]:{place}")
            if self.sharded:
                part = f"W.{tag}[c{c}/{self.chunks},%s]:{place}"
                self.b.op(f"all_gather.{tag}.c{c}", f"{part % 'r'} -> {part % 'o'}")

    def take_home(self, gradient: str, place: str) -> None:
        group = gradient.partition("@")[0].removeprefix("G.")
        for c in range(self.returns):
            whole, chunk = f"{gradient}[c{c}/{self.returns}t,*]:{place}", f"c{c}/{self.returns}t"
            home = f"H.{group}[{chunk},r]"
            if self.world > 1 and self.reduction == "cpu":
                self.b.op(f"d2h.{group}.c{c}", f"{whole} -> Q.{group}[{chunk},*]")
                self.b.op(f"host_reduce.{group}.c{c}", f"peers(Q.{group}[{chunk},r]) -> {home}")
            else:
                if self.world > 1:
                    shard = f"R.{group}[{chunk},r]:red[{self.reduced % 2}]"
                    self.reduced += 1
                    self.b.op(f"reduce.{group}.c{c}", f"{whole} -> {shard}")
                    whole = shard
                if self.resident:
                    self.update_there(group, c, chunk, whole)
                    continue
                self.b.op(f"d2h.{group}.c{c}", f"{whole} -> {home}")
            shadow = f", S.{group}@1[{chunk},r]" if self.source == "shadow" else ""
            self.b.op(f"cpu_update.{group}.c{c}", f"{home}, P.{group}@0[{chunk},r] -> P.{group}@1[{chunk},r]{shadow}")

    def update_there(self, group: str, c: int, chunk: str, gradient: str) -> None:
        state, part = f"P.{group}@%d[{chunk},r]:state.{group}", f"W.resident.{group}@1[{chunk},%s]:held.{group}"
        self.b.op(f"gpu_update.{group}.c{c}", f"{gradient}, {state % 0} -> {state % 1}, {part % 'r'}")
        if self.world > 1:
            self.b.op(f"all_gather.resident.{group}.c{c}", f"{part % 'r'} -> {part % 'o'}")

    def build(self, layers: int = 3) -> OpGraph:
        b, unit = self.b, UNIT * self.world
        b.group("tied", 4 * unit, uses=("prologue", "epilogue"))
        for i in range(layers):
            b.group(f"L{i}", 4 * unit, 3 * unit if i == 1 else None)  # the last quarter of L1 is frozen
        b.slot("w", 2, 4 * unit).slot("g", 2, 4 * unit).slot("held.tied", 1, 4 * unit).slot("gheld.tied", 1, 4 * unit)
        b.slot("stage", 3, 4 * unit, "pinned").slot("red", 2, 4 * unit)
        for group in ("tied", *(f"L{i}" for i in range(layers))) if self.resident else ():
            b.slot(f"state.{group}", 1, 12 * unit)
            if group != "tied":
                b.slot(f"held.{group}", 1, 4 * unit)
        tied = self.weights("step", "tied", "held.tied")
        self.deliver("step.tied", "held.tied")
        b.op("prologue", f"batch, {tied} -> h.L0, const")
        for i in range(layers):
            self.deliver(f"fwd.L{i}", f"w[{i % 2}]")
            b.op(f"fwd.L{i}", f"h.L{i}, const, {self.weights('fwd', f'L{i}', f'w[{i % 2}]')} -> h.L{i + 1}")
        b.op("epilogue", f"h.L{layers}, {tied} -> loss, d.L{layers}, G.tied@1:gheld.tied")
        for i in reversed(range(layers)):
            use = "fwd" if i >= layers - 2 else "bwd"  # the window still holds the last two
            if use == "bwd":
                self.deliver(f"bwd.L{i}", f"w[{i % 2}]")
            read = self.weights(use, f"L{i}", f"w[{i % 2}]")
            b.op(f"bwd.L{i}", f"h.L{i}, const, d.L{i + 1}, {read} -> d.L{i}, G.L{i}@1:g[{i % 2}]")
            self.take_home(f"G.L{i}@1", f"g[{i % 2}]")
        b.op("bwd.prologue", f"d.L0, {tied}, G.tied@1:gheld.tied -> G.tied@2:gheld.tied")
        self.take_home("G.tied@2", "gheld.tied")
        return b.build()


DATAPATHS = [
    (1, "cast", "replicated", "gpu"),
    (1, "shadow", "replicated", "gpu"),
    (2, "cast", "sharded", "gpu"),
    (2, "cast", "replicated", "cpu"),
    (2, "shadow", "sharded", "cpu"),
    (2, "shadow", "replicated", "gpu"),
    (1, "resident", "", "gpu"),
    (2, "resident", "", "gpu"),
]


def wired(graph: OpGraph) -> OpGraph:
    """`graph` with an edge for each thing that has to wait: far more than needed, sound for any order of the text's ops."""
    pairs: dict[tuple[str, str, int], bool] = {}
    for r in requirements(graph):
        key = r.first.op.name, r.then.op.name, r.distance
        pairs[key] = pairs.get(key, False) or r.from_other
    return graph.with_(edges=tuple(Edge(*key[:2], Reason.DATA, key[2], cross) for key, cross in pairs.items()))


def without(graph: OpGraph, edge: Edge) -> OpGraph:
    return graph.with_(edges=tuple(e for e in graph.edges if e is not edge))
