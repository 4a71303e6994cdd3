"""The tracer: stage programs run one by one equal the model bit for bit; guards; refusals; groups; costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
import transformers as hf
from slidedp.compiler.grouping import make_groups, model_params
from slidedp.compiler.layergraph import ALIGN, Group, StageKind
from slidedp.compiler.tracer import Trace, TraceError, guards_hold, specialisation_key, trace
from tiny_models import Case, PlainGPT, classification_loss, lm_batch, loss_and_grads, mlp_batch
from torch import Tensor, nn

pytestmark = pytest.mark.null


def run_stages(t: Trace, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What the executor does: layers forward without gradients, then each again, last first, with its vector-Jacobian product."""
    env: dict[str, Tensor] = {f"batch.{k}": v for k, v in batch.items()}
    named = dict(model.named_parameters())
    grads: dict[str, Tensor] = {}
    saved: dict[str, tuple[list[Tensor], Tensor]] = {}

    def add(name: str, g: Tensor | None) -> None:
        if g is not None:
            grads[name] = grads[name] + g if name in grads else g

    def vjp(p: Any, inputs: list[Tensor], outputs: tuple[Tensor, ...], seeds: list[Tensor | None]) -> None:
        wanted = {n: x for n, x in zip(p.inputs, inputs, strict=True) if n in p.grad_inputs}
        wanted |= {n: named[n] for n in p.params if named[n].requires_grad}
        pairs = [(o, g) for n, o, g in zip(p.outputs, outputs, seeds, strict=True) if n in p.grad_outputs and g is not None]
        if pairs and wanted:
            got = torch.autograd.grad([o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True)
            for name, g in zip(wanted, got, strict=True):
                add(name, g)

    prologue, *layers, epilogue = t.programs
    made = prologue.fn(model, *(env[n] for n in prologue.inputs))
    env |= {n: v.detach() for n, v in zip(prologue.outputs, made, strict=True)}
    for p in layers:
        saved[p.name] = ([env[n] for n in p.inputs], torch.get_rng_state())
        with torch.no_grad():
            env |= zip(p.outputs, p.fn(model, *saved[p.name][0]), strict=True)
    for p in (epilogue, *reversed(layers)):
        inputs, state = saved.get(p.name, ([env[n] for n in p.inputs], None))
        inputs = [x.detach().requires_grad_(n in p.grad_inputs) for n, x in zip(p.inputs, inputs, strict=True)]
        if state is not None:
            torch.set_rng_state(state)
        outputs = p.fn(model, *inputs)
        if p is epilogue:
            loss = outputs[0].detach()
        vjp(p, inputs, outputs, [torch.ones_like(loss)] if p is epilogue else [grads.get(n) for n in p.outputs])
    vjp(prologue, [env[n] for n in prologue.inputs], made, [grads.get(n) for n in prologue.outputs])
    return loss, {n: g for n, g in grads.items() if n in named}


def assert_same(t: Trace, model: nn.Module, batch: Mapping[str, Tensor], loss_fn: Any = None) -> None:
    state = torch.get_rng_state()
    want, want_grads = loss_and_grads(model, batch, loss_fn)
    torch.set_rng_state(state)
    got, got_grads = run_stages(t, model, batch)
    assert torch.equal(got, want)
    assert got_grads.keys() == want_grads.keys()
    assert [n for n in want_grads if not torch.equal(got_grads[n], want_grads[n])] == []


@pytest.mark.parametrize("case", tiny_models.all_cases(), ids=lambda c: c.name)
def test_stages_equal_the_model_bit_for_bit_on_other_data(case: Case) -> None:
    model = case.model()
    t = trace(model, case.batch(1), loss_fn=case.loss_fn)
    batch = case.batch(6)
    assert guards_hold(t, batch) is None
    assert_same(t, model, batch, case.loss_fn)
    assert t.unused == ()
    assert [s.kind for s in t.graph.stages] == [StageKind.PROLOGUE, *[StageKind.LAYER] * (len(t.programs) - 2), StageKind.EPILOGUE]
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
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
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
            self.running = self.running * 0.9
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


# ---- shapes of models


class Blocks(nn.Module):
    """Token embedding, blocks, head. `glue(self, i, h, first, previous)` runs before block i."""

    glue: Callable[..., Tensor]

    def __init__(self, glue: Callable[..., Tensor], block: Callable[[], nn.Module] | None = None, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok = nn.Embedding(tiny_models.VOCAB, 16)
        self.blocks = nn.ModuleList((block or (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())))() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(layers, 16) + 0.5)
        self.head = nn.Linear(16, tiny_models.VOCAB)
        self.register_buffer("table", torch.randn(10, 16))
        self.glue_fn = glue

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = first = self.tok(input_ids)
        outs = [h]
        for i, block in enumerate(self.blocks):
            h = block(self.glue_fn(self, i, h, first, outs))
            outs.append(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def no_glue(self: Blocks, i: int, h: Tensor, first: Tensor, outs: list[Tensor]) -> Tensor:
    return h


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


# ---- refusals


def in_forward(change: Callable[[Blocks, Tensor], Any]) -> Callable[..., Tensor]:
    def glue(self: Blocks, i: int, h: Tensor, first: Tensor, outs: list[Tensor]) -> Tensor:
        out = change(self, h)
        return out if isinstance(out, Tensor) else h

    return glue


class Leaky(nn.Module):
    """Passes a tensor to the next layer through a shared dict, writes its input in place, or keeps its weight twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(16, 16), how
        self.held = [self.lin.weight]

    def forward(self, x: Tensor, shared: dict[str, Tensor] | None = None) -> Tensor:
        if self.how == "dict" and shared is not None:
            shared["x"] = x * 2
        if self.how == "keep":
            return F.linear(x, self.held[0])
        return self.lin(x.add_(1) if self.how == "write" else x)


class SharedDict(Blocks):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h, shared = self.tok(input_ids), {}
        for block in self.blocks:
            h = block(h, shared)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def _autocast(self: Blocks, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return h + 1


ELSEWHERE = torch.ones(16)

UNTRACEABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branch on a parameter": (lambda: Blocks(in_forward(lambda self, h: h + 1 if self.scale.sum() > 0 else h)), r"parameter scale"),
    "branch on a layer": (lambda: Blocks(in_forward(lambda self, h: h / 2 if h.abs().max() > 9 else h)), r"output of module tok"),
    "branch on chance": (lambda: Blocks(in_forward(lambda self, h: h if torch.rand(()) > 0.5 else h + 1)), r"random numbers"),
    "python random": (lambda: Blocks(in_forward(lambda self, h: h * random.random())), r"Python's `random`"),
    "tensor attribute": (lambda: Blocks(in_forward(lambda self, h: h + ELSEWHERE)), r"unknown origin"),
    "data-dependent shape": (lambda: Blocks(in_forward(lambda self, h: h[h > 0].sum() + h)), r"cannot run on meta"),
    "write to a layer's output": (lambda: Blocks(in_forward(lambda self, h: h.add_(1))), r"in place a value that an earlier layer"),
    "write to a parameter": (lambda: Blocks(in_forward(lambda self, h: self.scale.data.mul_(2))), r"writes scale in place"),
    "write to .data": (lambda: Blocks(in_forward(lambda self, h: setattr(h, "data", h * 2))), r"Tensor\.data"),
    "autocast": (lambda: Blocks(in_forward(_autocast)), r"autocast"),
    "layer writes its input": (lambda: Blocks(no_glue, lambda: Leaky("write")), r"blocks\.0 \(Leaky\) writes its input in place"),
    "shared dict": (lambda: SharedDict(no_glue, lambda: Leaky("dict")), r"blocks\.0 \(Leaky\) changes a list or dict"),
    "object argument": (lambda: Blocks(in_forward(lambda self, h: self.blocks[0](h, object()))), r"builtins\.object"),
    "kept reference": (lambda: Blocks(no_glue, lambda: Leaky("keep")), r"blocks\.0\.lin\.weight through a reference of its own"),
    "router losses": (lambda: tiny_models.family("mixtral", output_router_logits=True), r"output_router_logits"),
    "error in forward": (lambda: Blocks(in_forward(lambda self, h: 1 / 0)), r"ZeroDivisionError"),
    "weighted mean": (lambda: _head(lambda o, y: F.cross_entropy(o, y, weight=torch.ones(128))), r"class weights.*loss_fn="),
    "sum loss": (lambda: _head(lambda o, y: F.cross_entropy(o, y, reduction="sum")), r"'sum'.*loss_fn="),
    "two losses": (lambda: _head(lambda o, y: F.cross_entropy(o, y) + o.square().mean()), r"loss_fn="),
    "no loss": (lambda: _head(lambda o, y: o), r"no scalar loss.*loss_fn="),
    "no layers": (lambda: _head(lambda o, y: F.cross_entropy(o.detach(), y), 0), r"layers="),
}


def _head(loss: Callable[..., Tensor], layers: int = 4) -> nn.Module:
    class Model(Blocks):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            h = self.tok(input_ids)
            for block in self.blocks:
                h = block(h)
            return loss(self.head(h).flatten(0, 1), labels.flatten())

    return Model(no_glue, layers=layers)


@pytest.mark.parametrize("case", UNTRACEABLE)
def test_what_cannot_be_traced_is_refused_by_name(case: str) -> None:
    make, message = UNTRACEABLE[case]
    with pytest.raises(TraceError, match=rf"(?s){message}"):
        trace(make(), lm_batch())


def test_bad_batches_are_refused_by_name() -> None:
    model = tiny_models.family("llama")
    with pytest.raises(ValueError, match=r"'attention_maks'.*'attention_mask'"):
        trace(model, {**lm_batch(), "attention_maks": torch.ones(2, 10)})
    with pytest.raises(ValueError, match=r"batch\['labels'\] is a list"):
        trace(model, {**lm_batch(), "labels": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="empty"):
        trace(model, {})
    with pytest.raises(ValueError, match="needs 'labels'"):
        trace(PlainGPT(), {"input_ids": lm_batch()["input_ids"]})
    with pytest.raises(TraceError, match="no scalar loss"):
        trace(model, {"input_ids": lm_batch()["input_ids"]})
    with pytest.raises(ValueError, match="target"):
        trace(tiny_models.mlp(), mlp_batch())
    with pytest.raises(ValueError, match="loss_fn must return"):
        trace(tiny_models.mlp(), mlp_batch(), loss_fn=lambda out, batch: out.sum())
    with pytest.raises(TraceError, match=r"count.*output of module"):
        trace(tiny_models.mlp(), mlp_batch(), loss_fn=lambda out, batch: (out.sum(), (out > 0).sum()))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex.*view_as_real"),
        (torch.zeros(2, 2).to_sparse(), "sparse.*to_dense"),
        (torch.zeros(2, dtype=torch.int8), "quantis"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "quantis"),
        (nn.UninitializedParameter(), "not initialised"),
    ],
)
def test_parameters_without_a_dense_fp32_master_are_refused(value: Tensor, message: str) -> None:
    model = PlainGPT()
    model.blocks[1].odd = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
    with pytest.raises(TraceError, match=rf"blocks\.1\.odd.*{message}"):
        trace(model, lm_batch())


def test_a_question_to_a_buffer_without_values_is_refused() -> None:
    glue = in_forward(lambda self, h: h + 1 if self.table.sum() > 0 else h)
    assert_same(trace(Blocks(glue), lm_batch()), Blocks(glue), lm_batch(seed=2))
    with pytest.raises(TraceError, match=r"buffer table.*meta device"):
        trace(Blocks(glue).to("meta"), lm_batch())


def test_shapes_that_depend_on_data_are_guarded() -> None:
    class Packed(PlainGPT):
        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:
            starts = (attention_mask == 0).nonzero()
            return super().forward(input_ids, labels) * (1 + starts.shape[0])

    model = Packed()
    t = trace(model, lm_batch("padded", seed=4))
    assert guards_hold(t, lm_batch("padded", seed=8)) is None
    assert "nonzero" in str(guards_hold(t, lm_batch("padded", seed=5)))
    assert_same(t, model, lm_batch("padded", seed=8))


# ---- groups


def test_groups_partition_the_parameters_by_the_stages_that_read_them() -> None:
    model = PlainGPT()
    model.blocks[0].odd = nn.Parameter(torch.zeros(7))
    model.blocks[0].nothing = nn.Parameter(torch.zeros(0, 5))
    model.blocks[1].norm1.weight.requires_grad_(False)
    for world_size in (1, 3):
        t = trace(model, lm_batch(), world_size=world_size)
        assert [g.name for g in t.graph.groups] == ["prologue", "shared0", "L00", "L01", "L02", "epilogue"]
        names = [n for g in t.graph.groups for p in g.params for n in p.names]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
        assert t.graph.group("shared0").params[0].names == ("tok.weight", "head.weight")
        assert t.graph.stage("epilogue").groups == ("epilogue", "shared0")
        assert not t.graph.streams(t.graph.group("shared0"))
        for g in t.graph.groups:
            check_layout(g, world_size)
        frozen = t.graph.group("L01").params[-1]
        assert (frozen.name, frozen.trainable) == ("blocks.1.norm1.weight", False)
        assert frozen.offset == t.graph.group("L01").num_trainable


def check_layout(g: Group, world_size: int) -> None:
    unit = ALIGN * world_size
    assert g.numel % unit == g.num_trainable % unit == 0
    end = 0
    for p in g.params:
        assert p.offset % ALIGN == 0
        assert p.offset >= end
        assert p.offset + p.numel <= (g.num_trainable if p.trainable else g.numel)
        assert p.trainable or p.offset >= g.num_trainable
        end = p.offset + p.numel
    assert g.numel - sum(-(-p.numel // ALIGN) * ALIGN for p in g.params) < 2 * unit


def test_group_names_do_not_depend_on_what_else_is_shared() -> None:
    model = nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in "abc"})
    params = model_params(model)
    reads = {"prologue": ["a.weight"], "L00": ["b.weight"], "L01": ["b.weight"], "epilogue": ["a.weight"]}
    groups = make_groups(params, reads, 2)
    assert [(g.name, g.uses) for g in groups] == [("shared0", ("prologue", "epilogue")), ("shared1", ("L00", "L01"))]


def test_another_specialisation_keeps_the_partition() -> None:
    model = tiny_models.family("qwen3")
    t = trace(model, lm_batch())
    assert trace(model, lm_batch("padded"), groups=t.graph.groups).graph.groups == t.graph.groups
    plain = PlainGPT()
    t2 = trace(plain, lm_batch())
    headless = trace(plain, lm_batch(), groups=t2.graph.groups, layers=["blocks.0", "blocks.1"])
    assert headless.graph.group("L02").uses == ("epilogue",)
    assert headless.graph.stage("epilogue").groups == ("L02", "epilogue", "shared0")[::-1][::-1]
    model.model.norm.weight.requires_grad_(False)
    with pytest.raises(TraceError, match=r"model\.norm\.weight.*compile again"):
        trace(model, lm_batch(), groups=t.graph.groups)
    few = tuple(g for g in t.graph.groups if g.name != "L02")
    with pytest.raises(TraceError, match=r"model\.layers\.2.*example="):
        trace(model, lm_batch(), groups=few)
