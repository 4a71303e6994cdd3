"""What a user may choose about running a plan, not about planning."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slidedp.compiler.ops import Stream

PEER_TIMEOUT_S = 25.0
"""With the watchdog's looks, the other ranks stop within 30 s of a standstill."""

PEER_ABSENCE_S = 300.0


def update_threads(world_size: int) -> int:
    """CPU threads of a rank's update: its share of the cores. Those that issue work to a GPU go first: see `update_niceness`."""
    return max(len(os.sched_getaffinity(0)) // world_size, 1)


def update_niceness(device: torch.device) -> int:
    """By how much a rank's update gives way to its other threads, which issue work to a GPU and never work for long.

    No core is left to those. Of exchanges between two Python threads, with as many threads that never rest as cores, the slowest
    hundredth took 2 to 3 ms on Linux 6.18, a time slice, and 0.05 ms beside threads of niceness 10. Where the host is the device
    nothing is gained: its compute never rests either.
    """
    return 10 if device.type == "cuda" else 0


@dataclass(frozen=True)
class MachineOptions:
    """What the user may choose about running, not about planning.

    `max_grad_norm`, `skip_nonfinite`: see clipping.py; for plans with deferred updates.
    `peer_timeout_s`, `peer_absence_s`: see hangs.py; inf to wait for ever.
    `update_kernel`: "native", "torch" or "auto". `num_threads`: CPU threads of the update. `native_queue`: native updates run
    without Python, unless there is a `delay`. Test modes: `delay` gives the seconds to sleep before an op, by name; `pause` those
    that a GPU waits before it runs an op that it has been given; `poison` fills with NaN what nobody reads any more: slots of
    weights and gradients, activations on the device and the host; `trace` gets each op's name, stream, start and end in seconds.
    """

    update_kernel: str = "auto"
    num_threads: int | None = None
    native_queue: bool = True
    delay: Callable[[str], float] | None = None
    pause: Callable[[str], float] | None = None
    poison: bool = False
    trace: Callable[[str, Stream, float, float], None] | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    peer_timeout_s: float = PEER_TIMEOUT_S
    peer_absence_s: float = PEER_ABSENCE_S
