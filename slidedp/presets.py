"""Model shapes by name, for planning without weights: the published configurations, as Hugging Face config dicts.

Source: the ``config.json`` files of the models' Hugging Face repositories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
    }  # fmt: skip


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, eps: float) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 152064, "max_position_embeddings": 131072,
        "rope_theta": 1000000, "rms_norm_eps": eps, "tie_word_embeddings": False,
    }  # fmt: skip


def _llama31(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 1e-6),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 1e-5),
    "llama3.1-8b": _llama31(4096, 14336, 32, 32),
    "llama3.1-70b": _llama31(8192, 28672, 80, 64),
}


def load_config(name_or_path: str | Path) -> dict[str, Any]:
    """A preset's config, or that of a Hugging Face model directory or config file (JSON).

    Raises ValueError, naming it, for anything else.
    """
    preset = PRESETS.get(str(name_or_path).lower())
    if preset is not None:
        return dict(preset)
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        have = ", ".join(PRESETS)
        raise ValueError(f"model {str(name_or_path)!r}: no such preset, and no file {path}; presets: {have}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"model config {path}: cannot be read as JSON: {e}") from e
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"model config {path}: it has no 'model_type'; a Hugging Face config.json has one")
    return config


def build_meta_model(name_or_path: str | Path) -> nn.Module:
    """The causal language model of :func:`load_config`'s shape on the meta device: no memory, no weights, in train mode.

    Raises ValueError when transformers is not installed or does not know the model.
    """
    config = load_config(name_or_path)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as e:
        raise ValueError(f"model {str(name_or_path)!r}: building it needs transformers; pip install slidedp[hf]") from e
    model_type = config.pop("model_type")
    try:
        hf_config = AutoConfig.for_model(model_type, **config)
        hf_config.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config)
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"model {str(name_or_path)!r}: transformers cannot build it: {e}") from e
    assert isinstance(model, nn.Module)
    return model.train()
