"""Strict reading of YAML: what is unknown, missing or of the wrong type is a ValueError that names the key and the file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

LARGEST = 2**62
"""Of whole numbers that are read: what is worked out from them are 64-bit integers and floats, which end, too."""


def load_yaml(path: str | Path) -> Any:
    """The document in `path`, by `yaml.safe_load`. ValueError, naming the file, if it cannot be read or is not YAML."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror if isinstance(e, OSError) else e}") from e


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_NoDuplicates)  # yaml.safe_load, and stricter
    except yaml.YAMLError as e:
        raise ValueError(f"{where}: not valid YAML: {' '.join(str(e).split())}") from e


class _NoDuplicates(yaml.SafeLoader):
    """`yaml.SafeLoader` that rejects a key given twice: PyYAML keeps the last and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def content_hash(content: object) -> str:
    """SHA-256 of the canonical JSON of `content`, first 16 hex digits: enough to tell plans apart, short enough to read."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_mapping(value: object, where: str) -> dict[str, Any]:
    """`value` if it is a mapping with string keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a mapping, got {_kind(value)}")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{where}: key {key!r} is not a string")
    return dict(value)


def as_list(value: object, where: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{where}: expected a list, got {_kind(value)}")
    return list(value)


def as_str(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a string, got {_kind(value)}")
    return value


def as_int(value: object, where: str, minimum: int = 0, maximum: int = LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: expected a whole number, got {_kind(value)}")
    if value < minimum:
        raise ValueError(f"{where}: {value} is less than {minimum}, the smallest value allowed")
    if value > maximum:
        raise ValueError(f"{where}: a number of {value.bit_length()} bits is more than {maximum}, the largest value allowed")
    return value


def as_float(value: object, where: str, minimum: float = 0.0) -> float:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        raise ValueError(f"{where}: a number of {value.bit_length()} bits is too large")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}: expected a number, got {_kind(value)}")
    if value < minimum:
        raise ValueError(f"{where}: {value} is less than {minimum:g}, the smallest value allowed")
    return float(value)


def closest(word: object, known: Iterable[str]) -> str:
    """``closest: 'batch'; `` of words that are known, for whoever has mistyped one; nothing if none is close."""
    close = get_close_matches(str(word), list(known), 1)
    return f"closest: {close[0]!r}; " if close else ""


def check_keys(mapping: Mapping[str, Any], allowed: Sequence[str], where: str, required: Sequence[str] | None = None) -> None:
    """ValueError unless the keys are all in `allowed` and all of `required` (default: all allowed) are there."""
    unknown = [k for k in mapping if k not in allowed]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; {closest(unknown[0], allowed)}allowed: {', '.join(allowed)}")
    missing = [k for k in (allowed if required is None else required) if k not in mapping]
    if missing:
        raise ValueError(f"{where}: missing key {missing[0]!r}")


def _kind(value: object) -> str:
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"
