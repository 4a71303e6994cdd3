"""Which backend runs on which device."""

from __future__ import annotations

import torch

from slidedp.executor.devices.backend import Backend, CpuBackend
from slidedp.executor.devices.cuda import CudaBackend


def open_backend(device: torch.device | str) -> Backend:
    """The backend of a device. Raises ValueError for a device that this machine lacks or no backend serves."""
    device = torch.device(device)
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return CudaBackend(device)
    raise ValueError(f"device: expected 'cpu' or 'cuda', got '{device}'")
