"""Forward passes of one model, or of two in turns."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.gpu.blocks.text import Experts
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
        experts = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, Experts)
        ]
        self._expert_bytes = nbytes_of(p for each in experts for p in each.parameters())
        self._chosen = 1.0
        if experts:
            calls = states[0][0].shape[0] * experts[0].taken
            self._chosen = min(1.0, calls / len(experts[0].up))

    def outcome(self) -> list[torch.Tensor]:
        """See `Task`. The outputs."""
        found = [
            out.cpu()
            for number in range(len(self.models))
            for out in self._forward(number)
        ]
        self.came = time.perf_counter()
        return found

    def phases(self) -> Sequence[Callable[[], object]]:
        """See `Task`. One for each model."""
        return [partial(self._forward, number) for number in range(len(self.models))]

    @torch.no_grad()
    def _forward(self, number: int) -> State:
        found: State = self.models[number](*self.states[number])
        return found

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """See `Task`. Compute, the link, or the disk: whichever takes longest.

        Of a table a step needs some rows: nothing that counts. Of experts it needs
        those that tokens go to, so what is kept had best be all else first.
        """
        room = replace(room, whole_bytes=room.whole_bytes - self._table_bytes)
        disk = room.read_bytes / rates.disk if rates.disk else 0.0
        experts = min(room.crossing_bytes, self._expert_bytes)
        others = room.crossing_bytes - experts
        crossing = self.link_share * (others + self._chosen * experts)
        return max(sum(seconds), crossing / rates.h2d, disk)
