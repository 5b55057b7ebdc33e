"""The slots of a plan, and the device memory that they have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from stagehand.core.transfer import Slot, TransferEngine
from stagehand.errors import StagehandOOMError
from stagehand.residency.finding import how_to_raise
from stagehand.torch_private import storage_use_count
from stagehand.units import format_bytes, format_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.telemetry import Counters
    from stagehand.residency.blocks import Block

__all__ = ["Neighbours", "SlotMemory"]

_ROUNDS = 8  # tries, where other threads take what was freed, before it is an error


def _keep_limit(nbytes: int) -> None:
    """Raise no limit: nobody has said how."""


class Neighbours(Protocol):
    """Whoever else holds memory of the device."""

    def make_room(self, nbytes: int, *, by_ends: bool = False) -> bool:
        """Let others give up so many bytes; return whether they are free.

        Args:
            nbytes: How many are needed now.
            by_ends: Whether to wait until passes have ended that other threads run.
        """

    def beside_passes(self, nbytes: int) -> AbstractContextManager[bool]:
        """Take so many bytes between passes, if no pass of others was promised them."""

    def budget_for(self, nbytes: int, *, at_once: bool = False) -> int:
        """Return the smallest budget with which so many bytes can be had.

        Args:
            nbytes: How many.
            at_once: Whether that is more than a pass needs at least.
        """

    def are_there(self) -> bool:
        """Whether there are any."""

    def are_busy(self) -> bool:
        """Whether another thread runs any of them."""

    def name_them(self) -> str:
        """Say who holds what, for an error."""


class SlotMemory:
    """Slots, with memory from the first load on until they are freed.

    Args:
        engine: The lanes, whose marks order the uses of the memory.
        arena: Device memory.
        blocks: All blocks.
        counters: Where abandoned slots are counted.
        free_idle: Gives up the memory of all slots that nobody uses.
    """

    def __init__(
        self,
        engine: TransferEngine,
        arena: Arena,
        blocks: Sequence[Block],
        counters: Counters,
        free_idle: Callable[[], None],
    ) -> None:
        self.slots: list[Slot] = []
        self.by_address: dict[int, Slot] = {}
        """Slots that have memory, by its address."""
        self.left: set[int] = set()
        """Addresses of memory that this pass has left to who holds it."""
        self.neighbours: Neighbours | None = None
        """Others on the device, who may make room for a block that is needed now."""
        self.widen: Callable[[int], None] = _keep_limit
        """Raises the account's limit to so many bytes, if the budget has them."""
        self.account = arena.account
        self._engine = engine
        self._arena = arena
        self._blocks = blocks
        self._counters = counters
        self._free_idle = free_idle

    def settle_in(self, block: Block, slot: Slot, *, urgent: bool) -> bool:
        """Give the slot memory and the block its views of it, where they have none yet.

        Args:
            block: Is to be loaded into the slot.
            slot: Empty.
            urgent: Whether others must give up memory for it.

        Returns:
            False if there is no memory, and it is not urgent.

        Raises:
            StagehandOOMError: If there is none, and it is urgent.
        """
        if slot.lease is None:
            lease = self._arena.acquire_nowait(slot.nbytes, block.name)
            if lease is None:
                if not urgent:
                    return False
                lease = self._lease(slot.nbytes, block)
            try:
                self._furnish(slot, lease)
            except BaseException:
                if slot.lease is None:
                    self._strip(slot)
                    lease.release()
                raise
        if block.views_in is slot:
            return True
        # Only the difference: a reader thread, too, may refer to the memory now.
        before, counted = storage_use_count(slot.storage), block.form in slot.views
        try:
            block.set_views(slot)
            slot.alone += storage_use_count(slot.storage) - before
        except BaseException:  # an interrupt: uncounted views would seem to be users'
            if not counted:
                slot.views.pop(block.form, None)
            block.set_views(None)
            raise
        return True

    def _furnish(self, slot: Slot, lease: Lease) -> None:
        self._engine.adopt(slot)
        slot.storage = lease.buffer.untyped_storage()
        slot.storage_key = slot.storage._cdata
        slot.alone = storage_use_count(slot.storage)
        slot.address = slot.storage.data_ptr()
        self.by_address[slot.address] = slot
        slot.lease = lease  # at last: an interrupt may come before

    def _strip(self, slot: Slot) -> None:
        self.by_address.pop(slot.address, None)
        slot.address = 0
        slot.storage = None

    def make_room(self, nbytes: int) -> bool:
        """Let others give up so many bytes; return whether these are free."""
        return self.neighbours is not None and self.neighbours.make_room(nbytes)

    def beside_passes(self, nbytes: int) -> AbstractContextManager[bool]:
        """See `Neighbours.beside_passes`."""
        others = self.neighbours
        return nullcontext(True) if others is None else others.beside_passes(nbytes)

    def budget_for(self, nbytes: int, *, at_once: bool = False) -> int:
        """See `Neighbours.budget_for`."""
        others = self.neighbours
        if others is None:
            return nbytes
        return others.budget_for(nbytes, at_once=at_once)

    def _lease(self, nbytes: int, block: Block) -> Lease:
        """Return memory that others, or this model's idle slots, have to give up."""
        lease = self._lease_of_others(nbytes, block)
        if lease is None:
            self._free_idle()
            lease = self._arena.acquire_nowait(nbytes, block.name)
        if lease is None:
            self.widen(self.account.held_bytes + nbytes)
            lease = self._arena.acquire_nowait(nbytes, block.name)
        if lease is None:
            lease = self._lease_of_others(nbytes, block, by_ends=True)
        if lease is not None:
            return lease
        others = "" if self.neighbours is None else self.neighbours.name_them()
        used = [s.occupant.name for s in self.slots if s.occupant and s.occupant.uses]
        needed, limit = self._budget_with(nbytes), self.account.limit_bytes
        raise StagehandOOMError(
            f"block {block.name!r} needs {format_bytes(nbytes)} of device memory while"
            f" {', '.join(map(repr, used[:5])) or 'what stays'} is in use, and of"
            f" {format_limit(limit, needed)} only"
            f" {format_bytes(self.account.free_bytes)} are free{others};"
            f" {how_to_raise(needed)}",
            needed_bytes=needed,
            limit_bytes=limit,
        )

    def _budget_with(self, first: int, *more: int) -> int:
        """Return the smallest budget that has room for what was refused.

        Args:
            first: Bytes that were asked for.
            more: That would have been asked for after them.
        """
        own, all_of_it = self.account.held_bytes + first, first + sum(more)
        if own <= self.account.limit_bytes:  # others have given up what they can
            return self.account.limit_for(all_of_it)
        return self.budget_for(self.account.held_bytes + all_of_it, at_once=True)

    def _lease_of_others(
        self, nbytes: int, block: Block, *, by_ends: bool = False
    ) -> Lease | None:
        """Return memory that others give up, see `Neighbours.make_room`, if they do."""
        others, lease = self.neighbours, None
        for _ in range(_ROUNDS):  # another thread may take what was freed
            if others is None or not others.make_room(nbytes, by_ends=by_ends):
                break
            lease = self._arena.acquire_nowait(nbytes, block.name)
            if lease is not None:
                break
        return lease

    def refuse(
        self,
        blocks: Sequence[Block],
        error: StagehandOOMError,
        missing: Sequence[Block],
    ) -> StagehandOOMError:
        """Return what is to be raised where one of several blocks found no room.

        Args:
            blocks: All that are to be there at once.
            error: What was raised for one of them.
            missing: That one, and those behind it.
        """
        needed = self._budget_with(*(block.slot_nbytes for block in missing))
        at_once = sum(block.slot_nbytes for block in blocks)
        return StagehandOOMError(
            f"blocks {', '.join(repr(block.name) for block in blocks[:5])} are read in"
            f" one call, outside of their modules, and need {format_bytes(at_once)} of"
            f" device memory at once, beside {format_bytes(max(needed - at_once, 0))}"
            f" that stay or are in use, but the budget is"
            f" {format_limit(error.limit_bytes, needed)}; {how_to_raise(needed)}",
            needed_bytes=needed,
            limit_bytes=error.limit_bytes,
        )

    def for_now(self, block: Block, *, exact: bool) -> Slot:
        """Return a slot that is not a block's home but can hold it now.

        Args:
            block: Is needed now.
            exact: Whether memory is short: a slot without any, that would get more than
                the block needs, will not do.
        """
        idle = [
            slot
            for slot in self.slots
            if slot.nbytes >= block.nbytes
            and not (exact and slot.wastes(block.slot_nbytes))
            and (
                slot.occupant is None or not (slot.occupant.uses or slot.occupant.stays)
            )
        ]
        if idle:
            return min(idle, key=lambda s: (s.occupant is not None, s.nbytes))
        self._free_idle()
        slot = Slot(len(self.slots), block.slot_nbytes)
        self.slots.append(slot)
        return slot

    def lay_out(self, kept: list[Slot | None], sizes: Sequence[int]) -> list[Slot]:
        """Have slots of the given sizes from now on, and return them.

        Args:
            kept: For each place a slot that has the size and is kept there, or None.
            sizes: In bytes. Empty slots are used again where they fit; the rest is
                freed.
        """
        places = set(kept)
        spare = [slot for slot in self.slots if slot not in places]
        slots: list[Slot] = []
        for size, slot in zip(sizes, kept, strict=True):
            fitting = slot or next((s for s in spare if s.nbytes == size), None)
            if fitting is not None and slot is None:
                spare.remove(fitting)
            slots.append(fitting or Slot(len(slots), size))
        for slot in spare:
            self.free(slot)
        self.slots = slots
        for number, slot in enumerate(slots):
            slot.index = number
        return slots

    def abandon(self, slot: Slot) -> None:
        """Leave a slot's memory to whoever else holds it; the slot gets new memory."""
        lease = slot.lease
        if lease is None:
            return
        self._counters.abandoned_slots += 1
        self.left.add(slot.address)
        self._engine.disown(lease.buffer, slot)
        self._part(slot, lease.abandon)

    def free(self, slot: Slot) -> None:
        """Give an empty slot's memory back to the arena, or to who still holds it."""
        lease = slot.lease
        if lease is None:
            return
        if storage_use_count(slot.storage) > slot.alone:
            self.abandon(slot)
            return
        self._engine.retire(slot)
        self._part(slot, lease.release)

    def trim(self) -> None:
        """Give back what freed slots have left in the arena."""
        self._arena.trim()

    def _part(self, slot: Slot, end: Callable[[], None]) -> None:
        """Take a slot's memory from it, then end the memory's lease."""
        try:
            self._forget(slot)
        except BaseException:  # an interrupt: a slot must not keep half of it
            self._forget(slot)
            raise
        finally:
            end()

    def _forget(self, slot: Slot) -> None:
        slot.lease = None
        for block in self._blocks:
            if block.views_in is slot:
                block.set_views(None)
        slot.views.clear()
        self._strip(slot)
