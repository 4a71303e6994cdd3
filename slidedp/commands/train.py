"""``slidedp train config.yaml``: a training run, on one rank, or on several under torchrun."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from slidedp.executor.machine.step import NonFiniteLoss
from slidedp.executor.optim.adam import NonFiniteGradient
from slidedp.executor.shared.words import PeerError
from slidedp.training.config import TrainConfig, load_config


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run_train)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; paths in it are relative to it")
    parser.description = ("Trains as a YAML file says; under torchrun --nproc-per-node N -m slidedp train CONFIG on N ranks.\n"
                          "SIGTERM or Ctrl-C: a checkpoint after the step under way; the same command goes on from it.")
    parser.epilog = "keys of CONFIG:\n" + "\n".join(describe(TrainConfig))


def describe(kind: type[Any], indent: str = "  ") -> Iterator[str]:
    """A line a key, with its default, and under each section what its docstring says."""
    hints = get_type_hints(kind)
    for f in fields(kind):
        if is_dataclass(hints[f.name]):
            yield f"{indent}{f.name}:"
            yield from describe(hints[f.name], indent + "  ")
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        shown = "required" if default is MISSING else f"default {default if default not in (None, ()) else 'none'}"
        yield f"{indent}{f.name}  ({shown})"
    yield from (f"{indent}# {line}".rstrip() for line in (inspect.getdoc(kind) or "").splitlines())


def run_train(args: argparse.Namespace) -> int:
    """Exit status 0, also when a signal has ended the run after a checkpoint; 1 if a rank or a step has failed."""
    config = load_config(args.config)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: nothing is to be downloaded
    try:
        from transformers.utils import logging
    except ImportError as e:
        raise ValueError("slidedp train needs transformers; pip install 'slidedp[hf]'") from e
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from slidedp.training.train import train

    try:
        train(config)
    except (PeerError, NonFiniteLoss, NonFiniteGradient) as e:
        rank = os.environ.get("RANK")
        print(f"slidedp: error{'' if rank is None else f' (rank {rank})'}: {e}", file=sys.stderr, flush=True)
        return 1
    return 0
