"""The stage runner against eager PyTorch on the CPU: losses, gradients, buffers and generators, bit for bit."""

from __future__ import annotations

import gc

import pytest
import tiny_models
import torch
from stage_bench import AWKWARD, Bench, Shared, compare, made
from torch import Tensor, nn

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


CASES = {case.name: case for case in tiny_models.plain_cases() + tiny_models.family_cases(("padded",))}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    case = CASES[name]
    compare(case.model, [case.batch(1), case.batch(1)], case.loss_fn)


def test_bfloat16_gradients_are_eagers_too() -> None:
    compare(made(tiny_models.PlainGPT), [tiny_models.lm_batch()], dtype=torch.bfloat16)


def test_dropout_is_recomputed_with_its_own_random_numbers() -> None:
    drops = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    bench = compare(lambda: tiny_models.family("gpt2", use_cache=False, **drops), [tiny_models.lm_batch()] * 2)
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


class SharedDropout(nn.Module):
    """Layers with a dropout of their own, and one that is all layers'."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Dropout(0.3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3), nn.Tanh(), shared) for _ in range(3))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_rerun_has_the_modes_of_its_forward(training: bool) -> None:
    """Whatever the user switches in the meantime, which stays as they left it."""
    batch = tiny_models.mlp_batch()
    bench = Bench(made(SharedDropout)().train(training), batch, tiny_models.classification_loss)
    torch.manual_seed(1)
    bench.step(batch)
    want = bench.grads
    torch.manual_seed(1)
    bench.up_to_loss(batch)
    bench.model.train(not training)
    bench.back_from_loss()
    assert all(torch.equal(grad, want[name]) for name, grad in bench.grads.items())
    assert {module.training for module in bench.model.modules()} == {not training}


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
    assert not bench.runner.values.env
    compare(lambda: tiny_models.family("qwen3"), [batch])


def test_boundary_values_live_from_forward_to_backward_and_no_longer() -> None:
    batch = tiny_models.mlp_batch()
    bench = Bench(tiny_models.mlp(), batch, tiny_models.classification_loss)
    runner = bench.runner
    first, *layers, last = [s.name for s in bench.graph.stages]
    runner.start(batch)
    runner.prologue(bench.of(first))
    for name in layers:
        runner.forward(name, bench.of(name))
    bench.written = set()
    assert len(runner.values.env) == len(layers) + 2  # each layer's input, the last one's output, the target
    runner.epilogue(bench.of(last), bench.slots(last))
    assert len(runner.values.env) == len(layers)
    for i, name in enumerate(reversed(layers)):
        runner.recompute(name, bench.of(name))
        assert len(runner.values.env) == len(layers) - i
        runner.backward(name, bench.of(name), bench.slots(name))
        assert len(runner.values.env) == len(layers) - 1 - i
        assert len(runner.values.grads) <= 1


def test_a_step_frees_its_tensors() -> None:
    batch = tiny_models.mlp_batch()
    bench = Bench(tiny_models.mlp(), batch, tiny_models.classification_loss)
    before = tensors()  # held, so that none of another test's goes meanwhile
    alive = []
    for _ in range(3):
        bench.step(batch)
        gc.collect()
        alive.append(len(tensors()))
    assert alive[1] == alive[2] >= len(before)


def tensors() -> list[Tensor]:
    return [o for o in gc.get_objects() if type(o) is Tensor]
