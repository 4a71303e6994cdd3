"""Clipping by the norm of all gradients, and steps that are left out because something in them is not finite."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import clipping_cases
import pytest
import torch
from clipping_cases import Fused, fused_gpt
from delays import each_kind_slow
from rank_cases import model as gpt_without_key_biases
from test_bitwise import CASES, OPTIMIZER, loss_of_case
from tiny_models import PlainGPT, lm_batch
from torch import nn
from training import assert_same_bits, assert_same_tensors, loss_of_output, norm_wise, state_of, train_plainly, train_planned

import slidedp
from slidedp.compiler.ops import OpKind
from slidedp.executor.machine.step import NonFiniteLoss
from slidedp.executor.optim.clipping import Clipping, NonFiniteNorm
from slidedp.executor.shared.segment import SharedSegment
from slidedp.executor.shared.words import Words, WordsLayout

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _whole_fuse():
    yield
    Fused.reset()


@pytest.mark.parametrize(("name", "max_norm"), [("gpt", 1e-3), ("gpt", 1.0), ("gpt", math.inf), ("qwen3_moe-none", 1.0)])
def test_equals_torch_bit_for_bit(name, max_norm):
    """Losses, norms, weights and moments of clip_grad_norm_ and torch.optim.AdamW: tied weights, experts without a gradient."""
    case = CASES[name]
    model, batches = case.model(), [case.batch(seed) for seed in range(1, 4)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_case(case), max_grad_norm=max_norm)
    got = train_planned(model, batches, OPTIMIZER, loss_fn=case.loss_fn, update_kernel="torch", max_grad_norm=max_norm)
    assert got.norms == want.norms
    assert_same_bits(got, want)
    assert (min(want.norms) > max_norm) is math.isfinite(max_norm), "all steps are clipped, or none is"


@pytest.mark.parametrize("policy", [None, {"update": "speculative"}], ids=["deferred", "speculative"])
def test_a_norm_of_zero(policy):
    """Gradients of exactly zero: the factor is 1, and moments and weight decay go on as torch's."""
    gpt = fused_gpt()
    Fused.set("0 backward")
    batches = [lm_batch(seed=i) for i in range(2)]
    for p in gpt.parameters():
        p.requires_grad_(False)
    for p in gpt.blocks[0].parameters():  # all that is trained lies behind the fuse
        p.requires_grad_(True)
    want = train_plainly(gpt, batches, OPTIMIZER, loss_of_output, max_grad_norm=1.0)
    got = train_planned(gpt, batches, OPTIMIZER, update_kernel="torch", max_grad_norm=1.0, policy=policy)
    assert got.norms == want.norms == [0.0, 0.0]
    assert_same_bits(got, want)


def test_sums_of_squares_are_added_one_after_the_other():
    """With the bits of a loop on every Python; what `sum` carries along from Python 3.12 on would make the last bit another."""
    layout = WordsLayout(num_words=1, world_size=4, num_params=0)
    segment = SharedSegment("control", layout.nbytes)
    states = [SimpleNamespace(words=Words(segment, layout, rank), groups={}) for rank in range(4)]
    ranks = [Clipping(nn.Linear(1, 1), state, None, skip=False) for state in states]
    shards = [torch.tensor([x], dtype=torch.float64) for x in (2.0**27, 1.0, 1.0, 1.0)]
    ranks[0].post(shards, step=1)
    assert states[0].words.norms(1)[0] == 2.0**54
    between = 1 + 2.0**-24  # two FP32 numbers: rounds to 1
    for state, square in zip(states, (between**2, *[2.0**-53] * 3), strict=True):
        state.words.post_norm(2, square)
    assert [clipping.total(2).item() for clipping in ranks] == [1.0] * 4


def test_native_kernel_agrees_norm_wise():
    """From equal gradients, clipped by a factor of about a thousand; and at a factor of 1 the bits of no clipping at all."""
    model, batches = gpt_without_key_biases(width=32), [lm_batch(seed=1)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output, max_grad_norm=1e-3)
    got = train_planned(model, batches, OPTIMIZER, update_kernel="native", max_grad_norm=1e-3)
    for part in ("exp_avg", "exp_avg_sq"):
        assert all(norm_wise(getattr(got, part)[n], t) < 1e-6 for n, t in getattr(want, part).items())
    batches = [lm_batch(seed=i) for i in range(3)]
    plain, unclipped = (natively(model, batches, **options) for options in ({}, {"max_grad_norm": math.inf}))
    assert unclipped == plain


