"""Copies between pinned host memory and device slots, and the hazards between them.

A slot carries two marks and only this file touches them:

- `filled` (read after write): recorded on the H2D lane behind the copy that fills the
  slot. Whoever reads the slot makes its stream wait for it first.
- `drained` (write after read): recorded on the reading stream when the slot is given
  up, behind its last use. The next copy into the slot waits for it on the lane.

Both waits are between streams; the host never waits here. An event that is recorded
again does not disturb waits that were made before, so each slot owns two events for
life.
"""

from __future__ import annotations

import enum
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from stagehand.core.arena import Lease
    from stagehand.core.device import Device, Event, Stream
    from stagehand.core.stopwatch import Stopwatch
    from stagehand.core.telemetry import Counters

__all__ = ["Denied", "Lane", "Priority", "Slot", "Ticket", "TransferEngine"]


class Priority(IntEnum):
    """How urgent a copy is. The first two are never denied."""

    CRITICAL = 0
    """Compute waits for it now."""
    REQUIRED = 1
    """It must happen: write-backs."""
    SPECULATIVE = 2
    """A prefetch: useful if there is room."""
    BACKGROUND = 3
    """Whenever the lane is idle."""


_SPECULATIVE = Priority.SPECULATIVE  # an attribute of an enumeration is slow


class Denied(enum.Enum):
    """Why a copy was not taken. A value, not an exception: the caller tries later."""

    H2D_SLOTS_EXHAUSTED = "as many host-to-device copies as allowed are in flight"
    D2H_SLOTS_EXHAUSTED = "as many device-to-host copies as allowed are in flight"


class Slot:
    """A piece of device memory that holds one block at a time.

    Memory: `nbytes` bytes of device memory while `lease` is set; they are leased at the
    first load.
    """

    __slots__ = (
        "_drained",
        "_filled",
        "_reader",
        "_seen_by",
        "_ticket",
        "_used",
        "alone",
        "index",
        "lease",
        "nbytes",
        "occupant",
        "storage",
        "storage_key",
        "views",
    )

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.nbytes = nbytes
        self.lease: Lease | None = None
        self.occupant: Any = None
        """Whoever the bytes belong to: a `Block`, which this rank does not know."""
        self.storage: Any = None
        """The leased buffer's storage."""
        self.storage_key = 0
        """Its `_cdata`, which takes longer to ask for than how often it is used."""
        self.alone = 0
        """Reference count of the storage when only the library holds it."""
        self.views: dict[Any, Any] = {}
        """Tensors that lie in the memory, by the form of the blocks that use them."""
        self._filled: Event | None = None
        self._drained: Event | None = None
        self._ticket: Ticket | None = None  # of the latest fill
        self._seen_by: Stream | None = None  # has waited for `filled`
        self._reader: Stream | None = None  # recorded `drained` last
        self._used = False  # `drained` stands for a use

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.nbytes} bytes, {self.occupant})"


class Ticket(NamedTuple):
    """Completion of a submitted copy."""

    done: Event
    nbytes: int

    def wait_host(self) -> None:
        """Block the calling thread until the copy is done."""
        self.done.synchronize()


class Lane:
    """One direction of the link: an ordered stream with a capacity.

    Args:
        device: Whose link it is.
        capacity: Copies in flight at most before speculation is denied, or None. A copy
            that a use was queued behind is not counted: a host that is ahead of the
            device would else find the lane full for ever.
        priority: The stream's priority; lower runs first.
    """

    def __init__(self, device: Device, capacity: int | None, priority: int) -> None:
        self.stream = device.new_stream(priority)
        self.context = device.on(self.stream)
        """Inside it, this thread's operators run on the lane."""
        self.capacity = capacity
        # The lane is ordered: it is full as long as the first of these is not done.
        self._in_flight: deque[Event] = deque(maxlen=capacity)

    @property
    def in_flight(self) -> int:
        """Copies that are submitted and not known to be done, counted to `capacity`."""
        while self._in_flight and self._in_flight[0].query():
            self._in_flight.popleft()
        return len(self._in_flight)

    def is_full(self) -> bool:
        """Return whether a speculative copy would have to be denied."""
        return self.capacity is not None and self.in_flight >= self.capacity

    def note(self, done: Event) -> None:
        """Count a submitted copy. Without a capacity nobody asks: nothing is kept."""
        if self.capacity is not None:
            self._in_flight.append(done)

    def settle(self, done: Event) -> None:
        """Count a copy no more, because a use was queued behind it."""
        if done in self._in_flight:
            self._in_flight.remove(done)


