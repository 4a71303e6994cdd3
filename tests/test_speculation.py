"""Updates that are computed before the norm is known, and taken, done again or dropped when it is."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace
from typing import ClassVar

import clipping_cases
import pytest
import torch
from clipping_cases import Fused, fused_gpt
from delays import each_kind_slow
from failure_cases import Optional
from test_bitwise import OPTIMIZER
from test_clipping import digest_of, natively, run_with_a_bad_step
from tiny_models import GPTBlock, PlainGPT, lm_batch
from training import assert_same_bits, assert_same_tensors, loss_of_output, state_of, train_plainly, train_planned

import slidedp
from slidedp.compiler.ops import OpKind
from slidedp.executor.optim.clipping import NonFiniteNorm

pytestmark = pytest.mark.cpu

SPECULATIVE = {"update": "speculative"}
LATE_LAYERS = {"update": "deferred", "layers": {"L02": SPECULATIVE, "epilogue": SPECULATIVE}}
SOME = {"layers": {"L01": {"update": "deferred"}, "L02": {"source": "cast"}}, "update": "speculative", "chunks": 3, "window": 1}


@pytest.fixture(autouse=True)
def _whole_fuse():
    yield
    Fused.reset()


@pytest.mark.parametrize(("clipped", "policy"), [
    ("always", SOME), ("never", SPECULATIVE), ("in turns", SPECULATIVE), ("in turns", LATE_LAYERS), ("in turns", SOME)])
def test_equals_torch_bit_for_bit(clipped, policy):
    """Losses, norms, every step's gradients, weights and moments of clip_grad_norm_ and AdamW: whichever side the state is on."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(6)]
    norms = train_plainly(model, batches, OPTIMIZER, loss_of_output, max_grad_norm=math.inf).norms
    limit = {"always": 1e-3, "never": math.inf, "in turns": sorted(norms)[3]}[clipped]
    want = train_plainly(model, batches, OPTIMIZER, loss_of_output, max_grad_norm=limit)
    seen = []
    got = train_planned(model, batches, OPTIMIZER, update_kernel="torch", max_grad_norm=limit, policy=policy,
                        after=lambda plan: seen.append(plan.counters()))
    assert got.norms == want.norms
    assert_same_bits(got, want)
    num_clipped = sum(norm > limit for norm in want.norms)
    assert (num_clipped == 6) is (clipped == "always")
    assert (num_clipped == 0) is (clipped == "never")
    last = seen[-1]
    assert last.get("clipped_steps", 0) in (num_clipped, num_clipped - 1), "the last step's norm may not be known yet"
    assert ("redone_update" in last) is (clipped != "never")


class GatedBlock(GPTBlock):
    """A block with a part that takes turns in being used, and in having a gradient."""

    in_use: ClassVar[list[bool]] = [True]

    def forward(self, x):
        out = super().forward(x)
        return out + self.extra(out) if self.in_use[0] else out


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_parameters_without_a_gradient_keep_what_they_have(kernel):
    """Taken with the others' candidate, or left alone in an update that is done again: weights, moments and counts."""
    model, batches, turns = PlainGPT(), [lm_batch(seed=i) for i in range(6)], (True, False, False, True, False, True)
    model.blocks[1].extra = torch.nn.Linear(32, 32)
    model.blocks[1].__class__ = GatedBlock

    def in_turns(run):
        """`run` with the gate as `turns` says: it is called with what to call after each step."""
        turn = iter((*turns[1:], True))
        GatedBlock.in_use[0] = turns[0]

        def after(plan):
            if isinstance(plan, slidedp.Plan):
                plan.synchronize()  # a recompute looks at the gate too
            GatedBlock.in_use[0] = next(turn)

        return run(after)

    def plainly(limit):
        return in_turns(lambda after: train_plainly(model, batches, OPTIMIZER, loss_of_output, after, max_grad_norm=limit))

    limit = sorted(plainly(math.inf).norms)[3]

    def planned(policy):
        return in_turns(lambda after: train_planned(model, batches, OPTIMIZER, after, update_kernel=kernel, max_grad_norm=limit,
                                                    policy=policy))

    want, got = plainly(limit) if kernel == "torch" else planned({"update": "deferred"}), planned(SPECULATIVE)
    assert got.norms == want.norms
    for part in ("params", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(got, part), getattr(want, part), part)
    assert [sum("extra" in name for name in grads) for grads in plainly(limit).grads] == [2 * used for used in turns]


