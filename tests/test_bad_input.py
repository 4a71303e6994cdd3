"""What the user got wrong is named, with the remedy, before anything has changed; and the plan goes on working."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tiny_models import PlainGPT, family, lm_batch
from torch import nn
from training import state_of

import slidedp
from slidedp.executor.machine.step import NonFiniteLoss
from slidedp.executor.optim.adam import NonFiniteGradient

pytestmark = pytest.mark.cpu


def all_ignored(batch):
    batch["labels"][:] = -100


def beyond_vocabulary(batch):
    batch["input_ids"][0, 3] = 9999


def negative_id(batch):
    batch["input_ids"][1, 0] = -1


def label_beyond_classes(batch):
    batch["labels"][0, 5] = 128


def unknown_key(batch):
    batch["token_types"] = batch["input_ids"]


def not_a_tensor(batch):
    batch["labels"] = np.asarray(batch["labels"])


def nothing_in_it(batch):
    batch.clear()


def empty_tensor(batch):
    batch["input_ids"] = batch["input_ids"][:0]


def differentiable(batch):
    batch["embeddings"] = torch.zeros(2, 10, 8, requires_grad=True) * 2


BAD_BATCHES = [
    (all_ignored, "no valid token"), (beyond_vocabulary, "9999"), (negative_id, "-1"), (label_beyond_classes, "128"),
    (unknown_key, "token_types"), (not_a_tensor, "labels"), (nothing_in_it, "empty"), (empty_tensor, "input_ids"),
    (differentiable, "requires a gradient.*detach"),
]


@pytest.mark.parametrize("make", [PlainGPT, lambda: family("llama")], ids=["plain", "hf"])
def test_bad_batches_change_nothing(make):
    """Also as the very first batch, and as the example."""
    with slidedp.compile(make(), "cpu") as plan:
        for spoil, names in BAD_BATCHES:
            batch = lm_batch()
            spoil(batch)
            with pytest.raises(ValueError, match=names):
                plan.run(batch)
            with pytest.raises(ValueError, match=names):
                plan.evaluate(batch)
        first = plan.run(lm_batch())
        before = state_of(plan).digest()
        for spoil, names in BAD_BATCHES:
            batch = lm_batch(seed=3)
            spoil(batch)
            with pytest.raises(ValueError, match=names):
                plan.run(batch)
        assert state_of(plan).digest() == before
        assert plan.run(lm_batch()).step == first.step + 1
        assert state_of(plan).digest() != before


def with_parameter(value):
    model = PlainGPT()
    model.blocks[1].extra = nn.Parameter(value, requires_grad=False)
    return model


@pytest.mark.parametrize(("value", "names"), [
    (torch.eye(3).to_sparse(), "sparse"), (torch.ones(2, dtype=torch.complex64), "complex"),
    (torch.ones(2, dtype=torch.int8), "int8"),
])
def test_parameters_that_cannot_be_trained(value, names):
    with pytest.raises(ValueError, match=rf"blocks\.1\.extra.*{names}"):
        slidedp.compile(with_parameter(value), "cpu", example=lm_batch())


def test_budgets_that_are_too_small():
    with pytest.raises(ValueError, match=r"HBM.*budget.*raise hbm_budget"):
        slidedp.compile(PlainGPT(), "cpu", example=lm_batch(), hbm_budget="10KiB")
    with pytest.raises(ValueError, match=r"host.*budget.*raise host_budget"):
        slidedp.compile(PlainGPT(), "cpu", example=lm_batch(), host_budget=1000)
    with pytest.raises(ValueError, match="10 potatoes"):
        slidedp.compile(PlainGPT(), "cpu", hbm_budget="10 potatoes")


def test_an_optimizer_of_torch_is_refused_in_short():
    model = PlainGPT()
    with pytest.raises(ValueError, match=r"^optimizer= takes a description, slidedp.AdamW\(lr=1e-5, ...\), not AdamW of torch"):
        slidedp.compile(model, "cpu", optimizer=torch.optim.AdamW(model.parameters()))


def test_plan_of_another_model(tmp_path):
    with slidedp.compile(PlainGPT(), "cpu", example=lm_batch()) as plan:
        plan.dump(tmp_path / "plan.yaml")
    with slidedp.compile(PlainGPT(), "cpu", example=lm_batch(), policy=tmp_path / "plan.yaml") as again:
        assert again.decisions == slidedp.load_plan(tmp_path / "plan.yaml").decisions
    with pytest.raises(ValueError, match="another model"):
        slidedp.compile(PlainGPT(layers=2), "cpu", example=lm_batch(), policy=tmp_path / "plan.yaml")


@pytest.mark.parametrize(("kwargs", "names"), [
    ({"hw_profile": "h300"}, "h300"), ({"compute_dtype": torch.float16}, "float16"), ({"device": "tpu"}, "tpu"),
    ({"policy": {"delivery": "teleport"}}, "teleport"), ({"policy": {"windows": 3}}, "windows"),
    ({"policy": {"act": "sometimes"}}, "recompute"), ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ({"skip_nonfinite": True, "policy": {"update": "in_backward"}}, "update: deferred"),
    ({"policy": {"update": "late"}}, "deferred"),
    ({"update_kernel": "fast"}, "fast"), ({"layers": ["nowhere"]}, "nowhere"),
    ({"optimizer": "adam"}, "optimizer"), ({"num_threads": 0}, "num_threads"),
])
def test_arguments(kwargs, names):
    with pytest.raises(ValueError, match=names):
        slidedp.compile(PlainGPT(), **{"hw_profile": "cpu", "example": lm_batch(), **kwargs})


def regression():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def squared_error(outputs, batch):
    return ((outputs - batch["y"]) ** 2).sum(), outputs.numel()


def run_to_the_end(plan, batch):
    plan.run(batch)
    plan.synchronize()


def test_a_loss_that_is_not_finite_changes_nothing():
    plan = slidedp.compile(regression(), "cpu", loss_fn=squared_error)
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 1)}
    plan.run(batch)
    before = {n: p.clone() for n, p in plan.model.named_parameters()}
    with pytest.raises(NonFiniteLoss, match="nothing has been updated"):
        run_to_the_end(plan, {**batch, "x": batch["x"] * float("nan")})
    plan.close()
    assert all(torch.equal(p, before[n]) for n, p in plan._model.named_parameters())


class Explodes(torch.autograd.Function):
    """A finite value with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


