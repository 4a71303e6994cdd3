"""The user's module bound to where its weights are: views of a slot while a stage runs, of the master weights otherwise.

A parameter is exchanged in the `_parameters` dictionaries of the modules that hold it, as `torch.func.functional_call`
does; a tied weight is in several. Buffers are bound likewise, on a GPU to device copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slidedp.compiler.layergraph import Group, Param
from slidedp.executor.devices.parcels import Geometry
from slidedp.executor.state.host_state import shaped

Place = tuple[MutableMapping[str, Any], str]
"""A `_parameters` or `_buffers` dictionary and a key in it."""


_OWNED = "_slidedp_owned"
"""In a module's `__dict__` while a plan is open on it: its own id, so that a copy of the module is nobody's."""


class Leaves(list[Tensor]):
    """A group's parameters as autograd leaves over a slot (:meth:`Binding.leaves`). It does not change.

    `trainable`: those that require a gradient. `views`: other tensors over the same memory, kept because each backward asks for
    the same ones (saved.py); they need the slot for no longer than the leaves do.
    """

    def __init__(self, leaves: Iterable[Tensor] = ()) -> None:
        super().__init__(leaves)
        self.trainable = [leaf for leaf in self if leaf.requires_grad]
        self.views: dict[Geometry, Tensor] = {}


class Masters(Protocol):
    """What `adopt` needs of the host state (executor/state/host_state.py)."""

    @property
    def master(self) -> Mapping[str, Tensor]: ...

    def load(self, values: Mapping[str, Tensor]) -> None: ...


class Binding:
    """One module and the parameter groups of its plan.

    Raises ValueError when `model` lacks one of the groups' parameters, or holds or hooks one in a way that exchanging it
    would miss.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        self.model = model
        self.groups = {g.name: g for g in groups}
        self.buffers: BufferStore | None = None
        named = dict(model.named_parameters(remove_duplicate=False))
        places = _places(model, "_parameters")
        self._params: dict[str, list[nn.Parameter]] = {}
        self._places: dict[str, list[list[Place]]] = {}
        self._bound: dict[str, list[Tensor]] = {}
        self._addresses: dict[tuple[str, int], int] = {}
        for group in groups:
            params = [_find(named, p, model) for p in group.params]
            self._params[group.name] = params
            self._places[group.name] = [places[id(p)] for p in params]
        ours = {id(p): q.name for g in groups for p, q in zip(self._params[g.name], g.params, strict=True)}
        _refuse_hidden_references(model, ours)
        self._recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]

    # ---- between runs: the master weights ----

    def adopt(self, state: Masters) -> None:
        """Copies the parameters' values into the master weights, then makes the parameters views of them. Collective.

        Parameters on the meta device (ranks other than 0) are replaced by new ones; elsewhere the objects stay.
        """
        shared = shared_state_ranges()
        pairs = [(q.name, p) for g in self.groups.values() for q, p in zip(g.params, self._params[g.name], strict=True)]
        for name, own in pairs:
            if own.device.type == "cpu" and any(lo <= own.data_ptr() < hi for lo, hi in shared):
                raise ValueError(f"parameter {name} belongs to a plan that is still open: close it before compiling its model")
        state.load(dict(pairs))
        self.release(state.master)
        self.model.__dict__[_OWNED] = id(self.model)

    def _is_elsewhere(self, group: str, i: int) -> bool:
        ours, own = self._addresses.get((group, i)), self._params[group][i]
        return ours is not None and own.numel() > 0 and own.data_ptr() != ours

    def moved(self) -> str | None:
        """Name of a parameter that has been given memory of its own (``model.to(...)``), if there is one."""
        for name, group in self.groups.items():
            for i, param in enumerate(group.params):
                if self._is_elsewhere(name, i):
                    return param.name
        return None

    def release(self, masters: Mapping[str, Tensor], *, force: bool = False) -> None:
        """Makes the parameters views of these flat FP32 masters, by group, e.g. those that outlive the plan.

        Parameters that have been moved elsewhere stay there, unless `force`.
        """
        for name, flat in masters.items():
            for i, param in enumerate(self.groups[name].params):
                view, own = shaped(flat, param), self._params[name][i]
                if self._is_elsewhere(name, i) and not force:
                    continue  # the user has given it other memory: that is what it holds now
                self._addresses[name, i] = view.data_ptr()
                if own.device.type == "meta":
                    own = self._params[name][i] = nn.Parameter(view, requires_grad=own.requires_grad)
                    _set(self._places[name][i], own)
                else:
                    own.data = view

    # ---- while a step runs ----

    def leaves(self, flat: Tensor, group: str) -> Leaves:
        """Views of a slot, one a parameter and in its shape: autograd leaves, requiring gradients where trainable."""
        return Leaves(shaped(flat, p).detach().requires_grad_(p.trainable) for p in self.groups[group].params)

    def bind(self, group: str, views: list[Tensor]) -> None:
        """Puts these tensors (from :meth:`leaves`) where the group's parameters are. By the thread that runs the stages."""
        if self._bound.get(group) is views:
            return
        if not self._bound:
            for module in self._recurrent:  # cuDNN's flattening would move the views out of their slot
                module.__dict__["flatten_parameters"] = _no_flattening
        for places, view in zip(self._places[group], views, strict=True):
            _set(places, view)
        self._bound[group] = views

    def bind_buffers(self, device: torch.device) -> BufferStore:
        """The module's buffers on `device`, until `restore`. Raises ValueError for a buffer without values."""
        if self.buffers is None:
            self.buffers = BufferStore(self.model, device)
        self.buffers.bind()
        return self.buffers

    def restore(self) -> None:
        """The user's own parameters and buffers again. Nothing may be running on the module."""
        for group in self._bound:
            for places, param in zip(self._places[group], self._params[group], strict=True):
                _set(places, param)
        if self._bound:
            for module in self._recurrent:
                module.__dict__.pop("flatten_parameters", None)
                _refresh_flat_weights(module)
        self._bound.clear()
        if self.buffers is not None:
            self.buffers.restore()


    def give_back(self) -> None:
        """Gives the model back to the user, even if its buffers cannot be copied back from the device. Idempotent."""
        try:
            self.restore()
        finally:
            self.model.__dict__.pop(_OWNED, None)


