"""Finds the head and its loss in the epilogue's graph, and replaces them by one call that never makes all logits.

What is found: one linear map (``nn.Linear``, ``F.linear``, a matrix product) whose result reaches exactly one
`F.cross_entropy` and nothing else, through functions of each logit alone (casts, scaling, soft-capping) and through reshapes
and slices of whole rows. The latter are done to the hidden states instead; the former are recorded and done chunk by chunk.

    hidden -> linear -> [:, :-1] -> float -> view(-1, vocab) -> cross_entropy(_, target)
    hidden -> [:, :-1] -> view(-1, width) -> LinearCrossEntropy(row_fn=float)(_, weight, bias, target)

Anything else stays as it is, and :func:`find_head` says why: class weights, class probabilities, ``reduction="none"``, logits
that something else reads too, hooks on the head.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from slidedp.compiler.tracing import liger
from slidedp.compiler.tracing.linear_cross_entropy import LinearCrossEntropy

_SAME_VALUES = frozenset({"contiguous", "clone"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
_CASTS = frozenset({"float", "to", "type"})
_ELEMENTWISE = _CASTS | frozenset({
    "bfloat16", "half", "double", "mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "rsub", "neg",
    "negative", "tanh", "sigmoid", "clamp", "clip", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__add__", "__radd__",
    "__sub__", "__rsub__", "__neg__",
})  # fmt: skip
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm"})


class _NoHead(Exception):
    """Why the logits cannot be made in chunks."""


@dataclass(frozen=True)
class Head:
    """Nodes of an epilogue's graph: `linear` ... `loss`, a cross-entropy. `steps`: those between them, in order.

    `rows`, `vocab`: of the logits as the loss gets them. `extras`: tensors that elementwise steps read besides the logits.
    """

    linear: fx.Node
    has_bias: bool
    steps: tuple[fx.Node, ...]
    loss: fx.Node
    arguments: dict[str, Any]
    extras: tuple[fx.Node, ...]
    rows: int
    vocab: int


def find_head(graph: fx.Graph, model: nn.Module) -> Head | str:
    """The head of an epilogue's `graph`, whose nodes have shape and dtype in ``meta``; or why there is none to be cut."""
    try:
        return _find(graph, model)
    except _NoHead as e:
        return str(e)


def _find(graph: fx.Graph, model: nn.Module) -> Head:
    if any(n.meta.get("writes") for n in graph.nodes):
        raise _NoHead("the epilogue writes in place")
    losses = [n for n in graph.nodes if n.target is F.cross_entropy]
    if len(losses) != 1:
        raise _NoHead(f"the epilogue calls cross_entropy {len(losses)} times, not once")
    arguments = _loss_arguments(losses[0])
    node: fx.Node = arguments["input"]
    steps: list[fx.Node] = []
    extras: list[fx.Node] = []
    rows, vocab = node.meta["shape"]
    while not _is_linear(node, model):
        _require_only_reader(node)
        source, more = _step(node, vocab)
        steps.append(node)
        extras[:0] = more
        node = source
    _require_only_reader(node)
    has_bias = node.op == "call_module" and model.get_submodule(str(node.target)).bias is not None
    return Head(node, has_bias, tuple(reversed(steps)), losses[0], arguments, tuple(dict.fromkeys(extras)), rows, vocab)


def _loss_arguments(loss: fx.Node) -> dict[str, Any]:
    """The bound arguments of a cross-entropy that is a sum over rows of logits."""
    call = inspect.signature(F.cross_entropy).bind(*loss.args, **loss.kwargs)
    call.apply_defaults()
    a = call.arguments
    if a["weight"] is not None:
        raise _NoHead("its cross_entropy has class weights")
    if a["reduce"] is not None or a["size_average"] is not None or a["reduction"] not in ("mean", "sum"):
        raise _NoHead(f"its cross_entropy has reduction={a['reduction']!r}")
    logits, target = a["input"], a["target"]
    if not all(isinstance(n, fx.Node) and "shape" in n.meta for n in (logits, target)):
        raise _NoHead("its cross_entropy is given something else than tensors")
    if target.meta["dtype"].is_floating_point:
        raise _NoHead("its targets are class probabilities")
    if len(logits.meta["shape"]) != 2 or len(target.meta["shape"]) != 1:
        raise _NoHead(f"its cross_entropy is given logits of {len(logits.meta['shape'])} dimensions, not rows x classes")
    return a


def _require_only_reader(node: fx.Node) -> None:
    if len(node.users) != 1:
        raise _NoHead(f"the logits ({node.name}) are read {len(node.users)} times")


def _is_linear(node: fx.Node, model: nn.Module) -> bool:
    if node.op == "call_module":
        m = model.get_submodule(str(node.target))
        hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        if type(m).forward is not nn.Linear.forward or "forward" in m.__dict__ or any(hooks):
            raise _NoHead(f"the logits come from {node.target} ({type(m).__name__}), which is no plain nn.Linear without hooks")
        return True
    if node.op not in ("call_function", "call_method"):
        raise _NoHead(f"the logits are not made in the epilogue ({node.name})")
    if node.target is F.linear:
        return all(isinstance(n, fx.Node) for n in _linear_arguments(node)[:2])
    return _name(node) in _PRODUCTS and len(node.args) == 2 and len(_shape(node.args[1])) == 2


