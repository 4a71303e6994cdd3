"""Who this process is among the ranks of the host, and on which device it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank, how many there are (all on this host), and its device."""

    rank: int
    world_size: int
    device: torch.device


def find_ranks(device: str | torch.device | None = None) -> Ranks:
    """Ranks from ``torch.distributed``, which is initialised here if torchrun started this process and nobody has yet.

    `device`: None takes this rank's GPU if there is one, else the CPU. Gloo is registered for CPU tensors beside NCCL.

    Raises:
        ValueError: the ranks are spread over several hosts, or `device` is not there.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    chosen = pick_device(device, local)
    if not dist.is_available() or (world == 1 and not dist.is_initialized()):
        return Ranks(0, 1, chosen)
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) != world:
        raise ValueError("slidedp shares one host state among all ranks: start them on one host (torchrun --nnodes 1)")
    if not dist.is_initialized():
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        several = chosen.type == "cuda" and torch.cuda.device_count() >= world
        dist.init_process_group("cpu:gloo,cuda:nccl" if several else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), chosen)


def pick_device(device: str | torch.device | None, local_rank: int) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {str(device)!r} is not known to torch; use 'cuda' or 'cpu'") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {str(device)!r}: this machine (or this build of torch) has no CUDA; use device='cpu'")
        if chosen.index is None:
            chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    elif chosen.type != "cpu":
        raise ValueError(f"device {str(device)!r} is not supported; use 'cuda' or 'cpu'")
    return chosen
