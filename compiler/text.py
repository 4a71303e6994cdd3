"""The text form of an OpGraph: one op a line, stable names, ``parse_graph(print_graph(g)) == g``.

::

    world 2
    group L03 : 974464 of 974464 uses L03
    slot hbm.w[3] : 1948928  # 1.9 MiB

      h2d.fwd.L03.c0  h2d @h2d      T.fwd.L03[c0/4,r]:stage[1] -> W.fwd.L03[c0/4,r]:w[0]  bytes=243616  after reuse(w[0]):fwd.L00
      fwd.L03         forward @gpu  h.L03, W.fwd.L03:w[0] -> h.L04  after data:all_gather.fwd.L03.c3

========  ========================================================================================================
group     ``group NAME : TRAINABLE of NUMEL uses STAGE STAGE…``, counts in elements
slot      ``slot MEMORY.NAME[COUNT] : BYTES``, bytes of one slot
op        ``NAME KIND @STREAM READS -> WRITES``, then what differs from the default of ``layer= chunk= bytes= flops=
          deadline=``, then ``after EDGE EDGE…``. No reads or no writes: ``()``
ref       ``VALUE@VERSION[CHUNK,SCOPE]:PLACE``; chunk ``c0/4``, or ``c0/4t`` of the trainable part; scope ``r`` (this rank's
          part), ``*`` (all), ``o`` (the others'); ``touched`` or ``untouched`` rows: ``[c0/4t,r,touched]``;
          ``peers(REF)`` for the instances of all ranks
edge      ``REASON:OP``, ``REASON(SLOT):OP``; ``@-1`` after the op: of the step before; ``*`` at the end: on every rank
========  ========================================================================================================

`#` starts a comment. Not in the text: `OpGraph.meta`, and the parameters inside a group (`Group.params`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slidedp.compiler.layergraph import Group
from slidedp.compiler.ops import Chunk, Edge, Op, OpGraph, OpKind, Reason, Ref, RowSet, Scope, Slot, Stream, split_lane
from slidedp.compiler.units import format_bytes

_NAME = r"[^\s,:@\[\]()#*=>]+"
_CHUNK = r"c(?P<index>\d+)/(?P<count>\d+)(?P<trainable>t?)"
_NAME_RE = re.compile(_NAME)
_CHUNK_RE = re.compile(_CHUNK)
_REF_RE = re.compile(
    rf"(?P<value>{_NAME})(?:@(?P<version>\d+))?(?:\[(?:{_CHUNK},)?(?P<scope>[r*o])(?:,(?P<rows>touched|untouched))?\])?(?::(?P<place>{_NAME}(?:\[\d+\])?))?"
)
_EDGE_RE = re.compile(
    rf"(?P<reason>[a-z]+)(?:\((?P<slot>{_NAME}(?:\[\d+\])?)\))?:(?P<src>{_NAME})(?:@-(?P<distance>\d+))?(?P<all>\*?)"
)
_GROUP_RE = re.compile(rf"group (?P<name>{_NAME}) : (?P<trainable>\d+) of (?P<numel>\d+) uses(?P<uses>( {_NAME})*)")
_SLOT_RE = re.compile(rf"slot (?P<memory>[a-z]+)\.(?P<name>{_NAME})\[(?P<count>\d+)\] : (?P<bytes>\d+)")
_COMMA_RE = re.compile(r",(?![^\[]*\])")
_TAIL_CHUNK_RE = re.compile(r"\.c\d+$")
_RESERVED = ("world", "group", "slot", "after")
_NUMBERS = ("bytes", "flops", "deadline")


class TextError(ValueError):
    """The text is not an OpGraph: names the line and what was expected there. `line` is 0 for a fragment."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.message = message
        self.line = line


def infer_layer(name: str) -> str:
    """The layer an op's name ends in: ``L03`` of ``h2d.fwd.L03.c0``, ``fwd.L03.s1``. Printed only where the op says otherwise."""
    return split_lane(_TAIL_CHUNK_RE.sub("", name))[0].rpartition(".")[2]


def infer_chunk(reads: Iterable[Ref], writes: Iterable[Ref]) -> Chunk | None:
    """The chunk of the first write, else read, that has one. Printed only where the op says otherwise."""
    return next((ref.chunk for ref in (*writes, *reads) if ref.chunk), None)


# Printing


def _print_chunk(chunk: Chunk | None) -> str:
    return f"c{chunk.index}/{chunk.count}{'t' if chunk.trainable else ''}" if chunk else "-"


def print_ref(ref: Ref) -> str:
    """``W.fwd.L03[c0/4,r]:w[0]``; the version where it is not 0 or where the value outlives the step."""
    text = ref.value
    if ref.version or ref.persistent:
        text += f"@{ref.version}"
    if ref.chunk:
        text += f"[{_print_chunk(ref.chunk)},{ref.scope}{',' * bool(ref.rows)}{ref.rows}]"
    elif ref.scope is not Scope.ALL:
        text += f"[{ref.scope}]"
    if ref.place:
        text += f":{ref.place}"
    return f"peers({text})" if ref.peers else text


