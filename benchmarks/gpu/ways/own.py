"""This library, as its users call it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import stagehand
from benchmarks.disk import drop_cache
from benchmarks.gpu.shapes import SHAPES, Stack, skeleton
from benchmarks.gpu.tasks.making import DTYPE
from benchmarks.gpu.tasks.training import FineTuning
from benchmarks.gpu.ways.base import Way
from benchmarks.gpu.ways.files import write_checkpoint
from stagehand.optim import OffloadedAdamW
from stagehand.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.ways.base import Setting

__all__ = ["OWN"]

_LEARNING_RATE = 1e-4


def _by_layers(at: Setting) -> None:
    task = at.task
    for model in task.models:
        stagehand.layer(
            model,
            vram_budget=at.share(model),
            inference_mode=not task.trains,
            telemetry=True,
        )
        at.ends.callback(model._stagehand_layer_runtime.shutdown)


def _by_blocks(at: Setting) -> None:
    for model in at.task.models:
        budget, whole = at.share(model), _padded_bytes(model)
        config = stagehand.StagehandConfig(
            vram_high_watermark_mb=budget / MIB,
            vram_low_watermark_mb=0.9 * budget / MIB,
            pinned_pool_mb=2 * whole / MIB,
            pinned_slab_mb=whole / MIB,
            telemetry_enabled=True,
        )
        runtime = stagehand.StagehandRuntime(
            model, config, r"^blocks\.\d+$", inference_mode=not at.task.trains
        )
        at.ends.callback(runtime.shutdown)


def _padded_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() + 256 for p in model.parameters())


def _fine_tuning(at: Setting, *, overlap: bool) -> None:
    _by_layers(at)
    task = at.task
    assert isinstance(task, FineTuning)

    def make_optimizer() -> OffloadedAdamW:
        return OffloadedAdamW(
            task.trained,
            lr=_LEARNING_RATE,
            overlap=task.models[0] if overlap else None,
        )

    task.overlaps = overlap
    task.make_optimizer = make_optimizer  # type: ignore[method-assign]


def _saved(at: Setting) -> None:
    saving = stagehand.activations(at.room.budget_bytes)
    at.ends.callback(saving.close)
    at.task.saving = saving


def _from_disk(at: Setting) -> None:
    """Write a checkpoint, forget the model, and open it again from there."""
    files = write_checkpoint(at.task.models[0], at.folder)
    at.task.models.clear()
    model: nn.Module = stagehand.load(
        functools.partial(_skeleton, at.cell),
        at.folder,
        vram_budget=at.room.budget_bytes,
        ram_budget=at.room.ram_bytes,
        inference_mode=True,
        telemetry=True,
    )
    at.ends.callback(model._stagehand_layer_runtime.shutdown)
    at.task.models.append(model)
    at.task.before_step = lambda: _drop(files)


def _drop(files: Iterable[Path]) -> None:
    for file in files:
        drop_cache(file)


def _skeleton(cell: Cell) -> Stack:
    return skeleton(SHAPES[cell.shape], blocks=cell.blocks, divide=cell.divide).to(
        DTYPE
    )


OWN = {
    "stagehand": Way(
        kinds=frozenset({"inference", "lora", "pair"}), prepare=_by_layers
    ),
    "stagehand-blocks": Way(kinds=frozenset({"inference", "lora"}), prepare=_by_blocks),
    "stagehand-overlap": Way(
        kinds=frozenset({"full"}),
        prepare=functools.partial(_fine_tuning, overlap=True),
    ),
    "stagehand-serial": Way(
        kinds=frozenset({"full"}),
        prepare=functools.partial(_fine_tuning, overlap=False),
    ),
    "stagehand-activations": Way(kinds=frozenset({"activations"}), prepare=_saved),
    "stagehand-load": Way(kinds=frozenset({"disk"}), prepare=_from_disk),
}
"""How it is used, by a name."""
