"""This library, as its users call it."""

from __future__ import annotations

import functools
from copy import deepcopy
from typing import TYPE_CHECKING

import torch

import stagehand
from benchmarks.disk import drop_cache
from benchmarks.gpu.blocks.text import Experts
from benchmarks.gpu.cells import LEAST
from benchmarks.gpu.outcomes import repeatable
from benchmarks.gpu.shapes import SHAPES, skeleton
from benchmarks.gpu.tasks.base import nbytes_of
from benchmarks.gpu.tasks.making import DTYPE, KINDS, trained
from benchmarks.gpu.tasks.training import Checkpointed, FineTuning
from benchmarks.gpu.ways.base import Way
from benchmarks.gpu.ways.files import write_checkpoint
from stagehand.activations.timing import StallClock
from stagehand.optim import OffloadedAdamW
from stagehand.stores.converting import convert_to_squareq
from stagehand.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.ways.base import Setting
    from stagehand.wires import Transport

__all__ = ["OWN"]

_LEARNING_RATE = 1e-4


def _by_layers(at: Setting, *, transport: Transport = "plain") -> None:
    """Models in turns share all of the budget."""
    for model in at.task.models:
        stream = functools.partial(
            stagehand.layer,
            model,
            inference_mode=not at.task.trains,
            telemetry=True,
            experts={Experts: _chosen},
            transport=transport,
        )
        try:
            stream(vram_budget=max(1, at.room.budget_bytes))
        except stagehand.StagehandOOMError as error:
            if at.cell.budget != LEAST:
                raise
            stream(vram_budget=error.needed_bytes)
        at.ends.callback(model._stagehand_layer_runtime.shutdown)


def _chosen(_: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return chosen


def _reserved(at: Setting) -> None:
    """The first of two models stays; the other one is its guest."""
    _by_layers(at)
    at.task.models[0]._stagehand_layer_runtime.reserve_for_resident()


def _alone(at: Setting) -> None:
    """The first of two models is just there; the other streams in what that leaves."""
    resident, guest = at.task.models
    resident.to(at.place)
    left = at.room.budget_bytes - nbytes_of(resident.parameters())
    stagehand.layer(guest, vram_budget=left, inference_mode=True, telemetry=True)
    at.ends.callback(guest._stagehand_layer_runtime.shutdown)


def _spilling(at: Setting) -> None:
    """Weights stream, and most of what checkpoints keep leaves as well."""
    _by_layers(at)
    _spill(at, at.room.saved_bytes)


def _spill(at: Setting, budget_bytes: int) -> None:
    saving = stagehand.activations(budget_bytes)
    at.ends.callback(saving.close)
    parts = saving._parts
    at.task.stalls = parts.carrier.stalls = StallClock(parts.device)
    at.task.tally = parts.spill.tally
    at.task.saving = saving


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
    _spill(at, at.room.budget_bytes)


def _from_disk(at: Setting) -> None:
    """Write a checkpoint, forget the model, and open it again from there."""
    files = write_checkpoint(at.task.models[0], at.folder)
    _open(at, at.folder)
    at.task.before_step = lambda: _drop(files)


def _open(at: Setting, folder: Path) -> nn.Module:
    at.task.models.clear()
    model: nn.Module = stagehand.load(
        functools.partial(_skeleton, at.cell),
        folder,
        vram_budget=at.room.budget_bytes,
        ram_budget=at.room.ram_bytes,
        scratch_dir=at.folder,
        inference_mode=not at.task.trains,
        telemetry=True,
    )
    at.ends.callback(model._stagehand_layer_runtime.shutdown)
    at.task.models.append(model)
    return model


def _quantized(at: Setting) -> None:
    """INT8 crosses the link. Expected is what its weights give, block by block."""
    task, small = at.task, at.folder / "int8"
    files = write_checkpoint(task.models[0], at.folder)
    convert_to_squareq(at.folder, small)
    for file in files:
        file.unlink()
    model = _open(at, small)
    blocks = model._stagehand_layer_runtime._parts.streamed
    whole = sum(block.nbytes for block in blocks)
    task.link_share = sum(block.link_nbytes for block in blocks) / whole
    (state,) = task.states
    with torch.no_grad(), repeatable():
        for block in model.blocks:  # type: ignore[union-attr]
            state = deepcopy(block).to(at.place)(*state)
    task.expected = [out.cpu() for out in state]


def _drop(files: Iterable[Path]) -> None:
    for file in files:
        drop_cache(file)


def _skeleton(cell: Cell) -> nn.Module:
    stack = skeleton(SHAPES[cell.shape], blocks=cell.blocks, divide=cell.divide)
    stack = trained(stack.to(DTYPE).requires_grad_(False), cell)
    return Checkpointed(stack) if KINDS[cell.kind].trains else stack


OWN = {
    "stagehand": Way(
        kinds=frozenset({"inference", "lora", "pair"}), prepare=_by_layers
    ),
    "stagehand-packed": Way(
        kinds=frozenset({"inference"}),
        prepare=functools.partial(_by_layers, transport="packed"),
    ),
    "stagehand-reserved": Way(kinds=frozenset({"pair"}), prepare=_reserved),
    # Only where a cell names it: the first model has to fit.
    "stagehand-alone": Way(kinds=frozenset(), prepare=_alone),
    "stagehand-spilling": Way(
        kinds=frozenset({"lora"}), prepare=_spilling, spills=True
    ),
    "stagehand-int8": Way(kinds=frozenset({"int8"}), prepare=_quantized),
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
