"""The stages' measured costs for a plan: from the cache, or measured now by all ranks, of whom the slowest counts."""

from __future__ import annotations

import sys
import time
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slidedp.cache import machine_hash, read_cached, write_cached
from slidedp.compiler.costmodel.measured import Measurement, read_measurement, slowest, times_us
from slidedp.compiler.planfile.planyaml import to_text
from slidedp.compiler.strict import content_hash, load_yaml, parse_yaml
from slidedp.compiler.tracing.tracer import Trace
from slidedp.executor.measure.stages import measure_stages
from slidedp.executor.ranks.collectives import Collectives
from slidedp.executor.stages.binding import share_buffers

if TYPE_CHECKING:
    from slidedp.settings import Settings

METHOD = 3
"""Of measuring; raised when what it finds is no longer what an earlier one has kept."""


def measured_stages(
    model: nn.Module, trace: Trace, batch: Mapping[str, Tensor], settings: Settings, collectives: Collectives
) -> Measurement:
    """What is known of the stages of `trace`, measured now if need be; empty if nobody asked. Collective.

    Nothing of `model` changes, except that ranks without buffers get rank 0's, as they would a moment later. A stage that
    cannot be measured (there is no memory for it now, say) is a warning: the analytic model then serves.
    """
    if not settings.measure:
        return Measurement()
    kept = cached_stages(model, trace, settings) if collectives.rank == 0 else Measurement()
    text = collectives.broadcast_bytes(to_text(kept.to_content()).encode() if kept else b"")
    if text:
        return read_measurement(parse_yaml(text.decode(), "rank 0's measurement"), "rank 0's measurement")
    if settings.world_size > 1:
        share_buffers(model, collectives)
    found = _slowest(_measure(model, trace, batch, settings), collectives)
    if found and collectives.rank == 0:
        write_cached(kept_stages(model, trace, settings), to_text(found.to_content()))
    return found


def cached_stages(model: nn.Module, trace: Trace, settings: Settings) -> Measurement:
    """What was measured before, if it may be used. Not collective."""
    if settings.measure != "cached":
        return Measurement()
    path = kept_stages(model, trace, settings)
    return read_cached(path, lambda p: read_measurement(load_yaml(p), str(p))) or Measurement()


def kept_stages(model: nn.Module, trace: Trace, settings: Settings) -> Path | None:
    """Where these stages' costs are kept: by model, shapes, chunks of the head, element types, what runs them, and machine."""
    kinds = sorted({s.kind_key for s in trace.graph.stages})
    dtypes = [str(settings.compute_dtype), str(settings.grad_dtype)]
    machine = machine_hash(settings.device.type, settings.world_size)
    key = content_hash([METHOD, trace.graph.model, kinds, trace.head_chunks, dtypes, code_of(model), machine])
    return settings.cache_dir / f"stages-{key}.yaml" if settings.cache_dir else None


def code_of(model: nn.Module) -> list[object]:
    """What else decides how fast a stage is: the code behind each class of module (kernels are patched in), and torch's modes."""
    modules = {(_function(type(m)), _function(m.forward), m._compiled_call_impl is not None) for m in model.modules()}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    transformers = getattr(sys.modules.get("transformers"), "__version__", None)
    modes = [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark]
    return [sorted([list(m) for m in modules], key=str), attention, transformers, modes, torch.get_num_threads()]


def _function(f: object) -> str:
    return f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__qualname__)}"


def _measure(model: nn.Module, trace: Trace, batch: Mapping[str, Tensor], settings: Settings) -> Measurement:
    started = time.perf_counter()
    try:
        phases = measure_stages(model, trace, batch, settings.device, (settings.compute_dtype, settings.grad_dtype))
    except Exception as e:  # the model's code may raise anything; where it matters, the first step raises it again
        warnings.warn(f"slidedp: the stages of {trace.graph.model} could not be measured, analytic costs are used: "
                      f"{type(e).__name__}: {e}", stacklevel=2)  # fmt: skip
        phases = ()
    return Measurement(phases, round(time.perf_counter() - started, 3))


def _slowest(mine: Measurement, collectives: Collectives) -> Measurement:
    """Each phase's cost on the slowest rank, if all ranks have measured the same phases; else this rank's own costs."""
    keys = zlib.crc32("\n".join(f"{p.kind_key} {p.phase} {p.act}" for p in mine.phases).encode())
    everyone = collectives.gather_ints([keys, len(mine.phases), round(mine.seconds * 1e3)])
    if any(row[:2] != everyone[0][:2] for row in everyone) or not mine:
        return mine
    agreed = slowest(collectives.gather_ints(times_us(mine)), mine)
    return replace(agreed, seconds=max(ms for _, _, ms in everyone) / 1e3)
