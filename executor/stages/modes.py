"""Training mode, module by module: a layer that is run again has the modes that its forward had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from slidedp.compiler.tracing.tracer import Trace

_Modes = list[tuple[nn.Module, bool]]


class Modes:
    """Modes of one model's modules at the start of a step."""

    def __init__(self, trace: Trace, model: nn.Module) -> None:
        self._model, self._stages = model, ["", *(p.name for p in trace.programs)]
        self._callers: dict[nn.Module, str] = {}  # module -> the stage that calls it; '' if there are several
        for program in trace.programs:
            for called in {str(node.target) for node in program.graph.nodes if node.op == "call_module"}:
                for module in model.get_submodule(called).modules():
                    stage = self._callers.setdefault(module, program.name)
                    self._callers[module] = stage if stage == program.name else ""

    def start(self) -> None:
        """A step begins."""
        self._modes: dict[str, _Modes] = {stage: [] for stage in self._stages}
        for module in self._model.modules():
            self._modes[self._callers.get(module, "")].append((module, module.training))

    def as_they_were(self, stage: str) -> AbstractContextManager[None]:
        """Context of running a stage again, whatever ``eval()`` or ``train()`` has been called since the step began.

        Modules that another stage alone calls are left out: a model has hundreds.
        """
        changed = [(m, mode) for modes in (self._modes[stage], self._modes[""]) for m, mode in modes if m.training != mode]
        return _put_back(changed) if changed else nullcontext()


@contextmanager
def _put_back(modes: _Modes) -> Iterator[None]:
    for module, mode in modes:
        module.training = mode
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = not mode
