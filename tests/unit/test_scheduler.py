"""Scheduler: whatever happens, each use sees its own block's present bytes.

The state machines at the end let blocks be used, edited, kept and lost in any order, on
the simulated device and on the host, and compare with a list of plain tensors.
"""

import contextlib
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from equality import all_equal
from exploring import running
from interrupts import interrupted_at
from stagehand.core.arena import Arena
from stagehand.core.device import AcceleratorDevice, HostDevice
from stagehand.core.layout import layout_of
from stagehand.core.ledger import Account
from stagehand.core.limits import Limits
from stagehand.core.states import BlockState
from stagehand.core.stopwatch import Stopwatch
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import TransferEngine
from stagehand.errors import ConfigError, ReadError, StagehandOOMError
from stagehand.residency.blocks import Block
from stagehand.residency.host_loader import HostLoader
from stagehand.residency.lane_loader import LaneLoader
from stagehand.residency.masters import Masters
from stagehand.residency.mover import Mover
from stagehand.residency.order import Order
from stagehand.residency.scheduler import Scheduler
from stagehand.residency.steering import Steering
from stagehand.stores.module import ModuleStore
from stagehand.torch_private import storage_use_count

UNIT = 256  # bytes of a block with one small tensor
ON_DEVICE = (BlockState.PREFETCHING, BlockState.GPU_READY)
AWAY = (BlockState.UNLOADED, BlockState.HOST_STAGED)


