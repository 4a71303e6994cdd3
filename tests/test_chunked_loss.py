"""Head and loss of whole models in token chunks: equal to all at once, nothing larger than a chunk, memory as predicted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from stage_bench import Bench, made
from tiny_models import FAMILIES, PlainGPT, family, lm_batch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from training import norm_wise

import slidedp
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.policy import parse_fixes
from slidedp.compiler.tracing.metering import LiveBytes
from slidedp.compiler.tracing.tracer import Trace, trace, with_head_chunks
from slidedp.executor.devices.backend import CpuBackend
from slidedp.executor.stages.stages import StageRunner
from slidedp.hardware import load_profile
from slidedp.planning.planner import Planner
from slidedp.reports.report import summary
from slidedp.settings import Settings

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


# ---- found in a model's epilogue, or not ----


def lm_trace(model: nn.Module, **options: Any) -> Trace:
    return trace(model, lm_batch("padded"), **options)


def reason(traced: Trace) -> str:
    head = traced.graph.head
    assert head is not None
    return head.whole


def test_all_nine_families_can_be_cut() -> None:
    assert {name: reason(lm_trace(family(name))) for name in FAMILIES} == dict.fromkeys(FAMILIES, "")


class Headed(nn.Module):
    """A body of two blocks and `loss(self, h, labels)`."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = nn.Embedding(tiny_models.VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, tiny_models.VOCAB)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("class_weights", torch.rand(tiny_models.VOCAB))
        self.loss = loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.tok(input_ids)
        for block in self.blocks:
            h = block(h)
        return self.loss(self, h, labels.flatten())


def two_losses(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), y) + F.cross_entropy(m.head(h * 2).flatten(0, 1), y)


def z_loss(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    logits = m.head(h).flatten(0, 1)
    return F.cross_entropy(logits, y, reduction="sum") + 1e-4 * logits.logsumexp(1).square().sum()


def classes_in_the_middle(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).transpose(1, 2), y.view(h.shape[:2]))


def normalised(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.layer_norm(m.head(h), (tiny_models.VOCAB,)).flatten(0, 1), y)


def masked(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), y, reduction="none").sum()


def weighted(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), y, m.class_weights, reduction="sum")


def changed_in_place(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1).mul_(2.0), y)


def hooked() -> Headed:
    model = Headed(plain_product)
    model.head.register_forward_hook(lambda *_: None)
    return model


def plain_product(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h).flatten(0, 1), y)


def summed(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs, 20


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Headed(two_losses), "calls cross_entropy 2 times"),
        (lambda: Headed(z_loss), "are read 2 times"),
        (lambda: Headed(classes_in_the_middle), "of 3 dimensions"),
        (lambda: Headed(normalised), "layer_norm.* no function of each logit alone"),
        (lambda: Headed(masked), "reduction='none'"),
        (lambda: Headed(weighted), "class weights"),
        (lambda: Headed(changed_in_place), "writes in place"),
        (hooked, "no plain nn.Linear without hooks"),
    ],
)
def test_what_cannot_be_cut_says_why_and_stays_as_it_is(model: Callable[[], Headed], why: str) -> None:
    traced = trace(model(), lm_batch(), loss_fn=summed)
    assert re.search(why, reason(traced)), reason(traced)
    assert with_head_chunks(traced, model(), 4) is traced


def functional(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(h, m.tok.weight) * m.scale + m.head.bias)[:, 1:].reshape(-1, tiny_models.VOCAB),
                           y.view(h.shape[:2])[:, :-1].reshape(-1))  # fmt: skip


