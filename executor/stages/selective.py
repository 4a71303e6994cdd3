"""Selective recompute: results of some of a layer's operations are kept, and those operations are not run again.

Which ones is measured, not listed: in the first step, the rerun of one layer of each kind times every operation, and keeps,
for later steps, results that cost more time a byte than the layer's activations do as a whole. Keeping those saves more time
than the same bytes spent on layers that retain everything.

Operations are identified by their place in the order of calls, which is the same whenever a layer runs: a TorchDispatchMode,
below autograd, counts them. Source: the selective checkpointing of `torch.utils.checkpoint`, which goes by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from slidedp.compiler.footprint.moments import SELECTED_SHARE
from slidedp.compiler.layergraph import LayerGraph
from slidedp.executor.devices.backend import Backend
from slidedp.executor.devices.parcels import num_bytes, storage_of

_UNCOUNTED = (torch.ops.aten.detach.default,)
"""What saving a tensor calls itself, more or less often."""


_NUM_TIMED = 3
"""Times an operation is timed; the shortest counts, for other work of the machine can only add to it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation of a rerun: seconds, and bytes of its results (0: it cannot be skipped)."""

    position: int
    seconds: float
    num_bytes: int


def choose(ops: Iterable[Measured], layer_bytes: int, share: float) -> frozenset[int]:
    """Positions of the operations to keep: dearest a byte first, dearer than the layer as a whole, within `share` of its bytes.

    `layer_bytes`: all that the layer's forward saves. What every call costs is no reason to keep its result: the time of the
    cheapest operation is subtracted from all.
    """
    ops = [op for op in ops if op.num_bytes]
    overhead = min((op.seconds for op in ops), default=0.0)
    total = sum(op.seconds - overhead for op in ops)
    chosen, left = set(), int(share * layer_bytes)
    for op in sorted(ops, key=lambda op: (overhead - op.seconds) / op.num_bytes):
        if (op.seconds - overhead) * layer_bytes > total * op.num_bytes and op.num_bytes <= left:
            chosen.add(op.position)
            left -= op.num_bytes
    return frozenset(chosen)


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operation returned."""

    func: Any
    value: Any

    @classmethod
    def of(cls, func: Any, out: Any) -> _Result:
        return cls(func, _detached(out))

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in tree_leaves(self.value) if isinstance(t, Tensor)]


class _Counting(TorchDispatchMode):
    """Calls :meth:`run` with the position of each operation, and remembers results, until something writes into them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_calls = 0
        self._results: dict[int, _Result] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNCOUNTED:
            return func(*args, **(kwargs or {}))
        self._num_calls += 1
        out = self.run(self._num_calls - 1, func, args, kwargs or {})
        if self._results and _writes(func):
            written = {storage_of(t) for t in _written(func, args, kwargs or {})}
            self._results = {p: r for p, r in self._results.items() if written.isdisjoint(map(storage_of, r.tensors))}
        return out

    def run(self, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Keeping(_Counting):
    """Context of a forward: keeps the results of the operations at `positions`."""

    def __init__(self, label: str, positions: frozenset[int]) -> None:
        super().__init__()
        self._label, self._positions = label, positions

    def run(self, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if position in self._positions and _may_skip(func, out):
            self._results[position] = _Result.of(func, out)
        return out

    def kept(self) -> list[Tensor]:
        return [t for result in self._results.values() for t in result.tensors]

    def replay(self) -> Replaying:
        """Context of the rerun, once."""
        results, self._results = self._results, {}
        return Replaying(self._label, results)


class Replaying(_Counting):
    """Context of a rerun: operations whose results were kept return these."""

    def __init__(self, label: str, results: dict[int, _Result]) -> None:
        super().__init__()
        self._label, self._kept = label, results

    def run(self, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        result = self._kept.pop(position, None)
        if result is None:
            return func(*args, **kwargs)
        if result.func is not func:
            raise RuntimeError(
                f"{self._label} called {result.func} as its operation number {position} in its forward, but {func} when it was "
                "run again for its backward: what it does must depend on its inputs alone, or pin act: recompute"
            )
        return _detached(result.value)


class Measuring(_Counting):
    """Context of a rerun: times each operation; those that can be skipped again, when nothing is new to them."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._ops: list[Measured] = []
        self._backend = backend

    def run(self, position: int, func: Any, args: Any, kwargs: Any) -> Any:
        state = self._backend.rng_state()
        out, seconds = self._timed(lambda: func(*args, **kwargs))
        size = 0
        if _may_skip(func, out) and state.same(self._backend.rng_state()):
            self._results[position] = _Result.of(func, out)
            size = num_bytes(self._results[position].tensors)
            seconds = min(self._timed(lambda: func(*args, **kwargs))[1] for _ in range(_NUM_TIMED))
        self._ops.append(Measured(position, seconds, size))
        return out

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self._backend.fence_caller()
        start = time.perf_counter()
        out = call()
        self._backend.fence_caller()
        return out, time.perf_counter() - start

    def measured(self) -> list[Measured]:
        """The operations so far. Those whose result something has written into cannot be skipped."""
        return [op if op.position in self._results else replace(op, num_bytes=0) for op in self._ops]


