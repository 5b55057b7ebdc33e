"""Interrupts at any line of some code, as Ctrl-C may come."""

import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tracing import traced

__all__ = ["interrupted_at"]

_QUIET = ("with ", "try:")


@contextmanager
def interrupted_at(number: int, *where: str | Callable[..., Any]) -> Iterator[None]:
    """Raise KeyboardInterrupt at the so many-th line that some code runs, from 1 on.

    Not where a `with` ends: no signal comes between a block and its `__exit__`. Nor at
    a `try`, which does nothing: what is around it may not see what is raised there.

    Args:
        number: Of the line.
        where: Modules, by their names, and functions.
    """
    modules = {part for part in where if isinstance(part, str)}
    codes = {part.__code__ for part in where if not isinstance(part, str)}
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        inside = frame.f_globals.get("__name__") in modules or frame.f_code in codes
        if not inside:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        left -= event == "line" and not line.lstrip().startswith(_QUIET)
        if not left:
            raise KeyboardInterrupt
        return trace

    with traced(trace):
        yield
