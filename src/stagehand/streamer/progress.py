"""A line on the terminal that says how far a pass has come."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 24
_INTERVAL_SECONDS = 0.1


class Progress:
    """Draws one line over and over; where there is no terminal, it writes nothing.

    Args:
        label: What is counted.
        total: How many there are.
        on: Whether to draw it at all.
    """

    def __init__(self, label: str, total: int, *, on: bool) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._drawn_at = -_INTERVAL_SECONDS
        self._stream: TextIO | None = None
        if on and sys.stderr is not None and sys.stderr.isatty():
            self._stream = sys.stderr

    def advance(self) -> None:
        """Count one more."""
        self._done += 1
        if self._stream is None:
            return
        now = time.monotonic() - self._began
        if now - self._drawn_at >= _INTERVAL_SECONDS or self._done == self._total:
            self._drawn_at = now
            self._draw(self._stream, now)

    def close(self) -> None:
        """End the line. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None and self._done:
            stream.write("\n")
            stream.flush()

    def _draw(self, stream: TextIO, seconds: float) -> None:
        filled = _WIDTH * self._done // self._total
        bar = "#" * filled + "." * (_WIDTH - filled)
        pace = f" {self._done / seconds:.1f}/s" if seconds > 0 else ""
        stream.write(f"\r{self._label} {bar} {self._done}/{self._total}{pace} ")
        stream.flush()
