"""Everything a running plan owns: streams, slots, host state, collectives, the optimizer, and its end.

    Machine   built once per plan from the first specialisation's graph; shared by all of them
      Backend, Streams    where ops run (backend.py, cuda.py, streams.py)
      HostState, Words    FP32 state once a host, and what ranks tell one another (host_state.py, words.py)
      Binding             the user's module <-> slots or master weights (binding.py)
      Interpreter         one per graph and specialisation, made on first use
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph
from slidedp.compiler.ops import Edge, OpGraph, Stream
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.tracer import Trace
from slidedp.executor.adam import CpuAdam, NonFiniteGradient
from slidedp.executor.backend import Backend, open_backend
from slidedp.executor.binding import Binding, share_buffers
from slidedp.executor.collectives import Collectives
from slidedp.executor.host_state import HostState
from slidedp.executor.interpreter import Interpreter
from slidedp.executor.kernels import HostKernels
from slidedp.executor.liveness import Watchdog
from slidedp.executor.stages import StageRunner
from slidedp.executor.step import Step
from slidedp.executor.streams import Ticket
from slidedp.executor.words import AbortReason, PeerError

Event = tuple[str, Stream, float, float]
"""What one op did: name, stream, start and end in seconds."""

DRAINED = 0
"""Word that a rank publishes when a step has nothing left to do on it."""

VERDICT_S = 12.0
"""How long a failed collective waits for the watchdog to say whether a rank has died."""


def update_threads(device: torch.device, world_size: int) -> int:
    """CPU threads of a rank's update: its share of the cores, less two for those that issue work to a GPU."""
    share = max(len(os.sched_getaffinity(0)) // world_size, 1)
    return share - 2 if device.type == "cuda" and share >= 8 else share


@dataclass(frozen=True)
class MachineOptions:
    """What the user may choose about running, not about planning.

    `update_kernel`: "native", "torch" or "auto". `num_threads`: CPU threads of the update. Test modes: `delay` gives the
    seconds to sleep before an op, by name; `poison` fills weight slots with NaN before they are refilled; `trace` gets
    each op's name, stream, start and end in seconds.
    """

    update_kernel: str = "auto"
    num_threads: int | None = None
    delay: Callable[[str], float] | None = None
    poison: bool = False
    trace: Callable[[str, Stream, float, float], None] | None = None


class Machine:
    """Runs the steps of one plan on one rank.

    Args:
        model: the user's module; its parameters become views of the master weights.
        layers, graph, decisions: of the first specialisation; later ones must share groups and decisions.
        collectives: connects the ranks.
    """

    def __init__(self, model: nn.Module, layers: LayerGraph, graph: OpGraph, decisions: Decisions, *, collectives: Collectives,
                 device: torch.device, optimizer: AdamW, compute_dtype: torch.dtype, grad_dtype: torch.dtype,
                 host_budget: int | None = None, options: MachineOptions | None = None) -> None:
        options = options or MachineOptions()
        self.collectives, self.optimizer, self.options = collectives, optimizer, options
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.counters: Counter[str] = Counter()
        self.issued: list[str] = []
        self.num_steps = self.num_turns = 0
        self.word_of = {name: 1 + i for i, name in enumerate(dict.fromkeys(e.src for e in graph.edges if e.all_ranks))}
        self.backend: Backend = open_backend(device)
        self.state = HostState(layers.groups, decisions, rank=self.rank, world_size=self.world_size, compute_dtype=compute_dtype,
                               grad_dtype=grad_dtype, num_words=1 + len(self.word_of), exchange=collectives.exchange_ints,
                               barrier=collectives.barrier, host_budget=host_budget)
        self.words = self.state.words
        self.watchdog = Watchdog(self.words)
        if self.world_size > 1:
            share_buffers(model, collectives)
        self.binding = Binding(model, layers.groups)
        self.binding.adopt(self.state)
        for buffer in self.state.dma_buffers():
            self.backend.register(buffer)
        threads = options.num_threads or update_threads(device, self.world_size)
        self.adam = CpuAdam(self.state, layers.groups, optimizer, kernel=options.update_kernel, num_threads=threads)
        self.casting, self.summing = (HostKernels(options.update_kernel, threads, quiet=True) for _ in range(2))
        self.slots = self.allocate(graph, compute_dtype, grad_dtype)
        self.leaf_views: dict[tuple[str, str], list[Tensor]] = {}
        self.streams = self.backend.open_streams(delay=options.delay, trace=options.trace)
        self.runners: dict[int, StageRunner] = {}
        self.interpreters: dict[int, Interpreter] = {}
        self.in_flight: Step | None = None
        self.compute_end_s = 0.0
        self.closed = False

    def allocate(self, graph: OpGraph, compute_dtype: torch.dtype, grad_dtype: torch.dtype) -> dict[str, Tensor]:
        """Every slot of the graph as a flat tensor, by place name (``w[0]``; ``held.shared0``)."""
        slots: dict[str, Tensor] = {}
        for slot in graph.slots:
            is_weight = slot.name in ("w", "stage") or slot.name.startswith("held.")
            dtype = compute_dtype if is_weight else grad_dtype
            make = self.backend.pinned if slot.memory == "pinned" else self.backend.empty
            for i in range(slot.count):
                tensor = make(slot.bytes // dtype.itemsize, dtype)
                tensor.zero_()  # gaps between parameters must be finite: they are summed and sent like the rest
                slots[f"{slot.name}[{i}]"] = tensor
                if slot.count == 1:
                    slots[slot.name] = tensor
        self.backend.fence_caller()
        return slots

    # ---- what the interpreter touches ----

    def slot(self, place: str) -> Tensor:
        return self.slots[place]

    def host_buffer(self, head: str, group: str) -> Tensor:
        """Flat host tensor of a group: P master, S shadow, H returned gradient, Q this rank's unreduced gradient."""
        match head:
            case "P":
                return self.state.master[group]
            case "S":
                return self.state.shadow[group]
            case "H":
                return self.state.grad[group]
            case "Q":
                return self.state.raw_grad[group][self.rank]
        raise AssertionError(f"{head}.{group} has no host buffer")

    def raw_gradient(self, group: str, rank: int) -> Tensor:
        """A rank's unreduced gradient, flat; every rank's is in shared memory."""
        return self.state.raw_grad[group][rank]

    def leaves(self, places: Mapping[str, str]) -> dict[str, list[Tensor]]:
        """Group -> views of its slot, one a parameter, as autograd leaves; made once for each (group, place)."""
        out = {}
        for group, place in places.items():
            if (group, place) not in self.leaf_views:
                self.leaf_views[group, place] = self.binding.leaves(self.slot(place), group)
            out[group] = self.leaf_views[group, place]
        return out

    def ranks_have(self, edges: Sequence[Edge], step: int) -> bool:
        """True once every rank has published what `edges` name: in this step, or in the one before."""
        self.watchdog.check()
        return all(self.words.reached(self.word_of[e.src], step - e.distance) for e in edges)

    def publish(self, op: str, step: int, ticket: Ticket) -> None:
        if ticket.error is None:
            self.words.publish(self.word_of[op], step)

    def update(self, group: str, lo: int, hi: int, step: Step) -> None:
        """AdamW on this rank's part of a returned gradient chunk."""
        first, last = self.param_span(group)
        try:
            self.adam.update(group, lo, hi, step.number, self.words.any_present(step.number, first, last))
        except NonFiniteGradient as e:
            e.add_note(f"step {step.number}: updated before this was seen: {', '.join(sorted(step.updated)) or 'nothing'}; "
                       "resume from a checkpoint, or lower the learning rate")
            raise
        step.updated.add(group)

    def param_span(self, group: str) -> tuple[int, int]:
        """Presence flags of the group's trainable parameters, which come first in it."""
        params = self.state.groups[group].params
        if not params:
            return 0, 0
        first = self.state.param_index[params[0].name]
        return first, first + sum(p.trainable for p in params)

    def mark_present(self, step: int, present: Mapping[str, bool]) -> None:
        flags = self.words.present(step)[self.rank]
        for name, value in present.items():
            flags[self.state.param_index[name]] |= value

    # ---- steps ----

    def agree(self, value: int) -> list[int]:
        """Every rank's `value` (a token count, or a code for a batch it cannot run). Collective; the first thing of a step."""
        self.raise_failure()
        self.num_turns += 1
        try:
            return [values[0] for values in self.words.exchange(self.num_turns, [value], self.watchdog.check)]
        except PeerError as e:
            self.fail(e)
            raise

    def new_step(self, batch: Mapping[str, Tensor], num_valid: int, num_valid_global: int, *, loss_is_mean: bool,
                 training: bool) -> Step:
        self.num_steps += training
        if training:
            self.words.present(self.num_steps)[self.rank] = 0
        return Step(self.num_steps, self.num_turns, batch, self, num_valid, num_valid_global, loss_is_mean, training)

    def run(self, graph: OpGraph, layers: LayerGraph, trace: Trace, step: Step) -> None:
        """Submit a step and return once its loss is known. The rest goes on under what the caller does next."""
        interpreter = self.interpreter(graph, layers, trace)
        self.backend.fence_caller()
        previous = self.in_flight.tickets if self.in_flight else {}
        try:
            interpreter.run(step, previous)
        except BaseException as e:
            self.fail(e)
            raise self.failure() from e
        self.in_flight = step
        self.when_drained(interpreter, step)
        step.tickets["epilogue"].add_done_callback(partial(self.post_loss, step))
        self.wait(step.tickets["epilogue"])
        if interpreter.runner.draws_random:
            self.wait_compute(step)  # its recomputes put the default generators back and forth: the caller must not draw between
        try:
            step.global_loss()
        except PeerError as e:
            self.fail(e)
            raise

    def interpreter(self, graph: OpGraph, layers: LayerGraph, trace: Trace) -> Interpreter:
        if id(graph) not in self.interpreters:
            if id(trace) not in self.runners:
                self.runners[id(trace)] = StageRunner(trace, self.binding, self.backend)
            self.interpreters[id(graph)] = Interpreter(graph, layers, self, self.runners[id(trace)])
        return self.interpreters[id(graph)]

    def post_loss(self, step: Step) -> None:
        if step.tickets["epilogue"].error is None:
            self.words.post_loss(step.turn, step.local_loss())

    def sum_losses(self, turn: int) -> float:
        return self.words.loss_sum(turn, self.watchdog.check)

    def when_drained(self, interpreter: Interpreter, step: Step) -> None:
        """Publishes, once nothing of the step is left to do on this rank, that it is drained; notes when compute ended."""
        left, lock = len(interpreter.ends), threading.Lock()
        turn = step.turn

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last and self.streams.error is None:
                self.words.publish(DRAINED, turn)

        for name in interpreter.ends:
            step.tickets[name].add_done_callback(ended)
        step.tickets[interpreter.last_compute].add_done_callback(step.note_compute_end)
        step.last_compute = interpreter.last_compute

    def wait_compute(self, step: Step) -> None:
        step.compute_ended.wait()
        self.wait(step.tickets[step.last_compute])

    def synchronize(self) -> None:
        """Wait until no rank has anything left to do of the steps so far."""
        self.raise_failure()
        if self.in_flight is None:
            return
        try:
            self.words.wait(DRAINED, self.in_flight.turn, self.check)
        except PeerError as e:
            self.fail(e)
            raise
        except BaseException as e:
            raise self.failure() from e
        self.in_flight = None

    def check(self) -> None:
        """Raises when waiting has become pointless: a peer died, or an op of ours failed."""
        self.watchdog.check()
        self.streams.check()

    def wait(self, ticket: Ticket) -> None:
        try:
            ticket.wait_done()
        except BaseException as e:
            raise self.failure() from e

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Collects (op, stream, start, end), in seconds, of every op that starts in the block."""
        events: list[Event] = []
        before, self.streams.trace = self.streams.trace, lambda *event: events.append(event)
        try:
            yield events
        finally:
            self.streams.trace = before

    # ---- failure ----

    def raise_failure(self) -> None:
        if self.closed:
            raise RuntimeError("the machine is closed")
        if self.streams.error is not None:
            raise self.failure()

    def failure(self) -> BaseException:
        """Why the streams stopped. A lost connection gives the watchdog time to name the rank that died."""
        error = self.streams.error
        assert error is not None
        if self.world_size > 1 and not isinstance(error, PeerError):
            blamed = self.watchdog.verdict(VERDICT_S) if isinstance(error, RuntimeError) else None
            if blamed is not None:
                return blamed
            self.words.abort(self.rank, AbortReason.ERROR, f"{type(error).__name__}: {error}")
        self.watchdog.acknowledge()
        return error

    def fail(self, error: BaseException) -> None:
        self.streams.abort(error)

    # ---- the model, and the end ----

    def restore_model(self) -> None:
        """The user's module with the master weights as its parameters. Only when nothing is in flight on its modules."""
        self.binding.restore()

    def close(self) -> None:
        """Drain (unless something failed), stop, free. The model keeps ordinary parameters. Idempotent."""
        if self.closed:
            return
        healthy = self.streams.error is None
        try:
            if healthy:
                self.synchronize()
        finally:
            self.streams.close()
            self.closed = True
            self.binding.restore()
            for buffer in self.state.dma_buffers():
                self.backend.unregister(buffer)
            self.watchdog.stop()
            self.binding.release(self.state.close())
            self.slots.clear()
            self.leaf_views.clear()
            self.interpreters.clear()
            self.runners.clear()
            self.collectives.close()
            self.backend.close()
