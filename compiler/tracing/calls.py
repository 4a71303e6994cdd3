"""Facts about torch calls: which turn tensors into Python values, which draw random numbers, which arguments name devices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._device import _device_constructors

CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__")
CONCRETE = frozenset((*CONVERSIONS, "item", "tolist", "equal", "allclose", "is_nonzero"))
"""Calls that turn tensors into Python values."""
RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential",
    "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool3d", "geometric", "gumbel_softmax",
    "log_normal", "multinomial", "native_dropout", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "random", "randperm", "rrelu", "uniform",
})  # fmt: skip
"""Names (less underscores) of calls that draw random numbers."""


def on_device(func: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """The same call with `device` for every device it names, and given to constructors that name none."""

    def swap(a: Any) -> Any:
        if isinstance(a, torch.device):
            return device
        return type(a)(swap(x) for x in a) if type(a) in (list, tuple) else a

    args = tuple(swap(a) for a in args)
    if func is Tensor.to and len(args) > 1 and type(args[1]) in (str, int):
        args = (args[0], device, *args[2:])
    if kwargs.get("device") is not None or func in _device_constructors():
        kwargs = {**kwargs, "device": device}
    return args, kwargs


def importable(func: Any) -> Any:
    """`func`, or a wrapper of it where fx's generated code could not find it by its qualified name."""
    try:
        if operator.attrgetter(fx.node._get_qualified_name(func).removeprefix("torch."))(torch) is func:
            return func
    except (AttributeError, RuntimeError):
        pass

    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    call.__name__ = call.__qualname__ = getattr(func, "__name__", "call")
    return call


def tensors(a: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(a, Tensor):
        yield a
    elif isinstance(a, (list, tuple)):
        for x in a:
            yield from tensors(x)
    elif isinstance(a, dict):
        for x in a.values():
            yield from tensors(x)


def tree(f: Callable[[Tensor], Any], a: Any) -> Any:
    """`a` with `f` applied to the tensors in nested lists and tuples."""
    if isinstance(a, Tensor):
        return f(a)
    return type(a)(tree(f, x) for x in a) if isinstance(a, (list, tuple)) else a


def shapes(a: Any) -> tuple[Any, ...]:
    """Shape, dtype and requires_grad of each tensor in `a`."""
    return tuple((tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors(a))
