"""A device's streams, with every op timed. What an op costs is what its stream spends on it while the others are busy too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from slidedp.compiler.ops import OF_THE_HOST, Stream
from slidedp.executor.devices.backend import Backend
from slidedp.executor.native.build import Ranks, StepConstants
from slidedp.executor.options import update_niceness
from slidedp.executor.ranks.collectives import Collectives
from slidedp.executor.streams.tickets import Ticket
from slidedp.executor.streams.updates import UpdateQueue

Task = Callable[[], object]
Spans = dict[Stream, list[tuple[float, float]]]
"""Start and end, in seconds, of each op of a stream, in order."""

MIN_OPS, MAX_OPS = 4, 200


class NativeUpdate(Protocol):
    """An update that a plan's native queue runs."""

    def next_handle(self) -> int:
        """The native object of the next piece, which outlives the lab."""


class Lab:
    """Runs ops on the streams of `backend`. Close it before the backend. Methods are collective: all ranks call them alike.

    `budget_s`: how long one experiment lasts, about.
    """

    def __init__(self, backend: Backend, collectives: Collectives, budget_s: float) -> None:
        self.backend, self.collectives, self.budget_s = backend, collectives, budget_s
        events: list[tuple[str, Stream, float, float]] = []
        self._events = events
        self._streams = backend.open_streams(trace=lambda *event: events.append(event))

    @property
    def world_size(self) -> int:
        return self.collectives.world_size

    def open_queue(self, library: Any, num_threads: int, ranks: Ranks) -> None:
        """Native updates of this lab run as a plan's do: by `num_threads` threads that wait for no Python between two of them."""
        self._streams.updates.open_queue(UpdateQueue(library, num_threads, ranks, update_niceness(self.backend.device)))

    def seconds(self, work: Mapping[Stream, Task | NativeUpdate], *, alone: bool = False) -> dict[Stream, float]:
        """Seconds of one op of each stream while those of all others run: the slowest rank's, on every rank.

        `alone`: rank 0 only, while the other ranks wait.
        """
        mine = self.collectives.rank == 0 or not alone
        rough = {s: min(lengths(self.spans({s: [task] * 3})[s])) if mine else 0.0 for s, task in work.items()}
        self.collectives.barrier()  # so that the ranks start together
        counts = {s: num_ops(self.budget_s, lasts) for s, lasts in self._slowest(rough).items()}
        spans = self.spans({s: [task] * counts[s] for s, task in work.items()}) if mine else {}
        return self._slowest({s: one_op(s, overlapping(spans)[s]) if mine else 0.0 for s in work})

    def spans(self, work: Mapping[Stream, Sequence[Task | NativeUpdate]]) -> Spans:
        """Runs all of `work`, a list of ops for each stream, at once, on this rank. Not collective.

        All are there before the first begins: what is measured is not how fast this thread hands them in.
        """
        self._events.clear()
        longest = max(len(tasks) for tasks in work.values())
        turns = [(s, tasks[i]) for i in range(longest) for s, tasks in work.items() if i < len(tasks)]
        begin = Ticket("begin")
        try:
            tickets = [self._submit(s, task, str(i), begin) for i, (s, task) in enumerate(turns)]
        finally:
            begin._mark_done()
        for ticket in tickets:
            ticket.wait_done()
        return {s: sorted((a, b) for _, stream, a, b in self._events if stream is s) for s in work}

    def issues(self, tasks: Sequence[Task]) -> list[float]:
        """Seconds in which a host thread issues each of these ops of the GPU, in order; none where the host is the device."""
        issued: list[tuple[float, float]] = []
        self._streams.issues = lambda name, stream, start, end: issued.append((start, end))
        try:
            self.spans({Stream.GPU: tasks})
        finally:
            self._streams.issues = None
        return lengths(sorted(issued))

    def _submit(self, stream: Stream, task: Task | NativeUpdate, name: str, begin: Ticket) -> Ticket:
        if callable(task):
            return self._streams.submit(stream, task, [begin], name=name, need_done=True)
        return self._streams.updates.submit_update(task.next_handle(), StepConstants(1, 1e-3, 0, None, None), [begin], present=0,
                                                   gates=(), finished=lambda result: None, name=name, deadline=0)

    def _slowest(self, seconds: dict[Stream, float]) -> dict[Stream, float]:
        """The largest of all ranks' values."""
        everyone = self.collectives.gather_ints([round(x * 1e9) for x in seconds.values()])
        return {s: max(values) / 1e9 for s, values in zip(seconds, zip(*everyone, strict=True), strict=True)}

    def close(self) -> None:
        self._streams.close()
        self.backend.drain()


def num_ops(budget_s: float, op_s: float) -> int:
    """How many ops fill the budget."""
    return max(MIN_OPS, min(MAX_OPS, math.ceil(budget_s / max(op_s, 1e-9))))


def overlapping(spans: Spans) -> Spans:
    """The ops of each stream that ran while every stream was busy: between the latest first start and the earliest last end.

    All of a stream's ops where that leaves none.
    """
    lo = max((ops[0][0] for ops in spans.values()), default=0.0)
    hi = min((ops[-1][1] for ops in spans.values()), default=0.0)
    return {s: [(a, b) for a, b in ops if a >= lo and b <= hi] or ops for s, ops in spans.items()}


def lengths(spans: Sequence[tuple[float, float]]) -> list[float]:
    return [b - a for a, b in spans]


def one_op(stream: Stream, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of one of the ops of `stream`, in the median; of the host's, by their ends, in the mean.

    What lies between two ops of the host costs as much as an op does, and the next update begins while the last blocks of the one
    before run: such an op lasts from the end of the one before it to its own.
    """
    if stream in OF_THE_HOST and len(spans) > 1:
        ends = [end for _, end in spans]
        return (max(ends) - min(ends)) / (len(ends) - 1)
    return statistics.median(lengths(spans))
