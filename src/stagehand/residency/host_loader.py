"""Loads for machines without an accelerator: straight into slots in host memory."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from stagehand.core.states import SENT
from stagehand.core.transfer import Priority, Slot, Ticket, TransferEngine
from stagehand.core.workers import failure_of
from stagehand.errors import StagehandInternalError
from stagehand.residency.loader import store_of, write_back

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagehand.core.device import Event
    from stagehand.core.telemetry import Counters
    from stagehand.core.workers import WorkerGroup
    from stagehand.residency.blocks import Block

    _Marks = tuple[Event, Event]
    # Bytes that came from disk, and when the read began and ended, if it was timed.
    _Read = tuple[int, _Marks | None]

__all__ = ["HostLoader"]

_DROPPED: Future[_Read] = Future()
_DROPPED.cancel()


class HostLoader:
    """Fills slots in host memory: by a worker thread ahead of time, else at once.

    Args:
        engine: Whose stopwatch times the reads.
        workers: Threads that read ahead.
        counters: Where bytes are counted.
    """

    stages = False
    fills = True

    def __init__(
        self,
        engine: TransferEngine,
        workers: WorkerGroup,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._workers = workers
        self._counters = counters
        self._jobs: dict[int, Future[_Read]] = {}
        self.pin_on: Callable[[], None] | None = None

    def set_slabs(self, count: int, nbytes: int) -> None:
        """See `Loader.set_slabs`. There is no stage between store and slot."""

    @property
    def kept_bytes(self) -> int:
        """See `Loader.kept_bytes`. What the slots hold is kept."""
        return 0

    def room_to_keep(self) -> int:
        """See `Loader.room_to_keep`. What the slots hold is kept."""
        return 0

    def keep(self, blocks: Sequence[Block]) -> None:
        """See `Loader.keep`. There is no stage between store and slot."""

    def request(self, block: Block) -> bool:
        """See `Loader.request`. There is no stage between store and slot."""
        return False

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """See `Loader.start`."""
        block.tell_edits()
        block.versions = block.read_versions()
        if priority <= Priority.REQUIRED:
            self._jobs.pop(block.index, None)
            self._count(block, self._read(block, self._new_marks()))
        else:
            # The job holds no tensor of the slot: the slot's holders are counted.
            note = partial(self._jobs.__setitem__, block.index)
            self._workers.hand(note, self._read, block, self._new_marks())
        block.along(SENT)
        return True

    def _new_marks(self) -> _Marks | None:
        watch = self._engine.stopwatch
        return None if watch is None else (watch.new_mark(), watch.new_mark())

    def _read(self, block: Block, marks: _Marks | None) -> _Read:
        """Fill a slot, in any thread; set both marks, if the read is timed."""
        store, target = store_of(block), block.target
        if target is None:
            raise StagehandInternalError(f"block {block.name!r} has no place to go")
        fill = partial(store.read_into, target)
        if block.runs:
            fill = partial(store.read_rows_into, target, block.runs)
        if marks is None:
            return fill(), None
        start, end = marks
        start.record()
        nbytes = fill()
        end.record()
        return nbytes, marks

    def _count(self, block: Block, read: _Read) -> None:
        nbytes, marks = read
        watch = self._engine.stopwatch
        crossed = block.runs_nbytes if block.runs else block.nbytes
        if marks is not None and watch is not None:
            watch.copied(block.index, "H2D", crossed, *marks)
        self._counters.disk_bytes += nbytes
        self._counters.h2d_bytes += crossed
        self._counters.h2d_copies += 1

    def takes_rows(self, block: Block) -> bool:
        """See `Loader.takes_rows`. Stores read what they are asked for."""
        return True

    def finish(self, block: Block) -> None:
        """See `Loader.finish`. What failed ahead of time is tried again here."""
        job = self._jobs.get(block.index)
        if job is None:
            return
        failed = failure_of(job)  # if this is interrupted, there is a job to forget
        del self._jobs[block.index]
        self._count(
            block,
            job.result() if failed is None else self._read(block, self._new_marks()),
        )

    def note_reads(self) -> None:
        """See `Loader.note_reads`. What was used was read before."""

    def await_reads(self) -> None:
        """See `Loader.await_reads`."""

    def await_copies(self) -> None:
        """See `Loader.await_copies`."""

    def staged(self) -> list[Block]:
        """See `Loader.staged`. There is no stage between store and slot."""
        return []

    def forget(self, block: Block) -> None:
        """See `Loader.forget`. Returns when no thread writes the slot any more.

        If an interrupt leaves the block where it is, `finish` is told that the slot was
        not filled. The job's failure would keep the memory of the slot.
        """
        job = self._jobs.get(block.index)
        if job is not None:
            self._workers.drop(job)
            self._jobs[block.index] = _DROPPED

    def recover(self) -> None:
        """See `Loader.recover`. `forget` does it block by block."""

    def save(self, block: Block, *, only_if_different: bool = False) -> None:
        """See `Loader.save`."""
        if block.target is None:
            raise StagehandInternalError(
                f"block {block.name!r} is nowhere to be saved from"
            )
        if write_back(block, block.target, only_if_different=only_if_different):
            self._counters.d2h_bytes += block.nbytes
            self._counters.d2h_copies += 1

    def send_home(self, block: Block) -> Ticket | None:
        """See `Loader.send_home`. There is no lane that would take it there."""
        return None

    def close(self) -> None:
        """See `Loader.close`."""
        for job in self._jobs.values():
            self._workers.drop(job)
        self._jobs.clear()
