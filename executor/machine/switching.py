"""Replaces the plan of a running machine by another, between two steps.

    equip     makes what belongs to one plan: slots, resident state, words, registered memory
    leave     gives it up; afterwards the whole state is on the host, and the model shows it
    switch    one after the other, on all ranks or on none

Training itself is not touched: the host's masters and moments, step counts, learning rates, generators, streams and process
groups stay. Only one plan's slots exist at a time, so that the HBM budget holds. State that lives in HBM in both plans, cut
alike, stays where it is; other state in HBM crosses the host, 12 bytes a parameter. The host has room for all the plans that
the machine was built for (host_state.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from slidedp.compiler.decisions import Decisions
from slidedp.compiler.layergraph import LayerGraph, shard
from slidedp.compiler.ops import OpGraph, OpKind
from slidedp.compiler.residency import resident_groups, update_chunks
from slidedp.executor.optim.kernels import Kernel
from slidedp.executor.optim.resident import ResidentState, ServiceWords
from slidedp.executor.stages.buffers import Buffers
from slidedp.executor.stages.runners import Runners

if TYPE_CHECKING:
    from slidedp.executor.machine.machine import Machine

DRAINED, ASKED, SHOWN = range(3)
"""Words that a rank publishes: a step has nothing left to do on it; it wants, and it has made, resident masters current."""

FIRST_OP_WORD = 3


@dataclass(frozen=True, eq=False)
class Lowered:
    """A plan as a machine runs it: its first specialisation's layers and graph; later ones share groups and decisions."""

    layers: LayerGraph
    graph: OpGraph
    decisions: Decisions

    @property
    def heard(self) -> list[str]:
        """Ops whose ends ranks tell one another."""
        return list(dict.fromkeys(e.src for e in self.graph.edges if e.all_ranks))


class SwitchError(RuntimeError):
    """A rank could not set the other plan up; all ranks have the plan again that they had, and nothing is lost.

    `own`: it was this rank, and perhaps others too.
    """

    def __init__(self, message: str, *, own: bool) -> None:
        super().__init__(message)
        self.own = own


def equip(machine: Machine, plan: Lowered, there: Mapping[str, Tensor] | None = None, but: Collection[str] = ()) -> None:
    """Allocates all that a step of `plan`, which the host state serves, needs, so that no step has to. Masters are taken over.

    `there`: slots that are there already, of the state of `but` these groups.
    """
    m, graph = machine, plan.graph
    m.plan, m.word_of = plan, {name: FIRST_OP_WORD + i for i, name in enumerate(plan.heard)}
    wanted = {t.data_ptr(): t for t in m.state.dma_buffers()}
    for address in [a for a in m.registered if a not in wanted]:
        m.backend.unregister(m.registered.pop(address))
    for address, tensor in wanted.items():
        if address not in m.registered:
            m.backend.register(tensor)
            m.registered[address] = tensor
    m.buffers = Buffers(graph, m.backend, m.binding, *m.dtypes, there)
    m.resident = ResidentState(
        plan.layers, plan.decisions, m.state, m.buffers, m.backend, m.adam, ServiceWords(DRAINED, ASKED, SHOWN),
        exact=m.options.update_kernel == Kernel.TORCH, on_failure=m.failure.stop, turn=m.num_turns)
    m.resident.upload(but=but)
    chunks = [op.chunk.bounds(graph.group_by_name[op.layer], m.world_size) for op in graph
              if op.kind is OpKind.REDUCE and op.chunk]
    if chunks:
        m.collectives.reserve(max(hi - lo for lo, hi in chunks), m.dtypes[1], m.backend.device)


def staying(before: Lowered, after: Lowered) -> set[str]:
    """Groups whose state lives in HBM, cut alike, in both plans."""
    def cut(plan: Lowered) -> dict[str, tuple[tuple[int, int], ...]]:
        world = plan.layers.world_size
        return {g.name: update_chunks(g, plan.decisions.of(g.name), world) for g in resident_groups(plan.layers, plan.decisions)}

    had = cut(before)
    return {name for name, chunks in cut(after).items() if had.get(name) == chunks}


def leave(machine: Machine, stay: Collection[str]) -> dict[str, Tensor]:
    """The state of all groups is on the host, on first sides; nothing of the plan is left but the slots, which are returned, of
    those that `stay` in HBM. Collective, none in a step.
    """
    m = machine
    m.synchronize()
    m.saves.let_go()
    m.exposure.expose()
    assert m.resident is not None
    for group in m.resident.groups.values():
        if group.trainable and group.name not in stay:
            m.resident.read_moments(group.name, *m.state.moments_of(group.name))
    m.state.take_first_sides()
    m.agree([])  # every rank's part is there
    kept = m.buffers.of([f"{slot}.{name}" for name in stay for slot in ("held", "state")])
    drop(m)
    return kept


def drop(machine: Machine) -> None:
    """Frees what :func:`equip` has made, or a part of it."""
    m = machine
    if m.resident is not None:
        m.resident.close(rescue=False)
    m.resident = None
    m.interpreters.clear()
    m.adam.unbind()
    m.buffers.free()
    m.runners.clear()
    m.runners = Runners(m.binding, m.backend)
    m.last_published.clear()  # of ops of that plan; all that they have done is seen
    m.collectives.release()
    m.backend.trim()


def enter(machine: Machine, plan: Lowered, there: Mapping[str, Tensor], stay: Collection[str]) -> None:
    """Not collective: the ranks have left the plan before, and meet again before the next step."""
    m = machine
    m.state.serve(plan.decisions)
    m.binding.release(m.state.master)
    equip(m, plan, there, stay)
    assert m.resident is not None
    for group in m.resident.groups.values():
        if group.trainable and group.name not in stay:
            m.resident.write_moments(group.name, *m.state.moments_of(group.name))
    for name, shadow in m.state.shadow.items():
        part = slice(*shard(0, shadow.numel(), m.rank, m.world_size))
        m.casting.cast(m.state.master[name][part], shadow[part])
    m.exposure.exposed = False


def switch(machine: Machine, plan: Lowered) -> None:
    """The next step runs `plan`, one that the machine was built for. Collective, between two steps.

    What the user has written into the model must have been taken over (exposure.py). Raises SwitchError, on all
    ranks, if one of them cannot set it up (its device has no room, say): then the plan is the one that it was.
    """
    before, stay = machine.plan, staying(machine.plan, plan)
    there = leave(machine, stay)
    problem = ""
    try:
        enter(machine, plan, there, stay)
    except (RuntimeError, ValueError, MemoryError, OSError) as e:  # no traceback is kept: its frames hold what has been allocated
        problem = f"{type(e).__name__}: {e}"
    failed = [flag for (flag, *_) in machine.agree([int(bool(problem))])]
    if not any(failed):
        return
    drop(machine)
    enter(machine, before, there, stay)
    machine.agree([])
    raise SwitchError(problem or f"rank {failed.index(1)} could not set it up (it says why itself)", own=bool(problem))
