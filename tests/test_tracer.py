"""The tracer: families and plain models bit for bit, guards, costs, the model left alone, loss and its count."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
import transformers as hf
from program_runner import assert_same, run_stages
from tiny_models import Case, PlainGPT, lm_batch
from torch import Tensor, nn

from slidedp.compiler.layergraph import StageKind
from slidedp.compiler.tracing.tracer import TraceError, guards_hold, specialisation_key, trace

pytestmark = pytest.mark.null


@pytest.mark.parametrize("case", tiny_models.all_cases(), ids=lambda c: c.name)
def test_stages_equal_the_model_bit_for_bit_on_other_data(case: Case) -> None:
    model = case.model()
    t = trace(model, case.batch(1), loss_fn=case.loss_fn)
    batch = case.batch(6)
    assert guards_hold(t, batch) is None
    assert_same(t, model, batch, case.loss_fn)
    assert t.unused == ()
    layers = [StageKind.LAYER] * len(t.graph.layers)
    assert [s.kind for s in t.graph.stages] == [StageKind.PROLOGUE, *layers, StageKind.EPILOGUE]
    key = "labels" if case.loss_fn is None else "target"
    valid = batch[key][:, 1:] if case.loss_fn is None else batch[key]
    assert t.num_valid(batch) == int((valid != -100).sum())
    assert t.loss_is_mean is (case.loss_fn is None)


@pytest.mark.parametrize("name", [n for n in tiny_models.FAMILIES if n not in ("mistral", "gemma2")])
def test_a_trace_of_an_all_ones_mask_refuses_a_padded_batch(name: str) -> None:
    t = trace(tiny_models.family(name), lm_batch("ones"))
    assert guards_hold(t, lm_batch("ones", seed=5)) is None
    violation = guards_hold(t, lm_batch("padded"))
    assert violation is not None
    assert "attention_mask" in violation
    assert "was True" in violation


def test_specialisation_key_tells_shapes_dtypes_and_mode_apart() -> None:
    batch = lm_batch()
    keys = {
        specialisation_key(batch, True),
        specialisation_key(batch, False),
        specialisation_key(lm_batch(seq=8), True),
        specialisation_key({**batch, "labels": batch["labels"].int()}, True),
        specialisation_key(lm_batch("ones"), True),
    }
    assert len(keys) == 5
    assert specialisation_key(dict(reversed(batch.items())), True) == specialisation_key(lm_batch(seed=9), True)


def test_qwen3_32b_traces_without_weights() -> None:
    config = hf.Qwen3Config(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
                            num_key_value_heads=8, head_dim=128, vocab_size=151936)  # fmt: skip
    with torch.device("meta"):
        model = hf.Qwen3ForCausalLM(config)
    t = trace(model, lm_batch(batch=8, seq=1024), world_size=4, compute_dtype=torch.bfloat16)
    assert len(t.graph.layers) == 64
    assert len({s.kind_key for s in t.graph.layers}) == 1
    layer, tokens = t.graph.layers[0], 8 * 1024
    weights = sum(p.numel for p in t.graph.group("L00").params if len(p.shape) == 2)
    assert layer.flops == 2 * weights * tokens + 4 * tokens * 1024 * 64 * 128  # matmuls; scores and weighted sum
    assert layer.boundary_bytes == tokens * 5120 * 2
    # at least each matmul's input; far from the S x S scores of unfused attention, 8.6 GB
    assert tokens * (2 * 5120 + 64 * 128 + 25600) * 2 < layer.activation_bytes < 4e9
    assert t.graph.compute_dtype == "bfloat16"
    assert sum(p.numel for g in t.graph.groups for p in g.params) == sum(p.numel() for p in model.parameters())
    assert t.vocab_checks == (("input_ids", 151936),)


def test_tracing_leaves_the_model_its_buffers_and_random_state_alone() -> None:
    class Nosy(PlainGPT):
        def __init__(self) -> None:
            super().__init__(dropout=0.1)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("running", torch.zeros(32))
            self.log: list[Any] = []

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            self.calls += 1
            self.last_ids = input_ids
            self.log.append(input_ids)
            self.running = torch.ones(32)
            self.blocks[0].register_forward_hook(lambda *a: None)
            return super().forward(input_ids, labels)

    model = Nosy()
    before = {n: (t, t._version, t.clone()) for n, t in (*model.named_parameters(), *model.named_buffers())}
    attributes = {n: set(m.__dict__) for n, m in model.named_modules()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    call, apply = nn.Module.__call__, torch.autograd.Function.apply
    trace(model, lm_batch())
    with pytest.raises(TraceError):
        trace(model, lm_batch(), layers=["head"], loss_fn=lambda out, batch: (out.nonzero().sum().float(), 1))
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == before.keys()
    for name, (tensor, version, value) in before.items():
        assert after[name] is tensor
        assert tensor._version == version
        assert tensor.grad is None
        assert torch.equal(tensor, value)
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == attributes
    assert model.log == []
    assert not model.blocks[0]._forward_hooks
    assert torch.equal(torch_state, torch.get_rng_state())
    assert random.getstate() == python_state
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.apply == apply


def test_buffers_that_glue_writes_are_written_when_programs_run() -> None:
    class Counting(PlainGPT):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            before = self.calls * 1
            self.calls += 1
            return super().forward(input_ids, labels) * before * self.calls

    torch.manual_seed(0)
    eager = Counting()
    torch.manual_seed(0)
    model = Counting()
    t = trace(model, lm_batch(), loss_fn=lambda out, batch: (out, 1))
    assert t.programs[0].buffers == ("calls",)
    for _ in range(3):
        assert torch.equal(run_stages(t, model, lm_batch())[0], eager(**lm_batch()))
    assert model.calls == eager.calls == 3


# ---- loss


@pytest.mark.parametrize(
    ("loss", "num_valid"),
    [
        (lambda out, y: nn.CrossEntropyLoss(ignore_index=3)(out, y), 4),
        (lambda out, y: F.nll_loss(out.log_softmax(-1), y, ignore_index=3) * 2, 4),
        (lambda out, y: F.mse_loss(out[:, 0], y.float()), 6),
        (lambda out, y: F.binary_cross_entropy_with_logits(out[:, :2], (y > 2).float()[:, None].expand(-1, 2)), 12),
        (lambda out, y: {"loss": F.smooth_l1_loss(out[:, 0], y.float()).float()}, 6),
    ],
)
def test_the_mean_that_ends_in_the_loss_says_how_many_are_valid(loss: Any, num_valid: int) -> None:
    assert trace(Labelled(loss), LABELLED).num_valid(LABELLED) == num_valid


LABELLED = {"x": torch.randn(6, 12), "y": torch.tensor([1, 3, 0, 2, 3, 4])}


class Labelled(nn.Module):
    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.loss_fn = tiny_models.mlp(), loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.loss_fn(self.net(x), y)


def test_loss_fn_may_use_the_models_own_head_and_return_an_int() -> None:
    class Backbone(PlainGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            h = self.tok(input_ids)
            for block in self.blocks:
                h = block(h)
            return self.norm(h)

    model = Backbone()

    def loss_fn(out: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(model.head(out).flatten(0, 1), batch["labels"].flatten(), reduction="sum"), out.shape[0]

    t = trace(model, lm_batch(), loss_fn=loss_fn)
    assert t.num_valid(lm_batch()) == 2
    assert t.graph.group("shared0").uses == ("prologue", "epilogue")
    assert_same(t, model, lm_batch(seed=2), loss_fn)


def test_the_last_layer_may_return_the_loss() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 4)

        def forward(self, h: Tensor) -> Tensor:
            return self.head(h).square().mean()

    model = nn.Sequential(nn.Linear(12, 16), Last())
    loss_fn = lambda out, batch: (out, batch["x"].shape[0])  # noqa: E731
    t = trace(model, {"x": torch.randn(6, 12)}, loss_fn=loss_fn)
    assert t.programs[-1].outputs[0].startswith("epilogue.")
    assert_same(t, model, {"x": torch.randn(6, 12)}, loss_fn)


def test_triton_kernels_are_skipped_and_what_their_functions_save_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Triton: a launch goes through `JITFunction.run`, and would end in an error on a meta tensor."""

    class JITFunction:
        def run(self, x: Tensor, out: Tensor) -> None:
            assert not x.is_meta
            out.copy_(x * 2)

    triton = types.ModuleType("triton.runtime.jit")
    triton.JITFunction = JITFunction
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", triton)
    kernel, run = JITFunction(), JITFunction.run

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            kernel.run(x, out)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return x + Doubled.apply(self.linear(x))

    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(12, 10))
    t = trace(model, tiny_models.mlp_batch(), loss_fn=tiny_models.classification_loss)
    assert [s.activation_bytes for s in t.graph.layers] == [512, 512, 0]  # 6 x 12 FP32, rounded up
    assert JITFunction.run is run
    assert torch.equal(kernel_output(kernel), torch.full((2,), 2.0))


def kernel_output(kernel: Any) -> Tensor:
    out = torch.empty(2)
    kernel.run(torch.ones(2), out)
    return out
