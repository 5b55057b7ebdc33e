"""Times of copies and uses on the device's own clock, read when they are over.

Marks are timing events on the streams themselves; nothing here makes the host wait.
Without a stopwatch nothing is recorded and nothing is paid.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from stagehand.core.device import Device, Event, Stream

__all__ = ["CopyTime", "Stopwatch", "UseTime"]


@dataclass(frozen=True, slots=True)
class UseTime:
    """One use of a block.

    Attributes:
        block: The block's index.
        start_ms: When compute arrived, from the stopwatch's beginning.
        stall_ms: How long it then waited for the block.
        compute_ms: From there to the arrival at the next use, or the pass's end, but
            for `home_ms`.
        last: Whether the pass ended with it.
        home_ms: How long it waited meanwhile for copies home.
    """

    block: int
    start_ms: float
    stall_ms: float
    compute_ms: float
    last: bool
    home_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyTime:
    """One copy over the link.

    Attributes:
        block: The block's index.
        lane: "H2D" or "D2H".
        nbytes: Bytes.
        start_ms: When it started, from the stopwatch's beginning.
        duration_ms: How long it took.
    """

    block: int
    lane: str
    nbytes: int
    start_ms: float
    duration_ms: float


class Stopwatch:
    """Collects marks of one pass after the other.

    Memory: two events for each use and copy that is not resolved yet; resolved ones are
    used again.

    Args:
        device: Whose clock it is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spare: list[Event] = []
        self._zero: Event | None = None
        self._last: dict[Stream, Event] = {}  # the latest mark of a use, by stream
        self._uses: list[tuple[int, Event, Event]] = []
        self._copies: list[tuple[int, str, int, Event, Event]] = []
        self._waits: list[tuple[int, Event, Event]] = []  # by the number of the use

    @property
    def uses(self) -> int:
        """Number of uses that are noted and not resolved."""
        return sum(block >= 0 for block, _, _ in self._uses)

    def mark(self, stream: Stream) -> Event:
        """Return an event that stands for this moment of a stream that computes."""
        event = self._last[stream] = self.mark_copy(stream)
        return event

    def mark_copy(self, stream: Stream) -> Event:
        """Return an event that stands for this moment of a lane."""
        if self._zero is None:
            self._zero = self._device.new_event(timing=True)
            self._zero.record(stream)
        event = self.new_mark()
        event.record(stream)
        return event

    def new_mark(self) -> Event:
        """Return an event that stands for no moment yet."""
        return self._spare.pop() if self._spare else self._device.new_event(timing=True)

    def used(self, block: int, arrived: Event, begun: Event) -> None:
        """Note that compute arrived at a use, and the moment after its wait."""
        self._uses.append((block, arrived, begun))

    def waited(self, since: Event, until: Event) -> None:
        """Note that compute waited for copies home in the latest use, between two
        marks."""
        self._waits.append((len(self._uses) - 1, since, until))

    def end_pass(self, stream: Stream) -> None:
        """Note the end of the last use."""
        if self._uses and self._uses[-1][0] >= 0:
            end = self.mark(stream)
            self._uses.append((-1, end, end))

    def copied(
        self, block: int, lane: str, nbytes: int, start: Event, end: Event
    ) -> None:
        """Note a copy between two marks of its lane."""
        self._copies.append((block, lane, nbytes, start, end))

    def forget(self) -> None:
        """Forget all, where an interrupt may have come between two marks."""
        self._zero = None
        for noted in (self._last, self._uses, self._copies, self._waits, self._spare):
            noted.clear()

    def is_over(self) -> bool:
        """Return whether all uses noted so far have happened on the device.

        Copies may be under way: they are for uses to come.
        """
        return all(event.query() for event in self._last.values())

    def resolve(self) -> tuple[list[UseTime], list[CopyTime]]:
        """Return the times of what was noted and not yet returned, and forget it.

        Waits for uses that are not over. Copies that are not over are left for later.
        """
        zero = self._zero
        if zero is None:
            return [], []
        for event in self._last.values():
            event.synchronize()
        copies = []
        under_way = []
        for copy in self._copies:
            block, lane, size, start, end = copy
            if not end.query():
                under_way.append(copy)
                continue
            copies.append(
                CopyTime(
                    block, lane, size, zero.elapsed_time(start), start.elapsed_time(end)
                )
            )
            self._spare += (start, end)
        waited: defaultdict[int, float] = defaultdict(float)
        for number, since, until in self._waits:
            waited[number] += since.elapsed_time(until)
            self._spare += (since, until)
        uses = [
            UseTime(
                block,
                zero.elapsed_time(arrived),
                arrived.elapsed_time(begun),
                begun.elapsed_time(following[1]) - waited[number],
                last=following[0] < 0,
                home_ms=waited[number],
            )
            for number, ((block, arrived, begun), following) in enumerate(
                pairwise(self._uses)
            )
            if block >= 0
        ]
        for block, arrived, begun in self._uses:
            self._spare += (arrived, begun) if block >= 0 else (arrived,)
        self._uses.clear()
        self._waits.clear()
        self._copies = under_way
        self._last.clear()
        return uses, copies
