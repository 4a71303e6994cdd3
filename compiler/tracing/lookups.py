"""Finds embedding tables that the prologue only looks up by ids of the batch: other rows get no gradient there.

What counts as a lookup is ``torch.nn.functional.embedding`` of batch entries, by itself or inside a module. With any other use
of the table, a norm limit of its rows (which writes them), sparse gradients, or indices that are computed, it is no lookup:
the host would not know the rows when the step begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode

from slidedp.compiler.layergraph import Group, Lookup
from slidedp.compiler.tracing.calls import tensors
from slidedp.compiler.tracing.guards import BATCH

_INDEX_PRESERVING = frozenset(
    {"view", "reshape", "to", "long", "int", "contiguous", "flatten", "unsqueeze", "squeeze", "expand", "clone", "detach"}
)


def batch_entry(ids: object) -> str | None:
    """The key of the batch entry whose values `ids` are, if they are one's."""
    while isinstance(ids, fx.Node) and ids.op == "call_method" and ids.target in _INDEX_PRESERVING:
        ids = ids.args[0]
    return str(ids.target).removeprefix(BATCH) if isinstance(ids, fx.Node) and ids.op == "placeholder" else None


def find_lookups(model: nn.Module, nodes: Sequence[fx.Node], groups: Iterable[Group],
                 sizes: Mapping[str, int]) -> tuple[Lookup, ...]:
    """Lookups among the prologue's `nodes`, of groups with one trainable parameter and no other. `sizes`: elements by batch key.

    Where the model is on meta.
    """
    out = []
    for group in groups:
        if len(group.params) != 1 or not group.trainable or len(group.params[0].shape) != 2:
            continue
        names = set(group.params[0].names)
        readers = [n for n in nodes if _reads(n, names)]
        keys = [_looked_up(model, n) for n in readers]
        if keys and None not in keys:
            unique = tuple(dict.fromkeys(str(key) for key in keys))
            out.append(Lookup(group.name, unique, group.params[0].shape[0], sum(sizes[key] for key in unique)))
    return tuple(out)


def _reads(n: fx.Node, names: set[str]) -> bool:
    states = {str(i.target) for i in n.all_input_nodes if i.op == "get_attr"}
    return not names.isdisjoint(states | set(n.meta.get("params", ())))


def _looked_up(model: nn.Module, n: fx.Node) -> str | None:
    """The batch key whose rows `n` takes of the table, and that is all that it does with it; else None."""
    if n.target is embedding:
        given = _arguments(n.args, n.kwargs)
        others = [i for i in n.all_input_nodes if i.op == "get_attr" and i is not given["weight"]]
        return batch_entry(given["input"]) if _plain(given) and not others else None
    if n.op == "call_module" and isinstance(m := model.get_submodule(str(n.target)), nn.Embedding) and n.args:
        if n.kwargs or not isinstance(n.args[0], fx.Node) or not _only_looks_up(m, n.args[0].meta["val"]):
            return None
        return batch_entry(n.args[0])
    return None


def _arguments(args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(embedding).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _plain(given: dict[str, Any]) -> bool:
    return given["max_norm"] is None and not given["sparse"]


class _Watching(TorchFunctionMode):
    """Notes whether all that is done with `table` is to look rows of `ids` up in it."""

    def __init__(self, table: Tensor, ids: Tensor) -> None:
        super().__init__()
        self.table, self.ids = table, ids
        self.only_lookups: bool = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t is self.table for t in tensors((args, kwargs))) and getattr(func, "__name__", "") != "__get__":
            given = _arguments(args, kwargs) if func is embedding else None
            self.only_lookups &= given is not None and _plain(given) and given["input"] is self.ids
        return func(*args, **kwargs)


def _only_looks_up(m: nn.Embedding, ids: Tensor) -> bool:
    """What the forward of `m` does with its weight; of a subclass, found by running it on meta tensors."""
    if type(m).forward is nn.Embedding.forward:
        return m.max_norm is None and not m.sparse
    watching = _Watching(m.weight, ids := torch.empty_like(ids, device="meta"))
    try:
        with watching:
            m.forward(ids)
    except Exception:  # what it needs is not there outside the model: then nothing is known of it
        return False
    return watching.only_lookups
