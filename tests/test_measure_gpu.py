"""Measuring on a CUDA device: the profile, stages with their memory, and the bits of a measured plan."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from tiny_models import PlainGPT, family, lm_batch

import slidedp
from slidedp.compiler.ops import OpKind, Stream
from slidedp.hardware import load_profile, measure_hardware

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_profile_of_the_device(tmp_path):
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    profile = measure_hardware(quick=True, cache_dir=tmp_path)
    gc.collect()
    assert torch.cuda.memory_allocated() - allocated <= 2**25, "more than cuBLAS' workspace of a stream is left"
    assert profile.gpu_name == torch.cuda.get_device_name()
    assert profile.num_gpus == 1
    assert profile.gpu_bf16_tflops > profile.gpu_fp32_tflops
    assert profile.hbm_gbps > profile.h2d_gbps
    assert load_profile("auto", cache_dir=tmp_path) == profile


@pytest.mark.parametrize("make", [lambda: PlainGPT(dropout=0.2), lambda: family("qwen3_moe")], ids=["dropout", "moe"])
def test_a_measured_plan_trains_the_same_bits(make, tmp_path):
    """Measured by default, from the cache the second time: with deterministic kernels nothing else may differ."""
    model, batch, trained = make(), lm_batch(batch=4, seq=32), []
    torch.use_deterministic_algorithms(True)
    try:
        for measure in (False, None, None):
            torch.manual_seed(7)
            with slidedp.compile(copy.deepcopy(model), device="cuda", example=batch, measure=measure, cache_dir=tmp_path) as plan:
                losses = [plan.run(batch).loss for _ in range(3)]
                params = [p.detach().clone() for p in plan.model.parameters()]
                sources = {plan._spec.costs.source(op) for op in plan._spec.graph.on(Stream.GPU)}
            assert sources == ({"analytic"} if measure is False else {"measured"})
            trained.append((losses, params, torch.rand(3), torch.rand(3, device="cuda").cpu()))
    finally:
        torch.use_deterministic_algorithms(False)
    for losses, params, *random in trained[1:]:
        assert losses == trained[0][0]
        assert all(torch.equal(a, b) for a, b in zip(params, trained[0][1], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(random, trained[0][2:], strict=True))


def test_stages_have_their_memory(tmp_path):
    """What a recompute keeps is what the tracer counted, but for the allocator's rounding; a backward gives it back."""
    batch = lm_batch(batch=16, seq=64)
    with slidedp.compile(PlainGPT(width=256), device="cuda", example=batch, cache_dir=tmp_path) as plan:
        layer = plan._spec.layers.layers[0]
        rows = {r.phase: r for r in plan._spec.measurement.phases if r.kind_key == layer.kind_key}
    assert set(rows) == {OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD}
    kept = rows[OpKind.RECOMPUTE].kept_bytes
    assert 0.5 * layer.activation_bytes < kept < 2 * layer.activation_bytes
    assert rows[OpKind.BACKWARD].kept_bytes < 0
    assert all(r.issue_us > 0 and r.duration_us > 0 for r in rows.values())
    assert rows[OpKind.RECOMPUTE].peak_bytes >= kept
