"""Accounts of bytes: grants, limits, watermarks."""

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exploring import running
from stagehand.core.ledger import Account, Ledger, Watermarks
from stagehand.errors import ClosedError, ConfigError, StagehandInternalError
from stagehand.units import MIB


def test_grant_that_fits_is_held_until_released():
    account = Account("device", 100)
    grant = account.grant(60, "blocks.0")
    assert (grant.nbytes, grant.holder) == (60, "blocks.0")
    assert (account.held_bytes, account.free_bytes) == (60, 40)
    grant.release()
    assert (account.held_bytes, account.free_bytes) == (0, 100)


def test_grant_that_does_not_fit_is_none_and_holds_nothing():
    account = Account("device", 100)
    account.grant(60, "blocks.0")
    assert account.grant(41, "blocks.1") is None
    assert account.holders() == {"blocks.0": 60}


def test_grant_up_to_the_last_byte_fits_and_zero_bytes_beside_it():
    account = Account("device", 100)
    assert account.grant(100, "blocks.0") is not None
    assert account.grant(0, "empty") is not None
    assert account.free_bytes == 0


def test_second_release_is_our_bug_and_names_the_holder():
    account = Account("pinned", 100)
    first = account.grant(60, "slab 3")
    account.grant(10, "slab 4")
    first.release()
    with pytest.raises(StagehandInternalError, match=r"'slab 3' was released twice"):
        first.release()
    assert account.held_bytes == 10


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Account("device", -1),
        lambda: Account("device", 9).set_limit(-1),
        lambda: Account("device", 9).grant(-1, "blocks.0"),
    ],
)
def test_negative_bytes_are_our_bug(ask):
    with pytest.raises(StagehandInternalError, match="device account is -1 bytes"):
        ask()


def test_lowered_limit_takes_nothing_away_and_grants_nothing_until_repaid():
    account = Account("device", 100)
    first, second = account.grant(50, "a"), account.grant(40, "b")
    account.set_limit(60)
    assert (account.held_bytes, account.overdraft_bytes) == (90, 30)
    assert account.free_bytes == 0
    assert account.grant(0, "c") is None
    second.release()
    assert account.overdraft_bytes == 0
    assert account.grant(10, "c") is not None
    first.release()
    assert account.peak_bytes == 90


def test_holders_sum_their_grants():
    account = Account("device", 100)
    for holder, nbytes in (("a", 10), ("b", 20), ("a", 5), ("empty", 0)):
        account.grant(nbytes, holder)
    assert account.holders() == {"a": 15, "b": 20, "empty": 0}


def test_closed_account_grants_nothing_and_takes_back_what_is_out():
    account = Account("device", 100)
    grant = account.grant(60, "blocks.0")
    account.close()
    account.close()
    with pytest.raises(ClosedError, match=r"'blocks\.1' asked it for 1 bytes"):
        account.grant(1, "blocks.1")
    assert account.holders() == {"blocks.0": 60}
    grant.release()
    assert account.held_bytes == 0


def test_ledger_keeps_device_and_pinned_bytes_apart():
    ledger = Ledger(Account("device", 100), Account("pinned", 10))
    assert ledger.device.grant(50, "blocks.0") is not None
    assert ledger.pinned.grant(11, "slab") is None
    assert (ledger.device.free_bytes, ledger.pinned.free_bytes) == (50, 10)
    ledger.close()
    for account in (ledger.device, ledger.pinned):
        with pytest.raises(ClosedError, match=f"the {account.name} account is closed"):
            account.grant(1, "late")


def test_repr_shows_live_counts():
    account = Account("device", 100)
    grant = account.grant(60, "a")
    assert repr(account) == (
        "Account('device', 60 of 100 bytes held in 1 grants, peak 60)"
    )
    assert repr(grant) == "Grant(60 device bytes, holder 'a')"


class SteppingIn(int):
    """A number of bytes that runs `step_in` when it is compared with what is there."""

    step_in = None

    def __le__(self, room):
        step_in, self.step_in = self.step_in, None
        if step_in is not None:
            step_in()
        return int(self) <= room


def test_two_threads_are_not_granted_the_same_bytes():
    """One thread asks for the last bytes while another is between look and take."""
    account = Account("device", 100)
    rival_grants = []
    rival = threading.Thread(
        target=lambda: rival_grants.append(account.grant(100, "rival"))
    )

    def rival_asks():
        rival.start()
        rival.join(timeout=0.1)  # it cannot finish while this thread is inside

    nbytes = SteppingIn(100)
    nbytes.step_in = rival_asks
    assert account.grant(nbytes, "first") is not None
    rival.join()
    assert rival_grants == [None]
    assert account.holders() == {"first": 100}


def test_finalizer_that_releases_inside_a_grant_does_not_deadlock():
    """The garbage collector may run on the thread that is inside the account."""
    account = Account("device", 100)
    dropped = account.grant(60, "dropped")
    nbytes = SteppingIn(30)
    nbytes.step_in = dropped.release
    asking = threading.Thread(target=account.grant, args=(nbytes, "b"), daemon=True)
    asking.start()
    asking.join(timeout=120)
    assert not asking.is_alive()
    assert account.holders() == {"b": 30}
    assert account.held_bytes == 30


