"""Whose turn it is to run a model: threads that are other than they should be.

Mostly without threads: `HERE` is told which one calls, and what is called in the middle
of a wait does what other threads would do then.
"""

import itertools
import threading
from contextlib import contextmanager

import pytest

from interrupts import interrupted_at
from stagehand.core import turn as turns
from stagehand.core.turn import HERE, Turn, awaited_by, host_while
from stagehand.errors import DeadlockError

PATIENCE = 120  # seconds until a test gives up
MANY = 1000  # looks


class Thread:
    """A thread that runs nothing, and waits for nobody."""

    ident = -1  # that of no thread

    def __init__(self, name):
        self.name = name
        self.alive = True

    def is_alive(self):
        return self.alive


@contextmanager
def as_thread(thread):
    own, HERE.thread = HERE.thread, thread
    try:
        yield
    finally:
        HERE.thread = own


class Model:
    """A turn, and what the model would tell it.

    Attributes:
        left: Whether what the owner entered is no longer running.
        ends_alone: Whether it will end whatever the owner waits for.
        meanwhile: Called when somebody looks at the owner.
        looks: How often that has happened.
        taken_over: Who took it over.
    """

    def __init__(self, name="a model"):
        self.left = self.ends_alone = False
        self.meanwhile = bool
        self.looks = 0
        self.taken_over = []
        self.turn = Turn(
            name,
            self._left,
            lambda: self.taken_over.append(HERE.thread),
            lambda: self.ends_alone,
        )

    def _left(self):
        self.meanwhile()
        self.looks += 1
        assert self.looks < MANY, "this would wait for ever"
        return self.left

    def leave(self):
        self.left = True


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
    monkeypatch.setattr(turns, "_LOOK_SECONDS", 0)


@pytest.fixture
def owner():
    return Thread("owner")


@pytest.fixture
def other():
    return Thread("other")


@pytest.fixture
def model(owner):
    """The owner has the turn twice."""
    model = Model()
    with as_thread(owner):
        model.turn.acquire()
        model.turn.acquire()
        model.turn.sorted()
    return model


# ------------------------------------------------------------------------ taking over


@pytest.mark.parametrize("how", ["dead", "left"])
def test_forgotten_turn_is_taken_over_as_a_whole(model, owner, other, how):
    turn = model.turn
    with as_thread(other):
        assert not turn.try_acquire()
        owner.alive, model.left = how != "dead", how == "left"
        assert turn.holder() is None
        assert turn.try_acquire()
        assert model.taken_over == [other]
        assert (turn.owner, turn.count) == (other, 1)
        turn.release()
    assert turn.owner is None


def test_turn_that_will_end_alone_is_held_by_nobody_and_taken_by_nobody(model, other):
    model.ends_alone = True
    assert model.turn.holder() is None
    with as_thread(other):
        assert not model.turn.try_acquire()


def test_turn_moves_to_who_ends_a_call_when_the_owner_is_in_none(
    model, owner, other, monkeypatch
):
    turn = model.turn
    inside = True
    monkeypatch.setattr(turns, "runs_library", lambda thread: inside)
    with as_thread(owner):
        assert turn.move_here()
    with as_thread(other):
        assert not turn.move_here()
        inside = False  # an interrupted call has left its hold
        assert turn.move_here()
        assert turn.owner is other
        turn.recount(1)
    inside = True
    with as_thread(owner):
        assert not turn.try_acquire()
        assert turn.move_here()  # with one hold, it is what is to be ended
        turn.release()
    assert turn.owner is None


@pytest.mark.parametrize("end", ["sorted", "release"])
def test_owner_that_is_back_keeps_the_turn_while_it_sorts(model, owner, other, end):
    """What it had left is still open: that shows only when it has closed it."""
    turn = model.turn
    model.left = True
    owner.ident = threading.get_ident()  # it is in `acquire`
    with as_thread(owner):
        turn.acquire()
    with as_thread(other):
        assert not turn.try_acquire()
    getattr(turn, end)()
    with as_thread(other):
        assert turn.try_acquire()


