"""Head and loss in token chunks: the logits of one chunk at a time, their gradients at once, then the next chunk.

The head is linear and the loss a sum over tokens, so that the loss's own gradient only scales the others. Both are computed
in one pass, as Liger's fused linear cross-entropy does, but no value ever goes to the host (liger.py says where
Liger's does, and what of it is used).

The weight's gradient is summed over chunks in FP32, where unchunked BF16 rounds one sum once. That of the hidden states is
rounded once, as unchunked, and once more if what it is scaled by afterwards is no power of two: the loss's gradient (several
ranks with unequal counts), and with Liger's kernel one over the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slidedp.compiler.layergraph import chunk_rows
from slidedp.compiler.tracing import liger


@dataclass(frozen=True)
class LinearCrossEntropy:
    """``F.cross_entropy(row_fn(F.linear(hidden, weight, bias), *extras), target)`` in at most `num_chunks` chunks of rows.

    `row_fn`: what is done to the logits ``[rows, vocab]``, each row by itself; `plain`: it makes them FP32, nothing else.
    `fused`: plain logits go through Liger's kernel.
    """

    num_chunks: int
    row_fn: Callable[..., Tensor]
    plain: bool
    is_mean: bool
    ignore_index: int = -100
    label_smoothing: float = 0.0
    fused: bool = False

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *extras: Tensor) -> Tensor:
        """The scalar loss of ``hidden [rows, width]`` and ``target [rows]``; differentiable in all but the target."""
        tensors = (hidden, weight, bias, *extras)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _Differentiable.apply(self, target, *tensors)  # type: ignore[no-any-return,no-untyped-call]
        losses = (self.forward(hidden[rows], weight, bias, target[rows], extras) for rows in self.chunks(hidden))
        return self.total(losses, self.count(target))

    def chunks(self, hidden: Tensor) -> Iterator[slice]:
        num_rows = hidden.shape[0]
        step = max(1, chunk_rows(num_rows, self.num_chunks))
        starts = range(0, max(1, num_rows), step)
        for lo in starts[:1] if hidden.is_meta else starts:  # on meta only the memory is of interest: the first needs most
            yield slice(lo, min(lo + step, num_rows))

    def count(self, target: Tensor) -> Tensor | None:
        """Number of valid targets if the loss is their mean, on the device."""
        return (target != self.ignore_index).sum() if self.is_mean else None

    def total(self, losses: Iterator[Tensor], count: Tensor | None) -> Tensor:
        """Summed in FP32 at least, and rounded once to the losses' type."""
        first = next(losses)
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for loss in losses:
            total = total + loss
        return (total if count is None else total / count).to(first.dtype)

    def forward(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, extras: Sequence[Tensor]
    ) -> Tensor:
        """The loss of one chunk, summed."""
        if self.plain:
            return F.nll_loss(log_softmax(hidden, weight, bias), target, reduction="sum", ignore_index=self.ignore_index)
        return self.loss(F.linear(hidden, weight, bias), target, extras)

    def loss(self, logits: Tensor, target: Tensor, extras: Sequence[Tensor]) -> Tensor:
        return F.cross_entropy(self.row_fn(logits, *extras), target, reduction="sum", ignore_index=self.ignore_index,
                               label_smoothing=self.label_smoothing)

    def gradients(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, extras: Sequence[Tensor], scale: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss of one chunk, and the gradients of `scale` times it: of the logits, and of the `extras` that want one."""
        if self.plain:
            return *self.plain_gradient(hidden, weight, bias, target, scale), []
        with torch.no_grad():
            logits = F.linear(hidden, weight, bias)
        with torch.enable_grad():
            given = [e.detach().requires_grad_(e.requires_grad) for e in extras]
            loss = self.loss(logits.requires_grad_(), target, given)
        wanted = [logits, *(e for e in given if e.requires_grad)]
        of_logits, *of_extras = torch.autograd.grad(loss, wanted, scale.to(loss.dtype))
        return loss.detach(), of_logits, of_extras

    def plain_gradient(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for plain logits in place: two FP32 copies at a time where autograd needs three and the logits.

        With Liger's kernel nothing but the logits, and `scale` is left to the caller.
        """
        if self.fused:
            logits = F.linear(hidden, weight, bias)
            return liger.cross_entropy_(logits, target, self.ignore_index).sum(), logits
        log_p = log_softmax(hidden, weight, bias)
        loss = F.nll_loss(log_p, target, reduction="sum", ignore_index=self.ignore_index)
        valid = target != self.ignore_index
        of_row = torch.where(valid, scale, torch.zeros_like(scale)).unsqueeze(1)
        grad = log_p.exp_().mul_(of_row)
        grad.scatter_add_(1, torch.where(valid, target, torch.zeros_like(target)).long().unsqueeze(1), -of_row)
        return loss, grad.to(hidden.dtype)


def log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Log-softmax of the logits, in FP32; written so that at most two copies of them are alive."""
    return F.log_softmax(F.linear(hidden, weight, bias).float(), dim=1)


class _Differentiable(torch.autograd.Function):
    """Computes the gradients of the loss in forward, with the chunk's logits at hand, and scales them in backward."""

    @staticmethod
    def forward(ctx: Any, spec: LinearCrossEntropy, target: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None,
                *extras: Tensor) -> Tensor:  # fmt: skip
        inputs = (hidden, weight, bias, *extras)
        wanted = [t is not None and t.requires_grad for t in inputs]
        grads: list[Tensor | None] = [_accumulator(t) if t is not None and want else None
                                      for t, want in zip(inputs, wanted, strict=True)]
        if wanted[0]:
            grads[0] = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        count = spec.count(target)
        scale = torch.ones((), dtype=torch.float32, device=hidden.device) if count is None else count.float().reciprocal()

        def losses() -> Iterator[Tensor]:
            for rows in spec.chunks(hidden):
                loss, of_logits, of_extras = spec.gradients(hidden[rows], weight, bias, target[rows], extras, scale)
                _add(grads, rows, hidden[rows], weight, of_logits, of_extras)
                del of_logits, of_extras  # before the next chunk's are made
                yield loss

        total = spec.total(losses(), count)
        ctx.grads, ctx.dtypes = grads, [t.dtype if t is not None else None for t in inputs]
        ctx.scale = scale if spec.fused and spec.plain else None
        return total

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # scaled in place: there is no second time
        assert grads is not None, "the head's gradients can be asked for once"
        if ctx.scale is not None:
            seed = seed * ctx.scale
        out: list[Tensor | None] = []
        for dtype in ctx.dtypes:
            grad = grads.pop(0)  # an FP32 sum is freed as soon as it has been rounded
            out.append(None if grad is None else grad.mul_(seed).to(dtype))
        return None, None, *out


def _accumulator(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32), device=t.device)


def _add(
    grads: list[Tensor | None], rows: slice, hidden: Tensor, weight: Tensor, of_logits: Tensor, of_extras: list[Tensor]
) -> None:
    """Adds one chunk's part to the gradients of hidden states, weight, bias and extras."""
    of_hidden, of_weight, of_bias, *rest = grads
    if of_hidden is not None:
        torch.mm(of_logits, weight, out=of_hidden[rows])
    if of_weight is not None:
        _add_product(of_weight, of_logits, hidden)
    if of_bias is not None:
        of_bias.add_(of_logits.sum(0, dtype=of_bias.dtype))
    for total, part in zip((g for g in rest if g is not None), of_extras, strict=True):
        total.add_(part)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a.T @ b`` in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    elif total.is_meta:
        return  # torch 2.11 has no such product there; it takes no memory of its own
    elif total.device.type == "cpu":
        total.add_(a.t() @ b)  # the CPU has no product of this kind: each chunk's is rounded
    else:
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
