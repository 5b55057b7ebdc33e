"""Which saved tensors leave, as a pure function of what a step has saved.

The first tensors that a forward saves are the last that its backward needs: among equal
sizes, replacing one that leaves by an earlier one relaxes both its deadlines. So what
leaves is a *prefix*, and the smallest that keeps the rest within the budget.

`foresee` says what that costs. Copies out follow each other as their tensors are saved;
who saves waits as long as there is no room. Copies back follow each other in backward
order, each as soon as there is room; who needs one waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Forecast",
    "Prefix",
    "Rates",
    "Save",
    "best_prefix",
    "foresee",
    "plan_prefix",
]

_LONGER = 8  # prefixes that are tried
_VAIN = 0.05  # of what leaves
_ROUNDING = 1e-6  # an overhead of less is none


@dataclass(frozen=True, slots=True)
class Save:
    """One storage that a step saves, in the order in which it saves them."""

    nbytes: int
    forward: float = 0.0
    """Seconds of compute from this save to the next."""
    backward: float = 0.0
    """Seconds of compute in backward while it is needed."""
    free: bool = True
    """Nobody but the graph keeps it: letting it go frees memory."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What leaves: the first `count` storages, but those in `skipped`."""

    count: int
    nbytes: int
    """Bytes of what leaves."""
    kept_bytes: int
    """Bytes of all storages that come after the prefix."""
    skipped: frozenset[int]
    """Positions before `count` that leaving would not free."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second over the link, each way."""

    d2h: float
    h2d: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a prefix costs, in seconds."""

    compute: float
    """The step without any spilling."""
    forward_stall: float
    """How long saving waits for room."""
    backward_stall: float
    """How long backward waits for what comes back."""
    peak_bytes: int
    """The most bytes of saved storages on the device."""
    vain_bytes: int
    """Bytes copied to the host that are still on the device when backward begins."""

    @property
    def stall(self) -> float:
        """All of the waiting."""
        return self.forward_stall + self.backward_stall

    @property
    def overhead(self) -> float:
        """The waiting over the compute."""
        return self.stall / self.compute if self.compute else 0.0


def best_prefix(
    saves: Sequence[Save], budget_bytes: int, rates: Rates
) -> tuple[Prefix, Forecast]:
    """Return the prefix that costs least, and what it costs.

    It is the smallest one that keeps the budget, or slightly longer: where the last
    tensors take no time, room at the turn lets the first copy back start earlier.
    """
    smallest = plan_prefix(saves, budget_bytes)
    best = smallest, foresee(saves, smallest, budget_bytes, rates)
    for longer in range(1, _LONGER):
        if not smallest.count or best[1].overhead < _ROUNDING:
            break
        if smallest.count + longer >= len(saves):
            break
        prefix = plan_prefix(saves, budget_bytes, at_least=smallest.count + longer)
        forecast = foresee(saves, prefix, budget_bytes, rates)
        if forecast.vain_bytes > max(best[1].vain_bytes, _VAIN * prefix.nbytes):
            break  # it would not leave in time
        if forecast.stall < 0.99 * best[1].stall:
            best = prefix, forecast
    return best


def plan_prefix(
    saves: Sequence[Save], budget_bytes: int, *, at_least: int = 0
) -> Prefix:
    """Return the smallest prefix that leaves no more than the budget on the device.

    Args:
        saves: All of the step.
        budget_bytes: Of saved storages on the device.
        at_least: Its smallest length.
    """
    kept = sum(save.nbytes for save in saves)
    count = left = 0
    skipped = []
    while count < len(saves) and (kept > budget_bytes or count < at_least):
        save = saves[count]
        kept -= save.nbytes
        if save.free:
            left += save.nbytes
        else:
            skipped.append(count)
        count += 1
    return Prefix(count, left, kept, frozenset(skipped))


def foresee(
    saves: Sequence[Save],
    prefix: Prefix,
    budget_bytes: int,
    rates: Rates,
) -> Forecast:
    """Return what a prefix costs.

    Args:
        saves: All of the step.
        prefix: What leaves.
        budget_bytes: Of saved storages on the device.
        rates: Of the link.
    """
    away = [
        number
        for number in range(prefix.count)
        if saves[number].free and number not in prefix.skipped
    ]
    leaves = set(away)
    saves = [
        save if save.free or number >= prefix.count else replace(save, nbytes=0)
        for number, save in enumerate(saves)
    ]
    forward = _Forward(budget_bytes, rates.d2h)
    for number, save in enumerate(saves):
        forward.save(save.nbytes, leaves=number in leaves)
        forward.now += save.forward
    computed = sum(save.forward for save in saves)
    # What has not left when backward begins is there: the newest of the prefix.
    turn = len(away) - forward.undone()
    gone = away[:turn]
    backward = _Backward(saves, gone, budget_bytes, rates.h2d, forward.held)
    backward.run()
    compute = computed + sum(save.backward for save in saves)
    return Forecast(
        compute,
        forward.now - computed,
        backward.now - (compute - computed),
        max(forward.peak, backward.peak),
        sum(saves[number].nbytes for number in away[turn:]),
    )


class _Forward:
    """Copies out, one after the other."""

    def __init__(self, budget_bytes: int, rate: float) -> None:
        self.now = 0.0
        self.held = self.peak = 0
        self._budget = budget_bytes
        self._rate = rate
        self._free_at = 0.0
        self._out: deque[tuple[float, int]] = deque()

    def save(self, nbytes: int, *, leaves: bool) -> None:
        while self._out and (
            self._out[0][0] <= self.now or self.held + nbytes > self._budget
        ):
            done, freed = self._out.popleft()
            self.now = max(self.now, done)
            self.held -= freed
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        if leaves:
            self._free_at = max(self._free_at, self.now) + nbytes / self._rate
            self._out.append((self._free_at, nbytes))

    def undone(self) -> int:
        while self._out and self._out[0][0] <= self.now:
            self.held -= self._out.popleft()[1]
        return len(self._out)


class _Backward:
    """Copies back, one after the other, each as soon as there is room."""

    def __init__(
        self,
        saves: Sequence[Save],
        gone: Sequence[int],
        budget_bytes: int,
        rate: float,
        held: int,
    ) -> None:
        self.now = 0.0
        self.held = self.peak = held
        self._saves = saves
        self._coming = list(gone)  # the last is needed first
        self._back: dict[int, float] = {}
        self._budget = budget_bytes
        self._rate = rate
        self._free_at = 0.0

    def run(self) -> None:
        away = set(self._coming)
        for number in range(len(self._saves) - 1, -1, -1):
            save = self._saves[number]
            while self._coming and self._fits(self._coming[-1]):
                self._fetch()
            if number in away:
                if number not in self._back:
                    self._fetch()
                self.now = max(self.now, self._back[number])
            self.now += save.backward
            self.held -= save.nbytes

    def _fits(self, number: int) -> bool:
        return self.held + self._saves[number].nbytes <= self._budget

    def _fetch(self) -> None:
        number = self._coming.pop()
        nbytes = self._saves[number].nbytes
        self._free_at = max(self._free_at, self.now) + nbytes / self._rate
        self._back[number] = self._free_at
        self.held += nbytes
        self.peak = max(self.peak, self.held)
