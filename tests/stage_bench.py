"""Steps of a traced model by hand, stage by stage, beside eager PyTorch; and small models with awkward habits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slidedp.compiler.decisions import Activation
from slidedp.compiler.tracing.tracer import Trace, trace
from slidedp.executor.devices.backend import CpuBackend, poison
from slidedp.executor.stages.binding import Binding
from slidedp.executor.stages.stages import StageRunner

Batch = Mapping[str, Tensor]
LossFn = Callable[..., Any]


class Bench:
    """Steps of a traced model in graph order, by hand: weights in slots of their own, all layers' gradients in one slot."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_fn: LossFn | None = None,
        dtype: torch.dtype = torch.float32,
        acts: Mapping[str, Activation] | Activation = Activation.RECOMPUTE,
    ) -> None:
        self.model, self.acts = model, acts
        self.trace: Trace = trace(model, batch, loss_fn=loss_fn, compute_dtype=dtype)
        self.graph = self.trace.graph
        self.binding = Binding(model, self.graph.groups)
        self.runner = StageRunner(self.trace, self.binding, CpuBackend())
        named = dict(model.named_parameters(remove_duplicate=False))
        self.weights: dict[str, list[Tensor]] = {}
        for g in self.graph.groups:
            flat = torch.full((g.numel,), float("nan"), dtype=dtype)
            for p in g.params:
                flat[p.offset : p.offset + p.numel] = named[p.name].detach().reshape(-1)
            self.weights[g.name] = self.binding.leaves(flat, g.name)
        window = max((g.num_trainable for g in self.graph.groups if self.graph.streams(g)), default=0)
        self.window = torch.empty(window, dtype=dtype)
        self.held = {g.name: torch.empty(g.num_trainable, dtype=dtype) for g in self.graph.groups if not self.graph.streams(g)}
        self.grads: dict[str, Tensor] = {}
        self.present: dict[str, bool] = {}

    def of(self, stage: str) -> dict[str, list[Tensor]]:
        return {name: self.weights[name] for name in self.graph.stage(stage).groups}

    def act(self, layer: str) -> Activation:
        return self.acts if isinstance(self.acts, Activation) else self.acts.get(layer, Activation.RECOMPUTE)

    def slots(self, stage: str) -> dict[str, tuple[Tensor, bool]]:
        out = {}
        for name in self.graph.stage(stage).groups:
            group = self.graph.group(name)
            if group.trainable:
                flat = self.held.get(name, self.window)
                if name not in self.written:
                    poison(flat, flat.device)
                out[name] = flat, name in self.written
                self.written.add(name)
        return out

    def collect(self, slots: Mapping[str, tuple[Tensor, bool]], present: dict[str, bool]) -> None:
        self.present |= present
        for name, (flat, _) in slots.items():
            group = self.graph.group(name)
            assert torch.isfinite(flat[: group.num_trainable]).all(), f"{name}: a gap or a parameter was left unwritten"
            for p in group.params:
                if p.trainable:
                    self.grads[p.name] = flat[p.offset : p.offset + p.numel].view(p.shape).clone()

    def step(self, batch: Batch, seed: float = 1.0, has_tokens: bool = True) -> Tensor:
        self.up_to_loss(batch)
        return self.back_from_loss(seed, has_tokens)

    def up_to_loss(self, batch: Batch) -> None:
        first, *layers, _ = [s.name for s in self.graph.stages]
        self.grads, self.present, self.written = {}, {}, set()
        self.runner.start(batch)
        self.runner.prologue(self.of(first))
        for name in layers:
            self.runner.forward(name, self.of(name), self.act(name))

    def back_from_loss(self, seed: float = 1.0, has_tokens: bool = True) -> Tensor:
        first, *layers, last = [s.name for s in self.graph.stages]
        slots = self.slots(last)
        loss, present = self.runner.epilogue(self.of(last), slots, seed, has_tokens)
        self.collect(slots, present)
        for name in reversed(layers):
            if self.act(name) is not Activation.RETAIN:
                self.runner.recompute(name, self.of(name))
            slots = self.slots(name)
            self.collect(slots, self.runner.backward(name, self.of(name), slots, has_tokens))
        slots = self.slots(first)
        self.collect(slots, self.runner.prologue_backward(self.of(first), slots, has_tokens))
        return loss

    def evaluate(self, batch: Batch) -> Tensor:
        first, *layers, last = [s.name for s in self.graph.stages]
        self.runner.start(batch, training=False)
        self.runner.prologue(self.of(first))
        for name in layers:
            self.runner.forward(name, self.of(name))
        return self.runner.evaluate(self.of(last))


