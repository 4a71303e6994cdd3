"""A trace cut down to a layer or two of each kind that is still a whole step: prologue, layers, epilogue, and their backwards.

Where a layer's predecessor is left out, the latest value of the same shape and dtype takes the place of its output: the
numbers differ, the computation does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slidedp.compiler.layergraph import StageKind
from slidedp.compiler.tracing.tracer import StageProgram, Trace

Form = tuple[Any, Any, bool]
"""Shape, dtype, and whether the value carries gradient."""


def mini_pipeline(trace: Trace, per_kind: int = 2) -> Trace:
    """The first `per_kind` stages of every `kind_key`, and what they cannot do without, joined. Same module, same layouts.

    Two, so that the second finds the device busy with the first: its work is then queued before it is needed, as in a step.
    """
    stages = trace.graph.stages
    programs = {p.name: p for p in trace.programs}
    made_by = {name: p.name for p in trace.programs for name in p.outputs}
    kinds: dict[str, list[str]] = {}
    for s in stages:
        kinds.setdefault(s.kind_key, []).append(s.name)
    chosen = {name for names in kinds.values() for name in names[:per_kind]}
    chosen |= {s.name for s in stages if s.kind is not StageKind.LAYER}
    while True:
        joined, missing = _join([programs[s.name] for s in stages if s.name in chosen])
        if not missing:
            break
        chosen |= {made_by[name] for name in missing}
    groups = (replace(g, uses=tuple(u for u in g.uses if u in chosen)) for g in trace.graph.groups)
    graph = replace(trace.graph, stages=tuple(s for s in stages if s.name in chosen), groups=tuple(g for g in groups if g.uses))
    return replace(trace, graph=graph, programs=tuple(joined))


def reached(trace: Trace) -> set[str]:
    """Stages whose backward has something to do: the epilogue, and those with an output that a later stage differentiates."""
    wanted = {name for p in trace.programs for name in p.grad_inputs}
    return {p.name for p in trace.programs if p is trace.programs[-1] or wanted & set(p.grad_outputs)}


def _join(chain: list[StageProgram]) -> tuple[list[StageProgram], set[str]]:
    """The programs with inputs that the chain makes itself; and those for which it makes nothing alike."""
    made: set[str] = set()
    latest: dict[Form, str] = {}
    missing: set[str] = set()
    joined = []
    for program in chain:
        forms = _forms(program)
        names = {name: name for name in program.inputs}
        for name in program.inputs:
            if name in made or name.startswith("batch."):
                continue
            names[name] = latest.get(forms[name], "")
            if not names[name]:
                missing.add(name)
        joined.append(_renamed(program, names))
        made |= set(program.outputs)
        latest |= {forms[name]: name for name in program.outputs}
    return joined, missing


def _renamed(program: StageProgram, names: Mapping[str, str]) -> StageProgram:
    inputs, grad_inputs = (tuple(names[n] for n in of) for of in (program.inputs, program.grad_inputs))
    return replace(program, inputs=inputs, grad_inputs=grad_inputs)


def _forms(program: StageProgram) -> dict[str, Form]:
    """What each input and output looks like, as the tracer saw it."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in program.graph.nodes if n.op == "output")
    carries = {*program.grad_inputs, *program.grad_outputs}
    nodes = [*zip(program.inputs, placeholders, strict=True), *zip(program.outputs, output.args[0], strict=True)]
    return {name: (node.meta.get("shape"), node.meta.get("dtype"), name in carries) for name, node in nodes}
