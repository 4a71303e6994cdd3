"""A device's streams, with every op timed. What an op costs is what its stream spends on it while the others are busy too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from slidedp.compiler.ops import Stream
from slidedp.executor.backend import Backend
from slidedp.executor.collectives import Collectives

Task = Callable[[], object]
Spans = dict[Stream, list[tuple[float, float]]]
"""Start and end, in seconds, of each op of a stream, in order."""

MIN_OPS, MAX_OPS = 4, 200


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

    def seconds(self, work: Mapping[Stream, Task], *, alone: bool = False) -> dict[Stream, float]:
        """Seconds of one op of each stream while those of all others run: the slowest rank's, on every rank.

        `alone`: rank 0 only, while the other ranks wait.
        """
        mine = self.collectives.rank == 0 or not alone
        rough = {s: min(_lengths(self.spans({s: [task] * 3})[s])) if mine else 0.0 for s, task in work.items()}
        self.collectives.barrier()  # so that the ranks start together
        counts = {s: num_ops(self.budget_s, lasts) for s, lasts in self._slowest(rough).items()}
        spans = self.spans({s: [task] * counts[s] for s, task in work.items()}) if mine else {}
        return self._slowest({s: statistics.median(_lengths(overlapping(spans)[s])) if mine else 0.0 for s in work})

    def period_seconds(self, stream: Stream, work: Mapping[Stream, Task]) -> float:
        """Seconds from the start of one op of `stream` to that of the next in its queue, while the rest of `work` runs."""
        counts = {s: num_ops(self.budget_s, min(_lengths(self.spans({s: [task] * 3})[s]))) for s, task in work.items()}
        spans = overlapping(self.spans({s: [task] * counts[s] for s, task in work.items()}))[stream]
        periods = [b - a for (a, _), (b, _) in pairwise(spans)]
        return self._slowest({stream: statistics.median(periods) if periods else 0.0})[stream]

    def spans(self, work: Mapping[Stream, Sequence[Task]]) -> Spans:
        """Runs all of `work`, a list of ops for each stream, at once, on this rank. Not collective."""
        self._events.clear()
        longest = max(len(tasks) for tasks in work.values())
        turns = [(s, tasks[i]) for i in range(longest) for s, tasks in work.items() if i < len(tasks)]
        tickets = [self._streams.submit(s, task, name=str(i), need_done=True) for i, (s, task) in enumerate(turns)]
        for ticket in tickets:
            ticket.wait_done()
        return {s: sorted((a, b) for _, stream, a, b in self._events if stream is s) for s in work}

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


def _lengths(spans: Sequence[tuple[float, float]]) -> list[float]:
    return [b - a for a, b in spans]
