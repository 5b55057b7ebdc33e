"""The run that everything is held against: all weights on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.clock import Steps, operator_seconds, time_phases
from benchmarks.gpu.outcomes import difference, repeatable
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
    steps: Steps
    operator: list[float]
    """Seconds in which the host queues one, before and after the steps."""
    peak_bytes: int
    moved_bytes: int
    """Of the weights that may stream, or of what a step saves for backward."""
    beside_bytes: int
    """The peak, of an outcome's too, without what is at home where weights stream,
    but on its way there."""
    saved_bytes: int
    """Of that, what forward leaves for backward."""


def run_resident(cell: Cell, card: Card) -> Resident:
    """Run a cell's steps with all on the device."""
    card.empty_cache()
    task = make(cell, card.place, resident=True)
    weights = nbytes_of(task.streamed_weights())
    task.begin()
    with repeatable():
        outcome = task.outcome()
        apart = difference(outcome, task.outcome())
    most = card.device.peak_allocated_bytes() or 0
    task.step()
    card.empty_cache()
    held = card.device.allocated_bytes() or 0
    first, *others = task.phases()
    first()
    saved = (card.device.allocated_bytes() or 0) - held if task.trains else 0
    for phase in others:
        phase()
    operator = [operator_seconds(card.device)]
    steps = time_phases(card.device, task.phases(), cell.steps)
    operator.append(operator_seconds(card.device))
    peak = card.device.peak_allocated_bytes() or 0
    return Resident(
        outcome=outcome,
        difference=apart,
        steps=steps,
        operator=operator,
        peak_bytes=peak,
        moved_bytes=weights if task.at_home else peak - held,
        beside_bytes=max(peak, most) - task.copies_home * weights + task.flying_bytes(),
        saved_bytes=saved,
    )
