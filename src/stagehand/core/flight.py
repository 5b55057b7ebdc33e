"""Device memory that copies home still read, and when it is given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stagehand.core.device import Device, Event, Stream

__all__ = ["Flight"]


class Flight:
    """Tensors on their way home, in two groups: one fills while the other one crosses.

    `record_stream` would give their memory back when the host sees that the copy is
    done. A host that is ahead of the device does not look, and all gradients of a model
    could be on the device at a time. So the tensors are kept, and when a group is full
    their maker's stream waits for the group before it, whose memory is free then in
    that stream's order.

    Not thread-safe: callers hold the runtime's lock.

    Args:
        device: Where they are.
        lane: The stream that copies them.
    """

    def __init__(self, device: Device, lane: Stream) -> None:
        self.group_bytes = 0
        """Bytes with which a group is full. With as many as are made while one block
        is in use, their maker waits only where it would wait for the link anyway."""
        self._lane = lane
        self._filling: list[torch.Tensor] = []
        self._crossing: list[torch.Tensor] = []
        self._bytes = 0  # in the group that fills
        self._maker: Stream | None = None  # made the tensors of both groups
        self._events = device.new_event(), device.new_event()

    def __repr__(self) -> str:
        return f"Flight({len(self._filling)}, {len(self._crossing)} tensors)"

    def keep(self, source: torch.Tensor, maker: Stream) -> bool:
        """Keep a tensor, before its copy is queued; False if others have to.

        Args:
            source: On the device.
            maker: The stream that made it; those of both groups have the same.
        """
        if self._maker is None:
            self._maker = maker
        elif self._maker != maker:
            return False
        self._filling.append(source)
        self._bytes += source.nbytes
        return True

    def sent(self, wait: Callable[[Stream, Event], None]) -> None:
        """The copies of all that is kept are queued: a full group crosses.

        Args:
            wait: Lets a stream wait for an event.
        """
        maker = self._maker
        if maker is None or self._bytes < self.group_bytes:
            return
        filled, crossed = self._events
        filled.record(self._lane)
        if self._crossing:
            wait(maker, crossed)
        # First: after an interrupt between these the maker waits for more, not less.
        self._events = crossed, filled
        self._crossing, self._filling, self._bytes = self._filling, [], 0

    def land(self) -> None:
        """All copies are done, the host has waited for them: give all memory back."""
        self._filling, self._crossing, self._bytes = [], [], 0
        self._maker = None
