"""Everything a running plan owns: streams, slots, host state, collectives, the optimizer, and its end.

    Machine   built once per plan from the first specialisation's graph; shared by all of them (another plan: switching.py)
      Backend, Streams    where ops run (backend.py, cuda.py, streams.py)
      HostState, Words    FP32 state once a host, and what ranks tell one another (host_state.py, words.py)
      ResidentState       the part of it that lives in HBM instead (resident.py)
      Binding, Buffers    the user's module <-> slots or master weights (binding.py, buffers.py)
      Exposure            what the user sees of it between steps, and writes into it (exposure.py)
      Updates             what the ops that update do, and which parameters have a gradient (step_updates.py)
      Clipping            the norm of the gradients, where updates wait for it (clipping.py)
      Fallback            what layers keep less than planned, for want of memory; one per specialisation (fallback.py)
      Failure             what waits look at, and which error is raised (failure.py)
      Meetings            what ranks tell one another outside of steps (meetings.py)
      Saves               a checkpoint being written beside training (saving.py)
      Interpreter         one per graph, made before its first step (interpreter.py, closures.py)
      Runners             of the stages of each trace, one for each micro-batch of a step (runners.py, stages.py, stage_values.py)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor, nn

from slidedp.compiler.decisions import Update
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Edge, OpGraph
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.rows import find_splits
from slidedp.compiler.simulation.timeline import Event
from slidedp.executor.checkpoints.saving import Saves
from slidedp.executor.devices.backend import Backend
from slidedp.executor.devices.devices import open_backend
from slidedp.executor.failures.failure import Failure
from slidedp.executor.machine.graph_facts import GraphFacts
from slidedp.executor.machine.interpreter import Interpreter
from slidedp.executor.machine.step import MicroBatch, Step
from slidedp.executor.machine.step_updates import Updates
from slidedp.executor.machine.switching import DRAINED, FIRST_OP_WORD, Lowered, equip
from slidedp.executor.optim.adam import CpuAdam
from slidedp.executor.optim.clipping import Clip, Clipping
from slidedp.executor.optim.kernels import HostKernels
from slidedp.executor.optim.resident import ResidentState
from slidedp.executor.options import MachineOptions, update_niceness, update_threads
from slidedp.executor.ranks.collectives import Collectives
from slidedp.executor.ranks.meetings import Meetings
from slidedp.executor.shared.words import AbortReason, Board, PeerError
from slidedp.executor.stages.binding import Binding, share_buffers
from slidedp.executor.stages.buffers import Buffers, may_come_later
from slidedp.executor.stages.exposure import Exposure
from slidedp.executor.stages.fallback import Fallback, warn
from slidedp.executor.stages.runners import Runners
from slidedp.executor.state.host_state import HostState
from slidedp.executor.streams.tickets import Aborted, Ticket
from slidedp.executor.streams.updates import UpdateQueue

"""What one op did: name, stream, start and end in seconds."""

LOOK_BACK = 64
"""Turns that are remembered: more than there can be from a step's submission to its end."""


