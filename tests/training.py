"""The yardstick of the end-to-end tests: plain PyTorch training, and what a plan's state is compared with."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import slidedp
from slidedp.compiler.tracing.tracer import Trace, guards_hold, specialisation_key, trace
from slidedp.executor.state.host_state import shaped
from slidedp.planning import planner

Batch = Mapping[str, Tensor]


@dataclass
class Trained:
    """What a run leaves: losses, and by parameter name the weights, both moments, and gradients: one dictionary a step kept."""

    losses: list[float]
    params: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    grads: list[dict[str, Tensor]]
    norms: list[float | None] = field(default_factory=list)
    """Of all gradients of each step before they were clipped, where they were."""

    def digest(self) -> str:
        """Of every bit of losses, weights and moments."""
        h = hashlib.sha256(repr(self.losses).encode())
        for part in (self.params, self.exp_avg, self.exp_avg_sq):
            for name in sorted(part):
                h.update(name.encode() + part[name].reshape(-1).view(torch.uint8).numpy().tobytes())
        return h.hexdigest()


@contextmanager
def traced_once() -> Iterator[None]:
    """For many plans of equal models: a trace, which reads whatever model it is given, is made once for the batches for which it
    holds. Else it is a quarter of what a plan of a tiny model takes to be made, run and closed.
    """
    known: list[tuple[Any, Any, Trace]] = []

    def traced(model: nn.Module, batch: Batch, **how: Any) -> Trace:
        key = specialisation_key(batch, model.training)
        for other, had, found in known:
            if (other, had) == (key, how) and guards_hold(found, batch) is None:
                return found
        known.append((key, how, trace(model, batch, **how)))
        return known[-1][2]

    with patch.object(planner, "trace", traced):
        yield


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}


def train_plainly(model: nn.Module, batches: Sequence[Batch], optimizer: slidedp.AdamW,
                  loss_of: Callable[[nn.Module, Batch], Tensor], after: Callable[[nn.Module], None] | None = None,
                  max_grad_norm: float | None = None) -> Trained:
    """`loss.backward()` and `torch.optim.AdamW` on a copy of `model`; returned tensors are the copy's.

    `after`: called with the copy when a step is over.
    """
    model = copy.deepcopy(model)
    name = names_of(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trainable if optimizer.decays(name[id(p)])], "weight_decay": optimizer.weight_decay},
              {"params": [p for p in trainable if not optimizer.decays(name[id(p)])], "weight_decay": 0.0}]
    adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
    losses, grads, norms = [], [], []
    for batch in batches:
        adam.zero_grad(set_to_none=True)
        loss = loss_of(model, batch)
        loss.backward()
        grads.append({name[id(p)]: p.grad.clone() for p in trainable if p.grad is not None})
        norms += [] if max_grad_norm is None else [nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()]
        adam.step()
        losses.append(loss.item())
        if after is not None:
            after(model)
    state = {name[id(p)]: adam.state[p] for p in trainable if adam.state[p]}
    return Trained(losses, {n: p.detach() for n, p in model.named_parameters()},
                   {n: s["exp_avg"] for n, s in state.items()}, {n: s["exp_avg_sq"] for n, s in state.items()}, grads, norms)


def train_resident(model: nn.Module, batches: Sequence[Batch], optimizer: slidedp.AdamW, device: str,
                   state_device: str | None = None, keep_grads: bool = False, fused: bool = False) -> Trained:
    """BF16 weights and gradients, FP32 masters and moments, all on one device: the recipe that a plan streams.

    `model` in BF16 on the device is used up; anything else is copied. `state_device`: where masters and moments are instead.
    `fused`: torch's fused AdamW, the same formula rounded elsewhere. Returned tensors are FP32, where the masters are; gradients
    (`keep_grads`: every step's, else none) BF16 on the device.
    """
    if next(model.parameters()).dtype is not torch.bfloat16:
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        model = copy.deepcopy(model).to(device, torch.bfloat16)
        for name, buffer in buffers.items():  # .to(bfloat16) rounds rotary tables too
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer.to(device)
    params = dict(model.named_parameters())
    masters = {n: p.detach().to(state_device or device, torch.float32, copy=True) for n, p in params.items()}
    groups = [{"params": [m], "weight_decay": optimizer.weight_decay if optimizer.decays(n) else 0.0} for n, m in masters.items()]
    adam = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps,
                             fused=fused, foreach=None if fused else False)
    losses, grads = [], []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        loss = loss_of_output(model, {k: v.to(device) for k, v in batch.items()})
        loss.backward()
        losses.append(loss.item())
        if keep_grads:
            grads.append({n: p.grad.clone() for n, p in params.items() if p.grad is not None})
        for name, p in params.items():
            masters[name].grad = None if p.grad is None else p.grad.to(masters[name].device).float()
            p.grad = None
        adam.step()
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(masters[name])
    state = {n: adam.state[m] for n, m in masters.items() if adam.state[m]}
    return Trained(losses, {n: m.detach() for n, m in masters.items()}, {n: s["exp_avg"] for n, s in state.items()},
                   {n: s["exp_avg_sq"] for n, s in state.items()}, grads)


def rounded(model: nn.Module) -> nn.Module:
    """Weights that BF16 holds exactly, so that every trainer starts from the same ones."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    return model


def loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch)
    return out.loss if hasattr(out, "loss") else out


