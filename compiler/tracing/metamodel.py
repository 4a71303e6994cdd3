"""Puts the user's model on meta tensors for a moment: its Python runs, nothing is computed, and nothing of it changes.

Parameters are replaced in place by meta tensors of the compute dtype, buffers by meta tensors of their own; on exit the model
is as it was, whatever its Python did meanwhile (cached tables, counters, hooks that install themselves).
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from slidedp.compiler.errors import TraceError

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@dataclass
class MetaModel:
    """Names of the meta tensors that stand for the model's state, and the real ones they stand for (tied ones once)."""

    params: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    stand_ins: dict[int, Tensor] = field(default_factory=dict)
    """id of a real tensor -> the meta tensor that replaces it."""
    names: dict[int, str] = field(default_factory=dict)
    """id of a meta tensor -> canonical name. Real tensors are in :attr:`real_names`."""
    real_names: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, real: Tensor, stand_in: Tensor) -> None:
        if isinstance(real, nn.Parameter):
            self.params[name] = real
        else:
            self.buffers[name] = real
        self.stand_ins[id(real)] = stand_in
        self.names[id(stand_in)] = self.real_names[id(real)] = name


def check_params(model: nn.Module) -> None:
    """Raises TraceError for a parameter that can have no flat FP32 master copy: naming it and what to do instead."""
    for name, p in model.named_parameters():
        _check_param(name, p)
    for name, m in model.named_modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and (m.max_norm is not None or m.sparse):
            option = "sparse=True" if m.sparse else "max_norm"
            raise TraceError(f"{name or 'the model'} is an embedding with {option}, which works on the weights behind the "
                             "optimizer's back; set it to the default")  # fmt: skip


def _check_param(name: str, p: nn.Parameter) -> None:
    if is_lazy(p):
        raise TraceError(f"parameter {name} is not initialised yet; run one forward of the model before compiling it")
    if p.layout is not torch.strided:
        raise TraceError(f"parameter {name} is sparse ({p.layout}); make it dense, e.g. with .to_dense()")
    if p.is_complex():
        raise TraceError(f"parameter {name} is complex ({p.dtype}); store it as torch.view_as_real(...) instead")
    if not p.is_floating_point() or p.dtype.itemsize == 1 or type(p.data) not in (Tensor, nn.Parameter):
        raise TraceError(
            f"parameter {name} is not a plain floating-point tensor ({type(p.data).__name__}, {p.dtype}); full-parameter "
            "fine-tuning needs dequantised weights: load the model without quantisation, or keep the tensor as a buffer"
        )


@contextmanager
def on_meta(model: nn.Module, compute_dtype: torch.dtype) -> Iterator[MetaModel]:
    """`model` with meta tensors for parameters (floating ones in `compute_dtype`) and buffers, for the `with` block.

    Restores every module's attributes, and the random states of torch (CPU) and Python. Raises TraceError when the
    block drew from Python's `random`, whose choice a trace would freeze.
    """
    meta = MetaModel()
    for name, p in model.named_parameters():
        empty = torch.empty(p.shape, dtype=compute_dtype, device="meta")
        meta.add(name, p, nn.Parameter(empty, requires_grad=p.requires_grad))
    for name, b in model.named_buffers():
        meta.add(name, b, b.detach().to("meta", copy=True))
    saved = [_snapshot(m) for m in model.modules()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    try:
        for m in model.modules():
            tables: tuple[dict[str, Any], ...] = (m._parameters, m._buffers)
            for table in tables:
                for key, t in table.items():
                    if t is not None:
                        table[key] = meta.stand_ins[id(t)]
        with no_triton():
            yield meta
    finally:
        for snapshot in saved:
            _restore(*snapshot)
        torch.set_rng_state(torch_state)
        drew = random.getstate() != python_state
        random.setstate(python_state)
    if drew:
        raise TraceError(
            f"{type(model).__name__}.forward draws from Python's `random`: the choice would be the same in every step; "
            "use torch.rand inside a layer"
        )


@contextmanager
def no_triton() -> Iterator[None]:
    """Triton kernels do nothing instead of running: on a meta tensor one would read address 0 of the GPU and end the process's
    use of it. What they would write has no values here anyway, only shapes, which the Python around them gives.

    On a tensor with values they raise.
    """
    launchers = {("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")}
    classes = [getattr(sys.modules[module], name) for module, name in launchers if module in sys.modules]
    before = [(cls, cls.run) for cls in classes]

    def skip(kernel: Any, *args: object, **kwargs: object) -> None:
        with torch._C.DisableTorchFunction():  # the recorder says that tensors are where they would be
            given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            has_values = any(not a.is_meta for a in given)
        if has_values:
            raise RuntimeError(f"Triton kernel {getattr(kernel, '__name__', kernel)} cannot run while a model is traced")

    for cls in classes:
        cls.run = skip
    try:
        yield
    finally:
        for cls, run in before:
            cls.run = run


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Whatever the block does to attributes of `model`'s modules, and to containers that those hold, is undone at its end."""
    saved = [_snapshot(m) for m in model.modules()]
    try:
        yield
    finally:
        for snapshot in saved:
            _restore(*snapshot)


def _snapshot(m: nn.Module) -> tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]:
    attributes = dict(m.__dict__)
    containers = [v for v in attributes.values() if type(v) in _CONTAINERS]
    return m, attributes, [(v, list(v.items()) if isinstance(v, dict) else list(v)) for v in containers]


def _restore(m: nn.Module, attributes: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    for container, content in contents:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(content)
    m.__dict__.clear()
    m.__dict__.update(attributes)
