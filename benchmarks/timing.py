"""Times of functions that take turns, so that they share the machine's moods."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Times", "by_the_wall", "take_turns"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one function's calls on the calling thread's own clock.

    The smallest is the cost; how far the median lies above it is the machine's noise.
    """

    smallest: float
    median: float
    lasting: float
    """The smallest mean of a group of calls, one after the other."""

    def over(self, other: "Times", count: int = 1) -> "Times":
        """Return by how much these are longer, for each of `count`."""
        return Times(
            (self.smallest - other.smallest) / count,
            (self.median - other.median) / count,
            (self.lasting - other.lasting) / count,
        )

    def part_of(self, other: "Times") -> "Times":
        """Return the ratio of these to the other's."""
        return Times(
            self.smallest / other.smallest,
            self.median / other.median,
            self.lasting / other.lasting,
        )

    @classmethod
    def of(cls, seconds: Sequence[float], group: int = 1) -> "Times":
        """Return those of many calls, of which `group` are a group."""
        starts = range(0, len(seconds) - group + 1, group)
        lasting = min(sum(seconds[start : start + group]) for start in starts) / group
        return cls(min(seconds), statistics.median(seconds), lasting)

    @classmethod
    def ratio(cls, mine: Sequence[float], other: Sequence[float]) -> "Times":
        """Return the ratio of the smallest, and the median of each turn's ratio.

        A turn is short, so both of its times are of the same mood of the machine.
        """
        turns = zip(mine, other, strict=True)
        smallest = min(mine) / min(other)
        return cls(smallest, statistics.median(m / o for m, o in turns), smallest)


def by_the_wall(
    ways: Mapping[str, Callable[[_T], object]],
    turns: Sequence[_T],
    prepare: Callable[[], object] = lambda: None,
    *,
    uncounted: int = 1,
) -> dict[str, list[float]]:
    """Time by the wall clock what waits for a disk: each way in each turn.

    Args:
        ways: What to time, by name.
        turns: What each way is called with, turn for turn.
        prepare: Called before each.
        uncounted: The first turns do not count: memory is touched for the first time.
    """
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
    return seconds


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    group: int = 1,
) -> dict[str, Times]:
    """Time functions in turn, after one call of each that is not counted.

    Time in which the thread did not run is not counted, so neighbours on the machine
    disturb only through its caches and its clock rate.

    Args:
        functions: What to time, by name.
        rounds: How many times each is measured.
        calls: How many calls one measurement takes; times are of one call.
        group: How many measurements make one of `Times.lasting`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.thread_time()
            for _ in range(calls):
                function()
            seconds[name].append((time.thread_time() - start) / calls)
    return {name: Times.of(values, group) for name, values in seconds.items()}
