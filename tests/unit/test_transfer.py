"""Lanes and slots: every hazard between copies and readers is closed by an event."""

import contextlib
import inspect
import itertools
import textwrap
from functools import partial

import pytest
import torch

from interrupts import interrupted_at
from stagehand.core import transfer
from stagehand.core.device import AcceleratorDevice, HostDevice
from stagehand.core.flight import Flight
from stagehand.core.stopwatch import Stopwatch
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import (
    Denied,
    Priority,
    Slot,
    Ticket,
    TransferEngine,
)

NBYTES = 4096
LOAD = Priority.CRITICAL


class Rig:
    """One slot with memory, two lanes, and two streams that compute."""

    def __init__(self, **options):
        self.device = AcceleratorDevice(torch.device("hpu"))
        self.counters = Counters()
        self.engine = TransferEngine(self.device, self.counters, **options)
        self.main = self.device.current_stream()
        self.side = self.device.new_stream()
        self.slot, self.buffer = self.new_slot()

    def new_slot(self, number=0):
        slot = Slot(number, NBYTES)
        self.engine.adopt(slot)
        return slot, self.engine.allocate(NBYTES)

    def host(self, value):
        return self.device.pinned(NBYTES).fill_(value)

    def load(self, value, priority=LOAD):
        return self.engine.load(self.slot, self.buffer, self.host(value), priority)

    def use(self, stream, action=torch.sum):
        """Read or write the slot as a block's user does, and return the result."""
        result = self.read(stream, action)
        self.engine.release(self.slot, stream)
        return result

    def read(self, stream, action=torch.sum):
        self.engine.await_filled(self.slot, stream)
        with stream:
            return action(self.buffer)


def is_filled_with(result, value):
    torch.accelerator.synchronize()
    return result.item() == value * NBYTES


# ----------------------------------------------------------------------------- hazards


def read_after_load(rig):
    rig.load(1)
    assert is_filled_with(rig.use(rig.main), 1)


def load_after_read(rig):
    rig.load(1)
    first = rig.use(rig.main)
    rig.load(2)
    second = rig.use(rig.main)
    assert is_filled_with(first, 1)
    assert is_filled_with(second, 2)


