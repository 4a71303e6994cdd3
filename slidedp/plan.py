"""The Plan: what `slidedp.compile` returns and a training loop calls.

It plans on the first batch (or the `example`), owns the machine that runs the plan, and hands the model's parameters
back as ordinary ones when closed. Everything that reads state drains the pending updates first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from slidedp.agreement import agree_on_decisions
from slidedp.batch import BatchError, check_batch
from slidedp.compiler.decisions import Decisions
from slidedp.compiler.memory import Memory
from slidedp.compiler.planfile import PlanFile
from slidedp.compiler.simulate import Timeline, measured_timeline
from slidedp.compiler.text import print_graph
from slidedp.executor.collectives import open_collectives
from slidedp.executor.machine import Machine, MachineOptions
from slidedp.executor.step import Step, StepResult
from slidedp.planner import Planner, Settings, Specialisation
from slidedp.ranks import Ranks
from slidedp.report import describe, memory_of, planfile_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slidedp.compiler.optimizer import AdamW


class Plan:
    """A compiled training step. Made by :func:`slidedp.compile`; use it as a context manager or call :meth:`close`."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks, optimizer: AdamW, options: MachineOptions,
                 example: Mapping[str, Tensor] | None) -> None:
        self._model, self._settings, self._ranks, self._optimizer, self._options = model, settings, ranks, optimizer, options
        self._collectives = open_collectives(ranks.device, ranks.rank, ranks.world_size)
        self._planner = Planner(model, settings)
        self._machine: Machine | None = None
        self._current: Specialisation | None = None
        self._closed = False
        if example is not None:
            self._start(example)

    # ---- training ----

    def run(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Forward, backward, reduce and update on this rank's `batch`: one synchronous step of all ranks.

        Returns once the loss can be known; the rest of the step goes on, and the next `run` waits for what it needs.

        Raises:
            ValueError: the batch does not fit the model (on all ranks, if on any); nothing has changed.
            NonFiniteLoss, NonFiniteGradient: see there; PeerError: another rank died or failed.
        """
        machine, spec, step = self._begin(batch, training=True)
        machine.run(spec.graph, spec.layers, spec.trace, step)
        return StepResult(step, self._optimizer.lr)

    def evaluate(self, batch: Mapping[str, Tensor]) -> float:
        """Mean loss over the valid tokens of all ranks' batches, in eval mode, without gradients or updates."""
        self.synchronize()  # a backward under way looks at the modules' mode
        with evaluating(self._model):
            machine, spec, step = self._begin(batch, training=False)
            machine.run(spec.forward_graph, spec.layers, spec.trace, step)
            machine.synchronize()
        return step.global_loss()

    def measure(self, batches: Iterable[Mapping[str, Tensor]]) -> Timeline:
        """Run a training step for each batch and record every op: the measured counterpart of :meth:`simulate`.

        `spans` are of all these steps, in microseconds from the first start; `step_us` and `busy_us` are means over them.
        Recording costs a few microseconds an op. `critical` is empty: what an op waited for is not recorded.
        """
        self.synchronize()
        batches = list(batches)
        if self._machine is None and batches:
            self._start(batches[0])
        assert self._machine is not None, "measure needs a batch"
        with self._machine.recording() as events:
            for batch in batches:
                self.run(batch)
            self._machine.synchronize()
        return measured_timeline(events, len(batches))

    def _begin(self, batch: Mapping[str, Tensor], *, training: bool) -> tuple[Machine, Specialisation, Step]:
        """Checks the batch, and agrees with the other ranks that there is a step, and over how many tokens."""
        self._require_open()
        if self._machine is None:
            self._start(batch)
        machine = self._machine
        assert machine is not None
        problem, spec, valid = None, None, 0
        try:
            batch = check_batch(batch)
            spec = self._planner.find(batch) or self._specialise(batch)
            check_batch(batch, spec.trace)
            valid = spec.trace.num_valid(batch)
        except ValueError as e:
            problem = e
        counts = machine.agree(BatchError.CODE if problem else valid)
        if problem:
            raise problem
        assert spec is not None
        if bad := [rank for rank, n in enumerate(counts) if n == BatchError.CODE]:
            raise BatchError(f"rank {bad[0]} was given a batch that it cannot run (its own error says why); no rank has run it")
        if sum(counts) == 0:
            raise BatchError("no valid token in the global batch (all labels are ignored, on every rank): the loss would be 0/0; "
                             "skip this batch")
        self._current = spec if training else self._current
        return machine, spec, machine.new_step(batch, valid, sum(counts), loss_is_mean=spec.trace.loss_is_mean, training=training)

    def _specialise(self, batch: Mapping[str, Tensor]) -> Specialisation:
        """A further specialisation: this rank's business alone, for groups and decisions are settled."""
        self.synchronize()
        draft = self._planner.draft(batch)
        return self._planner.finish(draft, draft.decisions)

    def _start(self, batch: Mapping[str, Tensor]) -> None:
        """The first batch: plan, agree with the other ranks, and build the machine. Collective."""
        problem, draft = None, None
        try:
            draft = self._planner.draft(check_batch(batch))
        except ValueError as e:
            problem = e
        failed = self._collectives.gather_ints([int(problem is not None)])
        if problem:
            raise problem
        assert draft is not None
        if [1] in failed:
            raise BatchError(f"rank {failed.index([1])} could not plan its first batch (its own error says why)")
        spec = self._planner.finish(draft, agree_on_decisions(draft.decisions, draft.layers, self._collectives))
        s = self._settings
        self._machine = Machine(
            self._model, spec.layers, spec.graph, spec.decisions, collectives=self._collectives, device=self._ranks.device,
            optimizer=self._optimizer, compute_dtype=s.compute_dtype, grad_dtype=s.grad_dtype, host_budget=s.host_budget,
            options=self._options)
        self._current = spec

    # ---- the model ----

    @property
    def model(self) -> nn.Module:
        """The user's module; its parameters are views of the FP32 master weights, current until the next `run`."""
        if self._machine is not None and not self._closed:
            self.synchronize()
        return self._model

    def synchronize(self) -> None:
        """Wait until every pending update, on every rank, is in the master weights and `model` shows them."""
        if self._machine is not None and not self._closed:
            self._machine.synchronize()
            self._machine.restore_model()

    def close(self) -> None:
        """Drain, stop the workers and free pinned and shared memory. The model keeps its (ordinary) parameters."""
        if self._closed:
            return
        self._closed = True
        if self._machine is not None:
            self._machine.close()
        else:
            self._collectives.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this plan is closed: compile the model again to go on training")

    # ---- the plan as an artefact ----

    @property
    def decisions(self) -> Decisions:
        return self._spec.decisions

    @property
    def ops(self) -> str:
        """The ops of the current specialisation, as text (see `slidedp.compiler.text`)."""
        return print_graph(self._spec.graph)

    @property
    def _spec(self) -> Specialisation:
        if self._current is None:
            raise RuntimeError("this plan has not seen a batch yet: pass example= to slidedp.compile, or call run first")
        return self._current

    def dump(self, path: str | Path) -> None:
        """Write decisions, predictions and hashes as YAML: small, hand-editable, readable by `slidedp.load_plan`."""
        self.to_planfile().dump(path)

    def to_planfile(self) -> PlanFile:
        return planfile_of(self._spec)

    def simulate(self) -> Timeline:
        """Predicted steady-state step under the cost model: step time, spans and utilisation by stream, bottleneck."""
        return self._spec.timeline

    def memory(self) -> Memory:
        """Bytes by use, on the device and on the host."""
        return memory_of(self._spec)

    def counters(self) -> dict[str, int]:
        """Bytes moved (parameters updated) by this rank so far, counted where the copies and kernels are called."""
        return dict(self._machine.counters) if self._machine is not None else {}

    def __str__(self) -> str:
        return "SlideDP plan, not yet specialised" if self._current is None else describe(self._spec)


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