def compare(
    make: Callable[[], nn.Module],
    batches: list[Batch],
    loss_fn: LossFn | None = None,
    dtype: torch.dtype = torch.float32,
    acts: Mapping[str, Activation] | Activation = Activation.RECOMPUTE,
) -> Bench:
    """Steps without updates: loss, gradients, presence, buffers and the generator's state equal eager's."""
    eager, ours = make().to(dtype), make()
    bench = Bench(ours, batches[0], loss_fn, dtype, acts)
    for i, batch in enumerate(batches):
        torch.manual_seed(100 + i)
        want_loss, want = tiny_models.loss_and_grads(eager, batch, loss_fn)
        want_rng = torch.get_rng_state()
        torch.manual_seed(100 + i)
        loss = bench.step(batch)
        bench.binding.restore()
        assert torch.equal(loss, want_loss), (loss, want_loss)
        assert {n for n, has in bench.present.items() if has} == set(want)
        for name, grad in bench.grads.items():
            assert torch.equal(grad, want.get(name, torch.zeros(()).expand_as(grad))), name
        assert torch.equal(torch.get_rng_state(), want_rng)
        for (name, a), b in zip(eager.named_buffers(), ours.buffers(), strict=True):
            assert torch.equal(a, b), name
        assert not bench.runner.values.env, sorted(bench.runner.values.env)
        assert not bench.runner.values.graphs
        assert not bench.runner._kept
    return bench


# ---- plain models with awkward habits; each takes x [6, 12] and gives what classification_loss takes ----


def made(cls: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return cls()

    return make


class RunningScale(nn.Module):
    """Statistics of its own through the functional batch norm: no version counter shows the change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("var", torch.ones(12))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.batch_norm(x, self.mean, self.var, training=True)
        return self.linear(x) * (1 + self.calls / 10) + self.mean


class Skips(nn.Module):
    """The stem's output goes into every block, twice: the order of four or more summands shows in the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(TwoInputs() for _ in range(4))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        stem = torch.tanh(self.stem(x))
        h = stem
        for block in self.blocks:
            h = block(h, stem)
        return self.head(h * stem)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, h: Tensor, stem: Tensor) -> Tensor:
        return torch.sin(self.a(h) * stem) + self.b(stem) + h * 0.3 + stem * 0.7


class Shared(nn.Module):
    """One block at three depths, frozen biases, unused parameters, zero-size and scalar ones."""

    def __init__(self) -> None:
        super().__init__()
        block = OddParams()
        self.blocks = nn.ModuleList([OddParams(), block, OddParams(), block, block])
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OddParams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.linear.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale + self.empty.sum() + x


AWKWARD = {
    "batch_norm": lambda: nn.Sequential(
        *(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(3)), nn.Linear(12, 10)
    ),
    "own_statistics": lambda: nn.Sequential(*(RunningScale() for _ in range(3)), nn.Linear(12, 10)),
    "skips": Skips,
    "shared": Shared,
    "dropout": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3)) for _ in range(3)), nn.Linear(12, 10)),
    "rrelu": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.RReLU()) for _ in range(3)), nn.Linear(12, 10)),
}
