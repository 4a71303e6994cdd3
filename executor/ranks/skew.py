"""How long collectives have waited for the last rank, apart from what they have moved: from a recording of every rank.

A collective is recorded from when this rank's inputs are there to when its result is, so the time in which other ranks are
still on their way is in it (NCCL's kernel spins, gloo's thread sleeps). All ranks of a host read one clock, so the last rank's
start, which nobody's bytes can precede, parts the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from slidedp.compiler.ops import Stream
from slidedp.executor.ranks.collectives import Collectives


def peer_wait_s(events: Sequence[tuple[str, Stream, float, float]], collectives: Collectives) -> float:
    """From (op, stream, start, end): seconds of all collectives in which this rank waited for the last one to begin.

    Collective, like the recording. Ranks issue the same collectives in one order, which is how they are matched.
    """
    own = [(start, end) for _, stream, start, end in events if stream is Stream.COMM]
    counts = [count for (count,) in collectives.gather_ints([len(own)])]
    assert len(set(counts)) == 1, f"ranks have recorded {counts} collectives"
    starts_ns = collectives.gather_ints([round(start * 1e9) for start, _ in own]) if own else []
    last_s: list[float] = [max(starts) * 1e-9 for starts in zip(*starts_ns, strict=True)]
    return sum(max(0.0, min(last, end) - start) for last, (start, end) in zip(last_s, own, strict=True))
