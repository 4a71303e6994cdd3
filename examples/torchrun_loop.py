"""A plain training loop on several ranks of one host; the loop is the same as on one.

    torchrun --nproc-per-node 2 examples/torchrun_loop.py        # gloo ranks on the CPU, NCCL ranks on GPUs
    python examples/torchrun_loop.py                             # one rank

Every rank calls `compile` and `run` with its own share of the batch. The FP32 master weights and moments lie once in host
memory, whatever the number of ranks, and each rank updates its own part of them.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import slidedp

VOCAB = 512


def main() -> None:
    args = parse_arguments()
    rank = int(os.environ.get("RANK", "0"))

    # Rank 0's weights are everyone's, so the others need none of their own: they build the model on `meta`.
    torch.manual_seed(0)
    with torch.device("meta" if rank else "cpu"):
        model = Qwen3ForCausalLM(small_config(args.hidden, args.layers))

    with slidedp.compile(model, optimizer=slidedp.AdamW(lr=args.lr)) as plan:
        data = torch.Generator().manual_seed(1 + rank)  # each rank draws its own sequences
        for _ in range(args.steps):
            result = plan.run(counting_sequences(args.batch, args.seq, data))
            if rank == 0:
                print(f"step {result.step:3d}  loss {result.loss:.4f}  {result.tokens_per_s:,.0f} tokens/s", flush=True)
        if rank == 0:
            print(plan)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def small_config(hidden: int, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 32),
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        tie_word_embeddings=True,
    )


def counting_sequences(batch: int, seq: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Sequences that count up in steps of 1 to 7 from anywhere: random, yet something to learn."""
    start = torch.randint(VOCAB, (batch, 1), generator=generator)
    stride = torch.randint(1, 8, (batch, 1), generator=generator)
    ids = (start + stride * torch.arange(seq)) % VOCAB
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    main()
