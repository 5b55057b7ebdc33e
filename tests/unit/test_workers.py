"""WorkerGroup: threads whose failures reach the caller and whose end is certain."""

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import SimpleQueue

import pytest

from interrupts import interrupted_at
from stagehand.core.workers import WorkerGroup, failure_of
from stagehand.errors import ClosedError, ReadError, StagehandWarning
from threadless import without_threads

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


def test_each_thread_begins_once_before_its_first_job():
    seen = []
    group = WorkerGroup("reader", 2, lambda: seen.append(threading.current_thread()))
    ends = [blocked(group)[0] for _ in range(2)]
    before = [thread.name for thread in seen]
    for end in ends:
        end()
    for _ in range(4):
        group.submit(str).result(PATIENCE)
    group.close()
    assert sorted(before) == ["stagehand-reader_0", "stagehand-reader_1"]
    assert len(seen) == 2


@pytest.mark.parametrize(
    "error",
    [RuntimeError("cannot be used in a forked process"), MemoryError("std::bad_alloc")],
)
def test_jobs_are_done_by_a_thread_that_cannot_begin_as_it_should(error):
    """As in a forked process, where CUDA cannot be used: jobs may need no device."""

    def refuse():
        raise error

    group = WorkerGroup("reader", 1, refuse)
    assert group.submit(int, "7").result(PATIENCE) == 7
    group.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_outside_of_a_job_is_replaced():
    """What it was to do, and all that came later, waited for ever."""
    begun = SimpleQueue()
    ends = iter([SystemExit])

    def begin():
        begun.put(threading.current_thread())
        for end in ends:
            raise end

    group = WorkerGroup("reader", 1, begin)
    first = group.submit(int, "6")
    begun.get(timeout=PATIENCE).join(PATIENCE)
    assert not first.done()
    assert group.submit(int, "7").result(PATIENCE) == 7
    assert first.result(PATIENCE) == 6
    group.close()


def test_an_interrupt_where_a_thread_begins_leaves_workers_that_do_jobs_and_end():
    """It was among those to join, and was never started."""
    for number in itertools.count(1):
        group, interrupted = WorkerGroup("reader", 1), False
        try:
            with interrupted_at(number, WorkerGroup._have_threads):
                group.submit(str)
        except KeyboardInterrupt:
            interrupted = True
        assert group.submit(int, "7").result(PATIENCE) == 7
        group.close()
        if not interrupted:
            break
    assert number > 5


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


def test_several_jobs_are_done_when_one_call_returns(group):
    seen = []
    group.do_all(partial(seen.append, number) for number in range(20))
    assert seen == list(range(20))


def test_failure_of_several_jobs_is_raised_when_none_of_them_runs():
    group = WorkerGroup("reader", 2)
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    def fail_beside():
        assert begun.wait(PATIENCE)
        fail()

    def wait():
        begun.set()
        ended.append(go_on.wait(PATIENCE))

    releasing = threading.Timer(0.05, go_on.set)
    releasing.start()
    with pytest.raises(ReadError, match="cannot be read"):
        group.do_all([fail_beside, wait])
    assert ended == [True]
    releasing.join()
    group.close()
    with pytest.raises(ClosedError):
        group.do_all([wait])


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


def test_a_job_is_noted_before_it_runs(group):
    noted = []
    future = group.hand(noted.append, lambda: list(noted))
    assert future.result(PATIENCE) == noted == [future]


def test_a_job_that_an_interrupt_keeps_from_being_noted_never_runs(group):
    seen = []

    def interrupted(future):
        seen.append(future)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.hand(interrupted, seen.append, 1)
    assert not group._open
    group.submit(str).result(PATIENCE)
    group.wait_idle()
    [future] = seen
    assert isinstance(failure_of(future), CancelledError)


def test_failure_of_a_job_is_what_it_raised_or_that_it_was_dropped(group):
    end, running = blocked(group)
    waiting = group.submit(str)
    group.drop(waiting)
    end()
    assert failure_of(running) is None
    assert isinstance(failure_of(waiting), CancelledError)
    assert isinstance(failure_of(group.submit(fail)), ReadError)


