"""The optimizer as a description: what AdamW does to which parameter. What runs it is in executor/."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW with decoupled weight decay, as ``torch.optim.AdamW`` defines it (Loshchilov & Hutter 2019).

    `no_decay`: parameters whose dotted name contains one of these (in any case) get no weight decay; ``()`` for none. A name's
    beginning is ``^`` and its end ``$``: "bias$" is any name that ends so, "^lm_head.bias$" that one alone.
    Raises ValueError naming the field.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ("bias", "norm")

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            object.__setattr__(self, name, _non_negative(name, getattr(self, name)))
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise ValueError(f"AdamW.betas: expected two numbers, got {self.betas!r}")
        betas = tuple(_non_negative(f"betas[{i}]", b) for i, b in enumerate(self.betas))
        for i, beta in enumerate(betas):
            if beta >= 1:
                raise ValueError(f"AdamW.betas[{i}]: expected a number in [0, 1), got {beta!r}")
        object.__setattr__(self, "betas", betas)
        if isinstance(self.no_decay, str) or not all(isinstance(p, str) and p for p in self.no_decay):
            raise ValueError(f"AdamW.no_decay: expected a tuple of non-empty name patterns, got {self.no_decay!r}")
        object.__setattr__(self, "no_decay", tuple(self.no_decay))

    def decays(self, name: str) -> bool:
        """True if the parameter of this dotted name gets weight decay."""
        lowered = f"^{name.lower()}$"
        return not any(pattern.lower() in lowered for pattern in self.no_decay)


def _non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"AdamW.{name}: expected a finite number that is not negative, got {value!r}")
    return float(value)