def refuse_owned(model: nn.Module) -> None:
    """ValueError if a plan that is still open runs `model` or a part of it: they would exchange each other's weights."""
    for name, module in model.named_modules():
        if module.__dict__.get(_OWNED) == id(module):
            part = f"its {name} belongs" if name else "it belongs"
            raise ValueError(f"{type(model).__name__} cannot be compiled: {part} to a plan that is still open; close that one "
                             "first, with plan.close() or by using it in a with block")


def shared_state_ranges() -> list[tuple[int, int]]:
    """Addresses of the host states that plans of this process have mapped (segment.py); a closed plan's are private."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:slidedp-" in line and line.split()[1].endswith("s"):
                lo, _, hi = line.split()[0].partition("-")
                found.append((int(lo, 16), int(hi, 16)))
    return found


class BufferStore:
    """The module's buffers while it runs on `device`: themselves if they are there already, else copies, written back."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._places: dict[str, list[Place]] = {}
        self._copied: dict[str, tuple[Tensor, Tensor, int]] = {}  # name -> the user's buffer, our copy and its version
        self._owners: dict[str, nn.Module] = {}
        places = _places(model, "_buffers")
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.device.type == "meta":
                raise ValueError(
                    f"buffer {name} has no values (it is on the meta device); build the model on a real device, or share "
                    "rank 0's buffers with share_buffers"
                )
            self._places[name] = places[id(buffer)]
            self._owners[name] = modules[name.rpartition(".")[0]]

    def bind(self) -> None:
        """Idempotent until `restore`."""
        if self._copied:
            return
        copies: dict[int, Tensor] = {}
        for name in self._places:
            buffer = self.get(name)
            if buffer.device != self._device:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.to(self._device)
                copy = copies[id(buffer)]
                self._copied[name] = (buffer, copy, copy._version)
        for name, (_, copy, _) in self._copied.items():
            self.set(name, copy)

    def get(self, name: str) -> Tensor:
        """What the module holds now: a forward may have put a new tensor there."""
        container, key = self._places[name][0]
        buffer: Tensor = container[key]
        return buffer

    def set(self, name: str, value: Tensor) -> None:
        _set(self._places[name], value)

    def owner(self, name: str) -> nn.Module:
        return self._owners[name]

    def restore(self) -> None:
        """The user's buffers again, with what has changed copied back. Idempotent. Raises RuntimeError, with all of them in their
        places, if the device does not give one back.
        """
        failed: RuntimeError | None = None
        for name, (original, copy, version) in self._copied.items():
            now = self.get(name)
            if now is original:
                continue  # done under another of its names
            if now is not copy or copy._version != version or isinstance(self._owners[name], nn.modules.batchnorm._NormBase):
                try:
                    original = _copied_back(now, original)
                except RuntimeError as e:
                    failed = e
            self.set(name, original)
        self._copied.clear()
        if failed is not None:
            raise failed


