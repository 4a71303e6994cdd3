"""The guardrail: training through a plan equals plain PyTorch bit for bit (FP32, CPU, one rank, torch's update)."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny_models import PlainGPT, all_cases, family, lm_batch
from torch import nn
from training import assert_same_bits, loss_of_output, norm_wise, rounded, train_plainly, train_planned, train_resident

import slidedp

pytestmark = pytest.mark.cpu

OPTIMIZER = slidedp.AdamW(lr=1e-2, weight_decay=0.1)
CASES = {case.name: case for case in all_cases()}


def loss_of_case(case):
    """The global mean loss, as the case's own loss_fn or its model gives it."""

    def loss(model, batch):
        if case.loss_fn is None:
            return loss_of_output(model, batch)
        total, count = case.loss_fn(model(next(iter(batch.values()))), batch)
        return total / count

    return loss


@pytest.mark.parametrize("name", CASES)
def test_five_steps(name):
    """Losses, first gradients, weights and both moments, for every family and padding, and for plain modules."""
    case = CASES[name]
    model, batches = case.model(), [case.batch(seed) for seed in range(1, 6)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_case(case))
    got = train_planned(model, batches, OPTIMIZER, loss_fn=case.loss_fn, update_kernel="torch")
    assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["gpt", "qwen3-padded", "mlp"])
def test_native_kernel_agrees_norm_wise(name):
    """From equal gradients (one step: later ones drift apart where a gradient is nothing but rounding noise)."""
    case = CASES[name]
    model, batches = case.model(), [case.batch(1)]
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    want = train_plainly(model, batches, OPTIMIZER, loss_of_case(case))
    got = train_planned(model, batches, OPTIMIZER, loss_fn=case.loss_fn, update_kernel="native")
    for n in want.params:
        assert norm_wise(got.params[n] - start[n], want.params[n] - start[n]) < 1e-4, n
    for part, n in product(("exp_avg", "exp_avg_sq"), want.exp_avg):
        assert norm_wise(getattr(got, part)[n], getattr(want, part)[n]) < 1e-6, (part, n)


DATAPATHS = [{"source": s, "delivery_chunks": c, "return_chunks": k, "window": w}
             for s, (c, k), w in product(("cast", "shadow"), ((1, 1), (3, 7), (7, 3)), (1, 2, 3, 99))]


def test_datapaths_give_identical_bits():
    model, batches = PlainGPT(width=64), [lm_batch(seed=i) for i in range(3)]
    digests = {train_planned(model, batches, OPTIMIZER, policy=policy, update_kernel="native").digest() for policy in DATAPATHS}
    assert len(digests) == 1


def test_dropout_is_replayed():
    """Recompute draws what forward drew, in torch's order, so that training with dropout equals eager training."""
    model, batches = PlainGPT(dropout=0.3), [lm_batch(seed=i) for i in range(4)]
    torch.manual_seed(5)
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    torch.manual_seed(5)
    got = train_planned(model, batches, OPTIMIZER, update_kernel="torch")
    assert_same_bits(got, want)
    torch.manual_seed(6)
    assert train_planned(model, batches, OPTIMIZER, update_kernel="torch").losses != want.losses


def frozen_gpt():
    model = PlainGPT()
    for name, p in model.named_parameters():
        p.requires_grad_(not (name.startswith("blocks.1.") or "norm1" in name or name.startswith("pos.")))
    return model


class Odd(nn.Module):
    """Odd and zero sizes, a parameter nobody uses, a block used at two depths, a parameter shared by all layers."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(5, 7), nn.Linear(7, 3, bias=False)
        shared = nn.Parameter(torch.ones(7))
        blocks = [nn.Linear(7, 7) for _ in range(3)]
        blocks = [blocks[0], blocks[1], blocks[0], blocks[2]]
        self.layers = nn.ModuleList(Scaled(b, shared) for b in blocks)
        self.empty, self.unused = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.randn(3))

    def forward(self, x, target):
        h = self.inp(x) + self.empty.sum()
        for layer in self.layers:
            h = layer(h)
        return nn.functional.mse_loss(self.out(h), target)


class Scaled(nn.Module):
    def __init__(self, linear, scale):
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.scale


def test_frozen_parameters():
    model, batches = frozen_gpt(), [lm_batch(seed=i) for i in range(4)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    for policy in ({"chunks": 1}, {"chunks": 5, "source": "cast", "window": 2}):
        assert_same_bits(train_planned(model, batches, OPTIMIZER, update_kernel="torch", policy=policy), want)


@pytest.mark.parametrize("policy", [{"chunks": 1}, {"chunks": 3, "source": "cast", "window": 1}], ids=str)
def test_odd_shared_and_unused_parameters(policy):
    torch.manual_seed(0)
    model = Odd()
    batches = [{"x": torch.randn(4, 5), "target": torch.randn(4, 3)} for _ in range(4)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    assert_same_bits(train_planned(model, batches, OPTIMIZER, update_kernel="torch", policy=policy), want)


@pytest.mark.parametrize("name", ["gpt", "llama-padded", "qwen3-none"])
def test_bf16_equals_the_resident_recipe(name):
    """BF16 weights, activations and gradients, FP32 masters: bit for bit what a trainer that holds them all does."""
    case = CASES[name]
    model, batches = rounded(case.model()), [case.batch(seed) for seed in range(1, 6)]
    want = train_resident(model, batches, OPTIMIZER, "cpu")
    got = train_planned(model, batches, OPTIMIZER, compute_dtype=torch.bfloat16, update_kernel="torch")
    assert_same_bits(got, want)


def test_bf16_compute_stays_close_to_fp32():
    """Same FP32 masters, BF16 weights, activations and gradients: losses within BF16's rounding of the FP32 run."""
    model, batches = family("qwen3"), [lm_batch("padded", seed=i) for i in range(1, 6)]
    exact = train_planned(model, batches, OPTIMIZER)
    rounded = train_planned(model, batches, OPTIMIZER, compute_dtype=torch.bfloat16)
    assert exact.losses != rounded.losses
    for a, b in zip(exact.losses, rounded.losses, strict=True):
        assert abs(a - b) < 2e-2 * a
    assert all(p.dtype is torch.float32 for p in rounded.params.values())