def _linear_arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    args, kwargs = node.args, node.kwargs
    return (args[0] if args else kwargs.get("input"), args[1] if len(args) > 1 else kwargs.get("weight"),
            args[2] if len(args) > 2 else kwargs.get("bias"))  # fmt: skip


def _step(node: fx.Node, vocab: int) -> tuple[fx.Node, list[fx.Node]]:
    """The logits that `node` gets, and the other tensors that it reads. Raises _NoHead unless it works row by row."""
    name, tensors = _name(node), [n for n in node.all_input_nodes if n.op != "output"]
    logits = [n for n in tensors if _shape(n) and _shape(n)[-1] == vocab and len(_shape(n)) > 1]
    if len(logits) != 1 or _shape(node)[-1:] != (vocab,):
        raise _NoHead(f"{name}() between head and loss does not work on rows of logits")
    source, others = logits[0], [n for n in tensors if n is not logits[0]]
    if name in _RESHAPES | _SAME_VALUES and not others and node.meta["dtype"] is source.meta["dtype"]:
        return source, []
    if name in ("__getitem__", "getitem") and not others and _slices_rows(node.args[1], len(_shape(source))):
        return source, []
    by_element = name in _ELEMENTWISE and _shape(node) == _shape(source) and node.meta["dtype"].is_floating_point
    if by_element and all(_shape(n) in ((), (1,), (vocab,)) for n in others):
        return source, others
    raise _NoHead(f"{name}() between head and loss is no function of each logit alone")


def _slices_rows(index: Any, num_dims: int) -> bool:
    """True if `index` takes slices and single places of all dimensions but the last."""
    index = index if isinstance(index, tuple) else (index,)
    if sum(i is ... for i in index) == 1:
        at = index.index(...)
        index = (*index[:at], *[slice(None)] * (num_dims - len(index) + 1), *index[at + 1 :])
    if not all(isinstance(i, (slice, int)) and not isinstance(i, bool) for i in index):
        return False
    return len(index) < num_dims or (len(index) == num_dims and index[-1] == slice(None))


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta.get("shape", ())) if isinstance(node, fx.Node) else ()


def cut_head(graph: fx.Graph, head: Head, num_chunks: int, device: torch.device) -> fx.Graph:
    """A copy of `graph` whose `head` makes the logits in at most `num_chunks` chunks of rows, for runs on `device`."""
    out = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        if n is head.linear or n in head.steps:
            continue
        if n is head.loss:
            copies[n] = _chunked_loss(out, head, _spec(head, num_chunks, liger.available(device)), copies)
        else:
            copies[n] = out.node_copy(n, copies.__getitem__)  # the output too
        copies[n].meta = n.meta
    out.lint()
    return out


def _chunked_loss(out: fx.Graph, head: Head, spec: LinearCrossEntropy, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    hidden, weight, bias = _operands(out, head, copies)
    width = _shape(head.linear.args[0] if head.linear.args else head.linear.kwargs["input"])[-1]
    for step in head.steps:
        if _name(step) in _RESHAPES:
            hidden = out.call_method("reshape", (hidden, (*_shape(step)[:-1], width)))
        elif _name(step) in ("__getitem__", "getitem"):
            hidden = out.call_function(operator.getitem, (hidden, step.args[1]))
    extras = [copies[n] for n in head.extras]

    def chunked_linear_cross_entropy(*args: Any) -> Tensor:
        return spec(*args)

    return out.call_function(chunked_linear_cross_entropy, (hidden, weight, bias, copies[head.arguments["target"]], *extras))


def _operands(out: fx.Graph, head: Head, copies: dict[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Hidden states, weight ``[vocab, width]`` and bias, in the copy."""
    linear = head.linear
    hidden = copies[linear.args[0] if linear.args else linear.kwargs["input"]]  # type: ignore[index]
    if linear.op == "call_module":
        weight = out.get_attr(f"{linear.target}.weight")
        return hidden, weight, out.get_attr(f"{linear.target}.bias") if head.has_bias else None
    if linear.target is F.linear:
        _, w, b = _linear_arguments(linear)
        return hidden, copies[w], None if b is None else copies[b]
    return hidden, out.call_method("t", (copies[linear.args[1]],)), None  # type: ignore[index]


def _spec(head: Head, num_chunks: int, fused: bool) -> LinearCrossEntropy:
    """What is done to each chunk: the elementwise steps as a graph module of their own."""
    graph = fx.Graph()
    node = graph.placeholder("logits")
    extras = {n: graph.placeholder(f"extra_{i}") for i, n in enumerate(head.extras)}
    steps = [s for s in head.steps if _name(s) in _ELEMENTWISE]
    for step in steps:
        here = node
        node = graph.node_copy(step, lambda n: extras.get(n, here))  # noqa: B023 - called at once
    graph.output(node)
    a = head.arguments
    makes_fp32 = head.arguments["input"].meta["dtype"] is torch.float32
    plain = makes_fp32 and all(_name(s) in _CASTS and s.meta["dtype"] is torch.float32 for s in steps)
    return LinearCrossEntropy(
        num_chunks, fx.GraphModule({}, graph, class_name="row_fn"), plain=plain and not a["label_smoothing"],
        is_mean=a["reduction"] == "mean", ignore_index=a["ignore_index"], label_smoothing=a["label_smoothing"], fused=fused,
    )  # fmt: skip
