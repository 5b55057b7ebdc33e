"""Device memory in which bytes lie between the link and a decoder.

Bytes are copied into it on a stream of their own. The H2D lane waits for them, and the
decoder runs on the lane, into the slot: so a slot is written by one stream, whatever
fills it, and its two marks mean what they always do. With two pieces of memory, one is
filled while the other is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.errors import StagehandInternalError, StagehandOOMError
from stagehand.units import format_at_least, format_bytes, format_limit

if TYPE_CHECKING:
    import torch

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.device import Device, Event, Stream

__all__ = ["Piece", "WireRing"]


class Piece:
    """Memory for one wire, and the two marks that guard it."""

    __slots__ = ("arrived", "buffer", "decoded", "used")

    def __init__(self, buffer: torch.Tensor, arrived: Event, decoded: Event) -> None:
        self.buffer = buffer
        self.arrived = arrived
        """Recorded behind the copy into it; the lane waits before it decodes."""
        self.decoded = decoded
        """Recorded on the lane behind the decoder; the next copy waits for it."""
        self.used = False
        """Whether `decoded` was ever recorded."""


class WireRing:
    """The pieces, and what the decoder works in.

    Memory: `count * nbytes + scratch_nbytes` of device memory until `close()`.

    Args:
        device: Where it is.
        lane: The stream that decodes. The arena's memory belongs to it.
        stream: The stream that copies. Each new ring of an engine gets the same one:
            PyTorch has few streams.
        arena: Device memory.
        count: Pieces.
        nbytes: Size of each: that of the longest wire.
        scratch_nbytes: What the decoder works in; the lane's order protects it.

    Raises:
        StagehandOOMError: If the arena's account cannot pay for it.
    """

    def __init__(
        self,
        device: Device,
        lane: Stream,
        stream: Stream,
        arena: Arena,
        *,
        count: int,
        nbytes: int,
        scratch_nbytes: int,
    ) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self._lane = lane
        self._order = device.new_event()
        self._leases: list[Lease] = []
        sizes = [nbytes] * count + ([scratch_nbytes] if scratch_nbytes else [])
        for size in sizes:
            try:
                lease = arena.acquire_nowait(size, "wire memory")
            except BaseException:  # the device may be full of others' memory
                self.close()
                raise
            if lease is None:
                self.close()
                account = arena.account
                needed, limit = account.held_bytes + size, account.limit_bytes
                raise StagehandOOMError(
                    f"bytes that are decoded on the device need {format_bytes(size)}"
                    f" there, but only {format_bytes(account.free_bytes)} of"
                    f" {format_limit(limit, needed)} are free; raise the budget"
                    f" to at least {format_at_least(needed)}",
                    needed_bytes=needed,
                    limit_bytes=limit,
                )
            self._leases.append(lease)
        self._pieces = [
            Piece(lease.buffer, device.new_event(), device.new_event())
            for lease in self._leases[:count]
        ]
        self.scratch: torch.Tensor | None = None
        if scratch_nbytes:
            self.scratch = self._leases[-1].buffer
        # Whoever had the memory before used it in the lane's order: copies wait for it.
        self._order.record(lane)
        self.stream.wait_event(self._order)

    def take(self, nbytes: int) -> Piece:
        """Return the piece that was taken longest ago.

        Raises:
            StagehandInternalError: If a wire is longer than a piece.
        """
        if nbytes > self.nbytes:
            raise StagehandInternalError(
                f"a wire of {nbytes} bytes for a ring of {self.nbytes} bytes a piece"
            )
        piece, *others = self._pieces
        self._pieces = [*others, piece]
        if piece.used:
            self.stream.wait_event(piece.decoded)
        return piece

    def close(self) -> None:
        """Give the memory back; in the lane's order, nothing touches it any more."""
        if self._leases:
            self._order.record(self.stream)
            self._lane.wait_event(self._order)
        while self._leases:
            self._leases.pop().release()
