"""Lets a test look at what Python runs, as a debugger does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["traced"]


@contextmanager
def traced(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Call `trace` with what runs inside, in this thread, as `sys.settrace` says.

    What it raises ends that, and is raised where the code was.
    """
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
