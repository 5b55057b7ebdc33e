"""Loads for accelerators: over the H2D lane, through pinned memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from stagehand.core.states import SENT, BlockState
from stagehand.core.transfer import Denied, Priority, Slot, Ticket, TransferEngine
from stagehand.core.workers import failure_of
from stagehand.errors import (
    StagehandInternalError,
    StagehandOOMError,
    StagehandWarning,
)
from stagehand.residency.blocks import staged_bytes
from stagehand.residency.loader import pageable, store_of, write_back
from stagehand.stores.pages import was_written
from stagehand.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.telemetry import Counters
    from stagehand.core.workers import WorkerGroup
    from stagehand.residency.blocks import Block
    from stagehand.stores.base import Wire

__all__ = ["LaneLoader"]

_UNLOADED, _SENT = SENT[0], SENT[-1]  # on the hot path even a subscript takes long
_SKEWED_BYTES = 1 << 30  # what is page-locked in one piece, from its beginning


class _Slab:
    """A piece of pinned memory that stages one block after the other, or keeps one."""

    __slots__ = ("block", "held", "job", "keeps", "lease", "sent")

    def __init__(self, lease: Lease, *, keeps: bool = False) -> None:
        self.lease = lease
        self.keeps = keeps
        """Whether its bytes serve the same block again."""
        self.held: list[int] | None = None
        """The versions of the host tensors that its bytes are those of."""
        self.block: Block | None = None
        self.job: Future[int | None] | None = None
        self.sent: Ticket | None = None
        """The copy that still reads the slab."""

    def note(self, job: Future[int | None]) -> None:
        """Have a job that fills it."""
        self.job = job

    def holds(self, block: Block, versions: list[int]) -> bool:
        """Whether its bytes are those of a block's host tensors of these versions."""
        return self.held == versions and not any(
            map(was_written, store_of(block).hosts)
        )

    def place_of(self, block: Block) -> torch.Tensor:
        """Return where a block lies in the slab: if it can be, as a disk wants it."""
        buffer, nbytes = self.lease.buffer, block.link_nbytes
        start = 0
        if block.wire is None and block.store is not None and block.store.skew:
            start = block.store.skew.start_in(buffer)
            if start + nbytes > min(buffer.numel(), _SKEWED_BYTES):
                start = 0
        return buffer[start : start + nbytes]


def _went_well(job: Future[int | None]) -> bool:
    return job.done() and not job.cancelled() and job.exception() is None


