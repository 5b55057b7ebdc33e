"""Times on the device's own clock."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagehand.core.device import Device, Stream

__all__ = ["Spread", "Steps", "operator_seconds", "time_each", "time_on", "time_phases"]

_ENOUGH_SECONDS = 20.0
_FEWEST = 3
_OPERATORS, _ROUNDS = 500, 5


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


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of some steps, and the median of each of their parts."""

    count: int
    whole: Spread
    phases: list[float]
    host: float
    """For each step, of the thread that runs it."""


def operator_seconds(device: Device) -> float:
    """Return what the host takes to queue an operator: how fast it is just now."""
    one, rounds = torch.zeros(1, device=device.torch_device), []
    for _ in range(_ROUNDS):
        device.synchronize()
        began = time.perf_counter()
        for _ in range(_OPERATORS):
            one.add_(1)
        rounds.append((time.perf_counter() - began) / _OPERATORS)
    return statistics.median(rounds)


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


def time_each(
    device: Device,
    phases: Sequence[Callable[[], object]],
    steps: int,
    before: Callable[[], object],
) -> Steps:
    """Return the times of steps before each of which something else is done."""
    found = []
    for _ in range(steps):
        before()
        device.synchronize()
        found.append(time_phases(device, phases, 1))
    return Steps(
        len(found),
        Spread.of([one.whole.median for one in found]),
        _medians([one.phases for one in found]),
        statistics.median(one.host for one in found),
    )


def time_phases(
    device: Device, phases: Sequence[Callable[[], object]], steps: int
) -> Steps:
    """Return the times of steps that follow each other without a pause.

    Fewer than `steps`, where they take long.
    """
    stream, rows = device.current_stream(), []
    began, busy = time.perf_counter(), time.thread_time()
    while len(rows) < steps and (
        len(rows) < _FEWEST or time.perf_counter() - began < _ENOUGH_SECONDS
    ):
        row = [device.new_event(timing=True) for _ in range(len(phases) + 1)]
        row[0].record(stream)
        for phase, mark in zip(phases, row[1:], strict=True):
            phase()
            mark.record(stream)
        rows.append(row)
    busy = time.thread_time() - busy
    device.synchronize()
    wholes = [row[0].elapsed_time(row[-1]) / 1e3 for row in rows]
    parts = [[a.elapsed_time(b) / 1e3 for a, b in pairwise(row)] for row in rows]
    return Steps(len(rows), Spread.of(wholes), _medians(parts), busy / len(rows))


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]
