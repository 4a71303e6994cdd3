"""Several micro-batches a step: one pass over the layers, the sums and the bits of plain PyTorch's accumulation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delays import Delays
from tiny_models import PlainGPT, family, lm_batch
from torch import Tensor, nn
from training import Trained, assert_same_bits, by_parameter, log_gradients, names_of, norm_wise, state_of

import slidedp
from slidedp.batch import BatchError
from slidedp.compiler.decisions import Boundary
from slidedp.compiler.ops import OpKind
from slidedp.executor.options import MachineOptions

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]
OPTIMIZER = slidedp.AdamW(lr=1e-2)
Batch = dict[str, Tensor]


def untied(seed: int = 0, **changes: Any) -> nn.Module:
    return family("llama", seed, num_hidden_layers=3, **changes)


def valid(batch: Batch) -> int:
    """Labels that the shifted loss of a causal language model counts."""
    return int((batch["labels"][:, 1:] != -100).sum())


def with_tokens(num: int, seed: int, batch: int = 2, seq: int = 12) -> Batch:
    """A batch of which `num` labels count."""
    out = lm_batch(seed=seed, batch=batch, seq=seq)
    flat = out["labels"][:, 1:].reshape(-1)
    flat[num:] = -100
    out["labels"][:, 1:] = flat.view(batch, seq - 1)
    assert valid(out) == num
    return out


def accumulate_plainly(model: nn.Module, steps: list[list[Batch]], max_grad_norm: float | None = None) -> Trained:
    """What everybody writes: backward for each micro-batch, its mean weighted by its share of the step's tokens."""
    model = copy.deepcopy(model)
    name, params = names_of(model), list(model.parameters())
    groups = [{"params": [p for p in params if OPTIMIZER.decays(name[id(p)]) is decays],
               "weight_decay": OPTIMIZER.weight_decay * decays} for decays in (True, False)]
    adam = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses, grads, norms = [], [], []
    for batches in steps:
        adam.zero_grad(set_to_none=True)
        total, loss = sum(map(valid, batches)), 0.0
        for batch in batches:
            if valid(batch):
                mean = model(**batch).loss
                (mean * (valid(batch) / total)).backward()
                loss += mean.item() * (valid(batch) / total)
        grads.append({name[id(p)]: p.grad.clone() for p in params if p.grad is not None})
        norms += [] if max_grad_norm is None else [nn.utils.clip_grad_norm_(params, max_grad_norm).item()]
        adam.step()
        losses.append(loss)
    state = {name[id(p)]: adam.state[p] for p in params}
    return Trained(losses, {n: p.detach() for n, p in model.named_parameters()},
                   {n: s["exp_avg"] for n, s in state.items()}, {n: s["exp_avg_sq"] for n, s in state.items()}, grads, norms)


def accumulate_planned(model: nn.Module, steps: list[Any], options: MachineOptions | None = None, **how: Any) -> Trained:
    """The same through a plan; a step is a list of micro-batches, or a batch."""
    settings = {"optimizer": OPTIMIZER, "update_kernel": "torch", **how}
    plan = slidedp.compile(copy.deepcopy(model), "cpu", **settings)
    if options is not None:
        plan._options = options
    with plan:
        plan._start(steps[0])
        logged = log_gradients(plan)
        results = [plan.run(step) for step in steps]
        losses = [r.loss for r in results]
        done = state_of(plan)
        grads = [by_parameter(plan, flat) for flat in logged]
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, grads, [r.grad_norm for r in results])


def assert_close(got: Trained, want: Trained, bound: float = 1e-6) -> None:
    """Losses and every step's gradients."""
    assert got.losses == pytest.approx(want.losses, rel=bound)
    for mine, theirs in zip(got.grads, want.grads, strict=True):
        for name, grad in theirs.items():
            assert norm_wise(mine[name], grad) <= bound, name


SHAPES = [
    [lm_batch(seed=1), lm_batch("padded", seed=2, batch=3), lm_batch(seed=3, seq=7)],  # a mask in one, other lengths
    [lm_batch(seed=4), lm_batch(seed=5)],
    [lm_batch("padded", seed=6, batch=1)],
    [lm_batch(seed=7), lm_batch("padded", seed=8, batch=3), lm_batch(seed=9, seq=7)],
]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_bits_of_plain_accumulation(name):
    """Micro-batches of several shapes and in several numbers; experts without a token in some; updates that overlap."""
    changes = {"tie_word_embeddings": False} if name == "gemma3" else {}
    model = family(name, **changes)
    assert_same_bits(accumulate_planned(model, SHAPES), accumulate_plainly(model, SHAPES))


