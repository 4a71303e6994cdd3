"""Checks of a batch, before anything of it runs: what is wrong is named, and nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import Trace


Batch = Mapping[str, Tensor]

Batches = Batch | Sequence[Batch]
"""What a step runs on: one batch, or this rank's micro-batches."""


class BatchError(ValueError):
    """A batch that cannot be run. Nothing has changed, on any rank."""


def check_batch(batch: Mapping[str, Tensor], trace: Trace | None = None) -> dict[str, Tensor]:
    """`batch` as a dict of tensors; with `trace` also every index against the table that it indexes.

    Raises:
        BatchError: not a mapping of tensors, empty, differentiable, or an id outside its table.
    """
    if not isinstance(batch, Mapping):
        raise BatchError(f"a batch is a mapping of tensors, e.g. {{'input_ids': ..., 'labels': ...}}, or a sequence of "
                         f"such micro-batches, not {type(batch).__name__}")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise BatchError(f"batch[{key!r}] is {type(value).__name__}, not a tensor")
        if value.layout is not torch.strided or value.device.type == "meta":
            raise BatchError(f"batch[{key!r}] is {value.layout} on {value.device}: give a dense tensor with values")
        if value.requires_grad:
            raise BatchError(f"batch[{key!r}] requires a gradient, and a step takes none of its batch: give "
                             f"batch[{key!r}].detach(), or make what it comes from a part of the model")
        if value.numel() == 0:
            raise BatchError(f"batch[{key!r}] is empty (shape {tuple(value.shape)})")
    if not batch:
        raise BatchError("the batch is empty")
    for key, size in trace.vocab_checks if trace else ():
        low, high = (int(x) for x in batch[key].aminmax())
        if low < 0 or high >= size:
            raise BatchError(f"batch[{key!r}] holds id {low if low < 0 else high}, outside the {size} rows of its table")
    return dict(batch)


def micro_batches(batches: Batches, slices: int = 1) -> list[dict[str, Tensor]]:
    """The lanes of a step: each batch, checked, in at most `slices` pieces. Raises BatchError, saying which one is wrong."""
    if isinstance(batches, Mapping) or not isinstance(batches, Sequence) or isinstance(batches, str):
        return cut_rows(check_batch(batches), slices)  # raises, saying so, unless it is a mapping
    if not batches:
        raise BatchError("a step needs a batch: the sequence of micro-batches is empty")
    out = []
    for i, batch in enumerate(batches):
        try:
            out += cut_rows(check_batch(batch), slices)
        except BatchError as e:
            raise BatchError(f"micro-batch {i} of {len(batches)}: {e}") from e
    return out


def check_lanes(lanes: Sequence[Mapping[str, Tensor]], traces: Sequence[Trace]) -> list[int]:
    """Number of valid tokens of each micro-batch. ValueError, saying of which, for an index outside its table."""
    valid = []
    for i, (batch, traced) in enumerate(zip(lanes, traces, strict=True)):
        try:
            check_batch(batch, traced)
            valid.append(traced.num_valid(batch))
        except ValueError as e:
            if len(lanes) > 1:
                e.add_note(f"in micro-batch {i} of {len(lanes)}")
            raise
    return valid


def num_batches(batches: Batches) -> int:
    """The number of micro-batches that the user gave, whatever the number of slices; 1 for what is no sequence of batches."""
    return len(batches) if isinstance(batches, Sequence) and not isinstance(batches, str) else 1


def cut_rows(batch: dict[str, Tensor], num_slices: int) -> list[dict[str, Tensor]]:
    """`batch` cut along dimension 0 into `num_slices` micro-batches, the first ones a row longer where it does not divide; into
    fewer if it has fewer rows. Scalars, and entries of one row for all, go to each.

    Raises BatchError where an entry has another number of rows: nobody knows how to cut it.
    """
    rows = {key: t.shape[0] for key, t in batch.items() if t.dim() and t.shape[0] > 1}
    num_slices = min([num_slices, *rows.values()])
    if num_slices == 1 or not rows:
        return [batch]
    if len(set(rows.values())) > 1:
        raise BatchError(f"slices={num_slices} cuts a batch along its rows, and its entries have different numbers of them: "
                         f"{', '.join(f'{key} {n}' for key, n in rows.items())}; use slices=1 for such batches")
    cut = {key: t.tensor_split(num_slices) if key in rows else (t,) * num_slices for key, t in batch.items()}
    return [{key: parts[i] for key, parts in cut.items()} for i in range(num_slices)]
