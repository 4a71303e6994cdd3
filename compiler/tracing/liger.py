"""Liger's cross-entropy kernel, where it is installed: loss and gradient of BF16 logits in place, in two reads and a write.

Only the kernel is used. Liger's own fused linear cross-entropy (0.8.5) counts the valid tokens with ``.item()`` and compares
the incoming gradient with ``torch.equal``: each stops the thread that feeds the GPU until the whole forward has run. With
``reduction="sum"`` the kernel needs no count.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

PARAMETERS = frozenset({
    "X_ptr", "X_stride", "Y_ptr", "Y_stride", "weight_ptr", "loss_ptr", "z_loss_ptr", "loss_stride", "token_accuracy_ptr",
    "token_accuracy_stride", "predicted_tokens_ptr", "predicted_tokens_stride", "n_cols", "n_non_ignore",
    "sum_non_ignore_weight", "weight_sum", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap",
    "RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS", "BLOCK_SIZE", "HAS_WEIGHT", "HAS_SOFTCAPPING",
    "HAS_GRADIENTS",
})  # fmt: skip
"""Arguments of the kernel that this file knows. A kernel with others is not called."""

MAX_BLOCK = 32768
"""Liger's own limit: larger blocks spill registers."""


@cache
def kernel() -> Any | None:
    """The kernel, or None where Liger is not installed, cannot be imported, or has another one."""
    try:
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as found
    except Exception:  # without a driver Triton fails in ways of its own
        return None
    known = frozenset(inspect.signature(getattr(found, "fn", found)).parameters)
    return found if known == PARAMETERS else None


def available(device: torch.device) -> bool:
    return device.type == "cuda" and kernel() is not None


def cross_entropy_(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The loss of each row of `logits` ``[rows, classes]``, in FP32; `logits` become the gradient of their sum."""
    num_rows, num_classes = logits.shape
    losses = torch.zeros(num_rows, dtype=torch.float32, device=logits.device)
    launch = kernel()
    if logits.is_meta or launch is None:
        assert logits.is_meta, "asked for without a kernel"
        return losses
    launch[(num_rows,)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=target, Y_stride=target.stride(0), weight_ptr=None, loss_ptr=losses,
        z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0, predicted_tokens_ptr=None,
        predicted_tokens_stride=0, n_cols=num_classes, n_non_ignore=0, sum_non_ignore_weight=0, weight_sum=0.0,
        ignore_index=ignore_index, lse_square_scale=0.0, label_smoothing=0.0, reduction="sum", softcap=None,
        RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False, RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(MAX_BLOCK, 1 << (num_classes - 1).bit_length()), HAS_WEIGHT=False, HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=True, num_warps=32,
    )  # fmt: skip
    return losses
