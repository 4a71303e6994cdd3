"""Which modules are the layers of a model, and which arguments its forward takes from a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from slidedp.compiler.errors import TraceError

LayerChoice = Sequence[str] | Callable[[str, nn.Module], bool]


def chosen_layers(model: nn.Module, layers: LayerChoice) -> frozenset[str]:
    """Module names that a user's `layers=` selects: names (of modules, or of the ModuleLists that hold them) or a predicate.

    Raises ValueError for a name that the model does not have.
    """
    modules = dict(model.named_modules())
    if callable(layers):
        return frozenset(name for name, m in modules.items() if name and layers(name, m))
    chosen: set[str] = set()
    for name in [layers] if isinstance(layers, str) else layers:
        if name not in modules or not name:
            raise ValueError(f"layers= names {name!r}, which {type(model).__name__} does not have; see model.named_modules()")
        held = [f"{name}.{child}" for child, _ in modules[name].named_children()]
        chosen.update(held if isinstance(modules[name], nn.ModuleList) else [name])
    return frozenset(chosen)


def layer_candidates(model: nn.Module) -> Iterator[frozenset[str]]:
    """Names of what may be the model's layers: the blocks of each ModuleList or Sequential, the best guess first.

    The container with most parameters wins, unless most of them are in a container of as many blocks inside it (a
    Sequential of a backbone and a head). The next guesses serve when the blocks of one are never called.
    """
    containers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)}
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in containers.items()}
    blocks = {name: sum(1 for c in m if any(True for _ in c.parameters())) for name, m in containers.items()}
    left = sorted((n for n in containers if blocks[n]), key=lambda n: (-sizes[n], n.count("."), n))
    while left:
        best = left[0]
        for name in left[1:]:
            if name.startswith(f"{best}." if best else "") and 2 * sizes[name] > sizes[best] and blocks[name] >= blocks[best]:
                best = name
        left.remove(best)
        yield frozenset(f"{best}.{child}" if best else child for child, _ in containers[best].named_children())


def call_arguments(
    model: nn.Module, batch: Mapping[str, Tensor], has_loss_fn: bool
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """How the model is called: batch keys passed by position, keys passed by name, and constants.

    Without a `loss_fn` every key must be a named parameter of ``forward``, also when it takes ``**kwargs``, where a typing
    error would pass unseen. With one, the others are the loss's. A Sequential gets the first key.

    Raises ValueError naming the entry that is not a tensor, the key that is not accepted, or the argument that is missing;
    and for a model that torch.compile has wrapped.
    """
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ValueError("torch.compile returned this, and it hides the layers: pass the module that you gave to torch.compile")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"batch[{key!r}] is a {type(value).__name__}; every entry of a batch must be a tensor")
    if not batch:
        raise ValueError("the batch is empty; it must hold the tensors that the model's forward takes")
    if isinstance(model, nn.Sequential):
        first, *others = batch
        _refuse([] if has_loss_fn else others, type(model).__name__, [first])
        return (first,), (), {}
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    _refuse([] if has_loss_fn else [k for k in batch if k not in named], type(model).__name__, named)
    missing = [p.name for p in parameters if p.name in named and p.default is p.empty and p.name not in batch]
    if missing:
        raise ValueError(f"{type(model).__name__}.forward needs {missing[0]!r}; the batch has {_list(batch)}")
    # A cache would be filled by the layers, for nobody: Hugging Face turns it on by default.
    constants = {"use_cache": False} if "use_cache" in named and "use_cache" not in batch else {}
    return (), tuple(k for k in batch if k in named), constants


def batch_problem(batch: Mapping[str, Tensor]) -> str | None:
    """What is unusual about `batch`, in words: the likely reason when a model could not run on it. Any of it may be right."""
    for key, t in batch.items():
        if key.endswith("_ids") and t.is_floating_point():
            return f"batch[{key!r}] is {_dtype(t)}: ids must be integers"
    sizes = {key: t.shape[0] for key, t in batch.items() if t.dim()}
    if len(set(sizes.values())) > 1:
        return f"batch entries disagree in their first dimension: {', '.join(f'{key} {n}' for key, n in sizes.items())}"
    labels, tokens = batch.get("labels"), batch.get("input_ids")
    if tokens is not None and tokens.dim() != 2:
        return f"batch['input_ids'] has shape {tuple(tokens.shape)}: ids are [rows, tokens]"
    if labels is not None and tokens is not None:
        if labels.dim() == tokens.dim() and labels.shape != tokens.shape:
            return f"batch['labels'] has shape {tuple(labels.shape)}, batch['input_ids'] {tuple(tokens.shape)}: a label a token"
        if labels.is_floating_point():
            return f"batch['labels'] is {_dtype(labels)}: labels that are ids must be integers"
    return None


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _refuse(keys: Sequence[str], model: str, accepted: Sequence[str]) -> None:
    if keys:
        raise ValueError(f"{model}.forward does not take batch key {keys[0]!r}; it takes {_list(accepted)}. "
                         "Keys for the loss alone need a loss_fn=")  # fmt: skip


def _list(names: Collection[str]) -> str:
    return ", ".join(repr(n) for n in names)


def no_layers(model: nn.Module, layers: LayerChoice | None) -> TraceError:
    """The error for a model none of whose layers the loss depends on."""
    if layers is not None:
        return TraceError(f"none of the modules that layers= selects in {type(model).__name__} is called on the way to the loss")
    return TraceError(f"{type(model).__name__} has no ModuleList or Sequential whose blocks are called on the way to the loss; "
                      "say which modules are its layers with layers=[names]")  # fmt: skip
