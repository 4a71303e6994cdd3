"""The guardrail: training through a plan equals plain PyTorch bit for bit (FP32, CPU, one rank, torch's update)."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice, product

import pytest
import torch
from tiny_models import PlainGPT, all_cases, family, lm_batch
from torch import nn
from training import (
    assert_same_bits,
    assert_same_tensors,
    loss_of_output,
    norm_wise,
    rounded,
    traced_once,
    train_plainly,
    train_planned,
    train_resident,
)

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
    """Losses, every step's gradients, weights and both moments, for every family and padding, and for plain modules."""
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
    with traced_once():
        digests = {train_planned(model, batches, OPTIMIZER, policy=policy, update_kernel="native", solver="rule").digest()
                   for policy in DATAPATHS}
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


MIXED = [("none", 2, 10), ("padded", 2, 10), ("padded", 3, 7), ("none", 3, 7), ("ones", 2, 10), ("padded", 2, 10)]


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_one_plan_of_several_shapes(name):
    """Two shapes, with and without padding, in turns: a specialisation each, over one state."""
    model, batches = family(name), [lm_batch(padding, 1 + i, b, s) for i, (padding, b, s) in enumerate(MIXED)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output)
    num_specs = []
    got = train_planned(model, batches, OPTIMIZER, update_kernel="torch", policy={"window": 2, "chunks": 3},
                        after=lambda plan: num_specs.append(len(plan._planner.known)))
    assert_same_bits(got, want)
    assert num_specs[0] == 1
    assert 4 <= num_specs[-1] < len(MIXED), "the second padded batch of a shape has a specialisation already"


def eager_eval(model, batch):
    """Mean loss in eval mode; every submodule's mode is put back."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    with torch.no_grad():
        loss = loss_of_output(model, batch).item()
    for module, mode in modes:
        module.training = mode
    return loss


@pytest.mark.parametrize("toggle", [False, True], ids=["train", "toggled"])
@pytest.mark.parametrize("name", ["gpt-dropout", "qwen3"])
def test_evaluate_between_steps(name, toggle):
    """It equals eager's eval loss and changes no bit of training, which draws the dropout that it would have drawn anyhow.

    `toggle`: the user switches modes themselves, as training loops do: the third step is taken in eval mode.
    """
    model = PlainGPT(dropout=0.3) if name == "gpt-dropout" else family(name)
    batches = [lm_batch(seed=i, batch=2 + i % 2) for i in range(4)]
    held_out = lm_batch(seed=9, batch=3) if name == "gpt-dropout" else lm_batch("padded", seed=9)
    want_evals, got_evals, steps = [], [], Counter()

    def between(model, evals, evaluate, who):
        steps[who] += 1
        if toggle:
            model.eval()
        evals.append(evaluate(held_out))
        if toggle and steps[who] != 2:
            model.train()

    torch.manual_seed(5)
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output,
                         after=lambda m: between(m, want_evals, lambda batch: eager_eval(m, batch), "eager"))
    torch.manual_seed(5)
    got = train_planned(model, batches, OPTIMIZER, update_kernel="torch",
                        after=lambda plan: between(plan.model, got_evals, plan.evaluate, "plan"))
    assert got_evals == want_evals
    assert_same_bits(got, want)
    if name == "gpt-dropout" and toggle:
        torch.manual_seed(5)
        always = train_plainly(model, batches, OPTIMIZER, loss_of_output)
        assert always.losses[:2] == want.losses[:2]
        assert always.losses[2] != want.losses[2], "the third step must have been without dropout"


def test_evaluate_without_reading_the_model():
    """Evaluations follow steps whose updates are still under way, and steps follow evaluations, with nothing between."""
    model, batches = PlainGPT(dropout=0.3), [lm_batch(seed=i) for i in range(4)]
    want_evals, got_evals = [], []
    torch.manual_seed(5)
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output,
                         after=lambda m: want_evals.extend(eager_eval(m, lm_batch(seed=s)) for s in (7, 8)))
    torch.manual_seed(5)
    got = train_planned(model, batches, OPTIMIZER, update_kernel="torch", policy={"window": 1, "chunks": 2, "source": "cast"},
                        after=lambda plan: got_evals.extend(plan.evaluate(lm_batch(seed=s)) for s in (7, 8)))
    assert got_evals == want_evals
    assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_state_dict_in_mid_training(name):
    """The same keys in the same order, the same bits, tied weights tied, after every step."""
    model, batches = family(name), list(islice(cycle([lm_batch("padded", 1), lm_batch("none", 2)]), 4))
    want, got = [], []

    def keep(into, model):
        state = model.state_dict()
        num_tied = max(Counter(t.data_ptr() for t in state.values()).values())
        into.append(({n: t.clone() for n, t in state.items()}, num_tied))

    train_plainly(model, batches, OPTIMIZER, loss_of_output, after=lambda m: keep(want, m))
    train_planned(model, batches, OPTIMIZER, update_kernel="torch", after=lambda plan: keep(got, plan.model))
    for step, ((mine, my_ties), (theirs, their_ties)) in enumerate(zip(got, want, strict=True), 1):
        assert list(mine) == list(theirs)
        assert my_ties == their_ties == 2
        assert_same_tensors(mine, theirs, f"state_dict after step {step}")


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
    want = train_resident(model, batches, OPTIMIZER, "cpu", keep_grads=True)
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
