"""`slidedp.compile`: checks what the user asks for and returns a Plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slidedp.batch import Batches
from slidedp.cache import cache_folder
from slidedp.compiler.costmodel.costs import CostModel
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Update
from slidedp.compiler.optimizer import AdamW
from slidedp.compiler.planfile.planfile import PlanFile
from slidedp.compiler.planfile.planyaml import is_plan
from slidedp.compiler.strict import load_yaml
from slidedp.compiler.units import parse_bytes
from slidedp.executor.options import PEER_ABSENCE_S, PEER_TIMEOUT_S, MachineOptions, update_threads
from slidedp.executor.stages.binding import refuse_owned
from slidedp.hardware import load_profile
from slidedp.plan import Plan
from slidedp.planning.decide import SOLVERS
from slidedp.ranks import find_ranks
from slidedp.settings import DTYPE_NAMES, Settings
from slidedp.trial.validation import NUM_STEPS

Policy = Mapping[str, Any] | PlanFile | str | Path | None


def compile(
    model: nn.Module,
    hw_profile: str | Path | HardwareProfile = "auto",
    *,
    example: Batches | None = None,
    loss_fn: Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor | int]] | None = None,
    optimizer: AdamW | None = None,
    policy: Policy = None,
    cost_model: CostModel | None = None,
    hbm_budget: int | str | None = None,
    host_budget: int | str | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool | None = None,
    device: str | torch.device | None = None,
    layers: Any = None,
    update_kernel: str = "auto",
    num_threads: int | None = None,
    measure: bool | str | None = None,
    solver: str = "cp-sat",
    hint: PlanFile | str | Path | None = None,
    cache_dir: str | Path | None = None,
    validate: bool | int | None = None,
    peer_timeout_s: float = PEER_TIMEOUT_S,
    peer_absence_s: float = PEER_ABSENCE_S,
) -> Plan:
    """Plan full-parameter training of `model`; the returned plan's `run(batch)` is one synchronous optimizer step.

    Args:
        model: any `nn.Module`; its parameters become views of the FP32 master weights in host memory. Under torchrun the
            ranks other than 0 may build it on the `meta` device: rank 0's weights are everyone's.
        hw_profile: built-in name, YAML path, HardwareProfile; "auto": as measured here before (`slidedp profile`), else the
            built-in one nearest to this machine; "measure": measured now (some 10 s) and kept.
        example: a sample batch (this rank's share), or a sequence of micro-batches. Without it the plan is finished at the first
            `run`.
        loss_fn: ``(outputs, batch) -> (loss_sum, count)``; default: the model's own mean loss over its valid labels.
        optimizer: default ``AdamW()``.
        policy: choices to pin: mapping, YAML path, or a loaded plan; the solver fills the rest.
        cost_model: durations and bytes for ops it knows (see `CostModel`); the analytic model fills the rest.
        hbm_budget, host_budget: bytes or e.g. "20GiB". The first, if given, also limits what torch's allocator reserves on the
            device, for the whole process, until the plan is closed; of several open plans, to the sum of those that are given.
        compute_dtype: of weights and activations on the device: bfloat16 on CUDA, else float32, unless given.
        grad_dtype: of gradients returned to the host; default `compute_dtype`.
        max_grad_norm: clip by the exact norm of all gradients of all ranks, as `torch.nn.utils.clip_grad_norm_` does (inf: only
            take it). Updates then wait for the norm and run under the next forward (decision `update`: deferred), or, of as many
            layers as that makes the step faster and the host has room for, go ahead into second buffers (speculative).
        skip_nonfinite: leave out a step with a NaN or Inf in loss or gradients as a whole, instead of raising; default: if
            `max_grad_norm` is given. Updates wait too.
        device: default: this rank's GPU if there is one, else the CPU.
        layers: names of the modules to treat as layers, or a predicate ``(name, module) -> bool``.
        update_kernel: "native" (fused), "torch" (bit for bit torch.optim.AdamW in FP32) or "auto": native where it builds.
        num_threads: CPU threads of the update.
        measure: the model's stages on this device, for the first batch's shapes, before anything is decided: "cached": what was
            measured before, else measure (a second or two) and keep; True: measure anew; False: analytic costs alone. Default:
            "cached" on CUDA, False on the CPU. Neither weights nor random numbers change.
        solver: "cp-sat" (never worse than the rule, in simulation; tiny steps are left to it) or "rule". Rank 0 decides for all.
        hint: an earlier plan to start from, and to keep if it is as good as proven best.
        cache_dir: where measurements and solved plans are kept: default $SLIDEDP_CACHE, else ``~/.cache/slidedp``; "": nowhere.
        validate: time the solver's plan and the default rule's on the first real steps, one after the other, so many of each
            (True: 3) after one that does not count, and keep the faster (:attr:`Plan.validation`, and in `cache_dir`). False: no.
            Default: for `hw_profile` "auto" and "measure", optimizer states being where the solver puts them in both, so that no
            bit of training depends on which of the two runs. If you say True or how many, the default is timed as it is.
        peer_timeout_s: of several ranks: seconds without any op done, on any rank, after which a step hangs: all ranks then
            raise a PeerError that names the rank at fault and the op that it is in. inf: wait for ever.
        peer_absence_s: the same for a rank that does not call `run` while others wait in theirs, for whatever reason of its own
            (evaluation, saving), unless it is in :meth:`Plan.loading` or :meth:`Plan.batches`; after `peer_timeout_s` a message
            tells where it is. At least as long as that.

    Raises:
        ValueError: names what does not fit and the remedy. TraceError (a ValueError): the model cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"slidedp.compile takes an nn.Module, not {type(model).__name__}")
    refuse_owned(model)
    if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm > 0):
        raise ValueError(f"max_grad_norm={max_grad_norm!r}: a positive number, inf to take the norm without clipping, or None")
    skip = max_grad_norm is not None if skip_nonfinite is None else bool(skip_nonfinite)
    if measure not in (None, True, False, "cached"):
        raise ValueError(f"measure={measure!r}: use True, False or 'cached'")
    ranks = find_ranks(device)
    compute = compute_dtype or (torch.bfloat16 if ranks.device.type == "cuda" else torch.float32)
    grad = grad_dtype or compute
    for name, dtype in (("compute_dtype", compute), ("grad_dtype", grad)):
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{name}={dtype} is not supported: use torch.bfloat16 or torch.float32")
    if not isinstance(optimizer or AdamW(), AdamW):
        raise ValueError(f"optimizer= takes a description, slidedp.AdamW(lr=1e-5, ...), not {type(optimizer).__name__} of "
                         f"{type(optimizer).__module__}: the plan itself holds the moments and updates the weights")
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ValueError(f"num_threads={num_threads!r}: a positive number of CPU threads for the update")
    if update_kernel not in ("auto", "native", "torch"):
        raise ValueError(f"update_kernel={update_kernel!r}: use 'auto', 'native' or 'torch'")
    check_patience(peer_timeout_s, peer_absence_s)
    pins = load_policy(policy)
    open_to_speculation = not pins_updates(pins)
    if skip or max_grad_norm is not None:
        pins = deferred(pins)
    settings = Settings(
        hw=load_profile(hw_profile, ranks=ranks, cache_dir=cache_dir), compute_dtype=compute, grad_dtype=grad,
        world_size=ranks.world_size, device=ranks.device, loss_fn=loss_fn, layers=layers, policy=pins,
        cost_model=cost_model,
        hbm_budget=None if hbm_budget is None else parse_bytes(hbm_budget),
        host_budget=None if host_budget is None else parse_bytes(host_budget),
        measure=("cached" if ranks.device.type == "cuda" else False) if measure is None else measure,
        cache_dir=cache_folder(cache_dir), update_threads=num_threads or update_threads(ranks.world_size),
        solver=check_solver(solver) if ranks.rank == 0 else "rule", hint=load_hint(hint),
        validate=num_validated(validate, hw_profile), same_bits=validate is None,
        may_speculate=open_to_speculation and ranks.rank == 0)
    options = MachineOptions(update_kernel, num_threads, skip_nonfinite=skip,
                             max_grad_norm=None if max_grad_norm is None else float(max_grad_norm),
                             peer_timeout_s=float(peer_timeout_s), peer_absence_s=float(peer_absence_s))
    return Plan(model, settings, ranks, optimizer or AdamW(), options, example)


