"""The user's module between steps: what its parameters show, and what the user may have written into them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slidedp.executor.shared.words import PeerError
from slidedp.executor.streams.tickets import Aborted

if TYPE_CHECKING:
    from slidedp.executor.machine.machine import Machine


class Exposure:
    """Shows one machine's state in the user's module, and takes over what the user writes into it.

    `exposed`: the user may have written into the masters since the last step; `changed`: this rank has taken that over, and state
    in HBM has to follow, on all ranks (:meth:`refresh`).
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.exposed = self.changed = False

    def expose(self) -> None:
        """The module has the master weights as its parameters, until the next step. Nothing may be in flight."""
        self.show_resident()
        self.show(self._machine.num_steps)
        self._machine.binding.restore()
        self.exposed = True

    def show(self, step: int) -> None:
        """Host state and parameters are as after `step`. Nothing may be in flight."""
        state = self._machine.state
        changed = state.show(step + 1)
        self._machine.binding.release({name: state.master[name] for name in changed})

    def show_resident(self) -> None:
        """The masters of groups whose state is in HBM are current on the host. Nothing may be in flight."""
        resident, failure = self._machine.resident, self._machine.failure
        if resident:
            try:
                resident.show(failure.check)
            except (PeerError, Aborted) as e:
                raise failure.cause(e) from e

    def take_back(self) -> None:
        """What the user may have written into the masters (``load_state_dict``) is in the shadow too from here on.

        Resident state follows with :meth:`refresh`, on all ranks. Raises ValueError for a parameter that has been moved away.
        """
        state, binding = self._machine.state, self._machine.binding
        if self.exposed:
            if moved := binding.moved():
                binding.release(state.master, force=True)
                raise ValueError(
                    f"parameter {moved} is no longer the plan's (was the model converted or moved, e.g. with .to(...)?); its "
                    "masters are bound again, and training can go on: convert a copy.deepcopy(plan.model) instead"
                )
            for group, shadow in state.shadow.items():
                self._machine.casting.cast(state.master[group], shadow)
            self.exposed, self.changed = False, True

    def refresh(self) -> None:
        """What a rank (`changed`) may have written into masters is in HBM too from here on. On all ranks, none in a step."""
        resident = self._machine.resident
        if resident and resident.groups:
            self._machine.synchronize()
            resident.upload()
        self.changed = False
