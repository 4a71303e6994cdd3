"""CPU AdamW: torch's bits from the fallback, torch's values and its own unchanging bits from the native kernel."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from slidedp.compiler.decisions import Decisions, GroupDecision, Source
from slidedp.compiler.layergraph import Group, Param, aligned, cut_chunks, shard
from slidedp.compiler.optimizer import AdamW
from slidedp.executor.native.build import SEGMENT, NativeUnavailable, load_library
from slidedp.executor.optim import kernels as kernels_module
from slidedp.executor.optim.adam import CpuAdam, NonFiniteGradient
from slidedp.executor.optim.kernels import HostKernels
from slidedp.executor.state.host_state import HostState, shaped
from slidedp.executor.state.state_layout import Buffer

pytestmark = pytest.mark.cpu

SHAPES = {
    "block.weight": (129, 67),
    "block.bias": (67,),
    "block.empty": (0, 4),
    "block.Norm.weight": (1,),
    "block.scalar": (),
    "block.big": (401, 333),  # more than one native block
    "block.odd": (63,),
}
OPTIMIZER = AdamW(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def native_available() -> bool:
    try:
        load_library()
    except NativeUnavailable:
        return False
    return True


needs_native = pytest.mark.skipif(not native_available(), reason="no C++ compiler or ninja")


@pytest.fixture(autouse=True)
def _one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch cuts large tensors by its thread count, and the cuts' tails round differently
    yield
    torch.set_num_threads(threads)


def make_group(shapes=SHAPES, world_size=1) -> Group:
    params, offset = [], 0
    for name, shape in shapes.items():
        params.append(Param((name,), shape, offset))
        offset += aligned(params[-1].numel)
    numel = aligned(offset, 64 * world_size)
    return Group("L00", numel, numel, ("L00",), tuple(params))


def make_state(group: Group, values, *, dtype=torch.float32, source=Source.SHADOW) -> HostState:
    state = HostState(
        (group,),
        Decisions({group.name: GroupDecision(source=source)}),
        rank=0,
        world_size=1,
        compute_dtype=dtype,
        grad_dtype=dtype,
        num_words=1,
    )
    state.load(values)
    return state


def random_values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def random_grads(step, dtype=torch.float32):
    """One a parameter; None where it has none in this step. Magnitudes over many decades."""
    generator = torch.Generator().manual_seed(100 + step)
    out = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        scale = 10.0 ** torch.randint(-6, 3, shape, generator=generator)
        grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        out[name] = None if (step + i) % 4 == 0 else grad
    return out


def reference(num_steps, dtype=torch.float32, optimizer=OPTIMIZER):
    """torch.optim.AdamW over the same gradients: parameters and its state, by name."""
    params = {name: torch.nn.Parameter(v.clone()) for name, v in random_values().items()}
    torch_adamw = torch.optim.AdamW(
        [
            {"params": [p for n, p in params.items() if optimizer.decays(n)], "weight_decay": optimizer.weight_decay},
            {"params": [p for n, p in params.items() if not optimizer.decays(n)], "weight_decay": 0.0},
        ],
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
    )
    for step in range(num_steps):
        for name, grad in random_grads(step, dtype).items():
            params[name].grad = None if grad is None else grad.float()
        torch_adamw.step()
    return params, {name: torch_adamw.state[p] for name, p in params.items()}


def train(num_steps, *, kernel, chunks=1, ranks=1, threads=1, dtype=torch.float32, source=Source.SHADOW, optimizer=OPTIMIZER):
    """The same through CpuAdam, every chunk in `ranks` shards; returns (state, adam)."""
    group = make_group(world_size=ranks)
    state = make_state(group, random_values(), dtype=dtype, source=source)
    adam = CpuAdam(state, [group], optimizer, kernel=kernel, num_threads=threads)
    for step in range(num_steps):
        grads = random_grads(step, dtype)
        state.grad["L00"].fill_(float("nan"))  # padding and absent parameters must not be looked at
        for p in group.params:
            if grads[p.name] is not None:
                shaped(state.grad["L00"], p).copy_(grads[p.name])
        present = [grads[p.name] is not None for p in group.params]
        for (lo, hi), rank in itertools.product(reversed(cut_chunks(group.num_trainable, chunks, ranks)), range(ranks)):
            adam.update("L00", *shard(lo, hi, rank, ranks), step, present)
    return state, adam


def by_name(state, buffer):
    return {p.name: v for p, v in zip(state.groups["L00"].params, state.views(buffer, "L00"), strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [1, 3, 7, 10**6])
def test_torch_kernel_equals_torch_bit_for_bit(chunks, dtype):
    state, adam = train(6, kernel="torch", chunks=chunks, dtype=dtype)
    params, moments = reference(6, dtype)
    for name, p in params.items():
        assert torch.equal(by_name(state, "master")[name], p)
        assert torch.equal(by_name(state, "exp_avg")[name], moments[name]["exp_avg"])
        assert torch.equal(by_name(state, "exp_avg_sq")[name], moments[name]["exp_avg_sq"])
        assert torch.equal(by_name(state, "shadow")[name], p.to(dtype))
        assert adam.steps[name] == moments[name]["step"].item()
    assert len(set(adam.steps.values())) > 1  # the parameters' counts do differ


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.4, 0.0)])
def test_native_kernel_agrees_with_torch(dtype, betas):
    optimizer = AdamW(lr=3e-3, betas=betas)
    state, adam = train(6, kernel="native", chunks=3, threads=2, dtype=dtype, optimizer=optimizer)
    assert adam.native
    params, moments = reference(6, dtype, optimizer)
    start = random_values()
    for name, p in params.items():
        if p.numel() == 0:
            continue
        for buffer in ("exp_avg", "exp_avg_sq"):
            want = moments[name][buffer].double()
            assert (by_name(state, buffer)[name] - want).norm() <= 1e-6 * want.norm()
        change = (p - start[name]).double()
        assert (by_name(state, "master")[name] - p).double().norm() <= 1e-4 * change.norm()
        assert torch.equal(by_name(state, "shadow")[name], by_name(state, "master")[name].to(dtype))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_bits_depend_on_inputs_only(dtype):
    want, _ = train(3, kernel="native", dtype=dtype)
    for chunks, ranks, threads in [(1, 1, 2), (3, 1, 1), (7, 2, 3), (10**6, 1, 2), (2, 3, 8), (5, 4, 1)]:
        got, _ = train(3, kernel="native", dtype=dtype, chunks=chunks, ranks=ranks, threads=threads)
        for buffer in ("master", "exp_avg", "exp_avg_sq", "shadow"):
            for name, tensor in by_name(want, buffer).items():
                assert torch.equal(tensor, by_name(got, buffer)[name]), (chunks, ranks, threads, buffer, name)


@needs_native
def test_native_bits_do_not_depend_on_tail_position():
    """Element i computed alone (scalar code) and inside vectors at every offset."""
    kernels, n = HostKernels("native", 1), 200
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(n, generator=generator) for _ in range(3)] + [torch.rand(n, generator=generator)]
    segment = np.zeros(n, dtype=SEGMENT)
    segment["keep"], segment["step_size"], segment["inv_bias2_sqrt"], segment["scale"] = 0.999, 1e-3, 2.1, 1

    def run(starts):
        p, g, m, v = (t.clone() for t in inputs)
        ends = [*starts[1:], n]
        cut = segment[: len(starts)].copy()
        cut["start"], cut["end"] = starts, ends
        assert kernels.adamw((p, m, v), g, None, cut, (0.9, 0.95), 1e-8) == -1
        return torch.stack([p, m, v])

    whole = run([0])
    assert torch.equal(whole, run(list(range(n))))
    for first in range(1, 70):
        assert torch.equal(whole, run([0, first]))


@pytest.mark.parametrize("kernel", ["torch", pytest.param("native", marks=needs_native)])
def test_without_shadow(kernel):
    with_shadow, _ = train(2, kernel=kernel)
    without, _ = train(2, kernel=kernel, source=Source.CAST)
    assert not without.shadow
    assert torch.equal(with_shadow.master["L00"], without.master["L00"])


@pytest.mark.parametrize("kernel", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_gradient_leaves_its_tile(kernel, dtype, bad):
    group = make_group()
    state = make_state(group, random_values(), dtype=dtype)
    adam = CpuAdam(state, [group], OPTIMIZER, kernel=kernel, num_threads=2)
    state.grad["L00"].fill_(1.0)
    param = group.params[5]
    place = param.offset + param.numel - 1  # in the second native block of block.big
    state.grad["L00"][place] = bad
    before = [t["L00"].clone() for t in (state.master, state.exp_avg, state.exp_avg_sq, state.shadow)]
    with pytest.raises(NonFiniteGradient, match=r"L00.*block\.big.*step 3"):
        adam.update("L00", 0, group.num_trainable, 3)
    after = [t["L00"] for t in (state.master, state.exp_avg, state.exp_avg_sq, state.shadow)]
    tile = slice(param.offset + (param.numel - 1) // 512 * 512, param.offset + param.numel)
    assert all(torch.equal(a[tile], b[tile]) for a, b in zip(before, after, strict=True))


@needs_native
def test_learning_rate_belongs_to_its_step():
    group = make_group()
    state = make_state(group, random_values())
    adam = CpuAdam(state, [group], AdamW(lr=1.0), kernel="native")
    adam.set_lr(2.0, from_step=5)
    adam.set_lr(3.0, from_step=6)
    assert [adam.lr(s) for s in (0, 4, 5, 6, 60)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    adam.set_lr(4.0, from_step=5)
    assert [adam.lr(s) for s in (4, 5, 6)] == [1.0, 4.0, 4.0]


def test_step_counts_are_restored():
    state, adam = train(5, kernel="torch", chunks=3)
    other = CpuAdam(state, list(state.groups.values()), OPTIMIZER, kernel="torch")
    with pytest.raises(ValueError, match=r"block\.weight"):
        other.load_steps({})
    other.load_steps(adam.steps)
    assert other.steps == adam.steps


@pytest.mark.parametrize("kernel", ["torch", pytest.param("native", marks=needs_native)])
def test_cast_and_reduce_equal_torch(kernel):
    kernels = HostKernels(kernel, 2)
    bits = torch.randint(-(2**31), 2**31 - 1, (300_001,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = [0x7F800000, 0x7F7FFFFF, 0x00000001, 0x3F808000, 0x3F818000, 0x7FC00001, 0x7F800001, 0]
    special = torch.tensor(special, dtype=torch.int32)
    source = torch.cat([bits, special, special | -(2**31)]).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        out = torch.empty(source.numel() + 1, dtype=dtype)[1:]  # not aligned for streaming stores
        kernels.cast(source, out)
        want, finite = source.to(dtype), ~source.isnan()
        assert torch.equal(out[finite].view(torch.uint8), want[finite].view(torch.uint8))
        assert out[~finite].isnan().all()
    for dtype in (torch.bfloat16, torch.float32):
        sources = [torch.randn(200_003, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
        out = torch.empty(200_003, dtype=dtype)
        kernels.reduce(sources, out)
        total = sources[0].float()
        for s in sources[1:]:
            total = total + s.float()
        assert torch.equal(out, total.to(dtype))
        kernels.reduce([s[:0] for s in sources], out[:0])


FORKS = """
import os, signal, sys, time
from slidedp.executor.optim.kernels import HostKernels
from slidedp.executor.native.build import Ranks, load_library
from slidedp.executor.streams.updates import UpdateQueue

