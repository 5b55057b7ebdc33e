"""Background threads for what would block the thread that runs the model.

Threads only read disks, copy pageable memory and make page-locked memory; they never
issue device work, because a thread wakes up to 5 ms late behind Python code, and that
is lost link time.

Why this is no `ThreadPoolExecutor`: where no thread can start, an executor raises, but
keeps the job and runs it later; it refuses jobs as soon as the main thread ends, while
others may still run models; and after a fork it takes its parent's threads for its own.
"""

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from stagehand.errors import ClosedError, StagehandError, StagehandWarning

__all__ = ["WorkerGroup", "failure_of", "raise_kept"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_Work = tuple["Future[Any]", "_Doing"]


class WorkerGroup:
    """A few named threads that run jobs in the order they were given.

    A failure is kept in its job's `Future` and reaches whoever asks for the result.
    Threads start with the first jobs, and go when the group is closed or forgotten, or
    Python ends. Where none can start, jobs run in the thread that gives them.

    The garbage collector may close a group, or drop its jobs, on one of its own
    threads: there, nothing waits.

    Args:
        name: For the threads' names.
        count: Number of threads.
        begin: Called first in each thread, such as to make a device the thread's
            current one: without that, it is device 0.
        warns: Whether to warn where no thread can start.
    """

    def __init__(
        self,
        name: str,
        count: int,
        begin: Callable[[], object] | None = None,
        *,
        warns: bool = True,
    ) -> None:
        self._name = name
        self._count = count
        self._first = begin
        self._closed = False
        self._warned = not warns
        self._begin()
        _groups.add(self)

    def _begin(self) -> None:
        """Have neither threads nor jobs."""
        # Reentrant: the garbage collector may close the group in the middle.
        self._lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._open: set[Future[Any]] = set()
        """Jobs that are not over."""
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(
        self, job: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> "Future[_R]":
        """Queue a job and return its future.

        Raises:
            ClosedError: After `close()`.
        """
        return self.hand(_nobody, job, *args, **kwargs)

    def hand(
        self,
        note: "Callable[[Future[_R]], object]",
        job: Callable[_P, _R],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> "Future[_R]":
        """Like `submit`, but first tell `note` of the future.

        So an interrupt never leaves a job of which nobody knows: it is noted, or it
        does not run.

        Raises:
            ClosedError: After `close()`.
        """
        future: Future[_R] = Future()
        doing = _Doing(future, partial(job, *args, **kwargs))
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"the workers {self._name!r} are closed; make new ones"
                )
            runs_here = not self._have_threads()
            self._open.add(future)
            try:
                note(future)
                if not runs_here:
                    self._queue.put((future, doing))
            except BaseException:
                if future.cancel():
                    self._open.discard(future)
                raise
            if self._closed:
                future.cancel()
        if runs_here:
            _run(future, doing)
            self._open.discard(future)
        return future

    def _have_threads(self) -> bool:
        """Start another thread if there may be more; return whether there are any.

        One that has ended outside of a job, as none should, is counted no more.
        """
        self._threads = {each for each in self._threads if each.is_alive()}
        if len(self._threads) < self._count:
            name = f"stagehand-{self._name}_{len(self._threads)}"
            args = self._queue, self._open, self._first
            thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
            try:
                self._threads.add(thread)
                thread.start()
            except RuntimeError as error:
                self._threads.discard(thread)
                self._warn(error)
            except BaseException:
                self._threads.discard(thread)
                raise
        return bool(self._threads)

    def _warn(self, error: RuntimeError) -> None:
        if self._warned or self._threads:
            return
        self._warned = True
        warnings.warn(
            f"no thread could be started for the workers {self._name!r} ({error}): what"
            " they would do ahead of time is done when it is asked for, which is"
            " slower; let the process have more threads",
            StagehandWarning,
            stacklevel=5,
        )

    def do_all(self, jobs: "Iterable[Callable[[], object]]") -> None:
        """Do jobs in the threads; on return, whatever it is, none of them runs.

        Raises:
            BaseException: What the first of those raised that failed.
            CancelledError: If the group is closed meanwhile.
            ClosedError: If it was closed before.
        """
        futures: list[Future[object]] = []
        try:
            for job in jobs:
                self.hand(futures.append, job)
            for future in futures:
                future.result()
        finally:
            for future in futures:
                self.drop(future)

    def drop(self, future: "Future[_R]") -> None:
        """Give up a job's result, its failure included; on return it does not run."""
        if not future.cancel() and not self._is_inside():
            future.exception()

    def wait_idle(self) -> None:
        """Block until all jobs are done, whatever came of them."""
        for future in self._open.copy():
            failure_of(future)

    def close(self) -> None:
        """Drop waiting jobs and join the threads. Idempotent."""
        self._closed = True
        self._rest()

    def _rest(self) -> None:
        """Let the threads go: what waits is dropped, what runs is waited for."""
        with self._lock:
            threads = self._threads.copy()
            with suppress(Empty):
                while True:
                    if (work := self._queue.get_nowait()) is not None:
                        work[0].cancel()
                        self._open.discard(work[0])
            self._queue.put(None)
        if not self._is_inside():
            for thread in threads:
                thread.join()

    def _is_inside(self) -> bool:
        here = threading.get_ident()
        return any(thread.ident == here for thread in self._threads)

    def _end_with_python(self) -> None:
        """The process is about to end; who still gives jobs gets new threads for them,
        or does them.
        """
        self._rest()
        self._begin()

    def _begin_in_child(self) -> None:
        """The process was forked: the threads are its parent's."""
        left = self._open
        self._begin()
        for future in left:
            if not future.cancel() and not future.done():
                future.set_exception(
                    StagehandError(
                        f"a job of the workers {self._name!r} was under way when the"
                        " process was forked: its result is in the parent alone"
                    )
                )


def failure_of(future: "Future[Any]") -> BaseException | None:
    """Wait for a job; return what it raised, or that it was dropped."""
    try:
        return future.exception()
    except CancelledError as error:
        return error


def raise_kept(error: BaseException | None) -> None:
    """Raise what somebody has kept, if anything, from a frame that lets go of it.

    A frame that holds what it raises, and with that its own traceback, is freed by the
    collector alone, and so are graphs and tensors of all frames above it. So call this
    with an expression, not with a variable.
    """
    try:
        if error is not None:
            raise error
    finally:
        del error


def _nobody(_: "Future[_R]") -> None:
    """Know of no future."""


def _work(
    queue: "SimpleQueue[_Work | None]",
    open_jobs: "set[Future[Any]]",
    begin: Callable[[], object] | None,
) -> None:
    """A thread's life. It holds no group, so that one can be forgotten."""
    # In a forked process, or without memory; what needs a device says so. A thread that
    # ended here would keep its jobs waiting.
    with suppress(RuntimeError, MemoryError):
        if begin is not None:
            begin()
    while (work := queue.get()) is not None:
        _run(*work)
        open_jobs.discard(work[0])
        del work  # or what it holds lives until the next job comes
    queue.put(None)  # for the next thread


def _run(future: "Future[Any]", doing: "_Doing") -> None:
    if not future.set_running_or_notify_cancel():
        return
    del future  # a failure's traceback would hold it by this frame
    with doing:
        doing.do()


class _Doing:
    """Does a job, and keeps what it raises in the job's future.

    Before anybody is told, it has neither: who waits for a job takes the memory that
    the job was given for free, and a failure's traceback holds this.
    """

    def __init__(self, future: "Future[Any]", work: Callable[[], Any]) -> None:
        self._parts: tuple[Future[Any], Callable[[], Any]] | None = future, work
        self._result: Any = None

    def do(self) -> None:
        """Do it."""
        if self._parts is not None:
            self._result = self._parts[1]()

    def __enter__(self) -> None:
        """Nothing has been raised yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if self._parts is None:
            return True
        future, result = self._parts[0], self._result
        self._parts = self._result = None
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        return True


_groups: "weakref.WeakSet[WorkerGroup]" = weakref.WeakSet()


def _end_all() -> None:
    for group in tuple(_groups):
        group._end_with_python()


def _begin_all_in_child() -> None:
    for group in tuple(_groups):
        group._begin_in_child()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all_in_child)
