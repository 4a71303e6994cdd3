"""Groups: a partition of the parameters by the stages that read them, and its flat layout."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from tiny_models import PlainGPT, lm_batch
from torch import nn

from slidedp.compiler.layergraph import ALIGN, Group
from slidedp.compiler.tracing.grouping import make_groups, model_params
from slidedp.compiler.tracing.tracer import TraceError, trace

pytestmark = pytest.mark.null


def test_groups_partition_the_parameters_by_the_stages_that_read_them() -> None:
    model = PlainGPT()
    model.blocks[0].odd = nn.Parameter(torch.zeros(7))
    model.blocks[0].nothing = nn.Parameter(torch.zeros(0, 5))
    model.blocks[1].norm1.weight.requires_grad_(False)
    for world_size in (1, 3):
        t = trace(model, lm_batch(), world_size=world_size)
        assert [g.name for g in t.graph.groups] == ["prologue", "shared0", "L00", "L01", "L02", "epilogue"]
        names = [n for g in t.graph.groups for p in g.params for n in p.names]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))
        assert t.graph.group("shared0").params[0].names == ("tok.weight", "head.weight")
        assert t.graph.stage("epilogue").groups == ("epilogue", "shared0")
        assert not t.graph.streams(t.graph.group("shared0"))
        for g in t.graph.groups:
            check_layout(g, world_size)
        frozen = t.graph.group("L01").params[-1]
        assert (frozen.name, frozen.trainable) == ("blocks.1.norm1.weight", False)
        assert frozen.offset == t.graph.group("L01").num_trainable


def check_layout(g: Group, world_size: int) -> None:
    unit = ALIGN * world_size
    assert g.numel % unit == g.num_trainable % unit == 0
    end = 0
    for p in g.params:
        assert p.offset % ALIGN == 0
        assert p.offset >= end
        assert p.offset + p.numel <= (g.num_trainable if p.trainable else g.numel)
        assert p.trainable or p.offset >= g.num_trainable
        end = p.offset + p.numel
    assert g.numel - sum(-(-p.numel // ALIGN) * ALIGN for p in g.params) < 2 * unit


def test_group_names_do_not_depend_on_what_else_is_shared() -> None:
    model = nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in "abc"})
    params = model_params(model)
    reads = {"prologue": ["a.weight"], "L00": ["b.weight"], "L01": ["b.weight"], "epilogue": ["a.weight"]}
    groups = make_groups(params, reads, 2)
    assert [(g.name, g.uses) for g in groups] == [("shared0", ("prologue", "epilogue")), ("shared1", ("L00", "L01"))]


def test_another_specialisation_keeps_the_partition() -> None:
    model = tiny_models.family("qwen3")
    t = trace(model, lm_batch())
    assert trace(model, lm_batch("padded"), groups=t.graph.groups).graph.groups == t.graph.groups
    plain = PlainGPT()
    t2 = trace(plain, lm_batch())
    headless = trace(plain, lm_batch(), groups=t2.graph.groups, layers=["blocks.0", "blocks.1"])
    assert headless.graph.group("L02").uses == ("epilogue",)
    assert headless.graph.stage("epilogue").groups == ("epilogue", "L02", "shared0")
    model.model.norm.weight.requires_grad_(False)
    with pytest.raises(TraceError, match=r"model\.norm\.weight.*compile again"):
        trace(model, lm_batch(), groups=t.graph.groups)
    few = tuple(g for g in t.graph.groups if g.name != "L02")
    with pytest.raises(TraceError, match=r"model\.layers\.2.*example="):
        trace(model, lm_batch(), groups=few)
