"""A device whose memory ends: tensors that compute ops make are counted while they live, and one too many is refused.

On the CPU backend a stream's ops run in one thread, autograd's included, so what is counted is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slidedp.executor.stages.fallback import Fallback


class Limit(TorchDispatchMode):
    """Counts the storages that operations make. `refuse`: called with the op, bytes asked for, bytes in use, and
    how many allocations this attempt at the op has made, this one included. `made_in`: how many the last attempt at each op has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refuse: Callable[[Any, int, int, int], bool] = lambda *_: False
        self.op: Any = None
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.num_refused = self.peak = 0
        self.made_in: dict[str, int] = {}
        self.refused_in: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                self.made(t)
        return out

    def made(self, t: Tensor) -> None:
        self.live = {key: item for key, item in self.live.items() if not item[0].expired()}
        in_use, size = sum(size for _, size in self.live.values()), t.untyped_storage().nbytes()
        self.made_in[self.op.name] += 1
        if self.refuse(self.op, size, in_use, self.made_in[self.op.name]):
            self.num_refused += 1
            self.refused_in.append(self.op.name)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes. GPU 0 has what it has")
        ref = StorageWeakRef(t.untyped_storage())
        self.live[ref.cdata] = ref, size
        self.peak = max(self.peak, in_use + size)

    def install(self, monkeypatch: Any) -> Limit:
        """From now on every attempt at a compute op runs under this limit, but for those that can be made only once."""
        run = Fallback.run

        def limited(fallback: Fallback, step: Any, op: Any, attempt: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            def watched() -> Any:
                self.op, self.made_in[op.name] = op, 0
                with self:
                    return attempt()

            return run(fallback, step, op, attempt if kwargs.get("once") else watched, *args, **kwargs)

        monkeypatch.setattr(Fallback, "run", limited)
        return self


def beyond(cap: int, *kinds: Any) -> Callable[[Any, int, int, int], bool]:
    """Refuses what would be more than `cap` bytes; in ops of these kinds only, if any are named."""
    return lambda op, size, in_use, number: in_use + size > cap and (not kinds or op.kind in kinds)


def once(kind: Any) -> Callable[[Any, int, int, int], bool]:
    """Refuses one allocation, whatever it asks for: the first in an op of this kind."""
    left = [True]

    def refuse(op: Any, size: int, in_use: int, number: int) -> bool:
        refused = left[0] and op.kind is kind
        left[0] &= not refused
        return refused

    return refuse


def once_in_each(numbers: dict[str, int]) -> Callable[[Any, int, int, int], bool]:
    """Refuses, once in each op, the allocation with the number that is given for it."""
    left = dict(numbers)

    def refuse(op: Any, size: int, in_use: int, number: int) -> bool:
        return left.get(op.name) == number and bool(left.pop(op.name))

    return refuse
