"""Moves blocks into their slots and out of them, and says which bytes are the truth.

While a block is away, the truth is in its host tensors; while it is bound, in its slot.
A copy that was made ahead of the use is compared with the host when it is bound: edits
show in version counters, in addresses, or in a sample of the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagehand.core.copies import copy_values
from stagehand.core.states import ARRIVED, DROPPED, BlockState
from stagehand.core.transfer import Priority, Slot, TransferEngine
from stagehand.errors import OrphanedParameterError, StagehandInternalError
from stagehand.residency.blocks import values_of
from stagehand.residency.loader import Loader, has_sample, pageable
from stagehand.torch_private import storage_key, use_count_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from stagehand.core.device import Device, Stream
    from stagehand.core.telemetry import Counters
    from stagehand.residency.blocks import Block
    from stagehand.residency.slots import SlotMemory

__all__ = ["Mover"]

# On the hot path an attribute of an enumeration takes as long as a call. And a block in
# the first state of a known path is put straight into the last one: `along` would check
# each step.
_HOST_STAGED, _PREFETCHING = BlockState.HOST_STAGED, BlockState.PREFETCHING
_GPU_READY, _SPECULATIVE = BlockState.GPU_READY, Priority.SPECULATIVE
_CRITICAL, _ARRIVED, _DROPPED = Priority.CRITICAL, ARRIVED[-1], DROPPED[-1]

_FOR_A_WHILE = "for a while by a larger one, which wrote over others of the block"


def _nothing() -> None:
    """Wait for nobody."""


def _nowhere(block: Block, numbers: Iterable[int]) -> None:
    """Leave no host memory to anybody."""


class Mover:
    """Loads, binds and evicts one block at a time.

    Args:
        device: Where the model computes.
        engine: The lanes.
        loader: Fills slots.
        memory: Of the slots.
        counters: Where evictions are counted.
        blocks: All blocks.
    """

    def __init__(
        self,
        device: Device,
        engine: TransferEngine,
        loader: Loader,
        memory: SlotMemory,
        counters: Counters,
        blocks: Sequence[Block],
    ) -> None:
        self.await_steps: Callable[[], None] = _nothing
        """Waits for who changes weights on the host in the middle of a pass."""
        self.leave_hosts: Callable[[Block, Iterable[int]], None] = _nowhere
        """Gives a block other memory for some of its host tensors."""
        self.passed = 0
        """Counts begins and ends of passes, for users may edit weights between passes:
        a slot that was filled at another count may be stale."""
        self._device = device
        self._engine = engine
        self._loader = loader
        self._memory = memory
        self._counters = counters
        self._blocks = blocks
        self._replaced_in = -1  # the pass in which a replaced tensor was found last

    def load(self, block: Block, slot: Slot, priority: Priority) -> bool:
        """Begin to fill an empty slot with a block; False if that is not possible now.

        With an urgent priority it always is, or an error is raised.
        """
        if block.stepping:
            if priority >= _SPECULATIVE:
                return False
            self.await_steps()
        if block.views_in is not slot or slot.lease is None:
            urgent = priority < _SPECULATIVE
            if not self._memory.settle_in(block, slot, urgent=urgent):
                return False
        staged = block.state is _HOST_STAGED
        if self._replaced_in == self.passed and not staged and block.is_replaced():
            self.take_in(block)  # one is rarely replaced alone
            block.versions, block.runs = block.read_versions(), ()
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
            block.filled_in = self.passed
        return True

    def bind(self, block: Block, slot: Slot, stream: Stream) -> None:
        """Let a loaded block's tensors point to its slot, and `stream` read it."""
        if self._loader.fills:
            self._finish(block, slot)
        seal = block.seal
        if seal is not None and block.filled_in != self.passed:
            block.seal = None
            if not has_sample(block, seal):  # edited behind the version counters
                self._reload(block, slot)
        self._engine.await_filled(slot, stream)
        if block.state is _PREFETCHING:
            block.state = _ARRIVED
        if not block.arrive():
            self._reload(block, slot)
            self.bind(block, slot, stream)
        if block.edited:
            block.mark_changed()

    def _finish(self, block: Block, slot: Slot) -> None:
        try:
            self._loader.finish(block)
        except BaseException:
            self._loader.forget(block)  # after an interrupt a thread may still write
            self.vacate(block, slot)
            raise

    def _reload(self, block: Block, slot: Slot) -> None:
        self.take_in(block)
        self.note_readers(block, slot)
        self.vacate(block, slot)
        block.runs = ()  # all of it: to be here whole is no loss but of time
        block.versions = block.read_versions()
        self.load(block, slot, _CRITICAL)

    def evict(
        self,
        block: Block,
        *,
        verify: bool = False,
        stream: Stream | None = None,
        waits: bool = True,
    ) -> bool:
        """Give up a block's slot, bringing its bytes home first if they changed.

        Args:
            block: On the device and not in use.
            verify: Compare the bytes too: while a tensor points into a slot outside of
                any pass, an edit through `.data` changes it behind its version counter.
            stream: The current stream, for who knows it.
            waits: Whether the host waits for the bytes. If not they begin to come home,
                and the slot can be given up later: see Note [On the way home].

        Returns:
            Whether the slot is empty: always, if this waits.
        """
        slot = block.slot
        if slot is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        try:
            if not self._leave(block, slot, verify, stream, waits):
                return False
        except BaseException:
            if block.state is BlockState.EVICTING:
                block.state = _GPU_READY  # its slot still has its bytes
            raise
        self._counters.evictions += 1
        self.leave_to_holders(block, slot)
        return True

    def leave_to_holders(self, block: Block, slot: Slot) -> None:
        """Abandon the memory of a slot, empty of a block now, to those who still refer
        to it, if any do.
        """
        if use_count_of(slot.storage_key) > slot.alone:
            block.abandoned += 1
            self._memory.abandon(slot)

    def _leave(
        self,
        block: Block,
        slot: Slot,
        verify: bool,
        stream: Stream | None,
        waits: bool,
    ) -> bool:
        """Vacate a block's slot; False if its bytes are still on their way home."""
        if block.bound:
            changed = block.is_touched()
            if changed:
                self.take_in(block)
            stream = stream or self._device.current_stream()
            if changed or verify:
                if not self._bring_home(block, stream, verify=verify, waits=waits):
                    return False
            else:  # whoever read its tensors used the slot
                self._engine.release(slot, stream)
        else:
            if block.filled_in != self.passed and block.is_replaced():
                self.take_in(block)
            self._loader.forget(block)
            self.note_readers(block, slot)
        self.vacate(block, slot)
        return True

    def drop(self, block: Block, slot: Slot, stream: Stream) -> bool:
        """Like `evict` where the host shall not wait, in less time in the usual case:
        a block that nobody has changed.
        """
        if not block.bound or block.sent is not None:
            return self.evict(block, stream=stream, waits=False)
        self._engine.release(slot, stream)  # whoever read its tensors used the slot
        if not block.leave():
            return self.evict(block, stream=stream, waits=False)
        block.state = _DROPPED
        block.seal = block.slot = slot.occupant = None
        self._counters.evictions += 1
        if use_count_of(slot.storage_key) > slot.alone:
            self.leave_to_holders(block, slot)
        return True

    def _bring_home(
        self, block: Block, stream: Stream, *, verify: bool, waits: bool
    ) -> bool:
        """Bring a changed block's bytes home; return whether they are there.

        Note [On the way home]: the block stays bound until the copy is done. Whoever
        reads its tensors meanwhile finds them on the device, where they are whole; the
        host has only a part of them. A use that begins in that time waits for the copy,
        on the device. What else happens to the tensors is seen when the slot is given
        up: writes by the versions that were noted when the copy was queued, reads by
        the `drained` mark, which is set only then. So the next load into the slot waits
        for all that was computed until then, and it is better to give the slot up soon.
        """
        is_home, versions = False, block.read_versions()
        if block.sent is not None:
            ticket, then = block.sent
            if waits:
                ticket.wait_host()
            elif not ticket.done.query():
                return False
            block.sent = None
            is_home = then == versions and not verify
        self._engine.release(block.slot, stream)  # type: ignore[arg-type]
        block.changes = block.changes or not waits
        if not (is_home or waits or block.stays):
            sent = self._loader.send_home(block)
            if sent is not None:
                block.sent = sent, versions
                return False
        block.to(BlockState.EVICTING)
        if not is_home:
            self._loader.save(block, only_if_different=versions == block.versions)
        block.versions = versions  # of bytes that are home
        return True

    def take_home(self, block: Block) -> None:
        """Bring home what was edited on the device and moved no version counter.

        The block stays bound. The slot was released after its latest read.
        """
        if block.bound and not block.is_touched():
            self._loader.save(block, only_if_different=True)

    def rescue(self, block: Block) -> torch.Tensor | None:
        """Give up a block's slot; return its bytes, if they are the truth."""
        slot, source, image = block.slot, block.target, None
        if slot is None or source is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        if block.state is _GPU_READY and (block.bound or not block.is_changed()):
            image = pageable(block)
            if block.bound:  # whoever read or edited its tensors used the slot
                self._engine.release(slot, self._device.current_stream())
            self._engine.save(slot, source, image).wait_host()
        else:
            self._loader.forget(block)
        self.vacate(block, slot)
        return image

    def note_readers(self, block: Block, slot: Slot) -> None:
        """Mark the slot of an unbound block as read until now, by whoever did.

        A graph, say, may have read a view of it since the latest pass.
        """
        if block.state is _GPU_READY:
            self._engine.release(slot, self._device.current_stream())

    def vacate(self, block: Block, slot: Slot) -> None:
        """Let a block forget its slot; nothing is copied."""
        if block.bound:
            block.point_to_host()
        elif block.state is _PREFETCHING:
            block.state = _ARRIVED  # the next copy into the slot waits its turn
        if block.state is _GPU_READY:
            block.state = _DROPPED
        else:
            block.to(BlockState.UNLOADED)
        block.seal = block.slot = slot.occupant = None

    def complete(self, block: Block) -> None:
        """Bring the whole of a block that is in use by rows."""
        slot = block.slot
        if slot is None:
            raise StagehandInternalError(f"block {block.name!r} is not on the device")
        self._reload(block, slot)
        self.bind(block, slot, self._device.current_stream())

    def discard(self, block: Block, slot: Slot) -> None:
        """Vacate a block's slot; its bytes are not brought home, changed or not."""
        self.note_readers(block, slot)
        self.vacate(block, slot)
        self._counters.evictions += 1
        self.leave_to_holders(block, slot)

    def recover(self, block: Block) -> None:
        """Put a block's books in order if an interrupt came in the middle of a move.

        If its bytes were not home yet, it stays bound to its slot, which has them.
        """
        block.straighten()
        slot = block.slot
        if block.runs:  # only rows, for a call that is over
            if slot is not None and (block.bound or block.state is _GPU_READY):
                self._engine.release(slot, self._device.current_stream())
            block.point_to_host()
            block.runs, slot = (), None
            block.uses = 0
        if slot is not None and slot.occupant is block:
            if block.bound:
                block.state = _GPU_READY
            if block.state in (_PREFETCHING, _GPU_READY):
                return
        self._loader.forget(block)
        block.state = BlockState.UNLOADED
        block.seal = block.slot = None

    def take_in(self, block: Block) -> None:
        """Copy in what somebody assigned to a tensor's `.data`, and point back.

        While the block is away its host tensors get the values, while it is bound its
        slot. Memory of the block that somebody else still refers to, say to assign the
        old weights again later, keeps its values: it is left to them, and the block
        gets new memory.

        Raises:
            OrphanedParameterError: If it has another shape or element type. Then all
                blocks get their old tensors back, for a cast replaces many at once.
        """
        refused = self._take_in(block)
        if not refused:
            return
        for other in self._blocks:
            refused += self._take_in(other)
        more = f", as {len(refused) - 1} more were" if refused[1:] else ""
        raise OrphanedParameterError(
            f"a tensor of block {block.name!r} was replaced {refused[0]}, and has its"
            f" old values again{more}; call runtime.shutdown() before changing a"
            " parameter's shape or element type, then stagehand.layer() again; what"
            " the model's own forward casts has to be cast before stagehand.layer()"
        )

    def _take_in(self, block: Block) -> list[str]:
        """Take in what fits; point back what does not, and return what that was."""
        if block.store is None or not (block.is_replaced() or _is_resized(block)):
            return []
        self._replaced_in = self.passed
        stream = self._device.current_stream()
        slot = block.slot if block.bound else None
        if slot is not None:  # others may still read what is written now
            self._engine.release(slot, stream)
        elif block.slot is not None:  # a load may still read the host tensors
            self._engine.finish_load(block.slot)
        overrun = slot if slot is not None and _overruns(block, slot) else None
        given, refused = _assigned(block)
        if overrun is not None:  # what it has cannot be told from what it had
            key, refused = overrun.storage_key, refused or [_FOR_A_WHILE]
            given = {
                n: value for n, value in given.items() if storage_key(value) != key
            }
            self.vacate(block, overrun)
            self._memory.abandon(overrun)
        try:
            self._write(block, given, slot, stream)
        except BaseException:  # as if it was assigned just now
            for number, value in given.items():
                block.tensors[number].data = value
            raise
        return refused

    def _write(
        self,
        block: Block,
        given: dict[int, torch.Tensor],
        slot: Slot | None,
        stream: Stream,
    ) -> None:
        """Write values to a block's tensors; memory that others hold is left to them.

        Args:
            block: All its tensors point to where they belong.
            given: The values, by the tensors' numbers.
            slot: The slot to which it is bound, if it is, or was until now.
            stream: The current stream.
        """
        held = block.held_hosts(given)
        if block.slot is slot is not None and (held or _has_more_users(slot, block)):
            # Whoever holds the old memory keeps the values of now.
            self.evict(block, verify=True)
        if held:
            self.leave_hosts(block, held)
        places = block.pairs()
        for number, value in given.items():
            copy_values(places[number][1], value)
            if not value.is_cpu:  # its memory may belong to another stream
                self._engine.disown(value)
        block.mark_changed()
        if slot is None:
            return
        if block.slot is slot:
            self._engine.note_write(slot, stream)
        else:
            block.versions = block.read_versions()
            self.load(block, slot, _CRITICAL)
            self.bind(block, slot, stream)


