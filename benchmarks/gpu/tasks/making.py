"""Makes the task of a cell: its models with their values, and its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.shapes import SHAPES, build, inputs
from benchmarks.gpu.tasks.inference import Inference
from benchmarks.gpu.tasks.training import FineTuning, Lora, Saved, adapt

if TYPE_CHECKING:
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.shapes import Stack
    from benchmarks.gpu.tasks.base import Task

__all__ = ["DTYPE", "KINDS", "make", "trained"]

DTYPE = torch.bfloat16
_RANK = 32
_HOST = torch.device("cpu")

KINDS: dict[str, type[Task]] = {
    "inference": Inference,
    "lora": Lora,
    "full": FineTuning,
    "activations": Saved,
    "disk": Inference,
    "int8": Inference,
    "pair": Inference,
}
"""What is done, by the name of it."""


def make(cell: Cell, place: torch.device, *, resident: bool) -> Task:
    """Return what a cell does, with the same values at every call.

    Args:
        cell: Which.
        place: The accelerator, where values are made and inputs lie.
        resident: Whether all weights stay there.
    """
    kind = KINDS[cell.kind]
    home = None if resident or not kind.at_home else _HOST
    names = cell.shape.split("+")
    models = [_stack(cell, name, place, home) for name in names]
    states = [
        inputs(SHAPES[name], device=place, dtype=DTYPE, divide=cell.divide)
        for name in names
    ]
    return kind(list(models), states)


def _stack(
    cell: Cell, name: str, place: torch.device, home: torch.device | None
) -> Stack:
    stack = build(
        SHAPES[name],
        device=place,
        dtype=DTYPE,
        home=home,
        blocks=cell.blocks,
        divide=cell.divide,
    )
    return trained(stack, cell)


def trained(stack: Stack, cell: Cell) -> Stack:
    """Let a stack have what a cell trains."""
    if cell.kind == "full":
        stack.requires_grad_(True)
    if cell.kind in ("lora", "activations"):
        generator = torch.Generator().manual_seed(2)
        adapt(stack, max(1, _RANK // cell.divide), generator)
    return stack
