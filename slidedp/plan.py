"""The Plan: what `slidedp.compile` returns and a training loop calls.

It plans on the first batch (or the `example`; trial/first_batch.py), owns the machine that runs the plan, and hands the model's
parameters back as ordinary ones when closed. Everything that reads state drains the pending updates first. What it says of
itself is in artefact.py.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from slidedp.agreement import SAVE_FAILED, Posted, agree_on_step
from slidedp.artefact import Artefact
from slidedp.batch import BatchError, Batches, check_lanes, num_batches
from slidedp.checkpoints import Checkpoint, find, load, on_all, require_same_names, save
from slidedp.compiler.simulation.simulate import Timeline, measured_timeline
from slidedp.ending import close, close_quietly
from slidedp.executor.checkpoints.checkpoint_files import FileLayer
from slidedp.executor.checkpoints.saving import SaveHandle
from slidedp.executor.errors import CheckpointError
from slidedp.executor.machine.interpreter import Interpreter
from slidedp.executor.machine.machine import Machine
from slidedp.executor.machine.step import MicroBatch, Step, StepResult
from slidedp.executor.options import MachineOptions
from slidedp.executor.ranks.collectives import open_collectives
from slidedp.executor.ranks.skew import peer_wait_s
from slidedp.executor.shared.words import PeerError
from slidedp.planning.planner import Planner
from slidedp.planning.specialisation import Specialisation
from slidedp.ranks import Ranks
from slidedp.saving import agree_to_save, start_save
from slidedp.schedule import LearningRate, as_float, as_int
from slidedp.settings import Settings
from slidedp.trial.calibrate import cached_stages
from slidedp.trial.first_batch import start
from slidedp.trial.validation import Trial

if TYPE_CHECKING:
    from slidedp.compiler.optimizer import AdamW

T = TypeVar("T")


class Plan(Artefact):
    """A compiled training step. Made by :func:`slidedp.compile`; use it as a context manager or call :meth:`close`."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks, optimizer: AdamW, options: MachineOptions,
                 example: Batches | None) -> None:
        self._model, self._settings, self._ranks, self._optimizer, self._options = model, settings, ranks, optimizer, options
        self.optimizer = LearningRate(optimizer.lr)
        """For schedulers of torch and transformers: ``param_groups[0]["lr"]`` is the next step's learning rate (rank 0's)."""
        self._collectives = open_collectives(ranks.device, ranks.rank, ranks.world_size)
        self._planner = Planner(model, settings)
        self._machine: Machine | None = None
        self._current: Specialisation | None = None
        self._trial: Trial | None = None
        self._recording = self._counts = False
        self._closed = False
        self._resume_from: Checkpoint | None = None
        self._stop_asked = False
        self._finalizer: weakref.finalize[..., Plan] | None = None
        if example is not None:
            try:
                self._start(example)
            except Exception:  # nobody will close this plan
                self._collectives.close()
                raise

    # ---- training ----

    def run(self, batch: Batches) -> StepResult:
        """Forward, backward, reduce and update on this rank's `batch`: one synchronous step of all ranks.

        A sequence of batches is one step, too: each layer's weights are delivered once for all of these micro-batches, gradients
        are summed on the device and return once, and the loss is the mean over the tokens of all of them. They may differ in
        shape. All ranks give as many.

        Returns once the loss is known; the rest of the step goes on, and the next `run` waits for what it needs. The batch
        may be refilled at once. Look at the model through :attr:`model`, which waits.

        Raises:
            ValueError: the batch does not fit the model (on all ranks, if on any); nothing has changed.
            NonFiniteLoss: nothing has changed but the step's number. NonFiniteGradient: says which layers have moved. With
                `skip_nonfinite` neither: see `StepResult.skipped`.
            PeerError: another rank died or failed; the plan can only be closed.
            StopAsked: see :meth:`ask_to_stop`.
        """
        machine, spec, interpreter, step, lr = self._begin(batch, training=True)
        self._current = spec
        machine.adam.set_lr(lr, from_step=step.number)
        machine.run(interpreter, step)
        if self._trial is not None and self._counts:
            self._trial.ran(step)
        elif self._trial is not None and not self._recording:
            self._trial.passed_by()
        if self._planner.recheck is not None and not self._recording:
            self._planner.recheck.ran(step, spec)
        self.optimizer.step()
        machine.warn()
        return StepResult(step, lr, machine.steps_before + step.number)

    def ask_to_stop(self) -> None:
        """Have the next `run` or `evaluate` raise StopAsked, on every rank, instead of beginning. Safe in a signal handler."""
        self._stop_asked = True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Say that this rank waits for its next batch: if it hangs there while others have theirs, all stop within 30 s
        (`peer_timeout_s`), and not only after the `peer_absence_s` that a rank which evaluates or saves alone may need."""
        with self._machine.failure.loading() if self._machine is not None else nullcontext():
            yield

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """What `loader` gives, each but the first got within :meth:`loading`: to start a loader may take its time."""
        batches, end = iter(loader), object()
        batch: Any = next(batches, end)
        while batch is not end:
            yield batch
            with self.loading():
                batch = next(batches, end)

    def evaluate(self, batch: Batches) -> float:
        """Mean loss over the valid tokens of all ranks' batches, in eval mode, without gradients or updates."""
        self._require_open()
        if self._machine is not None:
            self._machine.synchronize()  # a backward under way looks at the modules' mode
        with evaluating(self._model):
            machine, _, interpreter, step, _ = self._begin(batch, training=False)
            machine.run(interpreter, step)
            machine.synchronize()
        return step.global_loss()

    def measure(self, batches: Iterable[Batches]) -> Timeline:
        """Run a training step for each batch and record every op: the measured counterpart of :meth:`simulate`.

        `spans` are of all these steps, in microseconds from the first start; `step_us` and `busy_us` are means over them.
        Of several ranks, `busy_us` of the collectives is what they took once all ranks were there; `peer_wait_us` is this
        rank's time before that. Recording costs a few microseconds an op. `critical` is empty: what an op waited for is not
        recorded.

        Raises ValueError for no batch; else what `run` raises, and PeerError where ranks have different numbers of them.
        """
        self._require_open()
        self.synchronize()
        if isinstance(batches, Mapping):
            raise BatchError("measure takes batches, one for each step: measure([batch]) for one step")
        batches = list(batches)
        if not batches:
            raise BatchError("measure runs a step for each batch, and has been given none")
        if self._machine is None:
            self._start(batches[0])
        assert self._machine is not None
        self._recording = True  # a validation goes on after this
        try:
            with self._machine.recording() as (events, issues):
                for batch in batches:
                    self.run(batch)
                self._machine.synchronize()
        finally:
            self._recording = False
        return measured_timeline(events, len(batches), peer_wait_s(events, self._machine.meetings), issues)

    def counters(self) -> Counter[str]:
        """Bytes moved (parameters updated, for updates) by this rank so far, counted where copies and kernels are called;
        `save_stall_us`, for how long updates have waited for saves beside training; and, of a plan that takes the norm of its
        gradients, `clipped_steps`, `skipped_steps`, and `redone_update`: parameters whose update speculated and was done again.
        What has not happened counts 0.
        """
        return Counter() if self._machine is None else +self._machine.counters

    def _begin(self, batch: Batches, *,
               training: bool) -> tuple[Machine, Specialisation, Interpreter, Step, float]:
        """Checks the batch; agrees with the other ranks that there is a step, which one, over how many tokens, and its rate."""
        self._require_open()
        if self._machine is None:
            self._start(batch)
        machine = self._machine
        assert machine is not None
        problem, signature, lr = None, 0, 0.0
        valid: list[int] = []
        try:
            machine.saves.raise_untold()
            lanes = self._planner.lanes(batch)
            spec = self._planner.find(lanes) or self._specialise(lanes)
            valid, signature = check_lanes(lanes, spec.traces), spec.signature(training=training)
            interpreter = self._interpreter(machine, spec, training=training)
            machine.exposure.take_back()
            if training and spec.layers.num_lanes == 1:  # rows of several lanes are not split
                machine.state.mark_rows(machine.num_steps + 1, spec.layers.stages[0].lookups, lanes[0])
            lr = self.optimizer.lr
        except Exception as e:  # whatever it is: the other ranks are waiting to hear of it
            problem = e
        failed = SAVE_FAILED if isinstance(problem, CheckpointError) else int(problem is not None)
        as_planned = self._trial is not None and training and not problem and self._trial.is_of(spec) and not self._recording
        own = Posted(failed, sum(valid), int(training), signature, as_int(lr), int(machine.exposure.changed), num_batches(batch),
                     int(self._stop_asked), int(as_planned))
        posted = agree_on_step(machine, own, problem)
        self._counts = all(row.as_planned for row in posted)
        trial = self._trial
        if trial is not None and training and not self._recording and (trial.hopeless or (self._counts and trial.over)):
            del interpreter  # it holds the slots of a plan that may go
            self._take_turns(machine, trial)
            return self._begin(batch, training=training)  # with what is to run now
        total = sum(row.valid for row in posted)
        micro = [MicroBatch(*lane) for lane in zip(lanes, valid, machine.runners.of(spec.traces), strict=True)]
        step = machine.new_step(micro, spec.fallback, total, loss_is_mean=spec.traces[0].loss_is_mean, training=training)
        return machine, spec, interpreter, step, as_float(posted[0].lr)

    def _take_turns(self, machine: Machine, trial: Trial) -> None:
        """Validation: one of its plans has had its steps. Collective; nothing is lost, and no step is under way on return."""
        try:
            going_on = trial.turn(machine)
        except BaseException as e:
            machine.abandon(e)
            raise
        self._current = trial.current.spec
        if not going_on:
            self._trial = None

    def _interpreter(self, machine: Machine, spec: Specialisation, *, training: bool) -> Interpreter:
        graph = spec.program(training=training, saving=machine.saves.reading is not None)
        machine.require_runnable(graph)
        return machine.interpreter(graph, spec.layers)

    def _specialise(self, lanes: list[dict[str, Tensor]]) -> Specialisation:
        """A further specialisation: this rank's business alone, for groups and decisions are settled."""
        assert self._machine is not None
        if traces := any(self._planner.trace_for(batch) is None for batch in lanes):
            self._machine.synchronize()
            self._machine.binding.restore()
        with torch.inference_mode(False):
            draft = self._planner.draft(lanes)
        if traces:  # of other shapes only what is known: the device is full of this plan, so nothing is measured now
            known = cached_stages(self._model, self._planner.to_measure(draft), self._settings)
            self._planner.measurement = self._planner.measurement.also(known)
        return self._planner.finish(draft, self._planner.decide(draft))

    def _start(self, batch: Batches) -> None:
        """The first batch. Collective."""
        started = start(self._planner, batch, self._collectives, self._optimizer, self._options, self._resume_from)
        self._machine, self._current, self._trial = started.machine, started.spec, started.trial
        if self._resume_from is not None:
            self._load_or_undo(self._resume_from)
        self._finalizer = weakref.finalize(self, close_quietly, self._machine)

    def _load_or_undo(self, found: Checkpoint) -> None:
        assert self._machine is not None
        try:
            self.optimizer.restore(load(self._machine, found))
        except BaseException:  # the weights are no longer those that the user compiled with, nor the checkpoint's
            machine, self._machine, self._closed = self._machine, None, True
            close(machine)
            raise
        self._resume_from = None

    # ---- checkpoints ----

    @overload
    def save(self, directory: str | Path, *, extra: Mapping[str, Any] | None = ..., keep: int = ...,
             wait: Literal[True] = ..., save_buffer: int | str = ...) -> Path: ...

    @overload
    def save(self, directory: str | Path, *, extra: Mapping[str, Any] | None = ..., keep: int = ...,
             wait: Literal[False], save_buffer: int | str = ...) -> SaveHandle: ...

    def save(self, directory: str | Path, *, extra: Mapping[str, Any] | None = None, keep: int = 2, wait: bool = True,
             save_buffer: int | str = "1GiB") -> Path | SaveHandle:
        """Write weights, moments, step counts and generators into a new checkpoint under `directory`; returns its path.

        `extra`: anything JSON can hold, such as the data's position; :meth:`resume` gives it back (rank 0's). The `keep`
        newest checkpoints stay. A process killed at any moment leaves a complete one (checkpoint_files.py). Any
        plan of the same model can resume it, whatever its ranks, routes or device; `from_pretrained` loads it as a model.
        Waits for pending updates, and for a save under way. All ranks call it.

        `wait` False: returns a :class:`SaveHandle` at once and saves while the next steps run; the checkpoint has the same bytes.
        Each rank copies what the next step's updates overwrite into `save_buffer` (bytes or "1GiB", of host memory, for as long
        as the save lasts); when it is full, updates wait for the disk: `SaveHandle.stall_s`, ``counters()["save_stall_us"]``.
        What fails meanwhile is raised, as CheckpointError, by the next `run`, `save`, `close` or `SaveHandle.wait`, with older
        checkpoints as they were. :attr:`model` and :meth:`synchronize` wait until all has been read, `close` until it is saved.

        Raises ValueError for a plan that has not seen a batch.
        """
        self._require_open()
        machine = self._machine
        if machine is None:
            raise ValueError("there is nothing to save yet: this plan has not seen a batch")
        agree_to_save(machine)
        if wait:
            self.synchronize()
            return save(machine, Path(directory), extra, keep, FileLayer(), self.optimizer.settings())
        machine.synchronize()
        machine.exposure.show(machine.num_steps)  # of groups that speculate, the side that the last step has left
        return start_save(machine, self.decisions, Path(directory), extra, keep, FileLayer(), self.optimizer.settings(),
                          save_buffer)

    def resume(self, directory: str | Path) -> Checkpoint:
        """Go on from the newest undamaged checkpoint under `directory` (or from `directory`, if it is one); says which.

        Weights, moments, step counts and the learning rate come back, bit for bit; generators too, on ranks that the save had.
        Before the first batch, all this happens when it comes. A scheduler's own state belongs into `extra`. All ranks call it.
        Raises CheckpointError, a ValueError: there is none, or it is of another model.
        """
        self._require_open()
        if self._machine is not None:
            self._machine.saves.finish()
        found = find(Path(directory), self._collectives if self._machine is None else self._machine.meetings)
        if self._machine is None:
            require_same_names(found, self._model)
            self._resume_from = found
        else:
            self.synchronize()
            self.optimizer.restore(load(self._machine, found))
        return found

    # ---- the model ----

    def on_all(self, work: Callable[[], T]) -> T:
        """What `work` returns, once it has returned on every rank; if it raises on one, all raise. For what rank 0 does alone
        between steps, writing the model say: a rank that dies or is stopped meanwhile is named, and nobody is taken to hang."""
        self._require_open()
        if self._machine is None:
            return on_all(self._collectives, work)
        with self._machine.failure.at_files():
            return on_all(self._machine.meetings, work)

    @property
    def model(self) -> nn.Module:
        """The user's module; its parameters are views of the FP32 master weights, current until the next `run`.

        Masters that live in HBM are copied to the host first, and back by the next `run`: 4 bytes a parameter each way over
        the host link. What is written into them (``load_state_dict``) counts from the next `run` on.
        """
        if not self._closed:
            self.synchronize()
        return self._model

    def synchronize(self) -> None:
        """Wait until every pending update, on every rank, is in the master weights and `model` shows them."""
        if self._machine is not None and not self._closed:
            self._machine.synchronize()
            self._machine.warn()
            self._machine.saves.wait_read()  # the model's parameters may be written into
            self._machine.exposure.expose()

    def close(self) -> None:
        """Drain, stop the workers and free pinned and shared memory. The model keeps its (ordinary) parameters."""
        if self._closed:
            return
        self._closed = True
        if self._machine is not None:
            if self._finalizer is not None:
                self._finalizer.detach()
            close(self._machine)
        else:
            self._collectives.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        cause = error
        if error is not None and self._machine is not None and not self._closed and self._ranks.world_size > 1:
            cause = self._machine.abandon(error)
        try:
            self.close()
        except CheckpointError as failed:  # a save beside training; what has ended the block matters more
            if error is None:
                raise
            error.add_note(f"Also: {failed}")
        if isinstance(cause, PeerError) and isinstance(error, RuntimeError | CheckpointError) and error is not cause:
            raise cause from error  # a connection that broke outside a step, in a save: the rank that died is what matters

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this plan is closed: compile the model again to go on training")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode, every submodule put back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
