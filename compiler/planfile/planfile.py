"""The plan artefact: decisions, predictions and what they were made for, as a small hand-editable YAML file.

A plan holds no ops: its layer table gives back a LayerGraph, the passes lower that with the decisions, and `ops_hash`
says whether the result is the one that was planned. Decisions and the table as YAML are in planyaml.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from slidedp.compiler.costmodel.costs import ResolvedCosts
from slidedp.compiler.costmodel.hardware import HardwareProfile
from slidedp.compiler.decisions import Decisions, Update
from slidedp.compiler.layergraph import ITEMSIZE, LayerGraph, recut
from slidedp.compiler.ops import OpGraph
from slidedp.compiler.planfile.costrecord import CostRecord, read_costs
from slidedp.compiler.planfile.planyaml import (
    plan_values,
    read_decisions,
    read_lanes,
    read_layers,
    to_text,
    write_decisions,
    write_layers,
)
from slidedp.compiler.planfile.verdict import Verdict
from slidedp.compiler.policy import PLAN_KEYS
from slidedp.compiler.strict import as_float, as_int, as_mapping, as_str, check_keys, content_hash, parse_yaml, read_text

FORMAT = 1
HEADER = """\
# A SlideDP plan. Edit `plan` and `decisions` as you like, then `slidedp check` this file; all else describes what they were
# made for. Predictions are of the decisions as planned: plan anew with `--policy THIS_FILE` to refresh them.
"""
KEYS = ("format", "slidedp", "hardware", "cost_model", "world_size", "compute_dtype", "grad_dtype", "specialisation", "budgets",
        "plan", "decisions", "predictions", "ops", "model")
OPTIONAL_KEYS = ("costs", "solver", "sliced", "validation")


@dataclass(frozen=True, slots=True)
class Identity:
    """Name and content hash of what a plan was made with: a machine, a cost model."""

    name: str
    hash: str

    def __str__(self) -> str:
        return f"{self.name} ({self.hash})"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that the plan may take: of each GPU, of the host."""

    hbm_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Predictions:
    """What the cost model and the simulator say of one step. `tokens_per_s`: all ranks together."""

    step_us: int
    tokens_per_s: float
    hbm_bytes: int
    host_bytes: int
    bottleneck: str


@dataclass(frozen=True, slots=True)
class SolverRecord:
    """How decisions were found, and how good they are. `name`: cp-sat, or rule if the rule's plan was kept.

    `step_us`, `bound_us`, `gap`: the step of the solver's model, the least that it proves possible with these slots, and how
    much shorter that is. `simulated_us`: of the plan kept, `rule_us`: of the rule's plan. `rounds`: of solving and simulating.
    `seal`: of the bound (proven.py), with which it need not be proven again.
    """

    name: str
    step_us: int
    bound_us: int
    gap: float
    simulated_us: int
    rule_us: int
    rounds: int
    seal: str = ""


Record = TypeVar("Record", Identity, Budgets, Predictions, SolverRecord, Verdict)


