"""The chunked head alone, against torch.nn.functional: losses and gradients, and Liger's kernel without Triton."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import family
from torch import Tensor
from training import norm_wise

from slidedp.compiler.layergraph import LossHead, chunk_rows
from slidedp.compiler.tracing import liger
from slidedp.compiler.tracing.linear_cross_entropy import LinearCrossEntropy
from slidedp.compiler.tracing.tracer import trace

pytestmark = pytest.mark.cpu

ROWS, WIDTH, VOCAB = 37, 16, 50


def plain(x: Tensor, *_: Tensor) -> Tensor:
    return x.float()


def softcap(x: Tensor, *_: Tensor) -> Tensor:
    return (torch.tanh(x / 5.0) * 5.0).float()


def learned(x: Tensor, temperature: Tensor, shift: Tensor) -> Tensor:
    return (x * temperature + shift).float()


def in_its_own_dtype(x: Tensor, *_: Tensor) -> Tensor:
    return x


def operands(dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"hidden": (ROWS, WIDTH), "weight": (VOCAB, WIDTH), "bias": (VOCAB,), "temperature": (1,), "shift": (VOCAB,)}
    tensors = {name: torch.randn(shape, generator=g).to(dtype).requires_grad_() for name, shape in shapes.items()}
    target = torch.randint(0, VOCAB, (ROWS,), generator=g)
    target[5:12] = -100  # several chunks of the finest cuts have no valid target at all
    return tensors, target


def both(
    row_fn: Callable[..., Tensor], num_chunks: int, dtype: torch.dtype, seed: float = 1.0, frozen: tuple[str, ...] = (),
    is_mean: bool = True, smoothing: float = 0.0,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss and gradients by name, unchunked and in chunks."""
    results = []
    for chunked in (False, True):
        t, target = operands(dtype)
        for name in frozen:
            t[name].requires_grad_(False)
        extras = (t["temperature"], t["shift"]) if row_fn is learned else ()
        if chunked:
            op = LinearCrossEntropy(num_chunks, row_fn, row_fn is plain and not smoothing, is_mean, -100, smoothing)
            loss = op(t["hidden"], t["weight"], t["bias"], target, *extras)
        else:
            logits = row_fn(F.linear(t["hidden"], t["weight"], t["bias"]), *extras)
            loss = F.cross_entropy(logits, target, reduction="mean" if is_mean else "sum", label_smoothing=smoothing)
        loss.backward(torch.full_like(loss, seed))
        results.append({"loss": loss.detach()} | {n: x.grad for n, x in t.items() if x.grad is not None})
    return results[0], results[1]


@pytest.mark.parametrize("num_chunks", [2, 3, 8, 37, 1000])
@pytest.mark.parametrize("row_fn", [plain, softcap, learned, in_its_own_dtype])
def test_float32_equals_unchunked(row_fn: Callable[..., Tensor], num_chunks: int) -> None:
    for is_mean in (True, False):
        want, got = both(row_fn, num_chunks, torch.float32, seed=0.3, is_mean=is_mean)
        assert want.keys() == got.keys()
        assert {n: d for n in want if (d := norm_wise(got[n], want[n])) > 1e-6} == {}


@pytest.mark.parametrize("num_chunks", [2, 8, 37])
@pytest.mark.parametrize("row_fn", [plain, softcap, learned, in_its_own_dtype])
def test_bfloat16_is_as_close_to_exact_as_unchunked(row_fn: Callable[..., Tensor], num_chunks: int) -> None:
    """Against the same values in FP32: a chunk's logits are rounded as unchunked ones are, so the errors are of one size.

    Where a sum over tokens is rounded once unchunked, chunks round each part (the CPU, weights) or nothing (FP32 sums).
    """
    exact, _ = both(row_fn, num_chunks, torch.float32)  # the operands of both are BF16 numbers or near them
    want, got = both(row_fn, num_chunks, torch.bfloat16)
    for name in want:
        assert norm_wise(got[name].float(), want[name].float()) < 2 * 2**-8, name  # two roundings to 8 bits, each once more
        error, usual = (norm_wise(x[name].float(), exact[name]) for x in (got, want))
        assert error < 1.5 * usual + 2 * 2**-8, name


