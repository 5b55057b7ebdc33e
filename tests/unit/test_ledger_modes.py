"""Ways to ask an account for bytes: floors, ceilings, priorities, phases."""

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from exploring import running
from stagehand.core.clock import Phase, PhaseClock
from stagehand.core.ledger import Account, Ledger, Mode, SubAccount
from stagehand.core.limits import Priority
from stagehand.errors import StagehandInternalError

HARD, SOFT, BURST = Mode.HARD, Mode.SOFT, Mode.BURST
FLOOR, CEILING = Mode.FLOOR, Mode.CEILING
MEMORY = (HARD, SOFT, BURST)


def account(limit=100, soft=80):
    return Account("device", limit, soft)


def nbytes_of(grant):
    return None if grant is None else grant.nbytes


@pytest.mark.parametrize(
    ("mode", "asked", "got"),
    [
        pytest.param(HARD, 30, 30, id="hard up to the soft limit"),
        pytest.param(HARD, 31, None, id="hard is all or nothing"),
        pytest.param(SOFT, 31, 30, id="soft takes what is there"),
        pytest.param(BURST, 50, 50, id="burst up to the hard limit"),
        pytest.param(BURST, 51, None, id="burst is all or nothing"),
        pytest.param(FLOOR, 50, 50, id="floor up to the hard limit"),
        pytest.param(FLOOR, 51, None, id="floor is all or nothing"),
    ],
)
def test_a_mode_says_how_a_request_is_answered(mode, asked, got):
    books = account()
    books.grant(50, "a")
    assert nbytes_of(books.grant(asked, "b", mode=mode)) == got


def test_a_soft_request_for_what_is_not_there_at_all_is_denied():
    books = account()
    books.grant(80, "a")
    assert books.grant(1, "b", mode=SOFT) is None
    assert (books.grant_count, books.partial_count, books.deny_count) == (1, 0, 1)


def test_a_floor_keeps_bytes_for_its_holder_and_holds_none():
    books = account()
    floor = books.grant(60, "activations", mode=FLOOR)
    assert (books.held_bytes, books.promised_bytes) == (0, 60)
    assert books.grant(21, "others") is None
    assert nbytes_of(books.grant(20, "others")) == 20
    assert nbytes_of(books.grant(60, "activations")) == 60
    assert books.grant(1, "activations") is None
    assert (books.held_bytes, books.promised_bytes) == (80, 80)
    floor.release()
    assert books.floors() == {}
    assert books.promised_bytes == 80


def test_a_floor_for_what_its_holder_has_already_takes_no_more():
    books = account()
    books.grant(70, "a")
    assert books.grant(70, "a", mode=FLOOR) is not None
    assert books.promised_bytes == 70


def test_a_floor_is_kept_when_the_limit_is_lowered_below_what_others_hold():
    books = account(100, None)
    books.grant(60, "others")
    books.grant(40, "a", mode=FLOOR)
    books.set_limit(50)
    assert books.grant(0, "others") is None
    assert nbytes_of(books.grant(40, "a")) == 40
    assert books.grant(1, "a") is None


def test_a_ceiling_cuts_its_holder_only_and_only_while_it_lasts():
    books = account()
    ceiling = books.grant(10, "a", mode=CEILING)
    assert books.grant(11, "a") is None
    assert nbytes_of(books.grant(11, "a", mode=SOFT)) == 10
    assert nbytes_of(books.grant(11, "b")) == 11
    ceiling.release()
    assert nbytes_of(books.grant(11, "a")) == 11


def test_of_two_ceilings_the_lower_counts():
    books = account()
    books.grant(30, "a", mode=CEILING)
    low = books.grant(20, "a", mode=CEILING)
    assert books.room_for("a") == 20
    low.release()
    assert books.room_for("a") == 30


def test_a_ceiling_below_a_floor_and_a_floor_above_a_ceiling_are_denied():
    books = account()
    books.grant(20, "a", mode=FLOOR)
    books.grant(20, "b", mode=CEILING)
    assert books.grant(19, "a", mode=CEILING) is None
    assert books.grant(21, "b", mode=FLOOR) is None
    assert books.grant(20, "b", mode=FLOOR) is not None


def test_floors_and_ceilings_hold_nothing():
    books = account()
    books.grant(20, "a", mode=FLOOR)
    books.grant(30, "a", mode=CEILING)
    books.grant(5, "a")
    assert books.holders() == {"a": 5}


class Holder:
    """Gives back what it is asked for, and remembers in which order."""

    def __init__(self):
        self.asked = []

    def recall(self, grant):
        self.asked.append(grant.holder)
        grant.release()


