"""A process that may have no more threads, as in a container with a limit of them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

__all__ = ["without_threads"]

# From Python 3.13 on it is another function.
_START = next(
    name
    for name in ("_start_joinable_thread", "_start_new_thread")
    if hasattr(threading, name)
)
_REFUSAL = "can't start new thread"


@contextmanager
def without_threads() -> Iterator[None]:
    """Let no thread start."""
    with patch.object(threading, _START, side_effect=RuntimeError(_REFUSAL)):
        yield
