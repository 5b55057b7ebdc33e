"""What crosses the link small and is decoded: every hazard is closed by an event."""

import contextlib
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch

from interrupts import interrupted_at
from stagehand.core import transfer, wire_ring
from stagehand.core.arena import Arena
from stagehand.core.device import AcceleratorDevice
from stagehand.core.ledger import Account
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import Denied, Priority, Slot, TransferEngine
from stagehand.core.wire_ring import WireRing
from stagehand.errors import StagehandInternalError, StagehandOOMError

NBYTES = 4096
WIRE = NBYTES // 2
SCRATCH = 512
NOW = Priority.CRITICAL


def decode(wire, image, scratch):
    """A form in which each byte stands for two; the scratch memory is written, too."""
    scratch.fill_(1)
    image.view(-1, 2).copy_(wire[:, None].expand(-1, 2))


class Rig:
    """Slots, a ring, and two streams that compute."""

    def __init__(self, count=2, limit=1 << 20, **options):
        self.device = AcceleratorDevice(torch.device("hpu"))
        self.counters = Counters()
        self.engine = TransferEngine(self.device, self.counters, **options)
        self.main = self.device.current_stream()
        self.side = self.device.new_stream()
        self.account = Account("device memory", limit)
        self.arena = Arena("device memory", self.engine.allocate, self.account)
        self.slots = [self.new_slot(number) for number in range(3)]
        self.open(count)

    def open(self, count=2):
        self.engine.open_wires(
            self.arena, count=count, nbytes=WIRE, scratch_nbytes=SCRATCH
        )

    def new_slot(self, number):
        slot = Slot(number, NBYTES)
        self.engine.adopt(slot)
        slot.lease = self.arena.acquire_nowait(NBYTES, "slot")
        return slot

    def load(self, value, number=0, priority=NOW, decode=decode, source=None):
        slot = self.slots[number]
        source = self.device.pinned(WIRE) if source is None else source
        source.fill_(value)
        target = slot.lease.buffer[:NBYTES]
        return self.engine.load_wire(slot, target, source, decode, priority)

    def load_plain(self, value, number=0):
        slot = self.slots[number]
        source = self.device.pinned(NBYTES).fill_(value)
        self.engine.load(slot, slot.lease.buffer[:NBYTES], source, NOW)

    def use(self, number=0, stream=None):
        """Read a slot as a block's user does, and return what was there."""
        stream, slot = stream or self.main, self.slots[number]
        self.engine.await_filled(slot, stream)
        with stream:
            total = slot.lease.buffer[:NBYTES].sum()
        self.engine.release(slot, stream)
        return total

    def close(self):
        self.engine.close_wires()
        for slot in self.slots:
            self.engine.retire(slot)
            slot.lease.release()
        self.arena.close()


def is_filled_with(result, value):
    torch.accelerator.synchronize()
    return result.item() == value * NBYTES


# ----------------------------------------------------------------------------- hazards


def read_after_decode(rig):
    rig.load(1)
    assert is_filled_with(rig.use(), 1)


def decode_after_read(rig):
    rig.load(1)
    first = rig.use(stream=rig.side)
    rig.load(2)
    assert is_filled_with(first, 1)
    assert is_filled_with(rig.use(), 2)


def wire_over_wire_that_is_decoded(rig):
    """Three loads go through two pieces."""
    for number in range(3):
        rig.load(number + 1, number)
    for number in range(3):
        assert is_filled_with(rig.use(number), number + 1)


def plain_load_over_decoded(rig):
    """Whatever filled a slot last, and whether it was read or not."""
    rig.load(1)
    rig.load_plain(2)
    rig.load(3)
    assert is_filled_with(rig.use(), 3)


def scratch_is_shared(rig):
    rig.load(1, 0)
    rig.load(2, 1)
    assert is_filled_with(rig.use(0), 1)
    assert is_filled_with(rig.use(1), 2)


