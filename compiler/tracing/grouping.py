"""Parameters -> groups: those that the same stages read move as one unit, in one flat layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from slidedp.compiler.errors import TraceError
from slidedp.compiler.layergraph import ALIGN, Group, Param, aligned


def model_params(model: nn.Module) -> tuple[Param, ...]:
    """Every parameter once, whatever number of names it has, in model order and not laid out (offset 0)."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return tuple(Param(tuple(names[id(p)]), tuple(p.shape), 0, p.requires_grad) for p in model.parameters())


def make_groups(params: Sequence[Param], reads: Mapping[str, Iterable[str]], world_size: int) -> tuple[Group, ...]:
    """Partitions `params` by the set of stages that read them. `reads`: stage -> parameter names, in stage order.

    A group of one stage has its name; those of several are ``shared0``, ``shared1``… by first parameter. Groups stand in
    the order of their first use. Parameters that no stage reads are in no group.
    """
    members: dict[tuple[str, ...], list[Param]] = {}
    for p in params:
        uses = _uses(p.names, reads)
        if uses:
            members.setdefault(uses, []).append(p)
    shared = [uses for uses in members if len(uses) > 1]
    groups = [
        lay_out(uses[0] if len(uses) == 1 else f"shared{shared.index(uses)}", uses, held, world_size)
        for uses, held in members.items()
    ]
    order = list(reads)
    return tuple(sorted(groups, key=lambda g: (order.index(g.uses[0]), len(g.uses) > 1, g.name)))


def lay_out(name: str, uses: tuple[str, ...], params: Sequence[Param], world_size: int) -> Group:
    """The group's flat layout: trainable parameters, padding to ALIGN * world_size, frozen ones, padding again.

    Each parameter starts at a multiple of ALIGN; one without elements has an offset and takes no space.
    """
    unit = ALIGN * world_size
    placed: list[Param] = []
    end = 0
    num_trainable = 0
    for trainable in (True, False):
        for p in params:
            if p.trainable is trainable:
                placed.append(replace(p, offset=end))
                end += aligned(p.numel)
        end = aligned(end, unit)
        num_trainable = end if trainable else num_trainable
    return Group(name, end, num_trainable, uses, tuple(placed))


def regroup(groups: Sequence[Group], params: Sequence[Param], reads: Mapping[str, Iterable[str]]) -> tuple[Group, ...]:
    """A plan's `groups`, the partition and layout kept, with the `uses` of another trace of the same model.

    Raises TraceError for a parameter that is in no group, or whose shape or trainability differs from the plan's.
    """
    known = {name: q for g in groups for q in g.params for name in q.names}
    for p in params:
        if not _uses(p.names, reads):
            continue
        q = known.get(p.name)
        if q is None:
            raise TraceError(f"parameter {p.name} is read for this batch but not by what the plan was compiled for; "
                             "compile with an example= batch that uses it")  # fmt: skip
        if (q.shape, q.trainable) != (p.shape, p.trainable):
            raise TraceError(f"parameter {p.name} has shape {p.shape}, trainable={p.trainable}; the plan was compiled for "
                             f"{q.shape}, trainable={q.trainable}: compile again")  # fmt: skip
    return tuple(replace(g, uses=_uses([n for p in g.params for n in p.names], reads)) for g in groups)


def stage_groups(stage: str, groups: Iterable[Group]) -> tuple[str, ...]:
    """Names of the groups that `stage` reads, its own first."""
    return tuple(g.name for g in sorted((g for g in groups if stage in g.uses), key=lambda g: (len(g.uses) > 1, g.name != stage)))


def _uses(names: Iterable[str], reads: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    names = set(names)
    return tuple(stage for stage, read in reads.items() if not names.isdisjoint(read))
