"""What is under way on one device's link, over all who use it, and what may start.

The engines of a device *join* one `Traffic`. From then on its slots are the capacity of
their lanes, beside their own: speculation beyond it is denied, demand never.

Note [Copies home]: many hosts do not carry both directions at full speed at once. There
a load that compute is waiting for takes twice as long beside a gradient or a spill that
nobody needs soon. So copies home can *yield*: they are put aside as parcels, and each
load that is queued lets some of their bytes go behind itself: as many as the link has
time for until the next load can start. They all go at once when somebody waits for one
or a phase begins, and the oldest when too many bytes are put aside: that is
their deadline. A block that was changed on the device does not yield: it is queued
when its slot is wanted, behind the loads that are needed sooner and before the load
into the slot, which waits for it. That is the order of the deadlines.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from stagehand.core.limits import Bounds, Limits, Priority, effective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from stagehand.core.device import Event, Stream

__all__ = ["Denied", "Done", "Parcel", "Slots", "Traffic", "event_of"]

_WHOLE_BYTES = 1 << 30  # a piece of more could span two registrations of its memory
_REQUIRED = Priority.REQUIRED


class Denied(enum.Enum):
    """Why a copy was not taken. A value, not an exception: the caller tries later."""

    H2D_SLOTS_EXHAUSTED = "as many host-to-device copies as allowed are in flight"
    D2H_SLOTS_EXHAUSTED = "as many device-to-host copies as allowed are in flight"
    PHASE_RULE_SUPPRESSED_SPECULATIVE = "only demand may be copied in this phase"


class Done(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Return whether the copy is done, without waiting."""

    def synchronize(self) -> None:
        """Block the host until it is."""


class Slots:
    """How many copies of one direction may be in flight, and which are.

    Demand is counted, too, but only the newest `own` copies are kept: copies of one
    direction end in order. A copy counts no more once a use is queued behind it: else a
    host that runs ahead of the device would always find every slot in use.

    Args:
        own: The configured number, or None for as many as there are.

    Attributes:
        capacity: The number that holds now: the smaller of the configured one and the
            limit; None if there is neither.
        denied_count: Requests that were denied.
    """

    def __init__(self, own: int | None) -> None:
        self.own = own
        self.capacity = own
        self.denied_count = 0
        self.tokens = 0
        """Slots that others hold, for copies that are not the library's."""
        # In order: it is full as long as the first of these is not done.
        self._in_flight: deque[Done] = deque(maxlen=own)

    @property
    def in_flight(self) -> int:
        """Tokens, and submitted copies that are not known to be done, up to `own`."""
        while self._in_flight and self._in_flight[0].query():
            self._in_flight.popleft()
        return len(self._in_flight) + self.tokens

    def is_full(self) -> bool:
        """Return whether a speculative copy would have to be denied."""
        capacity = self.capacity
        if capacity is None or len(self._in_flight) + self.tokens < capacity:
            return False
        return self.in_flight >= capacity

    def note(self, done: Done) -> None:
        """Count a submitted copy. Without a capacity nobody asks: nothing is kept."""
        if self.capacity is not None:
            self._in_flight.append(done)

    def settle(self, done: Done) -> None:
        """Count a copy no more, because a use was queued behind it."""
        if done in self._in_flight:
            self._in_flight.remove(done)

    def limit(self, limit: int | None) -> None:
        """Hold to a limit, beside the configured number."""
        self.capacity = limit if self.own is None else effective(self.own, limit)


