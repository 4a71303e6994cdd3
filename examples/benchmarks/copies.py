"""How fast the copies of a step were, one by one: what tells a link that is slow from one that waits."""

from __future__ import annotations

import statistics
from typing import Any

import slidedp
from slidedp.compiler.ops import OpKind, Stream
from slidedp.compiler.simulation.timeline import Timeline

SMALLEST = 4 << 20
"""Bytes; what is smaller says more of latency."""


def copy_gbps(plan: slidedp.Plan, measured: Timeline, predicted: Timeline) -> dict[str, Any]:
    """By direction: GB/s that a tenth, half, and nine tenths of the copies of weights and gradients stay below.

    All measured ones slower than predicted: the links get less than is thought. Only the lowest tenth: some are issued late, for
    the time of a copy runs from when its stream could have begun.
    """
    ops = {op.name: op for op in plan._spec.graph.ops if op.kind in (OpKind.H2D, OpKind.D2H) and op.bytes >= SMALLEST}
    found: dict[str, Any] = {}
    for stream in (Stream.H2D, Stream.D2H):
        for name, line in (("measured", measured), ("predicted", predicted)):
            spans = [span for span in line.spans if span.stream is stream and span.op in ops]
            rates = [ops[span.op].bytes / max(span.end_us - span.start_us, 1) / 1e3 for span in spans]
            if len(rates) > 1:
                tenths = statistics.quantiles(rates, n=10, method="inclusive")
                found.setdefault(str(stream), {})[name] = [round(tenths[i], 1) for i in (0, 4, 8)]
    return found
