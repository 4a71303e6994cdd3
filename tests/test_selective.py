"""Selective recompute: what is kept is what is dear for its size, and keeping any of it changes no bit."""

from __future__ import annotations

import random

import pytest
import tiny_models
import torch
from stage_bench import AWKWARD, Bench, compare, made
from test_saved import DROPOUT
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slidedp.compiler.decisions import Activation
from slidedp.compiler.footprint.moments import SELECTED_SHARE
from slidedp.executor.devices.parcels import num_bytes
from slidedp.executor.stages import selective
from slidedp.executor.stages.selective import Keeping, Measured, choose

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


def test_the_rule():
    matmul, norm, softmax = Measured(0, 1e-3, 4096), Measured(1, 2e-5, 4096), Measured(2, 9e-4, 2048)
    view, written = Measured(3, 1e-6, 4096), Measured(4, 5e-3, 0)
    ops = [matmul, norm, softmax, view, written]
    assert choose(ops, 16384, 1.0) == {0, 2}
    assert choose(ops, 16384, 0.2) == {2}, "dearest a byte first, within the share"
    assert choose([matmul], 4096, 0.5) == choose([], 4096, 0.5) == frozenset()


@pytest.fixture
def any_positions(monkeypatch):
    """Keeps results at random instead of by measurement."""
    def at_random(ops, layer_bytes, share):
        draw = random.Random(len(list(ops)))
        return frozenset(p for p in range(200) if draw.random() < 0.5)

    monkeypatch.setattr(selective, "choose", at_random)


@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_keeping_any_results_gives_eagers_gradients(name, any_positions):
    """The first step measures, the next two keep; dropout draws what it drew."""
    compare(lambda: tiny_models.family(name, **DROPOUT.get(name, {})), [tiny_models.lm_batch("padded", 1)] * 3,
            acts=Activation.SELECTIVE)  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_models(name, any_positions):
    compare(made(AWKWARD[name]), [tiny_models.mlp_batch()] * 3, tiny_models.classification_loss, acts=Activation.SELECTIVE)


class Calls(TorchDispatchMode):
    """Counts what is really computed."""

    def __init__(self):
        super().__init__()
        self.num_matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_matmuls += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


class Narrow(nn.Module):
    """A large matmul with a small result, then a large result that is cheap."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(512, 8, bias=False), nn.Linear(8, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.wide(torch.sin(self.narrow(x))))


def test_what_is_dear_for_its_size_is_not_computed_again():
    model = nn.Sequential(*(Narrow() for _ in range(3)), nn.Linear(512, 10))
    batch = {"x": torch.randn(256, 512), "target": torch.randint(0, 10, (256,))}
    bench = Bench(model, batch, tiny_models.classification_loss, acts=Activation.SELECTIVE)
    bench.step(batch)
    for _ in range(2):
        bench.up_to_loss(batch)
        stage = bench.graph.layers[1]
        kept = bench.runner.values.graphs[stage.name].keeping.kept()
        assert any(t.shape == (256, 8) for t in kept)
        assert 0 < num_bytes(kept) <= SELECTED_SHARE * stage.activation_bytes
        bench.runner.epilogue(bench.of("epilogue"), bench.slots("epilogue"))
        with Calls() as calls:
            bench.runner.recompute("L02", bench.of("L02"))
        assert calls.num_matmuls == 1, "the wide one"


def test_a_layer_that_calls_otherwise_is_named():
    keeping = Keeping("layer L01 (Block)", frozenset({1}))
    x = torch.randn(4)
    with keeping:
        torch.sin(torch.cos(x))
    with keeping.replay(), pytest.raises(RuntimeError, match=r"layer L01 \(Block\) called aten.sin.default as its op.* number 1"):
        torch.exp(torch.cos(x))


def test_what_is_written_to_in_place_runs_again():
    keeping = Keeping("layer", frozenset(range(9)))
    x = torch.randn(4, requires_grad=True)

    def run() -> Tensor:
        values, _ = torch.topk(torch.cos(x), 2)
        values /= values.sum()
        return torch.sin(values)

    with keeping:
        want = run()
    assert {"cos", "sum", "sin"} < {r.func._opname for r in keeping._results.values()}
    assert "topk" not in {r.func._opname for r in keeping._results.values()}
    with keeping.replay():
        assert torch.equal(run(), want)