class Job(Future):
    """What a reader thread would run; it runs as late as it can."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def run(self):
        if self.done():
            return
        try:
            self.set_result(self.call())
        except ReadError as error:
            self.set_exception(error)

    def result(self, timeout=None):
        self.run()
        return super().result(timeout)

    def exception(self, timeout=None):
        self.run()
        return super().exception(timeout)


class LateReaders:
    """Reader threads without threads: the same jobs at the same time in each run."""

    def __init__(self):
        self.jobs = []

    def hand(self, note, call, *args):
        self.jobs.append(Job(partial(call, *args)))
        note(self.jobs[-1])

    def drop(self, job):
        job.cancel()

    def run(self):
        for job in self.jobs:
            job.run()
        self.jobs.clear()


class Disk(ModuleStore):
    """A store whose reads fail while `failure` is set."""

    failure = None

    def read_into(self, image):
        if self.failure is not None:
            raise self.failure
        return super().read_into(image)


class Rig:
    """What a runtime wires, without model and hooks.

    Args:
        device: The simulated one, or the host.
        sizes: For every block the elements of its tensors. Block 0 always stays, and is
            not in the order.
        pinned: The blocks whose truth is in pinned memory; the others are staged.
        hosted: Blocks of which only rows are looked up, on the host.
        spare: The budget, in bytes over the smallest that can work.
        lookahead: Blocks to load ahead at most.
        slabs: For staging.
        inflight: Copies in flight before prefetches are denied.
        timed: Whether passes are timed until they need not be any more.
    """

    def __init__(
        self,
        device,
        sizes,
        *,
        pinned=(),
        hosted=(),
        spare=0,
        lookahead=2,
        slabs=2,
        inflight=None,
        timed=False,
    ):
        self.device = device
        self.timed = timed
        self.counters = Counters()
        self.engine = TransferEngine(
            device, self.counters, h2d_capacity=inflight, d2h_capacity=inflight
        )
        self.account = Account("device memory", 1 << 30)
        self.arena = Arena("device memory", self.engine.allocate, self.account)
        host = Account("pinned memory", 1 << 30)
        self.pinned = Arena("pinned memory", device.pinned, host)
        self.readers = LateReaders()
        self.masters = Masters(self.pinned)
        self.blocks = [self.new_block(i, numels) for i, numels in enumerate(sizes)]
        for block in self.blocks:
            block.hosted = block.index in hosted
            if block.index in pinned and not device.is_host:
                self.masters.pin(block)
        self.loader = self.new_loader(slabs)
        self.scheduler = Scheduler(
            device=device,
            engine=self.engine,
            loader=self.loader,
            arena=self.arena,
            blocks=self.blocks,
            order=Order([b.index for b in self.blocks[1:] if not b.hosted]),
            counters=self.counters,
        )
        self.steering = Steering(
            self.scheduler,
            self.blocks,
            must_stay=[0],
            budget_bytes=1 << 30,
            max_lookahead=lookahead,
        )
        self.stopwatch = Stopwatch(device)
        self.set_budget(self.steering.smallest_budget() + spare)
        self.steering.steer()
        self.scheduler.place(self.scheduler.staying())

    def new_block(self, index, numels):
        tensors = [
            1000.0 * index + torch.arange(n) / 1024 + 100 * place
            for place, n in enumerate(numels)
        ]
        layout = layout_of([(f"t{i}", t) for i, t in enumerate(tensors)])
        block = Block(index, f"blocks.{index}", layout, tensors)
        self.masters.adopt(block)
        block.set_store(Disk(layout, block.store.hosts))
        block.point_to_host()
        return block

    def new_loader(self, slabs):
        if self.device.is_host:
            return HostLoader(self.engine, self.readers, self.counters)
        loader = LaneLoader(self.engine, self.pinned, self.readers, self.counters)
        staged = [b.nbytes for b in self.blocks[1:] if b.image is None]
        loader.set_slabs(slabs if staged else 0, max(staged, default=0))
        return loader

    def set_budget(self, nbytes):
        self.steering.set_budget(nbytes)
        self.account.set_limit(nbytes)
        self.arena.trim()

    def begin_pass(self):
        if self.stopwatch.is_over():
            self.steering.note(*self.stopwatch.resolve())
        self.scheduler.begin_pass()
        if not self.scheduler.in_use and self.steering.steer():
            if self.account.overdraft_bytes:
                self.arena.trim()
            self.scheduler.place(self.scheduler.staying())
        watch = self.timed and self.steering.wants_times(self.stopwatch.uses)
        self.scheduler.stopwatch = self.stopwatch if watch else None
        self.engine.stopwatch = self.scheduler.stopwatch

    def end_pass(self):
        self.scheduler.end_pass()

    def run(self, *route):
        """One pass; returns what each use saw, once all is over."""
        self.begin_pass()
        seen = []
        for number in route:
            block = self.blocks[number]
            self.scheduler.before(block)
            seen.append([t.clone() for t in block.tensors])
            self.scheduler.after(block)
        self.end_pass()
        self.device.synchronize()
        return [[t.cpu() for t in tensors] for tensors in seen]

    def park(self):
        self.scheduler.park()
        for block in self.blocks:
            self.scheduler.take_in(block)
        self.arena.trim()
        assert self.account.held_bytes == 0

    def close(self):
        self.scheduler.recover()
        self.park()
        self.loader.close()
        self.scheduler.drop()
        for block in self.blocks:
            self.masters.give_back(block)
        self.device.synchronize()
        for arena in (self.arena, self.pinned):
            arena.close()
            assert arena.account.holders() == {}


def simulated():
    return AcceleratorDevice(torch.device("hpu"))


def values(block):
    """What the block was made with."""
    return [t.clone() for t in block.store.hosts]


@pytest.fixture(params=["device", "host"])
def rig_of(request, sim):
    """Makes rigs of some blocks of one size, on either device."""
    rigs = []

    def make(count=4, **options):
        device = simulated() if request.param == "device" else HostDevice()
        options.setdefault("pinned", range(1, count))
        rigs.append(Rig(device, [(30,)] * count, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.device.synchronize()
        rig.close()
    rigs.clear()


# --------------------------------------------------------------------------- one by one


def test_each_use_sees_its_own_block_on_any_route(rig_of):
    rig = rig_of(5, spare=UNIT)
    expected = [values(block) for block in rig.blocks]
    for route in [(1, 2, 3, 4)] * 3 + [(4, 2, 4, 1), (3,), (1, 2, 3, 4)]:
        for number, seen in zip(route, rig.run(*route), strict=True):
            assert torch.equal(seen[0], expected[number][0])
    assert rig.account.peak_bytes <= rig.account.limit_bytes


def test_block_that_is_edited_after_it_was_loaded_ahead_is_loaded_again(rig_of):
    """Within one pass no samples are compared: the version counter must tell."""
    rig = rig_of(5, spare=UNIT)
    expected = [values(block)[0] for block in rig.blocks]
    for _ in range(3):
        rig.run(1, 2, 3, 4)
    rig.begin_pass()
    loaded = set()
    for number in (1, 2, 3, 4):
        rig.scheduler.before(rig.blocks[number])
        assert torch.equal(rig.blocks[number].tensors[0].cpu(), expected[number])
        for block in rig.blocks[number + 1 :]:
            if block.state is BlockState.PREFETCHING:
                rig.device.synchronize()
                block.tensors[0].add_(1)
                expected[block.index] += 1
                loaded.add(block.filled_in)
        rig.scheduler.after(rig.blocks[number])
    assert rig.scheduler._mover.passed in loaded
    rig.end_pass()


def test_only_what_was_loaded_ahead_is_loaded_again_when_all_were_replaced(rig_of):
    """Averaged weights are swapped in between passes, by assigning to `.data`."""
    rig, route = rig_of(9), range(1, 9)
    copies = []
    for turn in range(5):
        if turn == 4:
            for block in rig.blocks[1:]:
                block.tensors[0].data = block.tensors[0].data + 1
        before = rig.counters.h2d_copies
        for number, (seen,) in zip(route, rig.run(*route), strict=True):
            assert torch.equal(seen, rig.blocks[number].tensors[0])
        copies.append(rig.counters.h2d_copies - before)
    assert copies[3] < copies[4] <= copies[3] + rig.scheduler.lookahead + 1


def test_block_that_its_last_use_changed_is_saved_and_seen_by_the_next(rig_of):
    """Loading ahead had already counted on the copy that the change made stale."""
    rig = rig_of(4, lookahead=2)
    expected = values(rig.blocks[1])[0]
    rig.run(1, 2, 3, 1)
    rig.run(1, 2, 3, 1)
    assert not rig.blocks[1].stays
    for _ in range(3):
        rig.begin_pass()
        for number in (1, 2, 3, 1):
            block = rig.blocks[number]
            rig.scheduler.before(block)
            if number == 1:
                assert torch.equal(block.tensors[0].cpu(), expected)
                block.tensors[0].add_(1)
                expected += 1
            rig.scheduler.after(block)
        rig.end_pass()
        assert torch.equal(rig.blocks[1].tensors[0], expected)
        for block in rig.blocks:
            assert block.slot is not None or not block.awaited, block


@pytest.mark.parametrize("at", ["save", "vacate", "to"])
def test_interrupt_while_a_block_leaves_lets_it_leave_later(rig_of, monkeypatch, at):
    """It comes before its bytes are home, after that, or among the books."""
    rig = rig_of(4, spare=3 * UNIT)
    rig.run(1, 2, 3)
    block = rig.blocks[1]
    assert block.slot is not None
    block.tensors[0].add_(1)
    expected = [tensor.clone().cpu() for tensor in block.tensors]
    mover = rig.scheduler._mover
    owner = {"save": rig.loader, "vacate": mover, "to": Block}[at]
    proper = getattr(owner, at)

    def interrupted(*args, **options):
        if at != "to" or args[1] is BlockState.UNLOADED:
            raise KeyboardInterrupt
        return proper(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, at, interrupted)
        with pytest.raises(KeyboardInterrupt):
            mover.evict(block, verify=True)
    seen = rig.run(1, 2, 3)
    assert all_equal(seen[0], expected)
    mover.evict(block, verify=True)
    assert block.state is BlockState.UNLOADED
    assert all_equal(block.tensors, expected)


@pytest.mark.parametrize("where", ["host", "device"])
def test_block_that_was_changed_crosses_once_more_at_most(rig_of, where):
    """Home if it was changed on the device, else what was loaded before the change."""
    rig = rig_of(4)
    loads, saves = [], []
    for number in range(6):
        if number == 3 and where == "host":
            rig.device.synchronize()
            rig.blocks[1].tensors[0].add_(1)
        loads.append(-rig.counters.h2d_copies)
        rig.begin_pass()
        for block in rig.blocks[1:]:
            rig.scheduler.before(block)
            if number == 3 and where == "device" and block.index == 1:
                block.tensors[0].add_(1)
            rig.scheduler.after(block)
        rig.end_pass()
        loads[-1] += rig.counters.h2d_copies
        saves.append(rig.counters.d2h_copies)
    assert loads[2] > 0
    assert sum(loads[3:]) <= 3 * loads[2] + (where == "host")
    assert saves[-1] <= (where == "device")


@pytest.mark.parametrize("number", [3, 4, 5, 6])
def test_reader_that_is_late_writes_nothing_into_a_slot_that_was_given_up(
    rig_of, number
):
    """A block was loaded ahead in vain: its reader may not be over."""
    rig = rig_of(7, spare=UNIT, pinned=())
    block, expected = rig.blocks[number], values(rig.blocks[number])[0]
    for _ in range(3):
        rig.run(1, 2, 3, 4, 5, 6)
    rig.begin_pass()
    rig.scheduler.before(rig.blocks[1])
    rig.scheduler.after(rig.blocks[1])
    rig.scheduler.before(block)
    rig.readers.run()
    assert torch.equal(block.tensors[0].cpu(), expected)
    rig.scheduler.after(block)
    rig.end_pass()


def test_values_that_are_swapped_out_and_in_behind_version_counters_are_seen(rig_of):
    """The bytes are then what an earlier sample of them was."""
    rig = rig_of(4, lookahead=0)
    block = rig.blocks[3]
    for value in (7.0, 8.0):
        block.tensors[0].data.fill_(value)
        assert (rig.run(1, 2, 3)[2][0] == value).all()
    assert block.slot is not None
    block.tensors[0].data.fill_(7.0)
    assert (rig.run(3)[0][0] == 7.0).all()


def test_reader_for_which_an_interrupt_waited_in_vain_writes_no_slot_of_others():
    """The pass may go on, if somebody catches the interrupt inside of it."""
    rig = Rig(HostDevice(), [(30,)] * 9, spare=2 * UNIT)
    for _ in range(3):
        rig.run(*range(1, 9))
    rig.begin_pass()
    rig.scheduler.before(rig.blocks[1])
    rig.scheduler.after(rig.blocks[1])
    [block] = [b for b in rig.blocks if b.state is BlockState.PREFETCHING]
    [job] = [job for job in rig.readers.jobs if not job.done()]
    job.exception = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.scheduler.before(block)
    others = [b for b in rig.blocks if b.home is block.home and b is not block]
    other = others[0]
    rig.scheduler.before(other)
    rig.readers.run()
    assert torch.equal(other.tensors[0], values(other)[0])
    rig.scheduler.after(other)
    rig.end_pass()
    rig.close()


def interrupt(*_, **__):
    raise KeyboardInterrupt


_USES = st.tuples(
    st.integers(1, 9), st.sampled_from(["reads", "edits", "writes", "waits"])
)


def test_what_uses_change_is_never_lost(sim):
    """In any order, whether or not the host gives copies home the time to end."""
    routes = st.lists(st.lists(_USES, min_size=1, max_size=12), max_size=3)
    detours = st.lists(_USES, max_size=8)

    @given(routes, detours, st.integers(0, 4), st.integers(0, 1))
    @example([], [(6, "writes"), (7, "reads"), (6, "writes")], 3, 0)
    @settings(max_examples=60)
    def check(routes, detour, spare, staged):
        rig = Rig(
            simulated(),
            [(30,)] * 10,
            spare=spare * UNIT,
            lookahead=spare + 2,
            pinned=range(1, 10 - staged),
        )
        cycle = [(number, "edits") for number in range(1, 10)]
        thrice = [route for route in routes for _ in range(3)]
        changing = Changing(rig)
        for route in (cycle, cycle, cycle + detour, *thrice):
            changing.run(route)
        changing.look()
        sent.append(changing.sent)
        assert sim.races() == []
        rig.close()

    sent = []
    check()
    assert sum(sent) >= 100


class Changing:
    """Uses that change their blocks, and what the blocks hold then."""

    def __init__(self, rig):
        self.rig = rig
        self.truth = [values(block)[0] for block in rig.blocks]
        self.seen = []
        self.sent = 0

    def run(self, route):
        self.rig.begin_pass()
        for number, does in route:
            self.use(self.rig.blocks[number], does)
            assert all(map(self.is_home, self.rig.blocks))
        self.rig.end_pass()
        assert all(map(self.is_home, self.rig.blocks))
        assert not any(block.sent for block in self.rig.blocks)

    def use(self, block, does):
        self.rig.scheduler.before(block)
        tensor, truth = block.tensors[0], self.truth[block.index]
        self.seen.append((tensor.clone(), truth.clone()))
        if does == "edits":
            tensor.add_(1)
            truth += 1
        if does == "writes":  # only the first time is seen
            before = self.rig.scheduler.versions_under([tensor.data])
            tensor.data.add_(1)
            truth += 1
            if not block.edited:
                self.rig.scheduler.note_edits(before)
        self.rig.scheduler.after(block)
        self.sent += sum(block.sent is not None for block in self.rig.blocks)
        if does == "waits":
            self.rig.device.synchronize()

    def is_home(self, block):
        return block.bound or torch.equal(block.tensors[0], self.truth[block.index])

    def look(self):
        for tensor, expected in self.seen:
            assert torch.equal(tensor.cpu(), expected)
        for block, expected in zip(self.rig.blocks, self.truth, strict=True):
            assert torch.equal(block.tensors[0].cpu(), expected)


def test_fetched_block_is_in_use_no_more_after_an_interrupt(rig_of):
    """Its use was ended a second time, by the next pass: it counted one too few."""
    rig = rig_of(3)
    rig.begin_pass()
    rig.scheduler.fetch(rig.blocks[1])
    rig.scheduler.recover()
    rig.end_pass()
    rig.begin_pass()
    assert [block.uses for block in rig.blocks] == [0, 0, 0]
    rig.end_pass()


@pytest.mark.parametrize("edit", ["assign", "fill"])
def test_edit_through_data_is_seen_by_a_use_outside_of_passes(rig_of, edit):
    """What the latest pass had brought counted as new until the next one began."""
    rig = rig_of(4, spare=UNIT)
    rig.run(1, 2, 3)
    for block in rig.blocks[1:]:
        if edit == "assign":
            block.tensors[0].data = torch.full((30,), 7.0)
        else:
            block.tensors[0].data.fill_(7.0)
    for block in rig.blocks[1:]:
        rig.scheduler.before(block)
        assert (block.tensors[0] == 7.0).all()
        rig.scheduler.after(block)


def test_use_that_finds_no_room_says_who_is_in_the_way_and_can_be_tried_again(rig_of):
    rig = rig_of(3)
    rig.begin_pass()
    rig.scheduler.before(rig.blocks[1])
    with pytest.raises(StagehandOOMError, match=r"'blocks\.2' needs .* 'blocks\.1' is"):
        rig.scheduler.before(rig.blocks[2])
    rig.scheduler.after(rig.blocks[1])
    rig.scheduler.before(rig.blocks[2])
    assert torch.equal(rig.blocks[2].tensors[0].cpu(), values(rig.blocks[2])[0])
    rig.scheduler.after(rig.blocks[2])
    rig.end_pass()


def test_failed_read_is_raised_when_the_block_is_needed_and_tried_again_then(rig_of):
    rig = rig_of(4, pinned=(), spare=UNIT)
    expected = values(rig.blocks[3])[0]
    rig.run(1, 2, 3)
    rig.run(1, 2, 3)
    rig.scheduler.park()
    rig.blocks[3].store.failure = ReadError("the disk is gone")
    rig.begin_pass()
    for number in (1, 2):
        rig.scheduler.before(rig.blocks[number])
        rig.readers.run()
        rig.scheduler.after(rig.blocks[number])
    with pytest.raises(ReadError, match="the disk is gone"):
        rig.scheduler.before(rig.blocks[3])
    rig.blocks[3].store.failure = None
    rig.end_pass()
    assert torch.equal(rig.run(1, 2, 3)[2][0], expected)


def test_block_that_is_changed_on_the_host_is_loaded_when_that_is_over(rig_of):
    """A thread steps it in the middle of a pass, and what comes needs it."""
    rig = rig_of(4)
    block, waits = rig.blocks[1], []

    def wait():
        waits.append(block.slot)
        with torch.no_grad():
            block.tensors[0].fill_(7)
        block.stepping = False

    rig.scheduler.await_steps_with(wait)
    rig.begin_pass()
    rig.scheduler.before(rig.blocks[3])
    rig.scheduler.after(rig.blocks[3])
    if block.slot is not None:
        rig.scheduler._mover.evict(block)
    block.stepping = True
    rig.scheduler.before(rig.blocks[2])
    rig.scheduler.after(rig.blocks[2])
    assert waits == [], "nothing is loaded ahead of it"
    rig.scheduler.before(block)
    assert waits == [None]
    seen = block.tensors[0].clone()
    rig.scheduler.after(block)
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), torch.full((30,), 7.0))


def test_block_that_is_changed_on_the_host_is_not_staged_meanwhile(rig_of):
    """It is used once more in the same pass; what a reader got by then would be old."""
    rig = rig_of(4, pinned=())
    for _ in range(2):
        rig.run(1, 2, 3, 1)
    block = rig.blocks[1]
    rig.begin_pass()
    rig.scheduler.before(block)
    rig.scheduler.after(block)
    rig.scheduler._mover.evict(block)
    block.stepping = True
    for number in (2, 3):
        rig.scheduler.before(rig.blocks[number])
        rig.scheduler.after(rig.blocks[number])
        assert block.state is BlockState.UNLOADED
    block.stepping = False
    rig.scheduler.before(block)
    rig.scheduler.after(block)
    rig.end_pass()


def test_several_blocks_of_which_one_cannot_be_read_are_all_in_use_no_more(rig_of):
    rig = rig_of(4, pinned=(1, 2), spare=2 * UNIT)
    rig.scheduler.park()
    rig.blocks[3].store.failure = ReadError("the disk is gone")
    rig.begin_pass()
    with pytest.raises(ReadError, match="the disk is gone"):
        rig.scheduler.before_all(rig.blocks[1:])
    assert rig.scheduler.in_use == []
    rig.end_pass()


def test_block_that_has_left_is_not_where_its_use_has_left_it(rig_of):
    rig = rig_of(3)
    rig.begin_pass()
    rig.scheduler.before(rig.blocks[1])
    rig.scheduler.after(rig.blocks[1])
    assert rig.scheduler.is_latest(rig.blocks[1])
    rig.scheduler.give_up(0, all_of_it=False)
    assert not rig.scheduler.is_latest(rig.blocks[1])
    rig.end_pass()


def test_limits_let_nothing_be_loaded_ahead_where_memory_was_short(rig_of):
    """Nor what gave way to others, where they let nothing be loaded ahead at all."""
    rig = rig_of(6, spare=3 * UNIT)
    for _ in range(3):
        rig.run(1, 2, 3, 4, 5)
    assert rig.scheduler.lookahead
    rig.scheduler.obey(Limits(lookahead_blocks=0))
    rig.scheduler.give_up(0, all_of_it=False)
    stay = [block for block in rig.scheduler.staying() if block.index]
    assert stay
    assert rig.scheduler.recall()
    assert [block.slot for block in stay] == [None] * len(stay)
    rig.scheduler._free_idle()
    assert rig.scheduler.strained
    rig.scheduler.obey(Limits())
    assert rig.scheduler.lookahead == 0
    rig.run(1, 2, 3, 4, 5)
    assert rig.scheduler.lookahead


def test_tensor_assigned_on_one_stream_and_taken_in_on_another_is_no_race(sim):
    """It was let go while the stream of the pass could still read it."""
    rig = Rig(simulated(), [(30,)] * 3)
    first, other = rig.device.current_stream(), rig.device.new_stream()
    [weight] = rig.blocks[0].tensors
    weight.data = weight.data + 1
    other.wait_stream(first)
    with rig.device.on(other):
        rig.run(1, 2)
    assert torch.equal(weight.cpu(), torch.arange(30) / 1024 + 1)
    rig.close()


def test_tensor_is_assigned_where_an_earlier_pass_may_still_read_its_slot(sim):
    """On another stream: the values go into the slot that it read."""
    rig = Rig(simulated(), [(30,)] * 3)
    rig.run(1, 2)
    other = rig.device.new_stream()
    [weight] = rig.blocks[0].tensors
    rig.begin_pass()
    seen = weight + 1
    rig.end_pass()
    assert rig.blocks[0].bound
    weight.data = torch.zeros(30)
    with rig.device.on(other):
        rig.run(1, 2)
        seen_later = weight + 1
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), torch.arange(30) / 1024 + 1)
    assert torch.equal(seen_later.cpu(), torch.ones(30))
    rig.close()


def test_view_of_a_slot_that_is_read_after_the_pass_is_waited_for_by_the_next_load(sim):
    """No tensor of the block points there by then: a graph, say, read the view."""
    rig = Rig(simulated(), [(30,)] * 3, pinned=(1, 2), lookahead=0)
    rig.run(1, 2)
    block = rig.blocks[2]
    assert block.slot is not None
    assert not block.bound
    seen = block.views[0] + 1
    rig.begin_pass()
    rig.scheduler.before(rig.blocks[1])
    assert block.slot is None
    rig.scheduler.after(rig.blocks[1])
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), values(block)[0] + 1)
    rig.close()


@pytest.mark.parametrize("edit", ["add", "fill", "step"])
def test_view_of_a_slot_that_is_read_after_the_pass_is_waited_for_by_a_reload(
    sim, edit
):
    """The block's next use finds its copy stale, and loads it again where it was."""
    rig = Rig(simulated(), [(30,)] * 3, pinned=(1, 2), lookahead=0)
    rig.run(1, 2)
    block = rig.blocks[2]
    [expected] = values(block)
    seen = block.views[0] + 1
    block.trains = edit == "step"  # then its copy is dropped when the pass begins
    if edit != "fill":  # which moves no version counter
        block.tensors[0].add_(1)
    else:
        block.tensors[0].data.fill_(7)
    rig.begin_pass()
    rig.scheduler.before(block)
    rig.scheduler.after(block)
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), expected + 1)
    rig.close()


