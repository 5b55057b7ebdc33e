"""Runs ahead of the uses: queues the loads of those to come, in order.

A load is queued as soon as its slot is free of anything that is needed sooner. The
look-ahead moves forward only, and what it has passed is counted on the block itself, so
each use costs O(1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

from stagehand.core.limits import Limits, effective
from stagehand.core.states import BlockState
from stagehand.core.transfer import Priority

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stagehand.core.device import Stream
    from stagehand.core.transfer import Slot
    from stagehand.residency.blocks import Block
    from stagehand.residency.loader import Loader
    from stagehand.residency.mover import Mover
    from stagehand.residency.order import Order

__all__ = ["LookAhead"]

# An attribute of an enumeration is slow.
_SPECULATIVE, _HOST_STAGED = Priority.SPECULATIVE, BlockState.HOST_STAGED


class LookAhead:
    """Where the loads are, between the latest use and the farthest that is expected.

    Positions are those of the order.

    Args:
        order: The expected uses.
        blocks: All blocks, by index.
        loader: Stages what does not lie in pinned memory.
        mover: Loads and evicts.
    """

    def __init__(
        self, order: Order, blocks: Sequence[Block], loader: Loader, mover: Mover
    ) -> None:
        self.changes_follow = False
        """Whether trained weights may change after this pass."""
        self.hands_over = False
        """Whether the next pass on the device is expected to be another model's."""
        self.reach = 0
        """How many streamed blocks are loaded ahead at most now."""
        self.stopped = False
        """Whether nothing is loaded ahead until the next plan."""
        self.picks = False
        """Whether experts are not loaded ahead: their calls bring the rows that they
        read."""
        self._order = order
        self._blocks = blocks
        self._loader = loader
        self._mover = mover
        self._planned = 0
        self._ring: list[int] = []  # the sizes of its slots, smallest first
        self._limits = Limits()
        self._front = -1  # the last position that was passed
        self._staged_front = -1  # the last position for which staging was requested
        # The last block that this has passed of each slot, and its position.
        self._claims: dict[Slot, tuple[Block, int]] = {}
        self._ahead: deque[Block] = deque()  # streamed blocks between cursor and front
        self._line: list[Block] = []  # the expected uses of this pass and the next
        self._length = 0  # of this pass, as far as it is expected
        self._line_version = -1  # of the order, when `_line` was drawn

    def __len__(self) -> int:
        return len(self._ahead)

    @property
    def this_pass(self) -> list[Block]:
        """The expected uses of this pass."""
        return self._line[: self._length]

    @property
    def is_held_back(self) -> bool:
        """Whether limits let it reach less far than was planned."""
        return self._allowed() < self._planned

    # How far it goes

    def plan(self, blocks: int, ring: Iterable[int]) -> None:
        """Load so many streamed blocks ahead, as far as limits allow.

        Args:
            blocks: How many.
            ring: The bytes of the slots that they share.
        """
        self._planned = blocks
        self._ring = sorted(ring)
        self.stopped = False
        self.reach = self._allowed()

    def obey(self, limits: Limits) -> None:
        """Reach no further than limits allow, from the next use on.

        May be called by any thread: it sets a number.
        """
        self._limits = limits
        if not self.stopped:
            self.reach = self._allowed()

    def stop(self) -> None:
        """Load nothing ahead until the next plan."""
        self.forget()
        self.stopped = True
        self.reach = 0

    def _allowed(self) -> int:
        limits = self._limits
        if limits.suppress_speculative:
            return 0
        return effective(self._planned, limits.lookahead_blocks)

    # Following the order

    def turn(self, *, goes_back: bool) -> None:
        """A pass begins, autograd's or another one."""
        order = self._order
        length = order.length if order.cursor >= 0 else 0
        kept = order.turn(goes_back=goes_back, changes_follow=self.changes_follow)
        if kept:
            self._front = max(self._front - length, -1)
            self._staged_front = max(self._staged_front - length, -1)
            self._claims = {s: (b, at - length) for s, (b, at) in self._claims.items()}
        else:
            self.forget()
        self._draw_line()

    def end_at(self, *, hands_over: bool) -> None:
        """Say whether another model runs next: then nothing is loaded for the pass
        after this one."""
        if hands_over != self.hands_over:
            self.hands_over = hands_over
            self._line_version = -1
            self._draw_line()

    def _draw_line(self) -> None:
        """Take over what the order expects, if that has changed."""
        if self._line_version != self._order.version:
            self._line_version = self._order.version
            self._line = list(map(self._blocks.__getitem__, self._order.line))
            self._length = self._order.length
            if self.hands_over:
                del self._line[self._length :]

    def use(self, block: Block) -> bool:
        """Note a use; return whether it was the expected one."""
        order, ahead, line = self._order, self._ahead, self._line
        position = order.cursor + 1
        if position < self._length and line[position] is block and order.followed:
            order.cursor = position
        elif not order.use(block.index):
            self.forget()
            return False
        if ahead and ahead[0] is block:
            ahead.popleft()
            block.awaited -= 1
        elif self._front < position:
            self._front = position
        return True

    def forget(self) -> None:
        """The order was wrong: nothing that was loaded ahead is awaited any more."""
        while self._ahead:
            self._ahead.popleft().awaited -= 1
        self._draw_line()
        self._front = self._order.cursor
        self._staged_front = self._order.cursor
        self._claims.clear()

    def recover(self) -> None:
        """Forget all that is awaited, where an interrupt may have left half a line."""
        self.forget()
        for block in self._blocks:
            block.awaited = 0

    # Loading

    def run(self, stream: Stream, *, ends: bool = False) -> None:
        """Queue the loads that are possible now.

        Args:
            stream: The current stream.
            ends: Whether the pass ends: no use comes that could wait instead.
        """
        ahead, line = self._ahead, self._line
        room = self.reach - len(ahead)
        if room <= 0 and not self._loader.stages:
            return
        position = self._front + 1
        last = self._order.cursor + self._length + 1
        if last > len(line):
            last = len(line)
        while room > 0 and position < last:
            block = line[position]
            if block.slot is None and not (self.picks and _is_left(block)):
                slot = block.home
                if self.picks and self._is_awaited(slot):
                    break
                if self.changes_follow and block.trains and position >= self._length:
                    break  # the next pass would find it changed
                if slot is not None:
                    other = slot.occupant
                    if other is not None:
                        if other.uses or other.awaited:
                            break
                        if not (
                            self._mover.drop(other, slot, stream)
                            or self._await_home(other, slot, stream, ends=ends)
                        ):
                            self._clear(position, min(last, position + room), stream)
                            break
                    if not self._mover.load(block, slot, _SPECULATIVE):
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
            self._stage(position, last)
            self._clear(position, min(last, position + room), stream)

    def _is_awaited(self, slot: Slot | None) -> bool:
        """Whether a block that is left to its call needs a slot sooner."""
        return any(block.slot is None and block.home is slot for block in self._ahead)

    def _await_home(
        self, block: Block, slot: Slot, stream: Stream, *, ends: bool
    ) -> bool:
        """Wait until a block's changed bytes are home; False if that is put off.

        The longer it is put off, the less the host waits: the device computes meanwhile
        with what was loaded ahead. But the next load into the slot waits for all that
        was launched until the slot is given up: see Note [On the way home]. So both
        get about half of the time: it is put off while more than half of what may be
        loaded ahead is left, of blocks as large as this one.
        """
        ahead = len(self._ahead)
        others = len(self._ring) - bisect_left(self._ring, slot.nbytes) - 1
        if ahead and 2 * ahead > min(self.reach, others) - 2 and not ends:
            return False
        return self._mover.evict(block, stream=stream)

    def run_into_next_pass(self, stream: Stream) -> None:
        """Queue what the next pass begins with, if this one ended as expected.

        The slot of the last use is free now, and the link is in a pause between passes.
        """
        order = self._order
        if order.cursor == order.length - 1 and not order.lost:
            self.run(stream, ends=True)

    def _clear(self, position: int, last: int, stream: Stream) -> None:
        """Give up the slots of loads to come, whose bytes are still being staged.

        A load waits for all that was computed before its slot was given up. If the slot
        were given up only when the bytes are there, the load would wait for whatever
        was computed meanwhile, and disk and compute would take turns.
        """
        passed: list[Block] = []
        for block in self._line[position:last]:
            slot = block.home
            other = None if slot is None else slot.occupant
            if slot is not None and other is not None and block.slot is None:
                if other.uses or other.awaited or other in passed:
                    return
                if self.changes_follow and block.trains:
                    return
                self._mover.drop(other, slot, stream)
            passed.append(block)

    def _stage(self, position: int, last: int) -> None:
        """Let the disk run further ahead than the link, as far as there are slabs.

        A block may still be in its slot but will have left it by its next use. The disk
        does not pass over it, but waits until it is gone and reads it in its turn: else
        others would take the slab that it needs.
        """
        position = max(position, self._staged_front + 1)
        while position < last:
            block = self._line[position]
            if self.changes_follow and block.trains and position >= self._length:
                return
            slot = block.slot or block.home
            if self.picks and _is_left(block):
                slot = block.slot
            if slot is not None and block.needs_staging:
                if block.slot is not None or block.state is _HOST_STAGED:
                    other, where = self._claims.get(slot, (block, -1))
                    if other is not block and where > self._front:
                        return
                if block.slot is None:
                    if block.stepping:
                        return
                    self._loader.request(block)
                    if block.state is not _HOST_STAGED:
                        return
            if slot is not None:
                self._claims[slot] = block, position
            self._staged_front = position
            position += 1


def _is_left(block: Block) -> bool:
    """Whether a block can be left to its call, which knows the rows that it reads."""
    return block.picks and not block.stays