@pytest.mark.parametrize("kernel", ["torch", "native"])
def test_the_same_bits_as_deferred(kernel):
    """In the native queue and in Python, for any chunks, sources and choice of groups, on a GPU's element types too."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(3)]
    with slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, max_grad_norm=math.inf, solver="rule") as plan:
        limit = sorted(plan.run(b).grad_norm for b in batches)[1]
    for more in ({}, {"compute_dtype": torch.bfloat16}, {"grad_dtype": torch.bfloat16}):
        exactly = {"max_grad_norm": limit, "update_kernel": kernel, **more}
        want = natively(model, batches, policy={"update": "deferred"}, **exactly)
        for policy in (SPECULATIVE, LATE_LAYERS, SOME):
            assert natively(model, batches, policy=policy, **exactly) == want
    in_python = {"policy": SPECULATIVE, "max_grad_norm": limit, "update_kernel": kernel}
    assert natively(model, batches, {"native_queue": False}, **in_python) == natively(model, batches, **in_python)


def test_delays_change_no_bit():
    """Every kind of op is the slow one once, for updates that are taken, done again and come too late; slots hold NaN."""
    model, batches = PlainGPT(), [lm_batch(seed=i) for i in range(4)]
    exactly = {"max_grad_norm": 2.4, "update_kernel": "torch"}
    want = natively(model, batches, policy={"update": "deferred"}, **exactly)
    for policy in (SPECULATIVE, SOME | {"source": "cast", "staging_slots": 1}):
        with slidedp.compile(copy.deepcopy(model), "cpu", optimizer=OPTIMIZER, solver="rule", policy=policy, **exactly) as plan:
            got = each_kind_slow(plan, batches[0], lambda plan: digest_of(plan, batches))
        assert OpKind.SETTLE in got
        assert {kind for kind, digest in got.items() if digest != want} == set(), policy


# ---- what is not finite ----


@pytest.mark.parametrize(("bad", "kernel", "delayed"), [
    ("inf backward", "torch", False), ("nan backward", "native", False), ("nan forward", "torch", False),
    ("inf backward", "native", True)])
def test_a_step_that_is_not_finite_is_left_out(bad, kernel, delayed):
    """As if it had not been, byte for byte, though candidates of finite gradients and of others were there already."""
    gpt = fused_gpt()
    with slidedp.compile(copy.deepcopy(gpt), "cpu", optimizer=OPTIMIZER, policy=SPECULATIVE, update_kernel=kernel,
                         max_grad_norm=0.5, solver="rule") as plan:
        if delayed:
            plan._options = replace(plan._options, delay=lambda op: 2e-3 * op.startswith("cpu_update"))
        results = run_with_a_bad_step(plan, bad)
        assert [r.skipped for r in results] == [False, False, True, False]
        assert plan.counters()["skipped_steps"] == 1
        got = state_of(plan)
    if kernel == "torch":
        want = train_plainly(gpt, [lm_batch(seed=i) for i in (0, 1, 3)], OPTIMIZER, loss_of_output, max_grad_norm=0.5)
        for part in ("params", "exp_avg", "exp_avg_sq"):
            assert_same_tensors(getattr(got, part), getattr(want, part), part)


def test_without_skipping_the_model_keeps_the_weights_of_the_step_before():
    """Whichever side they are on: after an error there is nobody left to wait for."""
    for num_good in (1, 2):
        plan = slidedp.compile(fused_gpt(), "cpu", optimizer=OPTIMIZER, max_grad_norm=math.inf, skip_nonfinite=False,
                               policy=SPECULATIVE)
        for i in range(num_good):
            plan.run(lm_batch(seed=i))
        before = state_of(plan)
        Fused.set("inf backward")
        with pytest.raises(NonFiniteNorm, match="nothing has been updated"):
            print(plan.run(lm_batch(seed=7)).grad_norm)
        Fused.reset()
        plan.close()
        assert_same_tensors(dict(plan._model.named_parameters()), before.params, "params")


# ---- who looks at the state ----


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_model_is_the_state_at_every_point(num_steps, tmp_path):
    """`plan.model`, what a user writes into it, `evaluate`, a checkpoint, and what is left when the plan is closed."""
    batches = [lm_batch(seed=i) for i in range(5)]

    def compiled(**policy):
        return slidedp.compile(PlainGPT(), "cpu", optimizer=OPTIMIZER, update_kernel="torch", max_grad_norm=math.inf,
                               policy=policy)

    seen = []
    for policy in (SPECULATIVE, {"update": "deferred"}):
        torch.manual_seed(0)
        with compiled(**policy) as plan:
            for batch in batches[:num_steps]:
                plan.run(batch)
            digests = [state_of(plan).digest(), repr(plan.evaluate(batches[-1]))]
            plan.save(tmp_path / str(len(seen)))
            with torch.no_grad():
                for p in plan.model.parameters():
                    p.mul_(1.5)
            digests += [repr(plan.evaluate(batches[-1])), repr(plan.run(batches[-1]).loss), state_of(plan).digest()]
        digests.append(repr([p.double().sum().item() for p in plan._model.parameters()]))
        with compiled(**policy) as plan:
            plan.resume(tmp_path / str(len(seen)))
            digests += [repr(plan.run(batches[-1]).loss), repr(plan.run(batches[0]).loss), state_of(plan).digest()]
        seen.append(digests)
    assert seen[0] == seen[1]


def test_layers_that_come_and_go_change_sides_alone():
    """A step without the last layer makes no candidate for it: its state stays where it was, while all others' move."""
    digests = []
    for update in ("deferred", "speculative"):
        torch.manual_seed(0)
        with slidedp.compile(Optional(), "cpu", optimizer=OPTIMIZER, layers=[f"blocks.{i}" for i in range(4)],
                             update_kernel="torch", max_grad_norm=math.inf, policy={"update": update}) as plan:
            torch.manual_seed(1)
            for step in range(7):
                batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 1)}
                plan.run(batch | ({"extra": torch.ones(1)} if step in (1, 3, 4, 6) else {}))
            digests.append(state_of(plan).digest())
    assert digests[0] == digests[1]


