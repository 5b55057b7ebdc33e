"""What a cell's process does, one after the other: so short runs are planned."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Stages"]


class Stages:
    """How long each part took; also for who gives a process up.

    Args:
        path: A file that says it at any time; None for none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._begun: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        """End the part before, and begin another one."""
        self._begun.append((name, time.perf_counter()))
        if self._path is not None:
            past = [f"{past} {took:.0f} s" for past, took in self.seconds.items()]
            self._path.write_text(", ".join([*past, name]), encoding="utf-8")

    @property
    def seconds(self) -> dict[str, float]:
        """Of the parts that have ended."""
        return {
            name: after - began for (name, began), (_, after) in pairwise(self._begun)
        }
