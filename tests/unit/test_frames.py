"""What another thread may see of a thread's calls."""

import gc
import queue
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagehand.frames import arguments_of, awaits_thread, frames_of, objects_in


@pytest.fixture
def waiting():
    """A thread that waits in the middle of a few calls."""
    goes_on, inside = threading.Event(), threading.Event()

    def outer():
        inner()

    def inner():
        inside.set()
        goes_on.wait(timeout=120)

    thread = threading.Thread(target=outer)
    thread.start()
    assert inside.wait(timeout=120)
    yield thread
    goes_on.set()
    thread.join(timeout=120)
    assert frames_of(thread.ident) == []


def test_a_threads_frames_are_found_innermost_first(waiting):
    names = [frame.f_code.co_name for frame in frames_of(waiting.ident)]
    assert names.index("inner") + 1 == names.index("outer") < names.index("run")


def until_it_waits(thread, name):
    """Wait until a function is the one that a thread has called last but one or two."""
    for _ in range(10_000):
        if name in [frame.f_code.co_name for frame in frames_of(thread.ident)[:3]]:
            return
        threading.Event().wait(0.001)
    raise AssertionError(name)


@pytest.mark.parametrize("limit", [None, 120])
def test_who_waits_for_a_threads_end_is_known_unless_it_gives_up(waiting, limit):
    waiter = threading.Thread(target=waiting.join, args=(limit,))
    waiter.start()
    until_it_waits(waiter, "join")
    assert awaits_thread(waiter, waiting) is (limit is None)
    assert not awaits_thread(waiting, waiter)
    assert not awaits_thread(waiter, threading.current_thread())


@pytest.mark.parametrize("limit", [None, 120])
def test_who_waits_for_what_a_thread_computes_is_known_unless_it_gives_up(limit):
    goes_on, computing = threading.Event(), queue.SimpleQueue()

    def compute():
        computing.put(threading.current_thread())
        goes_on.wait(timeout=120)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(compute)
        other = computing.get(timeout=120)
        waiter = threading.Thread(target=pool.submit(compute).result, args=(limit,))
        waiter.start()
        until_it_waits(waiter, "result")
        assert awaits_thread(waiter, computing.get(timeout=120)) is (limit is None)
        assert not awaits_thread(waiter, other)
        goes_on.set()
    waiter.join(timeout=120)


def test_a_thread_that_looks_at_itself_keeps_nothing_alive():
    """What its functions have goes when they end, and not with the next collection."""

    class Kept:
        pass

    def look():
        kept = Kept()
        names = [frame.f_code.co_name for frame in frames_of(threading.get_ident())]
        assert names[0] == "look"
        return weakref.ref(kept)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_looked_at(collects, monkeypatch):
    """A finalizer would let the thread leave a frame that is being looked at."""
    collected = []

    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            collected.append(self)

    class Frame:
        @property
        def f_back(self):
            before = len(collected)
            for _ in range(100):
                Garbage()
            assert len(collected) == before
            return None

    frame = Frame()
    monkeypatch.setattr(sys, "_current_frames", lambda: {1: frame})
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1)
    (gc.enable if collects else gc.disable)()
    try:
        assert frames_of(1) == [frame]
        assert gc.isenabled() is collects
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(collected) == 100


@pytest.mark.parametrize("waits", ["for it", "for another"])
def test_what_a_looked_at_call_has_goes_with_it(waits):
    """Its frame kept what it had shown: a pool's, as long as its thread lived."""

    class Given:
        pass

    given, go_on = Given(), threading.Event()
    held, threads = weakref.ref(given), queue.SimpleQueue()

    def job(given=None):
        threads.put(threading.current_thread())
        assert go_on.wait(120)

    with ThreadPoolExecutor(2) as pool:
        future, other = pool.submit(job, given), pool.submit(job)
        del given
        workers = threads.get(timeout=120), threads.get(timeout=120)
        awaited = future if waits == "for it" else other
        waiter = threading.Thread(target=awaited.result)
        waiter.start()
        while not any(awaits_thread(waiter, worker) for worker in workers):
            pass
        go_on.set()
        waiter.join()
        future.result(timeout=120)
        del future, other, awaited, waiter
        until = time.monotonic() + 10  # the threads may have come to the end or not
        while held() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert held() is None


def test_what_a_call_has_of_its_locals_is_not_taken_from_it():
    """Before Python 3.13 it is one with what a frame shows, which was emptied."""

    class Caller:
        def call(self):
            kept = locals()
            return objects_in(threading.get_ident()), kept

    caller = Caller()
    found, kept = caller.call()
    assert caller in found
    assert kept["self"] is caller


def test_what_a_call_was_given_by_position_is_known_unless_it_was_put_aside():
    def look():
        return arguments_of(sys._getframe(1))

    def call(first, second=2, *rest, named=0, **others):
        return look(), lambda: second

    def replace(first, *rest):
        first, rest = rest, first
        return look(), first, rest

    def take_none():
        return look()

    assert call("one")[0] == ["one", 2]
    assert call("one", "two", "three", named=1, more=2)[0] == ["one", "two", "three"]
    assert replace("one", "two")[0] == [("two",)]
    assert take_none() == []
