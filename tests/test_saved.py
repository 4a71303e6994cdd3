"""What a layer's graph keeps between forward and backward, by its own hand: gradients stay eager's, memory is what was chosen."""

from __future__ import annotations

import gc
import random

import pytest
import tiny_models
import torch
from stage_bench import AWKWARD, Bench, compare, made
from torch import Tensor, nn

from slidedp.compiler.decisions import Activation
from slidedp.executor.devices.parcels import num_bytes, storage_of
from slidedp.executor.stages.saved import SavedTensors, enter

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "gemma2": {"attention_dropout": 0.2},
}


RECOMPUTE, RETAIN, SELECTIVE = Activation.RECOMPUTE, Activation.RETAIN, Activation.SELECTIVE


def some(seed: str) -> dict[str, Activation]:
    draw = random.Random(seed)
    return {f"L{i:02d}": draw.choice([RECOMPUTE, RETAIN, SELECTIVE]) for i in range(5)}


@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_any_choice_gives_eagers_gradients(name: str) -> None:
    batches = [tiny_models.lm_batch("padded", 1), tiny_models.lm_batch("padded", 1)]
    for acts in (RETAIN, some(name)):
        compare(lambda: tiny_models.family(name, **DROPOUT.get(name, {})), batches, acts=acts)


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_models(name: str) -> None:
    for acts in (RETAIN, some(name)):
        compare(made(AWKWARD[name]), [tiny_models.mlp_batch()] * 3, tiny_models.classification_loss, acts=acts)


def forward(bench: Bench, batch: dict[str, Tensor]) -> list[str]:
    """Up to the last layer's forward; the layers' names."""
    bench.up_to_loss(batch)
    return [s.name for s in bench.graph.layers]


def alive() -> dict[int, int]:
    """Bytes of every tensor's storage that this process holds, by storage."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.layout is torch.strided]  # sparse ones have no storage
    return {storage_of(o): o.untyped_storage().nbytes() for o in tensors}


def test_a_recomputed_layer_keeps_its_inputs_and_nothing_else() -> None:
    model, batch = tiny_models.family("qwen3"), tiny_models.lm_batch("padded")
    bench = Bench(model, batch)
    before = alive().keys()
    layers = forward(bench, batch)
    expected = {storage_of(t) for t in bench.runner.values.env.values()}
    expected |= {storage_of(t) for t in bench.runner._kept[layers[0]].buffers.values()}
    new = {key: size for key, size in alive().items() if key not in before and key not in expected}
    assert sum(new.values()) < 64, new  # wrapped numbers
    assert all(not bench.runner.values.graphs[name].saved.kept() for name in layers)
    kept = bench.runner.values.graphs[layers[-1]].saved
    bench.runner.epilogue(bench.of("epilogue"), bench.slots("epilogue"))
    bench.runner.recompute(layers[-1], bench.of(layers[-1]))
    assert num_bytes(kept.kept()) > 0
    bench.runner.backward(layers[-1], bench.of(layers[-1]), bench.slots(layers[-1]))
    assert not kept.kept()


def test_what_goes_to_the_host_leaves_the_device_and_comes_back_elsewhere() -> None:
    model, batch = tiny_models.family("qwen3"), tiny_models.lm_batch("padded")
    bench = Bench(model, batch)
    bench.step(batch)
    want, runner, name = dict(bench.grads), bench.runner, "L03"
    forward(bench, batch)  # all recomputed; then the last layer once more, its way
    runner.values.graphs.pop(name), runner._kept.pop(name)
    before = alive().keys()
    runner.forward(name, bench.of(name), Activation.OFFLOAD)
    stage = bench.graph.stage(name)
    saved = runner.values.graphs[name].saved
    assert num_bytes(saved.kept()) == stage.activation_bytes
    host = {"act": torch.empty(stage.activation_bytes, dtype=torch.uint8), "h": torch.empty(4096, dtype=torch.uint8)}
    slot = {head: torch.full_like(buffer, 0xFF) for head, buffer in host.items()}
    sizes = {head: runner.values.offload(f"{head}.{name}", buffer, Tensor.copy_) for head, buffer in host.items()}
    assert sizes == {"act": stage.activation_bytes, "h": -(-stage.boundary_bytes // 512) * 512}
    for head in host:
        runner.values.leave(f"{head}.{name}", poisoned=True)
    assert not saved.kept()
    mine = {storage_of(t) for t in (*host.values(), *slot.values(), *runner.values.env.values())}
    assert sum(size for key, size in alive().items() if key not in before and key not in mine) < 64
    for head in host:
        assert runner.values.reload(f"{head}.{name}", host[head], slot[head], Tensor.copy_) == sizes[head]
    bench.collect(slots := bench.slots("epilogue"), runner.epilogue(bench.of("epilogue"), slots)[1])
    bench.collect(slots := bench.slots(name), runner.backward(name, bench.of(name), slots))
    assert all(torch.equal(grad, want[n]) for n, grad in bench.grads.items() if ".layers.3." in n)


class Pair(nn.Module):
    """Takes two differentiable values and makes two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.b(torch.tanh(y)) * y, y * self.a(torch.sin(x))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Pair() for _ in range(4)), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x
        for layer in self.layers:
            x, y = layer(x, y)
        return self.head(x + y)


