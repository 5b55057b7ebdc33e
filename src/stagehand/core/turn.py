"""Whose turn it is to run a model, in which thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from stagehand.errors import DeadlockError
from stagehand.frames import awaits_thread, frames_of
from stagehand.torch_private import is_autograds, waits_for_backward

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HERE",
    "Turn",
    "awaited_by",
    "host_while",
    "runs_library",
    "why_waits",
]


class _Here(threading.local):
    """The calling thread's object: numbers of threads are used again when they end."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


HERE = _Here()

_LOOK_SECONDS = 0.05  # how often who waits looks whether the wait can ever end
_waits: dict[Any, Turn] = {}  # by thread
# Reentrant: the garbage collector may end something in the middle of a look.
_waits_lock = threading.RLock()
_hosts: set[Any] = set()  # threads that wait for inner calls of theirs


def awaited_by(thread: Any) -> Turn | None:
    """Return whose turn a thread waits for, if it waits for one."""
    return _waits.get(thread)


class Turn:
    """A reentrant lock that can be taken over from a thread that forgot it.

    An interrupt skips the hooks that would have released it, and its thread may be gone
    or never come back. Whoever waits looks now and then whether that has happened, and
    whether the owner waits for what this thread has: then neither would ever go on.

    Args:
        name: The model's, for errors.
        left: Returns whether what the owner entered is no longer running.
        take_over: Called by the new owner, before anything else.
        ends_alone: Returns whether what the owner entered will end even if the owner
            waits: another thread ends it.
    """

    def __init__(
        self,
        name: str,
        left: Callable[[], bool],
        take_over: Callable[[], None],
        ends_alone: Callable[[], bool],
    ) -> None:
        self.name = name
        self._left = left
        self._take_over = take_over
        self.ends_alone = ends_alone
        # Reentrant: the garbage collector may end a pass in the middle of a look.
        self.ownership = threading.RLock()
        """Held while the owner changes, and while somebody looks who it is."""
        self._freed = threading.Lock()  # locked, but when the turn has become free
        self._freed.acquire()
        self._owner: Any = None  # a thread
        self._count = 0
        self._sorting = False  # the owner is back and may be closing what it had left
        self.inner_calls: set[int] = set()
        """Calls of autograd that go on beside the owner, until `dismiss`."""
        self._letting_in = threading.Lock()
        self._dismissed = threading.Event()

    def acquire(self, *, task: int | None = None) -> bool:
        """Wait for one's turn; return whether it was granted.

        Args:
            task: A call of autograd that asks. It does not wait for an owner that
                itself waits for autograd, for that needs the thread that asks: it
                becomes an inner call.

        Raises:
            DeadlockError: If the owner waits for this thread, through others or not.
        """
        me = HERE.thread
        if self._take(me):
            return True
        try:
            return self._wait(me, task)
        finally:
            with _waits_lock:
                _waits.pop(me, None)

    def _take(self, me: Any) -> bool:
        """Take the turn if it is free or this thread's; return whether it was.

        `_owner` says who has it. A plain lock would not do: an interrupt may come
        between the call that takes it and the next line, and nobody would know.
        """
        with self.ownership:
            if self._owner is None:
                self._owner, self._count = me, 1
            elif self._owner is me:
                self._count += 1
                self._sorting = True
            else:
                return False
            return True

    def waiting(self) -> set[Any]:
        """Return the threads that wait for it, but for those that stand back.

        Nor those that an interrupt has left in the list of who waits.
        """
        waiting = [thread for thread, turn in _waits.copy().items() if turn is self]
        return {thread for thread in waiting if _acquires(thread)}

    def stand_back(self, first: set[Any]) -> None:
        """Wait until threads have had the turn that this one has just given back.

        For one that could not use it, for what it needs may be theirs.

        Args:
            first: Those that were `waiting`.

        Raises:
            DeadlockError: If one of them waits for this thread.
        """
        me = HERE.thread
        try:
            self._wait(me, None, first.copy())
            self.release()
        finally:
            with _waits_lock:
                _waits.pop(me, None)

    def _wait(self, me: Any, task: int | None, first: set[Any] | None = None) -> bool:
        while (first and self._are_waiting(first)) or not self._take(me):
            if task is not None and self._lets_in(me, task):
                return False
            self._note_wait(me, in_backward=task is not None)
            if self._freed.acquire(timeout=_LOOK_SECONDS):
                continue
            if self._take_over_if_forgotten(me):
                return True
        return True

    def _are_waiting(self, threads: set[Any]) -> bool:
        """Whether any of some threads still waits for the turn.

        Takes out those that do not: they have had it, and may come again and again.
        """
        threads &= self.waiting()
        return bool(threads)

    def move_here(self) -> bool:
        """Make this thread the owner, to end what the present one has entered.

        Returns:
            False if that one is in the middle of a call that needs the turn, too.
        """
        me = HERE.thread
        with self.ownership:
            if self._owner is not me:
                if self._count > 1 and runs_library(self._owner):
                    return False
                self._owner = me
            return True

    def _lets_in(self, me: Any, task: int) -> bool:
        """Let a call of autograd become an inner one, if the owner waits for its
        thread, and was not interrupted in what it had the turn for.

        It is noted as one before that is looked at: so an owner that goes on in the
        meantime finds it.
        """
        with self._letting_in:
            self.inner_calls.add(task)
            if self._is_waited_for(me) and not self._is_forgotten():
                return True
            self.dismiss(task)
            return False

    def dismiss(self, task: int) -> None:
        """Note that a call of autograd is over, or is no inner call after all."""
        self.inner_calls.discard(task)
        self._dismissed.set()

    def await_inner_calls(self) -> None:
        """Block the owner, before it does anything, until there are no inner calls.

        A thread of autograd's own does not wait: inner calls may need it.
        """
        if is_autograds(HERE.thread):
            return
        while self.inner_calls:
            host_while(lambda: bool(self.inner_calls), self._dismissed)
            with self._letting_in:  # one may have come in just before this went on
                pass

    def _take_over_if_forgotten(self, me: Any) -> bool:
        """Take the turn if its owner has forgotten it; return whether it had."""
        with self.ownership:
            if not self._is_forgotten():
                return False
            self._owner, self._count, self._sorting = me, 1, False
        self._take_over()
        return True

    def _note_wait(self, me: Any, *, in_backward: bool) -> None:
        """Note that a thread waits for the turn.

        Raises:
            DeadlockError: If the turn's owner waits for that thread.
        """
        with _waits_lock:
            _waits[me] = self
            stuck, thread = _stuck_behind(me), self.holder()
            if thread not in stuck:
                return
            for_autograd = thread not in _waits and not awaits_thread(
                thread, stuck[thread][1]
            )
            if in_backward and for_autograd:
                return  # the owner has begun to wait for autograd: this becomes inner
            del _waits[me]  # so that only this one of the circle fails
        steps = [f"which thread {thread.name!r} runs"]
        while thread is not me:
            why, thread = stuck[thread]
            steps.append(why)
        raise DeadlockError(
            f"thread {me.name!r} would wait for {self.name} for ever,"
            f" {'; '.join(steps)}; run models inside of each other in the same order in"
            " every thread, and parts of a model in the thread that runs it"
        )

    def try_acquire(self) -> bool:
        """Take the turn if that needs no waiting; return whether it was taken."""
        me = HERE.thread
        return self._take(me) or self._take_over_if_forgotten(me)

    @property
    def owner(self) -> Any:
        """The thread whose turn it is, or None."""
        return self._owner

    def holder(self) -> Any:
        """Return the owner; None if the turn becomes free whatever that waits for."""
        if self._is_forgotten() or self.ends_alone():
            return None
        return self._owner

    def _is_waited_for(self, me: Any) -> bool:
        """Whether the owner waits for autograd, and this is a thread of its own."""
        owner = self._owner
        return owner is not None and is_autograds(me) and _awaits_autograd(owner)

    def _is_forgotten(self) -> bool:
        """Whether the owner's thread has ended, or left what it had entered."""
        owner = self._owner  # which may end its turn meanwhile
        if owner is None:
            return False
        if not owner.is_alive():
            return True
        if self._sorting:  # asked twice: the owner may go on during the look
            return not runs_library(owner) and self._sorting
        return self._left()

    def sorted(self) -> None:
        """Say that the owner has closed what it had left: all it has entered runs."""
        self._sorting = False

    @property
    def count(self) -> int:
        """How often it was acquired, and not released yet."""
        return self._count

    def recount(self, count: int) -> None:
        """Say how often this thread, the owner, will still release it.

        An interrupt may have kept it from a release, or come in mid-take-over.
        """
        self._count = count

    def release(self) -> None:
        """End what the latest `acquire` began."""
        with self.ownership:
            self._sorting = False
            self._count -= 1
            if not self._count:
                self._owner = None
                if self._freed.locked():
                    self._freed.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def host_while(goes_on: Callable[[], bool], changed: threading.Event) -> None:
    """Wait for autograd's threads, in a way that lets what they run become inner calls.

    Args:
        goes_on: Whether there is something to wait for.
        changed: Set when that may have changed.
    """
    me = HERE.thread
    _hosts.add(me)
    try:
        while goes_on():
            changed.wait(timeout=_LOOK_SECONDS)
            changed.clear()
    finally:
        _hosts.discard(me)


