"""Forward passes of one model, or of two in turns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.gpu.tasks.base import Room, Task, nbytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.blocks import State
    from benchmarks.gpu.rates import Rates

__all__ = ["Inference"]


class Inference(Task):
    """Each model once a step."""

    def __init__(self, models: list[nn.Module], states: Sequence[State]) -> None:
        super().__init__(models, states)
        self._table_bytes = nbytes_of(
            module.weight
            for model in models
            for module in model.modules()
            if isinstance(module, nn.Embedding)
        )

    def outcome(self) -> list[torch.Tensor]:
        """See `Task`. The outputs."""
        return [
            out.cpu()
            for number in range(len(self.models))
            for out in self._forward(number)
        ]

    def phases(self) -> Sequence[Callable[[], object]]:
        """See `Task`. One for each model."""
        return [partial(self._forward, number) for number in range(len(self.models))]

    @torch.no_grad()
    def _forward(self, number: int) -> State:
        found: State = self.models[number](*self.states[number])
        return found

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """See `Task`. Compute, the link, or the disk: whichever takes longest.

        Of a table a step needs some rows: nothing that counts.
        """
        room = replace(room, whole_bytes=room.whole_bytes - self._table_bytes)
        disk = room.read_bytes / rates.disk if rates.disk else 0.0
        crossing = self.link_share * room.crossing_bytes
        return max(sum(seconds), crossing / rates.h2d, disk)
