"""What torch's operations return on meta tensors, worked out once for arguments alike.

Many of torch's meta kernels are Python (a LayerNorm takes 0.9 ms, an addition 0.16 ms), and a model's layers repeat the same few
hundred calls. An operation that neither writes nor returns a view of what it is given makes fresh tensors, whose shapes, strides
and dtypes follow from those of its arguments: they are made without asking its kernel again.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slidedp.compiler.tracing.calls import tensors

_PLAIN = (type(None), bool, float, str, torch.dtype, torch.layout, torch.memory_format)
_META = torch.device("meta")
_NUM_REMEMBERED = 1 << 14


class MetaKernels(TorchDispatchMode):
    """Operations in its `with` block go to :func:`call`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``. For what a dispatch mode is given, below autograd."""
    if _makes_fresh_tensors(func):
        try:
            key = _key(args), tuple((name, _key(a)) for name, a in kwargs.items())
        except _NoKey:
            return func(*args, **kwargs)
        made = _made(func, *key, torch.get_default_dtype())
        if made is not None:
            return _fresh(made)
    return func(*args, **kwargs)


class _NoKey(Exception):
    """Of an argument that is no tensor on meta and no plain value."""


class _Like(NamedTuple):
    """All that a result can depend on, of a tensor on meta."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Plain(NamedTuple):
    """With its type: 1 and 1.0 and True are equal."""

    kind: type
    value: Any


@cache
def _makes_fresh_tensors(func: Any) -> bool:
    """True for torch's own operations without side effects whose results share no memory with their arguments."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    by_data = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    schema = func._schema
    return not by_data & set(func.tags) and not any(a.alias_info for a in (*schema.arguments, *schema.returns))


def _key(a: Any) -> Any:
    kind = type(a)
    if kind is Tensor or kind is nn.Parameter:
        if not a.is_meta or a.layout is not torch.strided or a.dtype.is_complex:
            raise _NoKey
        return _Like(a.shape, a.stride(), a.dtype)
    if kind is int:
        return a
    if kind is tuple or kind is list:
        return tuple(map(_key, a))
    if kind in _PLAIN or (kind is torch.device and a == _META):
        return _Plain(kind, a)
    raise _NoKey


@lru_cache(_NUM_REMEMBERED)
def _made(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], default_dtype: torch.dtype) -> Any:
    """What the kernel returns: a tuple, a list or one thing, each a :class:`_Like` or None; None if it is something else."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        given = _fresh(args), {name: _fresh(a) for name, a in kwargs}
        if not any(True for _ in tensors(given)) and given[1].get("device") != _META:
            return None  # nothing says that it is made on meta
        out = func(*given[0], **given[1])
        several = isinstance(out, (tuple, list))
        made = [t if t is None else _described(t) for t in (out if several else (out,))]
    storages = [t.untyped_storage()._cdata for t in tensors((given, out))]
    if False in made or len(set(storages)) < len(storages):
        return None
    return type(out)(made) if several else made[0]


def _described(t: Any) -> _Like | bool:
    """False unless it is a tensor on meta that fills memory of its own."""
    if type(t) is not Tensor or not t.is_meta or t.layout is not torch.strided or t.dtype.is_complex:
        return False
    like = _Like(t.shape, t.stride(), t.dtype)
    whole = t.storage_offset() == 0 and t.untyped_storage().nbytes() == _fresh(like).untyped_storage().nbytes()
    return like if whole else False


def _fresh(a: Any) -> Any:
    """A new tensor for each description in nested tuples and lists."""
    if isinstance(a, _Like):
        return torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=_META)
    if isinstance(a, _Plain):
        return a.value
    return type(a)(map(_fresh, a)) if isinstance(a, (tuple, list)) else a
