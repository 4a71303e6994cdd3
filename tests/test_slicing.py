"""How many slices a plan decides on where nobody pins them; long and packed sequences, in slices too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_accumulation import OPTIMIZER, accumulate_plainly, accumulate_planned, assert_close, untied
from test_lanes import scaled
from test_passes import tiny, uniform
from tiny_models import PlainGPT, family, lm_batch
from torch import Tensor, nn
from training import assert_same_bits

import slidedp
from slidedp.compiler.decisions import Activation, Boundary
from slidedp.compiler.errors import BudgetError
from slidedp.compiler.footprint.budgets import room_to_fill
from slidedp.compiler.footprint.memory import activation_slots, moved_bytes
from slidedp.compiler.layergraph import LayerGraph, recut
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.hardware import load_profile
from slidedp.paper import draft_on_paper, settings_on_paper
from slidedp.planning.slicing import FRAGMENTS, Slicing, choose_slices, good_plan, most_slices, plan_of, why_whole

BATCH = lm_batch(batch=16, seq=32)


pytestmark = pytest.mark.usefixtures("one_thread")


def budget_of(model: nn.Module, slices: int) -> int:
    """HBM that a small plan of BATCH in so many slices needs."""
    policy = {"slices": slices, "act": "recompute", "window": 2}
    with slidedp.compile(model, "cpu", policy=policy, example=BATCH) as plan:
        return plan.memory().hbm_bytes


# ---- to fit ----


@pytest.mark.cpu
def test_as_few_slices_as_fit_are_chosen_and_give_what_the_whole_batch_gives():
    """And the plan says why, and what explains it; later batches are cut as well, whatever their rows."""
    budget = budget_of(untied(), 4)
    with slidedp.compile(untied(), "cpu", hbm_budget=budget, example=BATCH) as plan:
        slices, file = plan.decisions.slices, plan.to_planfile()
        assert 1 < slices <= 4
        assert plan.memory().hbm_bytes <= budget
        assert f"slices    {slices}: in one piece the smallest plan needs" in str(plan)
        assert any(f"{slices} slices: in one piece" in note for note in plan.explain().notes)
        assert PlanFile.parse(file.to_yaml()).sliced == file.sliced
        plan.run(lm_batch(batch=1, seq=32))
        plan.run(BATCH)
    whole = accumulate_planned(untied(), [BATCH])
    assert_close(accumulate_planned(untied(), [BATCH], hbm_budget=budget), whole)
    with pytest.raises(BudgetError):  # half as many are too few
        slidedp.compile(untied(), "cpu", hbm_budget=budget, example=BATCH, policy={"slices": slices // 2})


def token_loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return outputs * batch["labels"].numel(), batch["labels"].numel()


@pytest.mark.cpu
def test_what_may_couple_rows_stays_whole_and_the_error_names_the_way_out():
    """With as many as it says, the same budget is enough."""
    budget = budget_of(PlainGPT(layers=3), 4)
    how: dict[str, Any] = {"hbm_budget": budget, "example": BATCH, "loss_fn": token_loss}
    with pytest.raises(BudgetError, match=r"or pin slices=(2|4) \(never chosen for this model, since a loss_fn") as refused:
        slidedp.compile(PlainGPT(layers=3), "cpu", **how)
    slices = int(str(refused.value).rpartition("slices=")[2].partition(" ")[0])
    slidedp.compile(PlainGPT(layers=3), "cpu", policy={"slices": slices}, **how).close()
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert why_whole(norm, None) == "1 normalises over the rows of a batch"
    assert why_whole(norm.eval(), None) == ""
    assert "routers" in why_whole(family("mixtral", num_hidden_layers=1, output_router_logits=True), None)
    assert why_whole(family("mixtral", num_hidden_layers=1), None) == ""


@pytest.mark.null
def test_rows_that_a_batch_can_be_cut_along():
    rows = {"x": torch.zeros(6, 2), "shared": torch.zeros(1, 3), "scalar": torch.tensor(1.0)}
    assert most_slices(rows) == 6
    assert most_slices([rows, {"x": torch.zeros(9, 2)}]) == 9
    assert most_slices({"x": torch.zeros(6, 2), "y": torch.zeros(4)}) == 1


@pytest.mark.cpu
def test_rows_of_an_embedding_are_whole_for_a_plan_in_slices_that_begins_with_one_row():
    """A batch of one row is not cut, and its rows could be split; those of the next one's slices could not."""
    policy = {"slices": 2, "rows": "split"}
    with slidedp.compile(untied(), "cpu", policy=policy, optimizer=OPTIMIZER, example=lm_batch(batch=1)) as plan:
        results = [plan.run(lm_batch(batch=n)).loss for n in (1, 3, 1)]
    steps = [[lm_batch(batch=n)] for n in (1, 3, 1)]
    assert results == pytest.approx(accumulate_plainly(untied(), steps).losses, rel=1e-5)


# ---- to be fast ----


