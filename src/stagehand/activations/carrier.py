"""Carries bundles of saved tensors to host memory and back.

Copies to the host wait for the streams that made the tensors, copies to the device for
the moment at which compute has made room. The host never waits, unless checksums are
asked for or there is no page-locked memory.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagehand.activations.pieces import Gone
from stagehand.core.limits import Priority
from stagehand.core.traffic import event_of
from stagehand.errors import StagehandInternalError, TransferError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    import torch

    from stagehand.activations.pieces import Bundle, Piece
    from stagehand.activations.pool import Slab, SlabPool
    from stagehand.activations.timing import Marks, StallClock
    from stagehand.core.device import Device, Stream
    from stagehand.core.traffic import Done
    from stagehand.core.transfer import TransferEngine

__all__ = ["Carrier", "Leaving"]

_SPECULATIVE = Priority.SPECULATIVE  # an attribute of an enumeration is slow


@dataclass(eq=False, slots=True)
class Leaving:
    """What goes to the host in one bundle, which may die before its copy is done."""

    makers: list[Stream]
    """The streams to which the sources' memory is given back."""
    pieces: list[weakref.ref[Piece]] = field(default_factory=list)
    """The bundle's pieces."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """Their tensors on the device, kept until the copy is done."""
    nbytes: int = 0
    """Device bytes that are free then, if nobody else keeps them."""
    done: Done = field(init=False)
    """Set when the copy is queued: what has none has not left."""

    def take(self, members: Sequence[weakref.ref[Piece]]) -> list[Piece]:
        """Take along the pieces that are there, and return them."""
        found = []
        for ref in members:
            piece = ref()
            source = None if piece is None else piece.source()
            if piece is not None and source is not None:
                found.append(piece)
                self.pieces.append(ref)
                self.sources.append(source)
                self.nbytes += piece.nbytes
        return found


class Remains(deque[Gone]):
    """Where bundles that die leave what they held, for the carrier to take back.

    Bundles may outlive the carrier: then each gives back its own.
    """

    abandoned = False

    def append(self, dead: Gone) -> None:
        """Take what a bundle held; this may run wherever the garbage collector does."""
        if not self.abandoned:
            super().append(dead)
            return
        if dead.last is not None:
            dead.last.synchronize()
        if dead.slab is not None:
            dead.slab.forget()


class Carrier:
    """Moves bundles over the lanes of a device.

    Not thread-safe: callers hold a lock.

    Args:
        device: Where the tensors are.
        engine: Its lanes.
        pool: Host memory for what leaves.
        checks: Whether to compare CRC32 sums of what leaves and of what returns. The
            host waits for both copies then.
    """

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        pool: SlabPool,
        *,
        checks: bool = False,
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.gone = Remains()
        self.stalls: StallClock | None = None
        """Set while waits are to be timed."""
        self.marks: Marks | None = None
        """Set while a forward is observed: its times are those without waits."""
        self._device = device
        self._checks = checks
        self._dying: deque[Gone] = deque()  # their copies are under way

    def send(self, bundle: Bundle, pieces: Sequence[Piece], leaving: Leaving) -> None:
        """Queue the copies of a bundle's pieces to the host."""
        slab = bundle.slab = self._slab(bundle.nbytes)
        try:
            pairs = []
            for piece, source in zip(pieces, leaving.sources, strict=True):
                if self._checks:
                    memory = source.cpu().untyped_storage()
                    for handle in piece.handles():
                        bundle.sums[handle.number] = _sum(handle.view(memory, 0))
                pairs.append((source, slab.like(source, piece.start)))
            if len(bundle.members) == 1:
                bundle.home = pairs[0][1]
            left = self.engine.send_group(pairs, makers=leaving.makers)
            bundle.left = leaving.done = left
        finally:
            if bundle.left is None:
                self.engine.drain()  # some of the copies may be under way, or put aside
                self.pool.give(bundle)

    def _slab(self, nbytes: int) -> Slab:
        """Return host memory that copies of the D2H lane may write.

        What dead bundles held can be had before their copies are known to be done, if
        the lane waits for them: a host that is ahead of the device needs no more.
        """
        slab = self.pool.take(nbytes)
        if slab is not None:
            return slab
        sizes = self.pool.sizes(nbytes)
        for dead in self._dying:
            slab = dead.slab
            if slab is not None and slab.lease is not None and slab.size in sizes:
                if dead.last is not None:
                    self.engine.d2h.stream.wait_event(event_of(dead.last))
                dead.slab = None
                self.pool.hits += 1
                return slab
        return self.pool.make(nbytes)

    def fetch(self, bundle: Bundle) -> None:
        """Queue the copy of a bundle to new device memory of the current stream."""
        slab, left = bundle.slab, bundle.left
        if slab is None or left is None:
            raise StagehandInternalError("a saved tensor is nowhere")
        if self._checks:
            self._compare(bundle, slab, left)
        maker = self._device.current_stream()
        source = bundle.home
        if source is None:
            source = slab.buffer[: bundle.nbytes]
            back = self._device.empty(bundle.nbytes)
        else:
            back = self._device.empty_like(source)
        try:
            arrived = self.engine.bring_group(source, back, after=left, maker=maker)
            bundle.back, bundle.arrived = back, arrived
            bundle.maker, bundle.seen = maker, None
        finally:
            if bundle.back is None:
                self._device.synchronize()  # the copy may be under way

    def receive(self, bundle: Bundle) -> torch.Tensor:
        """Return a bundle's device memory, for use on the current stream."""
        back, arrived = bundle.back, bundle.arrived
        if back is None or arrived is None:
            raise StagehandInternalError("a saved tensor was not fetched")
        stream = self._device.current_stream()
        if bundle.seen is None or bundle.seen != stream:
            self.wait(arrived, stream)
            if bundle.maker is not None and stream != bundle.maker:
                back.record_stream(stream)  # type: ignore[arg-type]
            bundle.seen = stream
        return back

    def wait(self, done: Done, stream: Stream) -> None:
        """Let a stream that computes wait."""
        if self.stalls is None and self.marks is None:
            stream.wait_event(event_of(done))
            return
        clocks = [clock for clock in (self.stalls, self.marks) if clock is not None]
        starts = [clock.mark(stream) for clock in clocks]
        stream.wait_event(event_of(done))
        for clock, start in zip(clocks, starts, strict=True):
            clock.waited(start, stream)

    def let_pass(self, leaving: Leaving, stream: Stream) -> None:
        """Let sources go before their copy is known to be done.

        A stream that made some of them, and does not wait, may not have their memory
        back before.
        """
        self.wait(leaving.done, stream)
        if leaving.makers != [stream]:
            for source in leaving.sources:
                source.record_stream(self.engine.d2h.stream)  # type: ignore[arg-type]

    def drop(self, bundle: Bundle) -> None:
        """Let go of a bundle's device memory: it is used, or was fetched too early."""
        arrived, maker = bundle.arrived, bundle.maker
        if arrived is None:  # an interrupt came just before it was noted
            return
        if bundle.seen is None and maker is not None:
            maker.wait_event(arrived)
        bundle.left = arrived  # the slab is read until then
        bundle.back = bundle.arrived = bundle.seen = None

    def may_send(self) -> bool:
        """Whether a copy to the host that nobody waits for may start now."""
        return self.engine.deny_home(_SPECULATIVE) is None

    @property
    def may_fetch(self) -> bool:
        """Whether a copy to the device that nobody waits for may start now.

        Slots that are shared with weights do not count: what comes back ahead is needed
        for sure, and soon; denied, it would be asked for again too late.
        """
        return not self.engine.h2d.is_full()

    def reap(self) -> int:
        """Take back what dead bundles held; return how many device bytes that were.

        After an interrupt something may be in both queues, or in one twice: it has its
        slab until somebody else has.
        """
        freed = 0
        gone, dying = self.gone, self._dying
        while gone:
            dead = gone[0]
            if dead.slab is not None:
                dying.append(dead)
            freed += dead.held
            gone.popleft()
        while dying and ((last := dying[0].last) is None or last.query()):
            self.pool.give(dying[0])
            dying.popleft()
        return freed

    @property
    def gone_bytes(self) -> int:
        """Device bytes of dead bundles that are still to be taken back."""
        return sum(dead.held for dead in tuple(self.gone))

    def abandon(self) -> None:
        """Give back all host memory; what graphs still need follows when these go."""
        self.gone.abandoned = True
        for dead in (*self.gone, *self._dying):
            self.gone.append(dead)
        self.gone.clear()
        self._dying.clear()
        self.pool.close()

    def _compare(self, bundle: Bundle, slab: Slab, left: Done) -> None:
        left.synchronize()
        memory = slab.buffer.untyped_storage()
        first = int(slab.buffer.storage_offset())
        for piece in bundle.living():
            for handle in piece.handles():
                expected = bundle.sums.get(handle.number)
                if expected is None or handle.has_changed():  # that raises by itself
                    continue
                tensor = handle.view(memory, first + piece.start)
                found = _sum(tensor)
                if found != expected:
                    raise TransferError(
                        f"{handle}: the CRC32 of its {tensor.nbytes} bytes was"
                        f" {expected:#010x} when they left the device and is"
                        f" {found:#010x} in host memory; something else has written"
                        " there"
                    )


def _sum(tensor: torch.Tensor) -> int:
    """The CRC32 of a tensor on the host.

    Not of all of its memory: parts that nobody has saved may be written meanwhile.
    """
    flat = tensor.contiguous()
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
    return zlib.crc32(memory)
