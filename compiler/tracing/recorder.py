"""Runs a model's own Python on meta tensors and writes every call between layers into a `torch.fx.Graph`.

A ``TorchFunctionMode`` sees each torch call; layers, and glue modules that own parameters, are kept as ``call_module``
leaves, whose own Python runs only to learn the shapes of their outputs. What the model asks of a value is answered from
the sample batch and becomes a guard. DESIGN §3 has the rules; `torch.fx.Tracer` traces none of the Hugging Face families.

Each node's ``meta`` holds: ``index`` (program order), ``val`` (the meta tensor), ``storage`` (identity of its memory),
``after`` (in-place writers that must run first), ``writes`` (storages it writes), ``pinned`` (must keep its place among the
layers: draws random numbers or writes a buffer), ``effect`` (writes a buffer), ``projection`` (takes one tensor out of its
input, a tuple), ``params`` (names read by a leaf), ``flops``, ``saved`` (bytes autograd keeps, by storage), ``kind`` (module
class and shapes of a leaf).
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from slidedp.compiler.errors import TraceError
from slidedp.compiler.tracing.calls import CONCRETE, RANDOM, importable, on_device, shapes, tensors, tree
from slidedp.compiler.tracing.guards import BATCH, Guard, closure, describe, make_slice, summary
from slidedp.compiler.tracing.metakernels import MetaKernels
from slidedp.compiler.tracing.metamodel import MetaModel
from slidedp.compiler.tracing.metering import Meter, is_fusable_attention, storage_key

_META = torch.device("meta")
_SCALARS = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, type(...), enum.Enum)


class MetaRecorder(TorchFunctionMode):
    """One recording. Use inside `recording` (recording.py); `graph`, `layer_calls` and `guards` are the result.

    `is_layer(name, module)` selects the layers; `device` is where programs will run: what the model sees when it asks for
    a tensor's device, and what every device argument is recorded as.
    """

    def __init__(self, model: nn.Module, meta: MetaModel, batch: Mapping[str, Tensor], device: torch.device,
                 is_layer: Callable[[str, nn.Module], bool]) -> None:  # fmt: skip
        super().__init__()
        self.model, self.meta, self.batch, self.device, self.is_layer = model, meta, batch, device, is_layer
        self.graph = fx.Graph()
        self.guards: list[Guard] = []
        self.layer_calls: list[fx.Node] = []
        self.modules = {m: name for name, m in model.named_modules()}
        self.inputs = {key: self._placeholder(key, t) for key, t in batch.items()}
        self._node_of: dict[int, fx.Node] = {id(t): t_node for t, t_node in self.inputs.values()}
        self._writers: dict[int, fx.Node] = {}
        self._resident = frozenset(storage_key(t) for t in meta.stand_ins.values())
        self._read_only = {storage_key(t): name for name, (t, _) in self.inputs.items()}
        self._read_only |= {storage_key(meta.stand_ins[id(p)]): name for name, p in meta.params.items()}
        self._depth = 0
        self._leaf_meter: Meter | None = None
        self._leaf_reads: set[str] = set()
        self._leaf_costs: dict[object, Meter] = {}

    def node_of(self, t: Tensor) -> fx.Node:
        """The node that made `t`. Raises TraceError if nothing recorded did."""
        return self._arg(t, "the model's output")  # type: ignore[no-any-return]

    def check_buffers(self) -> None:
        """Raises TraceError if forward gave a buffer a new tensor made from the old one: state that the trace would lose."""
        for name, real in self.meta.buffers.items():
            now, old = operator.attrgetter(name)(self.model), self._node_of.get(id(self.meta.stand_ins[id(real)]))
            if isinstance(now, Tensor) and (node := self._node_of.get(id(now))) is not old and node and old in closure([node]):
                raise TraceError(f"forward replaces buffer {name} by {describe(node)} between layers; write it in place (copy_)")

    def _placeholder(self, key: str, t: Tensor) -> tuple[Tensor, fx.Node]:
        val = torch.empty_like(t, device="meta", requires_grad=False)
        return val, self._index(self.graph.placeholder(BATCH + key), val)

    def _index(self, node: fx.Node, val: Tensor | None = None) -> fx.Node:
        node.meta["index"] = len(self.graph.nodes)
        if val is not None:
            node.meta["val"], node.meta["storage"] = val, storage_key(val)
        return node

    # ---- arguments: Python values -> what an fx node may hold

    def _arg(self, a: Any, where: str) -> Any:
        if isinstance(a, Tensor):
            return self._node_of.get(id(a)) or self._state_node(a, where)
        if isinstance(a, torch.Size):
            return tuple(a)
        if isinstance(a, torch.device):
            return self.device
        if isinstance(a, np.generic):
            return a.item()
        if isinstance(a, slice):
            return slice(*(self._arg(x, where) for x in (a.start, a.stop, a.step)))
        if type(a) in (list, tuple):
            return type(a)(self._arg(x, where) for x in a)
        if isinstance(a, dict):
            return {k: self._arg(v, where) for k, v in a.items()}
        if isinstance(a, range):
            return list(a)
        if isinstance(a, _SCALARS):
            return a
        raise TraceError(
            f"{where} is given a {type(a).__module__}.{type(a).__qualname__}: only tensors and plain values can be recorded, "
            "since an object would be shared by all steps; pass its tensors instead, or put the call inside a layer"
        )

    def _state_node(self, t: Tensor, where: str) -> fx.Node:
        name = self.meta.names.get(id(t))
        if name is not None:
            node = self._node_of[id(t)] = self._index(self.graph.get_attr(name), t)
            return node
        real = self.meta.real_names.get(id(t))
        if real is not None:
            raise TraceError(f"{where} uses {real} through a reference of its own (a list or attribute that holds the tensor "
                             "itself); read it from the module that owns it, or the weights of the step are missed")  # fmt: skip
        raise TraceError(
            f"{where} uses a tensor of unknown origin, shape {tuple(t.shape)}, {t.dtype}: made inside an opaque layer and passed "
            "on by a hook or a shared object (output_router_logits=True does this: turn it off), or kept in a Python attribute "
            "(register it as a buffer)"
        )

    # ---- torch calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._get_property(func, args)
        if self._depth:
            self._note_reads((args, kwargs))
            return self._execute(func, args, kwargs)
        if name == "register_hook":
            raise TraceError("forward calls register_hook between layers, which a trace would lose; move it into a layer")
        if name == "__set__":
            raise TraceError(f"forward assigns to Tensor.{func.__self__.__name__} between layers, which cannot be recorded")
        if name in CONCRETE and args and isinstance(args[0], Tensor):
            return self._concretise(func, args, kwargs)
        if func is Tensor.__iter__:
            return iter(self._record(torch.unbind, (args[0], 0), {}))
        return self._record(func, args, kwargs)

    def _get_property(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        if name == "device":
            return self.device
        if name in ("is_cuda", "is_cpu", "is_meta"):
            return self.device.type == name.removeprefix("is_")
        value = func(*args)
        if self._depth or not isinstance(value, Tensor) or id(value) in self._node_of:
            return value
        return self._bind(value, self._index(self.graph.call_function(getattr, (self._arg(args[0], name), name))), False)

    def _concretise(self, func: Any, args: Any, kwargs: Any) -> Any:
        node = self._call_node(func, args, kwargs)
        value = self._sample(node, "control flow")
        if isinstance(value, bool | int | float | complex | list):
            return value
        raise TraceError(f"forward turns {describe(node)} into a {type(value).__name__}, which cannot be guarded")

    def _sample(self, node: fx.Node, what: str) -> Any:
        """The value of `node` for the sample batch, guarded."""
        part = make_slice(node, self.model, self.meta.buffers, what)
        value = part.evaluate(self.batch, self.meta.buffers)
        self.guards.append(Guard(describe(node), summary(value), part))
        return value

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._refuse_autocast()
        given = list(tensors((args, kwargs)))
        versions = [t._version for t in given]
        grads = any(t.requires_grad for t in given)
        meter = Meter(self._resident)
        try:
            with self._opaque(), meter.running():
                out = self._execute(func, args, kwargs, meter)
        except Exception as e:
            return self._record_from_sample(func, args, kwargs, e)
        written = {storage_key(t) for t, v in zip(given, versions, strict=True) if t._version != v}
        if not written and not any(True for _ in tensors(out)):
            return out
        node = self._call_node(func, args, kwargs)
        node.meta["flops"], node.meta["saved"] = meter.flops, meter.saved
        severed = grads and not torch.is_grad_enabled()
        if written:
            self._note_writes(node, written, severed)
        return self._bind(out, node, severed)

    def _record_from_sample(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Output shapes that depend on data (nonzero, unique) come from the sample batch, and are guarded."""
        node = self._call_node(func, args, kwargs)
        try:
            value = self._sample(node, "the shape of its result")
        except Exception as e:
            raise TraceError(f"{describe(node)} between layers cannot run on meta tensors: {error} ({e})") from error
        return self._bind(tree(lambda t: t.to(_META), value), node, False)

    def _call_node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        name = getattr(func, "__name__", str(func))
        where = f"{name}() between layers"
        after = self._writers_of((args, kwargs))
        args, kwargs = on_device(func, args, kwargs, self.device)
        args, kwargs = self._arg(tuple(args), where), self._arg(kwargs, where)
        if name in ("cuda", "cpu") and func is getattr(Tensor, name):
            node = self.graph.call_method("to", (args[0], self.device if name == "cuda" else torch.device("cpu")))
        elif getattr(Tensor, name, None) is func and args and isinstance(args[0], fx.Node):
            node = self.graph.call_method(name, args, kwargs)
        else:
            node = self.graph.call_function(importable(func), args, kwargs)
        self._index(node)
        node.meta["after"] = after
        node.meta["pinned"] = name.strip("_") in RANDOM or float(kwargs.get("dropout_p", 0.0)) > 0
        return node

    def _execute(self, func: Any, args: Any, kwargs: Any, meter: Meter | None = None) -> Any:
        if getattr(func, "__name__", "") in ("cuda", "cpu") and isinstance(args[0], Tensor):
            return args[0]
        args, kwargs = on_device(func, args, kwargs, _META)
        meter = meter or self._leaf_meter
        if meter is not None and is_fusable_attention(func, args):
            q, k, v, *rest = args
            return meter.attention(q, k, v, rest[0] if rest else kwargs.get("attn_mask"))
        return func(*args, **kwargs)

    # ---- modules and autograd functions kept whole

    def is_leaf(self, m: nn.Module) -> bool:
        """True for a call to keep whole: of a layer, or of a module without children that owns parameters."""
        if self._depth or m is self.model or m not in self.modules:
            return False
        own = any(p is not None for p in m._parameters.values()) and not any(c is not None for c in m._modules.values())
        return own or self.is_layer(self.modules[m], m)

    def call_leaf(self, m: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self.modules[m]
        where = f"{name} ({type(m).__name__})"
        self._refuse_autocast()
        node = self._index(self.graph.call_module(name, self._arg(args, where), self._arg(kwargs, where)))
        node.meta["after"] = self._writers_of((args, kwargs))
        if self.is_layer(name, m):
            self.layer_calls.append(node)
        given = list(tensors((args, kwargs)))
        versions, ids = [t._version for t in given], [id(t) for t in given]
        self._leaf_reads = set()
        own = {self.meta.names[id(t)] for t in (*m.parameters(), *m.buffers())}  # before: a forward may replace its buffers
        out = self._infer(m, where, args, kwargs, node)
        if any(t._version != v for t, v in zip(given, versions, strict=True)):
            raise TraceError(f"{where} writes its input in place, so it could not be run again for the backward pass; "
                             "use inplace=False")  # fmt: skip
        if ids != [id(t) for t in tensors((args, kwargs))]:
            raise TraceError(f"{where} changes a list or dict it is given, to pass tensors to other layers; return them instead")
        node.meta["params"] = own | self._leaf_reads
        grads = any(t.requires_grad for t in (*given, *m.parameters()))
        return self._bind(out, node, grads and not torch.is_grad_enabled())

    def _infer(self, m: nn.Module, where: str, args: Any, kwargs: Any, node: fx.Node) -> Any:
        """The leaf's outputs on meta; if it cannot run there, a tensor like its first floating-point input."""
        kind = (type(m).__name__, shapes((args, kwargs)), tuple((tuple(p.shape), p.requires_grad) for p in m.parameters()))
        node.meta["kind"] = kind
        given = [storage_key(t) for t in tensors((args, kwargs))]
        cost_key = kind, tuple(t.requires_grad for t in tensors((args, kwargs)))
        meter = None if cost_key in self._leaf_costs else Meter(self._resident)
        try:
            with self._opaque(meter), meter.running() if meter else MetaKernels():
                out = m._call_impl(*args, **kwargs)
        except TraceError:
            raise
        except Exception as e:
            like = next(tensors((args, kwargs)), None)
            if isinstance(m, nn.Embedding) and like is not None and like.is_floating_point():
                raise TraceError(f"{where} looks up {describe(node.args[0])}, which is {like.dtype}: ids must be integers") from e
            if like is None or not like.is_floating_point():
                raise TraceError(f"{where} cannot run on meta tensors, and its output's shape is not that of an input: {e}; "
                                 "put it inside a layer") from e  # fmt: skip
            grads = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors((args, kwargs)), *m.parameters()))
            out = torch.empty_like(like, requires_grad=grads)
            if meter is not None:
                meter = Meter(self._resident)
                meter.flops = 2 * sum(p.numel() for p in m.parameters()) * (like.numel() // max(1, like.shape[-1]))
        if meter is not None:
            meter.name_given(given)
            self._leaf_costs[cost_key] = meter
        cost = self._leaf_costs[cost_key]
        node.meta["flops"], node.meta["saved"] = cost.flops, cost.saved_by(node.name, given)
        return out

    def call_function(self, cls: type[torch.autograd.Function], apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Records `cls.apply` whole: recording its forward's own calls would lose its backward."""

        def call(*a: Any, **k: Any) -> Any:
            return cls.apply(*a, **k)

        call.__name__ = call.__qualname__ = cls.__name__
        where = f"autograd function {cls.__name__}"
        given = list(tensors((args, kwargs)))
        versions = [t._version for t in given]
        node = self._index(self.graph.call_function(call, self._arg(args, where), self._arg(kwargs, where)))
        node.meta["after"] = self._writers_of((args, kwargs))
        node.meta["pinned"] = True  # it may draw random numbers
        meter = Meter(self._resident)
        try:
            with self._opaque(), meter.running():
                out = apply(cls, *args, **kwargs)
        except Exception as e:
            raise TraceError(f"{where} cannot run on meta tensors: {e}; call it inside a layer, or inside a module without "
                             "children that owns its parameters") from e  # fmt: skip
        node.meta["flops"], node.meta["saved"] = meter.flops, meter.saved
        grads = any(t.requires_grad for t in given)
        written = {storage_key(t) for t, v in zip(given, versions, strict=True) if t._version != v}
        if written:
            self._note_writes(node, written, grads and not torch.is_grad_enabled())
        return self._bind(out, node, grads and not torch.is_grad_enabled())

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self.device.type):
            raise TraceError("the model runs under torch.autocast; remove it and pass compute_dtype= instead")

    @property
    def recording_calls(self) -> bool:
        """False while something opaque runs."""
        return not self._depth

    @contextmanager
    def _opaque(self, meter: Meter | None = None) -> Iterator[None]:
        self._depth += 1
        self._leaf_meter = meter
        try:
            yield
        finally:
            self._depth -= 1
            self._leaf_meter = None

    def _note_reads(self, args: Any) -> None:
        """Parameters that a leaf reads, also those of modules that are not its children."""
        for t in tensors(args):
            if id(t) in self.meta.names:
                self._leaf_reads.add(self.meta.names[id(t)])
            elif id(t) in self.meta.real_names:
                self._state_node(t, "a module")

    # ---- results

    def _bind(self, out: Any, node: fx.Node, severed: bool) -> Any:
        """Remembers which tensors `node` made. `severed`: made under no_grad, which the program must not undo."""
        if isinstance(out, Tensor):
            node.meta["val"], node.meta["storage"] = out, storage_key(out)
            if severed and out.is_floating_point() and not out.requires_grad:
                node = self._index(self.graph.call_method("detach", (node,)), out)
            self._node_of[id(out)] = node
        elif isinstance(out, (tuple, list, dict)):
            for key, value in out.items() if isinstance(out, dict) else enumerate(out):
                if any(True for _ in tensors(value)):
                    item = self._index(self.graph.call_function(operator.getitem, (node, key)))
                    item.meta["projection"] = True
                    self._bind(value, item, severed)
        elif isinstance(out, np.ndarray):
            raise TraceError(f"{describe(node)} leaves torch for numpy between layers, which cannot be recorded")
        return out

    def _writers_of(self, args: Any) -> tuple[fx.Node, ...]:
        if not self._writers:
            return ()
        return tuple({w: None for t in tensors(args) if (w := self._writers.get(storage_key(t))) is not None})

    def _note_writes(self, node: fx.Node, written: set[int], severed: bool) -> None:
        for key in written & self._read_only.keys():
            raise TraceError(f"forward writes {self._read_only[key]} in place between layers ({describe(node)}); write a copy")
        if severed:
            raise TraceError(f"forward writes a differentiable value in place under no_grad ({describe(node)}); "
                             "write it out of place")  # fmt: skip
        node.meta["writes"] = frozenset(written)
        if written & self._resident:
            node.meta["effect"] = node.meta["pinned"] = True
        self._writers |= dict.fromkeys(written, node)