def test_less_urgent_grants_are_called_back_least_urgent_and_newest_first():
    books, holder = account(100, None), Holder()
    for name, priority in [
        ("required", Priority.REQUIRED),
        ("background 1", Priority.BACKGROUND),
        ("speculative", Priority.SPECULATIVE),
        ("background 2", Priority.BACKGROUND),
    ]:
        books.grant(25, name, priority=priority, recall=holder.recall)
    assert nbytes_of(books.grant(75, "demand", priority=Priority.REQUIRED)) == 75
    assert holder.asked == ["background 2", "background 1", "speculative"]
    assert books.holders() == {"required": 25, "demand": 75}


def test_a_part_calls_back_from_the_whole_without_holding_a_lock():
    """Or whoever gives way, and needs a lock for it, would wait for ever."""
    whole = account(100, None)
    part = SubAccount("part", 100, whole)
    free = []

    def recall(grant):
        asking = threading.Thread(target=part.holders, daemon=True)
        asking.start()
        asking.join(timeout=120)
        free.append(not asking.is_alive())
        grant.release()

    whole.grant(60, "idle", priority=Priority.BACKGROUND, recall=recall)
    grant = part.grant(50, "a")
    assert free == [True]
    assert (whole.holders(), part.holders()) == ({"part": 50}, {"a": 50})
    grant.release()
    assert whole.held_bytes == part.held_bytes == 0


def test_a_part_calls_back_its_own_before_those_of_the_whole():
    """And not what nobody can call back, of either."""
    whole, holder = account(100, None), Holder()
    part = SubAccount("part", 100, whole)
    part.grant(10, "kept", priority=Priority.BACKGROUND)
    for books, name in ((whole, "other"), (part, "own")):
        books.grant(40, name, priority=Priority.BACKGROUND, recall=holder.recall)
    assert nbytes_of(part.grant(50, "demand")) == 50
    assert holder.asked == ["own"]
    assert part.grant(90, "more") is None
    assert part.holders() == {"kept": 10, "demand": 50}


def test_nothing_is_called_back_for_equals_or_where_it_fits_or_for_a_soft_request():
    books, holder = account(100, None), Holder()
    books.grant(60, "a", priority=Priority.BACKGROUND, recall=holder.recall)
    books.grant(30, "b")
    assert books.grant(10, "fits") is not None
    assert books.grant(9, "soft", mode=SOFT) is None
    assert books.grant(9, "equal", priority=Priority.BACKGROUND) is None
    assert holder.asked == []


def test_a_holder_that_keeps_what_it_is_asked_for_is_asked_once_and_no_more():
    books, asked = account(100, None), []
    books.grant(100, "a", priority=Priority.BACKGROUND, recall=asked.append)
    assert books.grant(1, "b") is None
    assert len(asked) == 1


def test_a_recall_that_fails_reaches_who_asked_and_leaves_the_books_even():
    books = account(100, None)

    def fail(grant):
        raise OSError("cannot")

    grant = books.grant(100, "a", priority=Priority.BACKGROUND, recall=fail)
    with pytest.raises(OSError, match="cannot"):
        books.grant(1, "b")
    grant.release()
    assert (books.held_bytes, books.promised_bytes) == (0, 0)


def test_a_grant_until_a_phase_ends_with_it_and_its_release_is_then_nothing():
    books = account()
    grant = books.grant(10, "a", until=Phase.BACKWARD)
    stays = books.grant(20, "b")
    assert books.end_phase(Phase.FORWARD) == 0
    assert books.end_phase(Phase.BACKWARD) == 1
    grant.release()
    grant.release()
    assert books.held_bytes == 20
    stays.release()
    with pytest.raises(StagehandInternalError, match="released twice"):
        stays.release()


def test_the_end_of_a_step_ends_what_lasts_until_a_phase_that_never_came():
    ledger = Ledger(Account("device", 100), Account("pinned", 100))
    ledger.device.grant(10, "a", until=Phase.OPTIMIZER)
    ledger.pinned.grant(10, "a", until=Phase.OPTIMIZER)
    assert ledger.end_phase(Phase.STEP_END) == 2
    assert ledger.device.held_bytes == ledger.pinned.held_bytes == 0


