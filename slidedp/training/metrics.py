"""What a run records of its steps: JSON lines, CSV, and TensorBoard's files where that is installed.

    OUTPUT/metrics.jsonl    {"step": 12, "epoch": 0.4, "loss": 2.31, ...}, and {"step": 20, "eval_loss": 2.2} of evaluations
    OUTPUT/metrics.csv      the same, in columns
    OUTPUT/tensorboard/

A resumed run drops what was recorded after its checkpoint: those steps come again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COLUMNS = ("step", "epoch", "loss", "grad_norm", "lr", "num_tokens", "tokens_per_s", "wall_s", "exposed_s", "skipped",
           "eval_loss")  # fmt: skip
SCALARS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "tokens_per_s": "train/tokens_per_s",
           "exposed_s": "train/exposed_s", "eval_loss": "eval/loss"}  # fmt: skip


class Metrics:
    """Writers of one run, each record on the disk when `write` returns. `done`: training steps before this run.

    `evaluate_again`: the evaluation after those steps comes again too.
    """

    def __init__(self, folder: Path, *, done: int = 0, evaluate_again: bool = False, tensorboard: bool | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.table = folder / "metrics.jsonl", folder / "metrics.csv"
        kept = [r for r in read_metrics(self.lines)
                if r["step"] <= done and not (evaluate_again and r["step"] == done and "eval_loss" in r)]  # fmt: skip
        self.lines.write_text("".join(json.dumps(record) + "\n" for record in kept))
        with self.table.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        self._board = open_tensorboard(folder / "tensorboard", done) if want_tensorboard(tensorboard) else None

    def write(self, record: Mapping[str, Any]) -> None:
        """A record with ``step`` and any other of COLUMNS."""
        with self.lines.open("a") as file:
            file.write(json.dumps(record) + "\n")
        with self.table.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(record)
        if self._board is not None:
            for key, name in SCALARS.items():
                if record.get(key) is not None:
                    self._board.add_scalar(name, record[key], record["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; what a killed process has left unfinished is not one."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def want_tensorboard(asked: bool | None) -> bool:
    """As asked; None: if it is installed. ValueError if it is asked for and is not."""
    installed = find_spec("tensorboard") is not None
    if asked and not installed:
        raise ValueError("log.tensorboard: tensorboard is not installed; pip install tensorboard, or leave it out: metrics.jsonl "
                         "and metrics.csv are written anyway")
    return installed if asked is None else asked


def open_tensorboard(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)