def test_label_smoothing() -> None:
    for row_fn in (plain, softcap):
        want, got = both(row_fn, 5, torch.float32, smoothing=0.1)
        assert {n: d for n in want if (d := norm_wise(got[n], want[n])) > 1e-6} == {}


@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("weight", "bias", "hidden"), ("temperature",)])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[str, ...]) -> None:
    want, got = both(learned, 4, torch.float32, frozen=frozen)
    assert want.keys() == got.keys()
    assert not set(frozen) & set(got)


def test_sizes_of_chunks() -> None:
    assert [chunk_rows(10, n) for n in (1, 2, 3, 10, 99)] == [10, 5, 4, 1, 1]
    assert [chunk_rows(1000, n) for n in (1, 2, 3, 20)] == [1000, 512, 384, 50]
    op = LinearCrossEntropy(3, plain, True, True)
    assert [(s.start, s.stop) for s in op.chunks(torch.empty(1000, 1))] == [(0, 384), (384, 768), (768, 1000)]


# ---- Liger's kernel ----


class Kernel:
    """Liger's kernel in torch: same arguments, same effect."""

    def __init__(self, **renamed: str) -> None:
        names = [renamed.get(name, name) for name in sorted(liger.PARAMETERS)]
        self.fn = lambda: None
        self.fn.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(num_warps: int, **a: Any) -> None:
            assert a.keys() == liger.PARAMETERS
            assert a["reduction"] == "sum"
            logits, target, losses = a["X_ptr"], a["Y_ptr"], a["loss_ptr"]
            assert grid == (len(target),)
            assert a["BLOCK_SIZE"] >= a["n_cols"] == logits.shape[1] == a["X_stride"]
            leaf = logits.to(torch.float32, copy=True).requires_grad_()
            with torch.enable_grad():
                each = F.cross_entropy(leaf, target, reduction="none", ignore_index=a["ignore_index"])
                (grad,) = torch.autograd.grad(each.sum(), leaf)
            logits.copy_(grad)
            losses.copy_(each.detach())

        return launch


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], None]]:
    """`installed(kernel)`: Liger is there, and that is its kernel."""

    def install(kernel: Kernel) -> None:
        module = types.ModuleType("liger_kernel.ops.cross_entropy")
        module.liger_cross_entropy_kernel = kernel
        monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
        monkeypatch.setitem(sys.modules, "liger_kernel.ops", types.ModuleType("liger_kernel.ops"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        liger.kernel.cache_clear()

    yield install
    liger.kernel.cache_clear()


def test_ligers_kernel_is_given_what_it_takes(installed: Callable[[Kernel], None]) -> None:
    installed(Kernel())
    assert liger.available(torch.device("cuda"))
    assert not liger.available(torch.device("cpu"))
    for is_mean in (True, False):
        want, _ = both(plain, 1, torch.float32, 0.3, is_mean=is_mean)
        t, target = operands(torch.float32)
        loss = LinearCrossEntropy(5, plain, True, is_mean, fused=True)(t["hidden"], t["weight"], t["bias"], target)
        loss.backward(torch.full_like(loss, 0.3))
        assert norm_wise(loss.detach(), want["loss"]) < 1e-6
        assert max(norm_wise(t[n].grad, want[n]) for n in ("hidden", "weight", "bias")) < 1e-6


def test_an_unknown_kernel_of_ligers_is_left_alone(installed: Callable[[Kernel], None]) -> None:
    installed(Kernel(n_cols="num_columns"))
    assert not liger.available(torch.device("cuda"))


def test_ligers_kernel_is_in_the_prediction(installed: Callable[[Kernel], None]) -> None:
    """In place: a chunk's logits once, where torch holds two FP32 copies."""
    with torch.device("meta"):
        model = family("llama", vocab_size=32768, num_hidden_layers=1, max_position_embeddings=2048)
    ids = torch.zeros(4, 1024, dtype=torch.long)

    def head() -> LossHead:
        batch = {"input_ids": ids, "labels": ids}
        return trace(model, batch, compute_dtype=torch.bfloat16, device=torch.device("cuda")).graph.head

    without = head()
    installed(Kernel())
    assert head().peak_bytes(1) == without.peak_bytes(1)
    assert without.peak_bytes(2) - head().peak_bytes(2) == pytest.approx((8 - 2) * 2048 * 32768, rel=0.01)
