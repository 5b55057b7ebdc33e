"""Executes a plan: at each use wait for the block, then keep the link busy.

`before(block)` makes the block's tensors usable on the current stream and runs ahead;
`after(block)` ends the use. Passes, plans and other models on the device are told of
here, too. What it takes is done by three parts: slots and their memory, the mover of
single blocks, and the look-ahead.

Not thread-safe: callers hold the runtime's lock.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from stagehand.core.transfer import Priority, Slot, TransferEngine
from stagehand.errors import CheckpointError, ConfigError, StagehandOOMError
from stagehand.residency.blocks import any_replaced
from stagehand.residency.loader import Loader, sample, store_of
from stagehand.residency.lookahead import LookAhead
from stagehand.residency.mover import Mover
from stagehand.residency.slots import Neighbours, SlotMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from stagehand.core.arena import Arena
    from stagehand.core.device import Device, Stream
    from stagehand.core.layout import Runs
    from stagehand.core.limits import Limits
    from stagehand.core.stopwatch import Stopwatch
    from stagehand.core.telemetry import Counters
    from stagehand.residency.blocks import Block
    from stagehand.residency.order import Order
    from stagehand.residency.plan import Plan

__all__ = ["Scheduler"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _whole(
    method: Callable[Concatenate[Scheduler, _P], _R],
) -> Callable[Concatenate[Scheduler, _P], _R]:
    """Mend the books if an interrupt comes inside of a method that runs outside of
    passes. Inside of one, the end of the pass does so (`recover`).
    """

    @wraps(method)
    def called(self: Scheduler, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._mend()
            raise

    return called


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
        self.blocks = list(blocks)
        self.stopwatch: Stopwatch | None = None
        """Set while uses and copies are to be timed."""
        self._device = device
        self._engine = engine
        self._loader = loader
        self._counters = counters
        self._memory = SlotMemory(engine, arena, self.blocks, counters, self._free_idle)
        self._mover = Mover(device, engine, loader, self._memory, counters, self.blocks)
        self._ahead = LookAhead(order, self.blocks, loader, self._mover)
        self.slots_by_memory = self._memory.by_address
        """Slots that have memory, by its address."""
        self.left_memory = self._memory.left
        """Addresses of slots' memory that this pass has left to who holds it."""
        self._latest: Block | None = None
        self.fetched: Block | None = None
        """The block that `fetch` holds."""
        self.fixed: Collection[int] = ()
        """Blocks that are read without a use, by index."""
        self._gave_way = False  # blocks that stay have left, for other models
        self._parked = False  # all was brought home: it comes with the next pass
        self._shares = False  # other models may take its memory between passes
        # Bound since before this pass, so that users may have edited them in place.
        self._lingered: Collection[Block] = ()
        self._tell_of_leave: Callable[[], None] = _nobody

    def __repr__(self) -> str:
        slots, ahead = len(self._memory.slots), len(self._ahead)
        return f"Scheduler({slots} slots, {ahead} blocks ahead)"

    # Uses

    def before(self, block: Block) -> None:
        """Make a block's tensors usable on the current stream until `after(block)`.

        Raises:
            StagehandOOMError: If blocks in use leave no slot for it.
            CheckpointError: If its file cannot be read.
        """
        fetched = self.fetched
        if fetched is not None and fetched is not block:
            self.fetched = None
            fetched.uses -= 1
        stream = self._device.current_stream()
        if block.uses:
            if block.runs:
                self._mover.complete(block)
            # Its other uses can be those of other streams.
            self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
            block.uses += 1
            return
        if block is self._latest and block.bound:
            self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
            block.uses = 1
            return
        expected = self._ahead.use(block)
        watch = self.stopwatch
        if watch is not None:
            arrived = watch.mark(stream)
        if block.bound:
            self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
            if block.edited:
                block.mark_changed()  # a copy that is on its way home may be too early
        elif block.slot is None or block.trains:
            self._bring(block, stream)
        else:  # as `_bring` does, a call less
            self._mover.bind(block, block.slot, stream)
        if watch is not None:
            watch.used(block.index, arrived, watch.mark(stream))
        if block.stays:
            self._counters.resident_uses += 1
        self._latest = block
        block.uses = 1
        if expected or not self.order.lost:
            self._ahead.run(stream)

    def before_rows(self, block: Block, runs: Runs) -> None:
        """Like `before`, but bring only some rows of the block's tensors.

        It brings the whole block where that is here already, or on its way, or to stay,
        or where its store cannot give single rows, or where a call may write to others.

        Args:
            block: Whose tensors have rows.
            runs: Which rows, as ranges.
        """
        comes_whole = block.stays or block.edited or block.slot is not None
        if not comes_whole and self._loader.takes_rows(block):
            parts = block.layout.parts_of(runs)
            block.runs_nbytes = sum(end - first for first, end in parts)
            block.runs = runs
        try:
            self.before(block)
        except BaseException:
            if block.slot is None:  # else `drop_rows` is to come, or `recover`
                block.runs = ()
            raise

    @property
    def picks(self) -> bool:
        """Whether calls that need some rows of a block only get no others now."""
        return self._ahead.picks

    @picks.setter
    def picks(self, picks: bool) -> None:
        self._ahead.picks = picks

    def complete_rows(self) -> None:
        """Bring the whole of blocks in use by rows: somebody reads all of them."""
        for block in self.blocks:
            if block.runs and block.uses:
                self._mover.complete(block)

    def drop_rows(self, block: Block) -> None:
        """Let a block leave that `before_rows` has brought, unless it is in use.

        Raises:
            ConfigError: If it was written to: its other rows are not here.
        """
        slot = block.slot
        if slot is None or block.uses:
            return
        written = block.bound and block.is_touched()
        self._mover.discard(block, slot)
        block.runs = ()
        if written:
            block.mark_changed()
            raise ConfigError(
                f"a call has changed weights of {block.name!r}, of which only the rows"
                " that it reads were on the device, and the change is lost: expected"
                " calls of experts to read their weights; leave the class out of"
                " experts= of stagehand.layer(), or change them between calls"
            )

    def before_all(self, blocks: Sequence[Block]) -> None:
        """Use several blocks that are not in use at once, or none of them.

        Where the plan's slots leave no room for all, they get slots of their own sizes.

        Raises:
            StagehandOOMError: If the budget has no room; it names one that has.
            CheckpointError: If a file cannot be read.
        """
        try:
            self._use_all(blocks)
        except StagehandOOMError:
            if len(blocks) == 1:
                raise
            self._free_idle()
            self._use_all(blocks)

    def _use_all(self, blocks: Sequence[Block]) -> None:
        try:
            for block in blocks:
                self.before(block)
        except BaseException as error:
            # What failed may be a look ahead from a use that has begun.
            missing = [block for block in blocks if not block.uses]
            for block in blocks:
                if block.uses:
                    self.after(block)
            if missing and len(blocks) > 1 and isinstance(error, StagehandOOMError):
                raise self._memory.refuse(blocks, error, missing) from None
            raise

    def after(self, block: Block) -> None:
        """End a use that `before` began."""
        block.uses -= 1  # that the slot was read is marked when it is given up

    def join(self, block: Block) -> None:
        """Use a bound block until `after(block)`; the order does not hear of it."""
        stream = self._device.current_stream()
        self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
        block.uses += 1

    def note_write(self, block: Block) -> None:
        """Let other streams that read a bound block wait for what this one, which has
        waited for all that came before, has just written beside its values."""
        stream = self._device.current_stream()
        self._engine.note_write(block.slot, stream)  # type: ignore[arg-type]

    def fetch(self, block: Block) -> None:
        """Make a block usable for backward, until another one's use or the next
        pass."""
        if self.fetched is not block:
            self.before(block)
            self.fetched = block

    def is_at_hand(self, block: Block) -> bool:
        """Whether a block is bound and cannot leave now; then this stream may read it.

        Autograd runs each node on the stream of its forward, which need not be the one
        that fetched the block.
        """
        if block is not self.fetched and block.index not in self.fixed:
            return False
        if not block.bound:
            return False
        stream = self._device.current_stream()
        self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
        return True

    def is_latest(self, block: Block) -> bool:
        """Whether a block lies where the latest use of all, its own, has left it, and
        that was on this stream: another one may come before what fills the slot."""
        if block is not self._latest or not block.bound:
            return False
        stream = self._device.current_stream()
        return self._engine.has_awaited(block.slot, stream)  # type: ignore[arg-type]

    def block_under(self, tensor: torch.Tensor) -> Block | None:
        """Return the block in whose slot a tensor lies."""
        try:
            slot = self.slots_by_memory.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:  # sparse, or batched: without memory of its own
            return None
        return None if slot is None else slot.occupant

    def versions_under(self, tensors: Iterable[torch.Tensor]) -> dict[Block, list[int]]:
        """Return the blocks in whose slots tensors lie, with their version counters."""
        blocks = {self.block_under(tensor) for tensor in tensors}
        return {b: b.read_versions() for b in blocks if b is not None and b.bound}

    def note_edits(self, before: Mapping[Block, list[int]]) -> None:
        """Note that a call has written to blocks, with counters that it had before.

        What is written through `.data` moves no counter of the weight's. One that had
        moved already says nothing of later passes: it may have been for once.
        """
        for block, versions in before.items():
            if block.bound and block.read_versions() == versions:
                block.edited = True
                block.mark_changed()

    @property
    def in_use(self) -> list[str]:
        """Names of the blocks that are in use."""
        found = (slot.occupant for slot in self._memory.slots)
        return [block.name for block in found if block is not None and block.uses]

    def release_fetched(self) -> None:
        """End the use that `fetch` began."""
        block, self.fetched = self.fetched, None
        if block is not None:
            self.after(block)

    @_whole
    def before_by_hand(self, block: Block) -> None:
        """Call `before` for a use that only `after_by_hand` ends, or `end_by_hand`."""
        uses = block.uses
        try:
            self.before(block)
            block.by_hand += 1
        except BaseException:  # it may have begun: what is loaded ahead comes after it
            block.uses = uses
            raise

    def after_by_hand(self, block: Block) -> None:
        """End what `before_by_hand` began."""
        # No call, such as `after`: no interrupt comes between.
        block.uses, block.by_hand = block.uses - 1, block.by_hand - 1

    @property
    def uses_by_hand(self) -> int:
        """How many uses by hand go on."""
        return sum(block.by_hand for block in self.blocks)

    def end_by_hand(self) -> None:
        """Let `recover` end uses by hand, too: the thread that began them is gone."""
        for block in self.blocks:
            block.by_hand = 0

    def recover(self) -> None:
        """End uses whose end was not told, and mend moves that were not finished.

        An interrupt skips hooks, and comes between any two lines. Uses by hand go on.
        """
        self.fetched = None
        self._mend()
        stream = self._device.current_stream()
        for slot in self._memory.slots:
            block = slot.occupant
            if block is not None and block.uses > block.by_hand:
                block.uses = block.by_hand
                self._engine.release(slot, stream)

    def _mend(self) -> None:
        """Put the books of all blocks and slots in order after an interrupt."""
        self._ahead.recover()
        for block in self.blocks:
            self._mover.recover(block)
        for slot in self._memory.slots:
            if slot.occupant is not None and slot.occupant.slot is not slot:
                slot.occupant = None
        self._loader.recover()

    def _bring(self, block: Block, stream: Stream) -> None:
        if block.trains and not self._ahead.changes_follow:
            block.bindings += 1
        slot = block.slot
        if slot is None:
            slot = self._clear_slot(block)
            self._mover.load(block, slot, Priority.CRITICAL)
        self._mover.bind(block, slot, stream)

    def _clear_slot(self, block: Block) -> Slot:
        """Return an empty slot for a block that is needed now."""
        slot, exact = block.home, self._ahead.stopped
        if (
            slot is None
            or (slot.occupant is not None and slot.occupant.uses)
            or (exact and slot.wastes(block.slot_nbytes))
        ):
            slot = self._memory.for_now(block, exact=exact)
        if slot.occupant is not None:
            self._evict(slot.occupant)
        return slot

    def _evict(self, block: Block, *, verify: bool = False) -> None:
        """See `Mover.evict`; the block may be one that was loaded ahead."""
        if block.awaited:
            self._ahead.forget()
        self._mover.evict(block, verify=verify)

    def _free_idle(self) -> None:
        """Give back the memory of all slots that nobody uses, against the plan.

        Until the plan is followed again nothing is loaded ahead: there may be no room.
        """
        self._ahead.stop()
        for slot in self._memory.slots:
            block = slot.occupant
            if block is None:
                self._memory.free(slot)
            elif not block.uses and block.index not in self.fixed:
                self._mover.evict(block, verify=block.stays)
                self._memory.free(slot)

    def look_ahead(self) -> None:
        """Queue the loads that have become possible since the latest use began."""
        self._ahead.run(self._device.current_stream())

    # Passes

    def expect_changes(self, *, follow: bool) -> None:
        """Say which kind of pass comes, before anything is loaded for it.

        Args:
            follow: Whether weights that train may change after the pass: none of them
                is loaded ahead for the next one. It is False for a forward that builds
                a graph: each trained block that comes to the device in it gets new
                nodes there (`Block.bindings`).
        """
        self._ahead.changes_follow = follow

    def begin_pass(self, *, goes_back: bool = False, hands_over: bool = False) -> None:
        """The model is entered from outside, or autograd begins to go back through it.

        Args:
            goes_back: Whether it is autograd.
            hands_over: Whether another model is expected to run next on the device:
                nothing at all is loaded ahead for this one's next pass.
        """
        self._parked = False
        self.release_fetched()
        self._ahead.end_at(hands_over=hands_over)
        self._latest = None  # so a pass notes the same uses, whatever came before it
        self._ahead.turn(goes_back=goes_back)
        self._mover.passed += 1
        self.left_memory.clear()
        blocks = [s.occupant for s in self._memory.slots if s.occupant is not None]
        bound = [block for block in blocks if block.bound]
        if any_replaced(bound):
            for block in bound:
                self._mover.take_in(block)
        for block in blocks:
            if block.trains and not block.bound and block.is_changed():
                self._mover.note_readers(block, block.slot)
                self._forget_stale(block, block.slot)
        self._shares = self._has_neighbours()
        if self._shares:
            self._lingered = {b for b in bound if not self._lingers(b)}
        stream = self._device.current_stream()
        for index in self.fixed:  # nobody tells of their uses
            block = self.blocks[index]
            if block.bound:
                self._engine.await_filled(block.slot, stream)  # type: ignore[arg-type]
            elif block.trains:
                self._bring(block, stream)

    def await_fixed(self) -> None:
        """Block the host until what is read without a use is here, for all streams."""
        for index in self.fixed:
            slot = self.blocks[index].slot
            if slot is not None:
                self._engine.finish_load(slot)

    def _forget_stale(self, block: Block, slot: Slot) -> None:
        """Drop the copy of a block that an optimizer has changed, or is about to."""
        if block.awaited:
            self._ahead.forget()
        self._mover.vacate(block, slot)
        self._mover.leave_to_holders(block, slot)

    def end_pass(self) -> None:
        """The model is left: streamed tensors point to the host again.

        So an edit between passes changes the truth, and a copy that is still on the
        device is compared with a sample before it is used again. What stays keeps
        pointing to the device, unless there are other models: these may take its memory
        in another thread, while users edit it. Then it points to the host as well. What
        did not yet, when this pass began, may have been edited on the device, and is
        brought home now.
        """
        if self._loader.pin_on is not None:
            self._loader.pin_on()  # what stays is bound now
        stream = self._device.current_stream()
        lingered, self._lingered = self._lingered, ()
        if self.stopwatch is not None:
            self.stopwatch.end_pass(stream)
        self._loader.note_reads()
        self._ahead.run_into_next_pass(stream)
        self._settle(stream, lingered)

    @_whole
    def rest(self) -> None:
        """Between passes, do what the end of a pass does: let tensors that train or
        stream point to the host, while their copies remain on the device."""
        shared, self._shares = self._shares, self._has_neighbours()
        self._loader.note_reads()
        lingered = () if shared else set(self.staying())
        self._settle(self._device.current_stream(), lingered)

    def _settle(self, stream: Stream, lingered: Collection[Block]) -> None:
        """Leave all blocks as they shall be between passes.

        Args:
            stream: The current stream.
            lingered: Blocks that may have been edited on the device, until now.
        """
        for slot in self._memory.slots:
            block = slot.occupant
            if block is None:
                continue
            if block.bound and self._lingers(block):
                if block.index in self.fixed:
                    # Any stream may have read it, without a use: all have come here.
                    self._engine.await_filled(slot, stream)
                continue  # an edit between passes reaches it where it is
            if block.bound:
                self._engine.release(slot, stream)
            if block in lingered:
                self._mover.take_home(block)
            if block.uses:
                continue
            if block.bound and not block.leave():
                self._evict(block)
                continue
            if block.graded:
                self._forget_stale(block, slot)
            else:
                _seal(block)
        for block in self._loader.staged():
            _seal(block)
        self._mover.passed += 1  # uses outside of passes must notice edits, too

    def _lingers(self, block: Block) -> bool:
        """Whether a block points to the device between passes, if it is there."""
        if not block.stays or block.trains:
            return False
        return not self._shares or block.index in self.fixed

    def await_steps_with(self, wait: Callable[[], None]) -> None:
        """Say how to wait for who changes weights on the host in mid-pass."""
        self._mover.await_steps = wait

    def leave_hosts_with(self, leave: Callable[[Block, Iterable[int]], None]) -> None:
        """Say who gives blocks other host memory; see `Masters.leave`."""
        self._mover.leave_hosts = leave

    def tell_of_leave(self, tell: Callable[[], None]) -> None:
        """Say whom to tell when blocks leave that modules read without a use."""
        self._tell_of_leave = tell

    def widen_by(self, widen: Callable[[int], None]) -> None:
        """Say what raises the limit where a pass cannot do without more bytes."""
        self._memory.widen = widen

    # Sharing the device

    def meet(self, neighbours: Neighbours) -> None:
        """Say which other models on the device may make room for this one's blocks."""
        self._memory.neighbours = neighbours

    def make_room(self, nbytes: int) -> bool:
        """Let other models give up so many bytes; return whether these are free now."""
        return self._memory.make_room(nbytes)

    def beside_passes(self, nbytes: int) -> AbstractContextManager[bool]:
        """See `Neighbours.beside_passes`."""
        return self._memory.beside_passes(nbytes)

    def budget_for(self, nbytes: int) -> int:
        """Return the smallest budget with which so many bytes can be had."""
        return self._memory.budget_for(nbytes)

    def _has_neighbours(self) -> bool:
        neighbours = self._memory.neighbours
        return neighbours is not None and neighbours.are_there()

    def others_are_busy(self) -> bool:
        """Whether another thread runs one of these models: there may be room later."""
        neighbours = self._memory.neighbours
        return neighbours is not None and neighbours.are_busy()

    @_whole
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
        account = self._memory.account
        if account.held_bytes > keep_bytes:
            self._memory.trim()
        if account.held_bytes <= keep_bytes:
            return
        self._ahead.forget()
        for slot in sorted(self._memory.slots, key=self._harm):
            block = slot.occupant
            if block is not None:
                if block.uses or not (all_of_it or block.index not in self.fixed):
                    continue
                self._gave_way = self._gave_way or block.stays
                self._mover.evict(block, verify=block.stays)
                if block.index in self.fixed:
                    self._tell_of_leave()
            self._memory.free(slot)
            self._memory.trim()
            if account.held_bytes <= keep_bytes:
                return

    def _harm(self, slot: Slot) -> tuple[int, int]:
        """How much it costs to free a slot: those with the smallest value go first."""
        block = slot.occupant
        if block is None or not block.stays:
            return 0, 0
        if block.index in self.fixed:
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
        fixed = (self.blocks[index] for index in self.fixed)
        if not self._place(block for block in fixed if block.store and block.tensors):
            return False
        self._gave_way = False
        if self._ahead.reach or self._ahead.is_held_back:
            return True
        for block in self._ahead.this_pass:
            if block.slot is None and block.stays and block.home is not None:
                urgent = block.image is not None
                priority = Priority.REQUIRED if urgent else Priority.SPECULATIVE
                if block.home.occupant or not self._mover.load(
                    block, block.home, priority
                ):
                    break
        return True

    @_whole
    def warm(self) -> bool:
        """Between passes: load what the next one begins with, as its end would have.

        Nothing if the model was parked: it has been left without memory to stage, and
        users may want its tensors on one side.

        Returns:
            Whether anything had given way.
        """
        if self._parked:
            return False
        self._ahead.end_at(hands_over=False)
        came_back = self.recall()
        self._ahead.run_into_next_pass(self._device.current_stream())
        self.rest()
        return came_back

    # Plans

    @_whole
    def follow(self, plan: Plan, *, fixed: Collection[int] = ()) -> None:
        """Lay out the slots anew; blocks that keep their place stay where they are.

        Except those that stay no longer: as users may have edited them in place on the
        device, they are brought home. Nothing may be in use.

        Args:
            plan: Which slots there are, and whose.
            fixed: Blocks that are read without a use: they never leave their slots.
        """
        self._ahead.forget()
        self.fixed = fixed
        kept: list[Slot | None] = [None] * len(plan.slots)
        occupied = [slot for slot in self._memory.slots if slot.occupant]
        for slot in occupied:
            block = slot.occupant
            home = plan.home[block.index]
            leaves = block.stays and block.index not in plan.resident
            if not leaves and kept[home] is None and slot.nbytes == plan.slots[home]:
                kept[home] = slot
        for slot in occupied:
            block = slot.occupant
            if kept[plan.home[block.index]] is not slot:
                self._mover.evict(block, verify=block.stays)
        slots = self._memory.lay_out(kept, plan.slots)
        for block in self.blocks:
            index = block.index
            block.home = None if block.hosted else slots[plan.home[index]]
            block.stays = index in plan.resident and not block.hosted
        self._ahead.plan(plan.lookahead, plan.ring())

    @property
    def strained(self) -> bool:
        """Whether slots had to be made or freed against the plan: follow it again."""
        return self._ahead.stopped

    @property
    def lookahead(self) -> int:
        """How many streamed blocks are loaded ahead at most now."""
        return self._ahead.reach

    def obey(self, limits: Limits) -> None:
        """Look ahead no further than limits allow. Any thread may call it."""
        self._ahead.obey(limits)

    def staying(self) -> list[Block]:
        """Return the blocks that the plan keeps on the device for good."""
        return [block for block in self.blocks if block.stays]

    # The blocks themselves

    @_whole
    def place(self, blocks: Iterable[Block]) -> None:
        """Bring the given blocks to the device and leave them bound there.

        Where models in other threads leave no room, nothing is raised: the next pass
        brings them. It does so, too, where this fails.

        Raises:
            StagehandOOMError: If there is no room, whoever is there.
        """
        gave_way, self._gave_way = self._gave_way, True
        there, blocks = False, list(blocks)
        try:
            there = self._place(blocks)
        except StagehandOOMError:
            if not self.others_are_busy():  # the one in the way may have just ended
                there = self._place(blocks)
        if there:
            self._gave_way = gave_way
        else:
            self._tell_of_leave()

    def _place(self, blocks: Iterable[Block]) -> bool:
        """Do what `place` does; return False if others were promised the room."""
        stream = self._device.current_stream()
        away = [block for block in blocks if not block.bound]
        missing = sum(block.slot_nbytes for block in away if block.slot is None)
        with self.beside_passes(missing) as there:
            if not there:
                return False
            for number, block in enumerate(away):
                for other in away[number : number + 2]:  # two threads stage
                    if other.slot is None and not other.stepping:
                        self._loader.request(other)
                self._bring(block, stream)
                self._latest = None
        return True

    @_whole
    def take_in(self, block: Block) -> None:
        """See `Mover.take_in`."""
        self._mover.take_in(block)

    @_whole
    def begin_training(self, block: Block) -> None:
        """Let a block that stayed until now be on the host between passes from now on.

        A block that trains leaves at the end of each pass, and counts as unchanged if
        no version counter moved. While it stayed, users may have edited it on the
        device through `.data`, which moves none: so its bytes are compared once more.
        """
        if block.bound and not block.uses:
            self._evict(block, verify=True)

    @_whole
    def send_home(self, block: Block) -> None:
        """Let a block's tensors point to the host now, in the middle of a pass."""
        if block.bound and not block.uses:
            self._mover.evict(block)

    @_whole
    def park(self) -> None:
        """Bring everything home: all tensors point to the host, all memory is free."""
        self._parked = True
        self.release_fetched()
        self._ahead.forget()
        for slot in self._memory.slots:
            if slot.occupant is not None:
                self._mover.evict(slot.occupant, verify=slot.occupant.stays)
            self._memory.free(slot)
        for block in self.blocks:
            self._loader.forget(block)
        self._engine.drain()
        self._tell_of_leave()

    @_whole
    def bring_home(self) -> list[tuple[Block, torch.Tensor]]:
        """Bring home what is on the device, even where its files are damaged by now.

        To be called before `park`, which would raise for such files.

        Returns:
            The blocks whose files are not what they were, each with its bytes in
            ordinary memory.
        """
        self._ahead.forget()
        rescued = []
        for slot in self._memory.slots:
            block = slot.occupant
            if block is None:
                continue
            try:
                store_of(block).check_hosts()
                self._mover.evict(block, verify=block.stays)
            except CheckpointError:
                image = self._mover.rescue(block)
                if image is not None:
                    rescued.append((block, image))
        return rescued

    def drop(self) -> None:
        """Free all memory, but leave what stays, or has changed, to who holds its
        tensors: what fused optimizers have changed there moves no version counter.
        """
        for slot in self._memory.slots:
            block = slot.occupant
            if block is not None:
                if block.bound:
                    self._engine.release(slot, self._device.current_stream())
                if (block.bound and block.stays) or block.is_touched():
                    block.bound = False
                else:
                    block.point_to_host()
                block.slot = None
                slot.occupant = None
            self._memory.free(slot)
        self._memory.slots = []


def _seal(block: Block) -> None:
    """Note a sample of the host bytes that a copy was made from, once."""
    if block.seal is None:
        block.seal = sample(block)


def _nobody() -> None:
    """Nobody is told."""