def _acquires(thread: Any) -> bool:
    """Return whether a thread is inside of `Turn.acquire`."""
    code = Turn.acquire.__code__
    return any(frame.f_code is code for frame in frames_of(thread.ident or 0))


def runs_library(thread: Any) -> bool:
    """Return whether a thread is inside of a function of this library."""
    return any(
        frame.f_globals.get("__name__", "").startswith("stagehand.")
        for frame in frames_of(thread.ident)
    )


def _stuck_behind(me: Any) -> dict[Any, tuple[str, Any]]:
    """Return all threads that wait for one, directly or through others.

    Starts at that thread, which does not go on meanwhile: so no wait that is found can
    end. Of a thread that waits for autograd it is not known for which of autograd's
    threads: it counts as waiting for each.

    Returns:
        By thread: why it waits, in words, and for which thread.
    """
    stuck = {me: ("", me)}
    while True:
        known = len(stuck)
        for thread, turn in _waits.copy().items():
            holder = turn.holder()
            if holder in stuck and thread not in stuck:
                why = f"thread {thread.name!r} waits for {turn.name}"
                stuck[thread] = f"{why}, which thread {holder.name!r} runs", holder
        for thread in threading.enumerate():
            if thread in stuck or thread in _waits:
                continue
            for one in [*stuck]:
                if why := why_waits(thread, one):
                    stuck[thread] = f"thread {thread.name!r} waits for {why}", one
        if len(stuck) == known:
            return stuck


def why_waits(thread: Any, one: Any) -> str:
    """Return why a thread waits for another one, in words; "" if it does not.

    Waits for a turn, or for room on the device, do not count.
    """
    if is_autograds(one) and _awaits_autograd(thread):
        return f"autograd, whose thread is {one.name!r}"
    return f"thread {one.name!r}" if awaits_thread(thread, one) else ""


def _awaits_autograd(thread: Any) -> bool:
    """Whether a thread waits for a call of autograd, its own or another's."""
    return thread in _hosts or waits_for_backward(thread.ident or 0)
