"""Times of functions that take turns, so that they share the machine's moods."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

__all__ = ["Times", "Until", "by_the_wall", "in_turns", "take_turns", "timed"]

_BOX_SECONDS = 10.0  # until no further round is begun, but for the second
_PATIENCE = 3.0  # times as long again for what misses a target
_PATIENCE_SECONDS = 10.0  # at most

_T = TypeVar("_T")

Until = Callable[[dict[str, "Times"]], bool]
"""Whether what was found is enough."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one function's calls on the calling thread's own clock.

    The smallest is the cost; how far the median lies above it is the machine's noise.
    """

    smallest: float
    median: float

    def over(self, other: "Times", count: int = 1) -> "Times":
        """Return by how much these are longer, for each of `count`."""
        return Times(
            (self.smallest - other.smallest) / count,
            (self.median - other.median) / count,
        )

    def part_of(self, other: "Times") -> "Times":
        """Return the ratio of these to the other's."""
        return Times(self.smallest / other.smallest, self.median / other.median)

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Return those of many calls."""
        return cls(min(seconds), statistics.median(seconds))

    @classmethod
    def of_parts(cls, calls: Sequence[Sequence[float]]) -> "Times":
        """Return those of calls of which each part was timed.

        The smallest is the sum of each part's smallest, in whichever call it was: all
        of a long call is never in a moment in which the machine is fast.
        """
        parts = [cls.of(part) for part in zip(*calls, strict=True)]
        return cls(sum(p.smallest for p in parts), sum(p.median for p in parts))

    @classmethod
    def ratio(cls, mine: Sequence[float], other: Sequence[float]) -> "Times":
        """Return the ratio of the smallest, and the median of each turn's ratio.

        A turn is short, so both of its times are of the same mood of the machine.
        """
        turns = zip(mine, other, strict=True)
        return cls(min(mine) / min(other), statistics.median(m / o for m, o in turns))


def by_the_wall(
    ways: Mapping[str, Callable[[_T], object]],
    turns: Sequence[_T],
    prepare: Callable[[], object] = lambda: None,
    *,
    uncounted: int = 1,
    until: Callable[[dict[str, list[float]]], bool] = lambda _: False,
) -> dict[str, list[float]]:
    """Time by the wall clock what waits for a disk: each way in each turn.

    Args:
        ways: What to time, by name.
        turns: What each way is called with, turn for turn.
        prepare: Called before each.
        uncounted: The first turns do not count: memory is touched for the first time.
        until: When half of the others have been, and this is true of what was found,
            the rest is left out.
    """
    enough = uncounted + (len(turns) - uncounted + 1) // 2
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number, turn in enumerate(turns):
        for name in names:
            prepare()
            start = time.perf_counter()
            ways[name](turn)
            if number >= uncounted:
                seconds[name].append(time.perf_counter() - start)
        names.append(names.pop(0))  # nobody always comes after the same one
        if number + 1 >= enough and until(seconds):
            break
    return seconds


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    until: Until | None = None,
) -> dict[str, Times]:
    """Time functions in turn, after one call of each that is not counted.

    Time in which the thread did not run is not counted, so neighbours on the machine
    disturb only through its caches and its clock rate.

    Args:
        functions: What to time, by name.
        rounds: How many times each is measured, at least.
        calls: How many calls one measurement takes; times are of one call.
        until: See `in_turns`.
    """
    for function in functions.values():
        function()
    each = {
        name: partial(timed, function, calls) for name, function in functions.items()
    }
    return in_turns(each, rounds=rounds, until=until)


def timed(function: Callable[[], object], calls: int = 1) -> list[float]:
    """Call a function some times; return the seconds of one call, for `in_turns`."""
    start = time.thread_time()
    for _ in range(calls):
        function()
    return [(time.thread_time() - start) / calls]


def in_turns(
    functions: Mapping[str, Callable[[], Sequence[float]]],
    *,
    rounds: int,
    until: Until | None = None,
) -> dict[str, Times]:
    """Call in turn what times itself.

    Args:
        functions: By name, what returns the seconds of a call, by its parts.
        rounds: How often each has its turn, at least, on a machine that is not slow: a
            round takes as long as it takes, and ten seconds are enough.
        until: Goes on, for a while, until this is true of the times so far. A smallest
            time only gets nearer to what a machine takes that does nothing else: what
            misses its target has not met it yet, or never will.

    Returns:
        Times by name.
    """
    found: dict[str, list[Sequence[float]]] = {name: [] for name in functions}
    more, began, end = rounds, time.monotonic(), math.inf
    while True:
        for number in range(more):
            if number > 1 and time.monotonic() - began > _BOX_SECONDS:
                break
            for name, function in functions.items():
                found[name].append(function())
        times = {name: Times.of_parts(calls) for name, calls in found.items()}
        if until is None or until(times) or time.monotonic() >= end:
            return times
        now = time.monotonic()
        end = min(end, now + min(_PATIENCE * (now - began), _PATIENCE_SECONDS))
        more = max(1, rounds // 4)
