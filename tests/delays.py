"""Injected delays: what makes rare orders of a plan's ops common. For `MachineOptions.delay`."""

from __future__ import annotations

import random
from collections.abc import Mapping

from slidedp.compiler.ops import OpKind


class Delays:
    """Seconds to sleep before an op, by its name: ops of one kind always long, of the others mostly none, sometimes up to 1 ms.

    Args:
        kinds: of every op of the graph, by name (ops are not named after their kind).
        turn: which of the kinds present is the slow one, modulo their number.
        seed: of the random rest; drawn in the order in which ops come up, so it differs from run to run.

    `slowed`: the kinds, at most one, that were really delayed as the slow kind.
    """

    def __init__(self, kinds: Mapping[str, OpKind], turn: int, seed: int | str) -> None:
        present = sorted(set(kinds.values()))
        self._kinds, self.slow = kinds, present[turn % len(present)]
        self._random = random.Random(seed)
        self.slowed: set[OpKind] = set()

    def __call__(self, op: str) -> float:
        if self._kinds[op] is self.slow:
            self.slowed.add(self.slow)
            return 1e-3
        return self._random.random() * 1e-3 if self._random.random() < 0.2 else 0.0
