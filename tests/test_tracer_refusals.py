"""The tracer: what it refuses, by name and with the remedy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from program_runner import assert_same
from tiny_models import Blocks, PlainGPT, lm_batch, mlp_batch, no_glue
from torch import Tensor, nn

from slidedp.compiler.tracing.tracer import TraceError, guards_hold, trace

pytestmark = pytest.mark.null


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


def _rebound(self: Blocks, h: Tensor) -> None:
    self.table = self.table * 0.9


def _autocast(self: Blocks, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return h + 1


ELSEWHERE = torch.ones(16)


def _branch(self: Blocks, h: Tensor) -> Tensor:
    return h + 1 if self.scale.sum() > 0 else h



UNTRACEABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "branch on a parameter": (lambda: Blocks(in_forward(_branch)), r"parameter scale"),
    "branch on a layer": (lambda: Blocks(in_forward(lambda self, h: h / 2 if h.abs().max() > 9 else h)), r"output of module tok"),
    "branch on chance": (lambda: Blocks(in_forward(lambda self, h: h if torch.rand(()) > 0.5 else h + 1)), r"random numbers"),
    "python random": (lambda: Blocks(in_forward(lambda self, h: h * random.random())), r"Python's `random`"),
    "tensor attribute": (lambda: Blocks(in_forward(lambda self, h: h + ELSEWHERE)), r"unknown origin"),
    "data-dependent shape": (lambda: Blocks(in_forward(lambda self, h: h[h > 0].sum() + h)), r"cannot run on meta"),
    "write to a layer's output": (lambda: Blocks(in_forward(lambda self, h: h.add_(1))), r"writes in place a value"),
    "write to a parameter": (lambda: Blocks(in_forward(lambda self, h: self.scale.data.mul_(2))), r"writes scale in place"),
    "buffer rebound": (lambda: Blocks(in_forward(_rebound)), r"buffer table.*in place"),
    "gradient hook": (lambda: Blocks(in_forward(lambda self, h: h.register_hook(lambda g: g))), r"register_hook"),
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


@pytest.mark.parametrize("make", [PlainGPT, lambda: tiny_models.family("llama")], ids=["plain", "hf"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"input_ids": b["input_ids"].float()}, r"batch\['input_ids'\] is float32: ids must be integers"),
        (lambda b: {key: t[0] for key, t in b.items()}, r"batch\['input_ids'\] has shape \(10,\): ids are \[rows, tokens\]"),
        (lambda b: {"labels": b["labels"][:1]}, "batch entries disagree in their first dimension: input_ids 2, labels 1"),
        (lambda b: {"labels": b["labels"][:, :5]}, r"batch\['labels'\] has shape \(2, 5\), batch\['input_ids'\] \(2, 10\)"),
        (lambda b: {"labels": b["labels"].float()}, r"batch\['labels'\] is float32"),
    ],
)
def test_what_is_odd_about_a_batch_that_cannot_run_comes_first(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, make: Callable[[], nn.Module]
) -> None:
    batch = lm_batch()
    with pytest.raises(TraceError, match=rf"^{message}") as caught:
        trace(make(), batch | change(batch))
    assert caught.value.__cause__ is not None
    assert len(str(caught.value)) < 320


def test_odd_batches_that_can_run_are_not_blamed() -> None:
    """Another leading size is fine where the model takes it, and no excuse for a refusal of the model."""

    class Positions(PlainGPT):
        def forward(self, input_ids: Tensor, labels: Tensor, offset_ids: Tensor) -> Tensor:
            return super().forward(input_ids, labels) * offset_ids.float().mean()

    batch = lm_batch() | {"offset_ids": torch.ones(1, 3)}
    with pytest.raises(TraceError, match="cannot tell over how many tokens") as caught:
        trace(Positions(), batch)
    assert "disagree" not in str(caught.value)
    assert trace(tiny_models.family("llama"), lm_batch() | {"position_ids": torch.arange(10)[None]}).programs


def test_ids_of_any_name_must_be_integers() -> None:
    class Renamed(PlainGPT):
        def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
            return super().forward(idx, targets)

    batch = lm_batch()
    with pytest.raises(TraceError, match=r"tok \(Embedding\) looks up idx, which is torch.float32: ids must be integers"):
        trace(Renamed(), {"idx": batch["input_ids"].float(), "targets": batch["labels"]})


def test_what_loss_fn_raises_is_said_to_be_its_own() -> None:
    with pytest.raises(ValueError, match=r"loss_fn raised KeyError: 'labels'; the batch has keys 'x', 'target'"):
        trace(tiny_models.mlp(), mlp_batch(), loss_fn=lambda out, batch: (batch["labels"].sum(), 1))
    with pytest.raises(TraceError, match=r"loss_fn raised AttributeError: .*'logits'"):
        trace(tiny_models.mlp(), mlp_batch(), loss_fn=lambda out, batch: (out.logits.sum(), 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what torch deprecates
def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pass the module that you gave to torch\.compile"):
        trace(torch.compile(PlainGPT()), lm_batch())  # type: ignore[arg-type]


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
