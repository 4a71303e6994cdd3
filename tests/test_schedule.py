"""Learning-rate schedules: torch's and transformers' own schedulers, on `plan.optimizer`."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import PlainGPT, lm_batch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

import slidedp

pytestmark = pytest.mark.cpu

BATCHES = [lm_batch(seed=i) for i in range(6)]


def cosine(optimizer):
    return CosineAnnealingLR(optimizer, T_max=len(BATCHES))


def warmup(optimizer):
    from transformers import get_scheduler

    return get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=len(BATCHES))


def wsd(optimizer):
    from transformers import get_scheduler

    return get_scheduler("warmup_stable_decay", optimizer, num_warmup_steps=1, num_training_steps=len(BATCHES),
                         scheduler_specific_kwargs={"num_decay_steps": 3})


@pytest.mark.parametrize("make", [cosine, warmup, wsd])
def test_bits_of_plain_pytorch_under_a_schedule(make):
    """Updates of a step overlap the next one's forward, whose rate is another already."""
    torch.set_num_threads(1)  # see executor/optim/adam.py on the bits of torch's update
    model = PlainGPT()
    plain = copy.deepcopy(model)
    decayed = [p for n, p in plain.named_parameters() if "bias" not in n and "norm" not in n]
    rest = [p for n, p in plain.named_parameters() if "bias" in n or "norm" in n]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2,
                             betas=(0.9, 0.95), foreach=False)
    scheduler, want, rates = make(adam), [], []
    for batch in BATCHES:
        loss = plain(**batch)
        adam.zero_grad()
        loss.backward()
        rates.append(adam.param_groups[0]["lr"])
        adam.step()
        scheduler.step()
        want.append(loss.item())
    with slidedp.compile(model, "cpu", optimizer=slidedp.AdamW(lr=1e-2), update_kernel="torch", policy={"chunks": 2}) as plan:
        scheduler, results = make(plan.optimizer), []
        for batch in BATCHES:
            results.append(plan.run(batch))
            scheduler.step()
        assert [r.lr for r in results] == rates
        assert [r.loss for r in results] == want
        assert [n for n, p in plan.model.named_parameters() if not torch.equal(p, plain.get_parameter(n))] == []


def test_a_rate_that_is_none_is_refused_and_nothing_is_lost():
    with slidedp.compile(PlainGPT(), "cpu", optimizer=slidedp.AdamW(lr=1e-2)) as plan:
        first = plan.run(lm_batch()).loss
        plan.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ValueError, match="learning rate is nan"):
            plan.run(lm_batch())
        scheduler = ReduceLROnPlateau(plan.optimizer, factor=0.5, patience=0)
        plan.optimizer.param_groups[0]["lr"] = 1e-3
        for _ in range(2):
            scheduler.step(first)
        assert plan.run(lm_batch()).lr == 5e-4


def test_a_schedule_goes_on_after_a_resume(tmp_path):
    with slidedp.compile(PlainGPT(), "cpu", optimizer=slidedp.AdamW(lr=1e-2), example=lm_batch()) as plan:
        scheduler, rates = cosine(plan.optimizer), []
        for i, batch in enumerate(BATCHES):
            rates.append(plan.run(batch).lr)
            scheduler.step()
            if i == 2:
                plan.save(tmp_path, extra={"scheduler": scheduler.state_dict()})
    with slidedp.compile(PlainGPT(), "cpu", optimizer=slidedp.AdamW(lr=1e-2), example=lm_batch()) as plan:
        scheduler, got = cosine(plan.optimizer), []  # a new scheduler sets its first rate, so it comes before the resume
        scheduler.load_state_dict(plan.resume(tmp_path).extra["scheduler"])
        for batch in BATCHES[3:]:
            got.append(plan.run(batch).lr)
            scheduler.step()
    assert got == rates[3:]
