"""The one load path: store -> pinned -> device, and back.

Two loaders with the same methods. `LaneLoader` serves accelerators: bytes that do not
lie in pinned memory are staged there by a worker thread, and the thread that runs the
model issues the copy. `HostLoader` serves machines without one: "device" memory is host
memory, so a worker thread reads straight into the slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from stagehand.core.layout import same_bits
from stagehand.core.states import SENT, BlockState
from stagehand.core.transfer import Denied, Priority, Slot, Ticket, TransferEngine
from stagehand.errors import StagehandInternalError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.device import Device, Event
    from stagehand.core.telemetry import Counters
    from stagehand.core.workers import WorkerGroup
    from stagehand.residency.blocks import Block
    from stagehand.stores.base import Store

    # Bytes that came from disk, and when the read began and ended, if it was timed.
    _Read = tuple[int, tuple[Event, Event] | None]

__all__ = ["HostLoader", "LaneLoader", "Loader", "sample"]

_SAMPLES = 64


class Loader(Protocol):
    """What the scheduler needs; nothing above knows threads, lanes or stores."""

    stages: bool
    """Whether there is a stage between store and slot that can be filled ahead."""

    fills: bool
    """Whether threads fill slots, so that `finish` has something to wait for."""

    def request(self, block: Block) -> bool:
        """Begin to stage a block; False if it cannot be now, or need not be."""

    def set_slabs(self, count: int, nbytes: int) -> None:
        """Say how much may be staged, where staging is done."""

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """Begin to fill a slot; False if it cannot be now. Urgent loads always do."""

    def finish(self, block: Block) -> None:
        """Make the host wait for what only the host can wait for: reader threads."""

    def save(self, block: Block, *, only_if_different: bool = False) -> None:
        """Bring the slot's bytes home to the store before returning."""

    def staged(self) -> list[Block]:
        """Return the blocks that wait between store and slot."""

    def forget(self, block: Block) -> None:
        """Drop what was staged for a block."""

    def close(self) -> None:
        """Stop the threads and release what is staged. Idempotent."""