def test_block_that_was_stepped_after_it_was_loaded_ahead_is_loaded_ahead_again(rig_of):
    rig = rig_of(9, spare=2 * UNIT)
    for _ in range(3):
        rig.run(*range(1, 9))
    rig.device.synchronize()
    ahead = [block for block in rig.blocks if block.awaited]
    assert ahead
    for block in ahead:
        block.trains = True
        block.tensors[0].add_(1)
    expected = [block.tensors[0].clone() for block in ahead]
    rig.begin_pass()
    assert not any(block.awaited for block in ahead)
    rig.scheduler.look_ahead()
    assert all(block.awaited for block in ahead)
    rig.end_pass()
    for block, truth in zip(ahead, expected, strict=True):
        assert torch.equal(rig.run(block.index)[0][0], truth)


@pytest.mark.parametrize("when", ["staged", "warmed"])
def test_edit_through_data_of_what_waits_for_the_next_pass_is_seen(rig_of, when):
    """In a slab; or in a slot, where another model has just ended its turn."""
    rig = rig_of(7, pinned=() if when == "staged" else range(1, 7), spare=UNIT)
    route = range(1, 7)
    for _ in range(3):
        rig.run(*route)
    rig.readers.run()
    if when == "warmed":
        rig.scheduler.give_up(0, all_of_it=True)
        rig.scheduler.warm()
        assert any(block.slot and not block.stays for block in rig.blocks)
    rig.device.synchronize()
    for block in rig.blocks[1:]:
        block.tensors[0].data.fill_(7)
    for [seen] in rig.run(*route):
        assert (seen == 7).all()


