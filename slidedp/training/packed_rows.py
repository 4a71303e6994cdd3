"""Documents cut into rows of equal length, kept in two files that all ranks map: prepared once, by rank 0.

    OUTPUT/data/FINGERPRINT/ids.bin      int32 [rows, seq]
                            flags.bin    uint8 [rows, seq]: does the token count, does a document begin here, is it padding
                            facts.json   what was made of what

The fingerprint is of the files' content, the tokenizer and how rows are cut, so that a second run, or a resumed one, finds them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slidedp.compiler.strict import content_hash
from slidedp.training.config import Packing
from slidedp.training.documents import Document, end_of_sequence, read_documents

COUNTS, BEGINS, PADDING = 1, 2, 4
"""Bits of a flag."""

IGNORED = -100
FORMAT = 1

MOSTLY = 0.5
"""Share of padding that is worth a word: nobody asks for it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`num_tokens`: of all rows but padding; `num_dropped`: rows without a token that counts, left out."""

    fingerprint: str
    seq: int
    packing: Packing
    pad: int
    num_rows: int
    num_documents: int
    num_tokens: int
    num_dropped: int

    @property
    def padding(self) -> float:
        """The share of what is computed that is padding."""
        return 1 - self.num_tokens / (self.num_rows * self.seq)

    def remedy(self) -> str:
        """What to do about rows that are mostly padding; '' for others."""
        if self.padding <= MOSTLY:
            return ""
        instead = (f"use at most {max(self.num_tokens, 4)}" if self.packing != "none" else
                   "use a smaller one, or packing: concat, which fills rows")
        return (f"data.seq: {self.seq} tokens a row, but there are {self.num_tokens:,} in {self.num_rows:,} "
                f"row{'s' * (self.num_rows != 1)}: {self.padding:.0%} of what is computed is padding; {instead}")


class Rows:
    """Prepared rows, mapped from their files. `facts.num_rows` of them, by index."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.facts, shape = facts, (facts.num_rows, facts.seq)
        self._ids: np.ndarray = np.memmap(folder / "ids.bin", np.int32, "r", shape=shape)
        self._flags: np.ndarray = np.memmap(folder / "flags.bin", np.uint8, "r", shape=shape)

    def __len__(self) -> int:
        return self.facts.num_rows

    def batch(self, indices: Sequence[int] | np.ndarray, size: int) -> dict[str, Tensor]:
        """`input_ids` and `labels` of `size` rows (int64 [size, seq]): those of `indices`, then rows that do not count.

        With packing "documents" also `position_ids`, which begin at 0 with each document.
        """
        ids = np.full((size, self.facts.seq), self.facts.pad, np.int64)
        flags = np.full((size, self.facts.seq), PADDING, np.uint8)
        chosen = np.asarray(indices, np.int64)
        ids[: len(chosen)], flags[: len(chosen)] = self._ids[chosen], self._flags[chosen]
        labels = np.where(self._counting(flags), ids, IGNORED)
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.facts.packing == "documents":
            batch["position_ids"] = torch.from_numpy(positions(flags))
        return batch

    def num_valid(self, indices: Sequence[int] | np.ndarray) -> int:
        """Tokens of these rows that the loss of a causal model counts: a row's first is not predicted."""
        return int(self._counting(self._flags[np.asarray(indices, np.int64)])[:, 1:].sum())

    def _counting(self, flags: np.ndarray) -> np.ndarray:
        """With attention kept apart, nothing before it predicts a document's first token."""
        counts: np.ndarray = (flags & COUNTS) != 0
        return counts & ((flags & BEGINS) == 0) if self.facts.packing == "documents" else counts


def positions(flags: np.ndarray) -> np.ndarray:
    """int64 [rows, seq]: places within the document; padding is a document of its own, so that nothing looks at it."""
    begins = (flags & BEGINS) != 0
    padding = (flags & PADDING) != 0
    begins[:, 1:] |= padding[:, 1:] & ~padding[:, :-1]
    places = np.arange(flags.shape[1])
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


