"""The host state: layout, loading, budget, what DMA touches, and what is left after close."""

import itertools

import pytest
import torch
import torch.distributed as dist

from slidedp.compiler.decisions import Decisions, GroupDecision, Reduction, Source
from slidedp.compiler.layergraph import Group, Param, aligned
from slidedp.executor.shared.segment import SharedSegment
from slidedp.executor.shared.words import AbortReason, PeerError
from slidedp.executor.state import host_state
from slidedp.executor.state.host_state import HostState
from slidedp.executor.state.state_layout import Buffer, layout_state

pytestmark = pytest.mark.cpu

GROUPS = (
    Group(
        "L00",
        numel=256,
        num_trainable=128,
        uses=("L00",),
        params=(Param(("a.w", "tied.w"), (5, 7), 0), Param(("a.s",), (), 64), Param(("a.frozen",), (65,), 128, trainable=False)),
    ),
    Group("frozen", numel=128, num_trainable=0, uses=("L01",), params=(Param(("f.w",), (3, 3), 0, trainable=False),)),
    Group("empty", numel=0, num_trainable=0, uses=("L02",), params=(Param(("e.w",), (0, 4), 0),)),
)
VALUES = {
    "tied.w": torch.arange(35.0).reshape(7, 5).t() + 0.001,
    "a.s": torch.tensor(2.5, dtype=torch.float64),
    "a.frozen": torch.arange(65.0).bfloat16(),
    "f.w": torch.ones(3, 3).half(),
    "e.w": torch.empty(0, 4),
}


def decisions(source=Source.SHADOW, reduction=Reduction.GPU):
    return Decisions({g.name: GroupDecision(source=source, reduction=reduction) for g in GROUPS})


def make(*, source=Source.SHADOW, **more) -> HostState:
    kwargs = {"rank": 0, "world_size": 1, "compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16, "num_words": 3, **more}
    return HostState(GROUPS, decisions(source), **kwargs)


def test_load_fills_masters_and_shadows():
    state = make()
    state.load(VALUES)
    master = dict(zip(["a.w", "a.s", "a.frozen"], state.views("master", "L00"), strict=True))
    assert torch.equal(master["a.w"], VALUES["tied.w"])
    assert master["a.s"].shape == ()
    assert master["a.s"] == 2.5
    assert torch.equal(master["a.frozen"], VALUES["a.frozen"].float())
    for group in state.groups:
        assert torch.equal(state.shadow[group], state.master[group].bfloat16())
    assert state.master["L00"][35:64].count_nonzero() == 0  # padding stays zero
    assert [v.shape for v in state.views(Buffer.GRAD, "L00")] == [(5, 7), ()]
    assert list(state.grad) == list(state.exp_avg) == ["L00"]
    assert state.param_index == {"a.w": 0, "a.s": 1, "a.frozen": 2, "f.w": 3, "e.w": 4}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a.s", None, "no value given"),
        ("a.s", torch.ones(1), r"expected shape \(\), got \(1,\)"),
        ("a.s", torch.tensor(1), "floating-point"),
        ("a.s", torch.tensor(1j), "floating-point"),
        ("a.frozen", torch.ones(65).to_sparse(), "dense"),
        ("f.w", torch.empty(3, 3, device="meta"), "meta"),
    ],
)
def test_bad_values_are_named_and_nothing_is_written(name, value, message):
    state = make()
    values = {**VALUES, name: value}
    if value is None:
        del values[name]
    with pytest.raises(ValueError, match=rf"parameter {name}.*{message}"):
        state.load(values)
    assert not state.master["L00"].any()


def test_bytes_and_buffers_follow_the_decisions():
    state = make()
    assert state.bytes_by_place() == {
        "master": 4 * 384,
        "moments": 8 * 128,
        "candidates": 0,
        "shadow": 2 * 384,
        "grads": 2 * 128,
        "raw_grads": 0,
        "control": state.words.layout.nbytes,
    }
    assert {t.data_ptr() for t in state.dma_buffers()} == {
        state.shadow["L00"].data_ptr(),
        state.shadow["frozen"].data_ptr(),
        state.grad["L00"].data_ptr(),
    }
    assert all(t.data_ptr() % 4096 == 0 for t in [*state.dma_buffers(), *state.master.values()] if t.numel())
    assert not make(source=Source.CAST).shadow


