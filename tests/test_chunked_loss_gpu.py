"""Head and loss in chunks on a GPU, with Liger's kernel where it is installed and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training import norm_wise

from slidedp.compiler.tracing import liger
from slidedp.compiler.tracing.linear_cross_entropy import LinearCrossEntropy

pytestmark = pytest.mark.gpu

ROWS, WIDTH, VOCAB, CHUNKS = 4096, 256, 50_000, 8
FUSED = pytest.param(True, marks=pytest.mark.skipif(not liger.available(torch.device("cuda")), reason="needs Liger"))


def as_float(x: Tensor) -> Tensor:
    return x.float()


def softcap(x: Tensor) -> Tensor:
    return (torch.tanh(x / 5.0) * 5.0).float()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, device="cuda", generator=g) for n in (ROWS, VOCAB))
    target = torch.randint(0, VOCAB, (ROWS,), device="cuda", generator=g)
    target[1000:2000] = -100  # one chunk and more without a valid token
    return hidden, weight / 8, target


def gradients(op: Callable[..., Tensor], dtype: torch.dtype, seed: float) -> list[Tensor]:
    hidden, weight, target = operands()
    hidden, weight = (t.to(dtype).requires_grad_() for t in (hidden, weight))
    loss = op(hidden, weight, None, target)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight], torch.full_like(loss, seed))]


@pytest.mark.parametrize("seed", [1.0, 0.3])
@pytest.mark.parametrize(("row_fn", "fused"), [(as_float, False), pytest.param(as_float, *FUSED.values, marks=FUSED.marks),
                                               (softcap, False)])  # fmt: skip
def test_bfloat16_equals_all_logits_at_once(row_fn: Callable[..., Tensor], fused: bool, seed: float) -> None:
    """Norm-wise, from the same in FP32: no further than twice what unchunked BF16 is."""

    def whole(h: Tensor, w: Tensor, _: None, target: Tensor) -> Tensor:
        return F.cross_entropy(row_fn(F.linear(h, w)), target)

    chunked = LinearCrossEntropy(CHUNKS, row_fn, row_fn is as_float, True, fused=fused)
    exact, want, got = (gradients(op, dtype, seed) for op, dtype in ((whole, torch.float32), (whole, torch.bfloat16),
                                                                     (chunked, torch.bfloat16)))  # fmt: skip
    assert norm_wise(got[0], want[0]) < 1e-5
    for ours, usual, true in zip(got[1:], want[1:], exact[1:], strict=True):
        assert norm_wise(ours.float(), true) < 2 * norm_wise(usual.float(), true)


@pytest.mark.parametrize("fused", [False, FUSED])
def test_the_device_is_never_waited_for_and_memory_is_a_chunks(fused: bool) -> None:
    op = LinearCrossEntropy(CHUNKS, as_float, True, True, fused=fused)
    gradients(op, torch.bfloat16, 1.0)  # kernels compiled, workspaces there
    hidden, weight, target = operands()
    hidden, weight = (t.to(torch.bfloat16).requires_grad_() for t in (hidden, weight))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = op(hidden, weight, None, target)
        grads = torch.autograd.grad(loss, [hidden, weight])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    peak = torch.cuda.max_memory_allocated() - before
    a_chunk = ROWS // CHUNKS * VOCAB
    sums = 4 * VOCAB * WIDTH + 2 * ROWS * WIDTH
    assert peak < sums + max((2 if fused else 8) * a_chunk, 2 * VOCAB * WIDTH) + (8 << 20)
    assert all(g.isfinite().all() for g in grads)
