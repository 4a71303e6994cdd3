"""Optimizer state that lives in HBM: this rank's part of it, updated there, and copied from and to the host's masters.

    upload()    the host's masters -> this rank's part of the state, and the weights (all of each group)
    adam        updates one chunk of this rank's part at a time (gpu_adam.py)
    show()      every rank's part -> the host's masters, which the user's parameters are views of

The host keeps the masters' memory, for `plan.model` and for whoever saves it, but they are current only after `show`, until the
next step. The moments are in HBM alone; `read_moments` and `write_moments` copy this rank's part of them.

On several ranks one of them may look at the model while the others go on with something else, as ``if rank == 0: save()`` does.
So a thread of each rank answers: rank 0 asks through a word in shared memory, every rank copies its part once its own steps
are done, and says so through another. A rank that asks is not in a step, and so no step of another can begin meanwhile.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slidedp.compiler.decisions import Decisions, GroupDecision
from slidedp.compiler.footprint.memory import largest_update
from slidedp.compiler.layergraph import Group, LayerGraph, shard
from slidedp.compiler.residency import resident_groups, update_chunks
from slidedp.executor.devices.backend import Backend
from slidedp.executor.optim.adam import CpuAdam
from slidedp.executor.optim.gpu_adam import DeviceChunk, DeviceState, GpuAdam
from slidedp.executor.stages.buffers import Buffers
from slidedp.executor.state.host_state import HostState

if TYPE_CHECKING:
    from slidedp.executor.shared.words import Check

LOOK_S = 0.01
"""How often a rank looks whether another has asked for its part."""

JOIN_S = 10.0
"""How long `close` waits for the answering thread, whose device may have failed under it."""

_PIECE = 1 << 24
"""Elements of FP32 masters that are on their way to the weights at a time."""


@dataclass(frozen=True, slots=True)
class ServiceWords:
    """Words of the control segment: the last turn that a rank has drained, been asked for, and shown."""

    drained: int
    asked: int
    shown: int


class ResidentState:
    """The resident groups of one rank. `buffers` have their slots; made once a plan, before the first step.

    `exact`: update with torch's own operations (gpu_adam.py). `on_failure`: called from the answering thread. `turn`: the last
    one before there was this; what the host has of it is what :meth:`upload` takes.
    """

    def __init__(self, layers: LayerGraph, decisions: Decisions, host: HostState, buffers: Buffers, backend: Backend,
                 adam: CpuAdam, words: ServiceWords, *, exact: bool, on_failure: Callable[[BaseException], object],
                 turn: int = 0) -> None:
        self.groups = {g.name: g for g in resident_groups(layers, decisions)}
        self._host, self._backend, self._words, self._on_failure = host, backend, words, on_failure
        self._weights = {name: buffers[f"held.{name}"] for name in self.groups}
        self._chunks = {name: self._chunks_of(g, decisions.of(name), buffers) for name, g in self.groups.items()}
        workspace = 0 if layers.grad_dtype == "float32" else largest_update(layers, decisions)
        self.adam = GpuAdam(adam, chain(*self._chunks.values()), backend, exact=exact, workspace=workspace)
        self.newest = turn
        """Turn of the last step that updates: what the masters have to be shown of."""
        self._written = self._shown = turn  # turn of the last step whose masters this rank, and every rank, has on the host
        self._uploaded = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if host.world_size > 1 and self.groups:
            self._thread = threading.Thread(target=self._answer, name="slidedp-resident", daemon=True)
            self._thread.start()

    def _chunks_of(self, group: Group, decision: GroupDecision, buffers: Buffers) -> list[DeviceChunk]:
        """This rank's parts of the group's chunks. They lie one after another in the state, as the chunks do in the group."""
        if not group.trainable:
            return []
        world, state = self._host.world_size, DeviceState(*buffers[f"state.{group.name}"].view(3, -1))
        return [DeviceChunk(group.name, *shard(lo, hi, self._host.rank, world), state.cut(lo // world, hi // world))
                for lo, hi in update_chunks(group, decision, world)]

    # ---- copies ----

    @torch.no_grad()
    def upload(self, *, but: Collection[str] = ()) -> None:
        """The masters as they are on the host count from here on, `but` those of groups that have them already. Nothing may be in
        flight; on all ranks alike.
        """
        for name, group in self.groups.items():
            if name in but:
                continue
            master, weights = self._host.master[name], self._weights[name]
            for lo in range(0, group.numel, _PIECE):
                piece = torch.empty(min(_PIECE, group.numel - lo), dtype=torch.float32, device=weights.device)
                self._backend.copy(piece, master[lo : lo + piece.numel()])
                weights[lo : lo + piece.numel()].copy_(piece)
            for c in self._chunks[name]:
                self._backend.copy(c.state.master, master[c.lo : c.hi])
        self._backend.fence_caller()
        self._uploaded = True

    @torch.no_grad()
    def write_back(self) -> None:
        """This rank's part of the masters, to the host."""
        for c in chain(*self._chunks.values()):
            self._backend.copy(self._host.master[c.group][c.lo : c.hi], c.state.master)
        self._backend.fence_caller()

    @torch.no_grad()
    def read_moments(self, group: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Copies this rank's part of the moments into flat FP32 host tensors in the host's layout, ``[num_trainable]``."""
        for c in self._chunks[group]:
            self._backend.copy(exp_avg[c.lo : c.hi], c.state.exp_avg)
            self._backend.copy(exp_avg_sq[c.lo : c.hi], c.state.exp_avg_sq)
        self._backend.fence_caller()

    @torch.no_grad()
    def read_state(self, group: str, lo: int, hi: int, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Copies elements ``[lo, hi)``, of one chunk's part of this rank, to host tensors of that size. Waits for the device."""
        c = next(c for c in self._chunks[group] if c.lo <= lo and hi <= c.hi)
        part = c.state.cut(lo - c.lo, hi - c.lo)
        for target, source in ((master, part.master), (exp_avg, part.exp_avg), (exp_avg_sq, part.exp_avg_sq)):
            self._backend.copy(target, source)
        self._backend.fence_caller()

    @torch.no_grad()
    def write_moments(self, group: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """The reverse of :meth:`read_moments`."""
        for c in self._chunks[group]:
            self._backend.copy(c.state.exp_avg, exp_avg[c.lo : c.hi])
            self._backend.copy(c.state.exp_avg_sq, exp_avg_sq[c.lo : c.hi])
        self._backend.fence_caller()

    # ---- the host's masters, current ----

    def show(self, check: Check) -> None:
        """Every rank's part of the masters, as of the last step, is on the host. The steps must be drained on all ranks.

        Any one rank may call it. Raises what `check` raises and PeerError, if another rank fails meanwhile.
        """
        turn = self.newest
        if not self.groups or self._shown == turn:
            return
        if self._thread is None:
            self.write_back()
            self._written = turn
        else:
            self._host.words.publish(self._words.asked, turn)
            self._host.words.wait(self._words.shown, turn, check)
        self._shown = turn

    def _answer(self) -> None:
        """Runs in a thread of its own where there are several ranks: copies this rank's part when any rank asks."""
        words = self._host.words
        try:
            if self._backend.device.type == "cuda":
                torch.cuda.set_device(self._backend.device)
            while not self._stopped.wait(LOOK_S):
                turn = words.highest(self._words.asked)
                if turn > self._written and words.own(self._words.drained) >= turn:
                    self.write_back()
                    self._written = turn
                    words.publish(self._words.shown, turn)
        except BaseException as e:
            self._on_failure(e)

    def close(self, *, rescue: bool) -> None:
        """`rescue`: something has failed since masters were last shown: save what this rank has, if its device still answers."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        if rescue and self._uploaded and self._written != self.newest:  # else the user may have written other weights there
            with suppress(Exception):
                self.write_back()
            if self._host.world_size > 1:
                warnings.warn("slidedp: a rank failed; of weights whose state was in HBM, what other ranks held may be as of "
                              "the last synchronize", stacklevel=2)