def state_of(plan: slidedp.Plan) -> Trained:
    """Copies of a plan's weights, moments and last returned gradients, by parameter name."""
    plan.synchronize()
    machine = plan._machine
    parts: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}, "grad": {}}
    for group in machine.state.groups.values():
        trainable = [p for p in group.params if p.trainable]
        resident = group.name in machine.resident.groups
        for buffer, flat in moments(machine, group).items() if resident else ():
            parts[buffer] |= {p.name: shaped(flat, p) for p in trainable}
        for buffer, into in parts.items() if group.trainable and not resident else ():
            for p, view in zip(trainable, machine.state.views(buffer, group.name), strict=True):
                into[p.name] = view.clone()
    params = {n: p.detach().clone() for n, p in plan.model.named_parameters()}
    return Trained([], params, parts["exp_avg"], parts["exp_avg_sq"], [parts["grad"]])


@torch.no_grad()
def begin_again(plan: slidedp.Plan, weights: Mapping[str, Tensor]) -> None:
    """A started plan goes on from `weights` as if it had not run a step, in a fraction of the time of compiling another one.
    Collective: all ranks share what rank 0 writes."""
    model, machine = plan.model, plan._machine
    machine.agree([])  # nobody looks at the state any more
    for group in machine.resident.groups.values():  # their masters follow the host's
        zeros = torch.zeros(group.num_trainable)
        if group.trainable:
            machine.resident.write_moments(group.name, zeros, zeros)
    if machine.rank == 0:
        for name, p in model.named_parameters():
            p.copy_(weights[name])
        for flat in (*machine.state.exp_avg.values(), *machine.state.exp_avg_sq.values()):
            flat.zero_()
    machine.adam.load_steps(dict.fromkeys(machine.adam.steps, 0))
    machine.agree([])  # every rank casts what it finds


def moments(machine: Any, group: Any) -> dict[str, Tensor]:
    """Flat moments of a resident group, of all ranks: each adds its part to zeros. Collective."""
    flat = {name: torch.zeros(group.num_trainable) for name in ("exp_avg", "exp_avg_sq")}
    machine.resident.read_moments(group.name, *flat.values())
    for tensor in flat.values() if machine.world_size > 1 else ():
        torch.distributed.all_reduce(tensor)
    return flat


def log_gradients(plan: slidedp.Plan) -> list[dict[str, Tensor]]:
    """Every step's gradients as the updates of a started plan on one rank read them: steps go on overlapping.

    The list is complete once the plan is drained.
    """
    machine, steps = plan._machine, []
    update = machine.adam.update

    def log(group: str, lo: int, hi: int, step: int, present: Any = None, scale: float = 1.0, **kwargs: Any) -> None:
        while len(steps) < step:
            steps.append({n: torch.zeros_like(g) for n, g in machine.state.grad.items()})
        steps[step - 1][group][lo:hi] = machine.state.grad[group][lo:hi]
        update(group, lo, hi, step, present, scale, **kwargs)

    machine.adam.update = log
    machine.updates.native = lambda step: None  # updates come as Python functions
    return steps


def by_parameter(plan: slidedp.Plan, flat: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flat gradients by group -> gradients by parameter name, in the parameters' shapes."""
    return {p.name: shaped(flat[g.name], p) for g in plan._spec.layers.groups for p in g.params if p.trainable}


def train_planned(model: nn.Module, batches: Sequence[Batch], optimizer: slidedp.AdamW,
                  after: Callable[[slidedp.Plan], None] | None = None, **options: Any) -> Trained:
    """The same steps through a plan, on a copy of `model` (its own tensors are not touched). `after`: called after each."""
    with slidedp.compile(copy.deepcopy(model), "cpu", example=batches[0], optimizer=optimizer, **options) as plan:
        logged, losses, results = log_gradients(plan), [], []
        for batch in batches:
            results.append(plan.run(batch))
            losses.append(results[-1].loss)
            if after is not None:
                after(plan)
        done = state_of(plan)
        grads = [by_parameter(plan, flat) for flat in logged]
    return Trained(losses, done.params, done.exp_avg, done.exp_avg_sq, grads, [r.grad_norm for r in results])


def assert_same_bits(got: Trained, want: Trained) -> None:
    """Losses, weights, moments and every step's gradients, bit for bit: -0.0 is not 0.0."""
    assert got.losses == want.losses
    assert len(got.grads) == len(want.grads) == len(want.losses)
    for step, (mine, theirs) in enumerate(zip(got.grads, want.grads, strict=True), 1):
        assert_same_tensors(mine, theirs, f"gradients of step {step}")
    for part in ("params", "exp_avg", "exp_avg_sq"):
        assert_same_tensors(getattr(got, part), getattr(want, part), part)


def assert_same_tensors(got: Mapping[str, Tensor], want: Mapping[str, Tensor], what: str) -> None:
    """Every tensor of `want` has the same bits in `got`."""
    for name, tensor in want.items():
        mine = got[name]
        assert mine.dtype is tensor.dtype, f"{what}: {name} is {mine.dtype}, not {tensor.dtype}"
        assert torch.equal(bits(mine), bits(tensor)), f"{what}: {name} differs by up to {(mine - tensor).abs().max()}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def norm_wise(got: Tensor, want: Tensor) -> float:
    """‖difference‖ / ‖reference‖ in double precision; 0 where both are zero."""
    difference, reference = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return difference / reference if reference else (0.0 if difference == 0 else float("inf"))