class Exploding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.armed = nn.Linear(8, 8), False

    def forward(self, x):
        return Explodes.apply(self.linear(x)) if self.armed else self.linear(x)


def test_a_gradient_that_is_not_finite_says_what_has_moved():
    """Only the first layer's is not: it is named, and of the others just what has moved, however far the updates are."""
    model = nn.Sequential(Exploding(), nn.Linear(8, 8), nn.Linear(8, 1))
    plan = slidedp.compile(model, "cpu", loss_fn=squared_error, policy={"chunks": 1})
    batch = {"x": torch.randn(3, 8), "y": torch.randn(3, 1)}
    plan.run(batch)
    before = {n: p.clone() for n, p in plan.model.named_parameters()}
    model[0].armed = True
    with pytest.raises(NonFiniteGradient, match=r"0\.linear") as caught:
        run_to_the_end(plan, batch)
    plan.close()
    said = re.search(r"updated before this was seen: ([^;]*);", " ".join(caught.value.__notes__))[1]
    moved = {f"L0{n[0]}" for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert said == (", ".join(sorted(moved)) or "nothing")
    assert "L00" not in moved


def test_a_failure_of_the_last_step_is_raised_by_close():
    model = nn.Sequential(nn.Linear(4, 8), Exploding(), nn.Linear(8, 1))
    plan = slidedp.compile(model, "cpu", loss_fn=squared_error)
    batch = {"x": torch.randn(3, 4), "y": torch.randn(3, 1)}
    plan.run(batch)
    plan.synchronize()
    model[1].armed = True
    plan.run(batch)  # its loss is finite
    with pytest.raises(NonFiniteGradient):
        plan.close()
    plan.close()
    assert all(torch.isfinite(p).all() for p in model.parameters())