class Machine:
    """Runs the steps of one plan on one rank.

    Args:
        model: the user's module; its parameters become views of the master weights.
        plan: of the first specialisation; later ones must share groups and decisions.
        others: what it may be switched to (switching.py); the host has room for each of them.
        hbm_budget, host_budget: bytes that the device's allocator reserves at most, and that the shared state may take.
        collectives: connects the ranks. Construction is collective, as are `run`, `agree` and `synchronize` in effect.
    """

    def __init__(self, model: nn.Module, plan: Lowered, *, others: Sequence[Lowered] = (), collectives: Collectives,
                 device: torch.device, optimizer: AdamW, compute_dtype: torch.dtype, grad_dtype: torch.dtype,
                 hbm_budget: int | None = None, host_budget: int | None = None, options: MachineOptions | None = None) -> None:
        layers, self.plan, self.options = plan.layers, plan, options or MachineOptions()
        self.dtypes = compute_dtype, grad_dtype
        self.collectives, self.optimizer = collectives, optimizer
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.counters: Counter[str] = Counter()
        self.num_steps = self.num_turns = 0
        self.steps_before = 0  # training steps of the checkpoint that was resumed, less those of this machine until then
        self.last_published: dict[str, int] = {}
        self.exposure, self.updates = Exposure(self), Updates(self)
        self.short_of_memory: list[Step] = []  # steps with shortages that the user has not been told of
        self.word_of: dict[str, int] = {}
        self.interpreters: list[Interpreter] = []
        self.in_flight: Step | None = None
        self.cut_short: list[Step] = []  # steps in which something has failed: their batches stay until the device is done
        self.steps_at: dict[int, int] = {}  # turn -> training steps, it included, of the last few
        self.compute_end_s = 0.0
        self.closed = False
        self.buffers: Buffers  # by `equip` (switching.py), as is `resident`
        self.resident: ResidentState | None = None
        self.registered: dict[int, Tensor] = {}  # host memory that the device copies from and to, by address
        if self.world_size > 1:
            share_buffers(model, collectives)
        self.binding = Binding(model, layers.groups)  # before anything is allocated: it may refuse the model
        self.backend: Backend = open_backend(device)
        self.runners = Runners(self.binding, self.backend)
        split_rows = dict.fromkeys(name for p in (plan, *others) for name in find_splits(p.layers, p.decisions))
        self.state = HostState(
            layers.groups, plan.decisions, rank=self.rank, world_size=self.world_size, compute_dtype=compute_dtype,
            grad_dtype=grad_dtype, num_words=FIRST_OP_WORD + max(len(p.heard) for p in (plan, *others)),
            exchange=collectives.exchange_ints, barrier=collectives.barrier, host_budget=host_budget, split_rows=list(split_rows),
            others=[p.decisions for p in others])
        self.words = self.state.words
        try:
            self.open(hbm_budget)
            self.start()
        except BaseException as e:
            self.give_up(e)
            raise

    def open(self, hbm_budget: int | None) -> None:
        """All that runs beside the user's thread."""
        delay, pause, trace = self.options.delay, self.options.pause, self.options.trace
        self.streams = self.backend.open_streams(delay=delay, pause=pause, trace=trace)
        self.failure = Failure(self.streams, self.words, self.options, DRAINED)
        self.collectives.check = self.streams.check
        self.meetings = Meetings(self.words, Board.STEP, self.failure.check, self.failure.cause)
        self.saves = Saves(self.words, self.failure, self.counters)
        if hbm_budget is not None:
            self.backend.cap(hbm_budget)  # `close` lifts it

    def start(self) -> None:
        """Load the weights, and make all that lives as long as the machine."""
        self.binding.adopt(self.state)
        kernel, threads = self.options.update_kernel, self.options.num_threads
        threads = threads or update_threads(self.world_size)
        self.adam = CpuAdam(self.state, self.plan.layers.groups, self.optimizer, kernel=kernel, num_threads=threads)
        queue = None
        if self.adam.native and self.options.native_queue:
            queue = UpdateQueue(self.adam.kernels.library, threads, self.words.shape(), update_niceness(self.backend.device))
            self.streams.updates.open_queue(queue)
        self.clipping: Clipping | None = None
        if self.plan.decisions.update is Update.DEFERRED:
            self.clipping = Clipping(self.binding.model, self.state, self.options.max_grad_norm, self.options.skip_nonfinite,
                                     quiet=self.rank != 0)
        self.casting, self.summing = (HostKernels(kernel, threads, quiet=True, queue=queue) for _ in range(2))
        equip(self, self.plan)

    # ---- what the interpreter touches ----

    def host_buffer(self, head: str, group: str) -> Tensor:
        """Flat host tensor of a group: H returned gradient, Q this rank's unreduced gradient."""
        match head:
            case "H":
                return self.state.grad[group]
            case "Q":
                return self.raw_gradient(group, self.rank)
        raise AssertionError(f"{head}.{group} has no host buffer")

    def raw_gradient(self, group: str, rank: int) -> Tensor:
        """A rank's unreduced gradient, flat; every rank's is in shared memory."""
        return self.state.raw_grad[group][rank]

    def expected(self, edges: Sequence[Edge], step: int) -> tuple[tuple[int, int], ...]:
        """(word, step) that every rank will have published before what `edges` lead to may start.

        An edge from the step before means the last step that had the op: a specialisation may leave out a whole layer.
        """
        return tuple((self.word_of[e.src], self.last_published.get(e.src, 0) if e.distance else step) for e in edges)

    def ranks_have(self, expected: Sequence[tuple[int, int]]) -> bool:
        self.failure.watchdog.check()
        return all(self.words.reached(word, step) for word, step in expected)

    def publish(self, op: str, step: int, ticket: Ticket) -> None:
        if ticket.error is None:
            self.words.publish(self.word_of[op], step)

    def require_runnable(self, graph: OpGraph) -> None:
        """ValueError if a further specialisation moves groups otherwise than the machine was built for."""
        needed = {slot.name for slot in graph.slots if not may_come_later(slot)}
        if unknown := needed - {slot.name for slot in self.buffers.pools}:
            raise ValueError(
                f"this batch makes the model use its layers in another way than the first batch did (no buffer {min(unknown)}); "
                "compile with example=, a batch that uses all of them"
            )
        if unknown := {e.src for e in graph.edges if e.all_ranks} - set(self.word_of):
            raise ValueError(f"this batch makes ranks wait for {min(unknown)}, unlike the first one; compile with example=")
        if unknown := {op.layer for op in graph for ref in op.writes if ref.rows} - set(self.state.row_index):
            raise ValueError(f"this batch looks rows of {min(unknown)} up, unlike the first one; compile with example=")

    # ---- steps ----

    def agree(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, by rank. Collective; the first thing of a step, so that none issues what another does not."""
        self.raise_failure()
        self.num_turns += 1
        self.failure.arrive(self.num_turns)
        try:
            return self.words.exchange(self.num_turns, values, self.failure.check)
        except (PeerError, Aborted) as e:
            raise self.failure.cause(e) from e

    def new_step(self, lanes: Sequence[MicroBatch], fallback: Fallback, num_valid_global: int, *, loss_is_mean: bool,
                 training: bool) -> Step:
        self.num_steps += training
        self.steps_at[self.num_turns] = self.num_steps
        self.steps_at.pop(self.num_turns - LOOK_BACK, None)
        if training:
            self.words.present(self.num_steps)[self.rank] = 0
        return Step(self.num_steps, self.num_turns, lanes, self, fallback, num_valid_global, loss_is_mean, training)

    def run(self, interpreter: Interpreter, step: Step) -> None:
        """Submit a step and return once its loss is known. The rest goes on under what the caller does next."""
        facts = interpreter.facts
        if self.in_flight and self.in_flight.op_names != facts.op_names:
            self.synchronize()  # edges from the step before name its ops
        previous = self.in_flight.tickets if self.in_flight else {}
        self.in_flight = step
        if step.training and self.resident:
            self.resident.newest = step.turn
        step.op_names, step.speculating, step.moved_by = facts.op_names, facts.speculating, facts.moved_by
        fresh = not interpreter.has_run
        self.failure.begin(step.number, step.turn, fresh=fresh)
        try:
            self.backend.fence_caller()
            step.send()
            interpreter.run(step, previous)
            self.when_drained(facts, step)
        except BaseException as e:
            self.failure.stop(e)
            raise self.failure.cause() from e
        self.failure.wait(step.epilogue)
        if fresh:
            self.backend.settle()
        if step.draws_random:
            self.wait_compute(step)  # its recomputes put the default generators back and forth: the caller must not draw between
        try:
            step.global_loss()
        except (PeerError, Aborted) as e:
            raise self.failure.cause(e) from e
        if step.training and not (self.clipping and self.clipping.skip):
            step.require_finite_loss()

    def interpreter(self, graph: OpGraph, layers: LayerGraph) -> Interpreter:
        """The one that runs `graph`; made when first asked for, with what buffers it needs beyond those that are there."""
        for known in self.interpreters:
            if known.graph is graph:
                return known
        self.buffers.extend(graph)
        self.interpreters.append(Interpreter(graph, layers, self))
        return self.interpreters[-1]

    def sum_losses(self, turn: int) -> float:
        return self.words.loss_sum(turn, self.failure.check)

    def when_drained(self, facts: GraphFacts, step: Step) -> None:
        """Posts the loss; notes when compute has ended; and says, once nothing is left to do on this rank, that it is drained."""
        tickets, left, lock = step.tickets, len(facts.ends), threading.Lock()

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                if self.streams.error is None:
                    step.release()
                else:
                    self.cut_short.append(step)
                if step.grad_norms is not None and self.resident:
                    with step.says_what_moved():
                        self.resident.adam.require_finite(step.grad_norms, step.number)
                if self.streams.error is None:
                    self.words.publish(DRAINED, step.turn)

        def post_loss() -> None:
            if step.epilogue.error is None:
                self.words.post_loss(step.turn, step.local_loss())

        step.epilogue = tickets[facts.last_epilogue]
        step.epilogue.add_done_callback(post_loss)
        compute = [tickets[name] for name in facts.compute]
        tickets[facts.compute[-1]].add_done_callback(partial(step.note_compute_end, compute))
        if self.clipping and step.training:
            tickets["clip"].add_done_callback(step.clip_known.set)
        for name in facts.ends:
            tickets[name].add_done_callback(ended)

    def wait_compute(self, step: Step) -> None:
        self.failure.wait_event(step.compute_ended)
        if not step.wall_s:
            raise self.failure.cause()

    def wait_clip(self, step: Step) -> Clip | None:
        """What the norm of the gradients came to; None where it is not taken."""
        if self.clipping is None:
            return None
        self.failure.wait_event(step.clip_known)
        if step.clip is None:
            raise self.failure.cause()
        return step.clip

    def warn(self) -> None:
        """In the user's thread: of steps that were left out meanwhile, or that ran out of memory and have ended since."""
        if self.clipping:
            self.clipping.warn()
        self.warn_of_shortages(stacklevel=5)

    def warn_of_shortages(self, stacklevel: int) -> None:
        while self.short_of_memory and self.short_of_memory[0].compute_ended.is_set():
            warn(self.short_of_memory.pop(0), f"rank {self.rank}, " if self.world_size > 1 else "", stacklevel)

    def synchronize(self) -> None:
        """Wait until no rank has anything left to do of the steps so far."""
        self.raise_failure()
        if self.in_flight is not None:
            self.failure.wait_word(DRAINED, self.in_flight.turn)
            self.in_flight = None

    @contextmanager
    def recording(self) -> Iterator[tuple[list[Event], list[Event]]]:
        """Collects when every op that starts in the block runs, and when those of devices are issued. Nothing is in flight."""
        self.backend.anchor_clock()
        events, issues = list[Event](), list[Event]()
        before, self.streams.trace = self.streams.trace, lambda *event: events.append(event)
        self.streams.issues = lambda *event: issues.append(event)
        try:
            yield events, issues
        finally:
            self.streams.trace, self.streams.issues = before, None

    def raise_failure(self) -> None:
        if self.closed:
            raise RuntimeError("the machine is closed")
        self.failure.raise_if_failed()

    # ---- the end ----

    def last_ended(self) -> int:
        """The last training step that all ranks have ended: the candidates of one that has failed since are not taken."""
        return max((n for turn, n in self.steps_at.items() if self.words.reached(DRAINED, turn)), default=0)

    def abandon(self, error: BaseException) -> BaseException:
        """The user leaves because of `error`: the others are told, and nothing is waited for. Returns what is behind it."""
        self.failure.stop(error)
        return self.failure.cause()

    def give_up(self, error: BaseException) -> None:
        """The construction has failed: the others, who may wait for this rank's weights, are told."""
        if hasattr(self, "saves"):
            self.abandon(error)
            self.close()
            return
        self.words.abort(self.rank, AbortReason.ERROR, f"{type(error).__name__}: {error}")
        if hasattr(self, "streams"):
            self.streams.close()
        with suppress(RuntimeError):  # the device may be what has failed
            self.backend.close()
        self.state.close(keep_master=False)

    def close(self) -> None:
        """Drain (unless something failed), stop, free. The model keeps ordinary parameters. Idempotent.

        Raises, once all is freed, what has failed in the last step if nobody has heard of it yet.
        """
        if self.closed:
            return
        try:
            if self.streams.error is None:
                self.synchronize()
                self.warn_of_shortages(stacklevel=5)
                self.exposure.show_resident()
        finally:
            failed_save = self.saves.end(healthy=self.streams.error is None)
            self.streams.close()
            if self.in_flight is not None and self.streams.error is not None:
                self.collectives.abort()  # the device would wait for other ranks, which have left the step
            try:
                self.backend.drain()  # a copy may still be under way, into memory that is about to go
            except RuntimeError as e:
                self.failure.stop(e)
            healthy = self.streams.error is None
            on_device = nullcontext() if healthy else suppress(RuntimeError)  # one that has failed fails in every call
            self.closed = True
            if self.resident:
                self.resident.close(rescue=not healthy)
                self.resident = None
            self.exposure.show(self.last_ended())
            with on_device:
                self.binding.give_back()
            self.let_go()
            with on_device:
                self.backend.close()
            if healthy:
                self.collectives.close()  # else they are the caller's: a start that has failed is tried again
            self.failure.watchdog.stop()
            self.binding.release(self.state.close(agreed=healthy))
        if self.failure.unreported:
            raise self.failure.cause()
        if failed_save is not None:
            raise failed_save

    def let_go(self) -> None:
        """Drops all references to device memory: plans, results and errors may be kept long after the machine is closed."""
        if hasattr(self, "buffers"):
            self.buffers.clear()
        for interpreter in self.interpreters:
            interpreter.clear()
        self.interpreters.clear()
        self.runners.clear()
        for step in filter(None, (*self.cut_short, self.in_flight)):
            step.release()
        self.failure.clear_frames()
