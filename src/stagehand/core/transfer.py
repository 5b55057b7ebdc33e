"""Copies between pinned host memory and device slots, and the hazards between them.

A slot carries two marks and only this file touches them:

- `filled` (read after write): recorded on the H2D lane behind the copy that fills the
  slot, and on the D2H lane behind one that brings it home: its users may write. Whoever
  uses the slot makes its stream wait for it first.
- `drained` (write after read): recorded on the reading stream when the slot is given
  up, behind its last use. The next copy into the slot waits for it on the lane.

Both waits are between streams: the host waits only where it is asked to, by what says
that it blocks the host. An event that is recorded again does not disturb waits that
were made before, so each slot owns two events for life.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from stagehand.core.flight import Flight
from stagehand.core.limits import Priority
from stagehand.core.traffic import Denied, Done, Parcel, Slots, Traffic, event_of
from stagehand.core.wire_ring import WireRing
from stagehand.errors import StagehandInternalError, StagehandOOMError
from stagehand.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.device import Device, Event, Stream
    from stagehand.core.stopwatch import Stopwatch
    from stagehand.core.telemetry import Counters

__all__ = ["Denied", "Lane", "Priority", "Slot", "Ticket", "TransferEngine"]

_SPECULATIVE = Priority.SPECULATIVE  # an attribute of an enumeration is slow


class Slot:
    """A piece of device memory that holds one block at a time.

    Memory: `nbytes` bytes of device memory while `lease` is set; they are leased at the
    first load.
    """

    __slots__ = (
        "_drained",
        "_filled",
        "_reader",
        "_seen_before",
        "_ticket",
        "address",
        "alone",
        "index",
        "lease",
        "nbytes",
        "occupant",
        "seen_by",
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
        """The storage's `_cdata`, by which references are counted: kept, for reading it
        takes longer than counting them."""
        self.address = 0
        """Where its bytes begin; 0 without memory."""
        self.alone = 0
        """Reference count of the storage when only the library holds it."""
        self.seen_by: Stream | None = None
        """Which stream has waited for `filled` since the latest of its records."""
        self.views: dict[Any, Any] = {}
        """Tensors that lie in the memory, by the form of the blocks that use them."""
        self._filled: Event | None = None
        self._drained: Event | None = None
        self._ticket: Ticket | None = None  # for `filled`: every fill has the same
        self._seen_before: Stream | None = None  # `seen_by` as of the latest save
        self._reader: Stream | None = None  # recorded `drained` last, since the fill

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.nbytes} bytes, {self.occupant})"

    def wastes(self, nbytes: int) -> bool:
        """Whether more memory than so many bytes would be taken for it."""
        return self.lease is None and self.nbytes > nbytes


class Ticket(NamedTuple):
    """Completion of a submitted copy."""

    done: Event

    def wait_host(self) -> None:
        """Block the calling thread until the copy is done."""
        self.done.synchronize()


class Lane(Slots):
    """One direction of the link: an ordered stream with a capacity.

    Args:
        device: Whose link it is.
        capacity: Copies in flight at most before speculation is denied, or None.
        priority: The stream's priority; lower runs first.
        stream: That of another lane, whose order it shares; None makes a new one.
    """

    def __init__(
        self,
        device: Device,
        capacity: int | None,
        priority: int,
        stream: Stream | None,
    ) -> None:
        super().__init__(capacity)
        self.stream = stream or device.new_stream(priority)
        self.context = device.on(self.stream)
        """Inside it, this thread's operators run on the lane."""


