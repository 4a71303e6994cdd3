"""The tracer: what may happen between layers, and which layers there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from program_runner import assert_same, run_stages
from tiny_models import Blocks, PlainGPT, classification_loss, lm_batch, loss_and_grads, mlp_batch, no_glue
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slidedp.compiler.tracing.tracer import Trace, TraceError, trace

pytestmark = pytest.mark.null


@torch.no_grad()
def _frozen_mean(h: Tensor) -> Tensor:
    return h.mean(-1, keepdim=True)


class _Double(torch.autograd.Function):
    """Backward is not the derivative of forward, so that recording forward's own calls would be noticed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


GLUE: dict[str, Callable[..., Tensor]] = {
    "positions": lambda self, i, h, first, outs: h + self.table,
    "norms": lambda self, i, h, first, outs: self.norms[i](h),
    "parameter": lambda self, i, h, first, outs: h * self.scale[i],
    "reinjected": lambda self, i, h, first, outs: h + first,
    "skips": lambda self, i, h, first, outs: h + outs[-i - 1] * 0.5,
    "no_grad": lambda self, i, h, first, outs: h - _frozen_mean(h),
    "autograd_function": lambda self, i, h, first, outs: _Double.apply(h),
    "dropout": lambda self, i, h, first, outs: F.dropout(h, 0.3, True) + torch.rand(16),
    "random_ahead": lambda self, i, h, first, outs: h + (outs.append(torch.rand(16)) or outs[-1]),
    "properties": lambda self, i, h, first, outs: (h.mT.mT + h.split(8, dim=-1)[0].max(-1, keepdim=True).values).to(h.device),
    "iteration": lambda self, i, h, first, outs: torch.stack([row + 1 for row in h]),
    "in_place_of_own": lambda self, i, h, first, outs: (h * 2).add_(1).mul_(self.scale[i]),
}


class TupleBlock(nn.Module):
    """Returns a tuple with a dict and a second differentiable tensor inside."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        x = x[0] + x[1]["extra"] if isinstance(x, tuple) else x
        y = self.drop(torch.tanh(self.lin(x)))
        return y, {"extra": y * 0.5, "name": "block"}


@pytest.mark.parametrize("glue", GLUE)
def test_glue_between_layers(glue: str) -> None:
    model = Blocks(GLUE[glue])
    t = trace(model, lm_batch())
    assert len(t.graph.layers) == 4
    assert_same(t, model, lm_batch(seed=4))


def test_values_used_by_many_layers_are_kept_once() -> None:
    t = trace(Blocks(GLUE["reinjected"]), lm_batch())
    assert all("prologue.tok" in p.grad_inputs for p in t.programs[2:-1])
    hidden = 2 * 10 * 16 * 4
    assert [s.boundary_bytes for s in t.graph.layers] == [hidden, 2 * hidden, hidden, hidden]
    t = trace(Blocks(GLUE["skips"]), lm_batch())
    assert [len(p.grad_inputs) for p in t.programs[1:-1]] == [1, 2, 2, 2]


def test_layers_that_return_tuples_and_dicts_with_dropout_inside() -> None:
    class Model(Blocks):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            h = self.tok(input_ids)
            for block in self.blocks:
                h = block(h)
            return F.cross_entropy((self.head(h[0]) + h[1]["extra"].sum()).flatten(0, 1), labels.flatten()), h[0]

    model = Model(no_glue, TupleBlock)
    t = trace(model, lm_batch())
    assert all(len(p.outputs) == 2 for p in t.programs[1:-1])
    state = torch.get_rng_state()
    loss = model(**lm_batch(seed=2))[0]
    loss.backward()
    torch.set_rng_state(state)
    got, grads = run_stages(t, model, lm_batch(seed=2))
    assert torch.equal(got, loss)
    assert all(torch.equal(grads[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)


def test_dropout_draws_the_same_numbers_as_eager() -> None:
    model = PlainGPT(dropout=0.3)
    assert_same(trace(model, lm_batch()), model, lm_batch(seed=3))
    model = tiny_models.family("gpt2", resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1, attn_implementation="eager")
    assert_same(trace(model, lm_batch("padded")), model, lm_batch("padded", seed=5))


def test_a_block_used_at_two_depths_is_two_stages_and_one_group() -> None:
    model = Blocks(no_glue)
    model.blocks[2] = model.blocks[0]
    t = trace(model, lm_batch())
    assert [s.groups for s in t.graph.layers] == [("shared0",), ("L01",), ("shared0",), ("L03",)]
    assert t.graph.group("shared0").uses == ("L00", "L02")
    assert_same(t, model, lm_batch(seed=4))


def test_frozen_parameters_get_no_gradient_and_cut_it_off() -> None:
    model = Blocks(GLUE["norms"])
    for part in (model.tok, model.blocks[0], model.norms[0]):
        part.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    t = trace(model, lm_batch())
    assert t.programs[1].grad_inputs == t.programs[1].grad_outputs == ()
    assert t.programs[2].grad_inputs == ()
    assert len(t.programs[3].grad_inputs) == 1
    assert t.graph.group("L00").num_trainable == 0
    assert 0 < t.graph.group("L02").num_trainable < t.graph.group("L02").numel
    assert_same(t, model, lm_batch(seed=4))


class UntraceableLinear(nn.Linear):
    """As a Triton kernel: cannot run without memory behind its input."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.data_ptr(), "no memory"
        return super().forward(x)


