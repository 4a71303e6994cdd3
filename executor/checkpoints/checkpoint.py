"""What a checkpoint holds, and how the host state gets into it and out of it.

    model-00001-of-00004.safetensors    FP32 master weights and buffers under the model's own names, a few groups a file;
    model.safetensors.index.json        with config.json, a directory that `from_pretrained` loads
    moments-00001-of-00004.safetensors  ``exp_avg.NAME``, ``exp_avg_sq.NAME`` of trainable parameters
    rng-00000.safetensors               generators of each rank
    training.json                       step, step counts of the parameters, and what the caller adds (data position, …)

Nothing in it depends on ranks, routes, chunks or device: any plan of the same model can resume from it. Ranks share the
files of one save, and of one load, evenly; no process ever holds more than one file's tensors beside the state. Moments that
live in HBM, in parts on all ranks, come together in shared memory for one file at a time (checkpoint_moments.py). A save beside
training writes the same bytes in other pieces (tensor_files.py, snapshot.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from slidedp.compiler.layergraph import Group
from slidedp.executor.checkpoints.checkpoint_files import FileFact, FileLayer
from slidedp.executor.checkpoints.checkpoint_moments import ResidentMoments
from slidedp.executor.checkpoints.tensor_files import TensorFile, layout, tensor_name
from slidedp.executor.errors import CheckpointError
from slidedp.executor.state.host_state import HostState, shaped
from slidedp.executor.state.state_layout import MOMENTS, Buffer

FILE_BYTES = 2 * 2**30
"""Weights of about so many bytes make a file."""

INDEX, TRAINING, BUFFERS = "model.safetensors.index.json", "training.json", "model-buffers.safetensors"


@dataclass(frozen=True)
class Part:
    """Groups whose weights are one file and whose moments are another."""

    model_file: str
    moments_file: str
    groups: tuple[str, ...]


def cut_files(groups: Sequence[Group]) -> list[Part]:
    """Groups in order, as many a file as fit FILE_BYTES; at least one."""
    cut: list[list[Group]] = []
    for group in groups:
        if cut and 4 * sum(g.numel for g in (*cut[-1], group)) <= FILE_BYTES:
            cut[-1].append(group)
        else:
            cut.append([group])
    return [Part(f"model-{i:05d}-of-{len(cut):05d}.safetensors", f"moments-{i:05d}-of-{len(cut):05d}.safetensors",
                 tuple(g.name for g in part)) for i, part in enumerate(cut, 1)]  # fmt: skip


def names_of(groups: Sequence[Group]) -> dict[str, list[int]]:
    """Shape of every parameter, by its first name: what a checkpoint and a model must agree on."""
    return {p.name: list(p.shape) for g in groups for p in g.params}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that `state_dict` holds, in the module's own objects, once each."""
    persistent = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


# ---- writing ----


def file_names(state: HostState, model: nn.Module) -> list[str]:
    """Every file but the manifest, in an order that all ranks share."""
    parts = cut_files(list(state.groups.values()))
    names = [name for part in parts for name in (part.model_file, part.moments_file)]
    extra = [BUFFERS] if persistent_buffers(model) else []
    extra += ["config.json"] if hasattr(getattr(model, "config", None), "to_json_string") else []
    return [*names, *extra, INDEX, TRAINING, *(f"rng-{rank:05d}.safetensors" for rank in range(state.world_size))]


def write_part(directory: Path, state: HostState, model: nn.Module, training: Mapping[str, Any], device: torch.device,
               files: FileLayer, resident: ResidentMoments) -> dict[str, FileFact]:
    """Writes this rank's files; returns their facts. Nothing may be updating the state. Collective."""
    facts: dict[str, FileFact] = {}

    def write(name: str, value: dict[str, Tensor] | str) -> None:
        files.write(directory / name, lambda path: write_file(path, value))
        facts[name] = FileFact.of(directory / name)

    def write_groups(part: Part) -> None:
        write(part.model_file, tensors(state, part, (Buffer.MASTER,)))
        write(part.moments_file, tensors(state, part, MOMENTS, resident.flat))

    parts = cut_files(list(state.groups.values()))
    resident.each([part.groups for part in parts], lambda i: write_groups(parts[i]), to_host=True)
    write(f"rng-{state.rank:05d}.safetensors", rng_states(device))
    if state.rank == 0:
        for name, value in write_once(state, model, training, parts).items():
            write(name, value)
    return facts


def tensor_files(state: HostState, part: Part) -> dict[Buffer, TensorFile]:
    """The two files of a part, by the buffers whose values they hold."""
    def shapes(buffers: Sequence[Buffer]) -> dict[str, Sequence[int]]:
        return {tensor_name(b, p.name): p.shape for name in part.groups for b in buffers for p in state.groups[name].params
                if p.trainable or b is Buffer.MASTER}

    weights, moments = layout(part.model_file, shapes((Buffer.MASTER,))), layout(part.moments_file, shapes(MOMENTS))
    return {Buffer.MASTER: weights, **dict.fromkeys(MOMENTS, moments)}


