"""Executes a plan: at each use wait for the block, then keep the link busy.

`before(block)` makes the block's tensors usable on the current stream and runs ahead:
it queues the loads of the coming uses, in order, as long as their slots are free of
anything that is needed sooner. `after(block)` ends the use. Each use costs O(1): the
look-ahead moves forward only, and what it has passed is counted on the block itself.

Not thread-safe: callers hold the runtime's lock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from stagehand.core.layout import copy_values
from stagehand.core.limits import Limits, effective
from stagehand.core.states import ARRIVED, DROPPED, BlockState
from stagehand.core.transfer import Priority, Slot, TransferEngine
from stagehand.errors import (
    OrphanedParameterError,
    StagehandInternalError,
    StagehandOOMError,
)
from stagehand.residency.loader import Loader, sample
from stagehand.torch_private import storage_use_count, use_count_of
from stagehand.units import format_at_least, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from stagehand.core.arena import Arena, Lease
    from stagehand.core.device import Device, Stream
    from stagehand.core.stopwatch import Stopwatch
    from stagehand.core.telemetry import Counters
    from stagehand.residency.blocks import Block
    from stagehand.residency.order import Order
    from stagehand.residency.plan import Plan

__all__ = ["Neighbours", "Scheduler"]

# On the hot path an attribute of an enumeration takes as long as a call, and so a block
# that is at the beginning of a path, whose steps are checked, is put at its end.
_HOST_STAGED, _PREFETCHING = BlockState.HOST_STAGED, BlockState.PREFETCHING
_GPU_READY, _SPECULATIVE = BlockState.GPU_READY, Priority.SPECULATIVE


class Neighbours(Protocol):
    """Whoever else holds memory of the device."""

    def make_room(self, nbytes: int) -> bool:
        """Let others give up so many bytes; return whether they are free."""

    def are_busy(self) -> bool:
        """Whether another thread runs any of them."""

    def name_them(self) -> str:
        """Say who holds what, for an error."""


def _nothing() -> None:
    """Wait for nobody."""


class Scheduler:
    """Brings blocks to the device in the order in which they are used.

    Args:
        device: Where the model computes.
        engine: The lanes.
        loader: Fills slots.
        arena: Device memory, for the slots.
        blocks: All blocks, by index.
        order: The expected uses of the streamed ones.
        counters: Where evictions and the like are counted.
    """

    def __init__(
        self,
        *,
        device: Device,
        engine: TransferEngine,
        loader: Loader,
        arena: Arena,
        blocks: Sequence[Block],
        order: Order,
        counters: Counters,
    ) -> None:
        self.order = order
        self.stopwatch: Stopwatch | None = None
        """Set while uses and copies are to be timed."""
        self._device = device
        self._engine = engine
        self._loader = loader
        self._arena = arena
        self.blocks = list(blocks)
        self._counters = counters
        self._slots: list[Slot] = []
        self._lookahead = 0
        self._planned_lookahead = 0
        self._limits = Limits()
        self._front = -1  # the last position that the look-ahead has passed
        self._staged_front = -1  # the last position for which staging was requested
        self._ahead: deque[Block] = deque()  # streamed blocks between cursor and front
        self._pass = 0
        self._line: list[Block] = []  # the expected uses of this pass and the next
        self._length = 0  # of this pass, as far as it is expected
        self._line_version = -1
        self._latest: Block | None = None
        self._fetched: Block | None = None
        self._changes_follow = False
        self._backwards = 0  # backward passes that are over
        self._fixed: Collection[int] = ()
        self.await_steps: Callable[[], None] = _nothing
        """Waits for who changes weights on the host in the middle of a pass."""
        self.strained = False
        """Whether memory was taken from the plan's slots: follow it again."""
        self.neighbours: Neighbours | None = None
        """Others on the device, who may make room for a block that is needed now."""
        self._gave_way = False  # blocks that stay have left, for others
        self._hands_over = False  # the next pass on the device is not expected here
        self.slots_by_memory: dict[int, Slot] = {}
        """Slots that have memory, by its address."""

    def __repr__(self) -> str:
        return f"Scheduler({len(self._slots)} slots, {len(self._ahead)} blocks ahead)"

    # Uses

    def before(self, block: Block) -> None:
        """Make a block's tensors usable on the current stream until `after(block)`.

        Raises:
            StagehandOOMError: If blocks in use leave no slot for it.
            CheckpointError: If its file cannot be read.
        """
        if self._fetched is not None and self._fetched is not block:
            self.release_fetched()
        if block.uses:
            block.uses += 1
            return
        stream = self._device.current_stream()
        if block is self._latest and block.bound:
            self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
            block.uses = 1
            return
        order, ahead = self.order, self._ahead
        expected = order.use(block.index)
        if not expected:
            self._forget_ahead()
        elif ahead and ahead[0] is block:
            ahead.popleft()
            block.awaited -= 1
        elif self._front < order.cursor:
            self._front = order.cursor
        watch = self.stopwatch
        if watch is not None:
            arrived = watch.mark(stream)
        if block.bound:
            self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
        else:
            self._bring(block, stream)
        if watch is not None:
            watch.used(block.index, arrived, watch.mark(stream))
        if block.stays:
            self._counters.resident_uses += 1
        self._latest = block
        block.uses = 1
        if expected or not order.lost:
            self._run_ahead(stream)

    def after(self, block: Block) -> None:
        """End a use that `before` began."""
        block.uses -= 1  # that the slot was read is marked when it is given up

    def join(self, block: Block) -> None:
        """Use a block where it is bound, outside of the order, until `after(block)`."""
        if not block.uses:
            stream = self._device.current_stream()
            self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
        block.uses += 1

    def fetch(self, block: Block) -> None:
        """Make a block usable for backward, until another one's use or the next
        pass."""
        if self._fetched is not block:
            self.before(block)
            self._fetched = block

    def is_at_hand(self, block: Block) -> bool:
        """Whether a block is here without another use; then this stream may read it.

        Autograd runs each node on the stream of its forward: it need not be the one
        that fetched the block.
        """
        if block is not self._fetched and block.index not in self._fixed:
            return False
        if not block.bound:
            return False
        stream = self._device.current_stream()
        self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
        return True

    def release_fetched(self) -> None:
        """End the use that `fetch` began."""
        block, self._fetched = self._fetched, None
        if block is not None:
            self.after(block)

    def _bring(self, block: Block, stream: Stream) -> None:
        if block.trains and not self._changes_follow:
            # Each time autograd takes the tensors for new ones: it was told of another
            # device in between.
            if block.brought_in == self._backwards:
                block.repeats = True
            block.brought_in = self._backwards
        slot = block.slot
        if slot is None:
            slot = self._clear_slot(block)
            self._load(block, slot, Priority.CRITICAL)
        if self._loader.fills:
            self._finish(block, slot)
        versions = [t._version for t in block.tracked]
        if versions != block.versions:
            block.versions = versions
            self._reload(block, slot)
        elif block.filled_in != self._pass and self._is_old(block):
            self._reload(block, slot)
        self._engine.await_filled(slot, stream)
        if block.state is _PREFETCHING:
            block.state = ARRIVED[-1]
        block.point_to_device()

    def _finish(self, block: Block, slot: Slot) -> None:
        try:
            self._loader.finish(block)
        except BaseException:
            self._loader.forget(block)  # after an interrupt a thread may still write
            self._vacate(block, slot)
            raise

    def _is_old(self, block: Block) -> bool:
        """Whether the host's tensors were edited behind their version counters.

        Asked of blocks that were filled in an earlier pass: users edit between passes.
        """
        if block.is_replaced():
            self.take_in(block)
            return True
        seal, block.seal = block.seal, None
        return seal is not None and not bool((seal == sample(block)).all())

    def _reload(self, block: Block, slot: Slot) -> None:
        self._vacate(block, slot)
        self._load(block, slot, Priority.CRITICAL)
        self._finish(block, slot)

    # Loading and evicting

    def _load(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """Begin to fill an empty slot with a block; False if it cannot be now."""
        if block.stepping:
            if priority >= _SPECULATIVE:
                return False
            self.await_steps()
        lacks = block.views_in is not slot or slot.lease is None
        if lacks and not self._settle_in(block, slot, priority):
            return False
        staged = block.state is _HOST_STAGED
        if not staged and block.filled_in != self._pass and block.is_replaced():
            self.take_in(block)
        slot.occupant = block
        try:
            started = self._loader.start(block, slot, priority)
        except BaseException:
            slot.occupant = None
            raise
        if not started:
            slot.occupant = None
            return False
        block.slot = slot
        if not staged:  # else the bytes may have been read in an earlier pass
            block.filled_in = self._pass
        return True

    def _settle_in(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """Give the slot memory and the block its views of it, where it has none yet.

        Returns:
            False if there is no memory for a speculative load.
        """
        if slot.lease is None:
            lease = self._arena.acquire_nowait(slot.nbytes, block.name)
            if lease is None:
                if priority >= _SPECULATIVE:
                    return False
                lease = self._lease(slot.nbytes, block)
            slot.lease = lease
            slot.storage = lease.buffer.untyped_storage()
            slot.storage_key = slot.storage._cdata
            slot.alone = storage_use_count(slot.storage)
            self.slots_by_memory[slot.storage.data_ptr()] = slot
            self._engine.adopt(slot)
        if block.views_in is slot:
            return True
        # Not counted again later: a reader thread may be filling the slot then.
        before = storage_use_count(slot.storage)
        block.set_views(slot)
        slot.alone += storage_use_count(slot.storage) - before
        return True

    def _lease(self, nbytes: int, block: Block) -> Lease:
        """Return memory that is not there without somebody's giving some up."""
        lease = None
        if self.neighbours is not None and self.neighbours.make_room(nbytes):
            lease = self._arena.acquire_nowait(nbytes, block.name)
        if lease is None:
            self._free_idle()
            lease = self._arena.acquire_nowait(nbytes, block.name)
        if lease is not None:
            return lease
        account, others = self._arena.account, ""
        if self.neighbours is not None:
            others = self.neighbours.name_them()
        used = [s.occupant.name for s in self._slots if s.occupant and s.occupant.uses]
        raise StagehandOOMError(
            f"block {block.name!r} needs {format_bytes(nbytes)} of device memory while"
            f" {', '.join(map(repr, used[:5])) or 'what stays'} is in use, and of"
            f" {format_bytes(account.limit_bytes)} only"
            f" {format_bytes(account.free_bytes)} are free{others}; raise the budget to"
            f" at least {format_at_least(account.held_bytes + nbytes)}",
            needed_bytes=account.held_bytes + nbytes,
            limit_bytes=account.limit_bytes,
        )

    def _clear_slot(self, block: Block) -> Slot:
        """Return an empty slot for a block that is needed now."""
        slot = block.home
        if slot is None or (slot.occupant is not None and slot.occupant.uses):
            slot = self._another_slot(block)
        other = slot.occupant
        if other is not None:
            if other.awaited:
                self._forget_ahead()
            self.evict(other)
        return slot

    def _another_slot(self, block: Block) -> Slot:
        free = [
            slot
            for slot in self._slots
            if slot.nbytes >= block.nbytes
            and (
                slot.occupant is None or not (slot.occupant.uses or slot.occupant.stays)
            )
        ]
        if free:
            return min(free, key=lambda s: (s.occupant is not None, s.nbytes))
        self._free_idle()
        slot = Slot(len(self._slots), block.nbytes)
        self._slots.append(slot)
        return slot

    def _free_idle(self) -> None:
        """Give back the memory of all slots that nobody uses, against the plan.

        Until the plan is followed again nothing is loaded ahead: there may be no room.
        """
        self._forget_ahead()
        self._lookahead = 0
        self.strained = True
        for slot in self._slots:
            block = slot.occupant
            if block is None:
                self.free_slot(slot)
            elif not block.uses and block.index not in self._fixed:
                self.evict(block, verify=block.stays)
                self.free_slot(slot)

    def evict(
        self, block: Block, *, verify: bool = False, stream: Stream | None = None
    ) -> None:
        """Give up a block's slot, bringing its bytes home first if they changed.

        Args:
            block: On the device and not in use.
            verify: Compare the bytes too: while a tensor points into a slot outside of
                any pass, an edit through `.data` changes it behind its version counter.
            stream: The current stream, for who knows it.
        """
        slot = block.slot
        if slot is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        if block.bound:
            if [t.data_ptr() for t in block.tensors] != block.addresses:
                self.take_in(block)
            versions = [t._version for t in block.tracked]
            changed = versions != block.versions
            block.versions = versions
            # Whoever read or edited its tensors used the slot.
            self._engine.release(slot, stream or self._device.current_stream())
            if changed or verify:
                self._save(block, changed=changed)
        else:
            if block.filled_in != self._pass and block.is_replaced():
                self.take_in(block)
            self._loader.forget(block)
        self._vacate(block, slot)
        self._counters.evictions += 1
        if use_count_of(slot.storage_key) > slot.alone:
            self._abandon(slot)

    def _save(self, block: Block, *, changed: bool) -> None:
        """Bring a block's bytes home; if that fails, they are still here."""
        block.to(BlockState.EVICTING)
        try:
            self._loader.save(block, only_if_different=not changed)
        except BaseException:
            block.state = _GPU_READY
            if changed:
                block.versions = [-1]
            raise

    def _vacate(self, block: Block, slot: Slot) -> None:
        """Let a block forget its slot; nothing is copied."""
        if block.bound:
            block.point_to_host()
        elif block.state is _PREFETCHING:
            block.state = ARRIVED[-1]  # the next copy into the slot waits its turn
        if block.state is _GPU_READY:
            block.state = DROPPED[-1]
        else:
            block.to(BlockState.UNLOADED)
        block.seal = block.slot = slot.occupant = None
        if self._latest is block:
            self._latest = None

    def take_in(self, block: Block) -> None:
        """Copy in what somebody assigned to a tensor's `.data`, and point back.

        While the block is away the truth gets the values, while it is here its slot.
        """
        if block.store is None or not block.is_replaced():
            return
        refused: list[str] = []
        for (tensor, place), address in zip(
            block.pairs(), block.addresses, strict=True
        ):
            given = tensor.data
            if given.data_ptr() == address:
                continue
            tensor.data = place
            if given.shape != place.shape or given.dtype != place.dtype:
                refused.append(
                    f"by {given.dtype} {list(given.shape)}, expected {place.dtype}"
                    f" {list(place.shape)}"
                )
            else:
                copy_values(place, given)
                if not given.is_cpu:  # may have been made on another stream
                    self._engine.disown(given)
        block.mark_changed()
        if refused:
            raise OrphanedParameterError(
                f"a tensor of block {block.name!r} was replaced {refused[0]}, and has"
                " its old values again; call runtime.shutdown() before changing a"
                " parameter's shape or element type, then stagehand.layer() again"
            )

    def _abandon(self, slot: Slot) -> None:
        """Leave a slot's memory to whoever else holds it; the slot gets new memory."""
        lease = slot.lease
        if lease is None:
            return
        self._counters.abandoned_slots += 1
        self._engine.retire(slot)
        self._engine.disown(lease.buffer)
        self._forget_memory(slot)
        lease.abandon()

    def _forget_memory(self, slot: Slot) -> None:
        slot.lease = None
        del self.slots_by_memory[slot.storage.data_ptr()]
        for block in self.blocks:
            if block.views_in is slot:
                block.set_views(None)
        slot.views.clear()
        slot.storage = None

    def free_slot(self, slot: Slot) -> None:
        """Give an empty slot's memory back to the arena, or to who still holds it."""
        lease = slot.lease
        if lease is None:
            return
        held = storage_use_count(slot.storage) > slot.alone
        self._engine.retire(slot)
        if held:
            self._counters.abandoned_slots += 1
            self._engine.disown(lease.buffer)
        self._forget_memory(slot)
        if held:
            lease.abandon()
        else:
            lease.release()

    # Looking ahead

    def look_ahead(self) -> None:
        """Queue the loads that have become possible since the latest use began."""
        self._run_ahead(self._device.current_stream())

    def _run_ahead(self, stream: Stream) -> None:
        ahead, line = self._ahead, self._line
        room = self._lookahead - len(ahead)
        position = self._front + 1
        last = self.order.cursor + self._length + 1
        if last > len(line):
            last = len(line)
        while room > 0 and position < last:
            block = line[position]
            if block.slot is None:
                slot = block.home
                if self._changes_follow and block.trains and position >= self._length:
                    break  # it is about to change
                if slot is not None:
                    other = slot.occupant
                    if other is not None:
                        if other.uses or other.awaited:
                            break
                        self.evict(other, stream=stream)
                    if not self._load(block, slot, _SPECULATIVE):
                        break
                elif not block.hosted:  # hosted ones are brought when they are needed
                    break
            if not block.stays:
                block.awaited += 1
                ahead.append(block)
                room -= 1
            position += 1
        self._front = position - 1
        if self._loader.stages:
            self._stage_ahead(position, last)
            self._clear_ahead(position, min(last, position + room), stream)

    def _clear_ahead(self, position: int, last: int, stream: Stream) -> None:
        """Give up slots for loads that are not staged yet.

        A load waits for all that was computed before its slot was given up. If that is
        done when its bytes are there, compute has gone on, and both take turns.
        """
        passed: list[Block] = []
        for block in self._line[position:last]:
            slot = block.home
            other = None if slot is None else slot.occupant
            if block.slot is None and other is not None:
                if other.uses or other.awaited or other in passed:
                    return
                if self._changes_follow and block.trains:
                    return
                self.evict(other, stream=stream)
            passed.append(block)

    def _stage_ahead(self, position: int, last: int) -> None:
        """Let the disk run further ahead than the link, as far as there are slabs."""
        position = max(position, self._staged_front + 1)
        while position < last:
            block = self._line[position]
            if self._changes_follow and block.trains and position >= self._length:
                return
            if block.slot is None and block.needs_staging and not block.hosted:
                if block.stepping:
                    return
                self._loader.request(block)
                if block.state is not BlockState.HOST_STAGED:
                    return
            self._staged_front = position
            position += 1

    def _draw_line(self) -> None:
        """Take over what the order expects, if that has changed."""
        if self._line_version != self.order.version:
            self._line_version = self.order.version
            self._line = [self.blocks[index] for index in self.order.line]
            self._length = self.order.length
            if self._hands_over:
                del self._line[self._length :]

    def _forget_ahead(self) -> None:
        """The order was wrong: nothing that was loaded ahead is awaited any more."""
        while self._ahead:
            self._ahead.popleft().awaited -= 1
        self._draw_line()
        self._front = self.order.cursor
        self._staged_front = self.order.cursor

    # Passes

    def begin_pass(
        self, *, changes_follow: bool = False, hands_over: bool = False
    ) -> None:
        """The model is entered from outside, or autograd begins to go back through it.

        Args:
            changes_follow: Whether weights may change after the pass, where gradients
                are taken for them: nothing of these is loaded ahead for the next one.
            hands_over: Whether another model is expected to run next on the device:
                nothing at all is loaded ahead for this one's next pass.
        """
        self.release_fetched()
        self._changes_follow = changes_follow
        self._set_end(hands_over=hands_over)
        self._latest = None  # each pass has the same uses, whatever came before it
        length = self.order.length if self.order.cursor >= 0 else 0
        if self.order.turn() and not self.order.lost:
            self._front = max(self._front - length, -1)
            self._staged_front = max(self._staged_front - length, -1)
        else:
            self._forget_ahead()
        self._draw_line()
        self._pass += 1
        for slot in self._slots:
            block = slot.occupant
            if block is None:
                continue
            if block.bound:
                if block.is_replaced():
                    self.take_in(block)
            elif block.trains and block.is_changed():
                self._forget_stale(block, slot)
        for index in self._fixed:  # nobody tells of their uses
            block = self.blocks[index]
            if block.trains and not block.bound:
                self._bring(block, self._device.current_stream())

    def _forget_stale(self, block: Block, slot: Slot) -> None:
        """An optimizer has changed a block whose copy is still here."""
        if block.awaited:
            self._forget_ahead()
        self._vacate(block, slot)

    def end_pass(self) -> None:
        """The model is left: streamed tensors point to the host again.

        So whoever edits one edits the truth; what is still on the device is compared
        with a sample before it is used again.
        """
        stream = self._device.current_stream()
        # Before others may take its memory, what stays is better found on the host.
        binds, fixed = not self._hands_over, self._fixed
        if self.stopwatch is not None:
            self.stopwatch.end_pass(stream)
        if self.order.cursor == self.order.length - 1 and not self.order.lost:
            # The last use has let go of its slot, and a pause may come.
            self._run_ahead(stream)
        if self._changes_follow:
            self._await_loads()
        for slot in self._slots:
            block = slot.occupant
            if block is None:
                continue
            if block.bound:  # read until now, also where no site tells of it
                self._engine.release(slot, stream)
            if block.uses:
                continue
            if block.stays and not block.trains and (binds or block.index in fixed):
                continue  # an edit between passes reaches it where it is
            if block.bound:
                if block.is_changed() or block.is_replaced():
                    if block.awaited:
                        self._forget_ahead()
                    self.evict(block)
                    continue
                block.point_to_host()
            if block.seal is None:
                block.seal = sample(block)
        self._seal_staged()
        self._pass += 1  # uses outside of passes must notice edits made since, too

    def _seal_staged(self) -> None:
        for block in self._loader.staged():
            if block.seal is None:
                block.seal = sample(block)

    def end_backward(self) -> None:
        """Say that what was brought until now, for a backward pass, has had one."""
        self._backwards += 1

    def _await_loads(self) -> None:
        """Let the host bytes be that copies still read and that are about to change.

        None, as a rule: an earlier pass expected uses that this one did not have.
        """
        for slot in self._slots:
            block = slot.occupant
            if block is not None and block.trains and block.state is _PREFETCHING:
                self._engine.h2d.stream.synchronize()
                return

    def reset_uses(self) -> None:
        """Forget uses whose end was never told: an interrupt skipped the hooks."""
        self._fetched = None
        for slot in self._slots:
            block = slot.occupant
            if block is not None and block.uses:
                block.uses = 0
                self._engine.release(slot, self._device.current_stream())

    # Sharing the device

    def _set_end(self, *, hands_over: bool) -> None:
        """Say whether the pass that is expected next may be loaded ahead for."""
        if hands_over != self._hands_over:
            self._hands_over = hands_over
            self._line_version = -1
            self._draw_line()

    def give_up(self, keep_bytes: int, *, all_of_it: bool) -> None:
        """Free memory until no more than so many bytes are held.

        The ring goes first, then what stays and is used late in a pass, for its load
        hides best; what has to be there all the time goes last. All of it comes back by
        itself, in the next pass. What is in use stays.

        Args:
            keep_bytes: Nothing that fits them has to leave.
            all_of_it: Whether what has to be there all the time may leave, too: not in
                the middle of a pass.
        """
        account = self._arena.account
        if account.held_bytes > keep_bytes:
            self._arena.trim()
        if account.held_bytes <= keep_bytes:
            return
        self._forget_ahead()
        for slot in sorted(self._slots, key=self._harm):
            block = slot.occupant
            if block is not None:
                if block.uses or not (all_of_it or block.index not in self._fixed):
                    continue
                self._gave_way = self._gave_way or block.stays
                self.evict(block, verify=block.stays)
            self.free_slot(slot)
            self._arena.trim()
            if account.held_bytes <= keep_bytes:
                return

    def _harm(self, slot: Slot) -> tuple[int, int]:
        """How much is lost when a slot is freed; the least of all slots goes first."""
        block = slot.occupant
        if block is None or not block.stays:
            return 0, 0
        if block.index in self._fixed:
            return 2, 0
        return 1, -self.order.place(block.index)

    def recall(self) -> bool:
        """Begin to bring back what gave way, in the order of use.

        Where there is a ring, the look-ahead does so among its own loads.

        Returns:
            Whether anything had given way.
        """
        if not self._gave_way:
            return False
        fixed = (self.blocks[index] for index in self._fixed)
        self._settle(block for block in fixed if block.store and block.tensors)
        self._gave_way = False
        if self._lookahead or self._allowed() < self._planned_lookahead:
            return True
        for block in self._line[: self._length]:
            if block.slot is None and block.stays and block.home is not None:
                urgent = block.image is not None and not self._loader.fills
                priority = Priority.REQUIRED if urgent else _SPECULATIVE
                if block.home.occupant or not self._load(block, block.home, priority):
                    break
        return True

    def warm(self) -> bool:
        """Between passes: load what the next one begins with, as its end would have.

        Returns:
            Whether anything had given way.
        """
        self._set_end(hands_over=False)
        came_back = self.recall()
        if self.order.cursor == self.order.length - 1 and not self.order.lost:
            self._run_ahead(self._device.current_stream())
        for slot in self._slots:
            block = slot.occupant
            if block is not None and not block.bound and block.seal is None:
                block.seal = sample(block)
        self._seal_staged()
        return came_back

    # Plans

    def follow(self, plan: Plan, *, fixed: Collection[int] = ()) -> None:
        """Lay out the slots anew; blocks that keep their place stay where they are.

        A block that shall no longer stay leaves even so: it may have been edited there.
        Nothing may be in use.

        Args:
            plan: Which slots there are, and whose.
            fixed: Blocks that are read without a use: they never leave their slots.
        """
        self._forget_ahead()
        self._fixed = fixed
        self.strained = False
        old = {slot.occupant.index: slot for slot in self._slots if slot.occupant}
        spare = [slot for slot in self._slots if slot.occupant is None]
        slots: list[Slot | None] = [None] * len(plan.slots)
        for index, slot in old.items():
            home = plan.home[index]
            leaves = self.blocks[index].stays and index not in plan.resident
            if leaves or slots[home] is not None:
                continue
            if slot.nbytes == plan.slots[home]:
                slots[home] = slot
        for index, slot in old.items():
            if slots[plan.home[index]] is not slot:
                self._move_out(self.blocks[index], slot)
                spare.append(slot)
        self._fill(slots, plan.slots, spare)
        for slot in spare:
            self.free_slot(slot)
        self._slots = [slot for slot in slots if slot is not None]
        for number, slot in enumerate(self._slots):
            slot.index = number
        for block in self.blocks:
            index = block.index
            block.home = None if block.hosted else self._slots[plan.home[index]]
            block.stays = index in plan.resident and not block.hosted
        self._planned_lookahead = plan.lookahead
        self._lookahead = self._allowed()

    def obey(self, limits: Limits) -> None:
        """Look ahead no further than limits allow, from the next use on.

        May be called by any thread: it sets a number.
        """
        self._limits = limits
        if not self.strained:
            self._lookahead = self._allowed()

    def _allowed(self) -> int:
        limits = self._limits
        if limits.suppress_speculative:
            return 0
        return effective(self._planned_lookahead, limits.lookahead_blocks)

    @property
    def lookahead(self) -> int:
        """How many streamed blocks are loaded ahead at most now."""
        return self._lookahead

    def _move_out(self, block: Block, slot: Slot) -> None:
        self.evict(block, verify=block.stays)

    def _fill(
        self, slots: list[Slot | None], sizes: Sequence[int], spare: list[Slot]
    ) -> None:
        for number, size in enumerate(sizes):
            if slots[number] is not None:
                continue
            fitting = next((s for s in spare if s.nbytes == size), None)
            if fitting is not None:
                spare.remove(fitting)
            slots[number] = fitting or Slot(number, size)

    def staying(self) -> list[Block]:
        """Return the blocks that the plan keeps on the device for good."""
        return [block for block in self.blocks if block.stays]

    def settle(self, blocks: Iterable[Block]) -> None:
        """Bring the given blocks to the device and leave them bound there.

        While models in other threads leave no room for them, the next pass does so.

        Raises:
            StagehandOOMError: If there is no room, whoever is there.
        """
        try:
            self._settle(blocks)
        except StagehandOOMError:
            if self.neighbours is None or not self.neighbours.are_busy():
                raise
            self._gave_way = True

    def _settle(self, blocks: Iterable[Block]) -> None:
        stream = self._device.current_stream()
        for block in blocks:
            if not block.bound:
                self._bring(block, stream)

    def drop(self) -> None:
        """Free all memory; what the slots hold is lost."""
        for slot in self._slots:
            block = slot.occupant
            if block is not None:
                if block.bound:
                    self._engine.release(slot, self._device.current_stream())
                block.point_to_host()
                block.slot = None
                slot.occupant = None
            self.free_slot(slot)
        self._slots = []

    def send_home(self, block: Block) -> None:
        """Let a block's tensors point to the host now, in the middle of a pass."""
        if block.bound and not block.uses:
            self.evict(block)

    @property
    def fetched(self) -> Block | None:
        """The block that `fetch` holds."""
        return self._fetched

    @property
    def in_use(self) -> list[str]:
        """Names of the blocks that are in use."""
        return [block.name for block in self.blocks if block.uses]

    def park(self) -> None:
        """Bring everything home: all tensors point to the host, all memory is free."""
        self.release_fetched()
        self._forget_ahead()
        for slot in self._slots:
            if slot.occupant is not None:
                self.evict(slot.occupant, verify=slot.occupant.stays)
            self.free_slot(slot)
        for block in self.blocks:
            self._loader.forget(block)
        self._engine.drain()