class Selections:
    """Which operations of the stages of one model keep their results, by kind of stage and training mode."""

    def __init__(self, layers: LayerGraph, model: nn.Module, backend: Backend) -> None:
        self._layers, self._model, self._backend = layers, model, backend
        self._choices: dict[tuple[str, bool], frozenset[int]] = {}

    def keeping(self, stage: str, label: str) -> Keeping:
        """Context of a forward."""
        return Keeping(label, self._choices.get(self._key(stage), frozenset()))

    def replaying(self, stage: str, keeping: Keeping | None) -> AbstractContextManager[object]:
        """Context of a rerun. The first of each kind measures what the next steps keep; none after that pays for it."""
        if keeping is None:
            return nullcontext()
        return keeping.replay() if self._key(stage) in self._choices else self._measuring(stage)

    @contextmanager
    def _measuring(self, stage: str) -> Iterator[None]:
        with Measuring(self._backend) as measuring:
            yield
        if ops := measuring.measured():
            self._choices[self._key(stage)] = choose(ops, self._layers.stage(stage).activation_bytes, SELECTED_SHARE)

    def give_up(self, stage: str) -> bool:
        """Nothing is kept of stages of this kind, if that is yet to be measured: there is no memory to do it."""
        unknown = self._key(stage) not in self._choices
        self._choices.setdefault(self._key(stage), frozenset())
        return unknown

    def alike(self, a: str, b: str) -> bool:
        return self._key(a) == self._key(b)

    def _key(self, stage: str) -> tuple[str, bool]:
        return self._layers.stage(stage).kind_key, self._model.training


def _may_skip(func: Any, out: Any) -> bool:
    """True if all that a call does is return new tensors (and numbers, as attention does), for autograd to see.

    Not inside a `torch.autograd.Function` (gradients are off there): its kernels may write to what looks like a result.
    """
    return _makes_new(func) and torch.is_grad_enabled() and _has_tensors(out)


def _has_tensors(out: Any) -> bool:
    return isinstance(out, Tensor) or any(isinstance(t, Tensor) for t in tree_leaves(out))


def _detached(out: Any) -> Any:
    return out.detach() if isinstance(out, Tensor) else tree_map_only(Tensor, Tensor.detach, out)


@cache  # whoever asks a schema waits longer than for a small operation
def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@cache
def _makes_new(func: Any) -> bool:
    return not _writes(func) and all(r.alias_info is None for r in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that a call writes into. (Version counters tell nothing: at this level, a tensor and its alias have two.)"""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    targets = [named.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(targets) if isinstance(t, Tensor)]
