"""In the middle of which calls a thread is, as another thread sees it."""

import gc
import sys
import threading
from types import FrameType

__all__ = ["frames_of"]

# Reentrant: the garbage collector may run before it is switched off.
_switch = threading.RLock()


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, by its number, innermost first.

    Not this function's own, which would hold all others in a cycle.

    Python 3.11 may collect garbage within `frame.f_back`. If a finalizer then lets the
    other thread go on, what is found is not a frame any more: the process crashes. So
    no garbage is collected meanwhile.

    Args:
        thread: Its `ident`. One that has ended is in no calls.
    """
    found: list[FrameType] = []
    with _switch:
        collects = gc.isenabled()
        try:
            gc.disable()
            frame = sys._current_frames().get(thread)
            if frame is sys._getframe():
                frame = frame.f_back
            while frame is not None:
                found.append(frame)
                frame = frame.f_back
        finally:
            if collects:
                gc.enable()
    return found
