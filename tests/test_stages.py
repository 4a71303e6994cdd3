"""The stage runner and the binding against eager PyTorch on the CPU: losses, gradients, buffers and generators, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from slidedp.compiler.layergraph import Group, Param
from slidedp.compiler.tracer import Trace, trace
from slidedp.executor.backend import CpuBackend, poison
from slidedp.executor.binding import Binding
from slidedp.executor.gradients import GradientSlots
from slidedp.executor.stages import StageRunner
from torch import Tensor, nn

pytestmark = pytest.mark.cpu


class Bench:
    """Steps of a traced model in graph order, by hand: weights in slots of their own, all layers' gradients in one slot."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor], loss_fn: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        self.model = model
        self.trace: Trace = trace(model, batch, loss_fn=loss_fn, **kwargs)
        self.graph = self.trace.graph
        self.binding = Binding(model, self.graph.groups)
        self.runner = StageRunner(self.trace, self.binding, CpuBackend())
        named = dict(model.named_parameters(remove_duplicate=False))
        self.weights: dict[str, list[Tensor]] = {}
        for g in self.graph.groups:
            flat = torch.full((g.numel,), float("nan"))
            for p in g.params:
                flat[p.offset : p.offset + p.numel] = named[p.name].detach().reshape(-1)
            self.weights[g.name] = self.binding.leaves(flat, g.name)
        window = max((g.num_trainable for g in self.graph.groups if self.graph.streams(g)), default=0)
        self.window = torch.empty(window)
        self.held = {g.name: torch.empty(g.num_trainable) for g in self.graph.groups if not self.graph.streams(g)}
        self.grads: dict[str, Tensor] = {}
        self.present: dict[str, bool] = {}

    def of(self, stage: str) -> dict[str, list[Tensor]]:
        return {name: self.weights[name] for name in self.graph.stage(stage).groups}

    def slots(self, stage: str) -> dict[str, tuple[Tensor, bool]]:
        out = {}
        for name in self.graph.stage(stage).groups:
            group = self.graph.group(name)
            if group.trainable:
                flat = self.held.get(name, self.window)
                if name not in self.written:
                    poison(flat)
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

    def step(self, batch: Mapping[str, Tensor], seed: float = 1.0, has_tokens: bool = True) -> Tensor:
        first, *layers, last = [s.name for s in self.graph.stages]
        self.grads, self.present, self.written = {}, {}, set()
        self.runner.start(batch)
        self.runner.prologue(self.of(first))
        for name in layers:
            self.runner.forward(name, self.of(name))
        slots = self.slots(last)
        loss, present = self.runner.epilogue(self.of(last), slots, seed, has_tokens)
        self.collect(slots, present)
        for name in reversed(layers):
            self.runner.recompute(name, self.of(name))
            slots = self.slots(name)
            self.collect(slots, self.runner.backward(name, self.of(name), slots, has_tokens))
        slots = self.slots(first)
        self.collect(slots, self.runner.prologue_backward(self.of(first), slots, has_tokens))
        return loss

    def evaluate(self, batch: Mapping[str, Tensor]) -> Tensor:
        first, *layers, last = [s.name for s in self.graph.stages]
        self.runner.start(batch, training=False)
        self.runner.prologue(self.of(first))
        for name in layers:
            self.runner.forward(name, self.of(name))
        return self.runner.evaluate(self.of(last))


def compare(make: Callable[[], nn.Module], batches: list[Mapping[str, Tensor]], loss_fn: Callable[..., Any] | None = None, **kwargs: Any) -> Bench:
    """Steps without updates: loss, gradients, presence, buffers and the generator's state equal eager's."""
    eager, ours = make(), make()
    bench = Bench(ours, batches[0], loss_fn, **kwargs)
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
        assert not bench.runner._env, sorted(bench.runner._env)
        assert not bench.runner._graphs
        assert not bench.runner._kept
    return bench


CASES = {case.name: case for case in tiny_models.all_cases()}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    case = CASES[name]
    compare(case.model, [case.batch(1), case.batch(1)], case.loss_fn)


