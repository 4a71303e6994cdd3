"""A hand-written GPT and a batch for it, without what tiny_models.py imports: for processes that count what they take."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 128


def lm_batch(padding: str = "none", seed: int = 1, batch: int = 2, seq: int = 10) -> dict[str, Tensor]:
    """Token ids and labels; padding "ones" adds a mask of ones, "padded" one whose last sequence ends early."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, seq), generator=g)
    out = {"input_ids": ids, "labels": ids.clone()}
    if padding != "none":
        mask = torch.ones(batch, seq, dtype=torch.long)
        if padding == "padded":
            end = seq - 1 - seed % 4
            mask[-1, end:] = 0
            out["labels"][-1, end:] = -100
        out["attention_mask"] = mask
    return out


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(w, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, w))
        return x + self.mlp(self.norm2(x))


class PlainGPT(nn.Module):
    """A hand-written GPT with a tied head; ``forward(input_ids, labels)`` returns the mean loss."""

    def __init__(self, width: int = 32, layers: int = 3, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, True, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.drop(self.tok(input_ids) + self.pos(torch.arange(input_ids.shape[1], device=input_ids.device)))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