def test_bits_of_a_plain_stack_whose_loss_is_a_sum():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    batches = [{"x": torch.randn(n, 8), "y": torch.randn(n, 8)} for n in (4, 1, 3)]
    plain = copy.deepcopy(model)
    for batch in batches:
        (F.mse_loss(plain(batch["x"]), batch["y"], reduction="sum") / 64).backward()

    def loss_fn(out, batch):
        return F.mse_loss(out, batch["y"], reduction="sum"), batch["y"].numel()

    got = accumulate_planned(model, [batches], loss_fn=loss_fn)
    for name, p in plain.named_parameters():
        assert torch.equal(got.grads[0][name], p.grad), name


def test_every_choice_gives_the_bits_of_recompute():
    """Dropout too: each micro-batch draws its own, and its recompute draws the same."""
    model = PlainGPT(width=16, layers=3, dropout=0.2)
    steps = [[lm_batch(seed=3 * t + i, batch=1 + i) for i in range(3)] for t in range(2)]

    def run(policy: dict[str, Any]) -> Trained:
        torch.manual_seed(1)
        return accumulate_planned(model, steps, policy=policy)

    want = run({"act": "recompute", "window": 2})
    for policy in ({"act": "retain", "chunks": 2}, {"act": "offload", "act_slots": 1, "boundary": "host", "window": 1},
                   {"act": "selective", "boundary": "host", "source": "cast"}):  # fmt: skip
        assert run(policy).digest() == want.digest(), policy
    resident = run({"state": "hbm"})
    assert resident.losses == pytest.approx(want.losses, rel=1e-6)
    for name, p in want.params.items():
        assert torch.allclose(resident.params[name], p, rtol=0, atol=1e-6), name


def test_four_small_batches_are_one_large_one():
    model = untied()
    whole = lm_batch(seed=1, batch=8)
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in range(0, 8, 2)]
    assert_close(accumulate_planned(model, [parts]), accumulate_planned(model, [whole]))


def test_tokens_count_wherever_they_are():
    """10, 1000 and 0 valid tokens: the mean over all 1010, and nothing from the micro-batch without any."""
    model = untied(max_position_embeddings=512)
    parts = [with_tokens(10, 1, 2, 256), with_tokens(1000, 2, 4, 256), with_tokens(0, 3, 2, 256)]
    whole = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    got = accumulate_planned(model, [parts])
    assert_close(got, accumulate_planned(model, [whole]))
    assert_same_bits(got, accumulate_plainly(model, [parts]))


def test_tied_weights_sum_over_both_uses_and_all_micro_batches():
    model = family("qwen3", num_hidden_layers=2)
    steps = [[lm_batch(seed=i) for i in range(3)]]
    assert_close(accumulate_planned(model, steps), accumulate_plainly(model, steps))


@pytest.mark.parametrize("limit", [1e-3, float("inf")])
def test_clipping_is_by_the_norm_of_the_sum(limit):
    model, steps = untied(), SHAPES[:2]
    got, want = accumulate_planned(model, steps, max_grad_norm=limit), accumulate_plainly(model, steps, limit)
    assert got.norms == want.norms
    assert_same_bits(got, want)


def run_to_its_end(plan, batches):
    """One of the two calls warns of a step that is left out: whichever finds the norm there."""
    result = plan.run(batches)
    plan.synchronize()
    return result


def test_a_micro_batch_that_is_not_finite_leaves_the_step_out():
    model = PlainGPT(width=16, layers=2)
    batches = [lm_batch(seed=i) for i in range(2)]
    with slidedp.compile(model, "cpu", skip_nonfinite=True, optimizer=OPTIMIZER) as plan:
        plan.run(batches)
        before = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
        with torch.no_grad():
            bad = plan.model.tok.weight[5].clone()
            plan.model.tok.weight[5] = float("nan")
        batches[1]["input_ids"][:] = 6
        batches[0]["input_ids"][0, 0] = 5
        with pytest.warns(UserWarning, match="left out as a whole"):
            assert run_to_its_end(plan, batches).skipped
        with torch.no_grad():
            plan.model.tok.weight[5] = bad
        assert all(torch.equal(p, before[n]) for n, p in plan.model.named_parameters())


def test_bf16_gradients_are_rounded_once():
    """The sum of many small gradients and a large one, in BF16 returned, is that of the FP32 sum."""
    model, steps = untied(), [[lm_batch(seed=i) for i in range(7)]]
    got = accumulate_planned(model, steps, grad_dtype=torch.bfloat16)
    want = accumulate_plainly(model, steps).grads[0]
    for name, grad in got.grads[0].items():
        assert torch.equal(grad, want[name].bfloat16()), name


def test_layers_are_delivered_once_for_all_micro_batches():
    counts = []
    for k in (1, 4):
        with slidedp.compile(untied(), "cpu", optimizer=OPTIMIZER, policy={"window": 1}) as plan:
            plan.run([lm_batch(seed=i) for i in range(k)])
            plan.synchronize()
            counts.append(plan.counters())
            assert sum(op.kind is OpKind.FORWARD for op in plan._spec.graph) == 3 * k
    assert counts[0] == counts[1]


