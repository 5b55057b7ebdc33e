"""Counts what code does instead of timing it: a count is the same on every machine."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tracing import traced

__all__ = ["Counted", "calls_of", "lines_run"]


def lines_run(call: Callable[..., object], *args: Any, **kwargs: Any) -> int:
    """How many lines of Python a call runs, of whatever library."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    with traced(trace):
        call(*args, **kwargs)
    return count


def calls_of(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """Return a list that gets an entry whenever a method of an object is called."""
    plain, calls = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return plain(*args, **kwargs)

    patch.setattr(owner, name, counted)
    return calls


class Counted(int):
    """A number that runs a line whenever it is compared, wherever that is done."""

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __hash__(self) -> int:
        return int(self)