@pytest.mark.parametrize("act", [RECOMPUTE, RETAIN, SELECTIVE, Activation.OFFLOAD])
def test_several_inputs_that_were_on_the_host_are_told_apart(act: Activation) -> None:
    """They come back into one slot."""
    batch, name = tiny_models.mlp_batch(), "L02"
    bench = Bench(Pairs(), batch, tiny_models.classification_loss, acts={name: act})
    bench.step(batch)
    want, runner = dict(bench.grads), bench.runner
    forward(bench, batch)
    for head in ("act", "h") if act is Activation.OFFLOAD else ("h",):
        host = torch.empty(1 << 16, dtype=torch.uint8)
        slot = torch.full_like(host, 0xFF)
        assert runner.values.offload(f"{head}.{name}", host, Tensor.copy_)
        runner.values.leave(f"{head}.{name}", poisoned=True)
        runner.values.reload(f"{head}.{name}", host, slot, Tensor.copy_)
    bench.back_from_loss()
    assert all(torch.equal(grad, want[n]) for n, grad in bench.grads.items())


class Counting(nn.Module):
    """How often each of its matmuls has run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.calls: list[str] = []
        self.up.register_forward_hook(lambda *a: self.calls.append("up"))
        self.down.register_forward_hook(lambda *a: self.calls.append("down"))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_the_last_matmul_of_a_layer_is_not_computed_again() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Counting() for _ in range(3)), nn.Linear(12, 10))

    bench = Bench(make(), tiny_models.mlp_batch(), tiny_models.classification_loss, acts={"L02": RETAIN})
    for layer in bench.model[:3]:
        layer.calls.clear()
    bench.step(tiny_models.mlp_batch())
    assert [layer.calls for layer in bench.model[:3]] == [["up", "down", "up"], ["up", "down", "up"], ["up", "down"]]


@pytest.mark.parametrize("act", [RECOMPUTE, RETAIN, SELECTIVE])
def test_weights_are_bound_when_the_backward_runs(act: Activation) -> None:
    """The forward's slots hold something else by then."""
    batch = tiny_models.lm_batch()
    bench = Bench(tiny_models.family("gpt2"), batch, acts=act)
    bench.step(batch)
    want = {name: grad.clone() for name, grad in bench.grads.items()}
    layers = forward(bench, batch)
    for name in layers:
        old = whole(bench.weights[name][0])
        bench.weights[name] = bench.binding.leaves(old.clone(), name)
        old.fill_(float("nan"))
    bench.back_from_loss()
    assert all(torch.equal(bench.grads[name], grad) for name, grad in want.items())