def product(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    logits = 3.0 * torch.tanh((h @ m.head.weight.t())[..., 2:, :] / 3.0)
    return F.cross_entropy(logits.float().view(-1, tiny_models.VOCAB), y.view(h.shape[:2])[:, 2:].flatten())


def last_token(m: Headed, h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(h)[:, -1], y.view(h.shape[:2])[:, -1], label_smoothing=0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {name: lambda name=name: family(name) for name in FAMILIES}
MODELS |= {"gpt": made(PlainGPT)}
MODELS |= {f.__name__: lambda f=f: Headed(f) for f in (functional, product, last_token)}


def bench(make: Callable[[], nn.Module], num_chunks: int, batch: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> Bench:
    """Steps of a model whose logits are made in chunks."""
    b = Bench(make(), batch, dtype=dtype)
    chunked = with_head_chunks(b.trace, b.model, num_chunks)
    assert (chunked is b.trace) == (num_chunks == 1)
    b.trace, b.runner = chunked, StageRunner(chunked, b.binding, CpuBackend())
    return b


@pytest.mark.parametrize("name", MODELS)
def test_a_step_and_an_evaluation_equal_those_of_all_logits_at_once(name: str) -> None:
    """The head's own gradients to 1e-6, all others to the contract's 5e-6: the layers below amplify."""
    batch = lm_batch("padded", seed=3) if name in FAMILIES else lm_batch(seed=3)
    whole = bench(MODELS[name], 1, batch)
    want = whole.step(batch, seed=0.7)
    for num_chunks in (3,) if name in FAMILIES else (3, 100):
        cut = bench(MODELS[name], num_chunks, batch)
        assert abs(cut.step(batch, seed=0.7) - want) <= 1e-6 * abs(want)
        assert cut.present == whole.present
        assert {n: d for n, g in whole.grads.items() if (d := norm_wise(cut.grads[n], g)) > (1e-6 if "head" in n else 5e-6)} == {}
        assert abs(cut.evaluate(batch) - want) <= 1e-6 * abs(want)


# ---- what is allocated ----

BIG = {"vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


def big(name: str) -> nn.Module:
    return family(name, **{k: v for k, v in BIG.items() if k != "layer_types" or name in ("gemma2", "gemma3")})


def big_batch(rows: int = 1024) -> dict[str, Tensor]:
    ids = torch.randint(3, 4096, (rows // 32, 32))
    return {"input_ids": ids, "labels": ids.clone()}


def up_to_the_epilogue(b: Bench, batch: dict[str, Tensor]) -> tuple[Any, ...]:
    """Arguments of the epilogue, all stages before it having run."""
    first, *layers, last = [s.name for s in b.graph.stages]
    b.written = set()
    b.runner.start(batch)
    b.runner.prologue(b.of(first))
    for name in layers:
        b.runner.forward(name, b.of(name))
    return b.of(last), b.slots(last)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_nothing_is_larger_than_the_logits_of_a_chunk(name: str) -> None:
    batch = big_batch()
    b = bench(lambda: big(name), 16, batch)
    arguments = up_to_the_epilogue(b, batch)
    with LiveBytes() as training:
        b.runner.epilogue(*arguments)
    with LiveBytes() as evaluating:
        b.evaluate(batch)
    chunk = 1024 // 16 * 4096 * 4
    assert training.largest == evaluating.largest == chunk
    assert evaluating.peak < 4 * chunk


def allocated_at_most(run: Callable[[], object]) -> int:
    """Bytes by the CPU allocator's own account, above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_memory_is_as_predicted(name: str, dtype: torch.dtype) -> None:
    batch = big_batch()
    for num_chunks in (1, 3, 16):
        b = bench(lambda: big(name), num_chunks, batch, dtype)
        arguments = up_to_the_epilogue(b, batch)
        measured = allocated_at_most(lambda b=b, a=arguments: b.runner.epilogue(*a))
        predicted = b.graph.head.peak_bytes(num_chunks)
        assert measured == pytest.approx(predicted, rel=0.1), (num_chunks, measured, predicted)


def test_without_a_measurement_there_is_an_estimate_on_the_safe_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> list[tuple[int, int]]:
        head = trace(wide(), on_meta(4096), compute_dtype=torch.bfloat16).graph.head
        assert (head.rows, head.vocab) == (4096, 32768)
        return head.peaks

    known = measured()
    monkeypatch.setattr("slidedp.compiler.tracing.loss_memory._peak_bytes", lambda *_: 1 / 0)
    assert all(n == m and size <= guess < 2.5 * size for (n, size), (m, guess) in zip(known, measured(), strict=True))


class NoWaiting(TorchDispatchMode):
    """Raises on what makes the host wait for the device: values asked for, shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        assert name not in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "unique"), name
        assert name != "index" or all(i is None or i.dtype is not torch.bool for i in args[1]), "indexing by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_device_is_never_waited_for(name: str) -> None:
    batch = lm_batch("padded")
    b = bench(lambda: family(name), 3, batch)
    arguments = up_to_the_epilogue(b, batch)
    with NoWaiting():
        b.runner.epilogue(*arguments)
    with pytest.raises(AssertionError), NoWaiting():
        batch["labels"].sum().item()


# ---- the decision ----


def wide(name: str = "llama") -> nn.Module:
    """1 MiB of FP32 logits for 8 tokens."""
    with torch.device("meta"):
        return family(name, vocab_size=32768, num_hidden_layers=1, max_position_embeddings=2048)


def on_meta(tokens: int) -> dict[str, Tensor]:
    ids = torch.zeros(tokens // 1024, 1024, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def on_paper(tokens: int, **options: Any) -> PlanFile:
    return slidedp.plan_on_paper(wide(), "h200x1", batch=tokens // 1024, seq=1024, **options)


def test_the_rule() -> None:
    """All at once under 256 MiB in FP32, else 2048 tokens at a time, and 256 where HBM has no room for more."""
    assert [on_paper(n).decisions.head_chunks for n in (1024, 2048, 4096, 5120)] == [1, 1, 2, 3]
    roomy = on_paper(4096).predictions.hbm_bytes
    assert on_paper(4096, hbm_budget=roomy // 2).decisions.head_chunks == 16
    assert on_paper(4096, policy={"head_chunks": 5}).decisions.head_chunks == 5
    with pytest.raises(ValueError, match=r"head and loss .* MiB"):
        on_paper(4096, policy={"head_chunks": 1}, hbm_budget=roomy // 2)


def test_longer_batches_get_more_chunks_unless_their_number_is_pinned() -> None:
    def decided(policy: dict[str, Any] | None) -> list[int]:
        planner = Planner(wide(), Settings(load_profile("h200x1"), torch.bfloat16, torch.bfloat16, policy=policy))
        out = []
        for batch in (1, 4, 8):
            ids = torch.zeros(batch, 1024, dtype=torch.long)
            draft = planner.draft([{"input_ids": ids, "labels": ids}])
            out.append(planner.finish(draft, planner.decide(draft)).decisions.head_chunks)
        return out

    assert decided(None) == [1, 2, 4]
    assert decided({"head_chunks": 3}) == [3, 3, 3]


@pytest.mark.parametrize(("policy", "num_chunks"), [(None, 16), ({"head_chunks": 4}, 4)])
def test_measuring_cuts_the_logits_as_the_plan_does(
    policy: dict[str, Any] | None, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it cannot need more memory than a step."""
    monkeypatch.setattr("slidedp.compiler.solver.defaults.WHOLE_LOGITS_BYTES", 2**20)
    monkeypatch.setattr("slidedp.compiler.solver.defaults.HEAD_ROWS", (64, 16))
    largest: list[int] = []
    plain_epilogue = StageRunner.epilogue

    def watched(self: StageRunner, *args: Any) -> Any:
        with LiveBytes() as alive:
            result = plain_epilogue(self, *args)
        largest.append(alive.largest)
        return result

    monkeypatch.setattr(StageRunner, "epilogue", watched)
    batch = big_batch()
    with slidedp.compile(big("llama"), "cpu", example=batch, measure=True, policy=policy, cache_dir="") as plan:
        measured = len(largest)
        assert plan.run(batch).loss > 0
    assert len(largest) > measured > 0
    assert set(largest) == {1024 // num_chunks * 4096 * 4}


def test_costs_of_other_head_chunks_are_not_taken_from_the_cache(tmp_path: Path) -> None:
    for num_chunks in (1, 2, 2):
        policy = {"head_chunks": num_chunks}
        slidedp.compile(PlainGPT(), "cpu", example=lm_batch(), measure="cached", policy=policy, cache_dir=tmp_path).close()
    assert len(list(tmp_path.glob("stages-*.yaml"))) == 2


def test_it_is_part_of_the_plan_file(tmp_path: Path) -> None:
    before, after = on_paper(4096), on_paper(4096, policy=parse_fixes(["head_chunks=8"]))
    after.dump(tmp_path / "plan.yaml")
    loaded = PlanFile.load(tmp_path / "plan.yaml")
    assert loaded == PlanFile.parse(after.to_yaml())
    assert loaded.layers.head == after.layers.head
    assert loaded.policy()["head_chunks"] == 8
    assert "head_chunks  2 -> 8" in str(slidedp.diff(before, tmp_path / "plan.yaml"))
    assert before.predictions.hbm_bytes > loaded.predictions.hbm_bytes
    assert "head_chunks 8" in summary(loaded)


def test_pinning_what_cannot_be_says_why() -> None:
    with pytest.raises(ValueError, match=r"head_chunks=2: the logits of Headed cannot be made in chunks, since .* read 2 times"):
        slidedp.compile(Headed(z_loss), "cpu", loss_fn=summed, policy={"head_chunks": 2}, example=lm_batch())