def natively(model, batches, options=None, **compile_options):
    """Digest of training with updates in the native queue, which `train_planned` would keep out."""
    with slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, solver="rule", **compile_options) as plan:
        plan._options = replace(plan._options, **(options or {}))
        return digest_of(plan, batches)


def digest_of(plan, batches):
    results = [plan.run(b) for b in batches]
    done = state_of(plan)
    done.losses = [r.loss for r in results]
    return done.digest()


def test_the_queue_and_python_clip_alike():
    """The native queue reads the factor for itself; without it, Python passes it on. Whatever the chunks."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(3)]
    digests = {natively(model, batches, max_grad_norm=0.05, policy={"chunks": 2}),
               natively(model, batches, {"native_queue": False}, max_grad_norm=0.05, policy={"return_chunks": 3, "window": 1})}
    assert len(digests) == 1
    assert digests != {natively(model, batches)}


# ---- what is not finite ----


def run_with_a_bad_step(plan, bad):
    """The results of two good steps, a bad one, which must leave no trace, and another good one."""
    results = [plan.run(lm_batch(seed=i)) for i in range(2)]
    before, steps = state_of(plan), dict(plan._machine.adam.steps)
    Fused.set(bad)

    def bad_step():
        results.append(plan.run(lm_batch(seed=2)))
        assert results[-1].skipped
        Fused.reset()
        return state_of(plan)

    with pytest.warns(UserWarning, match="step 3: a gradient or the loss is not finite"):  # by `run`, or what comes next
        after = bad_step()
    for part in ("params", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(after, part), getattr(before, part), part)
    assert plan._machine.adam.steps == steps
    results.append(plan.run(lm_batch(seed=3)))
    return results


@pytest.mark.parametrize(("bad", "policy"), [("inf backward", {}), ("nan backward", {"state": "hbm"}), ("nan forward", {})])
def test_a_step_that_is_not_finite_is_left_out(bad, policy):
    """Only gradients of the first layers, or the loss itself: as if the step had not been, bit for bit, and counted."""
    gpt = fused_gpt()
    want = train_plainly(gpt, [lm_batch(seed=i) for i in (0, 1, 3)], OPTIMIZER, loss_of_output, max_grad_norm=0.5)
    with slidedp.compile(copy.deepcopy(gpt), "cpu", optimizer=OPTIMIZER, policy=policy, update_kernel="torch",
                         max_grad_norm=0.5, solver="rule") as plan:
        results = run_with_a_bad_step(plan, bad)
        assert [r.skipped for r in results] == [False, False, True, False]
        assert not math.isfinite(results[2].grad_norm)
        assert math.isfinite(results[2].loss) is (bad != "nan forward")
        assert [r.grad_norm for r in results if not r.skipped] == want.norms
        assert plan.counters()["skipped_steps"] == 1
        got = state_of(plan)
    for part in ("params", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(got, part), getattr(want, part), part)


def test_native_updates_are_left_out_too_and_warned_of_once_a_run():
    """Three bad steps in a row are one warning; another after a good step is a second one. Without clipping: skip_nonfinite."""
    gpt = fused_gpt()
    with slidedp.compile(gpt, "cpu", optimizer=OPTIMIZER, skip_nonfinite=True) as plan:
        plan.run(lm_batch(seed=0))
        before = state_of(plan)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for bad in (True, True, True, False, True):
                Fused.set("inf backward" if bad else "")
                result = plan.run(lm_batch(seed=1))
                assert result.skipped is bad
                if bad and plan.counters()["skipped_steps"] == 3:
                    assert_same_tensors(state_of(plan).params, before.params, "params")
            plan.synchronize()
        Fused.reset()
        assert plan.counters()["skipped_steps"] == 4
    assert [str(w.message).partition(":")[0] for w in caught if "not finite" in str(w.message)] == ["step 2", "step 6"]


def test_without_skipping_it_is_an_error():
    """The norm says so before any update: the weights are those of the step before. A bad loss changes nothing and may go on."""
    gpt = fused_gpt()
    plan = slidedp.compile(gpt, "cpu", optimizer=OPTIMIZER, max_grad_norm=1.0, skip_nonfinite=False)
    plan.run(lm_batch(seed=0))
    before = state_of(plan)
    Fused.set("nan forward")
    with pytest.raises(NonFiniteLoss):
        plan.run(lm_batch(seed=1))
    assert_same_tensors(state_of(plan).params, before.params, "params")
    Fused.set("inf backward")
    with pytest.raises(NonFiniteNorm, match="nothing has been updated"):
        print(plan.run(lm_batch(seed=1)).grad_norm)
    Fused.reset()
    plan.close()
    assert_same_tensors(dict(plan._model.named_parameters()), before.params, "params")


def test_resume_after_a_step_that_was_left_out(tmp_path):
    gpt = fused_gpt()

    def compiled():
        return slidedp.compile(copy.deepcopy(gpt), "cpu", optimizer=OPTIMIZER, update_kernel="torch", max_grad_norm=0.5)

    with compiled() as plan:
        run_with_a_bad_step(plan, "inf backward")
        plan.save(tmp_path)
        plan.run(lm_batch(seed=4))
        want = state_of(plan)
    with compiled() as plan:
        assert plan.resume(tmp_path).step == 4, "a step that was left out has taken its batch"
        plan.run(lm_batch(seed=4))
        got = state_of(plan)
    for part in ("params", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(got, part), getattr(want, part), part)


# ---- where and when ----


POLICIES = [{"window": 2, "chunks": 3, "source": "cast", "staging_slots": 2}, {"state": "hbm", "chunks": 2},
            {"layers": {"L01": {"state": "hbm"}, "shared0": {"weights": "hold"}}, "return_chunks": 2, "grad_slots": 1}]


def test_state_in_hbm_and_delays_change_no_bit():
    """With torch's arithmetic everywhere; every kind of op is the slow one once, and released slots are filled with NaN."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(3)]
    want = natively(model, batches, update_kernel="torch", max_grad_norm=0.05)
    for policy in POLICIES:
        with slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, solver="rule", policy=policy, max_grad_norm=0.05,
                             update_kernel="torch") as plan:
            got = each_kind_slow(plan, batches[0], lambda plan: digest_of(plan, batches))
        assert OpKind.GRAD_NORM in got
        assert {kind for kind, digest in got.items() if digest != want} == set(), policy


