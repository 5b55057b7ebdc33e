"""Who may take what from whom: the books of a shared device."""

import threading
from dataclasses import replace

import pytest
import torch
from test_turn import as_thread

from stagehand.core.device import HostDevice
from stagehand.core.ledger import Account, SubAccount
from stagehand.core.turn import HERE
from stagehand.errors import StagehandOOMError
from stagehand.residency.holds import ResidentPriority
from stagehand.residency.seats import Seats
from stagehand.residency.shared import SharedDevice
from stagehand.residency.shares import Claim


class Tenant:
    """One with a budget, that holds some bytes."""

    def __init__(self, name, whole, *, budget, held, **claims):
        self.name = name
        self.account = SubAccount(name, budget, whole)
        self._claim = Claim(
            budget=budget,
            weights=40,
            floor=10,
            ring=10,
            seconds=lambda kept: 50.0 - kept,
            **claims,
        )
        self._grant = self.account.grant(held, "slots")

    def claim(self):
        return self._claim

    def claims(self, **claims):
        self._claim = replace(self._claim, **claims)

    def owner(self):
        return None

    def ends_alone(self):
        return False

    def may_stand_back(self):
        return False

    def set_held(self, nbytes):
        self._grant.release()
        self._grant = self.account.grant(nbytes, "slots")

    def give_up(self, keep_bytes, *, leaves=False):
        return False  # another thread has its lock


@pytest.mark.parametrize("is_guest", [True, False])
def test_a_guest_is_given_nothing_of_what_is_reserved_for_others(is_guest):
    """Nor where who has more than it keeps is busy: then a guest waits for that. What
    is there beside the reservation is given."""
    whole = Account("device", 100)
    seats = Seats(whole, torch.device("cpu"))
    reserved, plain, asks = (
        seats.add(seats.new_number(), Tenant(name, whole, budget=100, held=held))
        for name, held in (("reserved", 45), ("plain", 35), ("asks", 10))
    )
    seats.reserve(reserved, ResidentPriority.SECONDARY, asked_for=True)
    if is_guest:
        seats.begin_guest(asks, "one")
    givers = list(seats.givers(asks))
    assert givers == [(plain, 0), (reserved, 40 if is_guest else 0)]
    reserved.tenant.set_held(40)
    givers = list(seats.givers(asks))
    assert givers == ([(plain, 0)] if is_guest else [(plain, 0), (reserved, 0)])


def test_who_needs_more_in_mid_pass_is_promised_what_others_can_give_up():
    shared = SharedDevice(HostDevice())
    whole = shared.ledger.device
    plain, held, asks = (
        Tenant(name, whole, budget=100, held=0) for name in ("plain", "held", "asks")
    )
    numbers = [shared.new_number() for _ in range(3)]
    for number, tenant in zip(numbers, (plain, held, asks), strict=True):
        shared.join(number, tenant)
    plain._grant = plain.account.grant(35, "slots")
    shared.reserve(numbers[1], ResidentPriority.PRIMARY)  # 40 bytes
    assert shared.widen(numbers[2], 20, 50) == 50
    assert shared.widen(numbers[2], 50, 90) == 60
    assert shared.widen(numbers[2], 70, 90) == 70
    assert shared.widen(shared.new_number(), 20, 50) == 20  # it has left


def test_what_who_has_left_held_does_not_count_for_those_who_stay():
    """A grant that is released late, say behind the last copy, changes nothing then."""
    whole = Account("device", 100)
    seats = Seats(whole, torch.device("cpu"))
    numbers = seats.new_number(), seats.new_number()
    leaves, stays = (
        Tenant(name, whole, budget=100, held=45) for name in ("leaves", "stays")
    )
    seats.add(numbers[0], leaves)
    seats.add(numbers[1], stays)
    assert seats.forget(numbers[0])
    assert not seats.forget(numbers[0])
    assert whole.held_bytes == 45
    leaves._grant.release()
    assert whole.held_bytes == 45


def test_who_is_refused_has_no_place():
    shared = SharedDevice(HostDevice())
    whole = shared.ledger.device
    there = Tenant("there", whole, budget=45, held=0)
    number = shared.new_number()
    shared.join(number, there)
    shared.reserve(number, ResidentPriority.PRIMARY)
    with pytest.raises(StagehandOOMError, match="reserved for there"):
        shared.join(shared.new_number(), Tenant("late", whole, budget=20, held=0))
    assert [holding.name for holding in shared.holdings()] == ["there"]