def test_raw_gradients_only_for_several_ranks_that_reduce_on_the_host():
    common = {"compute_dtype": torch.float32, "grad_dtype": torch.float32, "control_bytes": 8}
    layout = layout_state(GROUPS, decisions(reduction=Reduction.CPU), world_size=3, **common)
    assert layout.bytes_by_place()["raw_grads"] == 3 * 4 * 128
    alone = layout_state(GROUPS, decisions(reduction=Reduction.CPU), world_size=1, **common)
    assert alone.bytes_by_place()["raw_grads"] == 0
    ends = sorted((p.offset_bytes, p.offset_bytes + p.nbytes) for (b, _, _), p in layout.places.items() if "grad" in b)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


def test_budget_is_checked_before_anything_is_allocated():
    needed = sum(make().bytes_by_place().values())
    make(host_budget=needed).close()
    with pytest.raises(ValueError, match=r"host_budget: the state needs .*master.*raise host_budget, or .*source=cast"):
        make(host_budget=needed - 1)


def test_nothing_is_kept_when_another_rank_is_gone_by_the_barrier(monkeypatch):
    opened = []

    class Watched(SharedSegment):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            opened.append(self)

    def barrier():
        assert opened
        assert all(segment._fd >= 0 for segment in opened)
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(host_state, "SharedSegment", Watched)
    with pytest.raises(RuntimeError, match="closed by peer"):
        make(barrier=barrier)
    assert all(segment._fd == -1 for segment in opened)


def test_close_keeps_masters_as_ordinary_memory():
    state = make()
    state.load(VALUES)
    old = state.master["L00"].clone()
    masters = state.close()
    assert torch.equal(masters["L00"], old)
    masters["L00"] += 1  # writable
    assert state.close() == {}
    assert not state.grad
    assert not state.dma_buffers()
    assert make().close(keep_master=False) == {}


def share(num_params: int) -> dict:
    """One of two ranks: rank 0 alone has values; both see them; then rank 0 fails to load."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def exchange(ints):
        tensor = torch.tensor(ints, dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return tensor.tolist()

    numel = aligned(num_params, 128)
    group = Group("L00", numel, numel, ("L00",), (Param(("w",), (num_params,), 0),))
    state = HostState(
        (group,),
        Decisions({"L00": GroupDecision(reduction=Reduction.CPU)}),
        rank=rank,
        world_size=2,
        compute_dtype=torch.bfloat16,
        grad_dtype=torch.float32,
        num_words=1,
        exchange=exchange,
        barrier=dist.barrier,
    )
    state.load({"w": torch.full((num_params,), 1.5, device="cpu" if rank == 0 else "meta")})
    seen = float(state.master["L00"].sum()), float(state.shadow["L00"].float().sum())
    state.raw_grad["L00"][rank].fill_(rank + 1.0)
    state.words.publish(0, 1)
    state.words.wait(0, 1)
    raw = [float(t[0]) for t in state.raw_grad["L00"]]
    own = state.raw_grad["L00"][rank].data_ptr() in [t.data_ptr() for t in state.dma_buffers()]
    try:
        state.load({})
        error = ""
    except ValueError as e:
        state.words.abort(rank, AbortReason.ERROR, str(e))
        error = str(e)
    except PeerError as e:
        error = str(e)
    dist.barrier()
    masters = state.close()
    dist.barrier()
    dist.destroy_process_group()
    return {"seen": seen, "raw": raw, "own": own, "error": error, "after": float(masters["L00"].sum())}


def test_two_ranks_load_once(run_ranks):
    ranks = [r.value for r in run_ranks(share, 2, 1001)]
    for r in ranks:
        assert r["seen"] == [1501.5, 1501.5]
        assert r["raw"] == [1.0, 2.0]
        assert r["own"]
        assert r["after"] == 1501.5
    assert "parameter w: no value given" in ranks[0]["error"]
    assert "rank 0 stopped the run: parameter w: no value given" in ranks[1]["error"]