def test_what_a_failed_job_was_given_goes_with_the_job(group):
    """Not with the next collection: it may be page-locked memory."""

    class Given:
        pass

    given = Given()
    held = weakref.ref(given)

    def use(what):
        del what
        fail()

    gc.disable()
    try:
        future = group.submit(use, given)
        del given
        assert isinstance(failure_of(future), ReadError)
        group.submit(str).result(PATIENCE)  # the thread has left the other one
        assert held() is None
        future = weakref.ref(future)
        assert future() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("end", [str, fail])
def test_what_a_job_was_given_has_gone_before_its_end_is_known(group, monkeypatch, end):
    """Who waits for it may make other memory in the place of what has been filled."""

    class Given:
        pass

    def use(what):
        del what
        end()

    given = Given()
    held = weakref.ref(given)
    seen = []

    def watched(tell):
        def look_and_tell(future, outcome):
            seen.append(held())
            tell(future, outcome)

        return look_and_tell

    for name in ("set_result", "set_exception"):
        monkeypatch.setattr(Future, name, watched(getattr(Future, name)))
    future = group.submit(use, given)
    del given
    failure_of(future)
    assert seen == [None]


def test_without_threads_jobs_run_where_they_are_given(group):
    """A container may let a process have no more of them. Nothing stays queued, to run
    behind the back of who gave it.
    """
    with without_threads():
        noted = []
        with pytest.warns(StagehandWarning, match="'reader' .can't start new thread"):
            future = group.hand(noted.append, threading.current_thread)
        assert noted == [future]
        assert future.result(0) is threading.current_thread()
        assert isinstance(failure_of(group.submit(fail)), ReadError)
    assert group.submit(threading.current_thread).result(PATIENCE) in threads()


def in_another_process(script):
    """Run a script; a group is there, and what jobs of it print."""
    begin = """
        import os, sys, threading, time
        from stagehand.core.workers import WorkerGroup, failure_of
        group = WorkerGroup("reader", 2)
        def say(text):
            os.write(1, f"{text}\\n".encode())  # whole, whoever else prints
    """
    text = textwrap.dedent(begin) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


def test_a_forked_process_has_threads_of_its_own():
    """A job that was under way there has failed here: it may be half done."""
    assert in_another_process("""
        goes_on = threading.Event()
        running = group.submit(goes_on.wait)
        group.submit(str).result()
        child = os.fork()
        if not child:
            say(f"{type(failure_of(running)).__name__}: {failure_of(running)}"[:49])
            say(group.submit(int, "7").result())
            group.close()
            os._exit(0)
        os.waitpid(child, 0)
        goes_on.set()
        say(running.result())
        group.close()
    """) == ["StagehandError: a job of the workers 'reader' was", "7", "True"]


def test_threads_work_on_when_the_main_thread_has_ended():
    """Python waits for other threads, which may run models."""
    assert in_another_process("""
        def serve():
            threading.main_thread().join()
            say(group.submit(int, "7").result())
        threading.Thread(target=serve).start()
    """) == ["7"]


def test_python_ends_when_what_runs_is_done_and_nothing_else():
    assert in_another_process("""
        began = threading.Barrier(3)
        def slow():
            began.wait()
            time.sleep(0.2)
            say("done")
        for _ in range(2):
            group.submit(slow)
        group.submit(say, "never")
        began.wait()
    """) == ["done", "done"]


def test_who_runs_after_the_threads_have_ended_is_served():
    assert in_another_process("""
        import atexit, stagehand.core.workers
        atexit.unregister(stagehand.core.workers._end_all)
        atexit.register(lambda: say(group.submit(int, "7").result()))
        atexit.register(stagehand.core.workers._end_all)
        import warnings
        warnings.simplefilter("ignore")
        group.submit(str).result()
    """) == ["7"]


def test_group_that_is_closed_while_it_is_given_a_job_drops_the_job():
    """As the garbage collector may close it, in the middle of anything."""
    group, done = WorkerGroup("reader", 1), []
    future = group.hand(lambda _: group.close(), done.append, 1)
    assert future.cancelled()
    assert not done


def test_group_keeps_no_job_that_ran_where_no_thread_could_start():
    group = WorkerGroup("reader", 1)
    with without_threads(), pytest.warns(StagehandWarning):
        future = weakref.ref(group.submit(list))
    gc.collect()
    assert future() is None
    group.close()


def test_group_can_be_closed_after_an_interrupt_has_kept_a_thread_from_starting(
    monkeypatch,
):
    def interrupted(_):
        raise KeyboardInterrupt

    group = WorkerGroup("reader", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.submit(list)
    group.close()
