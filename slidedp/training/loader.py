"""A data loader that says where it is: the same order on any number of ranks, resumed in the middle of an epoch exactly.

The order of the global batches is settled first, by (seed, epoch) alone. Each is then split over the ranks, and over a rank's
micro-batches, so a run that goes on with other ranks sees the same rows in the same steps. The last batch of an epoch has
whatever is left; ranks left with fewer rows, or none, get rows that do not count, in batches of the usual shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from slidedp.training.packed_rows import Rows

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Split:
    """How `num_sequences` of a step are shared out: `rank` runs its part in micro-batches of at most `batch` sequences."""

    num_sequences: int
    batch: int
    rank: int = 0
    world_size: int = 1

    @property
    def per_rank(self) -> int:
        return -(-self.num_sequences // self.world_size)

    @property
    def num_micro(self) -> int:
        return -(-self.per_rank // self.batch)

    @property
    def micro_batch(self) -> int:
        """Sequences of each micro-batch: as even as they can be."""
        return -(-self.per_rank // self.num_micro)

    def share(self, rows: np.ndarray) -> list[np.ndarray]:
        """This rank's part of a global batch, by micro-batch. A short batch is spread evenly: all ranks are equally busy."""
        mine = np.array_split(rows, self.world_size)[self.rank]
        return np.array_split(mine, self.num_micro)


class StatefulLoader:
    """Endless: a step's micro-batches of this rank, epoch after epoch. `state_dict` is JSON, and the same on every rank."""

    def __init__(self, rows: Rows, split: Split, *, seed: int = 0, shuffle: bool = True) -> None:
        self.rows, self.split, self.seed, self.shuffle = rows, split, seed, shuffle
        self.epoch = self.position = 0
        self._order_of = -1
        self._order: np.ndarray = np.zeros(0, np.int64)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.split.num_sequences)

    @property
    def place(self) -> tuple[int, int]:
        """Epoch, and rows of it behind us. May be set to what it was."""
        return self.epoch, self.position

    @place.setter
    def place(self, place: tuple[int, int]) -> None:
        self.epoch, self.position = place

    @property
    def epochs_done(self) -> float:
        return self.epoch + self.position / len(self.rows)

    def order(self) -> np.ndarray:
        """The row indices of the current epoch."""
        if self._order_of != self.epoch:
            self._order = order_of(len(self.rows), self.seed, self.epoch) if self.shuffle else np.arange(len(self.rows))
            self._order_of = self.epoch
        return self._order

    def next_indices(self) -> np.ndarray:
        """The rows of the next global batch, which is then behind us."""
        chosen = self.order()[self.position : self.position + self.split.num_sequences]
        self.position += len(chosen)
        if self.position >= len(self.rows):
            self.epoch, self.position = self.epoch + 1, 0
        return chosen

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        return self.batches(self.next_indices())

    def batches(self, indices: np.ndarray) -> list[Batch]:
        return [self.rows.batch(part, self.split.micro_batch) for part in self.split.share(indices)]

    def example(self) -> Batch:
        """A micro-batch of the shape that all have, of rows that count."""
        size = self.split.micro_batch
        return self.rows.batch(np.arange(size) % len(self.rows), size)

    def state_dict(self) -> dict[str, Any]:
        """Where we are, and by what that was counted. The checksum is of the epoch's order: a library may come to shuffle
        otherwise than when this was saved."""
        facts = self.rows.facts
        return {"epoch": self.epoch, "position": self.position, "rows": facts.fingerprint, "seq": facts.seq,
                "packing": facts.packing, "seed": self.seed, "shuffle": self.shuffle,
                "sequences_a_step": self.split.num_sequences,
                "order": zlib.crc32(np.ascontiguousarray(self.order()).tobytes())}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken. ValueError, saying what differs, unless the same rows come in the same order."""
        words = {"seq": "data.seq", "packing": "data.packing", "rows": "data (its files, tokenizer or assistant_only)",
                 "seed": "seed", "shuffle": "data.shuffle"}
        mine = self.state_dict()
        for key, word in words.items():
            if state.get(key, mine[key]) != mine[key]:
                raise ValueError(f"the checkpoint was made with another {word}: {state[key]!r} there, {mine[key]!r} here; "
                                 "put it back, or begin anew with resume: false and another output")  # fmt: skip
        if state["sequences_a_step"] != self.split.num_sequences:
            raise ValueError(f"the checkpoint's steps are of {state['sequences_a_step']} sequences, this run's of "
                             f"{self.split.num_sequences} (all ranks together); set global_batch: {state['sequences_a_step']}")
        before, self.place = self.place, (state["epoch"], state["position"])
        if self.state_dict()["order"] != state["order"]:
            self.place = before
            raise ValueError("the rows of the checkpoint's epoch are shuffled otherwise now (another numpy?): the run cannot be "
                             "resumed in the middle of it")


def order_of(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation that depends on these numbers alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(num_rows)


def in_order(rows: Rows, split: Split) -> Iterator[tuple[int, Batch]]:
    """Every row once, for an evaluation: this rank's batch, and how many valid tokens all ranks' batches have together."""
    for start in range(0, len(rows), split.num_sequences):
        indices = np.arange(start, min(start + split.num_sequences, len(rows)))
        (mine,) = split.share(indices)
        yield rows.num_valid(indices), rows.batch(mine, split.micro_batch)