def test_a_pass_goes_on_here_when_the_thread_where_it_began_is_in_no_call():
    shared = SharedDevice(HostDevice())
    numbers = [shared.new_number() for _ in "ab"]
    for number in numbers:
        shared.join(number, Tenant("it", shared.ledger.device, budget=9, held=0))
    for number in numbers:
        shared._seats[number].thread = object()
    shared._seats[numbers[0]].running = True
    answers = iter([False, True, True])
    for number in numbers:
        shared.go_on_here(number, lambda: next(answers))
    runs, idle = (shared._seats[number].runs_elsewhere() for number in numbers)
    assert not runs
    assert idle  # no pass: the other thread takes something between its passes
    assert next(answers, None) is None
    shared._seats[numbers[0]].thread = object()
    with shared._lock:  # which the other thread's call may need
        shared.go_on_here(numbers[0], lambda: False)
    assert shared._seats[numbers[0]].runs_elsewhere()


@pytest.mark.parametrize("limit", [40, 70])
def test_room_is_awaited_that_a_pass_which_begins_elsewhere_gives_up(
    monkeypatch, limit
):
    """Its thread has been told of its limit, and has not followed yet."""
    shared = SharedDevice(HostDevice())
    whole, numbers = shared.ledger.device, [shared.new_number() for _ in "ab"]
    asks, begins = (Tenant(name, whole, budget=100, held=0) for name in ("it", "other"))
    for number, tenant in zip(numbers, (asks, begins), strict=True):
        shared.join(number, tenant)
    grants = [tenant.account.grant(30, "slots") for tenant in (asks, begins, begins)]
    for number in numbers:
        shared._seats[number].running, shared._seats[number].limit = True, limit
    shared._seats[numbers[0]].thread = threading.current_thread()
    shared._seats[numbers[1]].thread = threading.Thread()
    monkeypatch.setattr(shared._changed, "wait", lambda _: grants[-1].release())
    assert (whole.limit_bytes, whole.held_bytes) == (100, 90)
    assert shared.make_room(numbers[0], 30) is (limit < 60)


def seated(*held, **claims):
    """Seats of tenants that hold some bytes each, of 100."""
    whole = Account("device", 100)
    seats = Seats(whole, torch.device("cpu"))
    names = "abc"[: len(held)]
    tenants = [
        Tenant(name, whole, budget=100, held=nbytes, **claims)
        for name, nbytes in zip(names, held, strict=True)
    ]
    return seats, *(seats.add(seats.new_number(), tenant) for tenant in tenants)


def run_elsewhere(seat, limit):
    """As another thread's pass does."""
    seat.limit, seat.running, seat.thread = limit, True, object()


def test_the_cap_sinks_when_passes_that_were_promised_more_have_ended():
    seats, runs, idle = seated(30, 0)
    run_elsewhere(runs, 100)
    for seat in (runs, idle):
        seat.tenant.claims(budget=60)
    seats.renew()
    assert seats.account.limit_bytes == 100
    seats.note_end(runs)
    assert seats.account.limit_bytes == 60


@pytest.mark.parametrize("why", ["kept", "waits", "between passes"])
def test_beside_a_pass_the_cap_keeps_what_others_do_not_give_up(why):
    seats, runs, other, largest = seated(30, 25, 0)
    run_elsewhere(runs, 60)
    if why == "kept":
        seats.keep(other.number, "one")
    else:
        other.thread, other.waits, other.limit = object(), why == "waits", 35
    for seat in (runs, other):
        seat.tenant.claims(budget=60)
    seats.forget(largest.number)
    assert seats.account.limit_bytes == 60 + (35 if why == "between passes" else 25)


def test_a_pass_that_has_ended_leaves_no_thread_and_may_have_changed_a_claim():
    seats, runs, _ = seated(30, 30)
    run_elsewhere(runs, 60)
    assert seats.share_of(runs).kept == 40
    runs.tenant.claims(weights=20)
    seats.note_end(runs)
    assert not runs.runs_elsewhere()
    assert seats.share_of(runs).kept == 20