@dataclass(frozen=True)
class PlanFile:
    """Everything in ``plan.yaml``. `specialisation`: shapes and dtypes of the batch it was made for, one line each.

    `layers` has no parameters (`params`), only sizes. `ops_hash` is of the ops that the decisions with `decisions_hash`
    lower to: after an edit by hand neither the ops nor the predictions are those recorded (:attr:`edited`).
    """

    slidedp: str
    layers: LayerGraph
    hardware: Identity
    cost_model: Identity
    budgets: Budgets
    decisions: Decisions
    predictions: Predictions
    ops_hash: str
    decisions_hash: str
    model_hash: str
    params_hash: str = ""
    specialisation: dict[str, str | int] = field(default_factory=dict)
    costs: CostRecord | None = None
    """Where something was measured."""
    solver: SolverRecord | None = None
    """None for decisions that were not solved for: pinned, the rule's, or from before there was a solver."""
    sliced: str = ""
    """Why the batch goes through in slices, where the plan has so decided and nobody pinned it."""
    validation: Verdict | None = None
    """What the first steps of training have said of the plan, and of the default's; None if they have not."""

    @property
    def world_size(self) -> int:
        return self.layers.world_size

    @property
    def edited(self) -> bool:
        """True if decisions were changed since the predictions were made."""
        return self.decisions_hash != decisions_hash(self.decisions)

    def layer_graph(self) -> LayerGraph:
        """The model as planned: enough to lower the decisions again."""
        return self.layers

    def policy(self) -> dict[str, Any]:
        """A policy that pins every decision of this plan."""
        pins: dict[str, Any] = {key: getattr(self.decisions, key) for key in PLAN_KEYS}
        return pins | {"layers": {name: asdict(d) for name, d in self.decisions.groups.items()}}

    def require(self, layers: LayerGraph, hw: HardwareProfile | None = None) -> None:
        """ValueError, naming what differs, unless the plan was made for `layers` (and on `hw`, if given)."""
        if self.world_size != layers.world_size:
            raise ValueError(f"the plan was made for {_ranks(self.world_size)}, this is {_ranks(layers.world_size)}; plan anew "
                             f"with --ranks {layers.world_size}")  # fmt: skip
        for what in ("model", "compute_dtype", "grad_dtype"):
            if (made_for := getattr(self.layers, what)) != (this := getattr(layers, what)):
                raise ValueError(f"the plan was made for {what} {made_for!r}, this is {this!r}; plan anew")
        _require_same_groups(self.layers, layers)
        for what, planned, here in (("structure", self.model_hash, model_hash(layers)),
                                    ("parameter names or shapes", self.params_hash, params_hash(layers))):
            if planned and here and planned != here:
                raise ValueError(f"the plan was made for another model: its {what} differ ({planned}, here {here}); plan anew")
        if hw is not None and hw.content_hash() != self.hardware.hash:
            raise ValueError(f"the plan was made for hardware {self.hardware}, this is {hw.name} ({hw.content_hash()}); "
                             "plan anew, or pass the plan's decisions as a policy")

    def to_yaml(self) -> str:
        layers = self.layers
        identity = {"name": layers.model, "hash": self.model_hash, "params_hash": self.params_hash}
        content = {
            "format": FORMAT, "slidedp": self.slidedp, "hardware": asdict(self.hardware), "cost_model": asdict(self.cost_model),
            "world_size": layers.world_size, "compute_dtype": layers.compute_dtype, "grad_dtype": layers.grad_dtype,
            "specialisation": self.specialisation, "budgets": asdict(self.budgets), **write_decisions(self.decisions),
            "predictions": asdict(self.predictions), **({} if self.costs is None else {"costs": self.costs.to_content()}),
            "ops": {"hash": self.ops_hash, "decisions_hash": self.decisions_hash},
        }  # fmt: skip
        if self.solver is not None:
            content["solver"] = asdict(self.solver)
        if self.sliced:
            content["sliced"] = self.sliced
        if self.validation is not None:
            content["validation"] = asdict(self.validation)
        content["model"] = identity | write_layers(layers)
        return HEADER + to_text(content)

    def dump(self, path: str | Path) -> None:
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> PlanFile:
        """The plan in a file. ValueError, naming file and key, for anything unknown, missing or out of range."""
        return PlanFile.parse(read_text(path), str(path))

    @staticmethod
    def parse(text: str, where: str = "plan") -> PlanFile:
        return _from_content(parse_yaml(text, where), where)


def make_planfile(
    version: str,
    layers: LayerGraph,
    hw: HardwareProfile,
    decisions: Decisions,
    costs: ResolvedCosts,
    ops: OpGraph,
    budgets: Budgets,
    predictions: Predictions,
    specialisation: Mapping[str, str | int] | None = None,
    cost_record: CostRecord | None = None,
    solver: SolverRecord | None = None,
    sliced: str = "",
) -> PlanFile:
    """A plan with its hashes. `version`: slidedp's."""
    predictions = replace(predictions, tokens_per_s=round(predictions.tokens_per_s, 1))
    return PlanFile(
        version, layers, Identity(hw.name, hw.content_hash()), Identity(costs.name, costs.hash), budgets, decisions, predictions,
        ops_hash(ops), decisions_hash(decisions), model_hash(layers), params_hash(layers), dict(specialisation or {}),
        cost_record, solver, sliced,
    )  # fmt: skip


def model_hash(layers: LayerGraph) -> str:
    """A hash of the model's structure and sizes, whatever the batch: stages and their groups, groups with sizes and uses."""
    stages = [[s.name, s.kind, list(s.groups)] for s in layers.stages]
    groups = [[g.name, g.numel, g.num_trainable, list(g.uses)] for g in layers.groups]
    return content_hash([layers.model, stages, groups])


def params_hash(layers: LayerGraph) -> str:
    """A hash of every parameter's names, shape and place; '' for a graph that was read from a plan."""
    params = [[g.name, list(p.names), list(p.shape), p.offset, p.trainable] for g in layers.groups for p in g.params]
    return content_hash(params) if params else ""


def decisions_hash(decisions: Decisions) -> str:
    groups = {name: {k: v for k, v in asdict(d).items() if (k, v) != ("update", Update.DEFERRED)}  # as before there was a choice
              for name, d in decisions.groups.items()}
    return content_hash([groups, list(plan_values(decisions).values())])


