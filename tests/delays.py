"""Injected delays: what makes rare orders of a plan's ops common. For `MachineOptions.delay`, and `pause` on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from training import begin_again

import slidedp
from slidedp.compiler.ops import OpKind
from slidedp.executor.options import MachineOptions


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


def options_late_on_gpu(seed: int, head: str = "", share: float = 0.3) -> MachineOptions:
    """A `share` of the ops whose names begin with `head` begin up to 2 ms late, though they have been issued. Of even seeds as
    many are issued late, too; of odd ones updates run natively. Released slots are filled with NaN.
    """
    rng = random.Random(seed)

    def late(op: str) -> float:
        return rng.random() * 2e-3 if op.startswith(head) and rng.random() < share else 0.0

    return MachineOptions(delay=None if seed % 2 else late, pause=late, poison=True)


def each_kind_slow(plan: slidedp.Plan, batch: Any, digest_of: Callable[[slidedp.Plan], str]) -> dict[OpKind, str]:
    """Starts `plan`, and trains anew for each kind of op, which is the slow one; released slots are filled with NaN.

    `digest_of`: trains and says what came of it. Returns that, by kind.
    """
    plan._options = replace(plan._options, delay=lambda op: 0.0, poison=True)
    plan._start(batch)
    kinds = {op.name: op.kind for op in plan._spec.graph}
    weights = {name: p.detach().clone() for name, p in plan.model.named_parameters()}
    digests = {}
    for turn in range(len(set(kinds.values()))):
        delays = Delays(kinds, turn, seed=turn)
        begin_again(plan, weights)
        plan._machine.streams.delay = delays
        digests[delays.slow] = digest_of(plan)
    assert set(digests) == set(kinds.values())
    return digests
