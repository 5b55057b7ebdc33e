"""Gives blocks their stores, and plain tensors back to the model."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from stagehand.core.copies import copy_all
from stagehand.core.layout import moved, plain_tensors
from stagehand.core.machine import give_back_freed
from stagehand.core.states import BlockState
from stagehand.errors import StagehandOOMError
from stagehand.residency.blocks import point_to, staged_bytes, values_of
from stagehand.stores.module import ModuleStore
from stagehand.stores.packed import WORTH, PackedWire, room_for
from stagehand.stores.packing import pack_image
from stagehand.stores.wired import WiredStore
from stagehand.torch_private import storage_use_count
from stagehand.units import MIB, format_at_least, format_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.layout import Place
    from stagehand.core.workers import WorkerGroup
    from stagehand.residency.blocks import Block
    from stagehand.stores.base import Store

__all__ = ["Masters"]

_AT_ONCE_BYTES = 512 * MIB  # are pinned in a fraction of a second
_FREED_BYTES = 512 * MIB  # of tensors whose image is pinned: time to give them back
_FEW_BYTES = 16 * MIB  # are not worth it
_AHEAD = 3  # pieces that are made or in the making and not used
_SLABS = 3  # meanwhile: two are filled by threads while one is sent


class _Coming:
    """An image that a block shall have, in memory that may not be made yet."""

    __slots__ = ("block", "job", "lease")

    def __init__(self, block: Block, lease: Lease) -> None:
        self.block = block
        self.lease = lease
        self.job: Future[None] | None = None

    def note(self, job: Future[None]) -> None:
        """Have a job that makes the memory."""
        self.job = job


class Masters:
    """The host side of all blocks of one runtime.

    Page-locking memory takes several times as long as copying the weights into it, so a
    background thread does it. Before the first pass it is decided which blocks shall be
    pinned, and their bytes are reserved. The thread then makes page-locked memory, and
    the thread that runs the model copies one block after the other into it, between two
    loads (`pin_on`). Until then the block is staged. That copy is not the background
    thread's, because an edit beside it could be lost: to find out, all bytes would have
    to be compared, which takes longer than to copy them.

    Memory: the pinned images replace the tensors that they are made from. While one is
    made both exist, and memory for two more. What the tensors had goes back to the
    system now and then: the C library would keep most of what is below 32 MiB. Packed
    wires lie beside the tensors.

    Args:
        arena: Pinned memory for the images.
        pinners: One thread that makes this memory; without it all is made at once.
        make: With what the thread makes it: it raises where the arena's own function
            would warn and return memory that is not page-locked.
    """

    def __init__(
        self,
        arena: Arena,
        pinners: WorkerGroup | None = None,
        make: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._arena = arena
        self._pinners = pinners
        self._make = make
        self._coming: list[_Coming] = []
        self._late: list[Block] = []  # pinned last, in the room of the staging slabs
        self._slabs = 0, 0  # their number and size when all is pinned
        self._images: dict[int, Lease] = {}
        self._wires: dict[int, Lease] = {}
        self._freed = 0  # bytes of tensors that have moved since memory was given back
        self._alone = 0  # an image's reference count when only its lease holds it
        self._origin: dict[int, list[torch.device]] = {}

    def is_elsewhere(self, block: Block) -> bool:
        """Whether a block's truth is in files, not in host memory."""
        return block.store is not None and block.index not in self._origin

    def adopt(self, block: Block) -> None:
        """Make the tensors themselves the block's truth, on the host.

        Blocks on the `meta` device have no truth yet and are left alone.
        """
        if any(tensor.is_meta for tensor in block.tensors):
            return
        self._origin[block.index] = [tensor.device for tensor in block.tensors]
        hosts = [_on_host(values_of(tensor)) for tensor in block.tensors]
        block.set_store(ModuleStore(block.layout, hosts))
        block.clean_versions = block.all_versions()
        block.point_to_host()

    def pin(self, block: Block) -> bool:
        """Move the truth into a pinned image; False if there is no room for one."""
        if block.store is None or not block.needs_staging or not block.nbytes:
            return True
        lease = self._arena.acquire_nowait(block.nbytes, f"image of {block.name}")
        if lease is None:
            return False
        self._move(block, lease)
        return True

    def _move(self, block: Block, lease: Lease) -> None:
        store = block.store
        if store is None or store.pinned is not lease.buffer:  # or it was interrupted
            hosts = [] if store is None else store.hosts
            self._alone = storage_use_count(lease.buffer.untyped_storage())
            store = ModuleStore.pack(block.layout, hosts, lease.buffer)
        self._images[block.index] = lease
        block.rehouse(store)
        self._freed += block.nbytes

    def pack_all(
        self, blocks: Sequence[Block], device_type: str, lookahead: int
    ) -> list[Block]:
        """Let blocks that are in memory cross the link packed, where they shrink.

        As far as the arena allows, with room left to stage the others.

        Args:
            blocks: Streamed blocks, in order, off the device.
            device_type: What decodes them.
            lookahead: Blocks that are loaded ahead at most.

        Returns:
            The blocks that do not shrink.
        """
        wanted = [b for b in blocks if b.index in self._origin and b.image is None]
        wanted = [b for b in wanted if b.wire is None and b.nbytes]
        largest = max((b.nbytes for b in wanted), default=0)
        room = self._arena.free_bytes
        if sum(b.nbytes for b in wanted) > room:
            room -= min(room // 2, (lookahead + 2) * largest)
        stubborn = []
        with plain_tensors():
            image, memory = torch.empty(2, largest, dtype=torch.uint8, device="cpu")
        for block in wanted:
            used = self._pack(block, device_type, image, memory, room)
            room -= used
            if not used:
                stubborn.append(block)
            elif room <= 0:
                break
        return stubborn

    def _pack(
        self,
        block: Block,
        device_type: str,
        image: torch.Tensor,
        memory: torch.Tensor,
        room: int,
    ) -> int:
        """Give a block a packed wire.

        Returns:
            The bytes of `room` that are used up: 0 if the block does not shrink enough,
            all of them if there is no room for it.
        """
        self.unpack(block)
        hosts = block.store.hosts if block.store is not None else []
        block.layout.pack(hosts, image)
        form, packed = pack_image(image, block.layout, wire=memory)
        nbytes = room_for(form)
        if not form.packed or nbytes > WORTH * block.nbytes:
            return 0
        lease = None
        if nbytes <= room:
            lease = self._arena.acquire_nowait(nbytes, f"packed {block.name}")
        if lease is None:
            return room
        lease.buffer[: form.nbytes].copy_(packed)
        self._wires[block.index] = lease
        wire = PackedWire(block.layout, hosts, form, lease.buffer[:nbytes], device_type)
        block.set_store(WiredStore(block.layout, hosts, wire))
        block.clean_versions = block.all_versions()
        return nbytes

    def unpack(self, block: Block) -> None:
        """Let a block that was packed in memory cross as its image again.

        The block must be off the device, and no copy under way.
        """
        lease = self._wires.pop(block.index, None)
        if lease is None or block.store is None:
            return
        block.set_store(ModuleStore(block.layout, block.store.hosts))
        lease.release()

    def pin_all(self, blocks: Sequence[Block], lookahead: int) -> tuple[int, int]:
        """Pin what is in memory as far as the arena allows; keep room to stage the
        rest.

        Pinned and staged blocks alternate, so that the slow ones have time. Much is
        not pinned on return: until it is, all of it may be staged, and `pin_on` is to
        be called now and then. Where gradients have taken what was left, images make
        room for a slab.

        Args:
            blocks: Streamed blocks, in order, off the device.
            lookahead: Blocks that are loaded ahead at most.

        Returns:
            How many staging slabs there may be, and their size in bytes.

        Raises:
            StagehandOOMError: If not even one slab fits.
        """
        self.stop_pinning()
        while (slab := self._slab_for(blocks)) > (free := self._arena.free_bytes):
            if not self._unpin_one(blocks, slab):
                raise self._too_little_to_stage(slab, free)
        away = [b for b in blocks if b.needs_staging]
        wanted = [b for b in away if b.index in self._origin]
        total = sum(b.nbytes for b in wanted)
        count = 0
        if slab:
            slab = self._roomier(slab, away, free)
            # With one the disk would wait for each copy.
            count = max(min(2, free // slab), min(lookahead + 2, free // (2 * slab)))
        self._slabs = count, slab
        share = _share_of(total, free - count * slab)
        if self._pinners is None or total * share <= _AT_ONCE_BYTES:
            self._reserve(wanted, share)
            while self._coming:
                self._use(self._coming[0])
            self._give_back_freed()
            return count, slab
        if not slab:
            slab = max(b.nbytes for b in wanted)
            count = min(_SLABS, max(1, (free - total) // slab))
            share = _share_of(total, free - count * slab)
        others = self._reserve(wanted, share)
        self._late = [] if self._slabs[0] else others
        # From the last one on: the first of a pass are staged while it begins.
        self._coming.reverse()
        self._coming.sort(key=lambda coming: coming.block.stays)
        self.pin_on()
        return count, slab

    def _slab_for(self, blocks: Sequence[Block]) -> int:
        """Return the bytes that the largest block needs to be staged; 0 if none is."""
        away = [b for b in blocks if b.needs_staging]
        wanted = sum(b.nbytes for b in away if b.index in self._origin)
        has_all_here = all(b.index in self._origin for b in away)
        if has_all_here and wanted <= self._arena.free_bytes:
            return 0
        return max((b.link_nbytes for b in away), default=0)

    def _roomier(self, slab: int, away: Sequence[Block], free: int) -> int:
        """Return the bytes of a slab into which files are read without a copy.

        Those that just suffice, where more would cost the second slab.
        """
        staged = (b for b in away if b.index not in self._origin)
        roomy = max(map(staged_bytes, staged), default=0)
        if slab < roomy <= free and (free < 2 * slab or 2 * roomy <= free):
            return roomy
        return slab

    def _unpin_one(self, blocks: Sequence[Block], slab: int) -> bool:
        """Move one of the pinned blocks to ordinary memory; False if there is none.

        The smallest that makes room for a slab, or else the largest.
        """
        size = attrgetter("nbytes")
        images = (b for b in blocks if b.index in self._images and _can_move(b))
        pinned = sorted(images, key=size)
        if not pinned:
            return False
        block = next((b for b in pinned if b.nbytes >= slab), pinned[-1])
        if block.store is not None:
            hosts = _plain_copies(block, block.store.hosts)
            block.rehouse(ModuleStore(block.layout, hosts))
        self._give_up_image(block)
        return True

    def _too_little_to_stage(self, slab: int, free: int) -> StagehandOOMError:
        account = self._arena.account
        own = account.limit_bytes - account.held_bytes + self._arena.kept_bytes
        if own < slab:
            least = format_at_least(account.limit_bytes + slab - own)
            advice = f"ram_budget (or pinned_pool_mb) to at least {least}"
        else:  # this model may have it, but all on the device together may not
            advice = f"pinned_cap_mb by at least {format_at_least(slab - free)}"
        return StagehandOOMError(
            f"the pinned memory of {format_limit(free, slab)} cannot stage the"
            f" largest block of {format_at_least(slab)}; raise {advice}",
            needed_bytes=slab,
            limit_bytes=free,
        )

    def _reserve(self, blocks: Sequence[Block], share: float) -> list[Block]:
        """Reserve memory for a share of the blocks; return the others."""
        others = []
        due = 0.0
        for block in blocks:
            due += share * block.nbytes
            lease = None
            if block.nbytes and due >= block.nbytes:
                holder = f"image of {block.name}"
                lease = self._arena.reserve_nowait(block.nbytes, holder)
            if lease is None:
                others.append(block)
            else:
                self._coming.append(_Coming(block, lease))
                due -= block.nbytes
        return others

    @property
    def reserved_bytes(self) -> int:
        """Bytes of images that are reserved and not in use."""
        return sum(coming.lease.nbytes for coming in self._coming)

    @property
    def pinning_bytes(self) -> int:
        """Bytes of the blocks that shall have a pinned image and do not have it."""
        late = sum(block.nbytes for block in self._late)
        return late + sum(coming.block.nbytes for coming in self._coming)

    def pin_late(self) -> tuple[int, int]:
        """Pin the blocks that had no room as long as there were staging slabs.

        To be called when these are gone, nothing is staged, and what users assigned to
        tensors is taken in.

        Returns:
            How many slabs are needed from now on and their bytes, as `pin_all` does.
        """
        left = [block for block in self._late if not self.pin(block)]
        self._late = []
        if left:  # somebody else has taken the room
            self._slabs = 1, max(block.nbytes for block in left)
        self._give_back_freed()
        return self._slabs

    def pin_on(self, *, insist: bool = False) -> None:
        """Move blocks into the pinned memory that is made, and have more made.

        For the thread that runs the model, when no block is in the middle of a move.

        Args:
            insist: Whether to make here what the thread could not make; errors are
                raised then.
        """
        for coming in self._coming[:_AHEAD]:
            if coming.job is None or not coming.job.done():
                continue
            if insist:
                coming.lease.make()
            if coming.lease.is_made and _can_move(coming.block):
                self._use(coming)
        for coming in self._coming[:_AHEAD]:
            if coming.job is None and self._pinners is not None:
                self._pinners.hand(coming.note, coming.lease.make, self._make)
        if self._freed >= _FREED_BYTES:
            self._give_back_freed()

    def _give_back_freed(self) -> None:
        """Give back what tensors had: in the background, for it takes a while."""
        if self._freed < _FEW_BYTES:
            return
        self._freed = 0
        if self._pinners is None:
            give_back_freed()
        else:
            self._pinners.submit(give_back_freed)

    def _use(self, coming: _Coming) -> None:
        coming.lease.make()
        self._move(coming.block, coming.lease)
        self._coming.remove(coming)

    def stop_pinning(self) -> None:
        """Pin no more blocks, and give back what is reserved for them."""
        self._late = []
        while self._coming:
            coming = self._coming[-1]
            if coming.job is not None and self._pinners is not None:
                self._pinners.drop(coming.job)
            if self._images.get(coming.block.index) is coming.lease:
                self._move(coming.block, coming.lease)  # an interrupt came in between
            elif not coming.lease.is_over:  # or it was interrupted here
                coming.lease.release()
            self._coming.pop()

    def give_back(self, block: Block) -> None:
        """Point the tensors at plain memory of their own, on the device they came from.

        The block must be off the device. Tensors in file-backed memory stay there: it
        is read when it is touched. After an interrupt it may be done again.
        """
        origin, lease = self._origin.get(block.index), self._images.get(block.index)
        self.unpack(block)
        if block.store is not None:
            hosts = block.store.hosts
            if lease is not None:
                hosts = _plain_copies(block, hosts)
            for number, (tensor, host) in enumerate(
                zip(block.tensors, hosts, strict=True)
            ):
                place = None if origin is None else origin[number]
                point_to(tensor, host if place is None else moved(host, place))
            block.set_store(None)
        self._origin.pop(block.index, None)
        self._give_up_image(block)

    def _give_up_image(self, block: Block) -> None:
        lease = self._images.pop(block.index, None)
        if lease is not None:
            lease.let_go(self._alone)  # somebody may keep a tensor of it, say to save

    def let_go(self, blocks: Iterable[Block]) -> None:
        """Leave blocks' memory to whoever still has their tensors: the model is gone.

        No copy may be under way.
        """
        self.stop_pinning()
        for block in blocks:
            self.unpack(block)
            block.tensors = block.tracked = ()
            block.handles.clear()
            block.casts.clear()
            block.set_store(None)
            self._give_up_image(block)

    def rescue(self, block: Block, image: torch.Tensor) -> None:
        """Make plain memory the truth of a block whose files are damaged.

        The block must be off the device.
        """
        hosts = _plain_copies(block, block.layout.host_views(image))
        self.hand_over(block, ModuleStore(block.layout, hosts))

    def leave(self, block: Block, numbers: Iterable[int]) -> None:
        """Leave some host tensors to others who hold their memory; make new ones.

        The block must be off the device, and no copy under way. The new ones have no
        values yet, for these are written next; all other tensors keep theirs.
        """
        store = block.store
        if store is None:
            return
        lease = self._images.pop(block.index, None)
        if lease is not None:
            lease.abandon()
            new = self._arena.acquire_nowait(block.nbytes, f"image of {block.name}")
            if new is not None:
                self._move(block, new)
                return
        if lease is not None or block.layout.overlaps:
            self.unpack(block)
            store = ModuleStore(block.layout, _plain_copies(block, store.hosts))
        else:
            for number in numbers:
                store.rehost(number, _plain(block.layout.entries[number]))
        block.rehouse(store)

    def hand_over(self, block: Block, store: Store) -> None:
        """Make another store a block's truth, and give up the memory of the old one.

        The block must be off the device.
        """
        self._origin.pop(block.index, None)
        self.unpack(block)
        block.set_store(store)
        block.clean_versions = block.all_versions()
        block.point_to_host()
        self._give_up_image(block)


def _share_of(nbytes: int, room: int) -> float:
    """Return which part of some bytes has room."""
    return min(1.0, room / nbytes) if nbytes else 0.0


def _can_move(block: Block) -> bool:
    """Whether a block's host tensors can change their place now.

    No copy and no thread may read or write them. While the block is bound, its tensors
    do not even point there.
    """
    if block.bound:
        return True
    away = block.state is BlockState.UNLOADED and not block.stepping
    return away and not block.is_replaced()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with plain_tensors():
        return tensor if tensor.is_cpu else tensor.cpu()


def _plain_copies(block: Block, hosts: list[torch.Tensor]) -> list[torch.Tensor]:
    with plain_tensors():
        if block.layout.overlaps:
            image = torch.empty(block.nbytes, dtype=torch.uint8, device="cpu")
            views = block.layout.views(image)
        else:
            views = [_plain(entry) for entry in block.layout.entries]
    copy_all(views, hosts)
    return views


def _plain(entry: Place) -> torch.Tensor:
    with plain_tensors():
        return torch.empty_strided(
            entry.shape, entry.stride, dtype=entry.dtype, device="cpu"
        )
