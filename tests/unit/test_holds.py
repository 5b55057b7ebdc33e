"""The books of who asked that whose blocks stay."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exploring import running
from stagehand.errors import ConfigError, StagehandInternalError
from stagehand.residency.holds import Holds, Reservation, ResidentPriority

PRIMARY, SECONDARY = ResidentPriority
FIRM = Reservation(nbytes=8, priority=PRIMARY)
LOOSE = Reservation(nbytes=8, priority=SECONDARY)
SMALL = Reservation(nbytes=8, priority=SECONDARY, asked_for=False)


def test_a_keep_lasts_until_as_many_have_ended_as_began():
    holds = Holds()
    holds.keep(1)
    holds.keep(1)
    holds.end_keep(1)
    assert holds.kept == holds.held == {1}
    holds.end_keep(1)
    assert holds.kept == holds.held == frozenset()
    holds.end_keep(1)  # its tenant may have left in between
    holds.check()


def test_only_a_primary_reservation_and_a_keep_are_never_taken_from():
    holds = Holds()
    holds.reserve(1, FIRM)
    holds.reserve(2, LOOSE)
    holds.keep(3)
    assert holds.held == {1, 3}
    assert list(holds.reserved) == [1, 2]


def test_a_tenant_has_one_reservation_and_the_latest_counts():
    holds = Holds()
    holds.reserve(1, FIRM)
    holds.reserve(1, LOOSE)
    assert holds.reserved == {1: LOOSE}
    assert holds.release(1)
    assert not holds.release(1)


def test_a_guest_has_no_reservation():
    holds = Holds()
    holds.reserve(1, LOOSE)
    with pytest.raises(ConfigError, match="cannot be a guest"):
        holds.begin_guest(1)
    holds.begin_guest(2)
    with pytest.raises(ConfigError, match="cannot have a reservation"):
        holds.reserve(2, LOOSE)
    assert holds.guests == {2}
    assert not Holds().end_guest(2)
    holds.begin_guest(2)
    assert not holds.end_guest(2)
    assert holds.end_guest(2)


def test_what_a_pipeline_reserved_gives_way_to_a_guest():
    holds = Holds()
    holds.reserve(1, SMALL)
    assert holds.why(1) == "small"
    holds.begin_guest(1)
    assert holds.reserved == {}


def test_reasons_are_told_in_words():
    holds = Holds()
    assert holds.why(1) == "not held"
    holds.reserve(1, FIRM)
    holds.keep(1)
    assert holds.why(1) == "reserved, PRIMARY and kept resident"
    holds.begin_guest(2)
    assert holds.why(2) == "a guest"
    assert repr(holds) == "Holds(1 reserved, 1 kept, 1 guests)"


def test_broken_books_are_noticed():
    holds = Holds()
    holds._keeps[1] = 0
    with pytest.raises(StagehandInternalError, match="counts"):
        holds.check()


tenants = st.integers(0, 3)


class AnyOrder(RuleBasedStateMachine):
    """Whatever begins and ends, in any order, against plain counts."""

    def __init__(self):
        super().__init__()
        self.holds = Holds()
        self.keeps, self.guests, self.reserved = Counter(), Counter(), {}

    @rule(who=tenants)
    def keep(self, who):
        self.holds.keep(who)
        self.keeps[who] += 1

    @rule(who=tenants)
    def end_keep(self, who):
        self.holds.end_keep(who)
        self.keeps[who] = max(0, self.keeps[who] - 1)

    @rule(who=tenants, reservation=st.sampled_from([FIRM, LOOSE, SMALL]))
    def reserve(self, who, reservation):
        if self.guests[who]:
            with pytest.raises(ConfigError):
                self.holds.reserve(who, reservation)
        else:
            self.holds.reserve(who, reservation)
            self.reserved[who] = reservation

    @rule(who=tenants)
    def release(self, who):
        assert self.holds.release(who) == (self.reserved.pop(who, None) is not None)

    @rule(who=tenants)
    def begin_guest(self, who):
        if who in self.reserved and self.reserved[who].asked_for:
            with pytest.raises(ConfigError):
                self.holds.begin_guest(who)
        else:
            self.holds.begin_guest(who)
            self.reserved.pop(who, None)
            self.guests[who] += 1

    @rule(who=tenants)
    def end_guest(self, who):
        assert self.holds.end_guest(who) == (self.guests[who] == 1)
        self.guests[who] = max(0, self.guests[who] - 1)

    @rule(who=tenants)
    def forget(self, who):
        self.holds.forget(who)
        self.keeps[who] = self.guests[who] = 0
        self.reserved.pop(who, None)

    @invariant()
    def books_agree(self):
        self.holds.check()
        assert self.holds.reserved == self.reserved
        assert self.holds.kept == {who for who, n in self.keeps.items() if n}
        assert self.holds.guests == {who for who, n in self.guests.items() if n}
        firm = {who for who, held in self.reserved.items() if held.is_firm}
        assert self.holds.held == self.holds.kept | firm


AnyOrder.TestCase.settings = running(60, 25)
TestAnyOrder = AnyOrder.TestCase
