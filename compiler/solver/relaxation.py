"""A lower bound of the period, and plans that come near it, from an integer program that has no times but the GPU's gaps.

It has every choice, the memory rows as they are, the sums of every stream and shared rate, and of the event graph's times what
detours.py and queues.py say of it: cycles that a plan was bound by, short detours, stalls, queues. All of these hold for every
plan, so that its optimum bounds every plan. It solves in a second where the event graph with its times takes a minute. The plan
that reaches the optimum is a proposal: mostly it waits for something that the program does not know yet, which is added as
inequalities along its critical cycle, and the next is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from slidedp.compiler.eventgraph.eventgraph import EventGraph, Linear
from slidedp.compiler.eventgraph.maxplus import max_cycle_ratio
from slidedp.compiler.eventgraph.memoryrows import MemoryRow
from slidedp.compiler.ops import Stream
from slidedp.compiler.solver.detours import Detours, Inequality, Path, add
from slidedp.compiler.solver.exchange import exchange
from slidedp.compiler.solver.nested import Nested
from slidedp.compiler.solver.queues import Queued, Queues
from slidedp.compiler.solver.search import interchange, period_of

MAX_ROUNDS = 8
TO_EXCHANGE = 0.25
"""Share of the time, and of what is left of it behind the first round, in which exchange.py looks for better plans."""
QUEUES = (Stream.COMM, Stream.D2H)
"""Streams that are known as queues, where the first plan keeps them busy for `WORTH_QUEUEING` of its step."""
SECOND_SEED = 1
"""For the dice of exchange.py in the end; at first it is 0."""
WORTH_QUEUEING = 0.25
MAX_QUEUED = 250
"""Tasks of a queue with which a round still finds a plan in its time."""
ROUND_LIMIT = 3.0
"""Deterministic seconds of one round, and no more than half of what there is."""
NEAR = 0.2
"""Share of the gap asked for that a round may leave between its plan and its bound."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A selection, its period, and a period that no selection's is less than, in the graph's units; deterministic seconds."""

    selection: tuple[int, ...]
    period: int
    bound: int
    work: float


def tighten(graph: EventGraph, rows: Sequence[MemoryRow], best: tuple[int, ...], period: int, bound: int, gap: float,
            time_limit: float, rounds: int = MAX_ROUNDS) -> Bounded:  # fmt: skip
    """From `best`, which fits, and its `period`: rounds until the two are within `gap`, or nothing comes of it.

    With queues it also mixes what the rounds have proposed: few of them are short then, but most have well chosen layers.
    """
    if period <= bound * (1 + gap):
        return Bounded(best, period, bound, 0.0)
    busy, work, round_limit = graph.busy_us(best), 0.0, min(ROUND_LIMIT, time_limit / 2)
    queued = tuple(s for s in QUEUES if busy.get(s, 0) > WORTH_QUEUEING * period * graph.unit_us)
    program, proposals = Relaxation(graph, rows, queued), list[tuple[int, ...]]()
    for selection in (graph.choices.default, best):
        program.learn(selection, bound)
    for number in range(rounds):
        if period <= bound * (1 + gap) or work >= time_limit * (1 - TO_EXCHANGE * (number > 0)):
            break
        proposal, proven, took = program.propose(best, int(period / (1 + gap)), bound, gap, min(round_limit, time_limit - work))
        bound, work = max(bound, proven), work + took
        if proposal is not None:
            learned = program.learn_timetable(proposal, bound)
            learned = program.learn(proposal.selection, bound) or learned
            proposals.append(proposal.selection)
            found = period_of(graph, proposal.selection)
            if found < period:
                best, period = proposal.selection, found
        elif program.queues and bound * (1 + gap) < period:
            program.queues, learned = [], True  # no plan in time: easier to find without them, and what they prove is proven
        else:
            learned = number == 0  # a better plan to start from may help
        if number == 0 and rounds > 1 and period > bound * (1 + gap):
            best, period, took = exchange(graph, rows, best, period, int(bound * (1 + gap)), (time_limit - work) * TO_EXCHANGE)
            work += took
        if not learned:
            break
    if rounds > 1 and period > bound * (1 + gap):  # one round is a look at a hint
        best, period = interchange(graph, rows, best, period, proposals)
        best, period, took = exchange(graph, rows, best, period, int(bound * (1 + gap)), time_limit - work, SECOND_SEED)
        work += took
    return Bounded(best, period, min(bound, period), work)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a round proposes: a selection, when the GPU's ops start, a period."""

    selection: tuple[int, ...]
    starts: tuple[int, ...]
    period: int


