"""Slots that all engines of a device share, and copies home that yield to loads."""

import contextlib
import itertools

import pytest
import torch

from interrupts import interrupted_at
from stagehand.core import traffic as traffic_module
from stagehand.core.device import AcceleratorDevice, HostDevice
from stagehand.core.limits import Limits, Priority
from stagehand.core.telemetry import Counters
from stagehand.core.traffic import Denied, Parcel, Traffic, event_of
from stagehand.core.transfer import Slot, Ticket, TransferEngine

NBYTES = 4096
EARLY = (Priority.SPECULATIVE, Priority.BACKGROUND)
DEMAND = (Priority.CRITICAL, Priority.REQUIRED)


class Rig:
    """Engines with a slot each, on one device and in one traffic."""

    def __init__(self, traffic, engines=1, **options):
        self.device = AcceleratorDevice(torch.device("hpu"))
        self.traffic = traffic
        self.main = self.device.current_stream()
        self.engines = []
        for _ in range(engines):
            engine = TransferEngine(self.device, Counters(), **options)
            engine.join(traffic)
            self.engines.append(engine)
        self.engine = self.engines[0]
        self.kept = []  # as owners of what goes home do

    def load(self, priority=Priority.CRITICAL, engine=None, nbytes=NBYTES):
        engine = engine or self.engine
        slot = Slot(0, nbytes)
        engine.adopt(slot)
        self.slot, self.buffer = slot, engine.allocate(nbytes)
        source = self.device.pinned(nbytes).fill_(7)
        return engine.load(slot, self.buffer, source, priority)

    def made(self, value=3.0, *, keep=True):
        made = torch.full((NBYTES // 4,), value, device="hpu")
        if keep:
            self.kept.append(made)
        return made

    def home(self):
        return torch.zeros(NBYTES // 4, pin_memory=True)


def traffic(**slots):
    return Traffic(**{"h2d_slots": 2, "d2h_slots": 2, **slots})


def yielding(*, share=None, backlog=1 << 20, piece=256):
    found = traffic()
    found.yield_home(backlog, piece_bytes=piece)
    found.share_home(share)
    return found


# Slots


def test_two_engines_share_the_slots_of_their_device(sim):
    rig = Rig(traffic(), engines=2)
    for engine in rig.engines:
        assert isinstance(rig.load(Priority.SPECULATIVE, engine), Ticket)
    for engine in rig.engines:
        denied = rig.load(Priority.SPECULATIVE, engine)
        assert denied is Denied.H2D_SLOTS_EXHAUSTED
    assert rig.traffic.h2d.in_flight == rig.traffic.h2d.denied_count == 2
    rig.device.synchronize()
    assert rig.traffic.h2d.in_flight == 0
    assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    rig.device.synchronize()


def test_an_engine_that_leaves_has_its_own_capacity_again(sim):
    rig = Rig(traffic(h2d_slots=1))
    assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    assert rig.load(Priority.SPECULATIVE) is Denied.H2D_SLOTS_EXHAUSTED
    rig.engine.leave()
    rig.engine.leave()
    for _ in range(5):
        assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    rig.device.synchronize()


def test_the_own_capacity_counts_beside_the_shared_one(sim):
    rig = Rig(traffic(h2d_slots=9), h2d_capacity=1)
    assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    assert rig.load(Priority.SPECULATIVE) is Denied.H2D_SLOTS_EXHAUSTED
    rig.engine.leave()
    assert rig.load(Priority.SPECULATIVE) is Denied.H2D_SLOTS_EXHAUSTED
    rig.device.synchronize()


@pytest.mark.parametrize("priority", DEMAND)
def test_demand_is_denied_nothing_by_full_slots_or_by_a_phase(sim, priority):
    rig = Rig(traffic())
    rig.traffic.bounds.post("me", Limits(inflight_h2d=1, suppress_speculative=True))
    for _ in range(4):
        assert isinstance(rig.load(priority), Ticket)
        assert rig.engine.deny_home(priority) is None
    rig.device.synchronize()


@pytest.mark.parametrize("priority", EARLY)
def test_a_phase_denies_speculation_by_its_own_name_until_it_is_over(sim, priority):
    rig = Rig(traffic())
    rig.traffic.bounds.post("me", Limits(suppress_speculative=True))
    reason = Denied.PHASE_RULE_SUPPRESSED_SPECULATIVE
    assert rig.load(priority) is reason
    assert rig.engine.deny_home(priority) is reason
    assert rig.traffic.suppressed_count == 2
    rig.traffic.bounds.withdraw("me")
    assert isinstance(rig.load(priority), Ticket)
    assert rig.engine.deny_home(priority) is None
    rig.device.synchronize()


def test_a_limit_narrows_the_slots_and_gives_them_back(sim):
    rig = Rig(traffic(h2d_slots=3))
    rig.traffic.bounds.post("me", Limits(inflight_h2d=1))
    assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    assert rig.load(Priority.SPECULATIVE) is Denied.H2D_SLOTS_EXHAUSTED
    rig.traffic.bounds.post("me", Limits(inflight_h2d=7))
    for _ in range(2):
        assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    assert rig.load(Priority.SPECULATIVE) is Denied.H2D_SLOTS_EXHAUSTED
    rig.device.synchronize()


@pytest.mark.parametrize("limited", [False, True])
def test_copies_home_fill_their_slots_and_deny_early_ones(sim, limited):
    rig = Rig(traffic(d2h_slots=2 if limited else 1))
    rig.traffic.bounds.post("me", Limits(inflight_d2h=1 if limited else None))
    assert rig.engine.deny_home(Priority.SPECULATIVE) is None
    done = rig.engine.send_group([(rig.made(), rig.home())], makers=[rig.main])
    reason = rig.engine.deny_home(Priority.SPECULATIVE)
    assert reason is Denied.D2H_SLOTS_EXHAUSTED
    done.synchronize()
    assert rig.engine.deny_home(Priority.SPECULATIVE) is None


def test_a_load_that_a_use_waits_for_frees_its_slot(sim):
    rig = Rig(traffic(h2d_slots=1))
    rig.load(Priority.SPECULATIVE)
    rig.engine.await_filled(rig.slot, rig.main)
    assert isinstance(rig.load(Priority.SPECULATIVE), Ticket)
    rig.device.synchronize()


# Copies home that yield


@pytest.mark.parametrize("how", ["large", "from another order", "to another order"])
def test_what_cannot_be_cut_goes_as_a_whole(monkeypatch, how):
    device, sent = HostDevice(), []
    pair = torch.zeros(4, 4), torch.zeros(4, 4)
    if how == "large":
        monkeypatch.setattr(traffic_module, "_WHOLE_BYTES", 63)
    elif how == "from another order":
        pair = pair[0].t(), pair[1]
    else:
        pair = pair[0], pair[1].t()
    parcel = Parcel(
        traffic(),
        device.current_stream(),
        (),
        [pair],
        lambda _, source: sent.append(source.numel()),
        device.new_event(),
    )
    assert parcel.send(8) == 64
    assert sent == [16]
    assert parcel.sent


def test_a_copy_home_waits_for_the_next_load_and_goes_behind_it(sim):
    sim.configure(h2d_gbps=1e-3, d2h_gbps=1e-3, launch_us=0, hbm_gbps=1e9)  # 4 ms
    rig = Rig(yielding())
    source, target = rig.made(), rig.home()
    parcel = rig.engine.send_group([(source, target)], makers=[rig.main])
    assert isinstance(parcel, Parcel)
    assert sim.d2h_copies() == 0
    assert not parcel.query()
    assert rig.traffic.d2h.in_flight == 1
    ticket = rig.load()
    assert sim.d2h_copies() == 1
    ticket.wait_host()
    assert not parcel.query()
    parcel.synchronize()
    assert rig.traffic.d2h.in_flight == 0
    assert sim.host_seconds() == pytest.approx(2 * 4.096e-3)
    assert target.eq(3).all()


def test_a_parcel_goes_home_in_pieces_as_large_as_the_loads_leave_room_for(sim):
    rig = Rig(yielding(share=lambda nbytes: nbytes / 4))
    target = rig.home()
    parcel = rig.engine.send_group([(rig.made(), target)], makers=[rig.main])
    for left in (3, 2, 1, 0):
        rig.load()
        assert parcel.left == left * NBYTES // 4
    assert parcel.sent
    assert sim.d2h_copies() == 4
    parcel.synchronize()
    assert target.eq(3).all()


def test_small_shares_are_saved_up_for_a_piece(sim):
    rig = Rig(yielding(share=lambda nbytes: nbytes / 16, piece=1024))
    parcel = rig.engine.send_group([(rig.made(), rig.home())], makers=[rig.main])
    for _ in range(3):
        rig.load()
        assert parcel.left == NBYTES
    rig.load()
    assert parcel.left == NBYTES - 1024
    rig.engine.drain()


def test_without_room_beside_loads_parcels_wait_for_somebody_who_needs_them(sim):
    rig = Rig(yielding(share=lambda nbytes: 0.0))
    target = rig.home()
    parcel = rig.engine.send_group([(rig.made(), target)], makers=[rig.main])
    for _ in range(3):
        rig.load()
    assert not parcel.query()
    assert sim.d2h_copies() == 0
    parcel.synchronize()
    assert target.eq(3).all()


def test_a_stream_that_waits_for_a_parcel_sends_it(sim):
    rig = Rig(yielding())
    source, target = rig.made(), rig.home()
    parcel = rig.engine.send_group([(source, target)], makers=[rig.main])
    rig.main.wait_event(event_of(parcel))
    source.zero_()  # behind the copy
    torch.accelerator.synchronize()
    assert target.eq(3).all()


def test_a_parcel_can_be_brought_back_before_it_was_sent(sim):
    rig = Rig(yielding())
    target = torch.zeros(NBYTES, dtype=torch.uint8, pin_memory=True)
    source = torch.full((NBYTES,), 9, dtype=torch.uint8, device="hpu")
    parcel = rig.engine.send_group([(source, target)], makers=[rig.main])
    back = torch.zeros(NBYTES, dtype=torch.uint8, device="hpu")
    done = rig.engine.bring_group(target, back, after=parcel, maker=rig.main)
    rig.main.wait_event(done)
    assert back.eq(9).all()
    back.record_stream(rig.main)


def test_more_than_the_backlog_goes_at_once_oldest_first(sim):
    rig = Rig(yielding(backlog=2 * NBYTES))
    parcels = [
        rig.engine.send_group([(rig.made(), rig.home())], makers=[rig.main])
        for _ in range(3)
    ]
    assert [parcel.sent for parcel in parcels] == [True, False, False]
    assert rig.traffic.backlog == 2 * NBYTES
    rig.engine.drain()
    assert all(parcel.sent for parcel in parcels)
    assert rig.traffic.backlog == 0


@pytest.mark.parametrize("end", ["leave", "flush_home", "drain"])
def test_nothing_is_left_behind(sim, end):
    rig = Rig(yielding())
    target = rig.home()
    rig.engine.send_group([(rig.made(), target)], makers=[rig.main])
    getattr(rig.engine, end)()
    torch.accelerator.synchronize()
    assert target.eq(3).all()


def test_a_gradients_memory_is_not_reused_before_its_parcel_is_home(sim):
    """Its owner lets go of it at once; the allocator hands out the same memory."""
    rig = Rig(yielding())
    target = rig.home()
    grad = rig.made(keep=False)
    rig.engine.carry_home(grad, target, block=0, maker=rig.main, shared=False)
    del grad
    other = rig.made(5.0)
    rig.load()
    more = rig.made(6.0)
    rig.engine.drain()
    assert target.eq(3).all()
    del other, more


def test_what_its_maker_goes_on_to_change_does_not_wait(sim):
    rig = Rig(yielding())
    grad, target = rig.made(), rig.home()
    rig.engine.carry_home(grad, target, block=0, maker=rig.main, shared=True)
    grad.zero_()
    rig.device.synchronize()
    assert target.eq(3).all()


def test_a_parcel_waits_for_the_stream_that_made_it(sim):
    rig = Rig(yielding())
    side = rig.device.new_stream()
    target = rig.home()
    with side:
        made = rig.made()
        parcel = rig.engine.send_group([(made, target)], makers=[side])
    rig.load()
    parcel.synchronize()
    assert target.eq(3).all()
    made.record_stream(rig.main)


def test_a_parcel_that_does_not_wait_for_its_maker_is_a_race(sim):
    """So the test above would notice."""
    rig = Rig(yielding())
    side = rig.device.new_stream()
    with sim.expect_races():
        with side:
            made = rig.made()
            parcel = rig.engine.send_group([(made, rig.home())], makers=[side])
        parcel._ready = ()
        parcel.synchronize()
        rig.device.synchronize()


def test_a_group_goes_home_as_one_parcel(sim):
    rig = Rig(yielding(share=lambda nbytes: nbytes))
    pairs = [(rig.made(value), rig.home()) for value in (1.0, 2.0, 3.0)]
    parcel = rig.engine.send_group(pairs, makers=[rig.main])
    for left in (2, 1, 0):
        rig.load()
        assert parcel.left == left * NBYTES
    parcel.synchronize()
    assert [int(target[0]) for _, target in pairs] == [1, 2, 3]


def test_strided_copies_go_whole(sim):
    rig = Rig(yielding(share=lambda nbytes: nbytes / 8))
    source = torch.arange(64.0, device="hpu").view(8, 8).t()
    target = torch.empty(64, pin_memory=True).as_strided((8, 8), (1, 8))
    parcel = rig.engine.send_group([(source, target)], makers=[rig.main])
    rig.load()
    parcel.synchronize()
    assert sim.d2h_copies() == 1
    assert torch.equal(target, torch.arange(64.0).view(8, 8).t())


# Failures


def assert_all_through(rig, pairs):
    """What was put aside is home, and the next copy starts as the first did."""
    rig.engine.drain()
    for source, target in pairs:
        assert torch.equal(target, source.cpu())
    assert rig.traffic.backlog == rig.traffic.d2h.in_flight == 0
    assert rig.engine.deny_home(Priority.BACKGROUND) is None


def test_an_interrupt_anywhere_stops_nothing_for_ever(sim):
    """What was being sent was lost: its bytes, and the slot that it was counted in."""
    for line in itertools.count(1):
        rig = Rig(yielding(share=lambda nbytes: nbytes / 4, backlog=2 * NBYTES))
        pairs, interrupted = [], False
        try:
            with interrupted_at(line, Traffic.__module__):
                for number in range(1, 5):
                    pair = rig.made(float(number)), rig.home()
                    rig.engine.send_group([pair], makers=[rig.main])
                    pairs.append(pair)
                    rig.load()
                rig.engine.flush_home()
        except KeyboardInterrupt:
            interrupted = True
        assert_all_through(rig, pairs)
        if not interrupted:
            break
    assert line > 100


@pytest.mark.parametrize("fails", [False, True])
def test_a_parcel_that_the_collector_sends_in_mid_copy_is_sent_once(sim, fails):
    """Or the rest of it is, where the collector failed and nobody heard."""
    rig = Rig(yielding())
    pairs = [(rig.made(value), rig.home()) for value in (1.0, 2.0)]
    parcel = rig.engine.send_group(pairs, makers=[rig.main])
    copy, inside = parcel._copy, []

    def collected(target, source):
        inside.append(target)
        if len(inside) == 1:
            with contextlib.suppress(RuntimeError):
                rig.traffic.flush()
        elif fails and len(inside) == 3:
            raise RuntimeError
        copy(target, source)

    parcel._copy = collected
    parcel.synchronize()
    assert parcel.left == 0
    assert_all_through(rig, pairs)


def test_a_traffic_that_has_ended_limits_nothing(sim):
    ended = traffic()
    ended.bounds.post("test", Limits(suppress_speculative=True))
    for _ in range(2):
        ended.hold_slot(ended.h2d)
    ended.end()
    assert ended.deny_load(Priority.SPECULATIVE) is None
    # A thread that was in the middle of a phase posts once more.
    ended.bounds.post("test", Limits(suppress_speculative=True, inflight_h2d=1))
    assert ended.deny_load(Priority.SPECULATIVE) is None


def test_a_copy_that_fails_is_made_when_it_is_asked_for_again(sim, monkeypatch):
    rig = Rig(yielding())
    pairs = [(rig.made(float(number)), rig.home()) for number in range(1, 4)]
    copy, failures = rig.device.copy, [RuntimeError("no"), None]

    def failing(*args):
        if failures and (error := failures.pop()):
            raise error
        copy(*args)

    parcel = rig.engine.send_group(pairs, makers=[rig.main])
    with monkeypatch.context() as patch:
        patch.setattr(rig.device, "copy", failing)
        with pytest.raises(RuntimeError, match="no"):
            parcel.synchronize()
        assert not parcel.sent
        assert parcel.left == rig.traffic.backlog == 2 * NBYTES
        parcel.synchronize()
    assert_all_through(rig, pairs)
