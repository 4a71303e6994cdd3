"""Runs a trace's stage programs as the executor does, eagerly, and compares with the model: for any test that has a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tiny_models import loss_and_grads
from torch import Tensor, nn

from slidedp.compiler.tracing.tracer import Trace


def run_stages(t: Trace, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What the executor does: layers forward without gradients, then each again, last first, with its vector-Jacobian product."""
    env: dict[str, Tensor] = {f"batch.{k}": v for k, v in batch.items()}
    named = dict(model.named_parameters())
    grads: dict[str, Tensor] = {}
    saved: dict[str, tuple[list[Tensor], Tensor]] = {}

    def add(name: str, g: Tensor | None) -> None:
        if g is not None:
            grads[name] = grads[name] + g if name in grads else g

    def vjp(p: Any, inputs: list[Tensor], outputs: tuple[Tensor, ...], seeds: list[Tensor | None]) -> None:
        wanted = {n: x for n, x in zip(p.inputs, inputs, strict=True) if n in p.grad_inputs}
        wanted |= {n: named[n] for n in p.params if named[n].requires_grad}
        pairs = [(o, g) for n, o, g in zip(p.outputs, outputs, seeds, strict=True) if n in p.grad_outputs and g is not None]
        if pairs and wanted:
            got = torch.autograd.grad([o for o, _ in pairs], list(wanted.values()), [g for _, g in pairs], allow_unused=True)
            for name, g in zip(wanted, got, strict=True):
                add(name, g)

    prologue, *layers, epilogue = t.programs
    made = prologue.fn(model, *(env[n] for n in prologue.inputs))
    env |= {n: v.detach() for n, v in zip(prologue.outputs, made, strict=True)}
    for p in layers:
        saved[p.name] = ([env[n] for n in p.inputs], torch.get_rng_state())
        with torch.no_grad():
            env |= zip(p.outputs, p.fn(model, *saved[p.name][0]), strict=True)
    for p in (epilogue, *reversed(layers)):
        inputs, state = saved.get(p.name, ([env[n] for n in p.inputs], None))
        inputs = [x.detach().requires_grad_(n in p.grad_inputs) for n, x in zip(p.inputs, inputs, strict=True)]
        if state is not None:
            torch.set_rng_state(state)
        outputs = p.fn(model, *inputs)
        if p is epilogue:
            loss = outputs[0].detach()
        vjp(p, inputs, outputs, [torch.ones_like(loss)] if p is epilogue else [grads.get(n) for n in p.outputs])
    vjp(prologue, [env[n] for n in prologue.inputs], made, [grads.get(n) for n in prologue.outputs])
    return loss, {n: g for n, g in grads.items() if n in named}


def assert_same(t: Trace, model: nn.Module, batch: Mapping[str, Tensor], loss_fn: Any = None) -> None:
    state = torch.get_rng_state()
    want, want_grads = loss_and_grads(model, batch, loss_fn)
    torch.set_rng_state(state)
    got, got_grads = run_stages(t, model, batch)
    assert torch.equal(got, want)
    assert got_grads.keys() == want_grads.keys()
    assert [n for n in want_grads if not torch.equal(got_grads[n], want_grads[n])] == []
