"""A way of keeping weights elsewhere, and what somebody else's says it cannot do."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.metadata
import importlib.util
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.tasks.base import Room, Task

__all__ = ["LeftOutError", "Pins", "Setting", "Way", "needs_cuda"]


class LeftOutError(Exception):
    """Another library says that it cannot do this, by its documents or its import."""


@dataclass(kw_only=True, slots=True)
class Setting:
    """Where and with how much a way has to do its work."""

    cell: Cell
    task: Task
    """Whose models it changes or replaces."""
    room: Room
    place: torch.device
    folder: Path
    """For files; empty, and deleted later."""
    ends: ExitStack = field(default_factory=ExitStack)
    """What is called when all is measured."""

    def share(self, model: torch.nn.Module) -> int:
        """Bytes of the budget for one of the models: in proportion to its weights."""
        if len(self.task.models) == 1:
            return self.room.budget_bytes
        own = sum(p.numel() * p.element_size() for p in model.parameters())
        return self.room.budget_bytes * own // self.room.whole_bytes


class Pins(enum.Enum):
    """What torch page-locks for a way, each tensor rounded up to a power of two."""

    NOTHING = enum.auto()
    IN_PLACE = enum.auto()
    """All weights, one after the other in the place of ordinary memory."""
    COPIES = enum.auto()
    """All weights, before ordinary memory is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way."""

    kinds: frozenset[str]
    """What it can do."""
    prepare: Callable[[Setting], object]
    """Changes the models of a task."""
    package: str = "torch"
    """What has to be installed."""
    spills: bool = False
    """Whether most of what forward leaves for backward leaves the device."""
    pins: Pins = Pins.NOTHING
    """What it page-locks by itself."""

    @property
    def missing(self) -> bool:
        """Whether it is not installed."""
        return importlib.util.find_spec(self.package) is None

    def load(self) -> None:
        """Import it, where what it does to the process is wanted.

        Raises:
            LeftOutError: If it cannot be imported.
        """
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            raise LeftOutError(f"{self.package}: {error}") from error

    @property
    def version(self) -> str:
        """Of the package."""
        names = _distributions().get(self.package)
        return importlib.metadata.version(names[0]) if names else "unknown"


def needs_cuda(at: Setting) -> None:
    """Leave a library out that knows no other device."""
    if at.place.type != "cuda":
        raise LeftOutError(f"{at.cell.way} needs CUDA, this is {at.place.type}")


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