def test_leaves_that_cannot_run_on_meta_are_like_their_input() -> None:
    model = Blocks(lambda self, i, h, first, outs: self.norms[i](h), lambda: nn.Sequential(UntraceableLinear(16, 16)))
    model.norms[1] = UntraceableLinear(16, 16)
    t = trace(model, lm_batch())
    assert t.graph.layers[0].flops == 2 * (16 * 16 + 16) * 20 + 0
    assert_same(t, model, lm_batch(seed=4))


def test_layers_can_be_chosen_by_name_and_by_predicate() -> None:
    def linears(t: Trace) -> list[str]:
        return [next(n.target for n in p.graph.nodes if n.op == "call_module") for p in t.programs[1:-1]]

    model = tiny_models.PlainViT()
    batch = tiny_models.image_batch()
    default = linears(trace(model, batch, loss_fn=classification_loss))
    assert default == ["encoder.0", "encoder.1", "encoder.2"]
    by_name = trace(model, batch, loss_fn=classification_loss, layers=["encoder.0.mlp", "encoder.2"])
    assert len(by_name.graph.layers) == 2
    assert_same(by_name, model, tiny_models.image_batch(3), classification_loss)
    by_type = trace(model, batch, loss_fn=classification_loss, layers=lambda name, m: isinstance(m, tiny_models.GPTBlock))
    assert linears(by_type) == default
    with pytest.raises(ValueError, match=r"encoder\.9"):
        trace(model, batch, loss_fn=classification_loss, layers=["encoder.9"])
    with pytest.raises(TraceError, match="layers="):
        trace(tiny_models.mlp(), mlp_batch(), loss_fn=classification_loss, layers=lambda name, m: False)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*deprecated")
def test_checkpointing_in_the_model_changes_nothing() -> None:
    class Checkpointed(Blocks):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h = self.tok(input_ids)
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())

    model = Checkpointed(no_glue)
    assert_same(trace(model, lm_batch()), model, lm_batch(seed=2))
    model = tiny_models.family("qwen3")
    model.gradient_checkpointing_enable()
    assert_same(trace(model, lm_batch()), model, lm_batch(seed=2))


def test_it_works_under_inference_mode_and_no_grad() -> None:
    with torch.inference_mode():
        t = trace(PlainGPT(), lm_batch())
    assert t.programs[1].grad_inputs


def test_a_container_that_is_never_called_is_not_the_layers() -> None:
    class Towers(PlainGPT):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.ModuleList(nn.Linear(200, 200) for _ in range(3))

    model = Towers()
    t = trace(model, lm_batch())
    assert len(t.graph.layers) == 3
    assert t.unused == tuple(n for n, _ in model.named_parameters() if n.startswith("vision"))
    assert_same(t, model, lm_batch(seed=2))


def test_every_device_the_model_names_is_the_one_programs_run_on() -> None:
    def glue(self: Blocks, i: int, h: Tensor, first: Tensor, outs: list[Tensor]) -> Tensor:
        assert h.is_cuda
        assert h.device.type == "cuda"
        return h + torch.arange(16, device=h.device) + torch.ones(16).to("cpu") + torch.zeros(16).cuda()

    t = trace(Blocks(glue), lm_batch(), device=torch.device("cuda", 0))
    devices = [a for p in t.programs for n in p.graph.nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, torch.device)]
    assert len(devices) == 20
    assert set(devices) == {torch.device("cuda", 0)}


def test_floating_arguments_are_cast_to_the_compute_dtype() -> None:
    model = tiny_models.mlp()
    t = trace(model, mlp_batch(), loss_fn=classification_loss, compute_dtype=torch.bfloat16)
    loss, grads = run_stages(t, model.to(torch.bfloat16), mlp_batch(2))
    want, want_grads = loss_and_grads(model, {**mlp_batch(2), "x": mlp_batch(2)["x"].bfloat16()}, classification_loss)
    assert torch.equal(loss, want)
    assert all(torch.equal(grads[n], want_grads[n]) for n in want_grads)
