"""Background threads for what would block the thread that runs the model.

Threads only read disks, copy pageable memory and make page-locked memory; they never
issue device work, because a thread wakes up to 5 ms late behind Python code, and that
is lost link time.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from stagehand.errors import ClosedError

__all__ = ["WorkerGroup"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class WorkerGroup:
    """A few named threads that run jobs in the order they were given.

    A failure is kept in its job's `Future` and reaches whoever asks for the result.
    Threads start with the first job, and go when the group is closed or forgotten.

    The garbage collector may close a group, or drop its jobs, on one of its own
    threads: there, nothing waits.

    Args:
        name: For the threads' names.
        count: Number of threads.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self._threads: set[int] = set()

    def submit(
        self, job: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> "Future[_R]":
        """Queue a job and return its future.

        Raises:
            ClosedError: After `close()`.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(
                    f"the workers {self._name!r} are closed; make new ones"
                )
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._count,
                    thread_name_prefix=f"stagehand-{self._name}",
                    initializer=_note_thread,
                    initargs=(self._threads,),
                )
            return self._pool.submit(job, *args, **kwargs)

    def drop(self, future: "Future[_R]") -> None:
        """Give up a job's result, its failure included; on return it does not run."""
        if not future.cancel() and not self._is_inside():
            future.exception()

    def wait_idle(self) -> None:
        """Block until all jobs are done, whatever came of them; for one caller at a
        time."""
        if self._pool is None:
            return
        all_there = threading.Barrier(self._count + 1)
        try:
            for _ in range(self._count):
                self.submit(all_there.wait)
            all_there.wait()
        except BaseException:
            all_there.abort()  # else the threads would wait for ever
            raise

    def close(self) -> None:
        """Drop waiting jobs and join the threads. Idempotent."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=not self._is_inside(), cancel_futures=True)

    def _is_inside(self) -> bool:
        return threading.get_ident() in self._threads


def _note_thread(threads: set[int]) -> None:
    threads.add(threading.get_ident())
