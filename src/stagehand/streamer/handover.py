"""Sends layers to the device in batches: none before all of its batch are staged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.core.transfer import Priority, TransferEngine
from stagehand.core.workers import failure_of
from stagehand.residency.lane_loader import LaneLoader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stagehand.core.arena import Arena
    from stagehand.core.telemetry import Counters
    from stagehand.core.transfer import Slot
    from stagehand.core.workers import WorkerGroup
    from stagehand.residency.blocks import Block

__all__ = ["LayerLoader"]


class LayerLoader(LaneLoader):
    """A loader that holds loads back until all layers of their batch are staged.

    Args:
        engine: See `LaneLoader`.
        arena: See `LaneLoader`.
        workers: See `LaneLoader`.
        counters: See `LaneLoader`.
        blocks: One for each layer, in order.
        batch: How many layers are sent together; fewer at the end. There are as many
            slabs.
    """

    def __init__(
        self,
        engine: TransferEngine,
        arena: Arena,
        workers: WorkerGroup,
        counters: Counters,
        *,
        blocks: Sequence[Block],
        batch: int,
    ) -> None:
        super().__init__(engine, arena, workers, counters)
        self._blocks = blocks
        self._batch = batch
        self._open: int | None = None  # the batch whose loads may start

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """See `Loader.start`. An urgent load waits for its batch, as compute does."""
        number, place = divmod(block.index, self._batch)
        if number != self._open:
            batch = self._blocks[block.index : (number + 1) * self._batch]
            if not self._is_staged(batch, wait=priority <= Priority.REQUIRED):
                return False
            self._open = number
        started = super().start(block, slot, priority)
        if started and (place == self._batch - 1 or block is self._blocks[-1]):
            self._open = None
        return started

    def await_staged(self, block: Block) -> None:
        """Wait until the load of a block can start, or was found to be impossible."""
        if block.slot is None:
            place = block.index % self._batch
            batch = self._blocks[block.index : block.index + self._batch - place]
            self._is_staged(batch, wait=True)

    def _is_staged(self, batch: Sequence[Block], *, wait: bool) -> bool:
        coming = [block for block in batch if block.slot is None]
        for block in coming:
            self.request(block)
        for block in coming:
            slab = self._staged.get(block.index)
            job = None if slab is None else slab.job
            if job is not None and wait:
                failure_of(job)  # one that failed is tried again when it is started
            elif not wait and (job is None or not job.done()):
                return False
        return True
