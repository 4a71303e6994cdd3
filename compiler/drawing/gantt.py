"""A timeline as text: one row a stream, a letter for what runs, a dot for nothing.

::

    gpu  |PFFFFFFFFFFFFFEEERBBRBBRBBRBBRBB....|  91.2%
    cpu  |uuuuuuuuuu..............UUUUUUUUUUUU|  62.0%

A column is a stretch of time. Its letter is the kind that runs longest in it, a capital when the stream is busy for most
of the stretch, small when it is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slidedp.compiler.ops import OpGraph, OpKind, Stream
from slidedp.compiler.runlength import layer_index
from slidedp.compiler.simulation.simulate import Timeline
from slidedp.compiler.simulation.unroll import Instance, Picture, clip, num_measured_steps, picture

IDLE = "."
MIN_COLUMNS = 20
_PREFERRED = {
    OpKind.H2D: "H", OpKind.D2H: "D", OpKind.HOST_CAST: "C", OpKind.ALL_GATHER: "G", OpKind.REDUCE: "S", OpKind.HOST_REDUCE: "A",
    OpKind.CPU_UPDATE: "U", OpKind.ACT_OFFLOAD: "O", OpKind.ACT_RELOAD: "I", OpKind.PROLOGUE: "P",
    OpKind.EPILOGUE: "E", OpKind.GRAD_NORM: "N", OpKind.SETTLE: "K",
}  # fmt: skip


def letters() -> dict[OpKind, str]:
    """A capital for each kind: of its preference, else the first letter of its name that no other kind has."""
    taken = dict(_PREFERRED)
    spare = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for kind in OpKind:
        if kind not in taken:
            taken[kind] = next(c for c in kind.upper() + spare if c.isalpha() and c not in taken.values())
    return taken


def gantt(graph: OpGraph, timeline: Timeline, width: int = 80) -> str:
    """One row a stream, `width` columns in all, under a scale in time and over a row of layers, with a legend.

    A predicted timeline is drawn as one period of its steady state, from the start of its compute; a measured one whole.
    """
    shown = picture(timeline)
    if not shown.instances:
        return "nothing runs"
    label = max(len(s) for s in shown.streams) + 1
    columns = max(MIN_COLUMNS, width - label - 9)
    kinds = {op.name: op.kind for op in graph.ops}
    lines = [title(timeline), " " * (label + 1) + scale(shown.end_us, columns)]
    for stream in shown.streams:
        mine = shown.on(stream)
        busy = sum(i.end_us - i.start_us for i in mine) / max(shown.end_us, 1)
        lines.append(f"{stream:<{label}}|{row(mine, kinds, shown.end_us, columns)}| {busy:6.1%}")
    layers = {op.name: op.layer for op in graph.ops}
    lines.append(f"{'':<{label + 1}}{layer_marks(shown.on(Stream.GPU), layers, shown.end_us, columns)}".rstrip())
    return "\n".join([*lines, *legend(shown, kinds, width)])


def title(timeline: Timeline) -> str:
    measured = num_measured_steps(timeline)
    steps = f"{measured} step{'s' * (measured > 1)} measured, " if measured else ""
    return f"{steps}{duration(timeline.step_us)} a step, the GPU waits for {duration(timeline.exposed_us)} of it"


def row(instances: Sequence[Instance], kinds: dict[str, OpKind], end_us: int, columns: int) -> str:
    """The letters of one stream; instances in order of start."""
    letter, out, first = letters(), [], 0
    for column in range(columns):
        lo, hi = end_us * column // columns, end_us * (column + 1) // columns
        while first < len(instances) and instances[first].end_us <= lo:
            first += 1
        share: Counter[OpKind | None] = Counter()
        k = first
        while k < len(instances) and instances[k].start_us < hi:
            for part in clip([instances[k]], lo, hi):
                share[kinds.get(part.op)] += part.end_us - part.start_us
            k += 1
        busy = share.total()
        if not busy:
            out.append(IDLE)
            continue
        kind = max(share, key=lambda which: (share[which], str(which)))
        mark = letter[kind] if kind else "?"
        out.append(mark if 2 * busy >= hi - lo else mark.lower())
    return "".join(out)


def scale(end_us: int, columns: int) -> str:
    """Round times in order, each to the right of a tick at its own time."""
    step = round_step(end_us / max(2, columns // 14))
    out = ""
    for k in range(end_us // step + 1):
        at = k * step * columns // end_us
        text = "|" + (duration(k * step) if k else "0")
        if (not out or at > len(out)) and at + len(text) <= columns:
            out = out.ljust(at) + text
    return out


def round_step(least_us: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, … microseconds that is no less than `least_us`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least_us:
                return digit * power
        power *= 10


def layer_marks(instances: Iterable[Instance], layers: dict[str, str], end_us: int, columns: int) -> str:
    """Where compute of a layer begins, for as many layers as have room: the first of the step and those after each label."""
    out = ""
    previous = ""
    for i in instances:
        layer = layers.get(i.op, "")
        if layer == previous:
            continue
        previous = layer
        at = i.start_us * columns // end_us
        if layer_index(layer) is not None and (not out or at > len(out)) and at + len(layer) <= columns:
            out = out.ljust(at) + layer
    return out


def legend(shown: Picture, kinds: dict[str, OpKind], width: int) -> list[str]:
    """Letter, kind and time of every kind in the picture, in the order of the enum, and what a small letter and a dot mean."""
    time: Counter[OpKind | None] = Counter()
    for i in shown.instances:
        time[kinds.get(i.op)] += i.end_us - i.start_us
    letter = letters()
    entries = [f"{letter[kind]} {kind} {duration(time[kind] / shown.num_steps)}" for kind in OpKind if kind in time]
    entries += [f"? other {duration(time[None] / shown.num_steps)}"] * (None in time)
    entries += ["small letter: less than half busy", f"{IDLE} idle"]
    lines = [""]
    for entry in entries:
        joined = f"{lines[-1]}   {entry}" if lines[-1] else entry
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(entry)
    return lines


def duration(us: float) -> str:
    """ "5.50 s", "12.3 ms", "800 us"."""
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us:.0f} us"