def deferred(policy: Mapping[str, Any] | PlanFile | None) -> Mapping[str, Any] | PlanFile:
    """`policy` with updates that wait for the norm of all gradients. ValueError if it pins them to come earlier."""
    pinned = policy.decisions.update if isinstance(policy, PlanFile) else (policy or {}).get("update", Update.DEFERRED)
    if pinned == Update.IN_BACKWARD:
        raise ValueError("clipping, and leaving out steps that are not finite, need the norm of all gradients before any update, "
                         "but the policy has update: in_backward; set `update: deferred` in it")
    return policy if isinstance(policy, PlanFile) else {**(policy or {}), "update": pinned}


def check_patience(peer_timeout_s: float, peer_absence_s: float) -> None:
    for name, seconds in (("peer_timeout_s", peer_timeout_s), ("peer_absence_s", peer_absence_s)):
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ValueError(f"{name}={seconds!r}: a positive number of seconds, inf to wait for ever")


def pins_updates(policy: Mapping[str, Any] | PlanFile | None) -> bool:
    """True if `policy` says when updates run, of all groups or of some."""
    if policy is None or isinstance(policy, PlanFile):
        return policy is not None
    layers = policy.get("layers")
    of_layers = layers.values() if isinstance(layers, Mapping) else ()
    return "update" in policy or any(isinstance(pins, Mapping) and "update" in pins for pins in of_layers)


def num_validated(validate: bool | int | None, hw_profile: object) -> int:
    """How many steps of each plan are to be timed."""
    if validate is None:
        return NUM_STEPS if hw_profile in ("auto", "measure") else 0
    if isinstance(validate, bool):
        return NUM_STEPS if validate else 0
    if not isinstance(validate, int) or validate < 0:
        raise ValueError(f"validate={validate!r}: True, False, or how many steps of each plan to time")
    return validate


def check_solver(solver: str) -> str:
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r}: use {' or '.join(map(repr, SOLVERS))}")
    return solver


def load_hint(hint: PlanFile | str | Path | None) -> PlanFile | None:
    return PlanFile.load(hint) if isinstance(hint, str | Path) else hint


def load_policy(policy: Policy) -> Mapping[str, Any] | PlanFile | None:
    """A mapping or plan as it is; a path is a plan file if it says so, else a policy file."""
    if isinstance(policy, str | Path):
        loaded = load_yaml(policy)
        if not isinstance(loaded, Mapping):
            raise ValueError(f"{policy}: a policy is a YAML mapping, e.g. 'delivery: sharded'")
        return PlanFile.load(policy) if is_plan(loaded) else loaded
    return policy
