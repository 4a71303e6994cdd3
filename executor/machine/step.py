"""One step in flight: what its ops share (batch, token counts, loss, tickets) and what the user gets back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from slidedp.executor.devices.backend import Sent
from slidedp.executor.optim.adam import NonFiniteGradient
from slidedp.executor.shared.words import added_in_order

if TYPE_CHECKING:
    from slidedp.executor.machine.machine import Machine
    from slidedp.executor.optim.clipping import Clip
    from slidedp.executor.stages.fallback import Fallback, Shortage
    from slidedp.executor.stages.stages import StageRunner
    from slidedp.executor.streams.tickets import Ticket


MOST_AHEAD = 16 << 20
"""Bytes of a step's batches that go ahead: two steps' then lie on the device, where no plan has counted them."""


class NonFiniteLoss(FloatingPointError):
    """The loss is NaN or infinite, on every rank alike. No weight, moment or step count of the optimizer has changed."""


@dataclass(eq=False, slots=True)
class MicroBatch:
    """One lane of a step: what it runs on, and its loss once that is known. `num_valid`: its loss-bearing tokens."""

    batch: Mapping[str, torch.Tensor]
    num_valid: int
    runner: StageRunner
    loss: torch.Tensor | None = None
    sent: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def has_tokens(self) -> bool:
        """False if it bears no loss: its gradients are exactly zero, whatever its forward gives."""
        return self.num_valid > 0


@dataclass(eq=False)
class Step:
    """State of one step of this rank.

    `number`: of the training step (an evaluation has its predecessor's); `turn`: counts both. `lanes`: its micro-batches.
    `num_valid_global`: loss-bearing tokens of all of them and of all ranks. `loss_scale` makes the loss of a micro-batch its
    share of the global mean; the loss's backward starts with it.
    """

    number: int
    turn: int
    lanes: Sequence[MicroBatch]
    machine: Machine
    fallback: Fallback
    num_valid_global: int
    loss_is_mean: bool = True
    training: bool = True
    tickets: dict[str, Ticket] = field(default_factory=dict)
    started_s: float = field(default_factory=time.perf_counter)
    updated: set[str] = field(default_factory=set)
    op_names: tuple[str, ...] = ()
    moved_by: Mapping[str, str] = field(default_factory=dict)
    """Values that go to the host -> the ops that copy them."""
    speculating: frozenset[str] = frozenset()
    """Groups that it makes candidates for."""
    shortages: list[Shortage] = field(default_factory=list)
    """Shortages of device memory that the step has recovered from."""
    epilogue: Ticket = None  # type: ignore[assignment]  # the last, once it has been submitted
    wall_s: float = 0.0
    exposed_s: float = 0.0
    compute_ended: threading.Event = field(default_factory=threading.Event)
    grad_norms: torch.Tensor | None = None
    """Largest gradient elements of parameters whose state is in HBM; to be read once the step's last update is done."""
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    """Norms of parts of the gradients, by value; kept until the step's norm is known."""
    home_norms: list[torch.Tensor] = field(default_factory=list)
    clip: Clip | None = None
    clip_known: threading.Event = field(default_factory=threading.Event)
    scale_cell: np.ndarray = field(default_factory=lambda: np.full(1, math.nan))
    """float64: `clip.scale` for native updates, NaN for none."""
    candidate_cell: np.ndarray = field(default_factory=lambda: np.ones(1))
    """float64, for native updates that speculate: 1, or NaN once it is known that nobody will take what they make."""
    _global_loss: float | None = None

    def loss_scale(self, lane: MicroBatch) -> float:
        """A mean over its tokens counts by its share of all; a sum is divided by all. 1.0 of the only one on one rank's mean."""
        return (lane.num_valid if self.loss_is_mean else 1) / self.num_valid_global

    def send(self) -> None:
        """The batches set out for the device, as many as there is room for. Before anything is submitted."""
        room = MOST_AHEAD
        for lane in self.lanes:
            sent = {}
            for key, value in lane.batch.items():
                ahead = value.nbytes <= room
                sent[key] = self.machine.backend.send(value) if ahead else Sent(value)
                room -= value.nbytes * ahead
            lane.sent, lane.batch = sent, {}

    def device_batch(self, lane: MicroBatch) -> dict[str, torch.Tensor]:
        return {key: self.machine.backend.receive(sent) for key, sent in lane.sent.items()}

    @property
    def draws_random(self) -> bool:
        """True if one of its recomputes will set the default generators for a while."""
        return any(lane.runner.draws_random for lane in self.lanes)

    def release(self) -> None:
        """All is done. Results may be kept for long, the tickets and batches need not be."""
        self.tickets = {}  # a new dict: the next step may hold the old one
        for lane in self.lanes:
            lane.sent = {}

    def count(self, kind: str, amount: int) -> None:
        """Bytes (elements for updates) that this rank's copies and kernels were really called with."""
        self.machine.counters[kind] += amount

    def keep_loss(self, lane: MicroBatch, loss: torch.Tensor) -> None:
        lane.loss = self.machine.backend.to_host(loss.detach())

    def local_loss(self) -> float:
        """This rank's share of the global loss. Only once the epilogues are done."""
        return added_in_order(self.share_of(lane) for lane in self.lanes)

    def share_of(self, lane: MicroBatch) -> float:
        assert lane.loss is not None, "the epilogue has not run"
        if not lane.has_tokens:
            return 0.0
        if self.loss_is_mean:
            return float(lane.loss) * self.loss_scale(lane)
        return float(lane.loss / self.num_valid_global)  # divided in its own precision, as `loss_sum / count` would be

    def global_loss(self) -> float:
        """Mean over the valid tokens of the global batch; waits until every rank has its share."""
        if self._global_loss is None:
            self._global_loss = self.machine.sum_losses(self.turn)
        return self._global_loss

    def keep_clip(self, clip: Clip) -> None:
        """To be called before any update may begin."""
        self.norms.clear()
        self.home_norms.clear()
        self.scale_cell[0] = math.nan if clip.scale is None else clip.scale
        kept = clip.scale == 1.0
        if not kept:
            self.candidate_cell[0] = math.nan
        self.machine.state.sides.decide(self.number, self.speculating if kept else ())
        self.clip = clip

    def side(self, group: str) -> int:
        """Where the step finds the state of a group that speculates. Only for ops that read or write it, when they run."""
        return self.machine.state.sides.of(group, self.number if self.training else self.number + 1)

    def update_scale(self) -> float | None:
        """What an update multiplies gradients by; None if there is to be none, on every rank alike. May wait for the loss."""
        if self.clip is not None:
            return self.clip.scale
        return 1.0 if math.isfinite(self.global_loss()) else None

    def require_finite_loss(self) -> None:
        if not math.isfinite(self.global_loss()):
            raise NonFiniteLoss(
                f"step {self.number}: the loss is {self.global_loss()}; nothing has been updated, and the plan goes on. "
                "Skip this batch, or lower the learning rate if it is not the batch"
            )

    @contextmanager
    def says_what_moved(self) -> Iterator[None]:
        """Adds to a NonFiniteGradient what had been updated by then."""
        try:
            yield
        except NonFiniteGradient as e:
            e.add_note(f"step {self.number}: updated before this was seen: {', '.join(sorted(self.updated)) or 'nothing'}; "
                       "the weights of those layers have moved: start again from saved weights, with a lower learning rate")
            raise

    def mark_present(self, lane: MicroBatch, present: Mapping[str, bool] | None) -> None:
        """Which parameters (by name) got a gradient from this micro-batch, or one of this rank before it."""
        if present and lane.has_tokens:
            self.machine.updates.mark_present(self.number, present)

    def note_compute_end(self, ops: Sequence[Ticket]) -> None:
        """The GPU has done its part, `ops`: the time since it had done the step before's is this step's wall time."""
        if self.machine.streams.error is None:
            now = time.perf_counter()
            self.exposed_s = sum(map(self.machine.streams.compute.stall_s, ops))
            self.wall_s = now - max(self.started_s, self.machine.compute_end_s)
            self.machine.compute_end_s = now
        self.compute_ended.set()


class StepResult:
    """What a step gives: fields materialise when read, waiting for no more than they need.

    Attributes:
        loss: mean loss over the valid tokens of the global batch, before the update.
        num_tokens: valid tokens of the global batch.
        grad_norm: norm of all gradients, before clipping; None for a plan that does not take it. Waits for the backward.
        skipped: True if the step was left out, for a gradient or a loss that is not finite. Waits as `grad_norm` does.
        lr: learning rate of this step.
        step: 1-based number of the training step, those before a resumed checkpoint included.
        wall_s: seconds from the end of the previous step's compute (or this step's start) to the end of this one's.
        exposed_s: of these, the time in which compute of this rank was held up: by deliveries, updates, other ranks.
        tokens_per_s: `num_tokens` of all ranks over `wall_s`.
    """

    def __init__(self, step: Step, lr: float, number: int) -> None:
        self._step, self.lr, self.step = step, lr, number

    @property
    def loss(self) -> float:
        return self._step.global_loss()

    @property
    def num_tokens(self) -> int:
        return self._step.num_valid_global

    @property
    def grad_norm(self) -> float | None:
        clip = self._clip()
        return None if clip is None else clip.norm

    @property
    def skipped(self) -> bool:
        clip = self._clip()
        return clip is not None and clip.scale is None

    def _clip(self) -> Clip | None:
        return self._step.machine.wait_clip(self._step)

    @property
    def wall_s(self) -> float:
        self._step.machine.wait_compute(self._step)
        return self._step.wall_s

    @property
    def exposed_s(self) -> float:
        self._step.machine.wait_compute(self._step)
        return self._step.exposed_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    def __repr__(self) -> str:
        return f"StepResult(step={self.step}, loss={self.loss:.4f}, num_tokens={self.num_tokens}, lr={self.lr:g})"
