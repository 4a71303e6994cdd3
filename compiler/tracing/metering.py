"""What a piece of a model costs, seen while it runs on meta tensors: floating-point operations, saved bytes, bytes alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from slidedp.compiler.tracing.calls import tensors
from slidedp.compiler.tracing.metakernels import call


class Meter(TorchDispatchMode):
    """Counts flops as `torch.utils.flop_counter` does (matmuls, convolutions, attention) and bytes that autograd saves.

    `saved`: bytes by storage, each storage once however many views of it are saved; those in `resident` (weights and
    buffers, which are there anyway) do not count.
    """

    def __init__(self, resident: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.resident = resident
        self.flops = 0
        self.saved: dict[int, int] = {}
        self.saved_given: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten._grouped_mm and args[0].dim() == 2 and args[1].dim() == 3:
            return self._grouped_mm(*args[:2])
        out = call(func, args, kwargs or {})
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out

    @contextmanager
    def running(self) -> Iterator[Meter]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t), self:
            yield self

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Stands in for a fused attention kernel. On meta, torch would pick the unfused one, which saves S x S scores."""
        batch, heads, queries, width = q.shape
        self.flops += 2 * batch * heads * queries * k.shape[2] * (width + v.shape[3])
        return _FusedAttention.apply(q, k, v, mask)  # type: ignore[no-any-return,no-untyped-call]

    def _grouped_mm(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Rows [M, K], each times the matrix of its expert, [E, K, N]. Torch's own takes nothing but BF16 on meta."""
        self.flops += 2 * rows.shape[0] * experts.shape[1] * experts.shape[2]
        return rows.new_empty(rows.shape[0], experts.shape[2])

    def name_given(self, given: Sequence[int]) -> None:
        """Storages of arguments go by position from here on, so that :meth:`saved_by` holds for another call alike."""
        self.saved_given = {i: self.saved.pop(key) for i, key in enumerate(given) if key in self.saved}

    def saved_by(self, call: str, given: Sequence[int]) -> dict[object, int]:
        """What a call like the metered one saves, by storage: those of its arguments, and its own, named after it."""
        return {(call, key): size for key, size in self.saved.items()} | {given[i]: size for i, size in self.saved_given.items()}

    def _pack(self, t: Tensor) -> Tensor:
        key = storage_key(t)
        if key not in self.resident:
            self.saved[key] = t.untyped_storage().nbytes()
        return t


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made in its `with` block, each storage for as long as it lives: `live` now, `peak` at most.

    On meta or real tensors, in backward too as long as that runs in the same thread (meta, CPU). What a kernel takes for
    itself is not seen. `largest`: the largest single storage. `known` existed before.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.largest = 0
        self._seen = {storage_key(t) for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(func, args, kwargs or {})
        for t in tensors(out):
            key, storage = storage_key(t), t.untyped_storage()
            if key not in self._seen:
                self._seen.add(key)
                self.live += storage.nbytes()
                self.peak, self.largest = max(self.peak, self.live), max(self.largest, storage.nbytes())
                weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        return out

    def _freed(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


class _FusedAttention(torch.autograd.Function):
    """Saves what a fused kernel saves: inputs, output (heads inside tokens: what follows need not copy it), the log-sum-exp of
    each row (FP32), and the mask as summand. Never differentiated.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
        summands = [] if mask is None else [mask.to(q)]
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), *summands)
        return out


def is_fusable_attention(func: Any, args: tuple[Any, ...]) -> bool:
    """True for a call of `scaled_dot_product_attention` with 4-D q, k, v passed by position, of one batch size."""
    return (
        func is F.scaled_dot_product_attention
        and len(args) >= 3
        and all(isinstance(t, Tensor) and t.dim() == 4 and t.shape[0] == args[0].shape[0] for t in args[:3])
    )


def storage_key(t: Tensor) -> int:
    """Identifies the memory behind `t`, shared by its views, as long as one of them lives; works on meta tensors."""
    return int(t.untyped_storage()._cdata)
