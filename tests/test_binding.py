"""Gradient slots, and the user's module bound to slots and master weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import tiny_models
import torch
from stage_bench import AWKWARD, Batch, Bench, compare, made
from torch import Tensor, nn

from slidedp.compiler.layergraph import Group, Param
from slidedp.compiler.tracing.tracer import trace
from slidedp.executor.stages.binding import Binding
from slidedp.executor.stages.gradients import GradientSlots

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


# ---- gradient slots ----


def test_gradient_slot_rounds_once_and_adds_only_where_there_is_something() -> None:
    params = (Param(("w",), (2, 33), 0), Param(("v",), (3,), 128), Param(("f",), (4,), 192, trainable=False))
    group = Group("g", 256, 192, ("a", "b"), params)
    slots = GradientSlots({"g": group})
    flat = torch.full((256,), float("nan"), dtype=torch.bfloat16)
    w, v = torch.randn(2, 33), torch.randn(3)
    slots.start()
    assert slots.write("g", flat, [w, None], False) == {"w": True, "v": False}
    assert torch.equal(flat[:66].view(2, 33), w.bfloat16())
    assert (flat[66:192] == 0).all()
    assert flat[192:].isnan().all()  # nothing there is sent
    flat[128:131] = float("nan")  # whatever there is where no gradient has been: a first gradient replaces it
    assert slots.write("g", flat, [w, v], True) == {"w": True, "v": True}
    assert torch.equal(flat[:66].view(2, 33), (w.bfloat16().float() + w).bfloat16())
    assert torch.equal(flat[128:131], v.bfloat16())
    slots.start()
    assert slots.write("g", flat, [None, None], False) == {"w": False, "v": False}
    assert (flat[:192] == 0).all()


# ---- binding ----


def groups_of(model: nn.Module, batch: Batch) -> tuple[Group, ...]:
    return trace(model, batch).graph.groups


class Masters:
    """Stands in for the host state."""

    def __init__(self, groups: tuple[Group, ...]) -> None:
        self.groups = groups
        self.master = {g.name: torch.zeros(g.numel) for g in groups}

    def load(self, values: Mapping[str, Tensor]) -> None:
        for g in self.groups:
            for p in g.params:
                self.master[g.name][p.offset : p.offset + p.numel] = values[p.name].detach().reshape(-1)


def test_adopted_parameters_are_the_masters_and_tied_ones_stay_tied() -> None:
    model, reference = tiny_models.family("qwen3"), tiny_models.family("qwen3")
    groups = groups_of(model, tiny_models.lm_batch())
    objects = dict(model.named_parameters())
    masters = Masters(groups)
    binding = Binding(model, groups)
    binding.adopt(masters)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(objects[n] is p for n, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tied = next(g for g in groups if len(g.uses) > 1)
    masters.master[tied.name].add_(1)
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight + 1)
    kept = {name: flat.clone() for name, flat in masters.master.items()}
    binding.release(kept)
    masters.master[tied.name].zero_()
    assert torch.equal(model.lm_head.weight, reference.lm_head.weight + 1)


def test_parameters_on_meta_and_in_other_dtypes_become_masters() -> None:
    with torch.device("meta"):
        model = tiny_models.mlp()
    groups = trace(model, tiny_models.mlp_batch(), loss_fn=tiny_models.classification_loss).graph.groups
    binding = Binding(model, groups)
    masters = Masters(groups)
    binding.release(masters.master)
    assert all(p.device.type == "cpu" and isinstance(p, nn.Parameter) for p in model.parameters())
    masters.master[groups[0].name].fill_(2)
    assert (next(model.parameters()) == 2).all()
    half = tiny_models.mlp().bfloat16()
    Binding(half, groups).adopt(Masters(groups))
    assert all(p.dtype is torch.float32 for p in half.parameters())


def test_restore_puts_everything_back() -> None:
    model, batch = made(AWKWARD["batch_norm"])(), tiny_models.mlp_batch()
    before = {n: (id(t), t.clone()) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    bench = Bench(model, batch, tiny_models.classification_loss)
    bench.step(batch)
    assert id(model[0][0].weight) != before["0.0.weight"][0]
    bench.binding.restore()
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        assert id(t) == before[name][0]
    assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters())


def test_recurrent_layers_use_the_bound_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Recurrent() for _ in range(2)), nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x[None])[0][0] + x

    bench = compare(made(Model), [tiny_models.mlp_batch()] * 2, tiny_models.classification_loss)
    lstm = bench.model.blocks[0].lstm
    assert lstm._flat_weights[0] is lstm.weight_ih_l0
    assert "flatten_parameters" not in vars(lstm)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.pop(4), "another model"),
        (lambda m: setattr(m, "4", nn.Linear(33, 11)), r"shape \(10, 33\), the model has \(11, 33\)"),
        (lambda m: m[0].weight.register_hook(lambda g: g), "0.weight has gradient hooks"),
        (lambda m: m[2].__dict__.update(cached=[m[2].weight]), "2 .*2.weight in its attribute cached"),
    ],
)
def test_models_that_cannot_be_bound_are_refused_by_name(spoil: Callable[[nn.Sequential], object], message: str) -> None:
    model = tiny_models.mlp()
    groups = trace(model, tiny_models.mlp_batch(), loss_fn=tiny_models.classification_loss).graph.groups
    spoil(model)
    with pytest.raises(ValueError, match=message):
        Binding(model, groups)


def test_a_buffer_without_values_is_refused_by_name() -> None:
    model = made(AWKWARD["batch_norm"])()
    model[1][1].running_mean = torch.empty(12, device="meta")
    with pytest.raises(ValueError, match=r"buffer 1\.1\.running_mean"):
        Binding(model, ()).bind_buffers(torch.device("cpu"))


def test_buffers_that_the_device_does_not_give_back_are_the_users_own_all_the_same() -> None:
    """On a device that has failed every copy fails: the model is not to be left with any of its tensors."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    before = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    binding = Binding(model, ())
    binding.bind_buffers(torch.device("meta"))  # whose values cannot be copied either
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        binding.give_back()
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {name: known for name, (known, _) in before.items()}
    assert all(torch.equal(buffer, before[name][1]) for name, buffer in model.named_buffers())
    binding.give_back()