@torch.no_grad()
def _copied_back(now: Tensor, original: Tensor) -> Tensor:
    if now.shape != original.shape or now.dtype != original.dtype:
        return now.to(original.device)
    return original.copy_(now)


class _Broadcasts(Protocol):
    rank: int

    def gather_ints(self, values: list[int]) -> list[list[int]]: ...
    def broadcast(self, tensor: Tensor) -> None: ...


def share_buffers(model: nn.Module, collectives: _Broadcasts) -> None:
    """Gives ranks that built the model on the meta device rank 0's buffers, on the host. Collective.

    Raises ValueError on every rank when rank 0 itself lacks one's values.
    """
    named = dict(model.named_buffers(remove_duplicate=False))
    lacking = collectives.gather_ints([int(b.device.type == "meta") for b in named.values()])
    places = _places(model, "_buffers")
    done: set[int] = set()
    for i, (name, buffer) in enumerate(named.items()):
        if id(buffer) in done or not any(rank[i] for rank in lacking):
            continue
        done.add(id(buffer))
        if lacking[0][i]:
            raise ValueError(f"buffer {name} has no values on rank 0 (it is on the meta device); build rank 0's model with them")
        values = torch.empty(buffer.shape, dtype=buffer.dtype) if collectives.rank else buffer.detach().to("cpu", copy=True)
        collectives.broadcast(values)
        if buffer.device.type == "meta":
            _set(places[id(buffer)], values)


def _places(model: nn.Module, attribute: str) -> dict[int, list[Place]]:
    """Identity of each parameter or buffer -> everywhere it is held (a shared module counts once)."""
    found: dict[int, list[Place]] = {}
    for module in model.modules():
        container = getattr(module, attribute)
        for key, tensor in container.items():
            if tensor is not None:
                found.setdefault(id(tensor), []).append((container, key))
    return found


def _set(places: Iterable[Place], value: Tensor) -> None:
    for container, key in places:
        container[key] = value


def _find(named: Mapping[str, nn.Parameter], param: Param, model: nn.Module) -> nn.Parameter:
    own = named.get(param.name)
    if own is None:
        raise ValueError(f"{type(model).__name__} has no parameter {param.name}: this is a plan for another model")
    if tuple(own.shape) != param.shape:
        raise ValueError(f"parameter {param.name}: the plan is for shape {param.shape}, the model has {tuple(own.shape)}")
    if any(named.get(name) is not own for name in param.names):
        raise ValueError(f"parameter {param.name} is no longer tied to all of {', '.join(param.names)}; compile the model anew")
    if own._backward_hooks or getattr(own, "_post_accumulate_grad_hooks", None):
        raise ValueError(f"parameter {param.name} has gradient hooks, which would not run; remove them")
    return own


def _refuse_hidden_references(model: nn.Module, ours: Mapping[int, str]) -> None:
    """A module that also keeps a parameter in a plain attribute would go on using the old tensor."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_flat_weights"):  # nn.RNNBase renews the latter by itself
                continue
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            for held in values:
                if isinstance(held, nn.Parameter) and id(held) in ours:
                    raise ValueError(
                        f"{path or 'the model'} ({type(module).__name__}) keeps parameter {ours[id(held)]} in its attribute "
                        f"{attribute}, outside its registered parameters; look it up by name in forward instead"
                    )


def _no_flattening() -> None:
    """Stands in for `nn.RNNBase.flatten_parameters`."""


def _refresh_flat_weights(module: nn.RNNBase) -> None:
    names = module._flat_weights_names
    module._flat_weights = [getattr(module, name, None) for name in names]
    module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]
