"""Interrupts at any line of some code, as Ctrl-C may come."""

import dis
import functools
import inspect
import linecache
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from tracing import traced

__all__ = ["interrupted_at", "interrupted_at_call"]

_QUIET = ("with ", "try:")
_LOOKING = {"CALL", "CALL_KW", "CALL_METHOD", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


@contextmanager
def interrupted_at(number: int, *where: str | Callable[..., Any]) -> Iterator[None]:
    """Raise KeyboardInterrupt at the so many-th line that some code runs, from 1 on.

    Not where a `with` ends: no signal comes between a block and its `__exit__`. Nor at
    a `try`, which does nothing: what is around it may not see what is raised there. Nor
    at a line that jumps back to itself, as comprehensions do which are no functions of
    their own: there Python 3.12 and 3.13 do not end a `with` around it, as they do for
    real signals.

    Args:
        number: Of the line.
        where: Modules, by their names, and functions.
    """
    modules = {part for part in where if isinstance(part, str)}
    codes = {part.__code__ for part in where if not isinstance(part, str)}
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        inside = frame.f_globals.get("__name__") in modules or frame.f_code in codes
        if not inside:
            return None
        ran = 0

        def look(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left, ran
            if event == "line":
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                own = frame.f_code.co_name.startswith("<")  # a comprehension, say
                if own or frame.f_lineno != ran:
                    left -= not line.lstrip().startswith(_QUIET)
                ran = frame.f_lineno
                if not left:
                    raise KeyboardInterrupt
            return look

        return look

    with traced(trace):
        yield


@contextmanager
def interrupted_at_call(number: int, *modules: str) -> Iterator[None]:
    """Raise where Python looks for signals: where functions begin, and after calls.

    Args:
        number: Of the place, in the order in which the code comes to them, from 1 on.
        modules: Whose code counts, by name.
    """
    left: float = number
    called: set[int] = set()

    def look(frame: FrameType) -> None:
        nonlocal left
        left -= 1
        if left <= 0 and not _is_swallowed(frame):
            left = math.inf
            raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        called.add(id(frame.f_back))
        if frame.f_globals.get("__name__") not in modules:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            look(frame)  # a generator may be closed: nobody looks there
        ran = ""

        def inside(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal ran
            if event == "opcode":
                returns = id(frame) in called  # from Python's own code nobody looks
                called.discard(id(frame))
                if ran in _LOOKING and not returns:
                    look(frame)
                ran = _names(frame.f_code).get(frame.f_lasti, "")
            elif event == "exception":
                ran = ""  # who raises does not look
            return inside

        return inside

    with traced(trace):
        yield


def _is_swallowed(frame: FrameType | None) -> bool:
    """Whether Python writes what is raised here to the standard error, and goes on."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@functools.cache
def _names(code: CodeType) -> dict[int, str]:
    """The names of instructions, by where they are."""
    return {step.offset: step.opname for step in dis.get_instructions(code)}
