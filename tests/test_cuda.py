"""The CUDA backend on a real device: events, pinned memory, copies, and gloo ranks that share one GPU."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import RunRanks
from torch import Tensor

from slidedp.compiler.layergraph import cut_chunks, shard
from slidedp.compiler.ops import Stream
from slidedp.compiler.tracing.tracer import trace
from slidedp.executor.devices.backend import POISON_BLOCK, Backend, poison
from slidedp.executor.devices.devices import open_backend
from slidedp.executor.ranks.collectives import StagedGloo, open_collectives
from slidedp.executor.stages.binding import Binding
from slidedp.executor.stages.stages import StageRunner

pytestmark = pytest.mark.gpu

NUMEL = 64 * 12


@pytest.fixture
def backend():
    made = open_backend("cuda")
    yield made
    made.close()
    made.close()


def test_a_chain_over_all_streams_keeps_its_order(backend: Backend) -> None:
    """Large enough that an edge without its event would be seen: each op overwrites what the next one reads."""
    num, numel = 30, 1 << 22
    host_in, host_out = backend.pinned(numel, torch.float32), backend.pinned(numel, torch.float32)
    slot, result = backend.empty(numel, torch.float32), backend.empty(numel, torch.float32)
    streams = backend.open_streams(delay=lambda name: 1e-3 if hash(name) % 3 == 0 else 0.0)
    seen: list[float] = []
    last = None
    for i in range(num):
        fill = streams.submit(Stream.CAST, lambda i=i: host_in.fill_(i), [last] if last else [], name=f"fill{i}")
        h2d = streams.submit(Stream.H2D, lambda: backend.copy(slot, host_in), [fill], name=f"h2d{i}")
        add = streams.submit(Stream.GPU, lambda: torch.add(slot, 0.5, out=result), [h2d], name=f"gpu{i}")
        d2h = streams.submit(Stream.D2H, lambda: backend.copy(host_out, result), [add], name=f"d2h{i}", need_done=True)
        last = streams.submit(Stream.CPU, lambda: seen.extend(x.item() for x in host_out.aminmax()), [d2h], name=f"cpu{i}")
    assert last is not None
    assert last.wait_done(60)
    streams.close()
    assert seen == [x for i in range(num) for x in (i + 0.5, i + 0.5)]


def test_trace_puts_device_ops_on_the_host_clock(backend: Backend) -> None:
    seen: dict[str, tuple[float, float]] = {}
    streams = backend.open_streams(trace=lambda name, stream, start, end: seen.update({name: (start, end)}))
    a = streams.submit(Stream.GPU, lambda: torch.cuda._sleep(20_000_000), name="a")
    b = streams.submit(Stream.HOST, lambda: None, [a], name="b")
    assert b.wait_done(60)
    streams.close()
    assert seen["a"][1] - seen["a"][0] > 2e-3
    assert seen["a"][1] < seen["b"][0] + 1e-3  # two clocks, read to within a millisecond


def test_pinned_memory_has_its_exact_size_and_is_released(backend: Backend) -> None:
    tensor = backend.pinned(5_000_001, torch.bfloat16)
    assert tensor.is_pinned()
    assert tensor.untyped_storage().nbytes() == 10_000_002
    assert (tensor == 0).all()
    backend.unregister(tensor)
    assert not tensor.is_pinned()
    backend.register(tensor)


def test_batches_sent_ahead_arrive_and_the_host_copy_may_change_at_once(backend: Backend) -> None:
    streams = backend.open_streams()
    large = torch.arange(5_000_000)
    for round_ in range(3):
        sources = [torch.full((64, 1024), round_), torch.rand(3, 5).cuda(), torch.empty(0, 7), large + round_]
        want = [source.clone() for source in sources]
        backend.fence_caller()
        sent = [backend.send(source) for source in sources]
        sources[0].zero_()
        got: list[Tensor] = []
        assert streams.submit(Stream.GPU, lambda sent=sent, got=got: got.extend(map(backend.receive, sent)),
                              need_done=True).wait_done(60)  # fmt: skip
        assert [s.there is not None for s in sent] == [True, False, False, True]
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))
    streams.close()


def test_poison_lets_copies_that_are_under_way_have_what_they_copy(backend: Backend) -> None:
    streams = backend.open_streams(pause=lambda name: 0.01)
    source = backend.pinned(3 * POISON_BLOCK + 7, torch.float32)
    source.fill_(1.0)
    target = backend.empty(source.numel(), torch.float32)

    def task() -> None:
        backend.copy(target, source)
        poison(source, backend.device)

    assert streams.submit(Stream.H2D, task, need_done=True).wait_done(60)
    assert target.eq(1).all()
    assert source.isnan().all()
    streams.close()


def test_batches_arrive_whatever_their_device_and_the_host_copy_may_change_at_once(backend: Backend) -> None:
    streams = backend.open_streams()
    for dtype in (torch.int64, torch.float32, torch.bool):
        source = torch.arange(60).view(3, 20).t().to(dtype)
        on_device, want = source.cuda(), source.clone()
        backend.fence_caller()
        got: list[Tensor] = []

        def take(source=source, on_device=on_device, got=got) -> None:
            got.extend([backend.to_device(source), backend.to_device(on_device), backend.to_device(source[:0])])
            source.zero_()
            got.append(backend.to_host(got[0]))

        assert streams.submit(Stream.GPU, take, need_done=True).wait_done(60)
        assert torch.equal(got[0].cpu(), want)
        assert torch.equal(got[1].cpu(), want)
        assert got[2].shape == source[:0].shape
        assert torch.equal(got[3], want)
    streams.close()


@pytest.mark.parametrize("name", ["qwen3-padded", "gpt2-padded", "vit"])
def test_stages_on_the_gpu_equal_eager_there(backend: Backend, name: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    case = {c.name: c for c in tiny_models.plain_cases() + tiny_models.family_cases(("padded",))}[name]
    batch = case.batch(1)
    reference = case.model().cuda()
    loss, want = tiny_models.loss_and_grads(reference, {k: v.cuda() for k, v in batch.items()}, case.loss_fn)
    model = case.model()
    traced = trace(model, batch, loss_fn=case.loss_fn, device=backend.device)
    binding = Binding(model, traced.graph.groups)
    runner = StageRunner(traced, binding, backend)
    named = dict(model.named_parameters(remove_duplicate=False))
    weights, slots = {}, {}
    for g in traced.graph.groups:
        flat = torch.zeros(g.numel, device="cuda")
        for p in g.params:
            flat[p.offset : p.offset + p.numel] = named[p.name].detach().reshape(-1).cuda()
        weights[g.name], slots[g.name] = binding.leaves(flat, g.name), torch.zeros(g.num_trainable, device="cuda")
    first, *layers, last = traced.graph.stages
    written: set[str] = set()

    def of(stage):
        return {g: weights[g] for g in stage.groups}

    def targets(stage):
        out = {g: (slots[g], g in written) for g in stage.groups}
        written.update(out)
        return out

    def step() -> Tensor:
        runner.start({k: backend.to_device(v) for k, v in batch.items()})
        runner.prologue(of(first))
        for stage in layers:
            runner.forward(stage.name, of(stage))
        value, _ = runner.epilogue(of(last), targets(last))
        for stage in reversed(layers):
            runner.recompute(stage.name, of(stage))
            runner.backward(stage.name, of(stage), targets(stage))
        runner.prologue_backward(of(first), targets(first))
        return value

    backend.fence_caller()
    streams, result = backend.open_streams(), []
    assert streams.submit(Stream.GPU, lambda: result.append(step()), need_done=True).wait_done(120)
    streams.close()
    binding.restore()
    torch.use_deterministic_algorithms(False)
    assert all(t.device.type == "cpu" for t in [*model.parameters(), *model.buffers()])
    torch.testing.assert_close(result[0], loss, rtol=1e-6, atol=0)
    for g in traced.graph.groups:
        for p in g.params:
            got, expected = slots[g.name][p.offset : p.offset + p.numel].view(p.shape), want[p.name]
            assert (got - expected).norm() <= 5e-6 * expected.norm(), p.name


def staged_main(world: int) -> str:
    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    c = open_collectives(device, rank, world)
    for dtype in (torch.float32, torch.bfloat16):
        grads = [(torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) * 10 ** (r - 1)).to(dtype) for r in range(world)]
        total = grads[0].float()
        for g in grads[1:]:
            total = total + g.float()
        mine = grads[rank].cuda()
        slot = torch.full((NUMEL + 64,), float("nan"), dtype=dtype, device=device)
        for lo, hi in cut_chunks(NUMEL, 3, world):
            a, b = shard(lo, hi, rank, world)
            out = torch.empty(b - a, dtype=dtype, device=device)
            c.reduce(mine[lo:hi], out)
            assert torch.equal(out.cpu(), total.to(dtype)[a:b])
            slot[a:b] = out
            c.all_gather(slot[lo:hi])
        assert torch.equal(slot[:NUMEL].cpu(), total.to(dtype))
    kind = type(c).__name__
    c.close()
    dist.destroy_process_group()
    return kind


def test_ranks_that_share_a_gpu_stage_through_the_host(run_ranks: RunRanks) -> None:
    assert [r.value for r in run_ranks(staged_main, 2, 2, timeout=120)] == [StagedGloo.__name__] * 2
