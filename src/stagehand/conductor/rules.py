"""The rules by which limits are set: pure functions from what is read to `Limits`.

Whoever wants others gives the conductor a function of its own. Whatever a policy says,
the conductor only tightens within a step, and starts anew with the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stagehand.core.clock import Phase
from stagehand.core.limits import NO_LIMITS, Limits, tightest

__all__ = [
    "Policy",
    "Readings",
    "backward_pressure",
    "contention",
    "heuristic",
    "optimizer_protection",
]

_PRESSURE = 0.8
_CHECKS = 3
_UNDER_PRESSURE = Limits(lookahead_blocks=1, suppress_speculative=True)
_FOR_THE_OPTIMIZER = Limits(inflight_h2d=1, suppress_speculative=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """What a policy decides by."""

    phase: Phase
    """The phase that begins."""
    pressure: float | None = None
    """Allocated device bytes over the hard cap; None if it was not measured."""
    full_checks: int = 0
    """How many checks in a row, this one included, found all slots to the device in
    use and somebody denied one."""
    window: int = 0
    """The most blocks that any attached runtime loads ahead."""


Policy = Callable[[Readings], Limits]
"""Called at every phase. What it returns may depend on the `Readings` alone."""


def heuristic(readings: Readings) -> Limits:
    """Return the tightest of the three rules."""
    limits = tightest(backward_pressure(readings), optimizer_protection(readings))
    return tightest(limits, contention(readings))


def backward_pressure(readings: Readings) -> Limits:
    """Leave the device's memory to backward when more than 80 % of it is used."""
    pressure = readings.pressure
    if readings.phase is not Phase.BACKWARD or pressure is None:
        return NO_LIMITS
    return _UNDER_PRESSURE if pressure > _PRESSURE else NO_LIMITS


def optimizer_protection(readings: Readings) -> Limits:
    """Load nothing ahead while the optimizer needs memory and link for its state."""
    return _FOR_THE_OPTIMIZER if readings.phase is Phase.OPTIMIZER else NO_LIMITS


def contention(readings: Readings) -> Limits:
    """Shrink the window by one block for every check beyond three that was full."""
    beyond = readings.full_checks - _CHECKS
    if beyond <= 0 or not readings.window:
        return NO_LIMITS
    return Limits(lookahead_blocks=max(1, readings.window - beyond))