@dataclass
class Relaxation:
    """The integer program of `graph` under `rows`, and what it has learned. `queued`: streams that it knows as queues."""

    graph: EventGraph
    rows: Sequence[MemoryRow]
    queued: Sequence[Stream] = QUEUES
    known: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.detours = Detours(self.graph)
        self.inequalities: list[Inequality] = [*Nested(self.detours).inequalities(), *self.detours.short()]
        self.stalls = self.detours.stalls()
        queues = map(Queues(self.detours).on, self.queued)
        self.queues: list[list[Queued]] = [queue for queue in queues if 0 < len(queue) <= MAX_QUEUED]

    def learn(self, selection: Sequence[int], bound: int) -> bool:
        """Adds what `selection` waits for. False if all of that is known."""
        new = [p for p in self.detours.along(max_cycle_ratio(self.graph, selection).edges) if p not in self.known]
        self.known.update(new)
        found = [i for p in new for q in (p, *self.detours.twins(p)) if (i := self.detours.inequality(q, bound))]
        self.inequalities += found
        return bool(found)

    def learn_timetable(self, proposal: Proposal, bound: int) -> bool:
        """Adds what `proposal` would have to wait for at each of its times. False if all of that is known."""
        missed = self.detours.missed(proposal.selection, proposal.starts, proposal.period)
        new = [p for p in missed if p not in self.known]
        self.known.update(new)
        found = [i for p in new for q in (p, *self.detours.twins(p)) if (i := self.detours.inequality(q, bound))]
        self.inequalities += found
        return bool(found)

    def columns(self) -> list[set[tuple[int, ...]]]:
        """For each family what its options count anywhere: less is better, but for time of the GPU, which also covers."""
        found: list[set[tuple[int, ...]]] = [set() for _ in self.graph.choices.families]
        linears = [*(e.busy for e in self.graph.events), *(w.duration for w in self.graph.works)]
        linears += [e.weight for e in self.graph.edges if e.src == e.dst] + [i.need for i in self.inequalities]
        linears += [need for each in self.stalls for stall in each for need in stall.needs]
        for row in self.rows:
            linears += [row.total, *(linear for each in row.largest for linear in each)]
        for linear in linears:
            for family, values in linear.terms:
                found[family].add(values)
        for k in range(len(self.detours.chain)):
            for family, values in self.detours.busy(k).terms:
                found[family].add(tuple(-v for v in values))
        return found

    def propose(self, hint: Sequence[int], horizon: int, bound: int, gap: float,
                time_limit: float) -> tuple[Proposal | None, int, float]:  # fmt: skip
        """(a selection with a period of `horizon` at most as far as is known, what is proven, deterministic seconds)."""
        from ortools.sat.python import cp_model

        model = _Program(self, cp_model.CpModel(), bound, horizon)
        model.hint(hint)
        solver = cp_model.CpSolver()
        p = solver.parameters
        p.num_workers, p.random_seed, p.catch_sigint_signal = 1, 0, False
        p.linearization_level = 2
        p.max_deterministic_time, p.relative_gap_limit = time_limit, gap * NEAR
        status = solver.status_name(solver.solve(model.m))
        work = float(solver.response_proto.deterministic_time)
        if status == "INFEASIBLE":
            return None, horizon + 1, work
        proven = max(bound, int(solver.best_objective_bound))
        if status not in ("OPTIMAL", "FEASIBLE"):
            return None, proven, work
        return model.proposal(solver), proven, work