@pytest.mark.null
def test_slices_where_what_runs_crowds_out_what_would_be_faster():
    """Layers of Qwen3-4B's shape, 128 x 512 tokens, on a host whose updates take twice as long as the GPU: state in HBM is
    worth much, and in one piece a layer's transients leave no room for it.
    """
    config = {"num_hidden_layers": 4, "vocab_size": 2048, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
              "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = family("qwen3", **config)
    hw = replace(load_profile("h200x1"), cpu_adam_gparams=0.4)
    settings = settings_on_paper(hw, 1, policy={"slices": 1}, solver="cp-sat")
    _, draft = draft_on_paper(model, settings, 128, 512)

    def cut(slices: int) -> LayerGraph:
        return recut(draft.layers, slices)

    def choose(gib: int, most: int = 128) -> Slicing:
        tight = replace(settings, policy=None, hbm_budget=gib << 30)
        found = choose_slices(draft.layers, most, draft.num_tokens, tight, cut)
        problems = [plan_of(recut(draft.layers, k), tight) for k in (1, found.slices)]
        whole_us, us = (good_plan(*problem)[1] for problem in problems if problem)
        assert found.slices == 1 or us < 0.9 * whole_us
        return found

    assert choose(16).slices > 1
    assert "shorter than in one piece" in choose(16).why
    assert choose(16, most=1) == Slicing()
    assert choose(60) == Slicing()  # there is room for all of it
    by_the_rule = replace(settings, hbm_budget=16 << 30, solver="rule")
    assert choose_slices(draft.layers, 128, draft.num_tokens, by_the_rule, cut) == Slicing()


@pytest.mark.null
@pytest.mark.parametrize(("act", "boundary"), [("offload", "hbm"), ("recompute", "host")])
def test_places_of_what_is_on_its_way_are_as_large_as_slices(act, boundary):
    """So that offloading stays possible for a large batch: what leaves is a slice's, and so is what it passes through."""
    layers = scaled(tiny(8, 1), 4096)
    decisions = uniform(layers, act=Activation(act), boundary=Boundary(boundary))
    sizes = []
    for slices in (1, 8, 32):
        slots = activation_slots(recut(layers, slices), decisions)
        sizes.append(sum(slot.count * slot.bytes for slot in slots if slot.memory != "pinned"))
        assert sum(slot.bytes for slot in slots if slot.memory == "pinned") <= 8 * moved_bytes(layers.layers[0], "act")
    whole, *cut = sizes
    num_places = 4  # two on the way out, two on the way back; of boundaries, which wait for one another, one more than slices
    for slices, size in zip((8, 32), cut, strict=True):
        places = num_places if act == "offload" else slices + 1 + 2
        assert size <= whole * places / num_places / slices * 1.2


@pytest.mark.null
def test_slices_where_what_an_allocator_loses_is_more_than_the_reserve():
    """Of a whole GPU; a budget that the user names has its own reserve, which is for what is planned."""
    layers, hw = scaled(tiny(4, 1), 2**27), load_profile("h200x1")
    settings = settings_on_paper(hw, 1, solver="cp-sat")
    reserve = hw.hbm_bytes - room_to_fill(hw, None)

    def lost(slices: int) -> float:
        return FRAGMENTS * max(s.activation_bytes for s in recut(layers, slices).each_lane[0][1:-1])

    def choose(most: int, budget: int | None = None) -> Slicing:
        tight = replace(settings, hbm_budget=budget)
        return choose_slices(layers, most, 1, tight, lambda slices: recut(layers, slices))

    found = choose(64)
    assert lost(1) > reserve
    assert lost(found.slices) <= reserve < lost(found.slices // 2)
    assert "the allocator may lose" in found.why
    assert choose(found.slices // 2) == choose(64, hw.hbm_bytes - 1) == Slicing()


# ---- long and packed sequences ----


@pytest.mark.cpu
def test_one_long_sequence_with_boundaries_on_the_host():
    """4096 tokens: the bits of plain PyTorch."""
    model = family("qwen3", num_hidden_layers=3, max_position_embeddings=4096, tie_word_embeddings=False)
    batch = lm_batch(batch=1, seq=4096)
    want = accumulate_plainly(model, [[batch]])
    policy = {"boundary": "host", "act": "recompute", "act_slots": 1, "head_chunks": 1, "state": "host"}
    assert_same_bits(accumulate_planned(model, [batch], policy=policy), want)


def packed(rows: list[list[int]]) -> dict[str, Tensor]:
    """A batch whose rows are documents of these lengths, one behind the other: their position ids begin anew."""
    batch = lm_batch(batch=len(rows), seq=sum(rows[0]))
    positions = [torch.cat([torch.arange(n) for n in row]) for row in rows]
    batch["position_ids"] = torch.stack(positions)
    for labels, ids in zip(batch["labels"], positions, strict=True):
        labels[ids == 0] = -100  # no document predicts the next one's first token
    return batch


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "policy"), [
    ("qwen3", {"slices": 3, "act": "recompute"}), ("mistral", {"slices": 2, "act": "offload", "act_slots": 1}),
    ("gemma3", {"slices": 5, "act": "recompute", "boundary": "host", "act_slots": 1}),
])
def test_packed_sequences_and_sliding_windows_in_slices(name, policy):
    """Five rows, of which one is a single document and the slices of a batch have unlike masks: as the whole batch in eager."""
    model = family(name, num_hidden_layers=4)
    batch = packed([[5, 3, 12], [20], [2, 2, 16], [7, 13], [1, 19]])
    want = accumulate_plainly(model, [[batch]])
    assert_close(accumulate_planned(model, [batch], policy=policy), want)
    assert_same_bits(accumulate_planned(model, [batch], policy={"act": "offload", "head_chunks": 1}), want)
    apart = {key: value for key, value in batch.items() if key != "position_ids"}
    assert accumulate_plainly(model, [[apart]]).losses[0] != pytest.approx(want.losses[0], rel=1e-5)  # documents do not mix