def test_a_pass_has_what_those_who_run_and_those_who_stay_leave_it():
    seats, asks, runs, idle = seated(0, 40, 5)
    run_elsewhere(runs, 60)
    assert seats.promised(asks) == 20, "not what an idle one does not hold yet"
    assert seats.there(asks) == 100 - 45 - 20
    run_elsewhere(runs, 95)
    assert seats.limit_now(asks) == 5, "less than it needs"
    seats.note_end(runs)
    assert seats.limit_now(asks) >= 10
    seats.reserve(idle, ResidentPriority.PRIMARY, asked_for=True)
    assert seats.budget_for(asks, 70) == 70 + 40
    assert seats.budget_for(asks, 50) == 50


def test_those_are_asked_first_who_have_more_than_they_keep():
    seats, asks, more, keeps = seated(0, 30, 35)
    seats.begin_guest(more, "one")
    assert seats.share_of(keeps).kept >= 35
    assert list(seats.givers(asks)) == [(more, 0), (keeps, 0)]
    seats.keep(keeps.number, "one")
    assert list(seats.givers(asks)) == [(more, 0)]
    keeps.tenant.set_held(70)
    assert list(seats.givers(asks)) == [(more, 0), (keeps, seats.share_of(keeps).kept)]
    keeps.tenant.set_held(35)
    run_elsewhere(more, 30)
    assert list(seats.givers(asks)) == []


def test_who_is_kept_takes_of_a_larger_cap_though_there_was_nothing_for_it():
    seats, asks, keeps = seated(0, 0)
    asks.tenant.claims(floor=100, weights=200)
    seats.note_claim(asks)
    seats.keep(keeps.number, "one")
    assert seats.share_of(keeps).kept == 0
    assert seats.budget_for(asks, 120) == 120
    assert seats.budget_for(asks, 120, at_once=True) == 120 + 40
    seats.keep(asks.number, "two")
    assert seats.budget_for(asks, 120, at_once=True) == 120 + 40


def test_a_reservation_that_gives_way_does_so_behind_what_nobody_keeps():
    seats, asks, keeps, reserved = seated(0, 50, 40)
    seats.keep(keeps.number, "one")
    seats.reserve(reserved, ResidentPriority.SECONDARY, asked_for=True)
    kept = seats.share_of(keeps).kept
    assert kept < 50
    assert list(seats.givers(asks)) == [(keeps, kept), (reserved, 0)]


def test_a_guest_that_is_refused_is_none():
    seats, guest, there = seated(0, 40)
    seats.reserve(there, ResidentPriority.PRIMARY, asked_for=True)
    guest.tenant.claims(floor=70)
    with pytest.raises(StagehandOOMError, match=r"b holds 40 B.*reserved, PRIMARY"):
        seats.begin_guest(guest, "one")
    assert seats.holds.guests == frozenset()
    assert not guest.leaves


def test_a_guest_is_refused_what_others_train_and_cannot_give_up():
    seats, guest, *_ = seated(0, 48, 48, bound=48)
    with pytest.raises(StagehandOOMError, match=r"6 B are missing: b holds 48 B.*; c"):
        seats.begin_guest(guest, "one")
    assert seats.holds.guests == frozenset()


def test_kept_tenants_leave_each_other_and_the_others_what_they_need():
    """Of 100: one that needs 60 runs beside those that are kept, by turns."""
    seats, first, second, runs = seated(0, 0, 0)
    for seat in (first, second, runs):
        seat.tenant.claims(floor=60, weights=100)
    seats.renew()
    seats.keep(first.number, "one")
    assert seats.share_of(first).kept == 40
    seats.keep(second.number, "one")
    assert seats.share_of(first).kept + seats.share_of(second).kept == 40
    assert [seats.limit_now(seat) for seat in (first, second, runs)] == [60, 60, 60]


def test_a_reservation_that_gives_way_to_others_leaves_guests_what_they_need():
    seats, guest, asks = seated(0, 0)
    guest.tenant.claims(floor=70)
    seats.begin_guest(guest, "one")
    with pytest.raises(StagehandOOMError, match=r"70 B that other models need to run"):
        seats.reserve(asks, ResidentPriority.SECONDARY, asked_for=True)
    seats.end_guest(guest, "one")
    assert seats.reserve(asks, ResidentPriority.SECONDARY, asked_for=True) == 40


@pytest.mark.parametrize("hold", ["kept", "reserved"])
def test_who_holds_room_leaves_the_others_all_that_they_need_by_turns(hold):
    seats, holds, *others = seated(0, 8, 8)
    for number, seat in enumerate(others):
        seat.tenant.claims(floor=10, bound=8 - number)
    holds.tenant.claims(weights=200)
    seats.renew()
    if hold == "kept":
        seats.keep(holds.number, "one")
        assert seats.share_of(holds).kept == 100 - 8 - 7 - 3
    else:
        reserved = seats.reserve(holds, ResidentPriority.PRIMARY, asked_for=True)
        assert reserved == 100 - 8 - 7 - 3