def test_several_ranks(run_ranks):
    """Two ranks change sides alike: the bits of deferred updates on every route, while one looks alone; steps are left out on
    both; and a rank that fails leaves the other the weights of the last step that both have ended.
    """
    zero, one = (r.value for r in run_ranks(clipping_cases.two_ranks_speculate, 2, timeout=150))
    assert zero == one
    assert zero["odd"] == []
    assert zero["skipped"] == [False, False, True, False]
    assert 0 < zero["clipped"] < 4, "some steps change sides, some do not"
    assert zero["after_a_failure"] == [True, True]


def test_closing_without_a_look_keeps_the_last_weights():
    gpt = PlainGPT()
    want = train_plainly(gpt, [lm_batch(seed=i) for i in range(3)], OPTIMIZER, loss_of_output, max_grad_norm=math.inf)
    with slidedp.compile(gpt, "cpu", optimizer=OPTIMIZER, update_kernel="torch", max_grad_norm=math.inf,
                         policy=SPECULATIVE) as plan:
        for i in range(3):
            plan.run(lm_batch(seed=i))
    assert_same_tensors({n: p.detach() for n, p in gpt.named_parameters()}, want.params, "params")


def test_memory_is_what_the_plan_says():
    """Second masters, moments and shadows of the groups that speculate; frozen ones, and parts of them, have none."""
    gpt = PlainGPT()
    gpt.blocks[0].qkv.weight.requires_grad_(False)
    with slidedp.compile(gpt, "cpu", policy=SPECULATIVE, max_grad_norm=1.0, example=lm_batch(), solver="rule") as plan:
        host, planned = plan._machine.state.bytes_by_place(), plan.memory().host
        assert host["candidates"] == planned["candidates"] > 0
        graph = plan._spec.graph
        assert {op.layer for op in graph if op.kind is OpKind.SETTLE} == {g.name for g in plan._spec.layers.groups} - {"L00"}
        assert not any(op.name.startswith("settle.L00") for op in graph)
        plan.run(lm_batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.close()