def whole(leaf: Tensor) -> Tensor:
    """The flat slot that a parameter is part of."""
    return torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())


class Forgetful(nn.Module):
    """Does something else when it runs again: leaves a function out, or saves a slice."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.linear, self.habit, self.num_calls = nn.Linear(12, 12), habit, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        h = self.linear(x)
        if self.num_calls > 1 and self.habit == "fewer":
            return h
        if self.num_calls > 1 and self.habit == "other":
            h = h[:3]
        return x + torch.tanh(h).sum()


@pytest.mark.parametrize("act", [RECOMPUTE, RETAIN])
@pytest.mark.parametrize(("habit", "message"), [
    ("fewer", r"layer L01 \(Forgetful\) saved 3 tensors in its forward, but 2 when it was run again"),
    ("other", r"layer L01 \(Forgetful\) saved a tensor of shape \(6, 12\) and float32 .*, but a tensor of shape \(3, 12\)"),
])
def test_a_layer_that_saves_otherwise_when_run_again_is_named(habit: str, message: str, act: Activation) -> None:
    """Also where memory has become short: it has kept all, and must be run again."""
    model = nn.Sequential(Forgetful(), Forgetful(habit), Forgetful(), nn.Linear(12, 10))
    bench = Bench(model, tiny_models.mlp_batch(), tiny_models.classification_loss, acts=act)
    model[1].num_calls = 0
    bench.up_to_loss(tiny_models.mlp_batch())
    bench.runner.values.drop("L01")
    with pytest.raises(RuntimeError, match=message):
        bench.back_from_loss()


class SavesThroughContext(torch.autograd.Function):
    """As fused kernels do: inputs, a result and numbers, and a backward that writes into what it has saved."""

    @staticmethod
    def forward(ctx, x, w):
        y = x * w
        ctx.save_for_backward(x, w, y)
        ctx.scale = 2.0
        return y * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        x, w, y = ctx.saved_tensors
        assert torch.equal(y, x * w)
        y.mul_(0)
        return grad * ctx.scale * w, (grad * ctx.scale * x).sum(0)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.rand(12) + 0.5), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_grad_enabled() or not self.training
        return SavesThroughContext.apply(self.linear(x), self.scale)


def test_functions_that_save_through_their_context() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Fused() for _ in range(3)), nn.Linear(12, 10))

    for acts in (RECOMPUTE, RETAIN, SELECTIVE):
        compare(make, [tiny_models.mlp_batch()] * 2, tiny_models.classification_loss, acts=acts)


def test_a_saved_tensor_that_is_overwritten_is_noticed() -> None:
    saved = SavedTensors("layer L07 (Block)", keep=True)
    with saved.recording():
        x = enter({"x": torch.randn(4)})["x"]
        y = torch.sigmoid(x)
        out = (y * y).sum()
    y.detach().mul_(2)
    with pytest.raises(RuntimeError, match=r"layer L07 \(Block\): a tensor that its backward needs .* version 1, 0 was saved"):
        out.backward()


CASES = {case.name: case for case in tiny_models.plain_cases() + tiny_models.family_cases(("padded",))}


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_a_forward_keeps(name: str) -> None:
    """Beside its inputs. On a GPU dropout keeps a byte an element, not the compute dtype's, and some kernels pad a mask."""
    case = CASES[name]
    batch = case.batch(1)
    bench = Bench(case.model(), batch, case.loss_fn)
    runner = bench.runner
    runner.start(batch)
    runner.prologue(bench.of("prologue"))
    for stage, program in zip(bench.graph.layers, bench.trace.programs[1:-1], strict=True):
        inputs = {storage_of(runner.values.env[n]) for n in program.inputs}
        runner.forward(stage.name, bench.of(stage.name), Activation.RETAIN)
        kept = [t for t in runner.values.graphs[stage.name].saved.kept() if storage_of(t) not in inputs]
        assert num_bytes(kept) == stage.activation_bytes, stage.name