class TransferEngine:
    """The two lanes of one device.

    Args:
        device: Where the slots are.
        counters: Where copies are counted as they are submitted.
        h2d_capacity: See `Lane`.
        d2h_capacity: See `Lane`.
        priority: Of both lanes' streams.
    """

    def __init__(
        self,
        device: Device,
        counters: Counters,
        *,
        h2d_capacity: int | None = None,
        d2h_capacity: int | None = None,
        priority: int = -1,
    ) -> None:
        self.stopwatch: Stopwatch | None = None
        """Set while copies are to be timed."""
        self._device = device
        self._counters = counters
        self.h2d = Lane(device, h2d_capacity, priority)
        self.d2h = Lane(device, d2h_capacity, priority)
        self._ready = device.new_event()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return device memory that belongs to the H2D lane's stream.

        That stream writes it first, and waits for its readers before it is freed, so
        the allocator may reuse it in that stream's order.
        """
        with self.h2d.context:
            return self._device.empty(nbytes)

    def adopt(self, slot: Slot) -> None:
        """Take over a slot whose memory was just leased."""
        if slot._filled is None:
            slot._filled = self._device.new_event()
            slot._drained = self._device.new_event()

    def load(
        self, slot: Slot, target: torch.Tensor, source: torch.Tensor, priority: Priority
    ) -> Ticket | Denied:
        """Queue the copy that fills a slot.

        Args:
            slot: Its `drained` mark is waited for, on the lane.
            target: The slot's first bytes.
            source: As many bytes of pinned host memory; they must stay unchanged until
                the ticket is done.
            priority: Speculation can be denied.
        """
        lane, filled = self.h2d, slot._filled
        limited = lane.capacity is not None
        if limited and priority >= _SPECULATIVE and lane.is_full():
            return Denied.H2D_SLOTS_EXHAUSTED
        stream = lane.stream
        if slot._used:
            stream.wait_event(slot._drained)
        if self.stopwatch is None:
            self._device.copy(target, source, stream)
        else:
            self._copy(_block_in(slot), "H2D", lane, target, source)
        filled.record(stream)  # type: ignore[union-attr]
        slot._seen_by = slot._reader = None
        slot._used = False
        nbytes = target.numel()
        counters = self._counters
        counters.h2d_bytes += nbytes
        counters.h2d_copies += 1
        if limited:
            lane.note(filled)  # type: ignore[arg-type]
        ticket = slot._ticket
        if ticket is None or ticket.nbytes != nbytes:  # the slot's event stays the same
            ticket = slot._ticket = Ticket(filled, nbytes)  # type: ignore[arg-type]
        return ticket

    def _copy(
        self,
        block: int,
        way: str,
        lane: Lane,
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        watch, stream = self.stopwatch, lane.stream
        start = None if watch is None else watch.mark_copy(stream)
        self._device.copy(target, source, stream)
        if watch is not None and start is not None:
            watch.copied(block, way, target.numel(), start, watch.mark_copy(stream))

    def await_filled(self, slot: Slot, stream: Stream) -> None:
        """Let `stream` read the slot only after it is filled."""
        seen_by = slot._seen_by
        if seen_by is None or seen_by != stream:
            stream.wait_event(slot._filled)
            if seen_by is not None:
                self._mark(slot, seen_by)
            elif self.h2d.capacity is not None:
                self.h2d.settle(slot._filled)  # type: ignore[arg-type]
            slot._seen_by = stream

    def release(self, slot: Slot, stream: Stream) -> None:
        """Mark that `stream`, and whoever waited for the slot, used it until now."""
        seen_by = slot._seen_by
        if seen_by is not None and seen_by != stream:
            self._mark(slot, seen_by)
        if slot._used:
            self._mark(slot, stream)
        else:
            slot._drained.record(stream)  # type: ignore[union-attr]
            slot._reader = stream
            slot._used = True

    def _mark(self, slot: Slot, stream: Stream) -> None:
        if slot._used and slot._reader != stream:
            stream.wait_event(slot._drained)  # the mark must cover both readers
        slot._drained.record(stream)  # type: ignore[union-attr]
        slot._reader = stream
        slot._used = True

    def save(self, slot: Slot, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Queue the copy that brings a slot's bytes home; never denied.

        The lane waits until the slot is filled and its readers, who may have written,
        are done; whoever fills the slot next waits for the lane.
        """
        stream = self.d2h.stream
        stream.wait_event(slot._filled)
        if slot._used:
            stream.wait_event(slot._drained)
        self._copy(_block_in(slot), "D2H", self.d2h, target, source)
        done = self._mark_of(self.d2h)
        slot._drained.record(stream)  # type: ignore[union-attr]
        slot._reader = stream
        slot._used = True
        nbytes = source.numel()
        self._counters.d2h_bytes += nbytes
        self._counters.d2h_copies += 1
        self.d2h.note(done)
        return Ticket(done, nbytes)

    def carry_home(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        block: int,
        maker: Stream,
        shared: bool,
    ) -> None:
        """Queue the copy of a tensor that lies in no slot; never denied.

        The tensor's memory may be given up at once: it is not reused before the copy is
        done.

        Args:
            source: On the device.
            target: Of the same shape and element type, in pinned memory.
            block: Whose it is, for the records.
            maker: The stream that made the tensor; the lane waits for it.
            shared: Whether the maker may write to the tensor's memory again: then it
                waits for the copy.
        """
        self._send_home(source, target, block, maker)
        stream = self.d2h.stream
        source.record_stream(stream)  # type: ignore[arg-type]
        if shared:
            self._ready.record(stream)
            maker.wait_event(self._ready)

    def copy_home(
        self, source: torch.Tensor, target: torch.Tensor, *, maker: Stream
    ) -> Event:
        """Queue the copy of a tensor that its owner keeps until the event is done.

        Args:
            source: On the device.
            target: Of the same shape and element type, in pinned memory.
            maker: The stream that made the tensor; the lane waits for it.
        """
        self._send_home(source, target, -1, maker)
        return self._mark_of(self.d2h)

    def _send_home(
        self, source: torch.Tensor, target: torch.Tensor, block: int, maker: Stream
    ) -> None:
        self._ready.record(maker)
        self.d2h.stream.wait_event(self._ready)
        self._copy(block, "D2H", self.d2h, target, source)
        self._counters.d2h_bytes += source.numel() * source.element_size()
        self._counters.d2h_copies += 1

    def bring_back(
        self, source: torch.Tensor, *, after: Event
    ) -> tuple[torch.Tensor, Event]:
        """Queue the copy of pinned bytes to new device memory.

        The memory is the lane's: who reads it waits for the event, and tells the
        allocator which stream does.

        Args:
            source: In pinned memory.
            after: The event behind the copy that wrote it.
        """
        self.h2d.stream.wait_event(after)
        target = self.allocate(source.numel())
        self._copy(-1, "H2D", self.h2d, target, source)
        self._counters.h2d_bytes += source.numel()
        self._counters.h2d_copies += 1
        return target, self._mark_of(self.h2d)

    def _mark_of(self, lane: Lane) -> Event:
        """Return a new event that stands for all that a lane was given."""
        done = self._device.new_event()
        done.record(lane.stream)
        return done

    def retire(self, slot: Slot) -> None:
        """Order all that touches the slot before the next use of its memory."""
        if slot._used:
            self.h2d.stream.wait_event(slot._drained)
        slot._seen_by = slot._reader = None
        slot._used = False

    def drain(self) -> None:
        """Block the host until both lanes are idle: no host memory is in use then."""
        self.h2d.stream.synchronize()
        self.d2h.stream.synchronize()

    def disown(self, buffer: torch.Tensor) -> None:
        """Keep memory that somebody else holds from reuse while the caller's stream
        reads.

        The holder will free it without telling the H2D lane.
        """
        stream = self._device.current_stream()
        if not self._device.is_host:
            buffer.record_stream(stream)  # type: ignore[arg-type]


def _block_in(slot: Slot) -> int:
    return -1 if slot.occupant is None else slot.occupant.index