def _has_more_users(slot: Slot, block: Block) -> bool:
    """Whether anybody but the block's tensors refers to the memory of a slot."""
    return use_count_of(slot.storage_key) > slot.alone + len(block.tensors)


def _overruns(block: Block, slot: Slot) -> bool:
    """Whether a tensor has grown in place over those behind it in its slot, or has had
    all of the slot's memory made anew, as large as that tensor.
    """
    return slot.storage.data_ptr() != slot.address or any(
        values_of(tensor).nbytes > place.nbytes
        and storage_key(values_of(tensor)) == slot.storage_key
        for tensor, place in block.pairs()
    )


def _is_resized(block: Block) -> bool:
    """Whether somebody changed a shape in place: the image has no room for another."""
    return (
        block.bound
        and block.is_changed()
        and any(values_of(t).shape != place.shape for t, place in block.pairs())
    )


def _assigned(block: Block) -> tuple[dict[int, torch.Tensor], list[str]]:
    """Point a block's replaced tensors back.

    Returns:
        What users assigned to them, by number, where it fits; and for each that has
        another shape or element type a line that says so.
    """
    given: dict[int, torch.Tensor] = {}
    refused: list[str] = []
    for number, (tensor, place) in enumerate(block.pairs()):
        value = values_of(tensor)
        is_there = value.data_ptr() == block.addresses[number]
        if is_there and value.shape == place.shape:
            continue
        tensor.data = place
        if value.shape != place.shape or value.dtype != place.dtype:
            why = (
                f"by {value.dtype} {list(value.shape)}, expected {place.dtype}"
                f" {list(place.shape)}"
            )
            if tensor.grad is not None and tensor.grad.dtype != place.dtype:
                why += f" (its gradient stays {tensor.grad.dtype}: set it to None)"
            refused.append(why)
        else:
            given[number] = value
    return given, refused
