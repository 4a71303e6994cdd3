"""Sends what a model does to a :class:`MetaRecorder`: torch calls by its function mode, the two that no mode sees by patching.

Calls of modules and of autograd functions never reach ``__torch_function__``, so `nn.Module.__call__` and
`torch.autograd.Function.apply` are replaced for as long as the recording lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slidedp.compiler.tracing.recorder import MetaRecorder


@contextmanager
def recording(recorder: MetaRecorder) -> Iterator[MetaRecorder]:
    """Torch calls, calls of leaf modules and of autograd functions go to `recorder` for the `with` block."""
    apply = torch.autograd.Function.__dict__["apply"]

    def module_call(m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # _call_impl: hooks run, a compiled version of the module (Module.compile) does not
        if recorder.is_leaf(m):
            return recorder.call_leaf(m, args, kwargs)
        return m._call_impl(*args, **kwargs)

    def function_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if recorder.recording_calls:
            return recorder.call_function(cls, apply.__func__, args, kwargs)
        return apply.__func__(cls, *args, **kwargs)

    with (
        torch.enable_grad(),
        _patched(nn.Module, "__call__", module_call),
        _patched(torch.autograd.Function, "apply", classmethod(function_apply)),
        recorder,
    ):
        yield recorder


@contextmanager
def _patched(owner: type, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