def test_many_threads_leave_the_account_even_and_under_its_limit():
    account = Account("device", 100)
    start = threading.Barrier(4)
    over = []

    def churn(holder):
        start.wait()
        for nbytes in range(400):
            grant = account.grant(nbytes % 60, holder)
            if account.held_bytes > 100:
                over.append(account.held_bytes)
            if grant is not None:
                grant.release()

    threads = [threading.Thread(target=churn, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert over == []
    assert account.held_bytes == 0
    assert account.holders() == {}
    assert 59 <= account.peak_bytes <= 100


class AccountMachine(RuleBasedStateMachine):
    """An account against a list of (holder, bytes) that says what must be true."""

    def __init__(self):
        super().__init__()
        self.limit = 50
        self.account = Account("device", self.limit)
        self.live = []
        self.released = []
        self.peak = 0
        self.closed = False
        self.lowered = False

    @property
    def held(self):
        return sum(grant.nbytes for grant in self.live)

    @rule(nbytes=st.integers(0, 60), holder=st.sampled_from("abc"))
    def ask(self, nbytes, holder):
        if self.closed:
            with pytest.raises(ClosedError):
                self.account.grant(nbytes, holder)
            return
        fits = self.held + nbytes <= self.limit
        grant = self.account.grant(nbytes, holder)
        assert (grant is not None) == fits
        if grant is not None:
            assert (grant.nbytes, grant.holder) == (nbytes, holder)
            self.live.append(grant)
            self.peak = max(self.peak, self.held)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        grant = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        grant.release()
        self.released.append(grant)

    @precondition(lambda self: self.released)
    @rule(data=st.data())
    def release_again(self, data):
        grant = data.draw(st.sampled_from(self.released))
        with pytest.raises(StagehandInternalError, match=repr(grant.holder)):
            grant.release()

    @rule(nbytes=st.integers(0, 120))
    def set_limit(self, nbytes):
        self.lowered = nbytes < self.held
        self.limit = nbytes
        self.account.set_limit(nbytes)

    @rule(really=st.integers(0, 9))
    def close(self, really):
        if really == 0:  # seldom: a closed account has little left to show
            self.closed = True
            self.account.close()

    @invariant()
    def account_agrees_with_the_model(self):
        account = self.account
        holders = {}
        for grant in self.live:
            holders[grant.holder] = holders.get(grant.holder, 0) + grant.nbytes
        assert account.holders() == holders
        assert account.held_bytes == self.held
        assert account.limit_bytes == self.limit
        assert account.peak_bytes == self.peak
        assert account.free_bytes - account.overdraft_bytes == self.limit - self.held
        assert min(account.free_bytes, account.overdraft_bytes) == 0

    @invariant()
    def held_exceeds_the_limit_only_after_it_was_lowered(self):
        assert self.account.held_bytes <= self.account.limit_bytes or self.lowered


TestAccountMachine = AccountMachine.TestCase
TestAccountMachine.settings = running(60, 30)

MARKS = Watermarks(high_bytes=100, low_bytes=80)


@pytest.mark.parametrize(("high", "low"), [(10, 10), (10, 11), (10, 0), (10, -1)])
def test_watermarks_in_the_wrong_order_are_refused_with_both_numbers(high, low):
    with pytest.raises(
        ConfigError, match=f"low_watermark_mb is {low} and .*_mb {high}:"
    ):
        Watermarks(high_bytes=high * MIB, low_bytes=low * MIB)


def test_watermarks_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MARKS.low_bytes = 1


@pytest.mark.parametrize(
    ("limit", "held", "allocated", "target"),
    [
        pytest.param(70, 70, 90, 70, id="between the marks it stays"),
        pytest.param(70, 70, 80, 70, id="at the low mark it stays"),
        pytest.param(70, 70, 100, 50, id="at the high mark it shrinks to the low one"),
        pytest.param(70, 70, 130, 20, id="it shrinks by the whole overshoot"),
        pytest.param(70, 70, 500, 0, id="it never becomes negative"),
        pytest.param(70, 30, 110, 0, id="an unused limit frees nothing"),
        pytest.param(40, 30, 70, 40, id="an unused limit need not grow"),
        pytest.param(40, 40, 70, 50, id="it grows up to the low mark"),
        pytest.param(0, 0, 0, 80, id="it grows from nothing"),
        pytest.param(130, 90, 90, 100, id="weights never exceed the high mark"),
        pytest.param(60, 90, 110, 60, id="an overdraft is not counted twice"),
    ],
)
def test_watermark_target(limit, held, allocated, target):
    assert MARKS.target(limit, held, allocated) == target


@given(limit=st.integers(0, 100), other=st.integers(0, 200))
def test_target_settles_after_one_change_while_other_memory_is_steady(limit, other):
    """A limit that moved up and down by turns would plan anew on every pass."""
    target = MARKS.target(limit, limit, limit + other)
    assert MARKS.target(target, target, target + other) == target
