"""The one load path: store -> pinned -> device, and back.

Two loaders with the same methods. `LaneLoader` serves accelerators: bytes that do not
lie in pinned memory are staged there by a worker thread, and the thread that runs the
model issues the copy. `HostLoader` serves machines without one: "device" memory is host
memory, so a worker thread reads straight into the slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from stagehand.errors import StagehandInternalError
from stagehand.stores.pages import some_elements
from stagehand.torch_private import inference_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stagehand.core.transfer import Priority, Slot, Ticket
    from stagehand.residency.blocks import Block
    from stagehand.stores.base import Store

__all__ = ["Loader", "has_sample", "pageable", "sample", "store_of", "write_back"]


class Loader(Protocol):
    """What the scheduler needs; nothing above knows threads, lanes or stores."""

    stages: bool
    """Whether there is a stage between store and slot that can be filled ahead."""

    fills: bool
    """Whether threads fill slots, so that `finish` has something to wait for."""

    pin_on: Callable[[], None] | None
    """See `Masters.pin_on`. Set as long as pinned memory is being made: the loader
    calls it before it loads what is not pinned yet, the scheduler at the end of a
    pass."""

    def request(self, block: Block) -> bool:
        """Begin to stage a block; False if it cannot be now, or need not be."""

    def set_slabs(self, count: int, nbytes: int) -> None:
        """Have so many staging slabs of so many bytes, where there is staging."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of pinned memory in which blocks from files are kept."""

    def room_to_keep(self) -> int:
        """Return how many bytes the blocks of `keep` may take in all."""

    def keep(self, blocks: Sequence[Block]) -> None:
        """Keep these blocks, and no others, in pinned memory once they were read."""

    def start(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """Begin to fill a slot; False if it cannot be now. Urgent loads always do."""

    def takes_rows(self, block: Block) -> bool:
        """Whether `start` can fill a slot with those of a block's `runs` alone now."""

    def finish(self, block: Block) -> None:
        """Block the host until a reader thread has filled the slot, where one does."""

    def note_reads(self) -> None:
        """Mark the copies so far that read weights on the host, for `await_reads`."""

    def await_reads(self) -> None:
        """Block the host until the copies marked last are done, and those since then
        that read weights that train: these may be written.

        Any thread may call it.
        """

    def await_copies(self) -> None:
        """Block the host until all copies are done, also those for the next pass."""

    def save(self, block: Block, *, only_if_different: bool = False) -> None:
        """Bring the slot's bytes home to the store before returning."""

    def send_home(self, block: Block) -> Ticket | None:
        """Begin to bring the slot's bytes home; None where the host has to do it."""

    def staged(self) -> list[Block]:
        """Return the blocks that are staged or being staged, and not on their way."""

    def forget(self, block: Block) -> None:
        """Drop what was staged or read ahead for a block."""

    def recover(self) -> None:
        """Mend what an interrupt has left, once all blocks are mended.

        On return no copy is under way, with a mark or without, and a slab that stages
        no block is free.
        """

    def close(self) -> None:
        """Stop the threads and release what is staged. Idempotent."""


def sample(block: Block) -> torch.Tensor | bytes:
    """Return a few of the host bytes of a block, spread over all its tensors.

    An edit through `param.data` moves no version counter; one that changes most
    elements, as merging an adapter or swapping in averaged weights does, changes this.
    """
    if block.sampled is not None:
        return block.sampled.tobytes()
    return some_elements(store_of(block).hosts)


def has_sample(block: Block, seal: torch.Tensor | bytes) -> bool:
    """Return whether an earlier `sample` of a block is one of its bytes now."""
    now = sample(block)
    if isinstance(now, torch.Tensor) and isinstance(seal, torch.Tensor):
        return torch.equal(seal, now)
    return isinstance(now, bytes) and isinstance(seal, bytes) and now == seal


def store_of(block: Block) -> Store:
    """Return where a block's truth lives; a block that moves has one."""
    if block.store is None:
        raise StagehandInternalError(f"block {block.name!r} has no store")
    return block.store


def pageable(block: Block) -> torch.Tensor:
    """Return ordinary memory for a block's image."""
    with inference_mode(False):
        return torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")


def write_back(block: Block, image: torch.Tensor, *, only_if_different: bool) -> bool:
    """Bring an image home to the block's store; return whether it was not there."""
    store = store_of(block)
    if only_if_different and store.holds(image):
        return False
    store.write_back(image)
    return True