def test_dropout_is_recomputed_with_its_own_random_numbers() -> None:
    bench = compare(lambda: tiny_models.family("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2, use_cache=False), [tiny_models.lm_batch()] * 2)
    bench.runner.start(tiny_models.lm_batch())
    bench.runner.prologue(bench.of("prologue"))
    bench.runner.forward("L00", bench.of("L00"))
    assert bench.runner.draws_random


def test_without_dropout_the_generator_is_left_alone() -> None:
    bench = Bench(tiny_models.family("llama"), tiny_models.lm_batch())
    bench.runner.start(tiny_models.lm_batch())
    bench.runner.prologue(bench.of("prologue"))
    bench.runner.forward("L00", bench.of("L00"))
    assert not bench.runner.draws_random


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
    "batch_norm": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(3)), nn.Linear(12, 10)),
    "own_statistics": lambda: nn.Sequential(*(RunningScale() for _ in range(3)), nn.Linear(12, 10)),
    "skips": Skips,
    "shared": Shared,
    "dropout": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3)) for _ in range(3)), nn.Linear(12, 10)),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_models_equal_eager(name: str) -> None:
    batch = tiny_models.mlp_batch()
    compare(made(AWKWARD[name]), [batch] * 3, tiny_models.classification_loss)


def test_unused_parameters_are_reported_and_their_gradients_zero() -> None:
    bench = compare(made(Shared), [tiny_models.mlp_batch()], tiny_models.classification_loss)
    idle = [name for name, has in bench.present.items() if not has]
    assert idle
    assert all(name.endswith("idle") for name in idle)


def test_seed_scales_every_gradient() -> None:
    batch = tiny_models.mlp_batch()
    bench = Bench(tiny_models.mlp(), batch, tiny_models.classification_loss)
    bench.step(batch)
    once = bench.grads
    bench.step(batch, seed=0.25)
    for name, grad in bench.grads.items():
        assert torch.equal(grad, once[name] * 0.25)


def test_a_batch_without_loss_gives_zeros_whatever_its_values() -> None:
    batch = tiny_models.mlp_batch()
    bench = Bench(tiny_models.mlp(), batch, tiny_models.classification_loss)
    empty = {"x": torch.full_like(batch["x"], float("nan")), "target": torch.full_like(batch["target"], -100)}
    assert bench.step(empty, has_tokens=False).item() == 0
    assert not any(bench.present.values())
    assert len(bench.grads) == 6
    assert all((g == 0).all() for g in bench.grads.values())
    bench.step(batch)  # and the next batch is as if nothing had happened
    _, want = tiny_models.loss_and_grads(tiny_models.mlp(), batch, tiny_models.classification_loss)
    assert all(torch.equal(bench.grads[n], g) for n, g in want.items())


def test_evaluate_equals_eager_and_keeps_nothing() -> None:
    model, batch = tiny_models.family("qwen3"), tiny_models.lm_batch("padded")
    bench = Bench(model, batch)
    with torch.no_grad():
        want = tiny_models.family("qwen3")(**batch).loss
    assert torch.equal(bench.evaluate(batch), want)
    assert not bench.runner._env
    compare(lambda: tiny_models.family("qwen3"), [batch])


def test_boundary_values_live_from_forward_to_recompute_and_no_longer() -> None:
    batch = tiny_models.mlp_batch()
    bench = Bench(tiny_models.mlp(), batch, tiny_models.classification_loss)
    runner = bench.runner
    first, *layers, last = [s.name for s in bench.graph.stages]
    runner.start(batch)
    runner.prologue(bench.of(first))
    for name in layers:
        runner.forward(name, bench.of(name))
    bench.written = set()
    assert len(runner._env) == len(layers) + 2  # each layer's input, the last one's output, the target
    runner.epilogue(bench.of(last), bench.slots(last))
    assert len(runner._env) == len(layers)
    for i, name in enumerate(reversed(layers)):
        runner.recompute(name, bench.of(name))
        assert len(runner._env) == len(layers) - 1 - i
        runner.backward(name, bench.of(name), bench.slots(name))
        assert len(runner._grads) <= 1


def test_a_step_frees_its_tensors() -> None:
    batch = tiny_models.mlp_batch()
    bench = Bench(tiny_models.mlp(), batch, tiny_models.classification_loss)
    alive = []
    for _ in range(3):
        bench.step(batch)
        gc.collect()
        alive.append(sum(type(o) is Tensor for o in gc.get_objects()))
    assert alive[1] == alive[2]


# ---- gradient slots ----