class TransferEngine:
    """The two lanes of one device.

    Args:
        device: Where the slots are.
        counters: Where copies are counted as they are submitted.
        h2d_capacity: See `Lane`.
        d2h_capacity: See `Lane`.
        priority: The priority of the streams that it makes: those of the lanes, unless
            `streams` has them, and the one on which wires cross. Lower runs first.
        streams: The lanes' streams, to the device and from it, where others use them,
            too; None makes one.
    """

    def __init__(
        self,
        device: Device,
        counters: Counters,
        *,
        h2d_capacity: int | None = None,
        d2h_capacity: int | None = None,
        priority: int = -1,
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> None:
        self.stopwatch: Stopwatch | None = None
        """Set while copies are to be timed."""
        self.wires: WireRing | None = None
        """Memory for wires on the device; None while nothing is decoded there."""
        self._new_wires: Callable[..., WireRing] | None = None
        self._wire_stream: Stream | None = None
        self._priority = priority
        self.device = device
        self._counters = counters
        self.h2d = Lane(device, h2d_capacity, priority, streams[0])
        self.d2h = Lane(device, d2h_capacity, priority, streams[1])
        self._has_streams = not device.is_host
        self._ready = device.new_event()
        self.flight = Flight(device, self.d2h.stream)
        """Tensors outside of slots that copies home still read."""
        self._traffic: Traffic | None = None
        self._limited = h2d_capacity is not None

    @property
    def traffic(self) -> Traffic | None:
        """What this engine has joined; None if nothing, or if that has ended."""
        if self._traffic is not None and self._traffic.is_over:
            self.leave()
        return self._traffic

    def join(self, traffic: Traffic) -> None:
        """Take part in what a device's engines share, until `leave()`."""
        self.leave()
        self._traffic = traffic
        self._limited = True

    def leave(self) -> None:
        """Take part no more; what was put aside goes home. Idempotent."""
        self.flush_home()
        self._traffic = None
        self._limited = self.h2d.capacity is not None

    def _deny_load(self, priority: Priority) -> Denied | None:
        traffic = self.traffic
        if traffic is not None:
            denied = traffic.deny_load(priority)
            if denied is not None:
                return denied
        return Denied.H2D_SLOTS_EXHAUSTED if self.h2d.is_full() else None

    def _note_load(self, filled: Event, nbytes: int) -> None:
        self.h2d.note(filled)
        if self._traffic is not None:
            self._traffic.note_load(filled, nbytes)

    def _settle_load(self, filled: Event) -> None:
        self.h2d.settle(filled)
        if self._traffic is not None:
            self._traffic.settle_load(filled)

    def deny_home(self, priority: Priority) -> Denied | None:
        """Return why a copy home of that urgency should not start now, or None.

        The calls that queue copies home deny none: whoever sends something before it
        must go asks here first.
        """
        if priority < _SPECULATIVE:
            return None
        traffic = self.traffic
        if traffic is not None:
            denied = traffic.deny_home(priority)
            if denied is not None:
                return denied
        return Denied.D2H_SLOTS_EXHAUSTED if self.d2h.is_full() else None

    def flush_home(self) -> None:
        """Queue the copies home that yield to loads: somebody waits for the lane."""
        if self._traffic is not None:
            self._traffic.flush()

    def hold_home(self) -> None:
        """Let copies home, and who waits for them, wait for all loads so far."""
        self._ready.record(self.h2d.stream)
        self.d2h.stream.wait_event(self._ready)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return device memory that belongs to the H2D lane's stream.

        That stream writes it first, and waits for its readers before it is freed, so
        the allocator may reuse it in that stream's order.

        Raises:
            OutOfMemoryError: If the device has none: that of torch, with what to do.
        """
        try:
            with self.h2d.context:
                return self.device.empty(nbytes)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{error}\nThe budget for weights has room for these"
                f" {format_bytes(nbytes)}, {self.device.torch_device} has none: lower"
                " that budget to what activations and others leave of the device, by"
                " vram_budget= of stagehand.layer(), runtime.set_budget(), watermarks,"
                " or a streamer's n_gpu="
            ) from error

    def adopt(self, slot: Slot) -> None:
        """Take over a slot whose memory was just leased."""
        if slot._ticket is None:  # the last that is set: an interrupt may come before
            filled, drained = self.device.new_event(), self.device.new_event()
            slot._filled, slot._drained = filled, drained
            slot._ticket = Ticket(filled)

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
        filled, limited = slot._filled, self._limited
        if limited and priority >= _SPECULATIVE:
            denied = self._deny_load(priority)
            if denied is not None:
                return denied
        stream = self.h2d.stream
        if slot._reader is not None:
            stream.wait_event(slot._drained)
        if self.stopwatch is None:
            self.device.copy(target, source, stream)
        else:
            self._copy(_block_in(slot), "H2D", stream, target, source)
        filled.record(stream)  # type: ignore[union-attr]
        slot.seen_by = slot._reader = None  # as `_note_filled` does, in less time
        nbytes = target.numel()
        counters = self._counters
        counters.h2d_bytes += nbytes
        counters.h2d_copies += 1
        if limited:
            self._note_load(filled, nbytes)  # type: ignore[arg-type]
        return slot._ticket  # type: ignore[return-value]

    def load_parts(
        self,
        slot: Slot,
        target: torch.Tensor,
        source: torch.Tensor,
        parts: Sequence[tuple[int, int]],
    ) -> Ticket:
        """Queue the copies of parts of what `load` copies: the rest is not needed.

        Args:
            slot: As for `load`.
            target: As for `load`.
            source: As for `load`.
            parts: Each from its first byte to before the second.
        """
        stream = self.h2d.stream
        if slot._reader is not None:
            stream.wait_event(slot._drained)
        nbytes = 0
        for first, end in parts:
            self._copy(
                _block_in(slot), "H2D", stream, target[first:end], source[first:end]
            )
            nbytes += end - first
        self._note_filled(slot, nbytes, len(parts))
        return slot._ticket  # type: ignore[return-value]

    def _note_filled(self, slot: Slot, nbytes: int, copies: int) -> None:
        """Mark a slot that was filled on the lane, by so many copies."""
        filled = slot._filled
        filled.record(self.h2d.stream)  # type: ignore[union-attr]
        slot.seen_by = slot._reader = None
        self._counters.h2d_bytes += nbytes
        self._counters.h2d_copies += copies
        if self._limited:
            self._note_load(filled, nbytes)  # type: ignore[arg-type]

    def open_wires(
        self, arena: Arena, *, count: int, nbytes: int, scratch_nbytes: int
    ) -> None:
        """Have memory for bytes that are decoded on the device; `count` pieces.

        Raises:
            StagehandOOMError: If the arena has no room.
        """
        self.close_wires()
        if self._wire_stream is None:
            self._wire_stream = self.device.new_stream(self._priority)
        self._new_wires = partial(
            WireRing,
            self.device,
            self.h2d.stream,
            self._wire_stream,
            arena,
            count=count,
            nbytes=nbytes,
            scratch_nbytes=scratch_nbytes,
        )
        self.wires = self._new_wires()

    def resize_wires(self, count: int) -> None:
        """Have so many pieces of that memory from now on, if there is to be any.

        Raises:
            StagehandOOMError: If the arena has no room.
        """
        if self._new_wires is None:
            return
        self._new_wires = partial(self._new_wires, count=count)
        if self.wires is not None:  # else the next load that needs it makes it
            self.rest_wires()
            self.wires = self._new_wires()

    def rest_wires(self) -> None:
        """Give that memory back until the next load that needs it."""
        wires, self.wires = self.wires, None
        if wires is not None:
            wires.close()

    def wake_wires(self) -> None:
        """Have that memory again now, if it was given back and there is room."""
        if self.wires is None and self._new_wires is not None:
            with suppress(StagehandOOMError):  # then the load that needs it says so
                self.wires = self._new_wires()

    def close_wires(self) -> None:
        """Give that memory back for good. Idempotent."""
        self._new_wires = None
        self.rest_wires()

    def load_wire(
        self,
        slot: Slot,
        target: torch.Tensor,
        source: torch.Tensor,
        decode: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None],
        priority: Priority,
    ) -> Ticket | Denied:
        """Queue the copy of a wire, and behind it the decoder that fills a slot.

        Args:
            slot: As for `load`.
            target: As for `load`.
            source: The wire, in pinned host memory, unchanged until the ticket is done.
            decode: Fills `target` from the wire, in the current stream's order.
            priority: As for `load`.

        Raises:
            StagehandOOMError: If memory to decode it in was given back, and is gone.
        """
        lane, filled, wires = self.h2d, slot._filled, self.wires
        if wires is None and self._new_wires is not None:
            try:
                wires = self.wires = self._new_wires()
            except StagehandOOMError:
                if priority >= _SPECULATIVE:
                    return Denied.H2D_SLOTS_EXHAUSTED
                raise
        if wires is None or filled is None:
            raise StagehandInternalError("a wire was sent without memory to decode it")
        if self._limited and priority >= _SPECULATIVE:
            denied = self._deny_load(priority)
            if denied is not None:
                return denied
        nbytes = source.numel()
        piece = wires.take(nbytes)
        wire = piece.buffer[:nbytes]
        self._copy(_block_in(slot), "H2D", wires.stream, wire, source)
        piece.arrived.record(wires.stream)
        lane.stream.wait_event(piece.arrived)
        if slot._reader is not None:
            lane.stream.wait_event(slot._drained)
        try:
            with lane.context:
                decode(wire, target, wires.scratch)
        finally:
            piece.decoded.record(lane.stream)
            piece.used = True
        self._note_filled(slot, nbytes, 1)
        return slot._ticket  # type: ignore[return-value]

    def _copy(
        self,
        block: int,
        way: str,
        stream: Stream,
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        watch = self.stopwatch
        if watch is None:
            self.device.copy(target, source, stream)
            return
        start = watch.mark_copy(stream)
        self.device.copy(target, source, stream)
        watch.copied(block, way, target.nbytes, start, watch.mark_copy(stream))

    def await_filled(self, slot: Slot, stream: Stream) -> None:
        """Let `stream` read the slot only after it is filled."""
        seen_by = slot.seen_by
        if seen_by is None or seen_by != stream:
            stream.wait_event(slot._filled)
            if seen_by is not None:
                self._mark(slot, seen_by)
            elif self._limited:
                self._settle_load(slot._filled)  # type: ignore[arg-type]
            slot.seen_by = stream

    def has_awaited(self, slot: Slot, stream: Stream) -> bool:
        """Whether `stream` has waited for what fills the slot, the last that has."""
        return slot.seen_by == stream

    def finish_load(self, slot: Slot) -> None:
        """Block the host until a slot is filled: then the source may be written."""
        if slot._filled is not None:
            slot._filled.synchronize()

    def release(self, slot: Slot, stream: Stream) -> None:
        """Mark that `stream`, and whoever waited for the slot, used it until now."""
        seen_by = slot.seen_by
        if seen_by is not None and seen_by != stream:
            self._mark(slot, seen_by)
        if slot._reader is None:
            slot._drained.record(stream)  # type: ignore[union-attr]
            slot._reader = stream
        else:
            self._mark(slot, stream)

    def note_write(self, slot: Slot, stream: Stream) -> None:
        """Mark that `stream`, which had released a slot, has written to it."""
        slot._filled.record(stream)  # type: ignore[union-attr]
        slot.seen_by = stream

    def _mark(self, slot: Slot, stream: Stream) -> None:
        reader = slot._reader
        if reader is not None and reader != stream:
            stream.wait_event(slot._drained)  # the mark must cover both readers
        slot._drained.record(stream)  # type: ignore[union-attr]
        slot._reader = stream

    def save(self, slot: Slot, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Queue the copy that brings a slot's bytes home; never denied.

        The lane waits until the slot is filled and its readers, who may have written,
        are done; whoever uses or fills the slot next waits for the lane.
        """
        stream = self.d2h.stream
        stream.wait_event(slot._filled)
        if slot._reader is not None:
            stream.wait_event(slot._drained)
        self._copy(_block_in(slot), "D2H", stream, target, source)
        done = self._mark_of(self.d2h)
        self._note_home(done)
        slot._filled.record(stream)  # type: ignore[union-attr]
        slot._drained.record(stream)  # type: ignore[union-attr]
        slot._seen_before = slot.seen_by or slot._seen_before
        slot.seen_by = None
        slot._reader = stream
        self._counters.d2h_bytes += source.numel()
        self._counters.d2h_copies += 1
        return Ticket(done)

    def _note_home(self, done: Done) -> None:
        self.d2h.note(done)
        if self._traffic is not None:
            self._traffic.note_home(done)

    def carry_home(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        block: int,
        maker: Stream,
        shared: bool,
    ) -> Parcel | None:
        """Queue the copy of a tensor that lies in no slot; never denied.

        The tensor's memory may be given up at once: it is not reused before the copy is
        done.

        Args:
            source: The tensor, on the device.
            target: Pinned memory of the same shape and element type.
            block: The number of the block that it belongs to, for the records.
            maker: The stream that made the tensor; the lane waits for it.
            shared: Whether the maker may write to the tensor's memory again: then it
                waits for the copy.

        Returns:
            What it was put aside as, where it is to yield to loads.
        """
        stream, traffic = self.d2h.stream, None if shared else self._yielding()
        kept = traffic is None and not shared and self.flight.keep(source, maker)
        if not kept:
            source.record_stream(stream)  # type: ignore[arg-type]
        parcel = self._send_home(source, target, block, maker, traffic)
        if shared:
            self._ready.record(stream)
            self._wait_home(maker, self._ready)
        if kept:
            self.flight.sent(self._wait_home)
        return parcel

    def _wait_home(self, stream: Stream, event: Event) -> None:
        """Let a stream that computes wait for copies home, which is no compute."""
        watch = self.stopwatch
        since = None if watch is None else watch.mark(stream)
        stream.wait_event(event)
        if watch is not None and since is not None:
            watch.waited(since, watch.mark(stream))

    def send_group(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        makers: Sequence[Stream],
    ) -> Done:
        """Queue the copies of tensors that their owner keeps until the event is done.

        Args:
            pairs: Tensors on the device, each with a tensor of the same shape and
                element type in host memory.
            makers: The streams that made the tensors; the lane waits for them.
        """
        counters = self._counters
        for source, _ in pairs:
            counters.d2h_bytes += source.nbytes
            counters.d2h_copies += 1
        traffic, stream = self._yielding(), self.d2h.stream
        if traffic is not None:
            return self._put_aside(traffic, pairs, -1, makers)
        if self._has_streams:
            for maker in makers:
                self._ready.record(maker)
                stream.wait_event(self._ready)
        for source, target in pairs:
            self._copy(-1, "D2H", stream, target, source)
        done = self._mark_of(self.d2h)
        self._note_home(done)
        return done

    def _send_home(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        block: int,
        maker: Stream,
        traffic: Traffic | None,
    ) -> Parcel | None:
        """Queue a copy home, or put it aside, where it is to yield to loads."""
        self._counters.d2h_bytes += source.numel() * source.element_size()
        self._counters.d2h_copies += 1
        if traffic is not None:
            return self._put_aside(traffic, [(source, target)], block, [maker])
        self._ready.record(maker)
        self.d2h.stream.wait_event(self._ready)
        self._copy(block, "D2H", self.d2h.stream, target, source)
        return None

    def _yielding(self) -> Traffic | None:
        """Return with whom copies home are put aside, if they are."""
        traffic = self.traffic
        return traffic if traffic is not None and traffic.yields else None

    def _put_aside(
        self,
        traffic: Traffic,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        block: int,
        makers: Sequence[Stream],
    ) -> Parcel:
        # Any engine's thread may send it, but no two may enter one object.
        stream = self.device.same_stream(self.d2h.stream)
        done = self.device.new_event()
        ready = []
        for maker in makers:
            made = self.device.new_event()
            made.record(maker)
            ready.append(made)
        copy = partial(self._copy, block, "D2H", stream)
        parcel = Parcel(traffic, stream, ready, pairs, copy, done)
        traffic.put_aside(parcel)
        return parcel

    def bring_group(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        after: Done,
        maker: Stream,
    ) -> Event:
        """Queue the copy of host bytes to new device memory.

        The copy starts when `maker` gets to this point, so that it takes no memory
        before it is there. Who reads the target waits for the event; so must who frees
        it.

        Args:
            source: Bytes in host memory.
            target: As many bytes on the device.
            after: The event behind the copy that wrote the source.
            maker: The stream that the target's memory belongs to.
        """
        stream = self.h2d.stream
        after = event_of(after)
        if self._has_streams:
            stream.wait_event(after)
            self._ready.record(maker)
            stream.wait_event(self._ready)
        self._copy(-1, "H2D", stream, target, source)
        self._counters.h2d_bytes += source.numel()
        self._counters.h2d_copies += 1
        return self._mark_of(self.h2d)

    def _mark_of(self, lane: Lane) -> Event:
        """Return an event that stands for all that a lane was given."""
        if not self._has_streams:  # it is done
            return self._ready
        done = self.device.new_event()
        done.record(lane.stream)
        return done

    def retire(self, slot: Slot) -> None:
        """Order all that touches the slot before the next use of its memory.

        Also what came after the slot was last released: a thread between two passes may
        read a weight while another model asks for its room, and is done with it by now.
        """
        if not self.device.is_host:
            for stream in self._readers(slot):
                self._ready.record(stream)
                self.h2d.stream.wait_event(self._ready)
        self._forget_readers(slot)

    def _forget_readers(self, slot: Slot) -> None:
        slot.seen_by = slot._seen_before = slot._reader = None

    def _readers(self, slot: Slot) -> set[Stream]:
        """Return the streams that may read a slot, or have read it."""
        streams = {self.device.current_stream()}
        streams |= {slot.seen_by, slot._seen_before, slot._reader} - {None}  # type: ignore[arg-type]
        return streams

    def drain(self) -> None:
        """Block the host until both lanes are idle: no host memory is in use then."""
        self.flush_home()
        self.await_loads()
        self.await_home()

    def await_loads(self) -> None:
        """Block the host until all loads so far are done, with a mark or without."""
        if self._wire_stream is not None:  # an interrupt may keep the lane from waiting
            self._wire_stream.synchronize()
        self.h2d.stream.synchronize()

    def await_home(self) -> None:
        """Block the host until what was sent home is there."""
        self.d2h.stream.synchronize()
        self.flight.land()

    def disown(self, buffer: torch.Tensor, slot: Slot | None = None) -> None:
        """Keep memory that somebody else holds from reuse while the caller's stream
        reads.

        The holder will free it without telling the H2D lane.

        Args:
            buffer: The memory.
            slot: The slot that had the memory, and loses it: the streams that read the
                slot may go on reading. The caller's stream need not be one of them: it
                can be that of another model, which needs the room.
        """
        if not self.device.is_host:
            current = self.device.current_stream()
            for stream in {current} if slot is None else self._readers(slot):
                buffer.record_stream(stream)  # type: ignore[arg-type]
        if slot is not None:
            self._forget_readers(slot)


def _block_in(slot: Slot) -> int:
    return -1 if slot.occupant is None else slot.occupant.index
