"""The books of who asked that whose blocks stay."""

from collections import defaultdict

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


def test_a_tenant_is_kept_until_each_keep_has_ended():
    holds = Holds()
    holds.keep(1, "first")
    holds.keep(1, "second")
    for _ in range(2):
        holds.end_keep(1, "second")
        assert holds.kept == holds.held == {1}
    holds.end_keep(1, "first")
    assert holds.kept == holds.held == frozenset()
    holds.end_keep(1, "first")  # its tenant may have left in between
    holds.check()


def test_only_a_primary_reservation_and_a_keep_are_never_taken_from():
    holds = Holds()
    holds.reserve(1, FIRM)
    holds.reserve(2, LOOSE)
    holds.keep(3, "one")
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
        holds.begin_guest(1, "one")
    holds.begin_guest(2, "first")
    with pytest.raises(ConfigError, match="cannot have a reservation"):
        holds.reserve(2, LOOSE)
    assert holds.guests == {2}


def test_a_tenant_is_a_guest_until_its_last_visit_ends():
    holds = Holds()
    holds.end_guest(2, "first")
    holds.begin_guest(2, "first")
    assert holds.is_last(2, "first")
    holds.begin_guest(2, "second")
    for _ in range(2):
        assert not holds.is_last(2, "first")
        holds.end_guest(2, "first")
        assert holds.guests == {2}
    assert holds.is_last(2, "second")
    holds.end_guest(2, "second")
    assert holds.guests == frozenset()
    assert not holds.is_last(2, "second")


def test_what_a_pipeline_reserved_gives_way_to_a_guest():
    holds = Holds()
    holds.reserve(1, SMALL)
    assert holds.why(1) == "small"
    holds.begin_guest(1, "one")
    assert holds.reserved == {}


def test_reasons_are_told_in_words():
    holds = Holds()
    assert holds.why(1) == "not held"
    holds.reserve(1, FIRM)
    holds.keep(1, "one")
    assert holds.why(1) == "reserved, PRIMARY and kept resident"
    holds.begin_guest(2, "one")
    assert holds.why(2) == "a guest"
    assert repr(holds) == "Holds(1 reserved, 1 kept, 1 guests)"


def test_broken_books_are_noticed():
    holds = Holds()
    holds._keeps[1] = set()
    with pytest.raises(StagehandInternalError, match="counts"):
        holds.check()


tenants = st.integers(0, 3)
tokens = st.integers(0, 2)


def note(found, token):
    if token not in found:
        found.append(token)


def forget(found, token):
    if token in found:
        found.remove(token)


class AnyOrder(RuleBasedStateMachine):
    """Whatever begins and ends, in any order, against plain lists."""

    def __init__(self):
        super().__init__()
        self.holds = Holds()
        self.keeps, self.guests, self.reserved = (
            defaultdict(list),
            defaultdict(list),
            {},
        )

    @rule(who=tenants, token=tokens)
    def keep(self, who, token):
        self.holds.keep(who, token)
        note(self.keeps[who], token)

    @rule(who=tenants, token=tokens)
    def end_keep(self, who, token):
        self.holds.end_keep(who, token)
        forget(self.keeps[who], token)

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

    @rule(who=tenants, token=tokens)
    def begin_guest(self, who, token):
        if who in self.reserved and self.reserved[who].asked_for:
            with pytest.raises(ConfigError):
                self.holds.begin_guest(who, token)
        else:
            self.holds.begin_guest(who, token)
            self.reserved.pop(who, None)
            note(self.guests[who], token)

    @rule(who=tenants, token=tokens)
    def end_guest(self, who, token):
        assert self.holds.is_last(who, token) == (self.guests[who] == [token])
        self.holds.end_guest(who, token)
        forget(self.guests[who], token)

    @rule(who=tenants)
    def forget(self, who):
        self.holds.forget(who)
        self.keeps[who], self.guests[who] = [], []
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
