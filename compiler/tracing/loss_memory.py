"""How many bytes the epilogue holds at most, forward and backward, by the number of chunks: run on meta tensors and counted.

What is counted is what autograd and the kernels' callers allocate: the logits in every dtype they are cast to, what is saved,
gradients. A module that cannot run on meta (a Triton kernel) counts as one that saves its input, as the tracer assumes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from slidedp.compiler.layergraph import LossHead, chunk_rows
from slidedp.compiler.tracing.chunked_loss import Head, cut_head, find_head
from slidedp.compiler.tracing.metering import LiveBytes

MEASURED_CHUNKS = (2, 8, 64, 512)


def measure_head(
    graph: fx.Graph, model: nn.Module, inputs: Sequence[Tensor], params: Sequence[str], device: torch.device
) -> LossHead | None:
    """The epilogue's `graph` with a `model` and `inputs` on meta, as it would run on `device`; `params`: names of those it reads.

    If it cannot run on meta: an estimate where the logits can be cut, else None, and the plan goes by what autograd saves.
    """
    head = find_head(graph, model)
    weights = [operator.attrgetter(name)(model) for name in params]
    counts = [n for n in MEASURED_CHUNKS if n <= head.rows] if isinstance(head, Head) else []
    try:
        whole = _peak_bytes(graph, model, inputs, weights)
        if not isinstance(head, Head):
            return LossHead(0, 0, ((1, whole),), head)
        cut = [_peak_bytes(cut_head(graph, head, n, device), model, inputs, weights) for n in counts]
        return LossHead(head.rows, head.vocab, ((1, whole), *zip(counts, cut, strict=True)))
    except Exception:  # whatever a user's code does on meta
        return _estimate(head, counts, inputs, weights) if isinstance(head, Head) else None


def _estimate(head: Head, counts: Sequence[int], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> LossHead:
    """FP32 gradients of the weights and a copy, what came in three times over, and 16 bytes a logit."""
    around = sum(6 * w.numel() for w in weights) + 3 * sum(t.nbytes for t in inputs)
    peaks = [(n, around + 16 * chunk_rows(head.rows, n) * head.vocab) for n in (1, *counts)]
    return LossHead(head.rows, head.vocab, tuple(peaks))


def _peak_bytes(graph: fx.Graph, model: nn.Module, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> int:
    given = [torch.empty_like(t, device="meta").requires_grad_(t.requires_grad) for t in inputs]
    sources = [t for t in (*given, *weights) if t.requires_grad]
    alive = LiveBytes((*given, *weights))
    with torch.enable_grad(), alive:
        (loss,) = _OnMeta(model, graph=graph).run(*given)
        if sources and loss.requires_grad:
            grads = torch.autograd.grad(loss, sources, torch.ones_like(loss), allow_unused=True)
            del grads
    return alive.peak


class _OnMeta(fx.Interpreter):
    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().call_module(target, args, kwargs)
        except Exception:
            return _Assumed.apply(args[0])  # type: ignore[no-untyped-call]


class _Assumed(torch.autograd.Function):
    """An output and a gradient like the input, which is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])
