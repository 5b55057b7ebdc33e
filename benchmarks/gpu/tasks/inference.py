"""Forward passes of one model, or of two in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.tasks.base import Room, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.rates import Rates

__all__ = ["Inference"]


class Inference(Task):
    """Each model once a step."""

    def outcome(self) -> list[torch.Tensor]:
        """See `Task`. The outputs."""
        return [out.cpu() for out in self._forward()]

    def phases(self) -> Sequence[Callable[[], object]]:
        """See `Task`. One: all of it."""
        return (self._forward,)

    @torch.no_grad()
    def _forward(self) -> list[torch.Tensor]:
        return [
            out
            for model, state in zip(self.models, self.states, strict=True)
            for out in model(*state)
        ]

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """See `Task`. Compute, the link, or the disk: whichever takes longest."""
        disk = room.read_bytes / rates.disk if rates.disk else 0.0
        return max(sum(seconds), room.crossing_bytes / rates.h2d, disk)