def test_gradient_slot_rounds_once_and_adds_only_where_there_is_something() -> None:
    group = Group("g", 256, 192, ("a", "b"), (Param(("w",), (2, 33), 0), Param(("v",), (3,), 128), Param(("f",), (4,), 192, False)))
    slots = GradientSlots({"g": group})
    flat = torch.full((256,), float("nan"), dtype=torch.bfloat16)
    w, v = torch.randn(2, 33), torch.randn(3)
    slots.start()
    assert slots.write("g", flat, [w, None], False) == {"w": True, "v": False}
    assert torch.equal(flat[:66].view(2, 33), w.bfloat16())
    assert (flat[66:192] == 0).all()
    assert flat[192:].isnan().all()  # nothing there is sent
    flat[128:131] = float("nan")  # whatever there is where no gradient has been: a first gradient replaces it
    assert slots.write("g", flat, [w, v], True) == {"w": True, "v": True}
    assert torch.equal(flat[:66].view(2, 33), (w.bfloat16().float() + w).bfloat16())
    assert torch.equal(flat[128:131], v.bfloat16())
    slots.start()
    assert slots.write("g", flat, [None, None], False) == {"w": False, "v": False}
    assert (flat[:192] == 0).all()


# ---- binding ----


def groups_of(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Group, ...]:
    return trace(model, batch).graph.groups


class Masters:
    """Stands in for the host state."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.master = {g.name: torch.zeros(g.numel) for g in groups}

    def load(self, values: Mapping[str, Tensor]) -> None:
        for g in self.groups:
            for p in g.params:
                self.master[g.name][p.offset : p.offset + p.numel] = values[p.name].detach().reshape(-1)


def test_adopted_parameters_are_the_masters_and_tied_ones_stay_tied() -> None:
    model, reference = tiny_models.family("qwen3"), tiny_models.family("qwen3")
    groups = groups_of(model, tiny_models.lm_batch())
    objects = dict(model.named_parameters())
    masters = Masters(groups)
    binding = Binding(model, groups)
    binding.adopt(masters)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(objects[n] is p for n, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tied = next(g for g in groups if len(g.uses) > 1)
    masters.master[tied.name].add_(1)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight + 1)
    kept = {name: flat.clone() for name, flat in masters.master.items()}
    binding.release(kept)
    masters.master[tied.name].zero_()
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight + 1)


def test_parameters_on_meta_and_in_other_dtypes_become_masters() -> None:
    with torch.device("meta"):
        model = tiny_models.mlp()
    groups = trace(model, tiny_models.mlp_batch(), loss_fn=tiny_models.classification_loss).graph.groups
    binding = Binding(model, groups)
    masters = Masters(groups)
    binding.release(masters.master)
    assert all(p.device.type == "cpu" and isinstance(p, nn.Parameter) for p in model.parameters())
    masters.master[groups[0].name].fill_(2)
    assert (next(model.parameters()) == 2).all()
    half = tiny_models.mlp().bfloat16()
    Binding(half, groups).adopt(Masters(groups))
    assert all(p.dtype is torch.float32 for p in half.parameters())


def test_restore_puts_everything_back() -> None:
    model, batch = made(AWKWARD["batch_norm"])(), tiny_models.mlp_batch()
    before = {n: (id(t), t.clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    bench = Bench(model, batch, tiny_models.classification_loss)
    bench.step(batch)
    assert id(model[0][0].weight) != before["0.0.weight"][0]
    bench.binding.restore()
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        assert id(t) == before[name][0]
    assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters())


def test_recurrent_layers_use_the_bound_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Recurrent() for _ in range(2)), nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x[None])[0][0] + x

    bench = compare(made(Model), [tiny_models.mlp_batch()] * 2, tiny_models.classification_loss)
    lstm = bench.model.blocks[0].lstm
    assert lstm._flat_weights[0] is lstm.weight_ih_l0
    assert "flatten_parameters" not in vars(lstm)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.pop(4), "another model"),
        (lambda m: setattr(m, "4", nn.Linear(33, 11)), r"shape \(10, 33\), the model has \(11, 33\)"),
        (lambda m: m[0].weight.register_hook(lambda g: g), "0.weight has gradient hooks"),
        (lambda m: m[2].__dict__.update(cached=[m[2].weight]), "2 .*2.weight in its attribute cached"),
    ],
)
def test_models_that_cannot_be_bound_are_refused_by_name(spoil: Callable[[nn.Sequential], object], message: str) -> None:
    model = tiny_models.mlp()
    groups = trace(model, tiny_models.mlp_batch(), loss_fn=tiny_models.classification_loss).graph.groups
    spoil(model)
    with pytest.raises(ValueError, match=message):
        Binding(model, groups)


def test_a_buffer_without_values_is_refused_by_name() -> None:
    model = made(AWKWARD["batch_norm"])()
    model[1][1].running_mean = torch.empty(12, device="meta")
    with pytest.raises(ValueError, match=r"buffer 1\.1\.running_mean"):
        Binding(model, ()).bind_buffers(torch.device("cpu"))
