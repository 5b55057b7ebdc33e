"""The run that everything is held against: all weights on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.clock import Spread, time_phases, time_steps
from benchmarks.gpu.outcomes import difference
from benchmarks.gpu.tasks.base import nbytes_of
from benchmarks.gpu.tasks.making import make

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.card import Card
    from benchmarks.gpu.cells import Cell

__all__ = ["Resident", "run_resident"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """What was found. Bytes are those of tensors on the device."""

    outcome: list[torch.Tensor]
    difference: float
    """Between two such outcomes: kernels may add in any order."""
    step: Spread
    phases: list[float]
    peak_bytes: int
    moved_bytes: int
    """Of the weights that may stream, or of what a step saves for backward."""
    beside_bytes: int
    """The peak without what is at home where weights stream, but on its way there."""


def run_resident(cell: Cell, card: Card) -> Resident:
    """Run a cell's steps with all on the device."""
    card.empty_cache()
    task = make(cell, card.place, resident=True)
    weights = nbytes_of(task.streamed_weights())
    task.begin()
    outcome = task.outcome()
    apart = difference(outcome, task.outcome())
    task.step()
    card.empty_cache()
    held = card.device.allocated_bytes() or 0
    step = time_steps(card.device, task.step, cell.steps)
    phases = time_phases(card.device, task.phases(), cell.steps)
    peak = card.device.peak_allocated_bytes() or 0
    return Resident(
        outcome=outcome,
        difference=apart,
        step=step,
        phases=phases,
        peak_bytes=peak,
        moved_bytes=weights if task.at_home else peak - held,
        beside_bytes=peak - task.copies_home * weights + task.flying_bytes(),
    )