class _Program:
    """The CP-SAT model of one round."""

    def __init__(self, of: Relaxation, m: Any, bound: int, horizon: int) -> None:
        self.of, self.m, self.horizon = of, m, horizon
        self.T = m.new_int_var(min(bound, horizon), horizon, "T")
        self.gaps = [m.new_int_var(0, horizon, f"gap {k}") for k in range(len(of.detours.chain))]
        self.choices()
        self.totals()
        self.memory()
        self.waits()
        self.wait_for_queues()
        m.minimize(self.T)

    def choices(self) -> None:
        """One-hot, of the options that are best in something; the others are 0."""
        linked = {(i, o) for k in self.of.graph.choices.links for i, o in ((k.a, k.a_option), (k.b, k.b_option))}
        self.x: list[list[Any]] = []
        for i, (family, tables) in enumerate(zip(self.of.graph.choices.families, self.of.columns(), strict=True)):
            options = range(len(family.options))
            free = [o for o in options if (i, o) not in linked]
            kept = [o for o in options if o not in free or not any(beats(a, o, tables) for a in free)]
            self.x.append([(self.m.new_bool_var("") if len(kept) > 1 else 1) if o in kept else 0 for o in options])
            if len(kept) > 1:
                self.m.add_exactly_one([self.x[-1][o] for o in kept])
        for link in self.of.graph.choices.links:
            self.m.add(self.x[link.a][link.a_option] == self.x[link.b][link.b_option])

    def expression(self, linear: Linear) -> Any:
        total = linear.const
        for family, values in linear.terms:
            least = min(values)
            total = total + least + sum((v - least) * b for v, b in zip(values, self.x[family], strict=True) if v > least)
        return total

    def totals(self) -> None:
        graph = self.of.graph
        for stream in graph.streams:
            busy = self.expression(add([e.busy for e in graph.events if e.stream is stream]))
            if stream is Stream.GPU:
                self.m.add(busy + sum(self.gaps) == self.T)
            else:
                self.m.add(busy <= self.T)
        if not self.gaps:
            self.m.add(self.T >= 0)
        self.m.add(self.expression(add([w.duration for w in graph.works])) <= self.T)
        for e in graph.edges:
            if e.src == e.dst:
                self.m.add(self.expression(e.weight) <= e.distance * self.T)

    def memory(self) -> None:
        for row in self.of.rows:
            total = self.expression(row.total)
            for each in row.largest:
                largest = self.m.new_int_var(0, 1 << 50, "")
                for linear in each:
                    self.m.add(largest >= self.expression(linear))
                total = total + largest
            self.m.add(total <= row.budget)

    def waits(self) -> None:
        for i in self.of.inequalities:
            idle = sum(self.gaps[k] for k in i.links)
            self.m.add(idle + i.laps * self.T >= self.expression(i.need))
        for each in self.of.stalls:
            excess = []
            for stall in each:
                excess.append(self.m.new_int_var(0, self.horizon, ""))
                for need in stall.needs:
                    self.m.add(excess[-1] >= self.expression(need))
            self.m.add(sum(excess) <= sum(self.gaps))

    def wait_for_queues(self) -> None:
        detours, n = self.of.detours, len(self.of.detours.chain)
        if not self.of.queues:
            return
        starts: list[Any] = [0]
        for k, gap in enumerate(self.gaps[:-1]):
            starts.append(self.m.new_int_var(0, self.horizon, f"start {k + 1}"))
            self.m.add(starts[-1] == starts[-2] + self.expression(detours.busy(k)) + gap)
        for queue in self.of.queues:
            first, last = min(q.behind for q in queue) // n, max(q.before for q in queue) // n + 1
            done = [self.m.new_int_var(min(first, 0) * self.horizon, max(last, 0) * self.horizon, "") for _ in queue]
            for k, q in enumerate(queue):
                time, lap = self.expression(self.of.graph.events[q.event].busy), 0 if k else self.T
                self.m.add(done[k] >= done[k - 1] - lap + time)
                if not k or queue[k - 1].behind < q.behind:
                    end = starts[q.behind % n] + self.expression(detours.busy(q.behind))
                    self.m.add(done[k] >= end + q.behind // n * self.T + time)
                if q is queue[-1] or queue[k + 1].before > q.before:
                    self.m.add(starts[q.before % n] + q.before // n * self.T >= done[k])
                if q.due < q.before:
                    slack = (q.before // n - q.due // n + 1) * self.horizon
                    self.m.add(starts[q.due % n] + q.due // n * self.T + slack * self.idle(q.event) >= done[k])

    def idle(self, event: int) -> Any:
        """1 if `event` takes no time."""
        busy = self.of.graph.events[event].busy
        if len(busy.terms) != 1:
            return 0 if not busy.terms and busy.const else 1
        ((family, values),) = busy.terms
        return sum(b for v, b in zip(values, self.x[family], strict=True) if busy.const + v <= 0)

    def hint(self, selection: Sequence[int]) -> None:
        for each, chosen in zip(self.x, selection, strict=True):
            for o, b in enumerate(each):
                if not isinstance(b, int):
                    self.m.add_hint(b, int(o == chosen))

    def proposal(self, solver: Any) -> Proposal:
        selection = tuple(next(o for o, b in enumerate(each) if int(solver.value(b))) for each in self.x)
        taken = [self.of.detours.busy(k).at(selection) + int(solver.value(gap)) for k, gap in enumerate(self.gaps)]
        return Proposal(selection, tuple(accumulate(taken[:-1], initial=0))[: len(taken)], int(solver.value(self.T)))


def beats(a: int, b: int, tables: set[tuple[int, ...]]) -> bool:
    """True if option `a` is nowhere worse than `b`, and better somewhere or named first."""
    return a != b and all(t[a] <= t[b] for t in tables) and (a < b or any(t[a] < t[b] for t in tables))