def test_view_that_is_kept_of_a_trained_block_has_its_values_when_that_was_stepped(
    rig_of,
):
    """Its copy is dropped when the next pass begins, and the new one is elsewhere."""
    rig = rig_of(4, lookahead=2)
    for _ in range(3):
        rig.run(1, 2, 3)
    block = rig.blocks[1]
    block.trains = True
    [expected] = values(block)
    rig.begin_pass()
    rig.scheduler.before(block)
    kept = block.tensors[0].detach()
    rig.scheduler.after(block)
    rig.end_pass()
    rig.device.synchronize()
    assert block.slot is not None
    block.tensors[0].add_(1)
    rig.begin_pass()
    rig.scheduler.before(block)
    rig.device.synchronize()
    assert torch.equal(kept.cpu(), expected)
    assert torch.equal(block.tensors[0].cpu(), expected + 1)
    rig.scheduler.after(block)
    rig.end_pass()


def test_interrupt_at_any_line_of_a_load_leaves_no_slot_occupied(rig_of):
    """The slot knew its block already, and the block not yet its slot."""
    rig = rig_of(4, lookahead=0)
    expected = [values(block)[0] for block in rig.blocks[1:]]
    for line in range(1, 100):
        rig.run(1)
        rig.begin_pass()
        try:
            with interrupted_at(line, Mover.load):
                rig.scheduler.before(rig.blocks[2])
        except KeyboardInterrupt:
            rig.scheduler.recover()
        else:
            break
        rig.end_pass()
        for slot in rig.scheduler._memory.slots:
            assert slot.occupant is None or slot.occupant.slot is slot
        for (seen,), truth in zip(rig.run(3, 2, 1), expected[::-1], strict=True):
            assert torch.equal(seen, truth)
    assert line > 5
    rig.scheduler.after(rig.blocks[2])
    rig.end_pass()


