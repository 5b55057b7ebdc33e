"""Background threads for what would block the thread that runs the model.

Threads only read disks and copy pageable memory; they never issue device work, because
a thread wakes up to 5 ms late behind Python code, and that is lost link time.
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

    A failure is kept in its job's `Future` and reaches whoever asks for the result; one
    that nobody asked for is raised by `close()`. Threads start with the first job, and
    go when the group is closed or forgotten.

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
        self._lost: BaseException | None = None

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
                    self._count, thread_name_prefix=f"stagehand-{self._name}"
                )
            return self._pool.submit(job, *args, **kwargs)

    def abandon(self, future: "Future[object]") -> None:
        """Give up a job's result: not started, it never will be; a failure is kept."""
        if not future.cancel():
            future.add_done_callback(self._keep_failure)

    def _keep_failure(self, future: "Future[object]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and self._lost is None:
            self._lost = error

    def close(self) -> None:
        """Drop waiting jobs, join the threads, raise the first abandoned failure.

        Idempotent: the failure is raised once.
        """
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