class Parcel:
    """Copies home that were put aside, and the event behind them.

    Memory: the sources, on the device, until they are queued.

    Args:
        traffic: Who puts it aside.
        stream: The D2H lane's stream.
        ready: Events that were recorded when the sources had been made.
        pairs: Sources on the device and pinned targets, as large.
        copy: Queues the copy of a piece: `copy(target, source)`.
        done: The event to record behind the last piece.
    """

    __slots__ = (
        *("_copy", "_done", "_pairs", "_ready", "_stream", "_traffic"),
        *("left", "sent"),
    )

    def __init__(
        self,
        traffic: Traffic,
        stream: Stream,
        ready: Sequence[Event],
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        copy: Callable[[torch.Tensor, torch.Tensor], None],
        done: Event,
    ) -> None:
        self._traffic = traffic
        self._stream = stream
        self._ready = ready
        self._pairs = deque(pairs)
        self._copy = copy
        self._done = done
        self.left = sum(_nbytes(source) for source, _ in self._pairs)
        """Bytes that are not queued yet."""
        self.sent = False

    def __repr__(self) -> str:
        return f"Parcel({self.left} bytes left)"

    def query(self) -> bool:
        """See `Done.query`."""
        return self.sent and self._done.query()

    def synchronize(self) -> None:
        """See `Done.synchronize`. It is sent now."""
        self.event().synchronize()

    def event(self) -> Event:
        """Return the event behind the copies, which are queued now if they were not."""
        if not self.sent:
            self._traffic.flush()
        return self._done

    def await_load(self, filled: Event) -> None:
        """Let what is sent from now on go behind a load."""
        self._stream.wait_event(filled)

    def send(self, nbytes: int | None = None) -> int:
        """Queue the next bytes, about as many as asked for, or all; return how many.

        What fails, or is interrupted, can be sent again.
        """
        for made in self._ready:
            self._stream.wait_event(made)
        self._ready = ()
        gone = 0
        while self._pairs and (nbytes is None or gone < nbytes):
            gone += self._send_piece(None if nbytes is None else nbytes - gone)
        if not self._pairs:
            self._done.record(self._stream)
            self.sent = True
        return gone

    def _send_piece(self, nbytes: int | None) -> int:
        """Queue a pair, or the beginning of one that can be cut.

        It counts as queued only after the call that copies it: an interrupt between
        the two makes it be copied twice, which does no harm.
        """
        pair = source, target = self._pairs[0]
        size, rest = _nbytes(source), None
        if nbytes is not None and nbytes < size and _can_be_cut(source, target):
            source, target = source.view(-1), target.view(-1)
            count = max(1, nbytes // source.element_size())
            rest = source[count:], target[count:]
            source, target = source[:count], target[:count]
            size = _nbytes(source)
        self._copy(target, source)
        if self._pairs and self._pairs[0] is pair:  # the collector may flush, too
            if rest is None:
                self._pairs.popleft()
            else:
                self._pairs[0] = rest
            self.left -= size
        return size


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _can_be_cut(source: torch.Tensor, target: torch.Tensor) -> bool:
    flat = source.is_contiguous() and target.is_contiguous()
    return flat and _nbytes(source) <= _WHOLE_BYTES


def event_of(done: Done) -> Any:
    """Return the event behind a copy, for streams to wait for; a parcel is sent now."""
    return done.event() if isinstance(done, Parcel) else done


class Traffic:
    """The slots of one device, and what yields.

    Thread-safe: models may run in several threads.

    Args:
        h2d_slots: Copies to the device at once, beyond which speculation is denied.
        d2h_slots: Copies from it.

    Attributes:
        bounds: Limits on it: post them here.
        h2d: The slots to the device.
        d2h: The slots from it.
        yields: Whether copies home yield to loads.
        suppressed_count: Requests that a phase rule denied.
    """

    def __init__(self, *, h2d_slots: int, d2h_slots: int) -> None:
        self.bounds = Bounds(self._limit)
        self.h2d = Slots(h2d_slots)
        self.d2h = Slots(d2h_slots)
        self.yields = False
        self.suppressed_count = 0
        self.is_over = False
        """Whether engines are to leave, at their next copy."""
        self._suppressed = False
        self._lock = threading.RLock()
        self._parcels: deque[Parcel] = deque()
        self._home_share: Callable[[int], float] | None = None
        self._backlog_bytes = self._piece_bytes = 0
        self._backlog = 0
        self._allowance = 0.0

    def __repr__(self) -> str:
        """Show live counts."""
        return (
            f"Traffic({self.h2d.in_flight} of {self.h2d.capacity} to the device,"
            f" {self.d2h.in_flight} of {self.d2h.capacity} from it)"
        )

    def end(self) -> None:
        """Limit nothing more, and let nothing yield; waits for no lock.

        What is put aside goes home with the next copy, or when an engine leaves.
        """
        self.is_over, self.yields, self._suppressed = True, False, False
        self._home_share = None
        self.bounds = Bounds()
        for slots in (self.h2d, self.d2h):
            slots.own = slots.capacity = None

    def _limit(self, limits: Limits) -> None:
        with self._lock:
            self.h2d.limit(limits.inflight_h2d)
            self.d2h.limit(limits.inflight_d2h)
            self._suppressed = limits.suppress_speculative

    # Slots

    def deny_load(self, priority: Priority) -> Denied | None:
        """Return why a copy to the device cannot start now, or None."""
        return self._deny(self.h2d, priority, Denied.H2D_SLOTS_EXHAUSTED)

    def deny_home(self, priority: Priority) -> Denied | None:
        """Return why a copy from the device cannot start now, or None."""
        return self._deny(self.d2h, priority, Denied.D2H_SLOTS_EXHAUSTED)

    def _deny(self, slots: Slots, priority: Priority, full: Denied) -> Denied | None:
        if priority <= _REQUIRED:
            return None
        with self._lock:
            if self._suppressed:
                self.suppressed_count += 1
                return Denied.PHASE_RULE_SUPPRESSED_SPECULATIVE
            if slots.is_full():
                slots.denied_count += 1
                return full
        return None

    def note_load(self, filled: Event, nbytes: int) -> None:
        """Count a copy to the device; what yields to it may follow."""
        with self._lock:
            self.h2d.note(filled)
            if self._parcels:
                self._let_go(filled, nbytes)

    def settle_load(self, filled: Event) -> None:
        """Count a copy no more, because a use was queued behind it."""
        with self._lock:
            self.h2d.settle(filled)

    def note_home(self, done: Done) -> None:
        """Count a copy from the device."""
        with self._lock:
            self.d2h.note(done)

    def hold_slot(self, slots: Slots, *, release: bool = False) -> None:
        """Count a slot that somebody else holds, or count it no more."""
        with self._lock:
            slots.tokens += -1 if release else 1

    # Copies home; see the note at the head

    @property
    def backlog(self) -> int:
        """Bytes that are put aside now."""
        return self._backlog

    def yield_home(self, backlog_bytes: int, *, piece_bytes: int = 1 << 20) -> None:
        """Let copies home yield to loads from now on.

        Args:
            backlog_bytes: The most that is put aside.
            piece_bytes: The least that is worth a copy of its own.
        """
        self._backlog_bytes = backlog_bytes
        self._piece_bytes = piece_bytes
        self.yields = True

    def share_home(self, share: Callable[[int], float] | None) -> None:
        """Say how many bytes may go home behind each load.

        Args:
            share: Called with the bytes of a load, returns those that may follow it.
                None lets all go behind the next load.
        """
        self._home_share = share

    def put_aside(self, parcel: Parcel) -> None:
        """Take a copy home that is to yield to loads."""
        with self._lock:
            self._parcels.append(parcel)  # first: what is counted is sent some time
            self.d2h.note(parcel)
            self._backlog += parcel.left
            while self._parcels and self._backlog > self._backlog_bytes:
                self._send_first()

    def _send_first(self, nbytes: int | None = None) -> int:
        """Queue bytes of the oldest parcel, or all; return how many.

        It stays the oldest until all of it is queued, whatever fails.
        """
        parcel = self._parcels[0]
        left = parcel.left
        try:
            gone = parcel.send(nbytes)
        finally:
            self._backlog -= left - parcel.left
        if parcel.sent and self._parcels and self._parcels[0] is parcel:
            self._parcels.popleft()
        if not self._parcels:
            self._backlog = 0  # whatever was miscounted
        return gone

    def _let_go(self, filled: Event, nbytes: int) -> None:
        share = self._home_share
        self._allowance += self._backlog if share is None else share(nbytes)
        first = self._parcels[0]
        if self._allowance < min(self._piece_bytes, first.left):
            return
        first.await_load(filled)
        while self._parcels and self._allowance > 0:
            going = max(self._piece_bytes, int(self._allowance))
            self._allowance -= self._send_first(going)
        if not self._parcels:
            self._allowance = 0.0

    def flush(self) -> None:
        """Queue all that was put aside."""
        if not self._parcels:
            return
        with self._lock:
            self._allowance = 0.0
            while self._parcels:
                self._send_first()
