"""The learning rate as torch's schedulers know it: an optimizer object that holds one and updates nothing.

Every scheduler of `torch.optim.lr_scheduler`, and every one that `transformers.get_scheduler` makes by name, works on an
optimizer's `param_groups`. A plan's optimizer is a description (:class:`slidedp.AdamW`), run elsewhere; this is its handle.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch


class LearningRate(torch.optim.Optimizer):
    """``param_groups[0]["lr"]`` is the learning rate of the next step. `step` and `zero_grad` do nothing: the plan does it."""

    def __init__(self, lr: float) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(0))], {"lr": lr})

    @property
    def lr(self) -> float:
        """Raises ValueError for what is not a finite number of 0 or more."""
        lr = float(self.param_groups[0]["lr"])
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"the learning rate is {lr}: it must be a finite number that is not negative")
        return lr

    def settings(self) -> dict[str, Any]:
        """Rate and what schedulers keep beside it (``initial_lr``), for a checkpoint."""
        return {key: value for key, value in self.param_groups[0].items() if key != "params"}

    def restore(self, settings: dict[str, Any]) -> None:
        """What :meth:`settings` gave."""
        self.param_groups[0].update(settings)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Does nothing. `Plan.run` calls it because schedulers check that it has been called before their own `step`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients never stay on the model."""


def as_int(value: float) -> int:
    """The bits of a double, to be sent among integers."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def as_float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