def test_a_reservation_that_gives_way_keeps_nobody_from_joining():
    seats, late, there = seated(0, 40)
    seats.reserve(there, ResidentPriority.SECONDARY, asked_for=True)
    late.claim = needy = replace(late.claim, floor=70)
    seats.check_floor(late)
    late.tenant.claims(floor=10)
    seats.renew()
    seats.reserve(there, ResidentPriority.PRIMARY, asked_for=True)
    late.claim = needy
    with pytest.raises(StagehandOOMError, match="reserved for b"):
        seats.check_floor(late)


def test_who_waits_leaves_what_it_does_not_hold_and_has_no_thread_afterwards():
    seats, waits, _ = seated(30, 0)
    run_elsewhere(waits, 60)
    assert waits.takes(seats.share_of(waits)) == 60
    waits.waits = waits.asked = waits.gave = True
    assert waits.takes(seats.share_of(waits)) == 30
    waits.end_wait()
    assert not any((waits.waits, waits.asked, waits.gave, waits.thread))


def test_who_waits_keeps_what_cannot_leave_and_more_at_ease():
    seats, waits, _ = seated(30, 30, fixed=15, bound=5)
    assert (seats.least(waits), seats.at_ease(waits)) == (5, 15)
    seats.keep(waits.number, "one")
    assert seats.least(waits) == seats.share_of(waits).kept == 40


def shared_by(names, held):
    """A device of 100 bytes, and tenants by name with the numbers of their places."""
    shared = SharedDevice(HostDevice())
    whole, tenants = shared.ledger.device, {}
    for name, nbytes in zip(names, held, strict=True):
        tenant = Tenant(name, whole, budget=100, held=0)
        tenants[name] = shared.new_number(), tenant
        shared.join(*tenants[name])
        tenant._grant = tenant.account.grant(nbytes, "slots")
    return shared, tenants


def test_a_lock_that_is_released_in_the_middle_of_a_look_refuses_no_pass(monkeypatch):
    shared, tenants = shared_by(("asks", "has"), (0, 95))
    number, has = tenants["asks"][0], tenants["has"][1]
    owners = iter([threading.Thread()] * 2)  # it is asked for more of it twice
    monkeypatch.setattr(has, "owner", lambda: next(owners, None))

    def give_up(keep_bytes, *, leaves=False):
        has._grant.release()
        return True

    waits = lambda _: monkeypatch.setattr(has, "give_up", give_up)  # noqa: E731
    monkeypatch.setattr(shared._changed, "wait", waits)
    limit, _ = shared.begin(number)
    assert limit >= 10


def test_who_waits_for_room_that_is_there_by_now_is_no_part_of_a_circle(monkeypatch):
    """Its thread was told, and has not looked since: it will end what others need."""
    names = ("outer", "inner", "ends", "asks")
    shared, tenants = shared_by(names, (10, 0, 40, 0))
    numbers = {name: number for name, (number, _) in tenants.items()}
    waiting, waited = threading.Thread(), []
    for name, thread in (("outer", waiting), ("ends", threading.Thread())):
        seat = shared._seats[numbers[name]]
        seat.running, seat.thread, seat.limit = True, thread, seat.held
    tenants["inner"][1].claims(floor=70)
    tenants["asks"][1].claims(floor=95)
    for number, tenant in tenants.values():
        shared._seats[number].claim = tenant.claim()

    def end(name):
        shared.end(numbers[name], failed=True)
        tenants[name][1]._grant.release()
        monkeypatch.setattr(tenants[name][1], "give_up", lambda *_: True)

    def wait(_):
        waited.append(HERE.thread)
        if len(waited) == 1:  # of "inner"
            end("ends")
            with as_thread(threading.main_thread()):
                assert shared.begin(numbers["asks"])[0] >= 95
                shared.end(numbers["asks"], failed=True)
        else:  # the other thread has looked, and gone on
            shared._seats[numbers["inner"]].end_wait()
            end("outer")

    monkeypatch.setattr(shared._changed, "wait", wait)
    with as_thread(waiting):
        assert shared.begin(numbers["inner"])[0] >= 70
    assert waited == [waiting, threading.main_thread()]