def test_owner_that_was_back_and_sorts_no_more_has_forgotten_the_turn(
    model, owner, other
):
    """An interrupt came in the middle of it."""
    with as_thread(owner):
        model.turn.acquire()
    with as_thread(other):
        assert model.turn.try_acquire()


def test_owner_that_has_sorted_during_the_look_keeps_the_turn(
    model, owner, other, monkeypatch
):
    turn = model.turn

    def looks(thread):
        assert thread is owner
        turn.sorted()
        return False  # it has left the library by now

    with as_thread(owner):
        turn.acquire()
    monkeypatch.setattr(turns, "runs_library", looks)
    with as_thread(other):
        assert not turn.try_acquire()


def test_turn_is_heard_of_when_it_becomes_free(monkeypatch):
    """Who waits does not sleep until its next look."""
    monkeypatch.setattr(turns, "_LOOK_SECONDS", PATIENCE)
    turn = Model().turn
    for _ in range(2):
        turn.acquire()
        waiter = threading.Thread(target=acquire_and_release, args=(turn,))
        waiter.daemon = True
        waiter.start()
        while awaited_by(waiter) is not turn:
            assert waiter.is_alive()
        turn.release()
        waiter.join(PATIENCE / 4)
        assert not waiter.is_alive()


def acquire_and_release(turn):
    with turn:
        pass


def test_who_has_waited_waits_no_more(model, other):
    waited = []

    def meanwhile():
        waited.append(awaited_by(other))
        model.left = len(waited) > 2

    model.meanwhile = meanwhile
    with as_thread(other):
        assert model.turn.acquire()
    assert waited[0] is model.turn
    assert awaited_by(other) is None


# -------------------------------------------------------------------------- deadlocks


def test_only_the_last_in_a_circle_fails(model, owner, other, monkeypatch):
    """The error is told when others may already look again."""
    waits = []

    class Name(str):
        def __format__(self, _):
            waits.append(awaited_by(owner))
            return str(self)

    second = Model(Name("a second model"))
    with as_thread(other):
        second.turn.acquire()
        second.turn.sorted()
    monkeypatch.setitem(turns._waits, other, model.turn)
    with (
        as_thread(owner),
        pytest.raises(DeadlockError, match="'owner' would wait for a second model"),
    ):
        second.turn.acquire()
    assert waits == [None]
    assert awaited_by(other) is model.turn


@pytest.mark.parametrize("why", ["left", "ends_alone"])
def test_circle_with_a_turn_that_becomes_free_is_none(
    model, owner, other, monkeypatch, why
):
    second = Model("a second model")
    with as_thread(other):
        second.turn.acquire()
        second.turn.sorted()
    setattr(model, why, True)
    second.meanwhile = lambda: second.leave() if awaited_by(owner) else None
    monkeypatch.setitem(turns._waits, other, model.turn)
    with as_thread(owner):
        assert second.turn.acquire()


# -------------------------------------------------------------------------- inner calls


class Told(threading.Event):
    """An event for which nobody waits before it is set."""

    def wait(self, timeout=None):
        assert self.is_set(), "this would sleep"
        return super().wait(timeout)


@pytest.fixture
def autograds():
    """Python's name for threads that it has not started."""
    return Thread("Dummy-1")


def come_in(turn, autograds, task):
    with as_thread(autograds):
        return not turn.acquire(task=task)


def test_call_of_autograd_goes_on_beside_an_owner_that_waits_for_it(
    model, owner, autograds
):
    turn, seen = model.turn, []
    turn._dismissed = Told()

    def goes_on():
        seen.append(come_in(turn, autograds, 7))
        return False

    with as_thread(owner):
        host_while(goes_on, turn._dismissed)
        assert seen == [True]
        assert turn.inner_calls == {7}
        turn.dismiss(7)
        turn.await_inner_calls()
    model.left = True
    assert not come_in(turn, autograds, 8), "nobody waits for it any more"
    assert not turn.inner_calls


def test_thread_of_autograds_own_does_not_wait_for_inner_calls(model, autograds):
    model.turn.inner_calls.add(7)
    model.turn._dismissed = Told()
    with as_thread(autograds):
        model.turn.await_inner_calls()


