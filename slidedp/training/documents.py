"""Training files as documents of token ids: plain text, or JSON lines of text, chats, or prompts with their completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".txt", ".md")
PIECE_CHARS = 2**20
"""About so many characters of a text file are tokenized at a time."""

FORMS = "'text', 'messages', or 'prompt' and 'completion'"


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and which of them the loss counts. A piece of a long text (`begins` false) goes on where the last one ended."""

    ids: list[int]
    counts: list[bool]
    begins: bool = True


def read_documents(paths: Sequence[Path], tokenizer: Any, *, assistant_only: bool = False) -> Iterator[Document]:
    """The documents of `paths`, in order, each with its end-of-sequence token (chats: what their template ends with).

    Raises ValueError naming file and line.
    """
    for path in paths:
        if path.suffix == ".jsonl":
            yield from read_lines(path, tokenizer, assistant_only)
        elif path.suffix in TEXT_SUFFIXES:
            yield from read_text(path, tokenizer)
        else:
            raise ValueError(f"{path}: data is .jsonl, one JSON object a line, or text: {', '.join(TEXT_SUFFIXES)}")


def read_text(path: Path, tokenizer: Any) -> Iterator[Document]:
    """A file of text: one document, in pieces. Those end with a line, where tokenizers end a word anyway."""
    end, first, rest = end_of_sequence(tokenizer), True, ""
    try:
        with path.open(encoding="utf-8") as file:
            while block := file.read(PIECE_CHARS):
                head, newline, tail = (rest + block).rpartition("\n")
                if newline:
                    ids = tokenizer(head + newline, add_special_tokens=first)["input_ids"]
                    yield Document(ids, [True] * len(ids), first)
                    first = False
                rest = tail
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: cannot be read: {e}") from e
    ids = [*(tokenizer(rest, add_special_tokens=first)["input_ids"] if rest else []), end]
    yield Document(ids, [True] * len(ids), first)


def read_lines(path: Path, tokenizer: Any, assistant_only: bool) -> Iterator[Document]:
    """A JSON object a line; blank lines are skipped."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield from_record(json.loads(line), tokenizer, assistant_only)
                except ValueError as e:
                    what = f"not JSON ({e})" if isinstance(e, json.JSONDecodeError) else str(e)
                    raise ValueError(f"{path}:{number}: {what}") from e
    except OSError as e:
        raise ValueError(f"{path}: cannot be read: {e}") from e


def from_record(record: Any, tokenizer: Any, assistant_only: bool) -> Document:
    """One line's document. ValueError for a record of another form."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with {FORMS}, got {type(record).__name__}")
    if isinstance(record.get("text"), str):
        ids = with_end(tokenizer(record["text"])["input_ids"], tokenizer)
        return Document(ids, [True] * len(ids))
    if "messages" in record:
        return from_chat(as_messages(record["messages"], "messages"), tokenizer, assistant_only)
    if "prompt" in record and "completion" in record:
        return from_pair(record["prompt"], record["completion"], tokenizer)
    raise ValueError(f"expected an object with {FORMS}; it has {', '.join(map(repr, record)) or 'nothing'}")


def from_pair(prompt: Any, completion: Any, tokenizer: Any) -> Document:
    """The loss is of the completion alone. Both are text, tokenized apart, or both are messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        before = tokenizer(prompt)["input_ids"]
        after = with_end(tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer)
        return Document([*before, *after], [False] * len(before) + [True] * len(after))
    first, rest = as_messages(prompt, "prompt"), as_messages(completion, "completion")
    whole, before = render(tokenizer, [*first, *rest]), prompt_of(tokenizer, first)
    require_prefix(before, whole)
    return Document(whole, [i >= len(before) for i in range(len(whole))])


def from_chat(messages: list[Mapping[str, Any]], tokenizer: Any, assistant_only: bool) -> Document:
    """A chat through the tokenizer's template. `assistant_only`: what the template asks the assistant to say, turn by turn."""
    whole = render(tokenizer, messages)
    if not assistant_only:
        return Document(whole, [True] * len(whole))
    counts = [False] * len(whole)
    for i, message in enumerate(messages):
        if message.get("role") == "assistant":
            before, after = prompt_of(tokenizer, messages[:i]), render(tokenizer, messages[: i + 1])
            require_prefix(before, whole)
            require_prefix(after, whole)
            counts[len(before) : len(after)] = [True] * (len(after) - len(before))
    return Document(whole, counts)


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("messages need a chat template, and the model's tokenizer has none; use 'text' or 'prompt' and "
                         "'completion', or put a chat_template.jinja beside the tokenizer")
    try:
        encoded = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
    except Exception as e:  # a template raises jinja2's errors, and its own by raise_exception
        raise ValueError(f"the chat template refuses these messages: {e}") from e
    return list(encoded["input_ids"])


def prompt_of(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """What the model is given before it answers."""
    return render(tokenizer, messages, add_generation_prompt=True)


def require_prefix(part: list[int], whole: list[int]) -> None:
    if whole[: len(part)] != part:
        raise ValueError("the chat template writes an earlier turn otherwise once another follows, so that it cannot be told "
                         "which tokens are the answer; use 'text', or leave assistant_only out")


def as_messages(value: Any, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m and "content" in m for m in value):
        raise ValueError(f"{key}: expected a list of messages, each with 'role' and 'content'")
    return value


def with_end(ids: list[int], tokenizer: Any) -> list[int]:
    """`ids` with the end-of-sequence token, which some tokenizers add themselves."""
    end = end_of_sequence(tokenizer)
    return list(ids) if ids and ids[-1] == end else [*ids, end]


def end_of_sequence(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the model's tokenizer has no end-of-sequence token, which separates documents: set eos_token in its "
                         "tokenizer_config.json")
    return int(tokenizer.eos_token_id)