def test_the_fused_update_in_hbm_clips():
    model, batches = gpt_without_key_biases(width=32), [lm_batch(seed=i) for i in range(2)]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output, max_grad_norm=1e-3)
    with slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, policy={"state": "hbm"},
                         max_grad_norm=1e-3, solver="rule") as plan:
        norms = [plan.run(b).grad_norm for b in batches]
        got = state_of(plan)
    assert norms == pytest.approx(want.norms, rel=1e-5)
    assert all(norm_wise(got.exp_avg[n], t) < 1e-5 for n, t in want.exp_avg.items())


def test_a_plan_says_when_it_updates(tmp_path):
    """In its file, its diff, its ops, and the simulated step; a plan that updates in backward cannot be asked to clip."""
    paper = {update: slidedp.plan_on_paper(PlainGPT(), "cpu", batch=2, seq=10, ranks=1, solver="rule", policy={"update": update})
             for update in ("in_backward", "deferred")}
    for update, plan in paper.items():
        plan.dump(tmp_path / f"{update}.yaml")
        assert slidedp.load_plan(tmp_path / f"{update}.yaml").decisions == plan.decisions
    assert "update" not in (tmp_path / "in_backward.yaml").read_text()
    assert "update  in_backward -> deferred" in str(slidedp.diff(paper["in_backward"], paper["deferred"]))
    with pytest.raises(ValueError, match="update: deferred"):
        slidedp.compile(PlainGPT(), "cpu", policy=tmp_path / "in_backward.yaml", max_grad_norm=1.0)
    with slidedp.compile(PlainGPT(), "cpu", policy=tmp_path / "deferred.yaml", max_grad_norm=1.0, example=lm_batch()) as plan:
        spans = {s.op: s for s in plan.simulate().spans}
        assert "grad_norm.L01" in plan.ops
        assert min(s.start_us for name, s in spans.items() if name.startswith("cpu_update")) >= spans["clip"].end_us


def test_several_ranks(run_ranks):
    """Two ranks: torch's norm, weights and moments within the contract's bounds; the same bits on both ranks and every route;
    a step with a bad gradient on one rank is left out on both; and ranks that are asked for different things refuse.
    """
    zero, one = (r.value for r in run_ranks(clipping_cases.two_ranks, 2, timeout=150))
    assert zero == one
    assert len(set(zero["digests"])) == 1
    assert "max_grad_norm" in zero["refused"]
    assert zero["skipped"] == [False, True, False]
    worst = zero["worst"]
    assert worst["norms"] < 1e-5
    assert worst["moments"] < 1e-5
    assert worst["weight_change"] < 1e-3