def test_owner_that_begins_to_wait_for_autograd_is_no_deadlock(
    model, owner, autograds, monkeypatch
):
    """It did not yet when the call asked whether it may come in."""

    def threads():
        turns._hosts.add(owner)
        return [owner, autograds]

    monkeypatch.setattr(threading, "enumerate", threads)
    try:
        assert come_in(model.turn, autograds, 7)
    finally:
        turns._hosts.discard(owner)


@pytest.mark.parametrize("end", ["already", "soon"])
def test_inner_call_that_comes_when_the_owner_is_about_to_go_on_is_waited_for(
    model, owner, autograds, monkeypatch, end
):
    """It saw the owner wait, which had already seen that there are no inner calls; and
    the look of a thread that saw so is over, or not yet.
    """
    turn, asked = model.turn, [8]

    class Hosts(set):
        def discard(self, thread):
            if asked and end == "already":
                assert come_in(turn, autograds, asked.pop())
            super().discard(thread)

    class Look:
        def __enter__(self):
            if asked and HERE.thread is owner:
                turn.inner_calls.add(asked.pop())

        def __exit__(self, *_):
            pass

    class Ends(Told):
        def wait(self, timeout=None):
            for task in [*turn.inner_calls]:
                turn.dismiss(task)
            return super().wait(timeout)

    monkeypatch.setattr(turns, "_hosts", Hosts())
    turn._dismissed, turn._letting_in = Ends(), Look()
    turn.inner_calls.add(7)
    with as_thread(owner):
        turn.await_inner_calls()
    assert not asked
    assert not turn.inner_calls


def test_who_stands_back_has_its_turn_behind_those_who_wait_for_it(monkeypatch):
    monkeypatch.setattr(turns, "_LOOK_SECONDS", PATIENCE / MANY)
    model, had = Model(), []

    def wait():
        with model.turn:
            had.append("who waited")

    thread = threading.Thread(target=wait, daemon=True)
    with model.turn:
        thread.start()
        while awaited_by(thread) is not model.turn:
            threading.Event().wait(0.001)
        first = model.turn.waiting()
    assert first == {thread}
    model.turn.stand_back(first)
    with model.turn:
        had.append("who stood back")
    thread.join(timeout=PATIENCE)
    assert had == ["who waited", "who stood back"]
    assert model.turn.owner is None


def test_who_stands_back_lets_nobody_go_first_twice(monkeypatch):
    """Of threads that have the turn by turns, for ever, one waits at any time."""
    monkeypatch.setattr(turns, "_LOOK_SECONDS", 0.001)
    model, threads, looks = Model(), ["a", "b"], []

    def waiting():
        looks.append(threads[len(looks) % 2])
        assert len(looks) < MANY
        return {looks[-1]}

    monkeypatch.setattr(model.turn, "waiting", waiting)
    model.turn.stand_back({*threads})
    assert len(looks) == 2


def test_two_that_stand_back_do_not_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(turns, "_LOOK_SECONDS", PATIENCE / MANY)
    model = Model()
    threads = [
        threading.Thread(target=lambda: model.turn.stand_back({*threads}), daemon=True)
        for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
        assert not thread.is_alive()
    assert model.turn.owner is None


def test_an_interrupt_of_who_stands_back_keeps_the_turn_from_nobody(monkeypatch):
    monkeypatch.setattr(turns, "_LOOK_SECONDS", PATIENCE / MANY)
    for number in itertools.count(1):
        model, had = Model(), []

        def wait(model=model, had=had):
            with model.turn:
                had.append(1)

        threads = [threading.Thread(target=wait, daemon=True) for _ in "ab"]
        with model.turn:
            threads[0].start()
            while awaited_by(threads[0]) is not model.turn:
                threading.Event().wait(0.001)
        try:
            with interrupted_at(number, Turn.stand_back, Turn._wait, Turn._take):
                model.turn.stand_back({threads[0]})
            break
        except KeyboardInterrupt:
            assert threading.current_thread() not in model.turn.waiting()
        model.left = True  # what has the turn is no pass
        threads[1].start()
        for thread in threads:
            thread.join(timeout=PATIENCE)
        assert had == [1, 1]
    assert number > 5
