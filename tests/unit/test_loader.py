"""Loaders: store -> pinned -> device and back, with threads that only read."""

import concurrent.futures
import itertools
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

from counting import calls_of
from interrupts import interrupted_at
from stagehand.core.arena import Arena
from stagehand.core.device import AcceleratorDevice, HostDevice
from stagehand.core.layout import layout_of
from stagehand.core.ledger import Account
from stagehand.core.states import BlockState
from stagehand.core.stopwatch import Stopwatch
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import Priority, Slot, Ticket, TransferEngine
from stagehand.core.workers import WorkerGroup
from stagehand.errors import ReadError, StagehandInternalError, StagehandOOMError
from stagehand.residency import lane_loader
from stagehand.residency.blocks import Block
from stagehand.residency.host_loader import HostLoader
from stagehand.residency.lane_loader import LaneLoader
from stagehand.residency.loader import has_sample, sample
from stagehand.stores.module import ModuleStore

NBYTES = 4096
AHEAD = Priority.SPECULATIVE
NOW = Priority.CRITICAL
PATIENCE = 120  # seconds until a test gives up


class Disk(ModuleStore):
    """A store whose reads can be held up, can fail, and are counted."""

    def __init__(self, layout, hosts, image=None):
        super().__init__(layout, hosts, image)
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.failure = None
        self.reads = 0
        self.written = 0
        self.told = []

    def read_into(self, image):
        self.began.set()
        assert self.gate.wait(PATIENCE)
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        super().read_into(image)
        return self._layout.nbytes

    def write_back(self, image):
        self.written += 1
        super().write_back(image)

    def edited(self, index):
        self.told.append(index)


