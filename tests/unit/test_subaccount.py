"""A part of an account that several share."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagehand.core.ledger import Account, Mode, SubAccount
from stagehand.errors import ClosedError


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


class AnyOrder(RuleBasedStateMachine):
    """Grants and releases of two parts, against plain sums."""

    def __init__(self):
        super().__init__()
        self.whole, *self.parts = two_parts()
        self.grants = [[], []]

    @rule(part=st.integers(0, 1), nbytes=st.integers(0, 60))
    def grant(self, part, nbytes):
        account = self.parts[part]
        room = account.room_for("slot")
        within = account.overdraft_bytes == 0
        grant = account.grant(nbytes, "slot")
        assert (grant is not None) == (within and nbytes <= room)
        if grant is not None:
            self.grants[part].append(grant)

    @rule(part=st.integers(0, 1))
    def release(self, part):
        if self.grants[part]:
            self.grants[part].pop().release()

    @rule(limit=st.integers(40, 120))
    def set_limit(self, limit):
        self.whole.set_limit(limit)

    @invariant()
    def sums_agree(self):
        held = [sum(grant.nbytes for grant in grants) for grants in self.grants]
        assert [part.held_bytes for part in self.parts] == held
        assert self.whole.held_bytes == sum(held)
        assert self.whole.promised_bytes == sum(held)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestAnyOrder = AnyOrder.TestCase
