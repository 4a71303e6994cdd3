"""A model and a sample batch -> stages that can run one by one, and the LayerGraph that the passes see.

    metamodel.py  the model on meta tensors for a moment        layers.py    what the layers are, how forward is called
    recorder.py   its Python -> one torch.fx.Graph, guards      recording.py sends that Python to the recorder
    segments.py   the graph -> prologue, layers, epilogue       grouping.py  parameters -> groups with a flat layout
    loss.py       the loss and its number of valid tokens       metering.py  flops and saved bytes
    guards.py     which batches the trace is valid for
    metakernels.py  what operations return on meta, worked out once
    chunked_loss.py  the epilogue with its logits in chunks  loss_memory.py  what it holds at most
    lookups.py    tables of which the prologue reads the batch's rows only
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from slidedp.compiler.errors import TraceError
from slidedp.compiler.layergraph import STORAGE_ALIGN, Group, LayerGraph, Stage, StageKind, aligned
from slidedp.compiler.tracing import liger
from slidedp.compiler.tracing.chunked_loss import cut_head, find_head
from slidedp.compiler.tracing.grouping import make_groups, model_params, regroup, stage_groups
from slidedp.compiler.tracing.guards import Guard, first_violation
from slidedp.compiler.tracing.layers import LayerChoice, batch_problem, call_arguments, chosen_layers, layer_candidates, no_layers
from slidedp.compiler.tracing.lookups import batch_entry, find_lookups
from slidedp.compiler.tracing.loss import Loss, LossFn, ValidCount, call_loss_fn, model_loss, user_loss
from slidedp.compiler.tracing.loss_memory import measure_head
from slidedp.compiler.tracing.metamodel import MetaModel, check_params, on_meta
from slidedp.compiler.tracing.recorder import MetaRecorder
from slidedp.compiler.tracing.recording import recording
from slidedp.compiler.tracing.segments import Segment, cut

__all__ = ["StageProgram", "Trace", "TraceError", "guards_hold", "specialisation_key", "trace", "with_head_chunks"]


@dataclass(frozen=True)
class StageProgram:
    """What one stage runs. Environment values are named ``batch.<key>`` or ``<stage>.<node>``.

    `fn(model, *inputs)` returns a tuple in the order of `outputs`; it reads parameters and modules from the model it is
    given, as they are at that moment. The epilogue's only output is the loss. `grad_inputs` and `grad_outputs` carry
    gradient. `params`: canonical names read, in the order of ``model.named_parameters()``; `buffers`: those within reach.
    """

    name: str
    fn: Callable[..., tuple[Tensor, ...]] = field(compare=False, repr=False)
    graph: fx.Graph = field(compare=False, repr=False)
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    grad_inputs: tuple[str, ...]
    grad_outputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Trace:
    """A model traced for one batch: valid for every batch of its `specialisation_key` for which the guards hold.

    `loss_is_mean`: the epilogue returns a mean over `num_valid` elements (the model's own loss), else a sum (`loss_fn`).
    `vocab_checks`: (batch key, number of rows) of batch entries that index an embedding directly.
    `unused`: names of parameters that no stage reads; they are in no group.
    `head_chunks`: in how many chunks at most the epilogue makes the logits (:func:`with_head_chunks`).
    """

    graph: LayerGraph
    programs: tuple[StageProgram, ...]
    guards: tuple[Guard, ...]
    loss_is_mean: bool
    count: ValidCount
    vocab_checks: tuple[tuple[str, int], ...] = ()
    unused: tuple[str, ...] = ()
    head_chunks: int = 1

    def num_valid(self, batch: Mapping[str, Tensor]) -> int:
        """Number of loss-bearing elements of this rank's batch, on the host, from the batch alone."""
        return self.count(batch)


def trace(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss_fn: LossFn | None = None,
    layers: LayerChoice | None = None,
    world_size: int = 1,
    compute_dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    groups: tuple[Group, ...] | None = None,
) -> Trace:
    """Traces `model` for batches like `batch`; neither is changed, and nothing is computed.

    `layers`: module names, or a predicate of (name, module); default: the blocks of the largest ModuleList or Sequential.
    `loss_fn(outputs, batch) -> (sum, count)`; default: the model's own loss. Return the count as a tensor: an int made of one
    (``.item()``) is guarded, and each new count would be a new trace. `groups`: the partition of an earlier trace, to keep.
    Floating-point arguments of forward are cast to `compute_dtype`, as FSDP2's mixed precision does. The model may be
    on the meta device.

    Raises ValueError for a bad batch or loss_fn, and TraceError for what cannot be traced; both name the remedy.
    """
    check_params(model)
    liger.available(device)  # imported here: not while the model is on meta and its use of `random` is watched
    arguments = call_arguments(model, batch, loss_fn is not None)
    choices = layer_candidates(model) if layers is None else iter([chosen_layers(model, layers)])
    for names in choices:
        with torch.inference_mode(False), on_meta(model, compute_dtype) as meta:
            recorder = MetaRecorder(model, meta, batch, device, lambda name, _, names=names: name in names)  # type: ignore[misc]
            loss = _record(recorder, arguments, loss_fn, compute_dtype)
            segments = cut(recorder.graph, recorder.layer_calls, loss.node)
            if segments:
                return _assemble(recorder, segments, loss, world_size, compute_dtype, groups)
    raise no_layers(model, layers)


def specialisation_key(batch: Mapping[str, Tensor], training: bool) -> tuple[Any, ...]:
    """What a trace is keyed by before its guards are asked: mode, and each entry's name, shape and dtype."""
    return training, tuple(sorted((key, tuple(t.shape), str(t.dtype)) for key, t in batch.items()))


def guards_hold(trace: Trace, batch: Mapping[str, Tensor]) -> str | None:
    """None if `trace` is valid for `batch`, which has its specialisation key; else the first violated guard in words."""
    return first_violation(trace.guards, batch)


def _record(recorder: MetaRecorder, arguments: Any, loss_fn: LossFn | None, compute_dtype: torch.dtype) -> Loss:
    name = type(recorder.model).__name__
    try:
        with recording(recorder):
            outputs = _run(recorder, arguments, loss_fn, compute_dtype)
    except TraceError as e:
        if e.__cause__ is None:  # a refusal, not something that went wrong while it ran
            raise
        raise _explained(e, recorder.batch) from e.__cause__
    except ValueError:
        raise
    except Exception as e:
        error = TraceError(f"{name} could not be traced: {type(e).__name__}: {e}. Between layers, forward must be able to run on "
                           "meta tensors; put what cannot inside a layer")  # fmt: skip
        raise _explained(error, recorder.batch) from e
    recorder.check_buffers()
    return model_loss(outputs, recorder, name) if loss_fn is None else user_loss(outputs, recorder)


def _run(recorder: MetaRecorder, arguments: Any, loss_fn: LossFn | None, compute_dtype: torch.dtype) -> Any:
    """What the model returns, or `loss_fn` makes of that."""
    by_position, by_name, constants = arguments
    given = {key: t for key, (t, _) in recorder.inputs.items()}

    def cast(key: str) -> Tensor:
        t = given[key]
        return t.to(compute_dtype) if t.is_floating_point() and t.dtype != compute_dtype else t

    outputs = recorder.model(*map(cast, by_position), **{key: cast(key) for key in by_name}, **constants)
    return outputs if loss_fn is None else call_loss_fn(loss_fn, outputs, given)


def _explained(error: TraceError, batch: Mapping[str, Tensor]) -> TraceError:
    """`error`, after what in the batch may be behind it."""
    problem = batch_problem(batch)
    if problem is None:
        return error
    text = str(error)
    return TraceError(f"{problem} (tracing ended with: {text if len(text) <= 160 else text[:157] + '...'})")


def _assemble(
    recorder: MetaRecorder,
    segments: tuple[Segment, ...],
    loss: Loss,
    world_size: int,
    dtype: torch.dtype,
    groups: tuple[Group, ...] | None,
) -> Trace:
    model = recorder.model
    stage_of = {n: s.name for s in segments for n in s.nodes}
    programs = tuple(_program(model, recorder.meta, s, stage_of) for s in segments)
    params, reads = model_params(model), {p.name: p.params for p in programs}
    groups = make_groups(params, reads, world_size) if groups is None else regroup(groups, params, reads)
    seen: set[fx.Node] = set()
    stages = tuple(_stage(s, p, groups, recorder.meta, seen) for s, p in zip(segments, programs, strict=True))
    inputs = [n.meta["val"] for n in segments[-1].inputs]
    head = measure_head(programs[-1].graph, model, inputs, programs[-1].params, recorder.device)
    sizes = {key: t.numel() for key, t in recorder.batch.items()}
    lookups = find_lookups(model, segments[0].nodes, groups, sizes) if programs[0].grad_outputs else ()
    stages = (replace(stages[0], lookups=lookups), *stages[1:-1], replace(stages[-1], head=head))
    read = set(itertools.chain.from_iterable(reads.values()))
    found = Trace(
        graph=LayerGraph(stages, groups, world_size, str(dtype).removeprefix("torch."), model=type(model).__name__),
        programs=programs,
        guards=tuple(recorder.guards),
        loss_is_mean=loss.is_mean,
        count=loss.count,
        vocab_checks=tuple(dict.fromkeys(c for s in segments for n in s.nodes for c in _vocab_check(model, n))),
        unused=tuple(p.name for p in params if p.name not in read),
    )
    for n in recorder.graph.nodes:
        n.meta.pop("val", None)  # guards keep the graph; they need not keep the meta tensors' autograd graph
    return found


def _program(model: nn.Module, meta: MetaModel, segment: Segment, stage_of: Mapping[fx.Node, str]) -> StageProgram:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for n in segment.inputs:
        copies[n] = graph.placeholder(n.name)
    states = (i for n in segment.nodes for i in n.all_input_nodes if i.op == "get_attr")
    for n in (*dict.fromkeys(states), *segment.nodes):
        copies[n] = graph.node_copy(n, copies.__getitem__)
    for n, copy in copies.items():
        copy.meta = {"shape": tuple(n.meta["val"].shape), "dtype": n.meta["val"].dtype} if "val" in n.meta else {}
        copy.meta["writes"] = "writes" in n.meta
    graph.output(tuple(copies[n] for n in segment.outputs))
    graph.lint()
    names = {str(n.target) for n in copies if n.op == "get_attr"}.union(*(n.meta.get("params", ()) for n in segment.nodes))
    env = {n: str(n.target) if n.op == "placeholder" else f"{stage_of[n]}.{n.name}" for n in (*segment.inputs, *segment.outputs)}
    return StageProgram(
        name=segment.name,
        fn=_compiled(model, graph, segment.name),
        graph=graph,
        inputs=tuple(env[n] for n in segment.inputs),
        outputs=tuple(env[n] for n in segment.outputs),
        grad_inputs=tuple(env[n] for n in segment.inputs if n.meta["val"].requires_grad),
        grad_outputs=tuple(env[n] for n in segment.outputs if n.meta["val"].requires_grad),
        params=tuple(name for name in meta.params if name in names),
        buffers=tuple(name for name in meta.buffers if name in names),
    )


def _compiled(model: nn.Module, graph: fx.Graph, name: str) -> Callable[..., tuple[Tensor, ...]]:
    """A function of the user's model, whose state it reads, and the stage's inputs."""
    forward: Callable[..., tuple[Tensor, ...]] = type(fx.GraphModule(model, graph, class_name=name)).forward
    return forward


def with_head_chunks(
    traced: Trace,
    model: nn.Module,
    num_chunks: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
) -> Trace:
    """`traced` with an epilogue that makes the logits in at most `num_chunks` chunks of tokens; as it is for 1.

    `device` is where it will run. A trace whose logits cannot be cut (``traced.graph.head.whole`` says why) stays as it is.
    """
    program = traced.programs[-1]
    head = find_head(program.graph, model) if num_chunks > 1 else ""
    if isinstance(head, str):
        return traced
    graph = cut_head(program.graph, head, num_chunks, device)
    chunked = replace(program, fn=_compiled(model, graph, program.name), graph=graph)
    return replace(traced, programs=(*traced.programs[:-1], chunked), head_chunks=num_chunks)


def _stage(segment: Segment, program: StageProgram, groups: tuple[Group, ...], meta: MetaModel, seen: set[fx.Node]) -> Stage:
    """Costs of one forward. A differentiable value that several stages read is kept once: the first that reads it pays."""
    kept = [n for n in segment.inputs if n.meta["val"].requires_grad and n not in seen]
    seen.update(kept)
    saved: dict[object, int] = {}
    for n in segment.nodes:
        saved |= n.meta.get("saved", {})
    inputs = {n.meta["storage"] for n in segment.inputs if "storage" in n.meta}
    sizes = [aligned(size, STORAGE_ALIGN) for storage, size in saved.items() if storage not in inputs]
    return Stage(
        name=segment.name,
        kind=segment.kind,
        groups=stage_groups(segment.name, groups),
        kind_key=_kind_key(segment, program, meta),
        flops=sum(n.meta.get("flops", 0) for n in segment.nodes),
        boundary_bytes=sum(n.meta["val"].nbytes for n in kept),
        activation_bytes=sum(sizes),
        workspace_bytes=max(sizes, default=0) if segment.kind is StageKind.LAYER else 0,
    )


def _kind_key(segment: Segment, program: StageProgram, meta: MetaModel) -> str:
    """Module class of the layer (or the stage's name) and a hash of everything with a shape that the stage touches."""
    leaves = [n.meta["kind"] for n in segment.nodes if "kind" in n.meta]
    glue = [getattr(n.target, "__name__", n.target) for n in segment.nodes if "kind" not in n.meta]
    inputs = [(tuple(n.meta["val"].shape), str(n.meta["val"].dtype), n.meta["val"].requires_grad) for n in segment.inputs]
    params = [(tuple(meta.params[p].shape), meta.params[p].requires_grad) for p in program.params]
    text = repr((leaves, glue, inputs, params))
    label = str(leaves[-1][0]) if segment.kind is StageKind.LAYER else segment.name
    return f"{label}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _vocab_check(model: nn.Module, n: fx.Node) -> Iterator[tuple[str, int]]:
    """(batch key, rows) if `n` looks integer batch entries up in an embedding."""
    rows = 0
    if n.op == "call_module" and isinstance(m := model.get_submodule(str(n.target)), nn.Embedding):
        rows = m.num_embeddings
    elif n.target is torch.nn.functional.embedding and isinstance(w := n.args[1], fx.Node):
        rows = w.meta["val"].shape[0]
    ids = n.args[0] if rows and n.args else None
    if (key := batch_entry(ids)) is not None:
        yield key, rows
