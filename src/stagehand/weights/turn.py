"""Whose turn it is to run a model, in which thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from stagehand.torch_private import waits_for_backward

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HERE", "Turn"]


class _Here(threading.local):
    """This thread, by its object: the numbers of threads that ended are used again."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


HERE = _Here()


class Turn:
    """A reentrant lock that can be taken over from a thread that forgot it.

    An interrupt skips the hooks that would have released it, and its thread may be gone
    or never come back. Whoever waits looks now and then whether that has happened.

    Args:
        left: Whether what the owner entered is no longer running.
        take_over: Called by the new owner, before anything else.
    """

    def __init__(self, left: Callable[[], bool], take_over: Callable[[], None]) -> None:
        self._left = left
        self._take_over = take_over
        self._lock = threading.Lock()
        self._ownership = threading.Lock()
        self._owner: Any = None  # a thread
        self._waiting: set[Any] = set()  # threads
        self._count = 0
        self._sorting = False  # the owner is back, and may be closing what it left

    def acquire(self, *, in_backward: bool = False) -> bool:
        """Wait for one's turn; return whether it was granted.

        Args:
            in_backward: Do not wait for an owner that itself waits for autograd: that
                needs the thread that asks.
        """
        me = HERE.thread
        with self._ownership:
            if self._owner is me:
                self._count += 1
                self._sorting = True
                return True
        if self._lock.acquire(blocking=False):
            self._owner, self._count = me, 1
            return True
        self._waiting.add(me)
        try:
            return self._wait(me, in_backward=in_backward)
        finally:
            self._waiting.discard(me)

    def _wait(self, me: Any, *, in_backward: bool) -> bool:
        while not self._lock.acquire(blocking=False):
            if in_backward and self._is_waited_for(me):
                return False
            if self._lock.acquire(timeout=_LOOK_SECONDS):
                break
            with self._ownership:
                if not self._is_forgotten():
                    continue
                self._owner, self._count = me, 1
            self._take_over()
            return True
        self._owner, self._count = me, 1
        return True

    def try_acquire(self) -> bool:
        """Take the turn if that needs no waiting; return whether it was taken."""
        me = HERE.thread
        with self._ownership:
            if self._owner is me:
                self._count += 1
                self._sorting = True
                return True
            free = self._lock.acquire(blocking=False)
            if not free and not self._is_forgotten():
                return False
            self._owner, self._count = me, 1
        if not free:
            self._take_over()
        return True

    @property
    def owner(self) -> Any:
        """The thread whose turn it is, or None."""
        return self._owner

    def is_awaited_by(self, thread: Any) -> bool:
        """Whether a thread waits for its turn."""
        return thread in self._waiting

    def _is_waited_for(self, me: Any) -> bool:
        """Whether the owner waits for autograd, and this is a thread of autograd's own.

        Python calls threads that it has not started by this name.
        """
        owner = self._owner
        return (
            owner is not None
            and me.name.startswith("Dummy-")
            and waits_for_backward(owner.ident)
        )

    def _is_forgotten(self) -> bool:
        if self._owner is None or self._sorting:
            return False
        return not self._owner.is_alive() or self._left()

    def sorted(self) -> None:
        """Say that all that the owner has entered is running."""
        self._sorting = False

    def release(self) -> None:
        """End what the latest `acquire` began."""
        self._sorting = False
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_LOOK_SECONDS = 0.05