def write_once(state: HostState, model: nn.Module, training: Mapping[str, Any], parts: Sequence[Part]) -> dict[str, Any]:
    """What rank 0 alone writes, by file: buffers, the model's configuration and index, the training's facts."""
    content: dict[str, Any] = {}
    where = {p.name: part.model_file for part in parts for name in part.groups for p in state.groups[name].params}
    if buffers := persistent_buffers(model):
        content[BUFFERS] = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
        where |= dict.fromkeys(buffers, BUFFERS)
    if hasattr(getattr(model, "config", None), "to_json_string"):
        content["config.json"] = model.config.to_json_string()  # type: ignore[union-attr,operator]
    size = sum(4 * g.numel for g in state.groups.values())
    content[INDEX] = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1)
    content[TRAINING] = json.dumps(training, indent=1)
    return content


def write_file(path: Path, value: dict[str, Tensor] | str) -> None:
    if isinstance(value, str):
        path.write_text(value)
    else:
        save_file(value, path, metadata={"format": "pt"})


def tensors(
    state: HostState, part: Part, buffers: Sequence[Buffer], elsewhere: Mapping[tuple[Buffer, str], Tensor] | None = None
) -> dict[str, Tensor]:
    """The parameters' values in these buffers, by the name that they have in the file.

    `elsewhere`: flat buffers that are not in the host state.
    """
    out: dict[str, Tensor] = {}
    for group in (state.groups[name] for name in part.groups):
        for buffer in buffers:
            params = [p for p in group.params if p.trainable or buffer is Buffer.MASTER]
            if params:
                flat = (elsewhere or {}).get((buffer, group.name))
                views = state.views(buffer, group.name) if flat is None else [shaped(flat, p) for p in params]
                out |= {tensor_name(buffer, p.name): v for p, v in zip(params, views, strict=True)}
    return out


def rng_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


# ---- reading ----


def require_same_model(path: Path, manifest: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """CheckpointError, naming a parameter that differs, unless the checkpoint is of a model with the same parameters."""
    require_same_names(path, manifest["parameters"], names_of(groups))


def require_same_names(path: Path, saved: Mapping[str, list[int]], ours: Mapping[str, list[int]]) -> None:
    """CheckpointError, naming a parameter that differs, unless these are the same names and shapes."""
    for name in [*ours, *saved]:
        if saved.get(name) != ours.get(name):
            raise CheckpointError(f"checkpoint {path} is of another model: parameter {name} has shape "
                                  f"{saved.get(name, '(none)')} there and {ours.get(name, '(none)')} here")


@torch.no_grad()
def read_part(path: Path, manifest: Mapping[str, Any], state: HostState, model: nn.Module, device: torch.device,
              resident: ResidentMoments) -> dict[str, Any]:
    """Reads this rank's share of weights and moments, its own buffers and generators, and training.json. Collective.

    Generators of ranks that the save had not are left as they are. Raises CheckpointError for a file that cannot be read.
    """
    parts = cut_files(list(state.groups.values()))

    def read_groups(part: Part) -> None:
        fill(path, manifest, tensors(state, part, (Buffer.MASTER,)), "model-")
        fill(path, manifest, tensors(state, part, MOMENTS, resident.flat), "moments-")

    try:
        resident.each([part.groups for part in parts], lambda i: read_groups(parts[i]), to_host=False)
        if BUFFERS in manifest["files"]:
            with safe_open(path / BUFFERS, framework="pt") as f:
                for name, buffer in persistent_buffers(model).items():
                    buffer.copy_(f.get_tensor(name))
        rng = path / f"rng-{state.rank:05d}.safetensors"
        if rng.name in manifest["files"]:
            with safe_open(rng, framework="pt") as f:
                saved = set(f.keys())
                torch.set_rng_state(f.get_tensor("cpu"))
                if device.type == "cuda" and "cuda" in saved:
                    torch.cuda.set_rng_state(f.get_tensor("cuda"), device)
        training: dict[str, Any] = json.loads((path / TRAINING).read_text())
        return training
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as e:
        raise CheckpointError(f"checkpoint {path} cannot be read: {type(e).__name__}: {e}") from e


def fill(path: Path, manifest: Mapping[str, Any], targets: Mapping[str, Tensor], prefix: str) -> None:
    """Copies the tensors named in `targets` from the files whose names start with `prefix`, each opened once."""
    left = set(targets)
    for name in manifest["files"]:
        if name.startswith(prefix) and name.endswith(".safetensors") and left:
            with safe_open(path / name, framework="pt") as f:
                for key in left & set(f.keys()):
                    targets[key].copy_(f.get_tensor(key))
                    left.discard(key)
    if left:
        raise KeyError(f"no file holds {min(left)}")