@pytest.mark.parametrize("how", ["joined", "at hand"])
def test_block_that_is_here_may_be_read_on_another_stream(sim, how):
    """As autograd does, and a module that looks up rows of it: that stream waits."""
    rig = Rig(simulated(), [(30,)] * 3)
    block, scheduler = rig.blocks[1], rig.scheduler
    rig.begin_pass()
    scheduler.fetch(block)
    if how == "joined":
        scheduler.release_fetched()
    with rig.device.on(rig.device.new_stream()):
        if how == "joined":
            scheduler.join(block)
        else:
            assert scheduler.is_at_hand(block)
        seen = block.tensors[0] + 1
    if how == "joined":
        scheduler.after(block)
    else:
        scheduler.release_fetched()
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), values(block)[0] + 1)
    rig.close()


@pytest.mark.parametrize("ends_apart", [False, True])
def test_slot_that_stays_is_given_up_behind_all_that_its_passes_read(sim, ends_apart):
    """Of what is read without a use only the end of the pass tells, on its stream."""
    rig = Rig(simulated(), [(30,)] * 3)
    first, other = rig.device.current_stream(), rig.device.new_stream()
    other.wait_stream(first)
    for stream in (first, other) if ends_apart else (other, first):
        with rig.device.on(stream):
            rig.begin_pass()
            seen = rig.blocks[0].tensors[0] + 1
            rig.end_pass()
    rig.scheduler.park()
    rig.scheduler.place(rig.scheduler.staying())
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), torch.arange(30) / 1024 + 1)
    rig.close()