def sample(block: Block) -> torch.Tensor:
    """Return a few of the host bytes of a block, spread over all its tensors.

    An edit through `param.data` moves no version counter; one that changes most
    elements, as merging an adapter or swapping in averaged weights does, changes this.
    """
    store = _store(block)
    if block.image is not None:
        words = block.image.view(torch.int64)
        return words[:: max(1, words.numel() // _SAMPLES)].clone()
    pieces = []
    for host in store.hosts:
        if host.numel():
            flat = host.reshape(-1)
            some = flat[:: max(1, flat.numel() // 8)].contiguous()
            pieces.append(some.view(torch.uint8))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def _store(block: Block) -> Store:
    if block.store is None:
        raise StagehandInternalError(f"block {block.name!r} has no store")
    return block.store


class _Slab:
    """A piece of pinned memory that stages one block after the other."""

    __slots__ = ("block", "job", "lease", "sent")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.block: Block | None = None
        self.job: Future[int] | None = None
        self.sent: Ticket | None = None
        """The copy that still reads the slab."""


def _went_well(job: Future[int]) -> bool:
    return job.done() and not job.cancelled() and job.exception() is None


class LaneLoader:
    """Loads over the H2D lane, through a ring of staging slabs where it must.

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
        self._limit = 0
        self._slab_bytes = 0
        self._slabs: list[_Slab] = []
        self._staged: dict[int, _Slab] = {}

    def set_slabs(self, count: int, nbytes: int) -> None:
        """Stage through at most `count` slabs of `nbytes` bytes each, from now on."""
        if nbytes != self._slab_bytes or count < len(self._slabs):
            self._empty_slabs()
        self._limit = count
        self._slab_bytes = nbytes
        self.stages = count > 0

    def request(self, block: Block) -> bool:
        """See `Loader.request`."""
        if block.image is not None or block.index in self._staged:
            return False
        slab = self._free_slab()
        if slab is None:
            return False
        self._stage(block, slab)
        return True

    def _free_slab(self) -> _Slab | None:
        """Return a slab without a block; if there is one, without a copy under way."""
        free = next((slab for slab in self._slabs if slab.block is None), None)
        if free is not None and (free.sent is None or free.sent.done.query()):
            return free
        if len(self._slabs) >= self._limit:
            return free
        lease = self._arena.acquire_nowait(self._slab_bytes, "staging slab")
        if lease is None:
            return free
        slab = _Slab(lease)
        self._slabs.append(slab)
        return slab

    def _stage(self, block: Block, slab: _Slab) -> None:
        block.tell_edits()
        block.versions = block.read_versions()
        block.to(BlockState.HOST_STAGED)
        slab.block = block
        self._staged[block.index] = slab
        slab.job = self._workers.submit(self._fill, block, slab)

    def _fill(self, block: Block, slab: _Slab) -> int:
        sent, slab.sent = slab.sent, None
        if sent is not None:
            sent.wait_host()  # this thread may wait; the model's may not
        nbytes: int = _store(block).read_into(slab.lease.buffer[: block.nbytes])
        return nbytes

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """See `Loader.start`."""
        target, image = block.target, block.image
        if target is None:
            raise StagehandInternalError(f"block {block.name!r} has no place in {slot}")
        if image is None:
            if block.nbytes <= self._slab_bytes:
                return self._start_staged(block, slot, target, priority)
            image = self._read(block)
        if not isinstance(self._engine.load(slot, target, image, priority), Ticket):
            return False
        if block.trains:  # others are rarely edited: then their next use loads again
            block.versions = block.read_versions()
        if block.state is SENT[0]:
            block.state = SENT[-1]
        else:
            block.along(SENT)
        return True

    def _read(self, block: Block) -> torch.Tensor:
        """Return the bytes of a block that is larger than a slab: it stays, so once."""
        image = _pageable(block)
        block.tell_edits()
        self._counters.disk_bytes += _store(block).read_into(image)
        return image

    def _start_staged(
        self, block: Block, slot: Slot, target: torch.Tensor, priority: Priority
    ) -> bool:
        urgent = priority <= Priority.REQUIRED
        slab = self._staged.get(block.index)
        if urgent and slab is not None and slab.job and slab.job.exception():
            self.forget(block)  # what failed ahead of time is tried again now
            slab = None
        if slab is None:
            if not urgent:
                self.request(block)
                return False
            slab = self._free_slab() or self._steal()
            self._stage(block, slab)
        job = slab.job
        if job is None or not (urgent or _went_well(job)):
            return False  # a failure is raised when the block is needed, not before
        try:
            read = job.result()
        except BaseException:
            self.forget(block)
            raise
        source = slab.lease.buffer[: block.nbytes]
        ticket = self._engine.load(slot, target, source, priority)
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
            if slab.block is not None:
                self.forget(slab.block)
                return slab
        slab = _Slab(self._arena.acquire(self._slab_bytes, "staging slab"))
        self._slabs.append(slab)
        return slab

    def _free(self, slab: _Slab) -> None:
        if slab.block is not None:
            del self._staged[slab.block.index]
        slab.block = None
        slab.job = None
        self._slabs.remove(slab)
        self._slabs.append(slab)  # the copies from those before it end sooner

    def finish(self, block: Block) -> None:
        """See `Loader.finish`. Streams wait for streams: nothing to do."""

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

    def save(self, block: Block, *, only_if_different: bool = False) -> None:
        """See `Loader.save`."""
        slot, source = block.slot, block.target
        if slot is None or source is None:
            raise StagehandInternalError(
                f"block {block.name!r} is nowhere to be saved from"
            )
        image = None if only_if_different else block.image
        direct = image is not None
        image = _pageable(block) if image is None else image
        self._engine.save(slot, source, image).wait_host()
        if not direct:
            _write_back(block, image, only_if_different=only_if_different)

    def close(self) -> None:
        """See `Loader.close`."""
        self._empty_slabs()

    def _empty_slabs(self) -> None:
        for block in self.staged():
            self.forget(block)
        for slab in self._slabs:
            if slab.sent is not None:
                slab.sent.wait_host()
            slab.lease.release()
        self._slabs.clear()


def _pageable(block: Block) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(block.nbytes, dtype=torch.uint8)


def _write_back(block: Block, image: torch.Tensor, *, only_if_different: bool) -> None:
    store = _store(block)
    if only_if_different:
        views = block.layout.views(image)
        if all(same_bits(v, h) for v, h in zip(views, store.hosts, strict=True)):
            return
    store.write_back(image)


class HostLoader:
    """Fills slots in host memory: by a worker thread ahead of time, else at once.

    Args:
        device: The host.
        engine: Whose stopwatch times the reads.
        workers: Threads that read ahead.
        counters: Where bytes are counted.
    """

    stages = False
    fills = True

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        workers: WorkerGroup,
        counters: Counters,
    ) -> None:
        self._device = device
        self._engine = engine
        self._workers = workers
        self._counters = counters
        self._jobs: dict[int, Future[_Read]] = {}

    def set_slabs(self, count: int, nbytes: int) -> None:
        """See `Loader.set_slabs`. There is no stage between store and slot."""

    def request(self, block: Block) -> bool:
        """See `Loader.request`. There is no stage between store and slot."""
        return False

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """See `Loader.start`."""
        block.tell_edits()
        block.versions = block.read_versions()
        if priority <= Priority.REQUIRED:
            self._count(block, self._read(block))
        else:
            # The job holds no tensor of the slot: the slot's holders are counted.
            self._jobs[block.index] = self._workers.submit(self._read, block)
        block.along(SENT)
        return True

    def _read(self, block: Block) -> _Read:
        """Fill a slot, in any thread."""
        store, target = _store(block), block.target
        if target is None:
            raise StagehandInternalError(f"block {block.name!r} has no place to go")
        if self._engine.stopwatch is None:
            return store.read_into(target), None
        start, end = (self._device.new_event(timing=True) for _ in range(2))
        start.record()
        nbytes = store.read_into(target)
        end.record()
        return nbytes, (start, end)

    def _count(self, block: Block, read: _Read) -> None:
        nbytes, times = read
        watch = self._engine.stopwatch
        if times is not None and watch is not None:
            watch.copied(block.index, "H2D", block.nbytes, *times)
        self._counters.disk_bytes += nbytes
        self._counters.h2d_bytes += block.nbytes
        self._counters.h2d_copies += 1

    def finish(self, block: Block) -> None:
        """See `Loader.finish`. What failed ahead of time is tried again here."""
        job = self._jobs.get(block.index)
        if job is None:
            return
        failed = job.exception()  # if this is interrupted, there is a job to forget
        del self._jobs[block.index]
        self._count(block, job.result() if failed is None else self._read(block))

    def staged(self) -> list[Block]:
        """See `Loader.staged`. There is no stage between store and slot."""
        return []

    def forget(self, block: Block) -> None:
        """See `Loader.forget`. Returns when no thread writes the slot any more."""
        job = self._jobs.pop(block.index, None)
        if job is not None:
            self._workers.drop(job)

    def save(self, block: Block, *, only_if_different: bool = False) -> None:
        """See `Loader.save`."""
        if block.target is None:
            raise StagehandInternalError(
                f"block {block.name!r} is nowhere to be saved from"
            )
        self._counters.d2h_bytes += block.nbytes
        self._counters.d2h_copies += 1
        _write_back(block, block.target, only_if_different=only_if_different)

    def close(self) -> None:
        """See `Loader.close`."""
        for job in self._jobs.values():
            self._workers.drop(job)
        self._jobs.clear()
