"""Checks of a batch, before anything of it runs: what is wrong is named, and nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slidedp.compiler.tracer import Trace


class BatchError(ValueError):
    """A batch that cannot be run. Nothing has changed, on any rank."""


def check_batch(batch: Mapping[str, Tensor], trace: Trace | None = None) -> dict[str, Tensor]:
    """`batch` as a dict of tensors; with `trace` also every index against the table that it indexes.

    Raises:
        BatchError: not a mapping of tensors, empty, or an id outside its table.
    """
    if not isinstance(batch, Mapping):
        raise BatchError(f"a batch is a mapping of tensors, e.g. {{'input_ids': ..., 'labels': ...}}, not {type(batch).__name__}")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise BatchError(f"batch[{key!r}] is {type(value).__name__}, not a tensor")
        if value.layout is not torch.strided or value.device.type == "meta":
            raise BatchError(f"batch[{key!r}] is {value.layout} on {value.device}: give a dense tensor with values")
        if value.numel() == 0:
            raise BatchError(f"batch[{key!r}] is empty (shape {tuple(value.shape)})")
    if not batch:
        raise BatchError("the batch is empty")
    for key, size in trace.vocab_checks if trace else ():
        low, high = (int(x) for x in batch[key].aminmax())
        if low < 0 or high >= size:
            raise BatchError(f"batch[{key!r}] holds id {low if low < 0 else high}, outside the {size} rows of its table")
    return dict(batch)