class LaneLoader:
    """Loads over the H2D lane, through a ring of staging slabs where it must.

    Blocks that shall be kept have a slab each: they are read into it once, and again
    only when their host tensors were edited.

    Args:
        engine: The lanes.
        arena: Pinned memory, for the slabs.
        workers: Threads that fill slabs.
        counters: Where disk bytes are counted.
    """

    fills = False

    def __init__(
        self,
        engine: TransferEngine,
        arena: Arena,
        workers: WorkerGroup,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._arena = arena
        self._workers = workers
        self._counters = counters
        self.stages = False
        self.pin_on: Callable[[], None] | None = None
        self._slab_bytes = 0
        self._slabs: list[_Slab] = []
        self._staged: dict[int, _Slab] = {}
        self._keepers: dict[int, _Slab | None] = {}  # by block; made when it is read
        self._has_read = False  # a store's own memory, since this was noted
        self._reads_changing = False  # the same, of blocks that train
        self._reads = engine.device.new_event()

    def set_slabs(self, count: int, nbytes: int) -> None:
        """See `Loader.set_slabs`. They are made when they are needed first."""
        if nbytes != self._slab_bytes or count < len(self._slabs):
            self._empty_slabs()
        self._slab_bytes = nbytes
        while len(self._slabs) < count:
            lease = self._arena.reserve_nowait(nbytes, "staging slab")
            if lease is None:
                break
            self._slabs.append(_Slab(lease))
        self.stages = bool(self._slabs or self._keepers)
        if count and not self._slabs:
            raise StagehandOOMError(
                f"the pinned memory has {format_bytes(self._arena.free_bytes)} left,"
                " for others have taken theirs meanwhile: expected room to stage a"
                f" block of {format_bytes(nbytes)}; raise pinned_cap_mb, or end a model"
                " that shares the device",
                needed_bytes=nbytes,
                limit_bytes=self._arena.free_bytes,
            )

    @property
    def kept_bytes(self) -> int:
        """See `Loader.kept_bytes`."""
        return sum(slab.lease.nbytes for slab in self._keepers.values() if slab)

    def room_to_keep(self) -> int:
        """See `Loader.room_to_keep`."""
        return self._arena.free_bytes + self.kept_bytes

    def keep(self, blocks: Sequence[Block]) -> None:
        """See `Loader.keep`."""
        wanted = {block.index for block in blocks}
        for index in [index for index in self._keepers if index not in wanted]:
            self._let_go(index)
        self._keepers = {index: self._keepers.get(index) for index in wanted}
        self.stages = bool(self._slabs or self._keepers)

    def _let_go(self, index: int) -> None:
        """Stop keeping a block."""
        slab = self._keepers[index]
        if slab is not None:
            if slab.block is not None:
                self.forget(slab.block)
            if slab.sent is not None:
                slab.sent.wait_host()
        del self._keepers[index]  # an interrupt of that wait leaves it to be let go
        if slab is not None:
            slab.lease.release()

    def _own_slab(self, block: Block) -> _Slab | None:
        """Return the slab that keeps a block, if it shall be kept and there is room."""
        if block.index not in self._keepers:
            return None
        slab = self._keepers[block.index]
        if slab is None:
            nbytes = staged_bytes(block)
            lease = self._arena.acquire_nowait(nbytes, "kept block")
            if lease is None:
                del self._keepers[block.index]
                return None
            slab = self._keepers[block.index] = _Slab(lease, keeps=True)
        return slab

    def request(self, block: Block) -> bool:
        """See `Loader.request`."""
        if self.pin_on is not None:
            self.pin_on()  # who is staged does not move
        if not block.needs_staging or block.index in self._staged:
            return False
        if block.link_nbytes > self._slab_bytes:
            return False
        slab = self._own_slab(block) or self._free_slab()
        if slab is None:
            return False
        self._stage(block, slab)
        return True

    def _free_slab(self) -> _Slab | None:
        """Return a slab without a block; if there is one, without a copy under way."""
        free, new = None, None
        for slab in self._slabs:
            if not slab.lease.is_made:
                new = new or slab
            elif slab.block is None:
                free = free or slab
        if new is None or (free and (free.sent is None or free.sent.done.query())):
            return free
        new.lease.make()
        return new

    def _stage(self, block: Block, slab: _Slab) -> None:
        if block.all_versions() != block.clean_versions:
            slab.held = None
        block.tell_edits()
        block.versions = block.read_versions()
        block.to(BlockState.HOST_STAGED)
        slab.block = block
        self._staged[block.index] = slab
        try:
            self._workers.hand(slab.note, self._fill, block, slab)
        except BaseException:
            self.forget(block)
            raise

    def _fill(self, block: Block, slab: _Slab) -> int | None:
        versions = block.versions
        if slab.holds(block, versions):
            return 0
        sent, slab.sent = slab.sent, None
        if sent is not None:
            sent.wait_host()  # this thread may wait; the model's may not
        slab.held = None
        wire, memory = block.wire, slab.place_of(block)
        nbytes: int | None = (store_of(block) if wire is None else wire).read_into(
            memory
        )
        if slab.keeps:
            slab.held = versions
        return nbytes

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """See `Loader.start`."""
        target, image = block.target, block.image
        if target is None:
            raise StagehandInternalError(f"block {block.name!r} has no place in {slot}")
        if self.pin_on is not None:
            self.pin_on()
            image = block.image
        if block.runs:
            self._start_rows(block, slot, target, image)
            return True
        if image is None:
            if block.wire is not None and not self._renew(block, block.wire, priority):
                return False
            if block.needs_staging and block.link_nbytes <= self._slab_bytes:
                return self._start_staged(block, slot, target, priority)
            if block.wire is None:
                image = self._read(block)
        if image is None:
            ticket = self._send_wire(block, slot, target, priority)
        else:
            self._has_read = True
            if block.trains:
                self._reads_changing = True
            ticket = self._engine.load(slot, target, image, priority)
        if type(ticket) is not Ticket:
            return False
        if block.trains:  # others are rarely edited: then their next use loads again
            block.versions = block.read_versions()
        if block.state is _UNLOADED:
            block.state = _SENT
        else:
            block.along(SENT)
        return True

    def takes_rows(self, block: Block) -> bool:
        """See `Loader.takes_rows`. A kept block is read once, whole."""
        if block.index in self._staged:
            return False
        if block.index not in self._keepers:
            return True
        slab = self._keepers[block.index]
        return (
            slab is not None
            and block.all_versions() == block.clean_versions
            and slab.holds(block, block.read_versions())
        )

    def _start_rows(
        self,
        block: Block,
        slot: Slot,
        target: torch.Tensor,
        source: torch.Tensor | None,
    ) -> None:
        """Fill a slot with a block's `runs` alone: from pinned memory, or a slab."""
        slab = None
        block.tell_edits()
        block.versions = block.read_versions()
        if source is not None:
            self._has_read = True
        elif block.link_nbytes > self._slab_bytes:
            source = pageable(block)
            self._read_rows(block, source)
        else:
            slab = self._own_slab(block) or self._free_slab() or self._steal()
            source = slab.place_of(block)
            if not slab.keeps:  # else it holds all of them
                if slab.sent is not None:
                    slab.sent.wait_host()
                self._read_rows(block, source)
        parts = block.layout.parts_of(block.runs)
        ticket = self._engine.load_parts(slot, target, source, parts)
        if slab is not None:
            slab.sent = ticket
            self._free(slab)
        block.along(SENT)

    def _read_rows(self, block: Block, image: torch.Tensor) -> None:
        read = store_of(block).read_rows_into(image, block.runs)
        self._counters.disk_bytes += read

    def _send_wire(
        self,
        block: Block,
        slot: Slot,
        target: torch.Tensor,
        priority: Priority,
        source: torch.Tensor | None = None,
    ) -> Ticket | Denied:
        """Send what is decoded on the device: from pinned memory, or from a slab."""
        wire = block.wire
        source = source if wire is None or source is not None else wire.pinned
        if wire is None or source is None:
            raise StagehandInternalError(f"block {block.name!r} has no wire to send")
        return self._engine.load_wire(slot, target, source, wire.decode, priority)

    def _renew(self, block: Block, wire: Wire, priority: Priority) -> bool:
        """Make sure that a wire is not older than its block's host tensors.

        False if that would take time which compute does not wait for yet. A wire that
        cannot be renewed is given up: the block crosses as its image.
        """
        block.tell_edits()
        if wire.is_current():
            return True
        if priority > Priority.REQUIRED:
            return False
        self.forget(block)
        self._engine.await_loads()  # no copy reads the wire any more
        if not wire.renew():
            self._give_up(block)
        return True

    def _give_up(self, block: Block) -> None:
        warnings.warn(
            f"block {block.name!r} was changed on the host, and what crosses the link"
            f" for it in {format_bytes(block.link_nbytes)} cannot be made anew: from"
            f" now on its {format_bytes(block.nbytes)} cross, from pageable memory,"
            " which is slower",
            StagehandWarning,
            stacklevel=2,
        )
        if block.index in self._keepers:
            self._let_go(block.index)  # it has the size of the wire
        block.cross_plain()

    def _read(self, block: Block) -> torch.Tensor:
        """Read a block that no slab can hold. That is rare: such blocks stay."""
        image = pageable(block)
        block.tell_edits()
        self._counters.disk_bytes += store_of(block).read_into(image)
        return image

    def _start_staged(
        self, block: Block, slot: Slot, target: torch.Tensor, priority: Priority
    ) -> bool:
        urgent = priority <= Priority.REQUIRED
        slab = self._staged.get(block.index)
        if urgent and slab is not None and slab.job and failure_of(slab.job):
            self.forget(block)  # what failed ahead of time is tried again now
            slab = None
        if slab is None:
            if not urgent:
                self.request(block)
                return False
            slab = self._own_slab(block) or self._free_slab() or self._steal()
            self._stage(block, slab)
        job = slab.job
        if job is None or not (urgent or _went_well(job)):
            return False  # a failure is raised when the block is needed, not before
        try:
            read = job.result()
        except BaseException:
            self.forget(block)
            raise
        if read is None:  # the thread found the host's tensors changed
            self.forget(block)
            self._give_up(block)
            return self.start(block, slot, priority)
        source = slab.place_of(block)
        if block.wire is None:
            ticket = self._engine.load(slot, target, source, priority)
        else:
            ticket = self._send_wire(block, slot, target, priority, source)
        if isinstance(ticket, Denied):
            return False
        self._counters.disk_bytes += read
        slab.sent = ticket
        self._free(slab)
        block.to(BlockState.PREFETCHING)
        return True

    def _steal(self) -> _Slab:
        """Take the slab of the block that was staged last: it is needed last."""
        for slab in reversed(list(self._staged.values())):
            if slab.block is not None and not slab.keeps:
                self.forget(slab.block)
                return slab
        slab = _Slab(self._arena.acquire(self._slab_bytes, "staging slab"))
        self._slabs.append(slab)  # none was planned
        return slab

    def _free(self, slab: _Slab) -> None:
        if slab.block is not None:
            del self._staged[slab.block.index]
        slab.block = None
        slab.job = None
        if slab.keeps:
            return
        # The copies from those before it end sooner.
        self._slabs = [*(other for other in self._slabs if other is not slab), slab]

    def finish(self, block: Block) -> None:
        """See `Loader.finish`. Streams wait for streams: nothing to do."""

    def note_reads(self) -> None:
        """See `Loader.note_reads`."""
        if self._has_read:
            self._reads.record(self._engine.h2d.stream)
            self._has_read = self._reads_changing = False

    def await_reads(self) -> None:
        """See `Loader.await_reads`."""
        if self._reads_changing:  # ahead, for a pass that did not come
            self._reads.record(self._engine.h2d.stream)
        self._reads.synchronize()

    def await_copies(self) -> None:
        """See `Loader.await_copies`."""
        self._engine.await_loads()

    def staged(self) -> list[Block]:
        """See `Loader.staged`."""
        return [slab.block for slab in self._staged.values() if slab.block is not None]

    def forget(self, block: Block) -> None:
        """See `Loader.forget`."""
        slab = self._staged.get(block.index)
        if slab is None:
            return
        if slab.job is not None:
            self._workers.drop(slab.job)
        self._free(slab)
        block.seal = None
        block.to(BlockState.UNLOADED)

    def recover(self) -> None:
        """See `Loader.recover`."""
        self._engine.drain()
        for slab in self._slabs:
            if slab.block and self._staged.get(slab.block.index) is not slab:
                slab.block = None

    def save(self, block: Block, *, only_if_different: bool = False) -> None:
        """See `Loader.save`."""
        image = None if only_if_different else block.image
        if image is not None:
            self._send(block, image).wait_host()
            return
        image = pageable(block)
        self._send(block, image).wait_host()
        write_back(block, image, only_if_different=only_if_different)

    def send_home(self, block: Block) -> Ticket | None:
        """See `Loader.send_home`. What goes into ordinary memory blocks the host."""
        return None if block.image is None else self._send(block, block.image)

    def _send(self, block: Block, image: torch.Tensor) -> Ticket:
        slot, source = block.slot, block.target
        if slot is None or source is None:
            raise StagehandInternalError(
                f"block {block.name!r} is nowhere to be saved from"
            )
        keeper = self._keepers.get(block.index)
        if keeper is not None:
            keeper.held = None
        return self._engine.save(slot, source, image)

    def close(self) -> None:
        """See `Loader.close`."""
        if self._slabs:
            self.await_copies()  # one that was interrupted may have no ticket
        self._empty_slabs()

    def _empty_slabs(self) -> None:
        for block in self.staged():
            self.forget(block)
        self.keep(())
        for slab in self._slabs:
            if slab.sent is not None:
                slab.sent.wait_host()
        while self._slabs:
            self._slabs.pop().lease.release()
