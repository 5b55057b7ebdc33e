"""A part of an account that several share."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exploring import running
from stagehand.core.ledger import Account, Mode, SubAccount
from stagehand.errors import ClosedError

MEMORY = (Mode.HARD, Mode.SOFT, Mode.BURST)
parts = st.integers(0, 1)
holders = st.sampled_from("xy")
sizes = st.integers(0, 60)


def two_parts(limit=100, own=(80, 80)):
    whole = Account("device", limit)
    return whole, *(
        SubAccount(name, n, whole) for name, n in zip("ab", own, strict=True)
    )


def test_parts_together_hold_no_more_than_the_whole():
    whole, one, other = two_parts()
    grant = one.grant(70, "slot")
    assert other.free_bytes == other.room_for("slot") == 30
    assert other.grant(31, "slot") is None
    assert other.peak_bytes == 0  # what was refused was never there
    assert other.grant(30, "slot")
    grant.release()
    assert whole.held_bytes == 30
    assert whole.peak_bytes == 100


def test_a_part_holds_no_more_than_its_own_limit():
    whole, one, _ = two_parts(own=(20, 80))
    assert one.grant(21, "slot") is None
    assert whole.held_bytes == 0


def test_a_limit_that_would_do_is_above_what_others_hold_of_the_whole():
    whole, one, other = two_parts(limit=100, own=(60, 80))
    one.grant(50, "slot")
    assert one.limit_for(20) == 70  # the whole has that
    other.grant(40, "slot")
    assert one.limit_for(10) == 60
    assert one.limit_for(20) == whole.limit_for(20) == 110


def test_the_whole_knows_who_holds_what():
    whole, one, other = two_parts()
    one.grant(10, "slot")
    one.grant(5, "wire")
    other.grant(7, "slot")
    assert whole.holders() == {"a": 15, "b": 7}
    assert one.holders() == {"slot": 10, "wire": 5}


def test_a_lowered_whole_is_an_overdraft_of_each_part():
    whole, one, other = two_parts()
    one.grant(60, "slot")
    whole.set_limit(50)
    assert one.overdraft_bytes == other.overdraft_bytes == 10


def test_a_soft_grant_takes_what_the_whole_has():
    _, one, other = two_parts()
    one.grant(70, "slot")
    grant = other.grant(50, "slot", mode=Mode.SOFT)
    assert grant.nbytes == 30


def test_the_whole_forgets_a_part_that_has_left():
    whole, one, other = two_parts()
    grant = one.grant(70, "slot")
    one.detach()
    assert whole.held_bytes == 0
    assert other.grant(80, "slot")
    grant.release()
    assert whole.held_bytes == 80
    with pytest.raises(ClosedError):
        one.grant(1, "slot")


def test_a_floor_of_a_part_is_kept_by_the_whole_or_refused():
    whole, one, other = two_parts()
    assert other.grant(60, "slot")
    assert one.grant(41, "cache", mode=Mode.FLOOR) is None
    assert one.promised_bytes == 0
    assert whole.promised_bytes == 60
    assert one.grant(40, "cache", mode=Mode.FLOOR)
    assert other.room_for("slot") == other.free_bytes == 0
    assert other.grant(1, "slot") is None
    assert one.grant(1, "slot") is None  # it is not a floor of the part for anybody
    assert one.room_for("slot") == 0
    held = one.grant(40, "cache")
    assert whole.promised_bytes == whole.held_bytes == 100
    held.release()
    assert whole.promised_bytes == 100


def test_a_floor_of_a_part_is_kept_where_the_whole_is_lowered():
    whole, one, _ = two_parts()
    floor = one.grant(40, "cache", mode=Mode.FLOOR)
    one.grant(30, "slot")
    whole.set_limit(50)
    held = one.grant(40, "cache")
    assert held.nbytes == 40
    held.release()
    floor.release()
    assert whole.promised_bytes == 30
    assert whole.floors() == {}


def test_beside_a_floor_the_soft_limit_of_the_whole_holds():
    whole, one, _ = two_parts()
    whole.set_soft_limit(60)
    assert one.grant(40, "cache", mode=Mode.FLOOR)
    assert one.room_for("slot") == 20
    assert one.grant(21, "slot") is None
    assert one.grant(40, "slot", mode=Mode.SOFT).nbytes == 20
    assert one.grant(40, "slot", mode=Mode.BURST) is None  # over the part's own limit
    assert one.grant(20, "slot", mode=Mode.BURST)


def test_what_comes_back_to_a_part_that_has_left_is_kept_by_nobody():
    whole, one, _ = two_parts()
    floor, grants = one.grant(30, "slot", mode=Mode.FLOOR), [one.grant(20, "slot")]
    grants.append(one.grant(40, "other"))
    one.detach()
    for grant in grants:
        grant.release()
        assert whole.promised_bytes == 0
    floor.release()
    assert whole.promised_bytes == 0


def test_a_part_that_leaves_takes_its_floors_along():
    whole, one, other = two_parts()
    floor = one.grant(40, "cache", mode=Mode.FLOOR)
    one.detach()
    floor.release()
    assert whole.promised_bytes == 0
    assert other.grant(80, "slot")


class AnyOrder(RuleBasedStateMachine):
    """Grants and releases of two parts, against plain sums."""

    def __init__(self):
        super().__init__()
        self.whole, *self.parts = two_parts()
        self.grants = [[], []]
        self.floors = [[], []]

    def held(self, part, holder):
        return sum(g.nbytes for g in self.grants[part] if g.holder == holder)

    def floor(self, part, holder):
        return sum(g.nbytes for g in self.floors[part] if g.holder == holder)

    def promised(self, part):
        return sum(max(self.held(part, h), self.floor(part, h)) for h in "xy")

    @rule(part=parts, nbytes=sizes, holder=holders, mode=st.sampled_from(MEMORY))
    def grant(self, part, nbytes, holder, mode):
        account = self.parts[part]
        room = account.room_for(holder, mode)
        grant = account.grant(nbytes, holder, mode=mode)
        if nbytes:
            fits = room > 0 if mode is Mode.SOFT else nbytes <= room
            assert (grant is not None) == fits
        if grant is not None:
            assert grant.nbytes == min(room, nbytes)
            self.grants[part].append(grant)

    @rule(part=parts, nbytes=sizes, holder=holders)
    def keep(self, part, nbytes, holder):
        floor = self.floor(part, holder) + nbytes
        more = max(0, floor - max(self.floor(part, holder), self.held(part, holder)))
        fits = all(
            account.promised_bytes + more <= account.limit_bytes
            for account in (self.parts[part], self.whole)
        )
        grant = self.parts[part].grant(nbytes, holder, mode=Mode.FLOOR)
        assert (grant is not None) == fits
        if grant is not None:
            self.floors[part].append(grant)

    @rule(part=parts, which=st.sampled_from(["grants", "floors"]))
    def release(self, part, which):
        grants = getattr(self, which)[part]
        if grants:
            grants.pop().release()

    @rule(limit=st.integers(40, 120), soft=st.none() | st.integers(30, 120))
    def set_limits(self, limit, soft):
        self.whole.set_limit(limit)
        self.whole.set_soft_limit(soft)

    @invariant()
    def sums_agree(self):
        held = [sum(grant.nbytes for grant in grants) for grants in self.grants]
        assert [part.held_bytes for part in self.parts] == held
        assert self.whole.held_bytes == sum(held)
        promised = [self.promised(part) for part in (0, 1)]
        assert [part.promised_bytes for part in self.parts] == promised
        assert self.whole.promised_bytes == sum(promised)

    @invariant()
    def every_floor_is_met(self):
        for part, holder in ((p, h) for p in (0, 1) for h in "xy"):
            rest = self.floor(part, holder) - self.held(part, holder)
            if rest > 0:
                grant = self.parts[part].grant(rest, holder)
                assert grant is not None
                grant.release()

    def teardown(self):
        for grant in [g for some in (*self.grants, *self.floors) for g in some]:
            grant.release()
        assert self.whole.promised_bytes == 0
        assert not self.whole._parties


AnyOrder.TestCase.settings = running(80, 30)
TestAnyOrder = AnyOrder.TestCase


def test_what_a_ceiling_in_the_whole_refuses_was_never_there():
    whole, one, _ = two_parts()
    whole.grant(10, "a", mode=Mode.CEILING)
    assert one.grant(20, "slot") is None
    assert one.peak_bytes == one.held_bytes == 0
    assert one.grant(10, "slot")


def test_the_whole_keeps_nothing_for_a_part_that_has_left():
    whole, one, other = two_parts()
    one.grant(50, "floor", mode=Mode.FLOOR)
    assert whole.floors() == {"a": 50}
    one.detach()
    assert whole.floors() == {}
    assert other.grant(80, "slot")
