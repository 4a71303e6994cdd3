"""How much of an HBM budget plans fill of their own accord.

Up to that share, retained activations and resident state are a choice; beyond it, up to the budget itself, a plan is accepted
only because it needs the memory.
"""

from __future__ import annotations

from slidedp.compiler.costmodel.hardware import HardwareProfile

WHOLE = 0.92
"""Share of a machine's HBM. The rest is for the allocator's fragmentation, the CUDA context and libraries, workspaces that no
estimate sees, and longer batches later on. Measured on one H200: planned 116.4 GiB, allocated 116.5 at most, reserved 117.5.
"""

RESERVE = 0.03
RESERVE_BYTES = 2**30
"""Kept free of a budget that the user has named, the larger of the two: for fragmentation alone, measured as 1.1 GiB."""


def room_to_fill(hw: HardwareProfile, hbm_budget: int | None) -> int:
    """Bytes of one GPU that choices may fill. `hbm_budget`: the user's; None: all of the machine's.

    A budget of a few GiB keeps the share of a whole machine, not 1 GiB. Without a GPU there is no allocator to allow for.
    """
    budget = hw.hbm_bytes if hbm_budget is None else hbm_budget
    if hw.gpu_name == "cpu":
        return budget
    whole = int(WHOLE * budget)
    return whole if budget >= hw.hbm_bytes else max(whole, budget - max(int(RESERVE * budget), RESERVE_BYTES))


def host_room(host_budget: int) -> int:
    """Bytes of the host that activations may fill beside the state: processes, caches and data loaders want some, too."""
    return int(WHOLE * host_budget)
