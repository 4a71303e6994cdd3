"""What ``slidedp train config.yaml`` is told: one frozen dataclass a section, read and checked by typed_config.py.

    model: my-model                     a Hugging Face directory, a GGUF file, or a directory with one
    output: out                         checkpoints, metrics, the prepared data and the trained model go there
    data: {train: text.jsonl, seq: 1024}
    batch: 4                            sequences a rank runs at once
    steps: 1000

Everything else has a default. `slidedp train --help` prints all keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.units import parse_bytes
from slidedp.executor.options import PEER_ABSENCE_S, PEER_TIMEOUT_S
from slidedp.training.typed_config import read_config

AT_LEAST_ONE = {"minimum": 1}
Packing = Literal["concat", "documents", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Text (``.txt``, ``.md``; a file is a document) or JSON lines (``.jsonl``): ``text``, ``messages``, or ``prompt`` and
    ``completion``, whose loss is that of the completion alone.

    `packing`: "concat": documents one after the other, each with its end-of-sequence token, cut into rows of `seq` tokens;
    "documents": so too, but attention stays within a document, by position ids, if the model can do that (which is checked);
    "none": every document begins a row, which is padded. `assistant_only`: of `messages`, only the assistant's turns count.
    """

    train: tuple[Path, ...]
    heldout: tuple[Path, ...] = ()
    seq: int = field(default=1024, metadata={"minimum": 4})
    packing: Packing = "concat"
    assistant_only: bool = False
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train: name at least one file")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """See `slidedp.AdamW`."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ("bias", "norm")

    def __post_init__(self) -> None:
        self.describe()

    def describe(self) -> AdamW:
        return AdamW(self.lr, self.betas, self.eps, self.weight_decay, self.no_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """A schedule of `transformers.get_scheduler`. `warmup`: steps, or, below 1, a part of all steps. `options`: its own keywords.

    ``warmup_stable_decay`` decays over the last tenth of the steps unless `options` has ``num_decay_steps``.
    """

    name: str = "cosine"
    warmup: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise ValueError(f"warmup: {self.warmup:g} is neither a whole number of steps nor, below 1, a part of them")

    def warmup_steps(self, num_steps: int) -> int:
        return int(self.warmup) if self.warmup >= 1 else math.ceil(self.warmup * num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What `slidedp.compile` takes: `policy` is a mapping, or the path of a policy or plan. Budgets: bytes, or "20GiB".

    A rank that hangs, in a step or in its loader, is named after `peer_timeout_s` seconds, and all stop.
    """

    hw: str = "auto"
    policy: Path | Mapping[str, Any] | None = None
    hbm_budget: int | str | None = None
    host_budget: int | str | None = None
    compute_dtype: Literal["bfloat16", "float32"] | None = None
    grad_dtype: Literal["bfloat16", "float32"] | None = None
    update_kernel: Literal["auto", "native", "torch"] = "auto"
    solver: Literal["cp-sat", "rule"] = "cp-sat"
    validate: bool | int | None = None
    device: str | None = None
    peer_timeout_s: float = PEER_TIMEOUT_S
    peer_absence_s: float = PEER_ABSENCE_S

    def __post_init__(self) -> None:
        for name in ("hbm_budget", "host_budget"):
            if (size := getattr(self, name)) is not None:
                try:
                    parse_bytes(size)
                except ValueError as e:
                    raise ValueError(f"{name}: {e}") from e


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """`every`: steps between checkpoints, and one at the end; none without it, but for one when a signal ends the run."""

    every: int | None = field(default=None, metadata=AT_LEAST_ONE)
    keep: int = field(default=2, metadata=AT_LEAST_ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """`every`: steps between lines where there is no terminal for a progress bar; metrics are kept of every step.

    `tensorboard`: default: if it is installed.
    """

    every: int = field(default=10, metadata=AT_LEAST_ONE)
    tensorboard: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run. A step is `global_batch` sequences, or `batch` x `accumulate` x ranks of them.

    `steps` or `epochs` (default: 1 epoch). `resume`: "auto" goes on from the newest checkpoint in `output` if there is one;
    false begins anew; a path is a checkpoint or a directory of them. `evaluate_every`: steps between evaluations on
    `data.heldout`, which is evaluated at the end anyway.
    """

    model: Path
    output: Path
    data: DataConfig
    batch: int = field(default=1, metadata=AT_LEAST_ONE)
    accumulate: int | None = field(default=None, metadata=AT_LEAST_ONE)
    global_batch: int | None = field(default=None, metadata=AT_LEAST_ONE)
    steps: int | None = field(default=None, metadata=AT_LEAST_ONE)
    epochs: int | None = field(default=None, metadata=AT_LEAST_ONE)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    max_grad_norm: float | None = 1.0
    skip_nonfinite: bool | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)
    seed: int = 0
    evaluate_every: int | None = field(default=None, metadata=AT_LEAST_ONE)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume: Literal["auto", False] | Path = "auto"
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for a, b in (("steps", "epochs"), ("accumulate", "global_batch")):
            if getattr(self, a) is not None and getattr(self, b) is not None:
                raise ValueError(f"{a} and {b}: give one of them")
        if self.max_grad_norm == 0:
            raise ValueError("max_grad_norm: 0 is not a limit; use null for no clipping")
        if self.evaluate_every is not None and not self.data.heldout:
            raise ValueError("evaluate_every: there is nothing to evaluate on; name a file in data.heldout")

    def sequences_a_step(self, num_ranks: int) -> int:
        """Sequences of one step, all ranks together."""
        return self.global_batch or self.batch * (self.accumulate or 1) * num_ranks


def load_config(path: str | Path) -> TrainConfig:
    """The checked content of a YAML file. ValueError names the file and the key."""
    config = read_config(TrainConfig, path)
    if config.plan.hw.endswith((".yaml", ".yml")):  # a file, not a name: relative to this one, as all paths are
        config = replace(config, plan=replace(config.plan, hw=str(Path(path).parent / config.plan.hw)))
    return config
