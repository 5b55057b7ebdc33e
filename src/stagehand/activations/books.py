"""What is known of all saved tensors: how many bytes are where, and who holds them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, fields
from itertools import count
from typing import TYPE_CHECKING

from stagehand.activations.learning import Lessons
from stagehand.activations.pieces import Allowance, Bundle, Piece, Scope
from stagehand.core.limits import Bounds, effective

if TYPE_CHECKING:
    from stagehand.activations.carrier import Carrier, Leaving
    from stagehand.core.device import Device
    from stagehand.core.ledger import Watermarks

__all__ = ["Books", "Tally"]

_BUNDLE_BYTES = 4 << 20  # copies of less cost more than they move


@dataclass(slots=True)
class Tally:
    """What has happened, counted where it happens."""

    saved_count: int = 0
    """Pieces that autograd saved."""
    spilled_count: int = 0
    """Pieces that were copied to the host and let go."""
    spilled_bytes: int = 0
    """Bytes that were copied to the host."""
    freed_bytes: int = 0
    """Bytes of these whose device memory was let go."""
    restored_count: int = 0
    """Pieces that came back."""
    restored_bytes: int = 0
    """Bytes that came back."""
    demanded_count: int = 0
    """Bundles that were not on their way when they were needed."""
    cancelled_count: int = 0
    """Bundles that came back too early and were let go again."""
    stuck_count: int = 0
    """Pieces that stayed because somebody else keeps their storage."""
    over_count: int = 0
    """How often there was no room, and nothing more could leave."""

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


_Kept = tuple[weakref.ref[Piece], int]


class Books:
    """The state of `Spill`, which says what its arguments are. Under one lock."""

    def __init__(
        self,
        device: Device,
        carrier: Carrier,
        *,
        budget_bytes: int,
        smallest_bytes: int,
        marks: Watermarks | None = None,
        inflight_d2h: int | None = None,
        inflight_h2d: int | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.tally = Tally()
        self.bounds = Bounds()
        """Limits on it: post them here."""
        self._lock = threading.RLock()
        self.lessons = Lessons(device, carrier, self._lock)
        self.peak_bytes = 0
        self._device = device
        index = device.torch_device.index
        self._place = -1 if index is None else index
        self._carrier = carrier
        self._smallest = smallest_bytes
        self._bundle_bytes = min(_BUNDLE_BYTES, max(smallest_bytes, budget_bytes // 16))
        self._has_streams = not device.is_host
        self._marks = marks
        self._unread = 0
        self._inflight_d2h = inflight_d2h
        self._inflight_h2d = inflight_h2d
        self._live: dict[int, weakref.ref[Piece]] = {}  # on the device, by storage
        self._held = 0
        self._given: list[Allowance] = []
        self._kept: deque[_Kept] = deque()  # oldest first
        self._open: list[Scope] = []
        self._waiting: deque[tuple[Scope, Bundle]] = deque()
        self._leaving: deque[Leaving] = deque()
        self._ahead: deque[weakref.ref[Bundle]] = deque()  # fetched before their use
        self._used: list[weakref.ref[Bundle]] = []  # came back, and was unpacked
        self._stuck: deque[_Kept] = deque()  # kept by others
        self._stuck_bytes = 0
        self._turned = -1  # the latest backward pass that came to a forward
        self._numbers = count()
        self._unpruned = 0
        self._is_skipped = False
        # Whether a call changes the books, or was cut short as it did: by an interrupt,
        # or an error. Then the next call counts anew.
        self._is_torn = False

    @property
    def most_leaving(self) -> int | None:
        """Bundles on their way to the host before planned ones wait."""
        return _smaller(self._inflight_d2h, self.bounds.current.inflight_d2h)

    @property
    def most_coming(self) -> int | None:
        """Bundles on their way back before those not yet needed wait."""
        return _smaller(self._inflight_h2d, self.bounds.current.inflight_h2d)

    def _note_peak(self) -> None:
        """Note what is held, which is less than is counted, as the most so far."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    @property
    def _leaving_bytes(self) -> int:
        """Bytes that are on their way to the host, and still count as held."""
        return sum(leaving.nbytes for leaving in self._leaving)

    @property
    def held_bytes(self) -> int:
        """Bytes of saved storages that only the graph keeps on the device."""
        held = self._held
        for given in tuple(self._given):
            held -= given.room
        return held


def _smaller(config_value: int | None, limit: int | None) -> int | None:
    """Return the smaller of a setting and a limit, where None is neither."""
    return limit if config_value is None else effective(config_value, limit)