def test_delays_change_no_bit():
    """Any kind of op always late, and what is free filled with NaN."""
    model, steps = PlainGPT(width=16, layers=3), [[lm_batch(seed=2 * t + i) for i in range(2)] for t in range(2)]
    policy = {"act": "offload", "boundary": "host", "act_slots": 1, "window": 1}
    options = {"policy": policy, "grad_dtype": torch.bfloat16}
    want = accumulate_planned(model, steps, **options).digest()
    with slidedp.compile(copy.deepcopy(model), "cpu", example=steps[0], **options) as plan:
        kinds = {op.name: op.kind for op in plan._spec.graph}
    for turn in range(len(set(kinds.values()))):
        delays = Delays(kinds, turn, seed=turn)
        late = accumulate_planned(model, steps, MachineOptions("torch", delay=delays, poison=True), **options)
        assert late.digest() == want, delays.slow


def test_steps_of_any_number_of_micro_batches_after_one_of_a_single_batch():
    """What more of them need, on the device and on the host, is there by then; equal sequences share what was made."""
    model = PlainGPT(width=16, layers=3)
    policy = {"act": "offload", "boundary": "host"}
    steps = [lm_batch(seed=0), [lm_batch(seed=1, batch=4), lm_batch(seed=2)], [lm_batch(seed=3)] * 3, lm_batch(seed=4),
             [lm_batch(seed=5, seq=16), lm_batch(seed=6, batch=1), lm_batch(seed=7)]]
    got = accumulate_planned(model, steps, policy=policy, grad_dtype=torch.bfloat16)
    want = accumulate_planned(model, steps, policy={"act": "recompute"}, grad_dtype=torch.bfloat16)
    assert got.digest() == want.digest()
    with slidedp.compile(copy.deepcopy(model), "cpu", example=steps[0]) as plan:
        for _ in range(2):
            for step in (steps[1], steps[1][::-1], steps[2]):
                plan.run(step)
        assert len(plan._planner.known) == 4
        assert len(plan._machine.interpreters) == 2  # of two and of three micro-batches


def test_many_micro_batches_after_one_put_their_boundaries_on_the_host():
    model, steps = PlainGPT(width=16, layers=8), [lm_batch(batch=4), [lm_batch(seed=i, batch=4) for i in range(6)]]
    with slidedp.compile(copy.deepcopy(model), "cpu", example=steps[1], policy={"act": "recompute"}) as plan:
        budget = plan.memory().hbm_bytes - plan.memory().hbm["boundary activations"] // 2
    got = accumulate_planned(model, steps, hbm_budget=budget)
    assert got.digest() == accumulate_planned(model, steps).digest()
    with slidedp.compile(copy.deepcopy(model), "cpu", example=steps[0], hbm_budget=budget) as plan:
        plan.run(steps[1])
        assert plan.memory().hbm_bytes <= budget
        assert plan.counters()["act_offload"]
        away = [name for name, d in plan.decisions.groups.items() if d.boundary is Boundary.HOST]
        assert away == [f"L{i:02}" for i in range(len(away))], "the first layers'"
        assert 0 < len(away) < 8, "as many as must"
        with pytest.raises(ValueError, match="30 micro-batches of 120 x 10 do not fit"):
            plan.run([lm_batch(batch=4)] * 30)


def test_evaluation_takes_a_sequence():
    with slidedp.compile(untied(), "cpu", optimizer=OPTIMIZER) as plan:
        parts = SHAPES[0]
        losses = [plan.evaluate(part) for part in parts]
        mean = sum(loss * valid(part) for loss, part in zip(losses, parts, strict=True)) / sum(map(valid, parts))
        assert plan.evaluate(parts) == pytest.approx(mean, rel=1e-6)


def test_what_is_no_step_is_refused_by_name_and_changes_nothing():
    with slidedp.compile(untied(), "cpu", optimizer=OPTIMIZER) as plan:
        first = plan.run([lm_batch(seed=0), lm_batch(seed=1)])
        wrong = lm_batch(seed=1)
        wrong["input_ids"][0, 0] = 10_000
        for batches, words in (([], "empty"), ([lm_batch(), "x"], "micro-batch 1 of 2: a batch is a mapping"), ("x", "not str"),
                               ([lm_batch(), {}], "micro-batch 1 of 2: the batch is empty"),
                               ([lm_batch(), wrong], "outside the 128 rows"),
                               ([with_tokens(0, 1), with_tokens(0, 2)], "no valid token")):  # fmt: skip
            with pytest.raises(BatchError, match=words):
                plan.run(batches)
        assert plan.run([lm_batch(seed=0), lm_batch(seed=1)]).step == first.step + 1
