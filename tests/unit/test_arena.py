"""Arena: leases of one kind of memory under one account."""

import threading
import warnings
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from exploring import running
from stagehand.core import arena as arena_module
from stagehand.core.arena import Arena, live_leases
from stagehand.core.ledger import Account, Grant
from stagehand.errors import (
    ClosedError,
    StagehandInternalError,
    StagehandOOMError,
    StagehandWarning,
)
from stagehand.torch_private import storage_use_count


def new_arena(limit=100, **options):
    """Return an arena, and the list of the sizes that it made."""
    made = []

    def make(nbytes):
        made.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    return Arena("pinned memory", make, Account("pinned", limit), **options), made


def in_thread(function, *args):
    """Start a thread, and return a function that waits for its result or error."""
    outcome = []

    def run():
        try:
            outcome.append(function(*args))
        except (ClosedError, StagehandOOMError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(timeout=120)
        assert not thread.is_alive()
        return outcome[0]

    return result


def waiting_acquire(arena, nbytes, holder):
    """Let a thread ask, and return once it waits."""
    before = arena.wait_count
    result = in_thread(arena.acquire, nbytes, holder)
    while arena.wait_count == before:
        pass
    return result


# ------------------------------------------------------------------------- reservations


def test_reserved_bytes_count_before_there_is_memory():
    arena, made = new_arena()
    lease = arena.reserve_nowait(60, "later")
    assert made == []
    assert not lease.is_made
    assert arena.leased_bytes == arena.account.held_bytes == lease.nbytes == 60
    assert arena.reserve_nowait(41, "too much") is None
    with pytest.raises(
        StagehandInternalError, match=r"Lease\(60 B, later\) .*not made"
    ):
        _ = lease.buffer
    lease.make()
    lease.make()
    assert made == [60]
    assert lease.buffer.numel() == 60
    lease.release()
    assert arena.kept_bytes == 60


def test_reservation_that_is_given_up_leaves_nothing():
    arena, made = new_arena()
    before = live_leases()
    arena.reserve_nowait(60, "never").release()
    assert made == []
    assert arena.leased_bytes == arena.kept_bytes == arena.account.held_bytes == 0
    assert live_leases() == before


def test_reservation_takes_memory_that_is_kept():
    arena, made = new_arena()
    arena.acquire(60, "before").release()
    lease = arena.reserve_nowait(60, "now")
    assert lease.is_made
    assert made == [60]
    lease.release()


def test_nobody_waits_while_memory_is_made():
    arena, _ = new_arena()
    asked, permitted, in_time = threading.Event(), threading.Event(), []

    def slow(nbytes):
        asked.set()
        in_time.append(permitted.wait(timeout=120))
        return torch.zeros(nbytes, dtype=torch.uint8)

    arena._make = slow
    first = in_thread(arena.acquire, 40, "slow")
    asked.wait(timeout=120)
    lease = arena.reserve_nowait(40, "other")  # would wait for the lock
    lease.make(lambda n: torch.ones(n, dtype=torch.uint8))
    assert lease.buffer.sum() == 40
    lease.release()
    permitted.set()
    first().release()
    assert in_time == [True]


def test_lease_whose_memory_cannot_be_made_is_given_back():
    arena, _ = new_arena()
    before = live_leases()

    def fail(nbytes):
        raise MemoryError(f"no {nbytes} bytes")

    arena._make = fail
    for ask in (arena.acquire, arena.acquire_nowait):
        with pytest.raises(MemoryError, match="no 40 bytes"):
            ask(40, "a")
    assert arena.leased_bytes == arena.account.held_bytes == 0
    assert live_leases() == before


# ------------------------------------------------------------------------------ leases


def test_released_buffer_is_leased_again_and_not_made_again():
    arena, made = new_arena()
    first = arena.acquire_nowait(40, "a")
    address = first.buffer.data_ptr()
    first.release()
    assert (arena.leased_bytes, arena.kept_bytes, arena.account.held_bytes) == (
        *(0, 40, 40),
    )
    second = arena.acquire_nowait(40, "b")
    assert second.buffer.data_ptr() == address
    assert made == [40]
    assert arena.account.holders() == {"b": 40}
    second.release()


def test_abandoned_buffer_is_neither_reused_nor_counted():
    arena, made = new_arena()
    lease = arena.acquire_nowait(40, "a")
    kept_by_somebody = lease.buffer
    lease.abandon()
    assert (arena.leased_bytes, arena.kept_bytes, arena.account.held_bytes) == (0, 0, 0)
    other = arena.acquire_nowait(40, "b")
    assert other.buffer.data_ptr() != kept_by_somebody.data_ptr()
    assert made == [40, 40]
    other.release()


@pytest.mark.parametrize("first", ["release", "abandon"])
@pytest.mark.parametrize("second", ["release", "abandon"])
def test_lease_ends_once(first, second):
    arena, _ = new_arena()
    lease = arena.acquire_nowait(40, "a")
    getattr(lease, first)()
    with pytest.raises(StagehandInternalError, match="40 bytes of pinned memory was"):
        getattr(lease, second)()
    assert arena.leased_bytes == 0


def test_lease_that_is_let_go_leaves_its_buffer_to_who_else_refers_to_it():
    arena, _ = new_arena()
    for others in (False, True):
        lease = arena.acquire(60, "slot")
        alone = storage_use_count(lease.buffer.untyped_storage())
        view = lease.buffer[:1] if others else None
        lease.let_go(alone)
        del view
        assert arena.kept_bytes == (0 if others else 60)
        arena.trim()


def test_live_leases_counts_what_is_not_released():
    before = live_leases()
    arena, _ = new_arena()
    leases = [arena.acquire_nowait(10, "a") for _ in range(3)]
    assert live_leases() - before == 3
    leases.pop().abandon()
    leases.pop().release()
    assert live_leases() - before == 1
    leases.pop().release()
    assert live_leases() == before


def test_kept_buffers_of_other_sizes_make_room():
    arena, made = new_arena(100)
    for nbytes in (30, 40):
        arena.acquire_nowait(nbytes, "a").release()
    lease = arena.acquire_nowait(60, "b")
    assert made == [30, 40, 60]
    assert (arena.kept_bytes, arena.account.held_bytes) == (40, 100)
    lease.release()


@pytest.mark.parametrize("ask", ["acquire", "acquire_nowait", "reserve_nowait"])
def test_lease_has_and_pays_for_what_its_memory_takes(ask):
    arena, made = new_arena(taken=lambda nbytes: -(-nbytes // 32) * 32)
    lease = getattr(arena, ask)(33, "a")
    lease.make()
    assert lease.nbytes == lease.buffer.numel() == arena.account.held_bytes == 64
    lease.release()
    again = getattr(arena, ask)(40, "b")
    assert (made, again.nbytes, arena.leased_bytes) == ([64], 64, 64)
    assert arena.acquire_nowait(33, "c") is None
    again.release()
    with pytest.raises(StagehandOOMError, match="b needs 128 B"):
        arena.acquire(97, "b")


def test_request_that_cannot_be_met_frees_nothing_that_is_kept():
    """Pinned memory is slow to make: a hopeless request must not cost any."""
    arena, made = new_arena(100)
    held = arena.acquire_nowait(50, "a")
    arena.acquire_nowait(30, "b").release()
    assert arena.acquire_nowait(60, "c") is None
    assert arena.kept_bytes == 30
    arena.acquire_nowait(30, "b").release()
    assert made == [50, 30]
    held.release()


def test_smallest_kept_buffer_within_the_spare_is_taken():
    arena, made = new_arena(1000, spare=1.5)
    leases = [arena.acquire_nowait(n, "a") for n in (160, 140, 120, 90)]
    for lease in leases:
        lease.release()
    lease = arena.acquire_nowait(100, "b")
    assert lease.nbytes == 120
    assert arena.account.holders()["b"] == 120
    exact, _ = new_arena(1000)
    exact.acquire_nowait(101, "a").release()
    other = exact.acquire_nowait(100, "b")
    assert other.nbytes == 100
    assert made == [160, 140, 120, 90]
    lease.release()
    other.release()


def test_buffer_that_cannot_be_made_leaves_no_grant():
    def fail(nbytes):
        raise MemoryError(nbytes)

    arena = Arena("pinned memory", fail, Account("pinned", 100))
    with pytest.raises(MemoryError):
        arena.acquire_nowait(40, "a")
    assert arena.account.holders() == {}
    assert arena.leased_bytes == 0


def test_buffer_that_comes_back_under_a_lowered_limit_is_freed():
    arena, _ = new_arena(100)
    lease = arena.acquire_nowait(60, "a")
    arena.account.set_limit(50)
    lease.release()
    assert (arena.kept_bytes, arena.account.held_bytes) == (0, 0)


def test_trim_frees_what_is_kept_and_leaves_leases_alone():
    arena, made = new_arena()
    held = arena.acquire_nowait(30, "a")
    arena.acquire_nowait(40, "b").release()
    arena.trim()
    assert (arena.kept_bytes, arena.leased_bytes) == (0, 30)
    arena.acquire_nowait(40, "b").release()
    assert made == [30, 40, 40]
    held.release()


def test_closed_arena_leases_nothing_and_frees_what_comes_back():
    arena, _ = new_arena()
    held = arena.acquire_nowait(30, "a")
    arena.acquire_nowait(40, "b").release()
    arena.close()
    arena.close()
    assert arena.kept_bytes == 0
    for acquire in (arena.acquire, arena.acquire_nowait):
        with pytest.raises(ClosedError, match="of pinned memory is closed; c came"):
            acquire(10, "c")
    assert held.buffer.sum() == 0
    held.release()
    assert (arena.kept_bytes, arena.account.held_bytes) == (0, 0)


def end_closed(arena, lease):
    arena.close()
    lease.release()


def lower_the_limit(arena, lease):
    arena.account.set_limit(50)
    lease.release()


def lower_the_limit_later(arena, lease):
    lease.release()
    arena.account.set_limit(50)
    assert arena.acquire_nowait(60, "same size") is None


def take_another_size(arena, lease):
    lease.release()
    arena.acquire_nowait(70, "other size").release()


def trim(arena, lease):
    lease.release()
    arena.trim()


@pytest.mark.parametrize(
    "end",
    [
        end_closed,
        lower_the_limit,
        lower_the_limit_later,
        take_another_size,
        trim,
        lambda _, lease: lease.abandon(),
        lambda arena, lease: (lease.release(), arena.close()),
    ],
)
def test_memory_is_free_before_others_are_granted_its_bytes(monkeypatch, end):
    """Whoever still has the ended lease, such as a job that was dropped, has none."""
    arena, _ = new_arena()
    lease = arena.acquire_nowait(60, "a")
    memory, seen = weakref.ref(lease.buffer), []
    give_back = Grant.release

    def release(grant):
        seen.append(memory())
        give_back(grant)

    monkeypatch.setattr(Grant, "release", release)
    end(arena, lease)
    assert seen == [None]
    with pytest.raises(StagehandInternalError, match=r"released\) is over: it has no"):
        _ = lease.buffer


def test_repr_shows_live_counts():
    arena, _ = new_arena(2000)
    lease = arena.acquire_nowait(1000, "a")
    assert repr(lease) == "Lease(1.00 KB, a)"
    lease.release()
    assert repr(lease) == "Lease(1.00 KB, released)"
    assert repr(arena) == (
        "Arena(pinned memory: 0 B leased, 1.00 KB kept, limit 2.00 KB)"
    )


# ----------------------------------------------------------------------------- waiting


impatient = pytest.mark.filterwarnings("ignore::stagehand.errors.StagehandWarning")


@pytest.fixture
def patient(monkeypatch):
    """However late the test's own thread runs, who waits neither looks nor warns."""
    monkeypatch.setattr(arena_module, "_WARN_AFTER_SECONDS", 3600)


@pytest.mark.parametrize("end", ["release", "abandon", "close"])
def test_waiter_is_woken_when_a_lease_ends_and_by_close(patient, end):
    arena, _ = new_arena()
    held = arena.acquire(80, "a")
    result = waiting_acquire(arena, 80, "b")
    getattr(arena if end == "close" else held, end)()
    outcome = result()  # within ten seconds: it did not have to poll
    assert arena.wait_count == 1
    if end == "close":
        assert isinstance(outcome, ClosedError)
        held.release()
    else:
        assert outcome.nbytes == 80
        assert arena.wait_ms > 0
        outcome.release()


class Waits:
    """Stands for a condition and for the clock: what is waited for comes at some time.

    Args:
        seconds: When.
        happens: Called then.
    """

    def __init__(self, seconds, happens):
        self.now, self.then, self.happens = 0.0, seconds, happens

    def perf_counter(self):
        return self.now

    def wait(self, timeout):
        in_time, self.now = self.then <= self.now + timeout, self.now + timeout
        if in_time:
            self.now = self.then
            self.happens()

    def notify_all(self): ...


@pytest.mark.parametrize(("seconds", "warns"), [(0.09, False), (0.35, True)])
def test_wait_of_100_ms_warns_once_with_sizes_and_goes_on(monkeypatch, seconds, warns):
    arena, _ = new_arena()
    held = arena.acquire(80, "a")
    arena._changed = waits = Waits(seconds, held.release)
    monkeypatch.setattr(arena_module, "time", waits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lease = arena.acquire(90, "staging slab")
    assert [w.category for w in caught] == [StagehandWarning] * warns
    text = "staging slab has waited 100 ms for 90 B of pinned memory, of which 80 B are"
    assert all(str(w.message).startswith(f"{text} in use") for w in caught)
    assert arena.wait_ms == pytest.approx(seconds * 1e3)
    lease.release()


def test_more_than_the_limit_is_refused_at_once_with_both_numbers():
    arena, _ = new_arena(100)
    held = arena.acquire(80, "a")
    with pytest.raises(
        StagehandOOMError, match=r"b needs 101 B .* limit is 100 B"
    ) as e:
        arena.acquire(101, "b")
    assert (e.value.needed_bytes, e.value.limit_bytes) == (101, 100)
    held.release()


def test_waiting_for_what_nobody_holds_is_refused_at_once():
    """The account's bytes are with somebody who will not return them here."""
    arena, _ = new_arena(100)
    grant = arena.account.grant(60, "another arena")
    with pytest.raises(StagehandOOMError, match="60 B are held"):
        arena.acquire(50, "b")
    grant.release()


@impatient
def test_waiter_gives_up_when_the_limit_sinks_below_its_request():
    arena, _ = new_arena(100)
    held = arena.acquire(80, "a")
    result = waiting_acquire(arena, 80, "b")
    arena.account.set_limit(70)
    assert isinstance(result(), StagehandOOMError)
    held.release()


@impatient
def test_many_threads_stay_under_the_limit_and_all_get_their_turn():
    arena, _ = new_arena(100)
    over = []

    def churn(holder):
        for number in range(60):
            lease = arena.acquire(20 + (number * 7) % 30, holder)
            if arena.account.held_bytes > 100:
                over.append(arena.account.held_bytes)
            lease.release()

    results = [in_thread(churn, f"t{i}") for i in range(4)]
    assert [result() for result in results] == [None] * 4
    assert over == []
    assert arena.leased_bytes == 0
    assert arena.kept_bytes == arena.account.held_bytes


# --------------------------------------------------------------------------- stateful


class ArenaMachine(RuleBasedStateMachine):
    """An arena against two bags: what is leased, and what is kept."""

    LIMIT = 64

    def __init__(self):
        super().__init__()
        self.arena, _ = new_arena(self.LIMIT, spare=1.5)
        self.live = []
        self.ended = []
        self.kept = Counter()
        self.closed = False

    @property
    def leased(self):
        return sum(lease.nbytes for lease in self.live)

    def fitting(self, nbytes):
        return [n for n in self.kept.elements() if nbytes <= n <= 1.5 * nbytes]

    @rule(nbytes=st.integers(0, 72))
    def acquire(self, nbytes):
        if self.closed:
            with pytest.raises(ClosedError):
                self.arena.acquire_nowait(nbytes, "x")
            return
        free = self.LIMIT - self.leased
        fitting = self.fitting(nbytes)
        lease = self.arena.acquire_nowait(nbytes, "x")
        if lease is None:
            assert nbytes > free
            return
        assert nbytes <= free
        assert lease.nbytes == min(fitting, default=nbytes)
        assert all(lease.buffer is not other.buffer for other in self.live)
        if fitting:
            self.kept[lease.nbytes] -= 1
        else:  # some of the others may have been freed for it
            self.kept = self.look()
        self.live.append(lease)

    def look(self):
        return Counter(buffer.numel() for buffer, _ in self.arena._kept)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), end=st.sampled_from(["release", "abandon"]))
    def end(self, data, end):
        lease = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        getattr(lease, end)()
        if end == "release" and not self.closed:
            self.kept[lease.nbytes] += 1
        self.ended.append(lease)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), end=st.sampled_from(["release", "abandon"]))
    def end_again(self, data, end):
        with pytest.raises(StagehandInternalError, match="twice"):
            getattr(data.draw(st.sampled_from(self.ended)), end)()

    @rule()
    def trim(self):
        self.arena.trim()
        self.kept.clear()

    @rule(really=st.integers(0, 9))
    def close(self, really):
        if really == 0:  # seldom: a closed arena has little left to show
            self.arena.close()
            self.closed = True
            self.kept.clear()

    @invariant()
    def counts_agree_with_the_model(self):
        assert self.arena.leased_bytes == self.leased
        assert +self.look() == +self.kept
        assert self.arena.kept_bytes == sum(self.kept.elements())

    @invariant()
    def account_holds_leases_and_kept_buffers_and_never_more_than_its_limit(self):
        account = self.arena.account
        assert account.held_bytes == self.arena.leased_bytes + self.arena.kept_bytes
        assert account.peak_bytes <= self.LIMIT

    def teardown(self):
        before = live_leases()
        for lease in self.live:
            lease.release()
        assert before - live_leases() == len(self.live)
        self.arena.close()
        assert self.arena.account.holders() == {}


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = running(60, 30)
