"""Parts of a recorded graph that run on the host from the batch alone, and the guards made of them.

A model's Python may ask for a value while it is traced (``if mask.all():``). The answer comes from the sample batch, and
a :class:`Guard` remembers question and answer: the trace is valid for another batch exactly when all answers are the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from slidedp.compiler.errors import TraceError

BATCH = "batch."
"""Prefix of the environment names, and of the placeholders' targets, of batch entries."""


def dependencies(node: fx.Node) -> list[fx.Node]:
    """What must run before `node`: the nodes it reads, and in-place writers of the storage it reads."""
    return [*node.all_input_nodes, *node.meta.get("after", ())]


def closure(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """`roots` and everything they depend on."""
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += dependencies(node)
    return seen


@dataclass(frozen=True)
class Slice:
    """The nodes that one value depends on, in program order. Reads only the batch and the model's buffers."""

    nodes: tuple[fx.Node, ...]
    model: nn.Module

    def evaluate(self, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> Any:
        """The value for `batch`, computed on the host. Raises TraceError if it draws random numbers.

        `buffers`: while the model's own are meta tensors, what they stand for.
        """
        values: dict[fx.Node, Any] = {}
        random_state = torch.get_rng_state()
        with torch.no_grad():
            for node in self.nodes:
                values[node] = self._run(node, values, batch, buffers or {})
        if not torch.equal(random_state, torch.get_rng_state()):
            torch.set_rng_state(random_state)
            raise TraceError(f"control flow depends on random numbers: {describe(self.nodes[-1])}; draw them inside a layer")
        return values[self.nodes[-1]]

    def _run(
        self, node: fx.Node, values: dict[fx.Node, Any], batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> Any:
        if node.op == "placeholder":
            return batch[str(node.target).removeprefix(BATCH)].detach().cpu()
        if node.op == "get_attr":
            name = str(node.target)
            return (buffers[name] if name in buffers else operator.attrgetter(name)(self.model)).detach().cpu()
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), lambda a: _on_host(a, values))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target), node.op
        return node.target(*args, **kwargs)


def _on_host(a: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(a, fx.Node):
        return values[a]
    return torch.device("cpu") if isinstance(a, torch.device) else a


def make_slice(root: fx.Node, model: nn.Module, buffers: Mapping[str, Tensor], what: str) -> Slice:
    """The slice that computes `root`. Raises TraceError if more than the batch and real buffers is needed.

    `what` starts the message and says what the value is for, e.g. "control flow".
    """
    nodes = sorted(closure([root]), key=lambda n: n.meta["index"])
    for n in nodes:
        if n.op == "call_module":
            kind = type(model.get_submodule(str(n.target))).__name__
            raise TraceError(f"{what} depends on the output of module {n.target} ({kind}), which a trace cannot know: "
                             f"{describe(root)}; move it inside a layer (layers= chooses what the layers are)")  # fmt: skip
        if n.op == "get_attr" and n.target not in buffers:
            raise TraceError(f"{what} depends on parameter {n.target}, which changes every step: {describe(root)}; "
                             "move it inside a layer")  # fmt: skip
        if n.op == "get_attr" and buffers[str(n.target)].is_meta:
            raise TraceError(f"{what} depends on buffer {n.target}, which has no values (the model is on the meta device): "
                             f"{describe(root)}; build the model with real buffers")  # fmt: skip
        if n.meta.get("effect"):
            raise TraceError(f"{what} depends on a buffer that forward writes: {describe(root)}; move it inside a layer")
    return Slice(tuple(nodes), model)


@dataclass(frozen=True)
class Guard:
    """`slice` gave `value` for the sample batch; tensors are compared by shape only (`summary`)."""

    expression: str
    value: Any
    slice: Slice

    def violation(self, batch: Mapping[str, Tensor]) -> str | None:
        """None if `batch` gives the same value; else what differs, in words."""
        value = summary(self.slice.evaluate(batch))
        if _same(value, self.value):
            return None
        keys = ", ".join(str(n.target).removeprefix(BATCH) for n in self.slice.nodes if n.op == "placeholder")
        return f"{self.expression}, which depends on {keys}, was {self.value} when traced and is {value} for this batch"


def first_violation(guards: Iterable[Guard], batch: Mapping[str, Tensor]) -> str | None:
    """None if every guard holds for `batch`; else the first that does not, in words."""
    return next((v for g in guards if (v := g.violation(batch)) is not None), None)


def summary(value: Any) -> Any:
    """`value` with every tensor replaced by its shape: what a guard compares."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple(summary(v) for v in value)
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True  # else a NaN would violate its own guard at every step
    return type(a) is type(b) and bool(a == b)


def describe(node: object, depth: int = 4) -> str:
    """A node as a short expression for messages: ``__bool__(all(__eq__(attention_mask, 1)))``."""
    if isinstance(node, (tuple, list)):
        return "(" + ", ".join(describe(a, depth) for a in node) + ")"
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target).removeprefix(BATCH)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if not depth:
        return f"{name}(…)"
    return f"{name}({', '.join(describe(a, depth - 1) for a in node.args)})"