def print_edge(edge: Edge) -> str:
    """What stands behind ``after`` on the line of `edge.dst`."""
    slot = f"({edge.slot})" if edge.slot else ""
    distance = f"@-{edge.distance}" if edge.distance else ""
    return f"{edge.reason}{slot}:{edge.src}{distance}{'*' if edge.all_ranks else ''}"


def _print_io(op: Op) -> str:
    reads, writes = (", ".join(map(print_ref, refs)) or "()" for refs in (op.reads, op.writes))
    return f"{reads} -> {writes}"


def _print_attributes(op: Op) -> str:
    out = []
    if op.layer != infer_layer(op.name):
        out.append(f"layer={op.layer}")
    if op.chunk != infer_chunk(op.reads, op.writes):
        out.append(f"chunk={_print_chunk(op.chunk)}")
    out += [f"{name}={getattr(op, name)}" for name in _NUMBERS if getattr(op, name)]
    return " ".join(out)


def _column(cells: list[str], limit: int) -> list[str]:
    """Cells padded to one width, rounded up so that a slightly longer cell does not reflow every line of a diff."""
    width = min(limit, -(-max(map(len, cells), default=0) // 4) * 4)
    return [cell.ljust(width) for cell in cells]


def _require_printable(graph: OpGraph) -> None:
    """Names are whatever a model calls its layers: better an error here than a text that does not parse."""
    names = {n for g in graph.groups for n in (g.name, *g.uses)} | {slot.name for slot in graph.slots}
    for op in graph.ops:
        names |= {op.name, *(ref.value for ref in (*op.reads, *op.writes))} | ({op.layer} if op.layer else set())
    for name in sorted(names):
        if name in _RESERVED or not _NAME_RE.fullmatch(name):
            raise ValueError(f"{name!r} cannot stand in the text of a graph: rename it, without blanks and , : @ [ ] ( ) # * = >")


def _print_header(graph: OpGraph) -> list[str]:
    lines = [f"world {graph.world_size}"]
    for g in graph.groups:
        lines.append(" ".join((f"group {g.name} : {g.num_trainable} of {g.numel} uses", *g.uses)))
    for s in graph.slots:
        lines.append(f"slot {s.memory}.{s.name}[{s.count}] : {s.bytes}  # {format_bytes(s.bytes)}")
    return lines


def print_graph(graph: OpGraph) -> str:
    """The text of `graph`, ending in a newline. Raises ValueError for names with blanks or punctuation, and stray edges."""
    _require_printable(graph)
    for edge in graph.edges:
        if edge.dst not in graph.index:
            raise ValueError(f"edge {edge.src} -> {edge.dst}: no op {edge.dst!r} on whose line it could stand")
    into = graph.edges_into
    names = _column([op.name for op in graph.ops], 48)
    kinds = _column([f"{op.kind} @{op.stream}" for op in graph.ops], 24)
    ios = _column([_print_io(op) for op in graph.ops], 72)
    lines = _print_header(graph)
    if graph.ops:
        lines.append("")
    for op, name, kind, io in zip(graph.ops, names, kinds, ios, strict=True):
        cells = ["", name, kind, io, _print_attributes(op)]
        if into[op.name]:
            cells.append("after " + " ".join(map(print_edge, into[op.name])))
        if op.bytes >= 1024:
            cells.append(f"# {format_bytes(op.bytes)}")
        lines.append("  ".join(cell for i, cell in enumerate(cells) if cell or i == 0).rstrip())
    return "\n".join(lines) + "\n"


# Parsing


def _parse_chunk(text: str) -> Chunk | None:
    if text == "-":
        return None
    m = _CHUNK_RE.fullmatch(text)
    if not m:
        raise TextError(f"expected a chunk such as c0/4 or c0/4t, found {text!r}")
    return Chunk(int(m["index"]), int(m["count"]), bool(m["trainable"]))


def parse_ref(text: str) -> Ref:
    """The inverse of :func:`print_ref`. Raises TextError."""
    peers = text.startswith("peers(") and text.endswith(")")
    m = _REF_RE.fullmatch(text[len("peers(") : -1] if peers else text)
    if not m:
        raise TextError(f"expected a value such as W.fwd.L03@0[c0/4,r]:w[0], found {text!r}")
    chunk = Chunk(int(m["index"]), int(m["count"]), bool(m["trainable"])) if m["index"] else None
    return Ref(m["value"], int(m["version"] or 0), chunk, Scope(m["scope"] or "*"), m["place"] or "", peers,
               RowSet(m["rows"] or ""))


def parse_io(text: str) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
    """``READS -> WRITES`` as two tuples of refs. Raises TextError."""
    sides = text.split("->")
    if len(sides) != 2:
        raise TextError(f"expected READS -> WRITES, found {text.strip()!r}")
    reads, writes = (
        () if side.strip() == "()" else tuple(parse_ref(part.strip()) for part in _COMMA_RE.split(side)) for side in sides
    )
    return reads, writes


def parse_edge(text: str, dst: str) -> Edge:
    """An edge that ends in op `dst`; the inverse of :func:`print_edge`. Raises TextError."""
    m = _EDGE_RE.fullmatch(text)
    if not m or m["reason"] not in list(Reason):
        raise TextError(f"expected an edge such as data:h2d.fwd.L03.c0 ({', '.join(Reason)}), found {text!r}")
    return Edge(m["src"], dst, Reason(m["reason"]), int(m["distance"] or 0), bool(m["all"]), m["slot"] or "")


def _parse_attributes(tokens: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Numbers, and the rest as text."""
    numbers: dict[str, int] = {}
    strings: dict[str, str] = {}
    for token in tokens:
        key, _, value = token.partition("=")
        if key in _NUMBERS and value.removeprefix("-" if key == "deadline" else "").isdecimal():
            numbers[key] = int(value)
        elif key in ("layer", "chunk"):
            strings[key] = value
        else:
            raise TextError(f"expected layer=, chunk=, bytes=N, flops=N, deadline=N or after, found {token!r}")
    return numbers, strings


def _parse_op(line: str) -> tuple[Op, list[Edge]]:
    tokens = line.split()
    if len(tokens) < 3 or not tokens[2].startswith("@"):
        raise TextError(f"expected NAME KIND @STREAM READS -> WRITES, found {line.strip()!r}")
    name, kind, stream = tokens[0], tokens[1], tokens[2][1:]
    if not _NAME_RE.fullmatch(name):
        raise TextError(f"expected an op name, found {name!r}")
    if kind not in list(OpKind):
        raise TextError(f"expected an op kind ({', '.join(OpKind)}), found {kind!r}")
    if stream not in list(Stream):
        raise TextError(f"expected a stream ({', '.join(Stream)}), found {stream!r}")
    body, after = tokens[3:], []
    if "after" in body:
        at = body.index("after")
        body, after = body[:at], body[at + 1 :]
        if not after:
            raise TextError("expected edges behind 'after', found the end of the line")
    first = next((i for i, token in enumerate(body) if "=" in token), len(body))
    reads, writes = parse_io(" ".join(body[:first]))
    numbers, strings = _parse_attributes(body[first:])
    chunk = _parse_chunk(strings["chunk"]) if "chunk" in strings else infer_chunk(reads, writes)
    op = Op(name, OpKind(kind), Stream(stream), strings.get("layer", infer_layer(name)), chunk, reads, writes, **numbers)
    return op, [parse_edge(token, name) for token in after]


def _parse_group(line: str) -> Group:
    m = _GROUP_RE.fullmatch(line)
    if not m:
        raise TextError(f"expected group NAME : TRAINABLE of NUMEL uses STAGE STAGE…, found {line!r}")
    return Group(m["name"], int(m["numel"]), int(m["trainable"]), tuple(m["uses"].split()))


def _parse_slot(line: str) -> Slot:
    m = _SLOT_RE.fullmatch(line)
    if not m:
        raise TextError(f"expected slot MEMORY.NAME[COUNT] : BYTES, found {line!r}")
    return Slot(m["name"], int(m["count"]), int(m["bytes"]), m["memory"])


def _parse_world(line: str) -> int:
    m = re.fullmatch(r"world ([1-9]\d*)", line)
    if not m:
        raise TextError(f"expected world NUMBER-OF-RANKS, found {line!r}")
    return int(m[1])


def parse_graph(text: str) -> OpGraph:
    """The graph that `text` spells; the inverse of :func:`print_graph`.

    Raises :class:`TextError` with the line's number and what was expected there. Checks the grammar only: whether the graph
    is sound is :func:`slidedp.passes.verify.verify`'s business.
    """
    world_size = 1
    groups: list[Group] = []
    slots: list[Slot] = []
    ops: dict[str, Op] = {}
    edges: list[Edge] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].rstrip()
        try:
            match " ".join(line.split()).partition(" ")[0]:
                case "":
                    continue
                case "world":
                    world_size = _parse_world(" ".join(line.split()))
                case "group":
                    groups.append(_parse_group(" ".join(line.split())))
                case "slot":
                    slots.append(_parse_slot(" ".join(line.split())))
                case _:
                    op, into = _parse_op(line)
                    if op.name in ops:
                        raise TextError(f"expected a new op name, found {op.name!r} again")
                    ops[op.name] = op
                    edges += into
        except TextError as err:
            raise TextError(err.message, number) from None
    return OpGraph(tuple(ops.values()), tuple(edges), tuple(slots), tuple(groups), world_size)