class Cutter:
    """Appends documents to two open files, as rows."""

    def __init__(self, folder: Path, seq: int, packing: Packing, pad: int) -> None:
        self.seq, self.packing, self.pad = seq, packing, pad
        self.num_rows = self.num_documents = self.num_tokens = self.num_dropped = 0
        self._ids = (folder / "ids.bin").open("wb")
        self._flags = (folder / "flags.bin").open("wb")
        self._left_ids: list[int] = []
        self._left_flags: list[int] = []

    def add(self, document: Document) -> None:
        if document.begins:
            self.num_documents += 1
            if self.packing == "none":
                self._pad()
        flags = [COUNTS * counts for counts in document.counts]
        if flags and document.begins:
            flags[0] |= BEGINS
        self._left_ids += document.ids
        self._left_flags += flags
        whole = len(self._left_ids) // self.seq * self.seq
        for start in range(0, whole, self.seq):
            self._row(self._left_ids[start : start + self.seq], self._left_flags[start : start + self.seq])
        del self._left_ids[:whole], self._left_flags[:whole]

    def close(self) -> None:
        self._pad()
        self._ids.close()
        self._flags.close()

    def _pad(self) -> None:
        """The row begun, if there is one, ends with padding."""
        if self._left_ids:
            missing = self.seq - len(self._left_ids)
            self._row([*self._left_ids, *[self.pad] * missing], [*self._left_flags, *[PADDING] * missing])
            self._left_ids, self._left_flags = [], []

    def _row(self, ids: list[int], flags: list[int]) -> None:
        silent = BEGINS if self.packing == "documents" else 0
        if not any(f & COUNTS and not f & silent for f in flags[1:]):
            self.num_dropped += 1
            return
        self._ids.write(np.asarray(ids, np.int32).tobytes())
        self._flags.write(np.asarray(flags, np.uint8).tobytes())
        self.num_rows += 1
        self.num_tokens += sum(not f & PADDING for f in flags)


def prepare(root: Path, paths: Sequence[Path], tokenizer: Any, *, seq: int, packing: Packing,
            assistant_only: bool) -> tuple[Path, Facts]:
    """The folder of the rows that `paths` make, written now unless it is there. One process calls it.

    Raises ValueError for files that cannot be read or have no row that counts.
    """
    fingerprint = fingerprint_of(paths, tokenizer, seq, packing, assistant_only)
    folder = root / fingerprint
    if (folder / "facts.json").is_file():
        return folder, Facts(**json.loads((folder / "facts.json").read_text()))
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{fingerprint}.", dir=root))
    try:
        facts = write(partial, read_documents(paths, tokenizer, assistant_only=assistant_only), seq, packing,
                      end_of_sequence(tokenizer), fingerprint)  # fmt: skip
        if not facts.num_rows:
            raise ValueError(f"{', '.join(map(str, paths))}: there is no token to learn from")
        shutil.rmtree(folder, ignore_errors=True)  # without facts.json: not ours, or cut short
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder, facts


def write(folder: Path, documents: Iterable[Document], seq: int, packing: Packing, pad: int, fingerprint: str) -> Facts:
    cutter = Cutter(folder, seq, packing, pad)
    for document in documents:
        cutter.add(document)
    cutter.close()
    facts = Facts(fingerprint, seq, packing, pad, cutter.num_rows, cutter.num_documents, cutter.num_tokens, cutter.num_dropped)
    (folder / "facts.json").write_text(json.dumps(asdict(facts)))
    return facts


def fingerprint_of(paths: Sequence[Path], tokenizer: Any, seq: int, packing: Packing, assistant_only: bool) -> str:
    """A hash of everything that rows depend on."""
    files = []
    for path in paths:
        try:
            with path.open("rb") as file:
                files.append([path.suffix, hashlib.file_digest(file, "sha256").hexdigest()])
        except OSError as e:
            raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return content_hash([FORMAT, files, words, tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None), seq, packing,
                         assistant_only])