def ops_hash(ops: OpGraph) -> str:
    """A hash of ops, edges and slots, in order."""
    return content_hash([[_plain(x) for x in part] for part in (ops.ops, ops.edges, ops.slots)])


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return [_plain(getattr(value, f.name)) for f in fields(value)]
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _ranks(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s' * (num_ranks != 1)}"


def _require_same_groups(planned: LayerGraph, here: LayerGraph) -> None:
    if alone := set(planned.group_by_name) ^ set(here.group_by_name):
        raise ValueError(f"the plan was made for another model: only one of them has a group {min(alone)}; plan anew")
    for group in here.groups:
        before = planned.group(group.name)
        if (before.numel, before.num_trainable) != (group.numel, group.num_trainable):
            raise ValueError(
                f"the plan was made for another model: {group.name} had {before.numel} elements ({before.num_trainable} "
                f"trainable), here it has {group.numel} ({group.num_trainable}); plan anew"
            )


def read_solver_record(value: object, where: str) -> SolverRecord:
    """The record in a YAML mapping. ValueError, naming `where` and key, for anything unknown, missing or of another type."""
    return _record(SolverRecord, value, f"{where}: solver")


def read_verdict(value: object, where: str) -> Verdict:
    """As :func:`read_solver_record`."""
    return _record(Verdict, value, f"{where}: validation")


def _from_content(content: object, where: str) -> PlanFile:
    top = as_mapping(content, where)
    if top.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{where}: format: {top['format']!r} is not one that this version reads ({FORMAT}); plan anew")
    check_keys(top, (*KEYS, *OPTIONAL_KEYS), where, required=KEYS)
    model = as_mapping(top["model"], f"{where}: model")
    keys = ("name", "hash", "params_hash", "stages", "groups")
    check_keys(model, (*keys, "lanes"), f"{where}: model", required=keys)
    layers = _read_graph(top, model, where)
    decisions = read_decisions(top, where, layers)
    ops = as_mapping(top["ops"], f"{where}: ops")
    check_keys(ops, ("hash", "decisions_hash"), f"{where}: ops")
    return PlanFile(
        slidedp=as_str(top["slidedp"], f"{where}: slidedp"),
        layers=recut(layers, decisions.slices),  # other ones than planned, if it was edited
        hardware=_record(Identity, top["hardware"], f"{where}: hardware"),
        cost_model=_record(Identity, top["cost_model"], f"{where}: cost_model"),
        budgets=_record(Budgets, top["budgets"], f"{where}: budgets"),
        decisions=decisions,
        predictions=_record(Predictions, top["predictions"], f"{where}: predictions"),
        ops_hash=as_str(ops["hash"], f"{where}: ops: hash"),
        decisions_hash=as_str(ops["decisions_hash"], f"{where}: ops: decisions_hash"),
        model_hash=as_str(model["hash"], f"{where}: model: hash"),
        params_hash=as_str(model["params_hash"], f"{where}: model: params_hash"),
        specialisation=_read_specialisation(top["specialisation"], f"{where}: specialisation"),
        costs=read_costs(top["costs"], f"{where}: costs") if "costs" in top else None,
        solver=read_solver_record(top["solver"], where) if "solver" in top else None,
        sliced=as_str(top.get("sliced", ""), f"{where}: sliced"),
        validation=read_verdict(top["validation"], where) if "validation" in top else None,
    )


def _read_graph(top: Mapping[str, Any], model: Mapping[str, Any], where: str) -> LayerGraph:
    for key in ("compute_dtype", "grad_dtype"):
        if top[key] not in tuple(ITEMSIZE):
            raise ValueError(f"{where}: {key}: {top[key]!r} is unknown; allowed: {', '.join(ITEMSIZE)}")
    world_size = as_int(top["world_size"], f"{where}: world_size", 1)
    stages, groups = read_layers(model, world_size, f"{where}: model")
    name = as_str(model["name"], f"{where}: model: name")
    lanes, slices = read_lanes(model, stages, f"{where}: model")
    layers = LayerGraph(stages, groups, world_size, top["compute_dtype"], top["grad_dtype"], name, lanes, slices)
    if model["hash"] != model_hash(layers):
        raise ValueError(f"{where}: model: hash: {model['hash']!r} is not that of the layer table ({model_hash(layers)}): the "
                         "table was edited; plan anew")
    return layers


def _read_specialisation(value: object, where: str) -> dict[str, str | int]:
    mapping = as_mapping(value, where)
    for key, entry in mapping.items():
        if isinstance(entry, bool) or not isinstance(entry, str | int):
            raise ValueError(f"{where}: {key}: expected a string or a whole number, got {entry!r}")
    return mapping


def _record(cls: type[Record], value: object, where: str) -> Record:
    """An instance of a flat dataclass of str, int and float fields."""
    mapping = as_mapping(value, where)
    names = {f.name: str(f.type) for f in fields(cls)}
    check_keys(mapping, list(names), where, required=[f.name for f in fields(cls) if f.default is MISSING])
    read: dict[str, Any] = {"str": as_str, "int": as_int, "float": as_float}
    return cls(**{name: read[names[name]](value, f"{where}: {name}") for name, value in mapping.items()})
