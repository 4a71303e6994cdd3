"""Which recorded value is the loss, and over how many tokens it is a mean.

Ranks hold different numbers of valid tokens, and the step's loss is the mean over all of them; so each rank must know its
own number before it runs, from the batch alone (DESIGN §7, loss semantics).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from slidedp.compiler.errors import TraceError
from slidedp.compiler.tracing.guards import Slice, make_slice
from slidedp.compiler.tracing.recorder import MetaRecorder

LossFn = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, "Tensor | int"]]

_BY_CLASS = {F.cross_entropy, F.nll_loss}
_ELEMENTWISE = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss}
_SAME_VALUE = frozenset({"to", "float", "double", "half", "bfloat16", "contiguous", "clone", "squeeze", "view", "mean"})
_SCALED = frozenset({"mul", "div", "__mul__", "__rmul__", "__truediv__", "true_divide"})
_REMEDY = "pass loss_fn=, a function of (outputs, batch) that returns (sum of the losses, number of valid tokens)"


@dataclass(frozen=True)
class ValidCount:
    """Number of loss-bearing elements of a batch: a constant of its shapes, or what `slice` gives.

    With `num_classes`, the slice gives class indices: those that are not `ignore_index` count, and must be below it.
    """

    constant: int = 0
    slice: Slice | None = None
    num_classes: int = 0
    ignore_index: int = -100

    def __call__(self, batch: Mapping[str, Tensor]) -> int:
        if self.slice is None:
            return self.constant
        value = self.slice.evaluate(batch)
        if not self.num_classes:
            if value != int(value) or value < 0:
                raise ValueError(f"loss_fn's count is {value.item()}: it must be a whole number, 0 or more")
            return int(value)
        valid = value[value != self.ignore_index]
        if valid.numel() and not 0 <= (low := int(valid.min())) <= (high := int(valid.max())) < self.num_classes:
            wrong = low if low < 0 else high
            raise ValueError(
                f"the loss's targets hold {wrong}, outside its {self.num_classes} classes; mark labels that do not count with "
                f"{self.ignore_index}"
            )
        return int(valid.numel())


@dataclass(frozen=True)
class Loss:
    """`node`: the scalar to differentiate, a mean over `count` elements (`is_mean`) or a sum."""

    node: fx.Node
    count: ValidCount
    is_mean: bool


def model_loss(outputs: Any, recorder: MetaRecorder, model: str) -> Loss:
    """The model's own loss: ``outputs.loss``, ``outputs["loss"]``, a scalar, or the first of a tuple if that is a scalar.

    Raises TraceError if there is none, or if its number of elements cannot be told from the batch.
    """
    value = outputs
    if isinstance(outputs, Mapping):
        value = outputs.get("loss")
    elif not isinstance(outputs, Tensor):
        value = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else getattr(outputs, "loss", None)
    if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
        raise TraceError(f"{model} returns no scalar loss for this batch: give it what it needs for one (labels), or {_REMEDY}")
    node = recorder.node_of(value)
    return Loss(node, _mean_over(node, recorder), is_mean=True)


def call_loss_fn(loss_fn: LossFn, outputs: Any, batch: Mapping[str, Tensor]) -> Any:
    """What `loss_fn` returns. Raises ValueError, naming it, for what it raises: it is not the model that failed."""
    try:
        return loss_fn(outputs, batch)
    except ValueError:
        raise
    except KeyError as e:
        raise ValueError(f"loss_fn raised KeyError: {e}; the batch has keys {', '.join(map(repr, batch))}") from e
    except Exception as e:
        raise TraceError(f"loss_fn raised {type(e).__name__}: {e} (it was given the model's {type(outputs).__name__}, on meta "
                         f"tensors, and a batch with keys {', '.join(map(repr, batch))})") from e  # fmt: skip


def user_loss(returned: Any, recorder: MetaRecorder) -> Loss:
    """The loss of a user's `loss_fn`. Raises ValueError unless it returned (scalar tensor, tensor or int)."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise ValueError(f"loss_fn must return (loss_sum, count); it returned a {type(returned).__name__}")
    total, count = returned
    if not isinstance(total, Tensor) or total.dim() or not total.is_floating_point():
        raise ValueError("loss_fn must return the sum of the losses, a scalar floating-point tensor, as its first value")
    node = recorder.node_of(total)
    if isinstance(count, Tensor) and count.numel() == 1:
        part = make_slice(recorder.node_of(count), recorder.model, recorder.meta.buffers, "the count that loss_fn returns")
        return Loss(node, ValidCount(slice=part), is_mean=False)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return Loss(node, ValidCount(constant=count), is_mean=False)
    raise ValueError(f"loss_fn must return the number of valid tokens, an int or a one-element tensor; it returned {count!r}")


def _mean_over(loss: fx.Node, recorder: MetaRecorder) -> ValidCount:
    """What the loss function that ends in `loss` averages over. Between them only conversions and constant factors."""
    node = loss
    while node.target not in _BY_CLASS | _ELEMENTWISE:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        tensors = node.all_input_nodes
        value = tensors[0].meta.get("val") if len(tensors) == 1 and node.op != "call_module" else None
        if value is None or value.numel() != 1 or name not in _SAME_VALUE | _SCALED:
            raise TraceError(f"cannot tell over how many tokens the loss is a mean: it ends in {name}(), not in a loss function "
                             f"of torch.nn.functional with reduction='mean'; {_REMEDY}")  # fmt: skip
        node = tensors[0]
    function: Any = node.target
    call = inspect.signature(function).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    a = call.arguments
    if a["reduction"] != "mean" or a.get("reduce") is not None or a.get("size_average") is not None:
        raise TraceError(f"the loss uses {function.__name__} with reduction={a['reduction']!r}, not 'mean'; {_REMEDY}")
    target = a["target"]
    if function in _ELEMENTWISE:
        if function is not F.binary_cross_entropy_with_logits and a.get("weight") is not None:
            raise TraceError(f"the loss is a weighted mean ({function.__name__} with weight); {_REMEDY}")
        return ValidCount(constant=max(a["input"].meta["val"].numel(), target.meta["val"].numel()))
    if a.get("weight") is not None or target.meta["val"].is_floating_point():
        raise TraceError(f"the loss uses {function.__name__} with class weights or class probabilities; {_REMEDY}")
    try:
        part = make_slice(target, recorder.model, recorder.meta.buffers, "the target of the loss")
    except TraceError as e:
        raise TraceError(f"{e}; or {_REMEDY}") from e
    if target.meta["val"].dtype not in (torch.int64, torch.uint8):
        raise TraceError(f"the loss's targets are {target.meta['val'].dtype}: {function.__name__} takes torch.int64: "
                         "convert them, labels.long()")
    classes = a["input"].meta["val"].shape[1 if a["input"].meta["val"].dim() > 1 else 0]
    return ValidCount(slice=part, num_classes=classes, ignore_index=a["ignore_index"])