def ring_in_memory_that_a_slot_had(rig):
    rig.engine.close_wires()
    slot = rig.slots.pop()
    rig.slots.append(slot)
    rig.load_plain(1, 2)
    rig.use(2, rig.side)
    rig.engine.retire(slot)
    slot.lease.release()
    rig.arena.trim()
    rig.open()
    for number in range(2):
        rig.load(number + 2, number)
    slot.lease = rig.arena.acquire_nowait(NBYTES, "slot")
    rig.engine.adopt(slot)


def slot_in_memory_that_the_ring_had(rig, loads=2):
    for number in range(loads):
        rig.load(number + 1, number)
    rig.engine.close_wires()
    rig.arena.trim()
    buffers = [rig.engine.allocate(size) for size in (WIRE, WIRE, SCRATCH)]
    with rig.engine.h2d.context:
        for buffer in buffers:
            buffer.zero_()
    rig.open()


def wire_whose_decoder_failed(rig):
    """What its decoder had begun reads the piece still."""

    def fail(wire, image, scratch):
        decode(wire, image, scratch)
        raise RuntimeError("no")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            rig.load(1, decode=fail)
    rig.load(2)
    assert is_filled_with(rig.use(), 2)


def interrupted(rig, **load):
    """A wire that is on its way, and the lane does not wait for it."""

    def interrupt(_):
        raise KeyboardInterrupt

    pieces = rig.engine.wires._pieces
    marks = [piece.arrived for piece in pieces]
    for piece in pieces:
        piece.arrived = SimpleNamespace(record=interrupt)
    with pytest.raises(KeyboardInterrupt):
        rig.load(1, **load)
    for piece, mark in zip(pieces, marks, strict=True):
        piece.arrived = mark


def wire_that_was_interrupted(rig):
    interrupted(rig)
    slot_in_memory_that_the_ring_had(rig, loads=0)


def memory_of_a_wire_that_was_interrupted(rig):
    source = rig.device.pinned(WIRE)
    interrupted(rig, source=source)
    rig.engine.drain()
    rig.load(2, source=source)
    assert is_filled_with(rig.use(), 2)


HAZARDS = (
    *(read_after_decode, decode_after_read, wire_over_wire_that_is_decoded),
    *(plain_load_over_decoded, scratch_is_shared, ring_in_memory_that_a_slot_had),
    *(slot_in_memory_that_the_ring_had, wire_whose_decoder_failed),
    *(wire_that_was_interrupted, memory_of_a_wire_that_was_interrupted),
)

