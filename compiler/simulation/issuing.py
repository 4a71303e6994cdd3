"""The host thread that issues compute to the device, in order, and as far ahead of it as it may be.

An op of a device is issued when all that it waits for is: another device op as soon as that one is issued, host work when it
has ended, and of compute COMPUTE_AHEAD ops at most before they are done. An update in HBM also waits for the loss, which says
whether the step counts. Compute is issued kernel by kernel, which takes a thread the time that was measured of its stage,
longer beside busy cores; copies hold that thread up, if it has anything to issue then. An op ends on the device no earlier than
it is issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from slidedp.compiler.costmodel.contention import COPY_ISSUE_US, ISSUED_BESIDE_CORES
from slidedp.compiler.ops import COMPUTE_AHEAD, OF_THE_HOST, Op, OpKind, Stream


class Issuing:
    """Of one simulation. Nodes are numbered as there: ``step * len(ops) + i``."""

    def __init__(self, ops: Sequence[Op], issue_us: Mapping[str, int], num_steps: int) -> None:
        self.n = len(ops)
        self.us = [issue_us.get(op.name, 0) for op in ops]
        self.stream, self.kind = [op.stream for op in ops], [op.kind for op in ops]
        self.issued = [0.0] * (self.n * num_steps)  # of what has started
        self.since = [0.0] * (self.n * num_steps)  # when all that an op waits for, as far as it has ended, was issued
        self.until = dict.fromkeys(Stream, 0.0)  # when the last op of a stream was issued
        self.ahead: deque[int] = deque()  # the last ops of compute
        self.ends = [0.0] * (self.n * num_steps)
        self.loss = 0.0  # when the host last heard of one

    def done(self, node: int, now: float) -> None:
        self.ends[node] = now
        if self.kind[node % self.n] is OpKind.EPILOGUE:
            self.loss = now

    def ended(self, node: int, after: int, now: float) -> None:
        """`after` waits for `node`, which has ended."""
        when = now if self.stream[node % self.n] in OF_THE_HOST else self.issued[node]
        self.since[after] = max(self.since[after], when)

    def started(self, node: int, *, beside_cores: bool) -> float:
        """When `node`, all that it waits for having ended, has been issued: before it starts, unless the host is late."""
        i = node % self.n
        stream, begin = self.stream[i], max(self.until[self.stream[i]], self.since[node])
        if stream is Stream.GPU:
            if len(self.ahead) == COMPUTE_AHEAD:
                begin = max(begin, self.ends[self.ahead.popleft()])
            self.ahead.append(node)
        elif self.kind[i] is OpKind.GPU_UPDATE:
            begin = max(begin, self.loss)
        elif self.until[Stream.GPU] > begin and stream not in OF_THE_HOST:
            self.until[Stream.GPU] += COPY_ISSUE_US
        self.until[stream] = self.issued[node] = begin + self.us[i] * (ISSUED_BESIDE_CORES if beside_cores else 1.0)
        return self.issued[node]
