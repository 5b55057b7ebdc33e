"""Times on the device's own clock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagehand.core.device import Device, Stream

__all__ = ["Spread", "time_each", "time_on", "time_phases", "time_steps"]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of several repetitions."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of measured seconds."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(
            statistics.median(ordered), ordered[last // 10], ordered[last - last // 10]
        )


def time_on(
    device: Device, streams: Sequence[Stream], run: Callable[[], object]
) -> list[float]:
    """Return for each stream the seconds from before something to after it."""
    pairs = [[device.new_event(timing=True) for _ in range(2)] for _ in streams]
    device.synchronize()
    for (start, _), stream in zip(pairs, streams, strict=True):
        start.record(stream)
    run()
    for (_, end), stream in zip(pairs, streams, strict=True):
        end.record(stream)
    device.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def time_steps(device: Device, run: Callable[[], object], steps: int) -> Spread:
    """Return the seconds of steps that follow each other without a pause."""
    marks = [device.new_event(timing=True) for _ in range(steps + 1)]
    stream = device.current_stream()
    marks[0].record(stream)
    for mark in marks[1:]:
        run()
        mark.record(stream)
    device.synchronize()
    return Spread.of([a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)])


def time_each(
    device: Device, run: Callable[[], object], steps: int, before: Callable[[], object]
) -> Spread:
    """Return the seconds of steps before each of which something else is done."""
    stream, found = device.current_stream(), []
    for _ in range(steps):
        before()
        found.append(time_on(device, (stream,), run)[0])
    return Spread.of(found)


def time_phases(
    device: Device, phases: Sequence[Callable[[], object]], steps: int
) -> list[float]:
    """Return the median seconds of each part of steps that follow each other."""
    stream = device.current_stream()
    rows = [
        [device.new_event(timing=True) for _ in range(len(phases) + 1)]
        for _ in range(steps)
    ]
    for row in rows:
        row[0].record(stream)
        for phase, mark in zip(phases, row[1:], strict=True):
            phase()
            mark.record(stream)
    device.synchronize()
    spans = [[a.elapsed_time(b) / 1e3 for a, b in pairwise(row)] for row in rows]
    return [statistics.median(column) for column in zip(*spans, strict=True)]
