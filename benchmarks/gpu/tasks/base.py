"""What a step is, whoever keeps the weights; and the least time that it can take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from benchmarks.gpu.blocks import State
    from benchmarks.gpu.rates import Rates
    from stagehand.activations.books import Tally
    from stagehand.activations.timing import StallClock

__all__ = ["Room", "Task", "nbytes_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much of a task's weights (or saved tensors) may be where."""

    whole_bytes: int
    """All of them."""
    budget_bytes: int
    """On the device."""
    ram_bytes: int | None = None
    """In host memory, where they come from disk."""
    saved_bytes: int = 0
    """Of what forward leaves for backward, what stays on the device."""
    spilled_bytes: int = 0
    """Of that, what leaves the device for the time between."""

    @property
    def crossing_bytes(self) -> int:
        """What has to cross the link each time that all are needed."""
        return max(0, self.whole_bytes - self.budget_bytes)

    @property
    def read_bytes(self) -> int:
        """What has to come from disk then."""
        if self.ram_bytes is None:
            return 0
        return max(0, self.crossing_bytes - self.ram_bytes)


class Task:
    """Some steps with one model, or with two in turns.

    Args:
        models: Resident, or at home to be streamed.
        states: The inputs of each, on the device.
    """

    trains = False
    copies_home = 1
    """How often the bytes of the weights are on the device in a resident run, and need
    not be where weights stream: with gradients and an optimizer's states, 4 times."""
    at_home = True
    """Whether weights begin on the host."""

    def __init__(self, models: list[nn.Module], states: Sequence[State]) -> None:
        self.models, self.states = models, states
        self.saving: AbstractContextManager[Any] = nullcontext()
        self.stalls: StallClock | None = None
        """Of what `saving` brings back, where somebody times it."""
        self.tally: Tally | None = None
        """Of what left the device and came back."""
        self.before_step: Callable[[], object] | None = None
        self.expected: list[torch.Tensor] | None = None
        """The outcome of weights that are not the resident ones."""
        self.came = 0.0
        """When the latest outcome's first part was on the host, by `perf_counter`: the
        outputs, or the loss, before what backward takes in a fixed order."""
        self.link_share = 1.0
        """How much of a weight's bytes crosses the link for it."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that are stepped."""
        return []

    def flying_bytes(self) -> int:
        """What is on the device for a while, on its way home."""
        return 0

    def begin(self) -> None:
        """Get ready: the models are where they belong by now."""

    def outcome(self) -> list[torch.Tensor]:
        """Return what has to be the same bits everywhere, on the host."""
        raise NotImplementedError

    def phases(self) -> Sequence[Callable[[], object]]:
        """The parts of a step, in order."""
        raise NotImplementedError

    def step(self) -> None:
        """Do all of them."""
        for phase in self.phases():
            phase()

    def bound(self, seconds: Sequence[float], room: Room, rates: Rates) -> float:
        """Return the least seconds of a step.

        Args:
            seconds: Of each phase of the resident run.
            room: What may be on the device.
            rates: Of the link, and of host memory.
        """
        raise NotImplementedError

    def streamed_weights(self) -> Iterable[torch.Tensor]:
        """What moves."""
        return [p for model in self.models for p in model.parameters()]


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