# The line that closes each hazard, by its class and method.
GUARDS = {
    (TransferEngine, "load_wire", "lane.stream.wait_event(piece.arrived)"): (
        *(read_after_decode, wire_over_wire_that_is_decoded),
    ),
    (TransferEngine, "load_wire", "lane.stream.wait_event(slot._drained)"): (
        decode_after_read,
    ),
    (WireRing, "take", "self.stream.wait_event(piece.decoded)"): (
        wire_over_wire_that_is_decoded,
    ),
    (WireRing, "__init__", "self.stream.wait_event(self._order)"): (
        ring_in_memory_that_a_slot_had,
    ),
    (WireRing, "close", "self._lane.wait_event(self._order)"): (
        wire_that_was_interrupted,
    ),
    (TransferEngine, "await_loads", "self._wire_stream.synchronize()"): (
        memory_of_a_wire_that_was_interrupted,
    ),
    # Marks that waits rely on.
    (WireRing, "close", "self._order.record(self.stream)"): (
        wire_that_was_interrupted,
    ),
    (TransferEngine, "_note_filled", "filled.record(self.h2d.stream)"): (
        read_after_decode,
    ),
    (TransferEngine, "load_wire", "piece.arrived.record(wires.stream)"): (
        read_after_decode,
    ),
    (TransferEngine, "load_wire", "piece.decoded.record(lane.stream)"): (
        wire_over_wire_that_is_decoded,
    ),
    (TransferEngine, "load_wire", "piece.used = True"): (
        *(wire_over_wire_that_is_decoded, wire_whose_decoder_failed),
    ),
    (WireRing, "__init__", "self._order.record(lane)"): (
        ring_in_memory_that_a_slot_had,
    ),
}
REMOVALS = [
    pytest.param(owner, method, line, hazard, id=f"{method}: {line} {hazard.__name__}")
    for (owner, method, line), hazards in GUARDS.items()
    for hazard in hazards
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
def test_no_hazard_is_open(sim, hazard):
    rig = Rig()
    hazard(rig)
    rig.close()
    assert sim.races() == []
    rig.device.synchronize()


def without(owner, method, line):
    """Return a method with one of its lines taken out."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    lines = source.splitlines()
    [number] = [n for n, text in enumerate(lines) if text.strip().startswith(line)]
    indent = len(lines[number]) - len(lines[number].lstrip())
    lines[number] = " " * indent + "pass"
    head = "from __future__ import annotations"  # nor are they evaluated in the module
    module = transfer if owner is TransferEngine else wire_ring
    namespace = {}
    exec("\n".join([head, *lines]), vars(module).copy(), namespace)
    return namespace[method]


@pytest.mark.parametrize(("owner", "method", "line", "hazard"), REMOVALS)
def test_hazard_is_seen_when_its_guard_is_taken_out(
    sim, monkeypatch, owner, method, line, hazard
):
    monkeypatch.setattr(owner, method, without(owner, method, line))
    rig = Rig()
    with sim.expect_races():
        with contextlib.suppress(AssertionError):  # wrong values may be seen, too
            hazard(rig)
        rig.close()
        rig.device.synchronize()


# ------------------------------------------------------------------------- promises


def test_host_waits_for_nothing(sim):
    rig = Rig()
    before = sim.syncs()
    for value in range(4):
        rig.load(value)
        rig.use()
        rig.use(stream=rig.side)
    assert sim.syncs() == before
    rig.close()
    rig.device.synchronize()


def test_interrupt_while_a_piece_is_taken_loses_none(sim):
    rig = Rig()
    pieces = set(rig.engine.wires._pieces)
    for number in range(1, 6):
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupted_at(number, WireRing.take),
        ):
            rig.engine.wires.take(WIRE)
        assert set(rig.engine.wires._pieces) == pieces
    rig.close()


def test_next_wire_crosses_while_one_is_decoded(sim):
    """Two loads of 10 ms each, decoded in 10 ms: 30 ms with two pieces, not 40."""
    times = {}
    for count in (1, 2):
        # A kernel that writes NBYTES and reads half as many takes as long as a copy.
        rate = WIRE / 10e-3 / 1e9
        sim.configure(h2d_gbps=rate, hbm_gbps=3 * rate, launch_us=0, host_launch_us=0)
        rig = Rig(count=count)
        rig.device.synchronize()
        start = sim.host_seconds()

        def copy_up(wire, image, scratch):
            torch.stack((wire, wire), 1, out=image.view(-1, 2))

        rig.load(1, 0, decode=copy_up)
        rig.load(2, 1, decode=copy_up)
        rig.device.synchronize()
        times[count] = sim.host_seconds() - start
        assert is_filled_with(rig.use(1), 2)
        rig.close()
        rig.device.synchronize()
    assert times[2] < 0.8 * times[1]


def test_bytes_that_cross_are_counted_not_those_of_the_image(sim):
    rig = Rig()
    sent = sim.h2d_bytes()
    rig.load(1)
    assert rig.counters.h2d_bytes == WIRE
    torch.accelerator.synchronize()
    assert sim.h2d_bytes() - sent == WIRE
    rig.close()


def test_speculation_is_denied_when_the_lane_is_full(sim):
    sim.configure(h2d_gbps=1e-3)
    rig = Rig(h2d_capacity=1)
    assert not isinstance(rig.load(1, priority=Priority.SPECULATIVE), Denied)
    denied = rig.load(2, 1, priority=Priority.SPECULATIVE)
    assert denied is Denied.H2D_SLOTS_EXHAUSTED
    assert rig.counters.h2d_copies == 1
    rig.load(3, 1)  # demand never is
    rig.close()
    rig.device.synchronize()


def test_all_rings_of_an_engine_have_one_stream(sim, monkeypatch):
    """PyTorch has 32, which it hands out in turn: the ring's could be a lane's.

    A ring is given back whenever another model takes its turn, and opened by each load
    that finds none.
    """
    made, new = [], AcceleratorDevice.new_stream
    monkeypatch.setattr(
        AcceleratorDevice,
        "new_stream",
        lambda device, priority=0: made.append(priority) or new(device, priority),
    )
    rig = Rig()
    before = len(made)
    for value in range(3):
        rig.engine.rest_wires()
        rig.load(value)
        assert is_filled_with(rig.use(), value)
        rig.open(count=1)
    assert len(made) == before
    rig.close()


def test_ring_is_paid_for_and_given_back(sim):
    rig = Rig()
    held = rig.account.held_bytes
    assert held == 3 * NBYTES + 2 * WIRE + SCRATCH
    rig.engine.close_wires()
    rig.engine.close_wires()  # idempotent
    rig.arena.trim()
    assert rig.account.held_bytes == 3 * NBYTES
    rig.open(1)
    assert rig.account.held_bytes == 3 * NBYTES + WIRE + SCRATCH
    rig.close()


def test_ring_at_rest_holds_nothing_and_comes_back(sim):
    rig = Rig()
    rig.load(1)
    rig.engine.rest_wires()
    rig.arena.trim()
    assert rig.account.held_bytes == 3 * NBYTES
    rig.load(2)
    assert is_filled_with(rig.use(), 2)
    assert rig.account.held_bytes == 3 * NBYTES + 2 * WIRE + SCRATCH
    rig.engine.rest_wires()
    rig.arena.trim()
    rig.account.set_limit(3 * NBYTES + WIRE)
    with pytest.raises(StagehandOOMError, match="decoded on the device"):
        rig.load(3)
    assert isinstance(rig.load(3, priority=Priority.SPECULATIVE), Denied)
    rig.engine.wake_wires()
    assert rig.engine.wires is None
    rig.account.set_limit(3 * NBYTES + 2 * WIRE + SCRATCH)
    rig.engine.wake_wires()
    rig.engine.wake_wires()  # idempotent
    assert rig.account.held_bytes == 3 * NBYTES + 2 * WIRE + SCRATCH
    rig.close()


def test_ring_without_room_is_refused_and_holds_nothing(sim):
    rig = Rig()
    rig.engine.close_wires()
    rig.arena.trim()
    rig.account.set_limit(3 * NBYTES + WIRE + 10)
    with pytest.raises(StagehandOOMError, match="decoded on the device") as caught:
        rig.open()
    assert caught.value.needed_bytes == 3 * NBYTES + 2 * WIRE
    rig.arena.trim()
    assert rig.account.held_bytes == 3 * NBYTES
    rig.close()


def test_ring_whose_memory_cannot_be_made_holds_nothing(sim, monkeypatch):
    """The budget has room for it, the device is full of others' memory."""
    rig = Rig()
    rig.engine.close_wires()
    rig.arena.trim()
    held, made = rig.account.held_bytes, []

    def make(nbytes):
        if made:
            raise torch.OutOfMemoryError("full")
        made.append(nbytes)
        return rig.engine.allocate(nbytes)

    monkeypatch.setattr(rig.arena, "_make", make)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        rig.open()
    rig.arena.trim()
    assert rig.account.held_bytes == held
    del caught


def test_wire_longer_than_a_piece_is_a_bug_that_is_named(sim):
    rig = Rig()
    source = rig.device.pinned(WIRE + 16)
    target = rig.slots[0].lease.buffer[:NBYTES]
    with pytest.raises(StagehandInternalError, match="a wire of 2064 bytes"):
        rig.engine.load_wire(rig.slots[0], target, source, decode, NOW)
    rig.close()


def test_wire_without_a_ring_is_a_bug_that_is_named(sim):
    rig = Rig()
    rig.engine.close_wires()
    with pytest.raises(StagehandInternalError, match="without memory to decode it"):
        rig.load(1)
    rig.close()