def load_parts_after_read(rig):
    rig.load(1)
    first = rig.use(rig.main)
    parts = [(0, NBYTES // 2), (NBYTES // 2, NBYTES)]
    rig.engine.load_parts(rig.slot, rig.buffer, rig.host(2), parts)
    second = rig.use(rig.main)
    assert is_filled_with(first, 1)
    assert is_filled_with(second, 2)


def load_after_two_readers(rig):
    rig.load(1)
    rig.use(rig.main)
    rig.use(rig.side)
    rig.load(2)


def load_after_interleaved_readers(rig):
    """The first reader reads again after the second has come."""
    rig.load(1)
    rig.use(rig.side)
    rig.use(rig.main)
    rig.use(rig.side)
    rig.load(2)


def load_after_a_reader_that_went_on_with_another_stream(rig):
    rig.load(1)
    rig.read(rig.side)
    rig.use(rig.main)
    rig.load(2)


def load_after_a_release_on_another_stream(rig):
    rig.load(1)
    rig.read(rig.side)
    rig.engine.release(rig.slot, rig.main)
    rig.load(2)


def load_after_reads_without_a_use(rig):
    """A pass ends where all streams have come to that have read what stays."""
    rig.load(1)
    rig.read(rig.main)
    rig.side.wait_stream(rig.main)
    with rig.side:
        torch.sum(rig.buffer)
    with torch.Stream("hpu") as ends:
        ends.wait_stream(rig.side)
        rig.engine.await_filled(rig.slot, ends)
    rig.engine.release(rig.slot, rig.main)
    rig.load(2)


def save_after_load(rig):
    home = rig.host(9)
    rig.load(1)
    rig.engine.save(rig.slot, rig.buffer, home).wait_host()
    assert home.eq(1).all()


def save_after_write(rig):
    home = rig.host(9)
    rig.load(1)
    rig.use(rig.main, torch.Tensor.zero_)
    rig.engine.save(rig.slot, rig.buffer, home).wait_host()
    assert home.eq(0).all()


def load_after_save(rig):
    home = rig.host(9)
    rig.load(1)
    rig.use(rig.main)
    ticket = rig.engine.save(rig.slot, rig.buffer, home)
    rig.load(2)
    ticket.wait_host()
    assert home.eq(1).all()


def write_while_a_copy_home_is_under_way(rig):
    """By the stream that has read the slot before, and by another one."""
    for stream in (rig.main, rig.side):
        home = rig.host(9)
        rig.load(1)
        rig.use(rig.main)
        ticket = rig.engine.save(rig.slot, rig.buffer, home)
        rig.use(stream, torch.Tensor.zero_)
        ticket.wait_host()
        assert home.eq(1).all()


def read_after_reload_by_the_same_stream(rig):
    for value in (1, 2):
        rig.load(value)
        assert is_filled_with(rig.use(rig.main), value)


def read_by_a_second_stream(rig):
    rig.load(1)
    rig.use(rig.main)
    assert is_filled_with(rig.use(rig.side), 1)


def free_after_read(rig):
    rig.load(1)
    rig.use(rig.main)
    rig.engine.retire(rig.slot)
    rig.buffer = None


def free_after_a_read_behind_its_release(rig):
    """By a thread between two passes, while another model asks for the memory."""
    rig.load(1)
    rig.use(rig.main)
    rig.buffer.sum()
    rig.engine.retire(rig.slot)
    rig.buffer = None


def reuse_by_another_slot_after_read(rig):
    rig.load(1)
    rig.use(rig.main)
    rig.engine.retire(rig.slot)
    rig.slot, _ = rig.new_slot(1)
    rig.load(2)


def free_by_a_holder_after_it_read(rig):
    """Somebody kept a view when the slot was given up, and uses it once more."""
    rig.load(1)
    rig.use(rig.main)
    kept = rig.buffer[:100]
    rig.engine.disown(rig.buffer, rig.slot)
    rig.buffer = None
    kept.sum()
    del kept


def free_by_a_holder_on_the_stream_that_read(rig, saves=0):
    """Who gave the slot up, for another model, runs on a stream of its own."""
    rig.load(1)
    rig.read(rig.side)
    for number in range(saves):
        rig.engine.release(rig.slot, rig.main)
        rig.engine.save(rig.slot, rig.buffer, rig.host(8 + number)).wait_host()
    leave_to_a_holder(rig, rig.main)


def leave_to_a_holder(rig, stream):
    """A stream gives the slot up; another one reads what somebody has kept of it."""
    kept = rig.buffer[:100]
    rig.engine.release(rig.slot, stream)
    rig.engine.disown(rig.buffer, rig.slot)
    rig.buffer = None
    with rig.side:
        kept.sum()
    del kept


def free_by_a_holder_on_the_stream_that_read_before_it_came_home(rig):
    """Twice: it was changed again meanwhile."""
    free_by_a_holder_on_the_stream_that_read(rig, saves=2)


def free_by_a_holder_on_a_stream_that_read_without_a_use(rig):
    """It gave the slot up last, and is not the one that waited for it last."""
    rig.load(1)
    rig.read(rig.main)
    rig.side.wait_stream(rig.main)
    leave_to_a_holder(rig, rig.side)


def free_by_a_holder_of_what_was_in_no_slot(rig):
    """Only the stream that is current when it is left to its holder has read it."""
    with rig.side:
        made = torch.ones(NBYTES, dtype=torch.uint8, device="hpu")
    rig.main.wait_stream(rig.side)
    made.sum()
    rig.engine.disown(made)
    del made
    with rig.side:
        other = torch.zeros(NBYTES, dtype=torch.uint8, device="hpu")
    rig.device.synchronize()
    del other


def load_after_a_release_behind_a_copy_home(rig):
    """By a stream that has read the slot, and has not waited for the lane since."""
    home = rig.host(9)
    rig.load(1)
    rig.use(rig.main)
    ticket = rig.engine.save(rig.slot, rig.buffer, home)
    rig.engine.release(rig.slot, rig.main)
    rig.load(2)
    ticket.wait_host()
    assert home.eq(1).all()


def read_what_another_stream_has_written(rig):
    """By a stream that has waited for the slot's bytes already, and by a new one."""
    for waited in (True, False):
        rig.load(1)
        rig.use(rig.main)
        if waited:
            rig.use(rig.side)
            rig.main.wait_stream(rig.side)
        with rig.main:
            rig.buffer.zero_()
        rig.engine.note_write(rig.slot, rig.main)
        assert is_filled_with(rig.use(rig.side), 0)


def carry_home_what_a_stream_makes(rig):
    """The copy waits for the maker, and the memory for the copy."""
    home = rig.host(9)
    with rig.side:
        made = torch.full((NBYTES,), 3, dtype=torch.uint8, device="hpu")
    rig.engine.carry_home(made, home, block=0, maker=rig.side, shared=False)
    del made
    with rig.side:
        other = torch.zeros(NBYTES, dtype=torch.uint8, device="hpu")
    rig.engine.drain()
    assert home.eq(3).all()
    del other


def carry_home_what_two_streams_make(rig):
    """What the second one makes waits for the copy, too."""
    homes = [rig.host(9), rig.host(9)]
    for stream, home in zip((rig.side, rig.main), homes, strict=True):
        with stream:
            made = torch.full((NBYTES,), 3, dtype=torch.uint8, device="hpu")
        rig.engine.carry_home(made, home, block=0, maker=stream, shared=False)
        del made
        with stream:
            other = torch.zeros(NBYTES, dtype=torch.uint8, device="hpu")
    rig.engine.drain()
    assert all(home.eq(3).all() for home in homes)
    del other


def carry_home_more_than_is_kept(rig):
    """Memory comes back to its maker behind the copies of the group before."""
    homes = [rig.host(9) for _ in range(6)]
    for value, home in enumerate(homes):
        with rig.side:
            made = torch.full((NBYTES,), value, dtype=torch.uint8, device="hpu")
        rig.engine.carry_home(made, home, block=0, maker=rig.side, shared=False)
        del made
    rig.engine.drain()
    assert [int(home[-1]) for home in homes] == list(range(6))


def carry_home_what_its_maker_goes_on_to_change(rig):
    """The maker, who shares the memory, waits for the copy."""
    home = rig.host(9)
    with rig.side:
        made = torch.full((NBYTES,), 3, dtype=torch.uint8, device="hpu")
    rig.engine.carry_home(made.view(-1), home, block=0, maker=rig.side, shared=True)
    with rig.side:
        made.add_(1)
    rig.engine.drain()
    assert home.eq(3).all()


def send_a_group_home_and_bring_it_back(rig):
    """The way out waits for the maker, the way back for the way out and its target."""
    home = rig.host(9)
    with rig.side:
        made = torch.full((NBYTES,), 3, dtype=torch.uint8, device="hpu")
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="hpu")
    left = rig.engine.send_group([(made, home)], makers=[rig.side])
    arrived = rig.engine.bring_group(home, target, after=left, maker=rig.main)
    rig.main.wait_event(arrived)
    total = target.sum()
    rig.engine.drain()
    assert is_filled_with(total, 3)
    del made


def change_the_host_behind_what_came_home(rig):
    """Who waits for a copy home may write to what loads before it have read."""
    image, home = rig.host(1), rig.host(9)
    made = torch.full((NBYTES,), 3, dtype=torch.uint8, device="hpu")
    rig.engine.load(rig.slot, rig.buffer, image, LOAD)
    rig.engine.hold_home()
    rig.engine.send_group([(made, home)], makers=[rig.main]).synchronize()
    image.fill_(2)
    assert is_filled_with(rig.use(rig.main), 1)


HAZARDS = (
    change_the_host_behind_what_came_home,
    send_a_group_home_and_bring_it_back,
    *(carry_home_what_a_stream_makes, carry_home_what_its_maker_goes_on_to_change),
    *(carry_home_what_two_streams_make, carry_home_more_than_is_kept),
    *(read_after_load, load_after_read, load_after_two_readers, save_after_load),
    *(load_after_interleaved_readers, save_after_write, load_after_save),
    write_while_a_copy_home_is_under_way,
    free_by_a_holder_on_the_stream_that_read_before_it_came_home,
    *(read_after_reload_by_the_same_stream, read_by_a_second_stream, free_after_read),
    *(reuse_by_another_slot_after_read, free_by_a_holder_after_it_read),
    free_after_a_read_behind_its_release,
    load_after_reads_without_a_use,
    free_by_a_holder_on_a_stream_that_read_without_a_use,
    *(free_by_a_holder_of_what_was_in_no_slot, read_what_another_stream_has_written),
    load_after_a_release_behind_a_copy_home,
    load_after_a_reader_that_went_on_with_another_stream,
    *(load_after_a_release_on_another_stream, free_by_a_holder_on_the_stream_that_read),
)

# The line that closes each hazard, by the method it stands in.
GUARDS = {
    ("load", "stream.wait_event(slot._drained)"): (load_after_read, load_after_save),
    ("load_parts", "stream.wait_event(slot._drained)"): (load_parts_after_read,),
    ("await_filled", "stream.wait_event(slot._filled)"): (
        *(read_after_load, read_after_reload_by_the_same_stream),
        read_by_a_second_stream,
    ),
    ("await_filled", "self._mark(slot, seen_by)"): (
        load_after_a_reader_that_went_on_with_another_stream,
    ),
    ("release", "self._mark(slot, seen_by)"): (
        *(load_after_a_release_on_another_stream, load_after_reads_without_a_use),
    ),
    ("_mark", "stream.wait_event(slot._drained)"): (
        *(load_after_two_readers, load_after_interleaved_readers),
    ),
    ("save", "stream.wait_event(slot._filled)"): (save_after_load,),
    ("save", "stream.wait_event(slot._drained)"): (save_after_write,),
    ("retire", "self.h2d.stream.wait_event(self._ready)"): (
        *(free_after_read, reuse_by_another_slot_after_read),
        free_after_a_read_behind_its_release,
    ),
    ("disown", "buffer.record_stream(stream)"): (
        *(free_by_a_holder_after_it_read, free_by_a_holder_on_the_stream_that_read),
        free_by_a_holder_of_what_was_in_no_slot,
    ),
    ("_readers", "streams |= "): (
        free_by_a_holder_on_the_stream_that_read,
        free_by_a_holder_on_a_stream_that_read_without_a_use,
    ),
    ("_send_home", "self.d2h.stream.wait_event(self._ready)"): (
        carry_home_what_a_stream_makes,
    ),
    ("carry_home", "source.record_stream(stream)"): (carry_home_what_two_streams_make,),
    ("carry_home", "self._wait_home(maker, self._ready)"): (
        carry_home_what_its_maker_goes_on_to_change,
    ),
    ("send_group", "stream.wait_event(self._ready)"): (
        send_a_group_home_and_bring_it_back,
    ),
    ("bring_group", "stream.wait_event(after)"): (send_a_group_home_and_bring_it_back,),
    ("bring_group", "stream.wait_event(self._ready)"): (
        send_a_group_home_and_bring_it_back,
    ),
    ("hold_home", "self.d2h.stream.wait_event(self._ready)"): (
        change_the_host_behind_what_came_home,
    ),
    ("hold_home", "self._ready.record(self.h2d.stream)"): (
        change_the_host_behind_what_came_home,
    ),
    # Marks that later waits rely on.
    ("retire", "self._ready.record(stream)"): (free_after_read,),
    ("_send_home", "self._ready.record(maker)"): (carry_home_what_a_stream_makes,),
    ("_mark_of", "done.record(lane.stream)"): (send_a_group_home_and_bring_it_back,),
    ("carry_home", "self._ready.record(stream)"): (
        carry_home_what_its_maker_goes_on_to_change,
    ),
    ("load", "filled.record(stream)"): (read_after_load,),
    ("load", "slot.seen_by = "): (read_after_reload_by_the_same_stream,),
    ("_mark", "slot._drained.record(stream)"): (load_after_two_readers,),
    ("release", "slot._drained.record(stream)"): (load_after_read,),
    ("save", "slot._drained.record(stream)"): (load_after_save,),
    ("save", "slot._filled.record(stream)"): (write_while_a_copy_home_is_under_way,),
    ("note_write", "slot._filled.record(stream)"): (
        read_what_another_stream_has_written,
    ),
    ("note_write", "slot.seen_by = "): (read_what_another_stream_has_written,),
    ("save", "slot._reader = "): (load_after_a_release_behind_a_copy_home,),
    ("save", "slot.seen_by = "): (write_while_a_copy_home_is_under_way,),
    ("save", "slot._seen_before = "): (
        free_by_a_holder_on_the_stream_that_read_before_it_came_home,
    ),
}
REMOVALS = [
    pytest.param(method, line, hazard, id=f"{method}: {line} {hazard.__name__}")
    for (method, line), hazards in GUARDS.items()
    for hazard in hazards
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
def test_no_hazard_is_open(sim, hazard):
    rig = Rig()
    hazard(rig)
    assert sim.races() == []
    rig.device.synchronize()


def without(method, line, owner=TransferEngine):
    """Return a method of a class with one of its lines taken out."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    lines = source.splitlines()
    [number] = [n for n, text in enumerate(lines) if text.strip().startswith(line)]
    indent = len(lines[number]) - len(lines[number].lstrip())
    lines[number] = " " * indent + "pass"
    head = "from __future__ import annotations"  # nor are they evaluated in the module
    namespace = {}
    exec("\n".join([head, *lines]), vars(transfer).copy(), namespace)
    return namespace[method]


@pytest.mark.parametrize(("method", "line", "hazard"), REMOVALS)
def test_hazard_is_seen_when_its_guard_is_taken_out(
    sim, monkeypatch, method, line, hazard
):
    rig = Rig()
    monkeypatch.setattr(TransferEngine, method, without(method, line))
    with sim.expect_races():
        with contextlib.suppress(AssertionError):  # wrong values may be seen, too
            hazard(rig)
        rig.device.synchronize()


@pytest.mark.parametrize("line", ["wait(maker, crossed)", "filled.record("])
def test_hazard_is_seen_when_a_guard_of_what_is_kept_is_taken_out(
    sim, monkeypatch, line
):
    rig = Rig()
    monkeypatch.setattr(Flight, "sent", without("sent", line, Flight))
    with sim.expect_races():
        with contextlib.suppress(AssertionError):
            carry_home_more_than_is_kept(rig)
        rig.device.synchronize()


def test_of_what_goes_home_two_groups_are_kept_until_the_host_has_waited(sim):
    rig = Rig()
    rig.engine.flight.group_bytes = 2 * NBYTES
    free = torch.accelerator.memory_allocated()
    most = 0
    for _ in range(9):
        made = torch.zeros(NBYTES, dtype=torch.uint8, device="hpu")
        home = rig.host(0)
        rig.engine.carry_home(made, home, block=0, maker=rig.main, shared=False)
        del made
        most = max(most, torch.accelerator.memory_allocated() - free)
    assert most == 3 * NBYTES  # one group, and what fills the other
    rig.engine.await_home()
    assert torch.accelerator.memory_allocated() == free


def test_interrupt_anywhere_frees_nothing_that_is_going_home(sim):
    """A copy was queued, and its source not kept yet."""
    for number in itertools.count(1):
        rig = Rig()
        rig.engine.flight.group_bytes = 2 * NBYTES
        interrupted, taken = False, []
        for value in range(7):
            with rig.side:
                made = torch.full((NBYTES,), value, dtype=torch.uint8, device="hpu")
            home = rig.host(9)
            how = {"block": 0, "maker": rig.side, "shared": False}
            going = partial(rig.engine.carry_home, made, home, **how)
            where = (Flight.__module__, transfer.__name__) if value == 3 else ()
            try:
                with interrupted_at(number, *where):
                    going()
                taken.append((value, home))
            except KeyboardInterrupt:
                interrupted = True
            del going, made  # its maker has the memory for the next one
        rig.engine.await_home()
        for value, home in taken:
            assert home.eq(value).all()
        if not interrupted:
            break
    assert number > 20


def test_every_wait_of_the_lanes_is_a_guard_that_was_taken_out():
    # Those of wires are taken out in their own tests.
    wires = inspect.getsource(TransferEngine.load_wire)
    source = inspect.getsource(transfer).replace(wires, "")
    waits = source.count("wait_event(") + source.count("record_stream(")
    assert waits == sum("wait" in line or "_stream(" in line for _, line in GUARDS)


def test_guards_make_the_host_wait_for_nothing(sim):
    rig = Rig()
    before = sim.syncs()
    home = rig.host(0)
    for value in range(4):
        rig.load(value)
        rig.use(rig.main)
        rig.use(rig.side)
        rig.engine.save(rig.slot, rig.buffer, home)
    rig.engine.retire(rig.slot)
    assert sim.syncs() == before
    rig.device.synchronize()


def test_stream_waits_once_for_what_it_has_waited_for(sim, monkeypatch):
    rig = Rig()
    rig.load(1)
    waits = []

    class Reader:
        def wait_event(self, event):
            waits.append(event)

    reader = Reader()
    for _ in range(3):
        rig.engine.await_filled(rig.slot, reader)
    assert len(waits) == 1
    rig.device.synchronize()


def test_slot_memory_is_the_h2d_lanes(sim):
    """What that lane has written it may free without waiting for anybody."""
    rig = Rig()
    rig.load(1)
    rig.buffer = None


# -------------------------------------------------------------------- tickets, counters


def test_ticket_is_done_when_the_copy_is(sim):
    sim.configure(h2d_gbps=1e-3)  # 4 ms
    rig = Rig()
    ticket = rig.load(1)
    assert isinstance(ticket, Ticket)
    assert not ticket.done.query()
    ticket.wait_host()
    assert ticket.done.query()
    assert sim.host_seconds() >= 4e-3


def test_copies_are_counted_as_they_are_submitted(sim):
    rig = Rig()
    rig.load(1)
    rig.load(2)
    rig.engine.save(rig.slot, rig.buffer, rig.host(0))
    counters = rig.counters
    assert (counters.h2d_bytes, counters.h2d_copies) == (2 * NBYTES, 2)
    assert (counters.d2h_bytes, counters.d2h_copies) == (NBYTES, 1)
    rig.device.synchronize()


def test_copies_are_timed_while_there_is_a_stopwatch(sim):
    sim.configure(h2d_gbps=1e-3, d2h_gbps=1e-3, launch_us=0)
    rig = Rig()
    rig.load(1)
    rig.engine.stopwatch = Stopwatch(rig.device)
    rig.load(2)
    rig.slot.occupant = type("Block", (), {"index": 5})
    rig.engine.save(rig.slot, rig.buffer, rig.host(0))
    rig.device.synchronize()
    _, copies = rig.engine.stopwatch.resolve()
    assert [(c.block, c.lane, c.nbytes) for c in copies] == [
        (-1, "H2D", NBYTES),
        (5, "D2H", NBYTES),
    ]
    assert [c.duration_ms for c in copies] == [pytest.approx(4.096)] * 2


def test_copies_of_wide_elements_are_counted_and_timed_with_their_bytes(sim):
    rig = Rig()
    rig.engine.stopwatch = Stopwatch(rig.device)
    rig.load(1)
    made = torch.ones(NBYTES // 4, device="hpu")
    for _ in range(2):
        home = rig.host(0).view(torch.float32)
        rig.engine.send_group([(made, home)], makers=[rig.main])
        rig.engine.carry_home(made, home, block=5, maker=rig.main, shared=True)
    rig.device.synchronize()
    _, copies = rig.engine.stopwatch.resolve()
    assert [copy.nbytes for copy in copies] == [NBYTES] * 5
    assert rig.counters.d2h_bytes == 4 * NBYTES


def test_drained_lanes_read_no_host_memory_any_more(sim):
    rig = Rig()
    source, home = rig.host(1), rig.host(0)
    rig.engine.load(rig.slot, rig.buffer, source, LOAD)
    rig.engine.save(rig.slot, rig.buffer, home)
    other, buffer = rig.new_slot(1)
    rig.engine.load(other, buffer, source, LOAD)
    rig.engine.drain()
    assert home.eq(1).all()
    source.fill_(2)
    home.fill_(3)
    rig.device.synchronize()


def test_engine_works_on_the_host():
    device = HostDevice()
    engine = TransferEngine(device, Counters(), h2d_capacity=1)
    slot, buffer = Slot(0, 64), engine.allocate(64)
    engine.adopt(slot)
    stream = device.current_stream()
    for value in (1, 2):
        source = device.pinned(64).fill_(value)
        assert engine.load(slot, buffer, source, Priority.SPECULATIVE)
        engine.await_filled(slot, stream)
        buffer.add_(10)
        engine.release(slot, stream)
        home = device.pinned(64)
        engine.save(slot, buffer, home).wait_host()
        assert home.eq(value + 10).all()
    engine.retire(slot)
    engine.disown(buffer)


# ----------------------------------------------------------------------------- denials


def test_speculation_is_denied_by_value_while_the_lane_is_full(sim):
    rig = Rig(h2d_capacity=2)
    for value in (1, 2):
        assert isinstance(rig.load(value, Priority.SPECULATIVE), Ticket)
    for priority in (Priority.SPECULATIVE, Priority.BACKGROUND):
        assert rig.load(3, priority) is Denied.H2D_SLOTS_EXHAUSTED
    assert rig.engine.h2d.in_flight == 2
    assert rig.counters.h2d_copies == 2
    rig.device.synchronize()
    assert rig.engine.h2d.in_flight == 0
    assert isinstance(rig.load(3, Priority.SPECULATIVE), Ticket)
    rig.device.synchronize()


@pytest.mark.parametrize("priority", [Priority.CRITICAL, Priority.REQUIRED])
def test_demand_is_never_denied(sim, priority):
    rig = Rig(h2d_capacity=1)
    for value in range(5):
        assert isinstance(rig.load(value, priority), Ticket)
    rig.device.synchronize()


def test_write_back_is_never_denied_and_the_lane_forgets_old_ones(sim):
    rig = Rig(d2h_capacity=1)
    rig.load(1)
    home = rig.host(0)
    for _ in range(5):
        assert isinstance(rig.engine.save(rig.slot, rig.buffer, home), Ticket)
    assert len(rig.engine.d2h._in_flight) == 1
    rig.device.synchronize()


def test_speculation_is_told_that_the_lane_home_is_full(sim):
    rig = Rig(d2h_capacity=1)
    rig.load(1)
    assert rig.engine.deny_home(Priority.SPECULATIVE) is None
    rig.engine.save(rig.slot, rig.buffer, rig.host(0))
    assert rig.engine.deny_home(Priority.SPECULATIVE) is Denied.D2H_SLOTS_EXHAUSTED
    assert rig.engine.deny_home(Priority.REQUIRED) is None
    rig.device.synchronize()
    assert rig.engine.deny_home(Priority.SPECULATIVE) is None


def test_without_a_capacity_nothing_is_denied_and_nothing_kept(sim):
    rig = Rig()
    for value in range(5):
        assert isinstance(rig.load(value, Priority.BACKGROUND), Ticket)
    assert not rig.engine.h2d.is_full()
    rig.engine.save(rig.slot, rig.buffer, rig.host(0))
    assert not rig.engine.h2d._in_flight
    assert not rig.engine.d2h._in_flight
    rig.device.synchronize()


def test_copy_that_a_use_waits_for_does_not_fill_the_lane(sim):
    """The host is ahead of the device: nothing it has queued is done yet."""
    rig = Rig(h2d_capacity=1)
    rig.load(1, Priority.SPECULATIVE)
    rig.engine.await_filled(rig.slot, rig.main)
    other, buffer = rig.new_slot(1)
    ticket = rig.engine.load(other, buffer, rig.host(2), Priority.SPECULATIVE)
    assert isinstance(ticket, Ticket)
    rig.device.synchronize()


def test_what_goes_home_after_a_landing_begins_a_group_of_any_stream(sim):
    rig = Rig()
    flight, source = rig.engine.flight, torch.ones(NBYTES, device="hpu")
    flight.group_bytes = 2 * source.nbytes
    assert flight.keep(source, rig.main)
    flight.sent(type(rig.main).wait_event)
    assert not flight.keep(source, rig.side)
    rig.engine.await_home()
    assert flight.keep(source, rig.side)
    flight.sent(type(rig.main).wait_event)
    assert repr(flight) == "Flight(1, 0 tensors)"
    rig.engine.await_home()
