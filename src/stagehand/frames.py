"""In the middle of which calls a thread is, as another thread sees it."""

import copy
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from inspect import CO_OPTIMIZED, CO_VARARGS
from types import FrameType
from typing import Any

__all__ = [
    "Call",
    "arguments_of",
    "awaits_thread",
    "frame_of_copy",
    "frames_of",
    "objects_in",
]

# Reentrant: the garbage collector may run before it is switched off.
_switch = threading.RLock()
_WAITS = [
    getattr(function, "__code__", None)  # other libraries may have put in their own
    for function in (threading.main_thread().join, Future.result, Future.exception)
]
_OWN_REFERENCES = 3  # to what a frame shows: its own, the reader's, and that to count
_DEPTH = 3  # calls: further in than `join()` are only those that it makes itself


class Call:
    """A call, told from others without its frame, which would keep all that it has.

    That of a call that is over may have been given to another one of the same function.
    """

    __slots__ = ("_code", "_number")

    def __init__(self, frame: FrameType) -> None:
        self._number = id(frame)
        self._code = frame.f_code

    def is_of(self, frame: FrameType) -> bool:
        """Whether a frame is the call's."""
        return id(frame) == self._number and frame.f_code is self._code

    def goes_on(self, thread: int) -> bool:
        """Whether a thread, by its number, is in it."""
        return any(map(self.is_of, frames_of(thread)))


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, by its number, innermost first.

    Not this function's own, which would hold all others in a cycle.

    Args:
        thread: Its `ident`. One that has ended is in no calls.
    """
    found: list[FrameType] = []
    with _uncollected():
        frame = sys._current_frames().get(thread)
        if frame is sys._getframe():
            frame = frame.f_back
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found


def awaits_thread(thread: Any, worker: Any) -> bool:
    """Return whether a thread waits for another one to end, or for what it computes.

    That is a `join()` or the result of a pool's future, without a time limit.
    """
    for frame in frames_of(thread.ident or 0)[:_DEPTH]:
        if frame.f_code in _WAITS and _local(frame, "timeout") is None:
            awaited = _local(frame, "self")
            return awaited is worker or (
                isinstance(awaited, Future) and _computes(worker, awaited)
            )
    return False


def objects_in(thread: int) -> list[Any]:
    """Return whose methods a thread is in, by its number, innermost first."""
    found = [_local(frame, "self") for frame in frames_of(thread)]
    return [one for one in found if one is not None]


def arguments_of(frame: FrameType) -> list[Any]:
    """Return what a call has of the arguments that it takes by position.

    Not those that it has put something else in the place of.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    if not code.co_flags & CO_VARARGS:
        return _locals(frame, names)
    *found, rest = _locals(
        frame, (*names, code.co_varnames[len(names) + code.co_kwonlyargcount])
    )
    return [*found, *(rest if isinstance(rest, tuple) else ())]


def frame_of_copy() -> FrameType | None:
    """Return the call that copies what holds an object, for its `__deepcopy__`.

    None where `copy` was told to copy that object itself, or somebody else copies.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != copy.__file__:
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return None
    around = frame.f_back
    return around if around.f_code.co_filename == copy.__file__ else None


def _computes(worker: Any, future: Future[Any]) -> bool:
    """Whether one of the calls in which a thread is belongs to a future's work."""
    return any(
        getattr(_local(frame, "self"), "future", None) is future
        for frame in frames_of(worker.ident or 0)
        if frame.f_globals.get("__name__") == "concurrent.futures.thread"
    )


def _local(frame: FrameType, name: str) -> Any:
    """Return a local variable of a function's call."""
    return _locals(frame, (name,))[0] if name in frame.f_code.co_varnames else None


def _locals(frame: FrameType, names: Sequence[str]) -> list[Any]:
    """Return local variables of a function's call, None for those without a value.

    Before Python 3.13 the frame would keep what it has shown here, as long as it lives,
    and shows one dict to all: what the call has of `locals()` is left as it is.
    """
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return [None] * len(names)  # a module that is being imported
    with _uncollected():
        shown = frame.f_locals
        values = [shown.get(name) for name in names]
        if isinstance(shown, dict) and sys.getrefcount(shown) <= _OWN_REFERENCES:
            shown.clear()
        return values


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage while another thread's frames are looked at.

    Python 3.11 may do so within `frame.f_back`. If a finalizer then lets the other
    thread go on, what is found is not a frame any more: the process crashes.
    """
    with _switch:
        collects = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if collects:
                gc.enable()