queue = UpdateQueue(load_library(), 2, Ranks(1, 1, 8))
kept = [HostKernels("native", 2), HostKernels("native", 2, queue=queue)]
time.sleep(0.5)  # their threads sleep now, which is what a fork's end would wait for
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends one that hangs
    if sys.argv[1] == "drops":
        del queue, kept
    sys.exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@needs_native
@pytest.mark.parametrize("child", ["exits", "drops"])
def test_a_fork_waits_for_no_threads_that_it_does_not_have(child):
    subprocess.run([sys.executable, "-c", FORKS, child], check=True)


@needs_native
def test_native_bf16_nan_is_torchs_scalar_nan():
    out = torch.empty(1, dtype=torch.bfloat16)
    HostKernels("native", 1).cast(torch.tensor([float("nan")]), out)
    assert out.view(torch.int16).item() == 0x7FC0


def test_auto_falls_back_with_one_warning(monkeypatch):
    def unavailable():
        raise NativeUnavailable("no compiler here")

    monkeypatch.setattr(kernels_module, "load_library", unavailable)
    kernels_module._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="no compiler here") as caught:
        first, second = HostKernels("auto"), HostKernels("auto")
    assert len(caught) == 1
    assert not first.native
    assert not second.native
    with pytest.raises(ValueError, match=r"kernel='native'.*no compiler here"):
        HostKernels("native")
    kernels_module._warn_once.cache_clear()