class Rig:
    """Blocks of one tensor each, filled with their own number, and a loader."""

    def __init__(self, on_host=False, slabs=2, workers=1, numbers=range(4), **lanes):
        self.device = HostDevice() if on_host else accelerator()
        self.counters = Counters()
        self.engine = TransferEngine(self.device, self.counters, **lanes)
        account = Account("pinned memory", 100 * NBYTES)
        self.pinned = Arena("pinned memory", self.device.pinned, account)
        self.workers = WorkerGroup("reader", workers)
        parts = (self.engine, self.workers, self.counters)
        if on_host:
            self.loader = HostLoader(*parts)
        else:
            parts = (self.engine, self.pinned, self.workers, self.counters)
            self.loader = LaneLoader(*parts)
            self.loader.set_slabs(slabs, NBYTES)
        self.leases = []
        self.blocks = [self.new_block(number) for number in numbers]

    def new_block(self, number, nbytes=NBYTES):
        weight = torch.full((nbytes // 4,), float(number))
        layout = layout_of([("weight", weight)])
        block = Block(number, f"blocks.{number}", layout, [weight])
        block.set_store(Disk(layout, [weight.clone()]))
        block.clean_versions = block.all_versions()
        block.versions = block.read_versions()
        block.point_to_host()
        self.give_slot(block)
        return block

    def pin(self, block):
        lease = self.pinned.acquire(block.nbytes, "image")
        self.leases.append(lease)
        layout = block.layout
        layout.pack(block.store.hosts, lease.buffer)
        block.set_store(Disk(layout, layout.views(lease.buffer), lease.buffer))
        block.point_to_host()

    def give_slot(self, block):
        slot = Slot(block.index, block.nbytes)
        account = Account("device", block.nbytes)
        slot.lease = Arena("device", self.engine.allocate, account).acquire(
            block.nbytes, block.name
        )
        self.leases.append(slot.lease)
        self.engine.adopt(slot)
        block.set_views(slot)

    def start(self, block, priority=NOW):
        slot = block.views_in
        if not self.loader.start(block, slot, priority):
            return False
        block.slot, slot.occupant = slot, block
        return True

    def on_device(self, block):
        """Return the number that fills the block's slot."""
        self.loader.finish(block)
        self.engine.await_filled(block.slot, self.device.current_stream())
        value = block.views[0].mean().item()
        self.engine.release(block.slot, self.device.current_stream())
        return value

    def let_jobs_end(self):
        self.workers.submit(int).result(PATIENCE)  # one thread: the last in its queue

    def close(self):
        for block in self.blocks:
            block.store.gate.set()
        self.device.synchronize()
        self.loader.close()
        self.workers.close()
        for block in self.blocks:
            block.set_views(None)
            block.set_store(None)
        for lease in self.leases:
            lease.release()
        self.pinned.close()


def accelerator():
    return AcceleratorDevice(torch.device("hpu"))


@contextmanager
def opened_soon(block):
    """Let a block's reader go on in a moment, while somebody waits for it."""
    opening = threading.Timer(0.05, block.store.gate.set)
    opening.start()
    yield
    opening.join()


@pytest.fixture
def lane(sim):
    rigs = []

    def make(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
        rig.__dict__.clear()


@pytest.fixture
def host():
    rig = Rig(on_host=True)
    yield rig
    rig.close()


# -------------------------------------------------------------------- lanes: staging


def test_pinned_block_loads_at_once_without_a_stage(lane):
    rig = lane()
    block = rig.blocks[3]
    rig.pin(block)
    assert not rig.loader.request(block)
    assert rig.start(block, AHEAD)
    assert block.state is BlockState.PREFETCHING
    assert rig.on_device(block) == 3
    assert (block.store.reads, rig.counters.disk_bytes) == (0, 0)
    assert rig.counters.h2d_bytes == NBYTES


def test_requested_block_is_read_ahead_and_sent_when_it_is_there(lane):
    rig = lane()
    block = rig.blocks[1]
    block.store.gate.clear()
    assert rig.loader.request(block)
    assert block.state is BlockState.HOST_STAGED
    assert rig.loader.staged() == [block]
    assert not rig.start(block, AHEAD)  # not read yet: speculation does not wait
    block.store.gate.set()
    rig.let_jobs_end()
    assert rig.start(block, AHEAD)
    assert block.state is BlockState.PREFETCHING
    assert rig.loader.staged() == []
    assert rig.on_device(block) == 1
    assert (block.store.reads, rig.counters.disk_bytes) == (1, NBYTES)


def test_speculation_that_was_not_requested_is_requested(lane):
    rig = lane()
    assert not rig.start(rig.blocks[1], AHEAD)
    assert rig.loader.staged() == [rig.blocks[1]]


def test_demand_waits_for_the_reader(lane):
    rig = lane()
    block = rig.blocks[2]
    block.store.gate.clear()
    with opened_soon(block):
        assert rig.start(block)
    assert rig.on_device(block) == 2


def test_request_is_refused_when_it_is_made_already_or_there_is_no_slab(lane):
    rig = lane(slabs=2)
    assert rig.loader.request(rig.blocks[0])
    assert not rig.loader.request(rig.blocks[0])
    assert rig.loader.request(rig.blocks[1])
    assert not rig.loader.request(rig.blocks[2])
    assert rig.pinned.leased_bytes == 2 * NBYTES


def test_slabs_are_reserved_at_once_made_when_they_are_needed_and_used_again(lane, sim):
    before = sim.pinned_bytes()
    rig = lane(slabs=3)
    assert rig.pinned.leased_bytes == 3 * NBYTES
    assert sim.pinned_bytes() == before
    for number in range(4):
        block = rig.blocks[number]
        assert rig.start(block)
        assert rig.on_device(block) == number
    assert sim.pinned_bytes() == before + NBYTES
    assert rig.pinned.leased_bytes == 3 * NBYTES


def test_slabs_are_as_many_as_there_is_room_for(lane):
    """Others share it, and may have taken theirs since the slabs were planned."""
    rig = lane(slabs=0)
    other = rig.pinned.acquire(98 * NBYTES, "another model")
    rig.loader.set_slabs(3, NBYTES)
    assert rig.pinned.leased_bytes == 100 * NBYTES
    for block in rig.blocks:
        assert rig.start(block)
        assert rig.on_device(block) == block.index
    other.release()


def test_without_room_for_any_slab_staging_is_refused_and_tried_again(lane):
    """It was waited for, for ever: nobody had a reason to give any back."""
    rig = lane(slabs=0)
    other = rig.pinned.acquire(100 * NBYTES, "another model")
    with pytest.raises(StagehandOOMError, match=r"0 B left.*4.10 KB; raise pinned_cap"):
        rig.loader.set_slabs(3, NBYTES)
    other.release()
    rig.loader.set_slabs(3, NBYTES)
    assert rig.start(rig.blocks[0])
    assert rig.on_device(rig.blocks[0]) == 0


def test_demand_takes_the_slab_of_the_block_that_was_staged_last(lane):
    rig = lane(slabs=2)
    first, last, wanted, _ = rig.blocks
    for block in (first, last):
        rig.loader.request(block)
    assert rig.start(wanted)
    assert first.state is BlockState.HOST_STAGED
    assert last.state is BlockState.UNLOADED
    assert [rig.on_device(wanted), rig.loader.staged()] == [2, [first]]
    assert rig.start(last)
    assert rig.on_device(last) == 1


def test_stolen_slab_is_not_written_by_its_old_reader_any_more(lane):
    rig = lane(slabs=1, workers=2)
    slow, wanted, *_ = rig.blocks
    slow.store.gate.clear()
    rig.loader.request(slow)
    assert slow.store.began.wait(PATIENCE)
    with opened_soon(slow):
        assert rig.start(wanted)
    assert rig.on_device(wanted) == 1


def test_reading_ahead_does_not_wait_for_a_copy_while_there_is_another_slab(lane, sim):
    sim.configure(h2d_gbps=1e-3)
    rig = lane(slabs=3)
    first, second, third, fourth = rig.blocks
    rig.start(first)
    for block in (second, third):
        rig.loader.request(block)
    before = sim.syncs()
    rig.let_jobs_end()
    assert sim.syncs() == before
    assert rig.pinned.leased_bytes == 3 * NBYTES
    [sent] = (slab.lease for slab in rig.loader._slabs if slab.block is None)
    for block in (third, second):
        rig.start(block)
    rig.loader.request(fourth)
    assert rig.loader._staged[3].lease is sent  # its copy ends first
    rig.start(fourth)
    assert [rig.on_device(block) for block in rig.blocks] == [0, 1, 2, 3]


def test_demand_makes_a_slab_where_nothing_was_planned_to_be_staged(lane):
    rig = lane(slabs=0)
    assert not rig.loader.stages
    assert not rig.loader.request(rig.blocks[1])
    assert rig.start(rig.blocks[1])
    assert rig.on_device(rig.blocks[1]) == 1


def test_slab_is_filled_again_only_after_its_copy_is_done(lane, sim):
    sim.configure(h2d_gbps=1e-3)
    rig = lane(slabs=1)
    for block in rig.blocks[:3]:
        assert rig.start(block)
    assert [rig.on_device(block) for block in rig.blocks[:3]] == [0, 1, 2]
    assert sim.races() == []


def test_interrupted_note_of_reads_is_made_when_it_is_asked_for_again(lane, sim):
    rig = lane()
    block = rig.blocks[0]
    rig.pin(block)
    for number in itertools.count(1):
        assert rig.start(block)
        interrupted = False
        try:
            with interrupted_at(number, LaneLoader.note_reads):
                rig.loader.note_reads()
        except KeyboardInterrupt:
            interrupted = True
            rig.loader.note_reads()
        rig.loader.await_reads()
        block.image.fill_(number)
        rig.on_device(block)
        block.state = BlockState.UNLOADED
        assert sim.races() == [], number
        if not interrupted:
            break
    assert number == 4


@pytest.mark.parametrize("staged", [False, True])
def test_resized_slabs_wait_for_their_copies_and_drop_what_is_staged(lane, sim, staged):
    sim.configure(h2d_gbps=1e-3)
    rig = lane(slabs=2)
    rig.start(rig.blocks[0])
    if staged:
        rig.loader.request(rig.blocks[1])
    rig.loader.set_slabs(2, 2 * NBYTES)
    assert rig.blocks[1].state is BlockState.UNLOADED
    assert rig.pinned.leased_bytes == 2 * 2 * NBYTES
    assert rig.pinned.kept_bytes == (2 if staged else 1) * NBYTES
    lease = rig.pinned.acquire_nowait(NBYTES, "another")
    lease.buffer.fill_(9)
    lease.release()
    assert rig.on_device(rig.blocks[0]) == 0


def test_interrupted_copy_is_over_when_its_slab_is_given_back(lane):
    """It had no ticket, so nobody knew that it reads the slab."""
    sending = LaneLoader._start_staged, TransferEngine.load
    for number in itertools.count(1):
        rig = lane(slabs=1)
        interrupted = False
        try:
            with interrupted_at(number, *sending):
                rig.start(rig.blocks[0])
        except KeyboardInterrupt:
            interrupted = True
        rig.loader.close()
        lease = rig.pinned.acquire_nowait(NBYTES, "another")
        lease.buffer.fill_(9)
        rig.leases.append(lease)
        rig.device.synchronize()
        if not interrupted:
            break
    assert number > 20


@pytest.mark.parametrize("kept", [False, True])
def test_slabs_are_given_back_after_a_wait_for_their_copies_was_interrupted(
    lane, monkeypatch, kept
):
    rig = lane(slabs=2)
    rig.loader.keep(rig.blocks[:2] if kept else [])
    for block in rig.blocks[:2]:
        assert rig.start(block)
    waits = []

    def interrupt(_):
        waits.append(None)
        if len(waits) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "wait_host", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rig.loader.set_slabs(0, 0)
    rig.loader.set_slabs(0, 0)
    assert rig.pinned.leased_bytes == 0


def test_fewer_slabs_are_fewer_at_once(lane):
    rig = lane(slabs=2)
    for block in rig.blocks[:2]:
        rig.loader.request(block)
    rig.loader.set_slabs(1, NBYTES)
    assert rig.pinned.leased_bytes == NBYTES
    assert [rig.loader.request(block) for block in rig.blocks[:2]] == [True, False]


def test_same_slabs_keep_what_is_staged(lane):
    rig = lane(slabs=2)
    rig.loader.request(rig.blocks[0])
    rig.loader.set_slabs(2, NBYTES)
    assert rig.loader.staged() == [rig.blocks[0]]


def test_block_larger_than_a_slab_is_read_into_memory_of_its_own(lane):
    rig = lane()
    large = rig.new_block(7, 3 * NBYTES)
    rig.blocks.append(large)
    assert rig.start(large)
    assert rig.on_device(large) == 7
    assert rig.counters.disk_bytes == 3 * NBYTES
    assert not any(slab.lease.is_made for slab in rig.loader._slabs)


def test_full_lane_denies_speculation_and_keeps_the_stage(lane):
    rig = lane(h2d_capacity=1)
    pinned, staged = rig.blocks[:2]
    rig.pin(pinned)
    assert rig.start(pinned, AHEAD)
    rig.loader.request(staged)
    rig.let_jobs_end()
    assert not rig.start(staged, AHEAD)
    assert rig.loader.staged() == [staged]
    assert rig.start(staged)
    assert rig.on_device(staged) == 1
    assert rig.counters.disk_bytes == NBYTES


def test_denied_pinned_block_stays_where_it_is(lane):
    rig = lane(h2d_capacity=1)
    for block in rig.blocks[:2]:
        rig.pin(block)
    assert rig.start(rig.blocks[0], AHEAD)
    assert not rig.start(rig.blocks[1], AHEAD)
    assert rig.blocks[1].state is BlockState.UNLOADED


# ------------------------------------------------------------------- lanes: failures


def test_failure_of_a_reader_reaches_the_demand_and_not_the_speculation(lane):
    rig = lane()
    block = rig.blocks[1]
    block.store.failure = ReadError("model.safetensors cannot be read")
    rig.loader.request(block)
    rig.let_jobs_end()
    for _ in range(2):
        assert not rig.start(block, AHEAD)
    with pytest.raises(ReadError, match="cannot be read"):
        rig.start(block)
    assert block.state is BlockState.UNLOADED
    assert rig.loader.staged() == []
    assert rig.counters.disk_bytes == 0


def test_read_that_failed_ahead_of_time_is_tried_again_on_demand(lane):
    rig = lane()
    block = rig.blocks[1]
    block.store.failure = ReadError("the disk is away")
    rig.loader.request(block)
    rig.let_jobs_end()
    block.store.failure = None
    assert rig.start(block)
    assert rig.on_device(block) == 1
    assert block.store.reads == 2


def test_forgotten_block_is_not_read_any_more_when_that_returns(lane):
    rig = lane()
    running, waiting = rig.blocks[:2]
    running.store.gate.clear()
    for block in (running, waiting):
        rig.loader.request(block)
    assert running.store.began.wait(PATIENCE)
    with opened_soon(running):
        rig.loader.forget(running)
        assert running.store.reads == 1
    waiting.store.gate.clear()
    rig.loader.forget(waiting)
    waiting.store.gate.set()
    assert {running.state, waiting.state} == {BlockState.UNLOADED}
    rig.loader.forget(waiting)  # nothing to forget


def test_closed_loader_has_given_everything_back(lane):
    rig = lane()
    rig.start(rig.blocks[0])
    rig.loader.request(rig.blocks[1])
    rig.loader.close()
    rig.loader.close()
    assert rig.pinned.leased_bytes == 0
    assert rig.blocks[1].state is BlockState.UNLOADED


def test_block_without_a_place_or_a_store_is_our_bug(lane):
    rig = lane()
    block = rig.blocks[0]
    with pytest.raises(StagehandInternalError, match=r"'blocks\.0' is nowhere"):
        rig.loader.save(block)
    slot = block.views_in
    block.set_views(None)
    with pytest.raises(StagehandInternalError, match=r"'blocks\.0' has no place in"):
        rig.loader.start(block, slot, NOW)
    block.set_store(None)
    with pytest.raises(StagehandInternalError, match=r"'blocks\.0' has no store"):
        sample(block)
    block.set_store(Disk(block.layout, [torch.zeros(NBYTES // 4)]))


# ------------------------------------------------------------------ edits, saving


@pytest.mark.parametrize("on_host", [False, True])
def test_store_is_told_of_edits_before_it_is_read(sim, on_host):
    rig = Rig(on_host)
    block = rig.blocks[1]
    block.tensors[0].add_(10)
    assert rig.start(block)
    assert block.store.told == [0]
    assert not block.is_changed()
    assert rig.on_device(block) == 11
    rig.close()


def test_edit_after_a_block_was_staged_is_noticed(lane):
    rig = lane()
    block = rig.blocks[1]
    rig.loader.request(block)
    rig.let_jobs_end()
    block.tensors[0].add_(10)
    assert rig.start(block)
    assert block.is_changed()


def changed_on_device(rig, block):
    rig.start(block)
    rig.on_device(block)
    block.state = BlockState.EVICTING
    with torch.no_grad():
        block.views[0].fill_(99)
    rig.engine.release(block.slot, rig.device.current_stream())


@pytest.mark.parametrize("kind", ["pinned", "pageable", "host"])
def test_saved_block_is_home_when_save_returns(sim, kind):
    rig = Rig(on_host=kind == "host")
    block = rig.blocks[1]
    if kind == "pinned":
        rig.pin(block)
    changed_on_device(rig, block)
    rig.loader.save(block)
    assert (block.store.hosts[0] == 99).all()
    assert block.store.written == (kind != "pinned")  # straight into the image
    assert (rig.counters.d2h_bytes, rig.counters.d2h_copies) == (NBYTES, 1)
    rig.close()


def test_kept_block_that_was_changed_on_the_device_is_read_anew(lane, monkeypatch):
    """Where the system does not tell which pages of a mapping were written."""
    monkeypatch.setattr(lane_loader, "was_written", lambda _: False)
    rig = lane()
    block = rig.blocks[1]
    rig.loader.keep([block])
    for saves in (False, True):
        changed_on_device(rig, block)
        if saves:
            rig.loader.save(block)
        block.state = BlockState.UNLOADED
    assert block.store.reads == 1
    rig.start(block)
    assert rig.on_device(block) == 99


def kept_block(rig):
    """Return one whose bytes are kept in its slab, and that is not on the device."""
    block = rig.blocks[1]
    rig.loader.keep([block])
    rig.loader.request(block)
    rig.let_jobs_end()
    rig.loader.forget(block)
    return block


def test_kept_block_that_no_counter_tells_was_changed_is_read_anew(lane, monkeypatch):
    """By a fused optimizer, where the system does not tell which pages were written."""
    monkeypatch.setattr(lane_loader, "was_written", lambda _: False)
    rig = lane()
    block = kept_block(rig)
    block.store.hosts[0].numpy().fill(99)
    block.mark_changed()
    rig.start(block)
    assert rig.on_device(block) == 99


def test_what_a_read_that_failed_has_left_is_kept_for_nobody(lane, monkeypatch):
    """The system tells what was written as long as it can open one file more."""
    tells = [True, False]
    monkeypatch.setattr(lane_loader, "was_written", lambda _: tells.pop(0))
    rig = lane()
    block = kept_block(rig)
    block.store.failure = ReadError("gone")
    with pytest.raises(ReadError):
        rig.start(block)
    block.store.failure = None
    rig.start(block)
    assert rig.on_device(block) == 1
    assert block.store.reads == 3


def test_forgotten_block_is_staged_without_the_sample_of_before(lane):
    """Else values that are brought back are taken for those that were staged."""
    rig = lane()
    block = rig.blocks[1]
    rig.loader.request(block)
    block.seal = sample(block)
    rig.loader.forget(block)
    assert block.seal is None


@pytest.mark.parametrize("kind", ["pinned", "pageable", "host"])
def test_block_is_sent_home_without_the_host_only_into_its_pinned_image(sim, kind):
    rig = Rig(on_host=kind == "host")
    block = rig.blocks[1]
    if kind == "pinned":
        rig.pin(block)
    changed_on_device(rig, block)
    waits = sim.syncs()
    ticket = rig.loader.send_home(block)
    assert sim.syncs() == waits
    assert (ticket is not None) is (kind == "pinned")
    if ticket is not None:
        ticket.wait_host()
        assert (block.store.hosts[0] == 99).all()
    assert rig.counters.d2h_copies == (kind == "pinned")
    rig.close()


@pytest.mark.parametrize("kind", ["pinned", "pageable", "host"])
@pytest.mark.parametrize("value", [1.0, float("nan"), 0.0])
def test_block_that_is_saved_if_different_is_written_only_then(sim, kind, value):
    rig = Rig(on_host=kind == "host")
    block = rig.blocks[1]
    block.store.hosts[0].fill_(value)
    if kind == "pinned":
        rig.pin(block)
    rig.start(block)
    rig.on_device(block)
    rig.loader.save(block, only_if_different=True)
    assert block.store.written == 0
    copied = rig.counters.d2h_bytes  # an accelerator has to, for the host to compare
    assert copied == (0 if kind == "host" else NBYTES)
    with torch.no_grad():
        block.views[0][5] = -0.0 if value == 0 else 7.0
    rig.engine.release(block.slot, rig.device.current_stream())
    rig.loader.save(block, only_if_different=True)
    assert block.store.written == 1
    assert rig.counters.d2h_bytes == copied + NBYTES
    block.state = BlockState.EVICTING
    rig.close()


@pytest.mark.parametrize("pinned", [False, True])
def test_sample_shows_a_change_of_all_elements_whatever_made_it(lane, pinned):
    rig = lane()
    block = rig.blocks[1]
    if pinned:
        rig.pin(block)
    before = sample(block)
    assert has_sample(block, before)
    assert len(before) <= 1024
    block.tensors[0].data.mul_(1.5)
    assert not has_sample(block, before)


def test_sample_of_a_block_without_elements_is_empty(lane):
    weight = torch.empty(0)
    layout = layout_of([("weight", weight)])
    block = Block(0, "empty", layout, [weight])
    block.set_store(Disk(layout, [weight]))
    assert len(sample(block)) == 0


# --------------------------------------------------------------------------- the host


def test_on_the_host_demand_reads_at_once(host):
    block = host.blocks[1]
    assert not host.loader.request(block)
    assert host.loader.staged() == []
    assert host.start(block)
    assert block.state is BlockState.PREFETCHING
    assert host.on_device(block) == 1
    counters = host.counters
    assert (counters.disk_bytes, counters.h2d_bytes) == (NBYTES, NBYTES)


def test_on_the_host_a_thread_reads_ahead_into_the_slot(host):
    block = host.blocks[2]
    block.store.gate.clear()
    assert host.start(block, AHEAD)
    assert host.counters.h2d_copies == 0  # counted when it is there
    with opened_soon(block):
        assert host.on_device(block) == 2
    assert host.counters.h2d_copies == 1


def test_on_the_host_a_failed_read_is_tried_again_by_whoever_needs_it(host):
    first, second = host.blocks[:2]
    for block in (first, second):
        block.store.failure = ReadError("the disk is away")
        assert host.start(block, AHEAD)
    host.let_jobs_end()
    second.store.failure = None
    assert host.on_device(second) == 1
    with pytest.raises(ReadError, match="the disk is away"):
        host.loader.finish(first)


def test_on_the_host_a_failed_read_that_is_forgotten_keeps_no_memory_of_its_slot(host):
    """Its traceback did, uncounted, until the block was loaded again."""
    block, slot = host.blocks[1], host.blocks[1].views_in
    block.store.failure = ReadError("the disk is away")
    host.start(block, AHEAD)
    host.let_jobs_end()
    host.loader.forget(block)
    block.store.failure = None
    memory = weakref.ref(block.target)
    block.set_views(None)
    slot.views.clear()
    assert memory() is None
    block.set_views(slot)
    assert host.on_device(block) == 1


def test_on_the_host_no_thread_writes_a_forgotten_slot(host):
    block = host.blocks[1]
    block.store.gate.clear()
    host.start(block, AHEAD)
    assert block.store.began.wait(PATIENCE)
    with opened_soon(block):
        host.loader.forget(block)
        assert block.store.reads == 1
    block.views[0].fill_(5)
    host.let_jobs_end()
    assert block.views[0].mean() == 5
    assert host.on_device(block) == 1  # what was dropped is not taken for made


def test_on_the_host_an_interrupted_wait_leaves_a_job_to_forget(host, monkeypatch):
    """Else the thread would write a slot that has been given to another block."""
    block = host.blocks[1]
    block.store.gate.clear()
    host.start(block, AHEAD)
    assert block.store.began.wait(PATIENCE)

    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(concurrent.futures.Future, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            host.loader.finish(block)
    with opened_soon(block):
        host.loader.forget(block)
        assert block.store.reads == 1


@pytest.mark.parametrize("priority", [AHEAD, NOW])
def test_on_the_host_reads_are_timed_while_there_is_a_stopwatch(host, priority):
    host.engine.stopwatch = Stopwatch(host.device)
    host.engine.stopwatch.mark(host.device.current_stream())
    host.start(host.blocks[1], priority)
    host.on_device(host.blocks[1])
    _, [copy] = host.engine.stopwatch.resolve()
    assert (copy.block, copy.lane, copy.nbytes) == (1, "H2D", NBYTES)
    assert copy.duration_ms > 0


@pytest.mark.parametrize("priority", [AHEAD, NOW])
def test_on_the_host_timed_reads_use_events_again(priority, monkeypatch):
    """A service whose steps are timed kept two more for every block that was read."""
    rig = Rig(on_host=True, numbers=range(12))
    made = calls_of(monkeypatch, rig.device, "new_event")
    watch = rig.engine.stopwatch = Stopwatch(rig.device)
    watch.mark(rig.device.current_stream())
    for block in rig.blocks:
        rig.start(block, priority)
        rig.on_device(block)
        _, copies = watch.resolve()
        assert [copy.block for copy in copies] == [block.index]
    rig.close()
    assert len(made) == 1 + 1 + 2  # zero, the mark above, those of a read


def test_on_the_host_close_waits_for_the_readers(host):
    block = host.blocks[1]
    block.store.gate.clear()
    host.start(block, AHEAD)
    assert block.store.began.wait(PATIENCE)
    with opened_soon(block):
        host.loader.close()
        host.loader.close()
        assert block.store.reads == 1