# ------------------------------------------------------------------------ rows alone


def test_call_by_rows_brings_them_alone_and_the_next_use_all(rig_of):
    rig = rig_of(3)
    block, [expected] = rig.blocks[1], values(rig.blocks[1])
    rig.begin_pass()
    before = rig.counters.h2d_bytes
    rig.scheduler.before_rows(block, [(3, 5), (9, 10)])
    assert rig.counters.h2d_bytes - before == 3 * expected.itemsize
    rows = block.tensors[0][[3, 4, 9]]
    rig.scheduler.drop_rows(block)
    assert block.bound, "it is in use"
    rig.scheduler.after(block)
    rig.scheduler.drop_rows(block)
    assert block.slot is None
    rig.scheduler.before(block)
    whole = block.tensors[0].clone()
    rig.scheduler.after(block)
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(rows.cpu(), expected[[3, 4, 9]])
    assert torch.equal(whole.cpu(), expected)


@pytest.mark.parametrize("why", ["here", "in use", "stays"])
def test_call_by_rows_takes_the_whole_block_where_that_is_here_anyway(rig_of, why):
    rig = rig_of(3, spare=2 * UNIT if why == "stays" else 0, lookahead=0)
    block = rig.blocks[2]
    rig.run(1, 2)
    assert block.slot is not None
    if why == "stays":
        assert block.stays
        rig.scheduler._mover.evict(block)
    rig.begin_pass()
    if why == "in use":
        rig.scheduler.before(block)
    rig.scheduler.before_rows(block, [(3, 5)])
    assert not block.runs
    seen = block.tensors[0].clone()
    for _ in range(1 + (why == "in use")):
        rig.scheduler.after(block)
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), values(block)[0])


@pytest.mark.parametrize("how", ["used", "read"])
def test_block_in_use_by_rows_comes_whole_when_somebody_needs_all_of_it(rig_of, how):
    """Another use of it, or `state_dict()` in the middle of a pass."""
    rig = rig_of(3)
    block, [expected] = rig.blocks[1], values(rig.blocks[1])
    rig.begin_pass()
    rig.scheduler.before_rows(block, [(3, 5)])
    rows = block.tensors[0][3:5] + 1
    if how == "used":
        rig.scheduler.before(block)
    else:
        rig.scheduler.complete_rows()
    assert block.bound
    whole = block.tensors[0] + 1
    if how == "used":
        rig.scheduler.after(block)
    rig.scheduler.after(block)
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(rows.cpu(), expected[3:5] + 1)
    assert torch.equal(whole.cpu(), expected + 1)


def test_call_by_rows_that_finds_no_room_leaves_the_next_use_whole(rig_of):
    rig = rig_of(3)
    first, second = rig.blocks[1:]
    rig.begin_pass()
    rig.scheduler.before(first)
    with pytest.raises(StagehandOOMError):
        rig.scheduler.before_rows(second, [(3, 5)])
    rig.scheduler.after(first)
    rig.scheduler.before(second)
    seen = second.tensors[0].clone()
    rig.scheduler.after(second)
    rig.end_pass()
    rig.device.synchronize()
    assert torch.equal(seen.cpu(), values(second)[0])


def test_rows_that_somebody_keeps_are_left_to_them(rig_of):
    """Their slot's memory would be another block's as soon as the call is over."""
    rig = rig_of(3)
    first, second = rig.blocks[1:]
    [expected] = values(first)
    rig.begin_pass()
    rig.scheduler.before_rows(first, [(3, 5)])
    kept = first.tensors[0][3:5]
    rig.scheduler.after(first)
    rig.scheduler.drop_rows(first)
    rig.scheduler.before(second)
    rig.device.synchronize()
    assert torch.equal(kept.cpu(), expected[3:5])
    rig.scheduler.after(second)
    rig.end_pass()


def test_write_to_a_block_that_is_here_by_rows_is_refused(rig_of):
    rig = rig_of(3)
    block, [expected] = rig.blocks[1], values(rig.blocks[1])
    rig.begin_pass()
    rig.scheduler.before_rows(block, [(3, 5)])
    block.tensors[0].add_(1)
    rig.scheduler.after(block)
    with pytest.raises(ConfigError, match=r"changed weights of 'blocks\.1'"):
        rig.scheduler.drop_rows(block)
    rig.end_pass()
    assert torch.equal(rig.run(1, 2)[0][0], expected)


# --------------------------------------------------------------------------- stateful


