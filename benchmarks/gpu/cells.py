"""What is measured: one cell is one thing, done one way, in so much memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["LEAST", "Cell"]

LEAST = "least"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement, of which one line comes; what it says decides what is done."""

    kind: str
    """What is done: a key of `tasks.KINDS`."""
    shape: str
    """With which model: a key of `shapes.SHAPES`; with a plus between two."""
    way: str = "stagehand"
    """Who keeps weights elsewhere: a key of `ways.WAYS`."""
    cap: str | None = None
    """Device memory of the card, such as "24GiB"; None for all there is."""
    budget: str | None = None
    """Device bytes for weights (for saved tensors, where those move), or a part of
    all, such as "30%"; `LEAST` for as few as work; None for what the cap leaves."""
    ram: str | None = None
    """Host bytes for weights, or a part of all, where they come from disk."""
    blocks: int | None = None
    """About how many blocks; None for as many as the model."""
    divide: int = 1
    """By how much widths and tokens are divided."""
    steps: int = 10
    """How many are timed."""
    settling: int = 8
    """Steps before that, in which measured plans are made."""

    @property
    def name(self) -> str:
        """How people pick it: kind/shape/memory/way."""
        sizes = [size for size in (self.cap, self.budget, self.ram) if size]
        return "/".join((self.kind, self.shape, "+".join(sizes) or "all", self.way))

    @property
    def ours(self) -> bool:
        """Whether it measures this library: then a failure is a mistake."""
        return self.way.startswith("stagehand")

    def line(self) -> dict[str, Any]:
        """Return what tells it from others, for the results."""
        return asdict(self)

    def scaled(self, blocks: int | None, steps: int) -> Cell:
        """Return the same with so many blocks and timed steps."""
        return replace(self, blocks=blocks or self.blocks, steps=steps)
