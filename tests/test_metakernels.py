"""What operations return on meta is the same whether it is remembered or asked of torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES, PlainGPT, family, lm_batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slidedp.compiler.tracing import metakernels, metering
from slidedp.compiler.tracing.metakernels import MetaKernels
from slidedp.compiler.tracing.tracer import trace

pytestmark = pytest.mark.null


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X, Y, IDS = meta(2, 6, 8), meta(2, 6, 8).transpose(0, 1).contiguous().transpose(0, 1), meta(2, 6, dtype=torch.int64)
CALLS: dict[str, Callable[[], object]] = {
    "sum of strides": lambda: X + Y,
    "two of a kind": lambda: (X * 2.0, X * 2, X * True, IDS * 2, IDS * 2.0, IDS * True),
    "promotion": lambda: (X.bfloat16() + X, IDS / 3, IDS + X[..., 0]),
    "norm": lambda: torch.native_layer_norm(Y, (8,), None, None, 1e-5),
    "lists": lambda: (torch.cat([X, Y], 1), torch.stack([X, Y])),
    "loss": lambda: F.cross_entropy(X.flatten(0, 1), IDS.flatten() % 8),
    "made from nothing": lambda: (torch.arange(5, device="meta"), torch.zeros(3, dtype=torch.int8, device="meta")),
    "copies": lambda: (Y.clone(), Y.contiguous(), Y.to(torch.float64), X.to(X), F.dropout(X, 0.5)),
    "of a view": lambda: (X[:, 1:3].exp(), X.expand(2, 6, 8).tanh(), X[0, 0, :1].expand(5).neg()),
    "indices": lambda: (X.topk(2), X.max(-1), X.argmax(-1), F.embedding(IDS, meta(10, 4))),
    "complex": lambda: torch.view_as_real(torch.complex(X, X) * 1j),
}


def described(a: object) -> object:
    if isinstance(a, Tensor):
        return a.shape, a.stride(), a.dtype, a.device.type, a.storage_offset(), a.untyped_storage().nbytes()
    return type(a), [described(x) for x in a] if isinstance(a, (tuple, list)) else a


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_of_the_kernels(name: str) -> None:
    for dtype in (torch.float32, torch.float64):  # what integers are divided into
        torch.set_default_dtype(dtype)
        want = described(CALLS[name]())
        with MetaKernels():
            assert [described(CALLS[name]()) for _ in range(2)] == [want, want]


class Seen(TorchDispatchMode):
    """What reaches the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_only_fresh_results_are_remembered() -> None:
    """Views share memory, and writes happen, whoever asks; and what is not on meta is computed."""
    x, real = meta(4, 4), torch.rand(4)
    with MetaKernels():
        for _ in range(2):
            assert x.view(16).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
            version = x._version
            assert x.mul_(2) is x
            assert x._version == version + 1
            assert torch.equal(real + 1, torch.add(real, 1))
            one, other = x.exp(), x.exp()
            assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
            with pytest.raises(NotImplementedError, match="nonzero"):
                x.nonzero()
    torch.manual_seed(0)
    want = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(0)
    with MetaKernels():
        got = [torch.rand(3), torch.rand(3)]
    assert all(map(torch.equal, got, want))


def test_a_kernel_is_asked_once() -> None:
    x = meta(3, 5, 7)
    with Seen() as seen, MetaKernels():
        for _ in range(3):
            F.layer_norm(x, (7,)).transpose(0, 1).sigmoid()
    assert seen.names.count("native_layer_norm") == 0  # nor by way of an outer mode: what is there to see is tensors made
    assert seen.names.count("empty_strided") >= 6
    before = metakernels._made.cache_info()
    with MetaKernels():
        F.layer_norm(x, (7,)).transpose(0, 1).sigmoid()
    assert metakernels._made.cache_info().misses == before.misses


def test_gradients_flow_through_what_is_remembered() -> None:
    layer, x = nn.Linear(4, 4, device="meta"), meta(3, 4).requires_grad_()
    with MetaKernels():
        for _ in range(2):
            grads = torch.autograd.grad(F.gelu(layer(x)).sum(), [x, layer.weight, layer.bias])
            assert [g.shape for g in grads] == [x.shape, layer.weight.shape, layer.bias.shape]


@pytest.mark.parametrize(("name", "dtype"), [("gpt", torch.float32), ("gpt", torch.bfloat16),
                         *((name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(FAMILIES))])
def test_traces_are_the_same(name: str, dtype: torch.dtype) -> None:
    """Flops, bytes and the memory of the head."""
    model, batch = PlainGPT() if name == "gpt" else family(name), lm_batch("none" if name == "gpt" else "padded")

    def asked(func, args, kwargs):
        return func(*args, **kwargs)

    with patch.object(metering, "call", asked), patch.object(metakernels, "call", asked):
        want = trace(model, batch, compute_dtype=dtype)
    for _ in range(2):  # also when nothing is new any more
        got = trace(model, batch, compute_dtype=dtype)
        assert asdict(got.graph) == asdict(want.graph)
        for mine, theirs in zip(got.programs, want.programs, strict=True):
            assert mine.graph.python_code("self").src == theirs.graph.python_code("self").src