class Streaming(RuleBasedStateMachine):
    """A rig against a list of plain tensors, `truth`.

    What uses saw is compared later, on the host: to look at it makes the host wait for
    the device, which would hide a wait that streams lack.
    """

    def __init__(self):
        super().__init__()
        self.rig = None
        self.first = None

    @initialize(
        sizes=st.lists(
            st.sampled_from([(30,), (70, 5), (9, 100), (150,), (250,)]),
            min_size=3,
            max_size=6,
        ),
        pinned=st.sets(st.integers(1, 5)),
        hosted=st.booleans(),
        spare=st.integers(0, 8),
        lookahead=st.integers(0, 4),
        slabs=st.integers(1, 3),
        inflight=st.sampled_from([None, None, 1, 2]),
        timed=st.booleans(),
    )
    def wire(self, sizes, pinned, hosted, spare, **options):
        last = len(sizes) - 1
        self.rig = Rig(
            self.new_device(),
            sizes,
            pinned=pinned,
            hosted={last} if hosted and last > 2 else (),
            spare=spare * UNIT,
            **options,
        )
        self.scheduler, self.blocks = self.rig.scheduler, self.rig.blocks
        self.truth = [[t.cpu().clone() for t in b.tensors] for b in self.blocks]
        self.in_pass = False
        self.fresh = True  # since the last pass nothing was used or settled
        self.open = []  # blocks in use, once for each use
        self.seen = []
        self.kept = []
        self.failed = False
        self.lowered = False  # the budget, since the last pass began
        self.first = self.rig.device.current_stream()
        self.streams = [self.first, self.rig.device.new_stream()]  # present, other
        self.apart = False  # the present one did not wait for the other one

    # Uses

    def before(self, block):
        try:
            self.scheduler.before(block)
        except StagehandOOMError:
            self.check_there_is_no_room(block)
            return False
        except ReadError:
            assert block.store.failure is not None
            return False
        return True

    def check_there_is_no_room(self, block):
        fixed = self.rig.steering.must_stay
        taken = sum(
            slot.nbytes
            for slot in self.scheduler._memory.slots
            if slot.occupant and (slot.occupant.uses or slot.occupant.index in fixed)
        )
        sizes = [
            slot.nbytes for slot in self.scheduler._memory.slots
        ]  # one may be too large
        assert self.rig.account.limit_bytes - taken < max(block.nbytes, *sizes)

    def look_at(self, block):
        here = self.rig.device.torch_device
        for tensor, truth in zip(block.tensors, self.truth[block.index], strict=True):
            assert tensor.device.type == here.type
            self.seen.append((tensor.detach().clone(), truth.clone(), block.name))

    def streamed(self, data):
        return data.draw(st.sampled_from(self.blocks[1:]))

    def ran(self):
        if not self.in_pass:
            self.fresh = False

    @rule(data=st.data(), ends=st.booleans())
    def use(self, data, ends):
        block = self.streamed(data)
        self.ran()
        if not self.before(block):
            return
        self.look_at(block)
        if ends:
            self.scheduler.after(block)
        else:
            self.open.append(block)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_use(self, data):
        place = data.draw(st.integers(0, len(self.open) - 1))
        block = self.open.pop(place)
        self.look_at(block)
        self.scheduler.after(block)

    @precondition(lambda self: any(b.bound for b in self.blocks))
    @rule(data=st.data())
    def join(self, data):
        block = data.draw(st.sampled_from([b for b in self.blocks if b.bound]))
        self.ran()
        self.scheduler.join(block)
        self.look_at(block)
        self.scheduler.after(block)

    @rule(data=st.data())
    def fetch(self, data):
        block = self.streamed(data)
        self.ran()
        try:
            self.scheduler.fetch(block)
        except StagehandOOMError:
            self.check_there_is_no_room(block)
        except ReadError:
            assert block.store.failure is not None
        else:
            self.look_at(block)

    @precondition(lambda self: self.in_pass and not self.apart)
    @rule()
    def read_what_is_here(self):
        """Weights that stay, and weights of a module that has run."""
        assert self.blocks[0].bound
        for block in self.blocks:
            if block.bound:
                self.look_at(block)

    # Passes

    def begin_pass(self):
        try:
            self.rig.begin_pass()
        except ReadError:
            self.settle()
        assert not any(block.bound and block.is_replaced() for block in self.blocks)
        self.in_pass = True
        if not self.open:
            self.lowered = False

    def end_pass(self):
        self.rig.end_pass()
        self.in_pass, self.fresh = False, not self.open

    @precondition(lambda self: not self.in_pass)
    @rule()
    def begin(self):
        self.begin_pass()

    @precondition(lambda self: self.in_pass)
    @rule()
    def end(self):
        self.end_pass()

    @precondition(lambda self: not self.in_pass)
    @rule(
        data=st.data(),
        times=st.integers(1, 3),
        turns=st.booleans(),
        keeps=st.booleans(),
        overlap=st.integers(0, 1),
        edit=st.sampled_from([None, "in_use", "in_place", "behind", "replace"]),
    )
    def whole_passes(self, data, times, turns, keeps, overlap, edit):
        """Some passes alike, and weights edited in them or after them."""
        last = len(self.blocks) - 1
        route = data.draw(
            st.one_of(
                st.just(range(1, len(self.blocks))),
                st.lists(st.integers(1, last), min_size=1, max_size=6),
            )
        )
        for _ in range(times):
            self.begin_pass()
            self.use_in_turn(route, edit == "in_use", overlap)
            if keeps and self.blocks[route[-1]].bound:
                self.keep_view(self.blocks[route[-1]], 0)
            self.end_pass()
            if turns:
                self.turn(waits=False)
        if edit not in (None, "in_use"):
            for block in self.blocks:
                getattr(self, f"edit_{edit}")(block, 0)

    def use_in_turn(self, route, edits, overlap):
        """Use some blocks, of which so many stay in use while the next one is."""
        used = []
        for block in [self.blocks[index] for index in route]:
            if self.before(block):
                self.look_at(block)
                if edits:
                    self.edit_in_place(block, 0)
                used.append(block)
            if len(used) > overlap:
                self.scheduler.after(used.pop(0))
        for block in used:
            self.scheduler.after(block)

    @rule()
    def interrupt(self):
        """An exception skipped the hooks: the next entry finds that out."""
        self.scheduler.recover()
        self.open.clear()
        self.end_pass()

    # Edits

    def may_be_written(self, block):
        """A copy under way still reads the bytes; users look at outputs first."""
        if block.slot is not None and (block.sent is not None or not block.bound):
            self.rig.device.synchronize()

    def changed(self, block, place):
        self.truth[block.index][place] += 1
        for number, _, allowed in self.kept:
            if number == (block.index, place):
                allowed.append(self.truth[block.index][place].clone())

    def idle(self, block):
        """Whether now is between passes, and the block is where it then belongs."""
        between = not self.in_pass and self.fresh and not self.open
        return between and block.bound == block.stays and not self.apart

    def edit_in_place(self, block, place):
        if block.bound and self.apart:
            return
        self.may_be_written(block)
        block.tensors[place].add_(1)
        self.changed(block, place)

    def edit_behind(self, block, _):
        """Edit all tensors so that no version counter tells."""
        if not self.idle(block):
            return
        self.may_be_written(block)
        for place, tensor in enumerate(block.tensors):
            tensor.data.add_(1)
            self.changed(block, place)

    def edit_replace(self, block, place):
        if self.apart or block.is_replaced() or not (block.bound or self.idle(block)):
            return
        self.may_be_written(block)
        tensor = block.tensors[place]
        tensor.data = tensor.data + 1
        self.changed(block, place)

    @rule(data=st.data(), edit=st.sampled_from(["in_place", "behind", "replace"]))
    def edit(self, data, edit):
        block = data.draw(st.sampled_from(self.blocks))
        place = data.draw(st.integers(0, len(block.tensors) - 1))
        getattr(self, f"edit_{edit}")(block, place)

    # Whoever keeps a weight

    @precondition(lambda self: any(b.bound for b in self.blocks))
    @rule(data=st.data())
    def keep_a_view(self, data):
        block = data.draw(st.sampled_from([b for b in self.blocks if b.bound]))
        self.keep_view(block, data.draw(st.integers(0, len(block.tensors) - 1)))

    def keep_view(self, block, place):
        allowed = [self.truth[block.index][place].clone()]
        view = block.tensors[place].detach()
        self.kept.append(((block.index, place), view, allowed))

    @precondition(lambda self: self.kept)
    @rule()
    def drop_the_oldest_view(self):
        del self.kept[0]

    # Everything else

    @precondition(lambda self: not self.in_pass)
    @rule(spare=st.integers(0, 12))
    def change_budget(self, spare):
        rig = self.rig
        old = rig.account.limit_bytes
        rig.set_budget(rig.steering.smallest_budget() + spare * UNIT)
        self.lowered |= rig.account.limit_bytes < old

    @precondition(lambda self: not self.in_pass)
    @rule(data=st.data())
    def keep(self, data):
        with contextlib.suppress(StagehandOOMError):
            self.rig.steering.keep([self.streamed(data)])

    @precondition(lambda self: self.in_pass and not self.lowered)
    @rule(lookahead=st.integers(0, 6))
    def look_further_ahead(self, lookahead):
        """Follow the plan as it is, but for how far ahead to load."""
        if self.scheduler.in_use:
            return
        plan = replace(self.rig.steering.plan, lookahead=lookahead)
        self.scheduler.follow(plan, fixed=self.rig.steering.must_stay)
        self.settle()

    @precondition(lambda self: not self.in_pass and not self.open)
    @rule()
    def park(self):
        self.rig.park()
        assert not any(block.bound for block in self.blocks)
        self.check_hosts()
        self.settle()

    def settle(self):
        for block in self.scheduler.staying():
            if isinstance(block.store, Disk):
                block.store.failure = None
        self.scheduler.place(self.scheduler.staying())

    @rule(data=st.data())
    def evict(self, data):
        away = [
            block
            for block in self.blocks
            if block.slot is not None
            and not (block.uses or block.awaited)
            and block.index not in self.rig.steering.must_stay
        ]
        if away:
            block = data.draw(st.sampled_from(away))
            self.scheduler._mover.evict(block, verify=block.stays)
            assert block.state is BlockState.UNLOADED

    @rule(data=st.data(), fails=st.booleans())
    def disk(self, data, fails):
        for block in self.blocks:
            if isinstance(block.store, Disk):
                block.store.failure = None
        block = self.streamed(data)
        if fails and isinstance(block.store, Disk) and not block.stays:
            block.store.failure = ReadError("the disk is gone")
            self.failed = True

    @rule()
    def let_readers_read(self):
        self.rig.readers.run()

    @rule()
    def look(self):
        self.rig.device.synchronize()
        for clone, truth, name in self.seen:
            assert torch.equal(clone.cpu(), truth), name
        self.seen.clear()
        for number, view, allowed in self.kept:
            values = view.cpu()
            assert any(torch.equal(values, a) for a in allowed), number

    # What always holds

    @invariant()
    def nothing_races(self):
        assert not self.races(), self.races()[0]

    @invariant()
    def memory_is_within_the_budget(self):
        account = self.rig.account
        assert self.lowered or account.held_bytes <= account.limit_bytes
        slots = [s for s in self.scheduler._memory.slots if s.lease is not None]
        assert self.rig.arena.leased_bytes == sum(s.nbytes for s in slots)
        assert self.scheduler.slots_by_memory == {
            s.storage.data_ptr(): s for s in slots
        }

    @invariant()
    def books_agree(self):
        uses = list(self.open)
        if self.scheduler.fetched is not None:
            uses.append(self.scheduler.fetched)
        for block in self.blocks:
            assert block.uses == uses.count(block), block
            assert block.awaited >= 0
            slot = block.slot
            if slot is None:
                assert block.state in AWAY
                assert not block.bound
                assert not block.uses
                assert block.hosted or not block.awaited, block
                continue
            assert slot.occupant is block
            assert slot in self.scheduler._memory.slots
            assert block.views_in is slot
            assert block.state in ON_DEVICE
            assert block.state is BlockState.GPU_READY or not block.bound
            assert block.bound or not block.uses
        for slot in self.scheduler._memory.slots:
            assert slot.occupant is None or slot.occupant.slot is slot
            held = self.kept or self.failed  # an error's traceback keeps views
            if slot.lease is not None and slot.occupant is None and not held:
                assert storage_use_count(slot.storage) == slot.alone

    @invariant()
    def check_hosts(self):
        """What is away can be read on the host, by whoever wants to."""
        for block, truth in zip(self.blocks, self.truth, strict=True):
            if not block.bound:
                for tensor, values in zip(block.tensors, truth, strict=True):
                    assert torch.equal(tensor, values), block

    def teardown(self):
        if self.rig is None:
            return
        self.look()
        self.rig.close()
        self.kept.clear()
        for block, truth in zip(self.blocks, self.truth, strict=True):
            for tensor, values in zip(block.tensors, truth, strict=True):
                assert torch.equal(tensor, values), block
        assert not self.races(), self.races()[0]


