"""What ranks do in tests of failure and disagreement: module-level functions for the `run_ranks` fixture."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rank_cases import build, shares, start
from tiny_models import lm_batch
from torch import nn
from training import state_of

import slidedp
from slidedp.executor.checkpoints.checkpoint_files import FileLayer
from slidedp.executor.shared.words import PeerError
from slidedp.planning.planner import Planner


def one_evaluates(directory: str) -> list[str]:
    """Rank 1 evaluates where rank 0 trains, and then has converted its model when both save: both are told, nothing changes, and
    the next step runs. Then it measures a step more than rank 0, which ends both."""
    rank, _ = start()
    told = one_has_no_room(rank)
    with slidedp.compile(build(rank), "cpu") as plan:
        plan.run(shares(2, 0)[rank])
        before = state_of(plan).digest()
        try:
            (plan.evaluate if rank else plan.run)(shares(2, 0)[rank])
            message = "no error"
        except ValueError as e:
            message = str(e)
        assert state_of(plan).digest() == before
        if rank:
            plan.model.double()
        try:
            plan.save(directory)
            saved = "no error"
        except ValueError as e:
            saved = str(e)
        plan.run(shares(2, 0)[rank])
        assert state_of(plan).digest() != before
        try:
            plan.measure([shares(2, 0)[rank]] * (1 + rank))
            measured = "no error"
        except PeerError as e:
            measured = str(e)
    return [message, saved, told, measured]


def one_has_no_room(rank: int) -> str:
    """What a rank is told when the plan that rank 0 has made does not fit the batch of rank 1: before anything is built."""
    finish = Planner.finish

    def no_room(*args: Any) -> Any:
        finish(*args)
        if rank == 1:
            raise ValueError("no room for this batch")

    with patch.object(Planner, "finish", no_room), pytest.raises(ValueError, match=r"rank 1 could not|no room") as told:
        slidedp.compile(build(rank), "cpu", example=shares(2, 0)[rank])
    return str(told.value)


BREAKS = {
    "slidedp.planning.planner.Planner.first_draft": RuntimeError, "slidedp.planning.planner.Planner.decide": MemoryError,
    "slidedp.trial.validation.agree_on_decisions": KeyError, "slidedp.planning.planner.Planner.finish": OSError,
    "slidedp.executor.machine.machine.Binding": RuntimeError, "slidedp.executor.machine.machine.open_backend": RuntimeError,
    "slidedp.executor.shared.segment.SharedSegment._open": OSError,
    "slidedp.executor.shared.segment.SharedSegment._create": RuntimeError,
    "slidedp.executor.devices.backend.CpuBackend.open_streams": RuntimeError,
    "slidedp.executor.devices.backend.CpuBackend.cap": RuntimeError,
    "slidedp.executor.machine.machine.CpuAdam": MemoryError, "slidedp.executor.machine.switching.Buffers": RuntimeError,
    "slidedp.trial.first_batch.Started": RuntimeError,
}
"""What can fail while a plan is started, and how. Only rank 0 creates segments, and only the others open them."""


def starts_break() -> dict[str, str]:
    """On rank 1, or where it has no part in it on rank 0, each of `BREAKS` fails in turn, while the rank lives; what each rank
    says of it. The same model is compiled again and again, and at last it trains."""
    rank, _ = start()
    model, told = build(rank), {}
    for place, kind in BREAKS.items():
        with ExitStack() as stack:
            stack.enter_context(patch("slidedp.executor.failures.failure.VERDICT_S", 0.1))  # a new error is nobody else's fault
            if rank == (not place.endswith("_create")):
                stack.enter_context(patch(place, side_effect=kind("broken here")))
            try:
                slidedp.compile(model, "cpu", hbm_budget="10GiB", example=shares(2, 0)[rank])
                told[place] = "no error"
            except Exception as e:
                told[place] = f"{type(e).__name__}: {e}"
    with slidedp.compile(model, "cpu") as plan:
        told["trains"] = f"{plan.run(shares(2, 0)[rank]).loss}"
    return told


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.broken = nn.Linear(8, 8), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise RuntimeError("this layer is broken")
        return self.linear(x)


def squared(out: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return ((out - batch["y"]) ** 2).sum(), out.numel()


def one_fails_and_lives(delivery: str, told: str, device: str = "cpu") -> dict[str, Any]:
    """A layer of rank 1 raises. Rank 1 catches the error and lives on, with its plan open, until rank 0 has been `told`."""
    rank, _ = start()
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(Fragile(), Fragile(), nn.Linear(8, 1))
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
    plan = slidedp.compile(model, device=device, loss_fn=squared, policy={"delivery": delivery})
    plan.run(batch)
    plan.synchronize()
    model[1].broken = rank == 1
    try:
        for _ in range(3):
            plan.run(batch)
        kind, message = "none", ""
    except Exception as e:
        kind, message = type(e).__name__, str(e)
    if rank == 0:
        Path(told).touch()
    until = time.monotonic() + 90
    while not Path(told).exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    plan.close()
    return {"kind": kind, "message": message}


class Asserting(Fragile):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            x = x + torch.zeros(1, device=x.device, dtype=x.dtype)[torch.full((1,), 7, device=x.device)]
        return self.linear(x)


def an_assertion_fails_on_the_gpu() -> dict[str, Any]:
    """After which the device fails in every call of this process. The plan can be closed all the same, and the model is whole."""
    model = nn.Sequential(Asserting(), nn.Linear(8, 8), nn.BatchNorm1d(8), Asserting(), nn.Linear(8, 1))
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
    told = []
    plan = slidedp.compile(model, device="cuda", loss_fn=squared, hbm_budget="2GiB", policy={"act": "retain"})
    plan.run(batch)
    plan.synchronize()
    model[3].broken = True
    for work in (lambda: [plan.run(batch).loss for _ in range(3)], lambda: plan.run(batch), plan.close, plan.close):
        try:
            work()
            told.append("no error")
        except RuntimeError as e:
            told.append(type(e).__name__ + ": " + str(e).splitlines()[0])
    model[3].broken = False
    squared(model(batch["x"]), batch)[0].backward()
    whole = all(t.device.type == "cpu" and t.isfinite().all() for t in (*model.parameters(), *model.buffers()))
    return {"told": told, "whole": whole, "left": [t.name for t in threading.enumerate() if t.name.startswith("slidedp")]}


class Optional(nn.Module):
    """Uses its last block only when the batch has no `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks[: None if extra is None else 3]:
            x = torch.tanh(block(x))
        return nn.functional.mse_loss(self.out(x), y)


def layers_come_and_go(reduction: str) -> dict[str, Any]:
    """Steps with and without the last layer, alike on all ranks; then unlike, which is refused on all."""
    rank, _ = start()
    torch.manual_seed(0)
    plan = slidedp.compile(Optional(), "cpu", optimizer=slidedp.AdamW(lr=1e-2), layers=[f"blocks.{i}" for i in range(4)],
                           policy={"reduction": reduction, "delivery": "replicated"}, update_kernel="torch")
    torch.manual_seed(1)
    losses, message = [], "no error"
    with plan:
        for step in range(6):
            whole = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
            mine = {k: v.chunk(2)[rank] for k, v in whole.items()}
            losses.append(plan.run(mine | ({"extra": torch.ones(1)} if step in (1, 2, 4) else {})).loss)
        try:
            plan.run(mine | ({"extra": torch.ones(1)} if rank else {}))
        except ValueError as e:
            message = str(e)
        weight = plan.model.blocks[3].weight.sum().item()
    return {"losses": losses, "message": message, "weight": weight}


class Endless(Fragile):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while self.broken:
            time.sleep(0.01)
        return self.linear(x)


def starts_differ() -> dict[str, Any]:
    """The first batches are of other numbers of micro-batches, then of other layers; both are refused, and the next ones run. At
    last one that slices cut on one rank, and not on the other."""
    rank, _ = start()
    torch.manual_seed(0)
    mine = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
    messages = []
    with slidedp.compile(Optional(), "cpu", layers=[f"blocks.{i}" for i in range(4)]) as plan:
        for wrong in ([mine] * (1 + rank), mine | ({"extra": torch.ones(1)} if rank else {})):
            try:
                plan.run(wrong)
                messages.append("no error")
            except ValueError as e:
                messages.append(str(e))
        losses = [plan.run(mine).loss]
    batch = lm_batch(seed=rank, batch=1 + rank)
    for slices in (1, 2):
        with slidedp.compile(build(rank), "cpu", policy={"slices": slices, "rows": "split"}) as plan:
            losses.append(plan.run(batch).loss)
    return {"messages": messages, "losses": losses}


def hung(how: str, ready: str) -> dict[str, Any]:
    """Rank 1 stops being of use after three steps: stopped by the test, in a layer, in its loader, or it has left."""
    rank, _ = start()
    torch.manual_seed(0)
    model = nn.Sequential(Endless(), Endless(), nn.Linear(8, 1))
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
    plan = slidedp.compile(model, "cpu", loss_fn=squared, peer_timeout_s=3.0)
    batches = plan.batches(batches_end(batch, 3, hang=how == "loader" and rank == 1))
    for _ in range(3):
        plan.run(next(batches))
    if rank == 1:
        match how:
            case "closes":
                plan.close()
                return {}
            case "exits":
                return {}
            case "loader":
                next(batches)
            case "layer":
                model[1].broken = True
    Path(f"{ready}.{rank}").write_text(str(os.getpid()))
    until, message = time.monotonic() + 90, "no error"
    try:
        while time.monotonic() < until:
            plan.run(batch)
    except Exception as e:
        message = f"{type(e).__name__}: {e}"
    plan.close()
    return {"message": message, "trained": bool(torch.isfinite(model[0].linear.weight).all())}


class NeverReady(FileLayer):
    """A disk of rank 1 that takes nothing."""

    ready = ""

    def write(self, path: Path, save: Any) -> None:
        self.hold()
        super().write(path, save)

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        self.hold()
        super().write_at(fd, data, offset)

    def hold(self) -> None:
        rank = os.environ["RANK"]
        Path(f"{self.ready}.{rank}").write_text("")
        while rank == "1":
            time.sleep(0.1)


def stopped_in_a_save(how: str, directory: str) -> str:
    """What rank 0 is told when rank 1 has been stopped in the middle of a save, by the test."""
    rank, _ = start()
    NeverReady.ready = f"{directory}/ready"
    with patch("slidedp.plan.FileLayer", NeverReady):
        try:
            with slidedp.compile(build(rank), "cpu", peer_timeout_s=3.0) as plan:
                plan.run(shares(2, 0)[rank])
                handle = plan.save(f"{directory}/saved", wait=how == "saves")
                handle.wait()
        except Exception as e:
            return f"{type(e).__name__}: {e}"
    return "no error"


def batches_end(batch: Any, count: int, hang: bool) -> Iterator[Any]:
    """As many, and then none, or for a long time none."""
    for _ in range(count):
        yield batch
    if hang:
        threading.Event().wait(600)


def end_with_an_open_plan(how: str) -> None:
    """A plan that nobody closes, and that lives for as long as the interpreter."""
    plan = slidedp.compile(build(0), "cpu")
    atexit.register(lambda: plan)
    plan.run(shares(1, 0)[0])
    if how == "exit":
        raise SystemExit(3)
    if how == "error":
        raise KeyError("mine")
