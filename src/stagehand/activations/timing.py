"""When a forward saved what, and when its backward needed it, on the device's clock.

A few marks are made on the compute stream while a forward is observed, each beside the
sequence number of the operator that ran: autograd counts operators up in forward, and
goes through them downwards in backward. Times between two marks are spread evenly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagehand.core.device import Device, Event, Stream

    _Mark = tuple[int, Event, int]

__all__ = ["Marks", "StallClock", "spans"]

_MARKS = 64  # of one direction
_NO_STALL_MS = 0.02  # two events behind each other are apart a little


class StallClock:
    """How long compute waited for copies.

    Args:
        device: Whose clock it is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pairs: deque[tuple[Event, Event]] = deque()

    def mark(self, stream: Stream) -> Event:
        """Return an event for this moment of a stream."""
        event = self._device.new_event(timing=True)
        event.record(stream)
        return event

    def waited(self, start: Event, stream: Stream) -> None:
        """Note that a stream waited from a mark until now."""
        self._pairs.append((start, self.mark(stream)))

    def take(self) -> tuple[int, float]:
        """Return the number and milliseconds of waits that are over, and forget them.

        Those that the device has not come to are left for later. A wait that took no
        time is none.
        """
        count, total = 0, 0.0
        while self._pairs and self._pairs[0][1].query():
            start, end = self._pairs.popleft()
            elapsed = start.elapsed_time(end)
            count += elapsed > _NO_STALL_MS
            total += elapsed
        return count, total


class Marks(StallClock):
    """Timing events of one observed forward and its backward, waits left out.

    Args:
        device: Whose clock it is.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        # Sequence number, event, and how many waits there were before it.
        self._forward: list[_Mark] = []
        self._backward: list[_Mark] = []
        self._every = 1

    def saved(self, sequence: int, stream: Stream) -> None:
        """Note that an operator saves a tensor."""
        marks = self._forward
        if marks and sequence - marks[-1][0] < self._every:
            return
        if len(marks) >= 2 * _MARKS:  # of a forward whose length nobody knew
            del marks[1::2]
            self._every *= 2
        marks.append((sequence, self.mark(stream), len(self._pairs)))

    def needed(self, sequence: int, stream: Stream) -> None:
        """Note that an operator's backward begins."""
        marks = self._backward
        if not marks or marks[-1][0] - sequence >= self._every:
            marks.append((sequence, self.mark(stream), len(self._pairs)))

    @property
    def is_begun(self) -> bool:
        """Whether there was a forward and a backward."""
        return bool(self._forward and self._backward)

    @property
    def is_over(self) -> bool:
        """Whether the device has passed all marks, backward's included."""
        last = [self._forward[-1][1], self._backward[-1][1]]
        if self._pairs:
            last.append(self._pairs[-1][1])
        return all(event.query() for event in last)

    def seconds(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return both directions' marks in seconds from their first. See `is_over`."""
        waits = [start.elapsed_time(end) for start, end in self._pairs]
        waited = [0.0, *accumulate(waits)]
        return _since_first(self._forward, waited), _since_first(self._backward, waited)


def _since_first(
    marks: Sequence[_Mark], waited: Sequence[float]
) -> list[tuple[int, float]]:
    _, first, before = marks[0]
    return [
        (number, (first.elapsed_time(event) - waited[waits] + waited[before]) / 1e3)
        for number, event, waits in marks
    ]


def spans(marks: Sequence[tuple[int, float]], numbers: Sequence[int]) -> list[float]:
    """Return the seconds from each number to the next, by marks that are interpolated.

    Args:
        marks: Numbers and seconds, both ascending.
        numbers: Ascending; the last one's time is up to the last mark.
    """
    places = [number for number, _ in marks]
    at = [_interpolated(marks, places, number) for number in numbers]
    at.append(max(at[-1], marks[-1][1]) if at else 0.0)
    return [max(0.0, end - start) for start, end in pairwise(at)]


def _interpolated(
    marks: Sequence[tuple[int, float]], places: Sequence[int], number: int
) -> float:
    after = bisect_right(places, number)
    if after == 0:
        return marks[0][1]
    if after == len(marks):
        return marks[-1][1]
    (start, begun), (end, ended) = marks[after - 1], marks[after]
    return begun + (ended - begun) * (number - start) / (end - start)
