"""LayerGraphs of plain decoder stacks, for tests of what plans them: no model, no tracing."""

from __future__ import annotations

from dataclasses import replace

from slidedp.compiler.layergraph import ALIGN, Group, LayerGraph, Lookup, Stage, StageKind, aligned


def stack(
    num_layers: int = 4,
    layer_numel: int = 4096,
    vocab_numel: int = 8192,
    *,
    world_size: int = 1,
    tokens: int = 64,
    width: int = 16,
    dtype: str = "bfloat16",
    frozen: tuple[int, ...] = (),
    model: str = "Stack",
) -> LayerGraph:
    """`num_layers` equal layers between an embedding and a head; the layers in `frozen` train nothing."""
    unit = ALIGN * world_size
    item = 2 if dtype == "bfloat16" else 4

    def group(name: str, numel: int, trains: bool = True) -> Group:
        numel = aligned(numel, unit)
        return Group(name, numel, numel if trains else 0, (name,))

    boundary = tokens * width * item
    names = [f"L{i:02}" for i in range(num_layers)]
    groups = [group("prologue", vocab_numel), *(group(n, layer_numel, i not in frozen) for i, n in enumerate(names)),
              group("epilogue", vocab_numel)]
    layers = [Stage(n, StageKind.LAYER, (n,), "Block", 2 * tokens * layer_numel, boundary, 12 * boundary) for n in names]
    stages = [Stage("prologue", StageKind.PROLOGUE, ("prologue",), "Embedding"), *layers,
              Stage("epilogue", StageKind.EPILOGUE, ("epilogue",), "Head", 2 * tokens * vocab_numel, boundary, 4 * boundary)]
    return LayerGraph(tuple(stages), tuple(groups), world_size, dtype, dtype, model)


def qwen3_4b(batch: int, seq: int = 1024, world_size: int = 1) -> LayerGraph:
    """The sizes of Qwen3-4B with an untied head: 36 layers of 101 M parameters, 389 M each for embedding and head."""
    return stack(36, 100_930_560, 151936 * 2560, world_size=world_size, tokens=batch * seq, width=2560, model="Qwen3-4B")


def looking_up(layers: LayerGraph, num_ids: int, num_rows: int = 151936) -> LayerGraph:
    """`layers` whose first group is a table of `num_rows`, of which a rank's batch looks `num_ids` up."""
    first = replace(layers.stages[0], lookups=(Lookup(layers.groups[0].name, ("input_ids",), num_rows, num_ids),))
    return replace(layers, stages=(first, *layers.stages[1:]))
