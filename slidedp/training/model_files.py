"""A model on disk: a Hugging Face directory, a GGUF file, or a directory that holds one. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelFiles:
    """`gguf`: the file's name in `folder`; None for a Hugging Face directory."""

    folder: Path
    gguf: str | None = None

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        missing = ValueError(f"model {self.folder}: there is no tokenizer in it ({', '.join(TOKENIZER_FILES)}); put those of the "
                             "model there: AutoTokenizer.from_pretrained(NAME).save_pretrained(DIR)")
        try:
            tokenizer = self._load(AutoTokenizer.from_pretrained, **self._known_config())
        except ValueError as e:
            if self.gguf or any((self.folder / name).is_file() for name in TOKENIZER_FILES):
                raise
            raise missing from e
        # Without files, transformers makes some models' tokenizers (Qwen's) with no vocabulary, and says nothing.
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise missing
        return tokenizer

    def model(self, *, meta: bool = False) -> Any:
        """The causal language model in training mode, with FP32 weights; with `meta`, none: another rank has them."""
        from transformers import AutoModelForCausalLM, GgufConfig

        if meta:
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(self._config, dtype=torch.float32)
        else:
            quantized = {"quantization_config": GgufConfig(dequantize=True)} if self.gguf else {}
            model = self._load(AutoModelForCausalLM.from_pretrained, dtype=torch.float32, **quantized, **self._known_config())
        return model.train()

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return self._load(AutoConfig.from_pretrained)

    def _known_config(self) -> dict[str, Any]:
        """The configuration of a GGUF file: without it, transformers would read the whole file once more, which takes seconds."""
        return {"config": self._config} if self.gguf else {}

    def _load(self, load: Any, **options: Any) -> Any:
        where = {"gguf_file": self.gguf} if self.gguf else {}
        try:
            return load(self.folder, local_files_only=True, **where, **options)
        except (OSError, ValueError, KeyError, ImportError) as e:
            raise ValueError(f"model {self.folder / (self.gguf or '')}: transformers cannot load it: {e}") from e


def find_model(path: Path) -> ModelFiles:
    """What `path` holds. ValueError if that is not one model."""
    if path.suffix == ".gguf" and path.is_file():
        return ModelFiles(path.parent, path.name)
    if (path / "config.json").is_file():
        return ModelFiles(path)
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1:
        return ModelFiles(path, found[0].name)
    if found:
        raise ValueError(f"model {path}: it holds {len(found)} GGUF files; name one, e.g. {found[0]}")
    raise ValueError(f"model {path}: expected a GGUF file, or a directory with config.json or with one; models are not "
                     "downloaded: hf download NAME --local-dir DIR does that")
