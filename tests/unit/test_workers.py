"""WorkerGroup: threads whose failures reach the caller and whose end is certain."""

import gc
import threading
from concurrent.futures import CancelledError

import pytest

from stagehand.core.workers import WorkerGroup
from stagehand.errors import ClosedError, ReadError

PATIENCE = 120  # seconds until a test gives up


@pytest.fixture
def group():
    group = WorkerGroup("reader", 1)
    yield group
    group.close()


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("stagehand-reader")]


def blocked(group):
    """Keep one thread busy; return a function that ends that, and the job."""
    started, end = threading.Event(), threading.Event()

    def job():
        started.set()
        assert end.wait(PATIENCE)
        return "done"

    future = group.submit(job)
    assert started.wait(PATIENCE)
    return end.set, future


def fail():
    raise ReadError("model.safetensors cannot be read")


def test_jobs_of_one_thread_run_in_the_order_they_were_given(group):
    seen = []
    futures = [group.submit(seen.append, number) for number in range(20)]
    for future in futures:
        future.result(PATIENCE)
    assert seen == list(range(20))


def test_arguments_and_result_pass_through(group):
    assert group.submit(int, "ff", base=16).result(PATIENCE) == 255


def test_there_are_as_many_threads_as_asked_for_and_none_before_the_first_job():
    group = WorkerGroup("reader", 2)
    assert threads() == []
    ends = [blocked(group)[0] for _ in range(2)]
    waiting = group.submit(str)
    assert len(threads()) == 2
    assert not waiting.done()
    for end in ends:
        end()
    group.close()
    assert threads() == []


def test_failure_reaches_whoever_asks_for_the_result_and_no_one_else(group):
    failed = group.submit(fail)
    assert group.submit(int, "7").result(PATIENCE) == 7
    with pytest.raises(ReadError, match="cannot be read"):
        failed.result(PATIENCE)


def test_close_waits_for_the_running_job_and_cancels_the_waiting_ones():
    group = WorkerGroup("reader", 1)
    end, running = blocked(group)
    waiting = group.submit(fail)
    closing = threading.Thread(target=group.close)
    closing.start()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    assert closing.is_alive()
    end()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert running.result(0) == "done"
    assert threads() == []


def test_second_close_does_nothing_and_a_closed_group_takes_no_jobs():
    group = WorkerGroup("reader", 1)
    group.submit(str).result(PATIENCE)
    group.close()
    group.close()
    with pytest.raises(ClosedError, match="the workers 'reader' are closed"):
        group.submit(str)


def test_group_without_jobs_can_be_closed():
    WorkerGroup("reader", 1).close()


def test_dropped_job_that_waits_never_runs(group):
    end, _ = blocked(group)
    seen = []
    waiting = group.submit(seen.append, 1)
    group.drop(waiting)
    end()
    group.submit(str).result(PATIENCE)
    assert seen == []
    assert waiting.cancelled()


def test_dropped_job_that_runs_is_over_when_drop_returns(group):
    end, running = blocked(group)
    releasing = threading.Timer(0.05, end)
    releasing.start()
    group.drop(running)
    assert running.done()
    releasing.join()


def test_failure_of_a_dropped_job_is_dropped_too(group):
    group.drop(group.submit(fail))


@pytest.mark.parametrize("action", ["close", "drop"])
def test_garbage_collected_on_its_own_thread_a_group_does_not_wait_for_itself(action):
    """The last reference to a model may fall in the middle of reading it ahead."""
    group = WorkerGroup("reader", 2)
    own = []
    ready = threading.Event()

    def job():
        assert ready.wait(PATIENCE)
        if action == "close":
            group.close()
        else:
            group.drop(own[0])
        return "survived"

    own.append(group.submit(job))
    ready.set()
    assert own[0].result(PATIENCE) == "survived"
    group.close()
    for thread in threads():
        thread.join(PATIENCE)
    assert threads() == []


def test_threads_of_a_forgotten_group_end():
    group = WorkerGroup("reader", 1)
    group.submit(str).result(PATIENCE)
    [thread] = threads()
    del group
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_idle_group_has_done_all_it_was_given_whatever_came_of_it():
    group = WorkerGroup("idle", 2)
    group.wait_idle()  # nothing was given
    gate, began, done = threading.Event(), threading.Event(), []

    def late():
        began.set()
        assert gate.wait(120)
        done.append(1)

    group.submit(late)
    failed = group.submit(lambda: 1 // 0)
    assert began.wait(120)
    waiter = threading.Thread(target=lambda: (group.wait_idle(), done.append(2)))
    waiter.start()
    assert isinstance(failed.exception(), ZeroDivisionError)
    gate.set()
    waiter.join(120)
    assert done == [1, 2]
    group.close()