class OnHost(Streaming):
    new_device = HostDevice

    def races(self):
        return []

    def turn(self, *, waits):
        """There is one order of doing things."""


def test_streaming_on_the_host_is_exact_whatever_happens():
    run_state_machine_as_test(OnHost, settings=running(120, 30))


def on_device(sim):
    class OnDevice(Streaming):
        new_device = staticmethod(simulated)

        def races(self):
            return sim.races()

        @rule(waits=st.booleans())
        def turn(self, waits):
            """Who edited a weight lets the other stream wait, as torch has it."""
            edited = any(b.bound and is_edited(b) for b in self.blocks)
            if edited or self.in_pass or not self.fresh:
                waits = True
            old, new = self.streams
            if waits:
                new.wait_stream(old)
            self.apart = not waits
            self.streams.reverse()
            torch.accelerator.set_stream(new)

        def teardown(self):
            torch.accelerator.synchronize()
            torch.accelerator.set_stream(self.first)
            try:
                super().teardown()
            finally:
                sim.clear_races()  # the next example starts afresh

    return OnDevice


def is_edited(block):
    return block.is_changed() or block.is_replaced()


def test_streaming_on_a_device_is_exact_and_free_of_races_whatever_happens(sim):
    run_state_machine_as_test(on_device(sim), settings=running(120, 30))