class LedgerMachine(RuleBasedStateMachine):
    """Requests of all kinds, releases, phases and failures, against plain lists."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(Account("device", 60, 45), Account("pinned", 10))
        self.clock = PhaseClock()
        self.left = Phase.STEP_END
        self.clock.subscribe(self.moved)
        self.live = []
        self.gone = []
        self.answers = {}
        self.asker = Priority.REQUIRED

    @property
    def books(self):
        return self.ledger.device

    def moved(self, step, phase):
        if phase is not self.left:
            before = len(self.live)
            ended = [g for g in self.live if self.ends(g, self.left)]
            if phase is Phase.STEP_END:
                ended = [g for g in self.live if g.until is not None]
                self.ledger.end_phase(self.left)
                self.ledger.end_phase(phase)
            else:
                assert self.ledger.end_phase(self.left) == len(ended)
            self.live = [g for g in self.live if g not in ended]
            assert len(self.live) == before - len(ended)
        self.left = phase

    @staticmethod
    def ends(grant, phase):
        return grant.until is not None and phase in (grant.until, Phase.STEP_END)

    # What must be true, from the list

    def of(self, holder, *modes):
        mine = [g for g in self.live if g.holder == holder and g.mode in modes]
        return [g.nbytes for g in mine]

    def held(self, holder):
        return sum(self.of(holder, *MEMORY))

    def floor(self, holder):
        return sum(self.of(holder, FLOOR))

    @property
    def promised(self):
        return sum(max(self.held(h), self.floor(h)) for h in "abc")

    def room(self, holder, mode):
        limit = self.books.limit_bytes
        if mode is not BURST:
            limit = min(limit, self.books.soft_limit_bytes)
        own = max(0, self.floor(holder) - self.held(holder))
        spare = limit - self.promised
        room = own + spare if spare >= 0 else own or -1
        ceilings = self.of(holder, CEILING)
        return min([room, *(max(0, c - self.held(holder)) for c in ceilings)])

    # What happens

    @rule(
        nbytes=st.integers(0, 40),
        holder=st.sampled_from("abc"),
        mode=st.sampled_from(Mode),
        priority=st.sampled_from(Priority),
        until=st.sampled_from([None, None, *Phase]),
        answer=st.sampled_from([None, "gives", "keeps", "fails"]),
    )
    def ask(self, nbytes, holder, mode, priority, until, answer):
        self.asker = priority
        limit, promised = self.books.limit_bytes, self.promised
        room = self.room(holder, mode)
        try:
            grant = self.books.grant(
                nbytes,
                holder,
                mode=mode,
                priority=priority,
                until=until,
                recall=None if answer is None else self.recall,
            )
        except OSError:
            return
        if mode in MEMORY and nbytes <= room:
            assert grant is not None
            assert grant.nbytes == nbytes
        if mode is SOFT and 0 < room < nbytes:
            assert grant.nbytes == room
        if grant is None:
            if mode in (HARD, BURST):
                assert nbytes > self.room(holder, mode)
            return
        self.live.append(grant)
        self.answers[grant] = answer
        assert self.promised <= max(limit, promised)
        if mode in (HARD, SOFT):
            assert self.promised <= max(self.books.soft_limit_bytes, promised)
        ceilings = self.of(holder, CEILING)
        if mode in MEMORY and ceilings and grant.nbytes:
            assert self.held(holder) <= min(ceilings)

    def recall(self, grant):
        """Asked while another request does not fit."""
        assert grant in self.live
        assert grant.mode in MEMORY
        assert grant.priority > self.asker
        if self.answers[grant] == "gives":
            self.drop(grant)
        elif self.answers[grant] == "fails":
            raise OSError("cannot")

    def drop(self, grant):
        self.live.remove(grant)
        self.gone.append(grant)
        grant.release()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        self.drop(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def release_again(self, data):
        grant = data.draw(st.sampled_from(self.gone))
        with pytest.raises(StagehandInternalError, match="released twice"):
            grant.release()

    @rule(phase=st.sampled_from(Phase))
    def go_on(self, phase):
        if phase in (Phase.STEP_BEGIN, Phase.STEP_END):
            self.clock.end_step()
        if phase is Phase.STEP_BEGIN or self.clock.phase is Phase.STEP_END:
            self.clock.begin_step()
        elif phase >= self.clock.phase:
            self.clock.enter(phase)

    @rule(limit=st.integers(0, 80), soft=st.none() | st.integers(0, 80))
    def set_limits(self, limit, soft):
        self.books.set_limit(limit)
        self.books.set_soft_limit(soft)

    # What must always hold

    @invariant()
    def books_agree_with_the_list(self):
        assert self.books.held_bytes == sum(self.held(h) for h in "abc")
        assert self.books.promised_bytes == self.promised
        assert self.books.held_bytes <= self.promised
        floors = {h: self.floor(h) for h in "abc" if self.floor(h)}
        assert self.books.floors() == floors

    @invariant()
    def every_floor_is_met(self):
        for holder in "abc":
            rest = self.floor(holder) - self.held(holder)
            if rest > 0:
                grant = self.books.grant(rest, holder, priority=Priority.BACKGROUND)
                assert nbytes_of(grant) == rest
                grant.release()

    def teardown(self):
        for grant in list(self.live):
            self.drop(grant)
        assert self.books.held_bytes == self.books.promised_bytes == 0
        assert self.books.holders() == self.books.floors() == {}
        assert not self.books._parties


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = running(80, 40)
