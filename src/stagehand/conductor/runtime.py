"""The conductor: follows the phases of a step and publishes limits at each."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from stagehand.attribute import HANDLE
from stagehand.conductor.adapters import Conducted, PinnedUse
from stagehand.conductor.config import ConductorConfig
from stagehand.conductor.parts import Parts
from stagehand.conductor.rules import heuristic
from stagehand.core.clock import Phase, PhaseClock
from stagehand.core.device import find_device
from stagehand.errors import ConfigError
from stagehand.settings import check_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from stagehand.conductor.budget import Budget
    from stagehand.conductor.link import LinkRates
    from stagehand.conductor.record import Recorder
    from stagehand.conductor.rules import Policy
    from stagehand.conductor.slots import LinkSlots
    from stagehand.core.limits import Limits

__all__ = ["ConductorRuntime"]


class ConductorRuntime:
    """Arbitrates memory and the link of one device between all that is attached.

    At every phase of a step the policy says how much may be loaded ahead and copied at
    once. Within a step these limits only become tighter; a step begins without any.
    Phases are those of torch's optimizers and of one attached runtime, the first that
    loads weights ahead, or else the first that has phases. Once a phase is told here,
    only what is told counts.

    Keep it as long as it shall conduct: dropped without `shutdown()`, it leaves
    everything as it was. With `enabled=False` it has no parts and its methods return at
    once.

    Args:
        config: Caps, slots and the like.
        device: Which device: the accelerator by default.
        policy: Replaces the three rules.

    Raises:
        ConfigError: If there is no such device, a telemetry file cannot be made, or the
            policy is no function.

    Example:
        >>> conductor = stagehand.ConductorRuntime(stagehand.ConductorConfig())
        >>> conductor.attach(model)
        >>> conductor.begin_step(0)
        >>> conductor.enter_forward()
    """

    def __init__(
        self,
        config: ConductorConfig | None = None,
        *,
        device: torch.device | str | int | None = None,
        policy: Policy = heuristic,
    ) -> None:
        config = ConductorConfig() if config is None else config
        _check(
            "config", config, isinstance(config, ConductorConfig), "a ConductorConfig"
        )
        _check("policy", policy, callable(policy), "a function of Readings")
        self._enabled = config.enabled
        if not config.enabled:
            return
        self._parts = Parts(config, find_device(device), policy)
        weakref.finalize(self, self._parts.drop).atexit = False

    def __repr__(self) -> str:
        if not self._enabled:
            return "ConductorRuntime(disabled)"
        return f"ConductorRuntime({self._parts!r})"

    # Phases

    def begin_step(self, step: int | None = None) -> None:
        """Begin a step; from then on phases are told, not detected.

        Args:
            step: Its number; the next one by default.

        Raises:
            ConfigError: If the number is negative.
        """
        if self._enabled:
            self._parts.tell(lambda clock: clock.begin_step(step))

    def enter_forward(self) -> None:
        """Enter the forward phase.

        Raises:
            ConfigError: If it cannot follow the current phase, or no step is open.
        """
        if self._enabled:
            self._parts.tell(lambda clock: clock.enter(Phase.FORWARD))

    def enter_backward(self) -> None:
        """Enter the backward phase; see `enter_forward`."""
        if self._enabled:
            self._parts.tell(lambda clock: clock.enter(Phase.BACKWARD))

    def enter_optimizer(self) -> None:
        """Enter the optimizer's phase; see `enter_forward`."""
        if self._enabled:
            self._parts.tell(lambda clock: clock.enter(Phase.OPTIMIZER))

    def end_step(self) -> None:
        """End the step. Without one, nothing happens."""
        if self._enabled:
            self._parts.tell(PhaseClock.end_step)

    # What is attached

    def attach(
        self, runtime: Conducted | nn.Module, *, name: str | None = None
    ) -> None:
        """Let limits hold for a runtime, and its copies take this device's slots.

        Its budget is booked in the device account.

        Args:
            runtime: A `StagehandRuntime`, an `ActivationRuntime`, or a streamed model.
            name: Its name in records.

        Raises:
            ConfigError: If it is attached already, computes on another device, or
                cannot be attached at all.
            StagehandOOMError: If its budget does not fit beside what is granted.
        """
        if self._enabled:
            check_value("name", name, str | None)
            self._parts.attach(_conducted(runtime, "attached"), name)

    def attach_store(self, name: str, read: Callable[[], Mapping[str, Any]]) -> None:
        """Let what a quantized store uses appear in records.

        Args:
            name: Its name there.
            read: Returns numbers, "pinned_bytes" among them.

        Raises:
            ConfigError: If the name is taken or no text, or `read` is no function.
        """
        if self._enabled:
            check_value("name", name, str)
            _check("read", read, callable(read), "a function that returns numbers")
            self._parts.add(PinnedUse(name, read))

    def detach(self, runtime: Conducted | nn.Module | str) -> None:
        """Take off what `attach` did: everything is as it was. Idempotent.

        Args:
            runtime: What was attached, or its name.

        Raises:
            ConfigError: If it is nothing that could be attached.
        """
        if self._enabled:
            name = runtime if isinstance(runtime, str) else None
            found = None if name is not None else _conducted(runtime, "detached")
            self._parts.detach(found, name)

    # Parts

    @property
    def enabled(self) -> bool:
        """Whether it has any parts."""
        return self._enabled

    @property
    def budget(self) -> Budget:
        """Reservations of memory."""
        return self._open().budget

    @property
    def transfer(self) -> LinkSlots:
        """The slots of the link."""
        return self._open().slots

    @property
    def clock(self) -> PhaseClock:
        """The step and the phase."""
        return self._open().clock

    @property
    def limits(self) -> Limits:
        """What holds now."""
        return self._open().limits

    @property
    def link(self) -> LinkRates | None:
        """The measured rates of the link; None if they were not measured."""
        return self._open().rates

    @property
    def telemetry(self) -> Recorder:
        """The latest records, and events if they are traced."""
        return self._open().recorder

    def _open(self) -> Parts:
        if not self._enabled:
            raise ConfigError(
                "a disabled conductor has no parts; make one with"
                " ConductorConfig(enabled=True)"
            )
        return self._parts

    def shutdown(self) -> None:
        """Detach everything and end. Idempotent."""
        if self._enabled:
            self._parts.close()


def _check(name: str, given: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"{name} is a {type(given).__name__}: expected {expected}")


def _conducted(runtime: object, done: str) -> Conducted:
    if isinstance(runtime, nn.Module):
        runtime = runtime.__dict__.get(HANDLE, runtime)
    if not isinstance(runtime, Conducted):
        raise ConfigError(
            f"what is to be {done} is of type {type(runtime).__name__}: expected a"
            " streamed model or a runtime with limits of its own"
        )
    return runtime