def test_half_precision_uses_torch():
    group = make_group()
    state = make_state(group, random_values(), dtype=torch.float16)
    adam = CpuAdam(state, [group], OPTIMIZER, kernel="auto")
    assert not adam.native
    state.grad["L00"].fill_(1.0)
    adam.update("L00", 0, group.num_trainable, 0)
    for p, master, shadow in zip(group.params, state.views(Buffer.MASTER, "L00"), state.views(Buffer.SHADOW, "L00"), strict=True):
        assert torch.equal(shadow, master.half()), p.name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("no_decay", "bias"),
        ("no_decay", ("",)),
    ],
)
def test_bad_optimizer_names_the_field(field, value):
    with pytest.raises(ValueError, match=rf"AdamW\.{field}"):
        AdamW(**{field: value})


def test_decay_patterns_ignore_case():
    assert not AdamW().decays("h.0.LayerNorm.weight")
    assert not AdamW().decays("h.0.attn.Bias")
    assert AdamW().decays("h.0.attn.weight")
    assert AdamW(no_decay=()).decays("h.0.attn.bias")
    assert AdamW(no_decay=["Embed"]).no_decay == ("Embed",)
    anchored = AdamW(no_decay=("^head.weight$", "bias$"))  # the beginning and the end of a name
    assert [anchored.decays(name) for name in ("Head.weight", "lm_head.weight", "h.0.bias", "h.0.bias_scale")] == [
        False, True, False, True]  # fmt: skip
