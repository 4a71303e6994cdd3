"""A YAML mapping as nested frozen dataclasses, strictly: what is unknown, missing or of the wrong type is a ValueError.

A field's type is what is accepted: bool, int, float, str, Path, a literal, a mapping, a tuple of one of these, another such
dataclass, or a union with None. ``field(metadata={"minimum": 1})`` bounds a number. Paths are relative to the file.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from slidedp.compiler.strict import as_float, as_int, as_list, as_mapping, as_str, closest, load_yaml

T = TypeVar("T")

_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?e[+-]?\d+", re.IGNORECASE)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path", Mapping: "a mapping",
         types.NoneType: "nothing"}  # fmt: skip


def read_config(kind: type[T], path: str | Path) -> T:
    """The file's content as a `kind`. ValueError, naming file and key, and for an unknown key the closest known one."""
    content = load_yaml(path)
    return as_dataclass(kind, {} if content is None else content, str(path), Path(path).parent)


def as_dataclass(kind: type[T], content: object, where: str, base: Path) -> T:
    """`content` as a `kind`; relative paths start at `base`."""
    mapping = as_mapping(content, where)
    known, hints = {f.name: f for f in fields(kind)}, get_type_hints(kind)  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise ValueError(unknown(key, kind, where))
    values = {}
    for name, f in known.items():
        if name in mapping:
            minimum = f.metadata.get("minimum", 0)
            values[name] = convert(mapping[name], hints[name], f"{where}: {name}", base, minimum)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}: missing key {name!r}")
    try:
        return kind(**values)
    except ValueError as e:  # a dataclass's own checks do not know of the file
        raise ValueError(f"{where}: {e}") from e


def unknown(key: str, kind: type[Any], where: str) -> str:
    """What to say of a key that `kind` has not: the closest that it has, or that one of its sections has."""
    here = [f.name for f in fields(kind)]
    deep = dict(_dotted(kind))
    below = [deep[last] for last in get_close_matches(key, deep, 1)]
    hint = closest(key, here) or (f"closest: {below[0]!r}; " if below else "")
    return f"{where}: unknown key {key!r}; {hint}allowed: {', '.join(here)}"


def _dotted(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Keys of the sections below `kind`, each with its dotted name."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from ((f.name, f"{name}.{f.name}") for f in fields(hint))


def convert(value: object, hint: Any, where: str, base: Path, minimum: float = 0) -> Any:
    """`value` as a `hint`; ValueError, saying where and what is expected, if it is none."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _as_one_of(value, get_args(hint), where, base, minimum)
    if origin is Literal:
        if not any(value is option or (value == option and type(value) is type(option)) for option in get_args(hint)):
            words = [yaml_word(option) for option in get_args(hint)]
            raise ValueError(f"{where}: {value!r} is unknown; {closest(value, words)}allowed: {', '.join(words)}")
        return value
    if origin is tuple:
        kinds = get_args(hint)
        many = len(kinds) == 2 and kinds[1] is Ellipsis
        items = [value] if many and isinstance(value, str) else as_list(value, where)  # one path, without brackets
        if not many and len(items) != len(kinds):
            raise ValueError(f"{where}: expected {len(kinds)} values, got {len(items)}")
        return tuple(convert(item, kinds[0], f"{where}[{i}]", base, minimum) for i, item in enumerate(items))
    if is_dataclass(hint):
        return as_dataclass(cast(type[Any], hint), value, where, base)
    return _as_scalar(value, origin or hint, where, base, minimum)


def _as_one_of(value: object, hints: tuple[Any, ...], where: str, base: Path, minimum: float) -> Any:
    """The first of `hints` that takes `value`. None, written as nothing or null, only where it is one of them."""
    problems = []
    for hint in hints:
        if (hint is types.NoneType) != (value is None):
            continue
        try:
            return None if value is None else convert(value, hint, where, base, minimum)
        except ValueError as e:
            problems.append(e)
    if len(problems) == 1:
        raise problems[0]
    options = " or ".join(", ".join(map(yaml_word, get_args(h))) if get_origin(h) is Literal else
                          WORDS.get(get_origin(h) or h, str(h)) for h in hints if h is not types.NoneType)
    raise ValueError(f"{where}: expected {options}, got {value!r}")


def yaml_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_scalar(value: object, kind: Any, where: str, base: Path, minimum: float) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{where}: expected true or false, got {value!r}")
        return value
    if kind is int:
        return as_int(value, where, int(minimum))
    if kind is float:
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            value = float(value)  # YAML 1.1 wants a dot in 1.0e-4, and reads 1e-4 as a string
        return as_float(value, where, minimum)
    if kind is str:
        return as_str(value, where)
    if kind is Path:
        return base / Path(as_str(value, where)).expanduser()
    if kind is Mapping:
        return as_mapping(value, where)
    raise AssertionError(f"{where}: a field of type {kind} cannot be read")
