"""Tiny models of every kind that must work, with batches for them: the nine Hugging Face families and plain modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from plain_models import VOCAB, GPTBlock, PlainGPT, lm_batch
from torch import Tensor, nn

_SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_LOCAL = dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
_MOE = dict(num_experts_per_tok=2, output_router_logits=False)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {**_SHAPE}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**_SHAPE, "head_dim": 8, "tie_word_embeddings": True}),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {**_SHAPE}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**_SHAPE, "sliding_window": 4}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**_SHAPE, **_LOCAL, "attn_implementation": "eager"}),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        {**_SHAPE, **_LOCAL, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {**_SHAPE, **_MOE, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**_SHAPE, **_MOE, "num_local_experts": 4}),
}
PADDINGS = ("none", "ones", "padded")


def family(name: str, seed: int = 0, **changes: Any) -> Any:
    """A Hugging Face model of FAMILIES in training mode, deterministic in `seed`; `changes` go into its config."""
    model_class, config_class, config = FAMILIES[name]
    settings = {"attn_implementation": "sdpa", **config, **changes}
    torch.manual_seed(seed)
    attention = settings.pop("attn_implementation")
    cfg = config_class(**settings)
    cfg._attn_implementation = attention
    cfg.use_cache = False  # as in all training; a cache makes keys contiguous, which changes the last bits of eager attention
    model = model_class(cfg).train()
    model.loss_type = "ForCausalLM"  # what GPT-2 falls back to, with a warning
    return model


class PlainViT(nn.Module):
    """A ViT-style classifier: convolutional patches, a class token, encoder blocks; ``forward(images)`` returns logits."""

    def __init__(self, width: int = 32, layers: int = 3, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, width) * 0.02), nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.encoder = nn.Sequential(*(GPTBlock(width, heads, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block in self.encoder:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Blocks(nn.Module):
    """Token embedding, blocks, head. `glue(self, i, h, first, previous)` runs before block i."""

    glue: Callable[..., Tensor]

    def __init__(self, glue: Callable[..., Tensor], block: Callable[[], nn.Module] | None = None, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList((block or (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())))() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(layers))
        self.scale = nn.Parameter(torch.rand(layers, 16) + 0.5)
        self.head = nn.Linear(16, VOCAB)
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


def classification_loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of cross-entropies over labels that are not -100, and how many those are."""
    return F.cross_entropy(outputs, batch["target"], reduction="sum", ignore_index=-100), (batch["target"] != -100).sum()


@dataclass(frozen=True)
class Case:
    """A model that must work: how to make it, a batch for it by seed, and its loss_fn (None: its own loss)."""

    name: str
    model: Callable[[], Any]
    batch: Callable[[int], dict[str, Tensor]]
    loss_fn: Callable[..., Any] | None = None


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 10))


def _seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(0)
        return make()

    return build


def mlp_batch(seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 12, generator=g), "target": torch.randint(0, 10, (6,), generator=g)}


def image_batch(seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"images": torch.randn(4, 3, 16, 16, generator=g), "target": torch.randint(0, 10, (4,), generator=g)}


def plain_cases() -> list[Case]:
    return [
        Case("mlp", mlp, mlp_batch, classification_loss),
        Case("gpt", _seeded(PlainGPT), lambda seed: lm_batch(seed=seed)),
        Case("vit", _seeded(PlainViT), image_batch, classification_loss),
    ]


def family_cases(paddings: tuple[str, ...] = PADDINGS) -> list[Case]:
    return [
        Case(f"{name}-{padding}", lambda name=name: family(name), lambda seed, padding=padding: lm_batch(padding, seed))
        for name in FAMILIES
        for padding in paddings
    ]


def all_cases() -> list[Case]:
    return plain_cases() + family_cases()


def eager_loss(model: Any, batch: Mapping[str, Tensor], loss_fn: Callable[..., Any] | None = None) -> tuple[Tensor, int | None]:
    """Loss of a plain forward and, with a loss_fn (whose loss is a sum), its count."""
    if loss_fn is not None:
        first = next(iter(batch.values()))
        total, count = loss_fn(model(first), batch)
        return total, int(count)
    out = model(**batch)
    return (out if isinstance(out, Tensor) else out.loss), None


def loss_and_grads(
    model: Any, batch: Mapping[str, Tensor], loss_fn: Callable[..., Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain PyTorch's loss and gradients (parameters that got one); leaves no gradient on the model."""
    model.zero_grad(set_to_none=True)
    loss, _ = eager_loss(model, batch, loss_fn)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads
