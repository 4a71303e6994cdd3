"""The loop behind ``slidedp train``: data in order, a plan, a schedule, checkpoints, metrics, and a clean end.

    config.py         what is asked for          model_files.py  the model on disk
    documents.py      files to documents         packed_rows.py  documents to rows, kept in files that all ranks map
    loader.py         rows to batches            stopping.py     SIGTERM and Ctrl-C
    schedule.py       the learning rates         resume.py       what there is of an earlier run
    metrics.py        what is recorded

All ranks run :func:`train` alike; rank 0 alone reads the data and the weights, prints, and writes metrics and the trained model.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slidedp.agreement import StopAsked
from slidedp.api import compile
from slidedp.checkpoints import on_all
from slidedp.executor.machine.step import StepResult
from slidedp.executor.ranks.collectives import Collectives, open_collectives
from slidedp.plan import Plan
from slidedp.progress import Report, progress_bar
from slidedp.ranks import Ranks, find_ranks
from slidedp.reports.report import validation_lines
from slidedp.schedule import LearningRate
from slidedp.settings import DTYPE_NAMES
from slidedp.training.config import TrainConfig
from slidedp.training.loader import Batch, Split, StatefulLoader, in_order
from slidedp.training.metrics import Metrics, want_tensorboard
from slidedp.training.model_files import find_model
from slidedp.training.packed_rows import IGNORED, Facts, Rows, prepare
from slidedp.training.resume import EXPORTED, check_resume, is_finished, newest_step, refuse_to_go_back
from slidedp.training.schedule import check_schedule, make_scheduler, other_lr, other_rates
from slidedp.training.stopping import StopSignals

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`step`: training steps done, of `num_steps`. `stopped_by`: the signal that ended the run early, on some rank."""

    step: int
    num_steps: int
    stopped_by: str | None = None


def train(config: TrainConfig) -> Outcome:
    """Train as `config` says, on this rank. Collective.

    Raises:
        ValueError: names what cannot be done and the remedy. PeerError: another rank died or failed.
    """
    outcome = run_or_go_on(config)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    return outcome


def run_or_go_on(config: TrainConfig) -> Outcome:
    """A run's beginning: what is asked for is checked, and then made, what takes long last."""
    rank = int(os.environ.get("RANK", "0"))
    with StopSignals(quiet=rank != 0) as signals:
        source = find_model(config.model)
        want_tensorboard(config.log.tensorboard)
        check_schedule(config.schedule.name)
        ranks = find_ranks(config.plan.device)
        control = open_collectives(torch.device("cpu"), ranks.rank, ranks.world_size)
        tokenizer = on_all(control, lambda: source.tokenizer() if ranks.rank == 0 else None)
        loader, heldout = load_data(config, tokenizer, ranks, control)
        say = print_flushed if ranks.rank == 0 else lambda text: None
        num_steps = config.steps or (config.epochs or 1) * loader.steps_per_epoch
        make_scheduler(config, LearningRate(config.optimizer.lr), num_steps)  # before what takes long: its options may be wrong
        on_all(control, lambda: check_resume(config) if ranks.rank == 0 else None)
        finished = on_all(control, lambda: ranks.rank == 0 and is_finished(config, loader, num_steps))
        if control.exchange_ints([finished])[0]:
            say(f"step {num_steps} of {num_steps} is done, and {config.output / 'model'} written: there is nothing left to do")
            control.close()
            return Outcome(num_steps, num_steps)
        torch.manual_seed(config.seed + ranks.rank)  # dropout, say, of each rank its own
        say(f"loading {source.folder / (source.gguf or '')}")
        model = on_all(control, lambda: source.model(meta=ranks.rank != 0))
        require_context(model, config.data.seq)
        with compiled(config, model, loader) as plan:
            say(str(plan))
            if config.data.packing == "documents":
                require_documents_apart(plan, loader.example())
            run = Run(config, tokenizer, ranks, control, plan, loader, heldout, say, num_steps)
            signals.save_on_stop(plan.ask_to_stop)
            outcome = run.to_the_end(signals)
        control.close()
    return outcome


def print_flushed(text: str) -> None:
    """A line on stdout, above the progress bar if there is one."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(text, flush=True)
    else:
        tqdm.write(text)
        sys.stdout.flush()


# ---- what a run needs ----


def load_data(config: TrainConfig, tokenizer: Any, ranks: Ranks, control: Collectives) -> tuple[StatefulLoader, Rows | None]:
    """The loader, and the held-out rows. Rank 0 prepares what is not there yet. Collective."""
    data = config.data

    def rows_of(paths: tuple[Path, ...]) -> Rows:
        def make() -> bytes:
            if ranks.rank:
                return b""
            folder, facts = prepare(config.output / "data", paths, tokenizer, seq=data.seq, packing=data.packing,
                                    assistant_only=data.assistant_only)
            names = ", ".join(p.name for p in paths)
            print_flushed(f"{names}: {facts.num_tokens:,} tokens of {facts.num_documents:,} document"
                          f"{'s' * (facts.num_documents != 1)} in {facts.num_rows:,} rows; {PACKED[data.packing]}")
            if remedy := facts.remedy():
                print_flushed(f"warning: {names}: {remedy}")
            return json.dumps([str(folder), asdict(facts)]).encode()

        folder, facts = json.loads(control.broadcast_bytes(on_all(control, make)))
        return Rows(Path(folder), Facts(**facts))

    split = Split(config.sequences_a_step(ranks.world_size), config.batch, ranks.rank, ranks.world_size)
    loader = StatefulLoader(rows_of(data.train), split, seed=config.seed, shuffle=data.shuffle)
    return loader, rows_of(data.heldout) if data.heldout else None


PACKED = {
    "concat": "documents follow one another, and attention crosses their ends",
    "documents": "documents follow one another, and attention stays within each",
    "none": "a document a row, padded",
}


def compiled(config: TrainConfig, model: torch.nn.Module, loader: StatefulLoader) -> Plan:
    p, num_micro = config.plan, loader.split.num_micro
    example = [loader.example()] * num_micro if num_micro > 1 else loader.example()
    return compile(
        model, p.hw, example=example, optimizer=config.optimizer.describe(), policy=p.policy, hbm_budget=p.hbm_budget,
        host_budget=p.host_budget, compute_dtype=DTYPES.get(p.compute_dtype or ""), grad_dtype=DTYPES.get(p.grad_dtype or ""),
        max_grad_norm=config.max_grad_norm, skip_nonfinite=config.skip_nonfinite, device=p.device,
        update_kernel=p.update_kernel, solver=p.solver, validate=p.validate, peer_timeout_s=p.peer_timeout_s,
        peer_absence_s=p.peer_absence_s)


def require_context(model: torch.nn.Module, seq: int) -> None:
    """ValueError if the model says that it was not made for rows of `seq` tokens."""
    most = getattr(model.config, "max_position_embeddings", None)
    if isinstance(most, int) and seq > most:
        raise ValueError(f"data.seq: {seq} tokens are more than the {most} of the model's context (max_position_embeddings of "
                         f"its config); use at most {most}, or a model whose context has been extended")


def require_documents_apart(plan: Plan, batch: Batch) -> None:
    """ValueError unless the model's attention stays within a document when `position_ids` begin anew: two batches that differ
    in the first document of each row must have the same loss over the second, to the bit but for an unruly kernel. Collective.
    """
    half = batch["input_ids"].shape[1] // 2
    labels, places = batch["input_ids"].clone(), torch.arange(batch["input_ids"].shape[1])
    labels[:, : half + 1] = IGNORED
    places = torch.where(places < half, places, places - half)
    probe = {**batch, "labels": labels, "position_ids": places.expand_as(labels).clone()}
    other = batch["input_ids"].clone()
    other[:, :half] = other[:, :half].flip(1) // 2
    losses = [plan.evaluate({**probe, "input_ids": ids}) for ids in (batch["input_ids"], other)]
    if not math.isclose(*losses, rel_tol=1e-6):
        raise ValueError(f"data.packing: documents: this model's attention crosses from one document to the next (losses "
                         f"{losses[0]} and {losses[1]} of the same document behind different ones); use packing: concat, or none")


# ---- the run ----


class Run:
    """One process's part of a training run, from its first step, or the checkpoint that it goes on from, to its end."""

    def __init__(self, config: TrainConfig, tokenizer: Any, ranks: Ranks, control: Collectives, plan: Plan,
                 loader: StatefulLoader, heldout: Rows | None, say: Callable[[str], object], num_steps: int) -> None:
        self.config, self.tokenizer, self.ranks, self.control = config, tokenizer, ranks, control
        self.plan, self.loader, self.heldout, self.say = plan, loader, heldout, say
        self.num_steps = num_steps
        self.scheduler = make_scheduler(config, plan.optimizer, self.num_steps)
        self.checkpoints = config.output / "checkpoints"
        self.evaluation_due = False
        self.step = self.saved = self.resume()
        self.unrecorded: tuple[StepResult, float] | None = None
        self.told = plan.validation  # of an earlier run, it is in the plan's own lines
        self.report: Report = lambda *_: False
        self.metrics = None
        if ranks.rank == 0:
            self.metrics = Metrics(config.output, done=self.step, evaluate_again=self.step == self.num_steps,
                                   tensorboard=config.log.tensorboard)

    def to_the_end(self, signals: StopSignals) -> Outcome:
        """All steps that are left, then the trained model; after a signal on any rank, a checkpoint instead."""
        name = None
        try:
            with progress_bar("training", show=self.ranks.rank == 0, timed=True) as self.report:
                while self.step < self.num_steps:
                    self.one_step()
                self.record()
            self.finish()
        except StopAsked:
            self.save()
            name = signals.name or "a signal to another rank"
            self.say(f"stopped by {name} after step {self.step} of {self.num_steps}; the same command goes on from there")
        finally:
            if self.metrics is not None:
                self.metrics.close()
        return Outcome(self.step, self.num_steps, name)

    def one_step(self) -> None:
        """What is due after the step before, then a step. Raises StopAsked, on all ranks, with a step done as a whole or not."""
        if self.evaluation_due:
            self.evaluate()
        if self.config.checkpoint.every and self.step and self.step % self.config.checkpoint.every == 0:
            self.save()
        place, epoch = self.loader.place, self.loader.epochs_done
        with self.plan.loading():
            batches = next(self.loader)
        try:
            result = self.plan.run(batches[0] if len(batches) == 1 else batches)
        except StopAsked:
            self.loader.place = place
            raise
        self.step = result.step
        self.record()  # the step before this one: reading a step's figures at once would wait for its backward
        if self.plan.validation is not self.told:
            self.told = self.plan.validation
            self.say("\n".join(validation_lines(self.plan.to_planfile())))
        self.unrecorded = result, epoch
        if not result.skipped:
            self.scheduler.step()
        self.evaluation_due = bool(self.config.evaluate_every) and self.step % (self.config.evaluate_every or 1) == 0

    def finish(self) -> None:
        """What comes after the last step; a signal ends the evaluation, and the resumed run begins with it."""
        if self.heldout is not None:
            self.evaluate()
        if self.config.checkpoint.every:
            self.save()
        self.export()

    # ---- records ----

    def record(self) -> None:
        """The figures of the newest step that has none yet."""
        if self.unrecorded is None:
            return
        (r, epoch), self.unrecorded = self.unrecorded, None
        if self.metrics is None:
            return
        self.metrics.write({"step": r.step, "epoch": round(epoch, 6), "loss": r.loss, "grad_norm": r.grad_norm, "lr": r.lr,
                            "num_tokens": r.num_tokens, "tokens_per_s": round(r.tokens_per_s, 1), "wall_s": round(r.wall_s, 6),
                            "exposed_s": round(r.exposed_s, 6), "skipped": r.skipped})
        norm = "" if r.grad_norm is None else f", norm {r.grad_norm:.3g}"
        line = (f"loss {r.loss:.4f}, {r.tokens_per_s:,.0f} tokens/s, {r.exposed_s:.2g} of {r.wall_s:.2g} s exposed, "
                f"lr {r.lr:.2e}{norm}")
        if not self.report(line, r.step, self.num_steps) and (r.step % self.config.log.every == 0 or r.step == self.num_steps):
            self.say(f"step {r.step}/{self.num_steps}  {line}")

    def evaluate(self) -> None:
        """Mean loss over all held-out tokens, whatever their split over batches. Changes no bit of the training."""
        assert self.heldout is not None
        self.record()
        split = Split(self.loader.split.micro_batch * self.ranks.world_size, self.loader.split.micro_batch, self.ranks.rank,
                      self.ranks.world_size)
        total = num_tokens = 0.0
        rows = in_order(self.heldout, split)
        for _ in range(-(-len(self.heldout) // split.num_sequences)):
            with self.plan.loading():
                valid, batch = next(rows)
            total += self.plan.evaluate(batch) * valid
            num_tokens += valid
        loss, self.evaluation_due = total / num_tokens, False
        if self.metrics is not None:
            self.metrics.write({"step": self.step, "eval_loss": loss})
        self.say(f"step {self.step}/{self.num_steps}  held-out loss {loss:.4f}")

    # ---- checkpoints ----

    def save(self) -> None:
        """A checkpoint of this step, unless there is one already."""
        self.record()
        if self.saved != self.step:
            state = {"loader": self.loader.state_dict(), "scheduler": self.scheduler.state_dict(),
                     "evaluation_due": self.evaluation_due, "num_steps": self.num_steps}
            path = self.plan.save(self.checkpoints, extra=state, keep=self.config.checkpoint.keep)
            self.say(f"step {self.step}/{self.num_steps}  saved {path}")
        self.saved = self.step

    def resume(self) -> int:
        """The steps done by the checkpoint that `config.resume` asks for; 0 where it asks for none, or "auto" finds none."""
        asked, there = self.config.resume, self.newest()
        if asked is False or (asked == "auto" and not there):
            return 0
        found = self.plan.resume(self.checkpoints if isinstance(asked, str) else asked)
        if asked != "auto":
            refuse_to_go_back(asked, found.step, self.checkpoints, there)
        if not found.extra.keys() >= {"loader", "scheduler", "evaluation_due"}:
            raise ValueError(f"{found.path} was not saved by slidedp train: it does not say where in the data it is")
        self.loader.load_state_dict(found.extra["loader"])
        self.scheduler.load_state_dict(found.extra["scheduler"])
        self.evaluation_due = found.extra["evaluation_due"] and self.heldout is not None
        self.say(f"going on from {found.path}: step {found.step} of {self.num_steps}")
        notes = (other_rates(self.config, self.num_steps, found.step, found.extra.get("num_steps", self.num_steps)),
                 other_lr(self.config, self.scheduler.base_lrs[0]))
        for note in filter(None, notes):
            self.say(note)
        return found.step

    def newest(self) -> int:
        """Step of the newest checkpoint in the output, damaged or not; 0 for none. Rank 0 looks, for all."""
        (step,) = self.control.exchange_ints([newest_step(self.checkpoints) if self.ranks.rank == 0 else 0])
        return step

    def export(self) -> None:
        """The trained model and its tokenizer, as a directory that transformers loads."""
        model, target = self.plan.model, self.config.output / "model"

        def write() -> None:
            if self.ranks.rank == 0:
                partial = target.with_name(".model.partial")
                shutil.rmtree(partial, ignore_errors=True)
                model.save_pretrained(partial)  # type: ignore[operator]
                self.tokenizer.save_pretrained(partial)
                (partial / EXPORTED).write_text(json.dumps({"step": self.step}))
                shutil.rmtree(target, ignore_errors=True)
                os.replace(partial, target)

        self.plan.on_all(write)
        self.say(f"wrote {target}")
