"""What keeps saved tensors under a budget, assembled, and what it tells of itself."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from stagehand.activations.carrier import Carrier
from stagehand.activations.pool import SlabPool, slab_counts
from stagehand.activations.saving import Saving
from stagehand.activations.spill import Spill
from stagehand.core.arena import Arena
from stagehand.core.ledger import NO_LIMIT, SubAccount
from stagehand.core.telemetry import Counters
from stagehand.core.transfer import TransferEngine
from stagehand.errors import StagehandWarning
from stagehand.residency.shared import shared_device
from stagehand.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stagehand.activations.config import ActivationStagehandConfig
    from stagehand.activations.learning import Lesson
    from stagehand.activations.prefix import Prefix
    from stagehand.core.device import Device

__all__ = ["Parts", "report_of", "state_of"]

_SMALLEST_BYTES = 4096  # a copy of less costs more than it frees
_NAME = "saved tensors"


class Parts:
    """What a runtime is made of: one ledger and one pair of lanes with the weights."""

    def __init__(self, device: Device, config: ActivationStagehandConfig) -> None:
        self.device = device
        shared = self.shared = shared_device(device)
        pinned = NO_LIMIT
        if config.ram_budget is not None:
            pinned = parse_bytes(config.ram_budget, name="ram_budget")
        account = SubAccount(shared.name_for(_NAME), pinned, shared.ledger.pinned)
        self.arena = Arena("pinned memory", device.pinned, account, spare=1.25)
        self.engine = TransferEngine(device, Counters(), streams=shared.streams())
        classes = [int(size * MIB) for size in config.pinned_pool_classes_mb]
        counts = slab_counts(classes, config.slabs_per_class)
        self.pool = SlabPool(self.arena, classes, counts)
        self.carrier = Carrier(
            device, self.engine, self.pool, checks=config.debug_checksums
        )
        marks = config.watermarks()
        if config.budget is None or marks is not None:
            budget = NO_LIMIT if marks is None else marks.high_bytes
        else:
            budget = parse_bytes(config.budget, name="budget", of=device.free_bytes())
        self.spill = Spill(
            device,
            self.carrier,
            budget_bytes=budget,
            smallest_bytes=_SMALLEST_BYTES,
            marks=marks,
            inflight_d2h=config.max_inflight_d2h,
            inflight_h2d=config.max_inflight_h2d,
        )
        self.saving = Saving(self.spill, off=device.is_host)
        # Who forgets to close it shall not keep page-locked memory from others.
        self.abandon = weakref.finalize(self, self.spill.abandon)
        self.abandon.atexit = False
        if device.is_host:
            warnings.warn(
                "there is no accelerator to keep saved tensors off: all of them stay"
                " where they are",
                StagehandWarning,
                stacklevel=4,
            )


def state_of(spill: Spill) -> str:
    """Return how much is on the device, in a few words."""
    return (
        f"{format_bytes(spill.held_bytes)} of {format_bytes(spill.budget_bytes)} on the"
        f" device, {spill.tally.spilled_count} spilled"
    )


def report_of(parts: Parts) -> str:
    """Return what is done with forwards like the last one, and what it costs."""
    if parts.saving.off:
        return "saved tensors: all of them stay, as there is no accelerator"
    spill = parts.spill
    lesson = spill.lessons.latest
    if lesson is None or lesson.prefix is None:
        return "saved tensors: no forward has ended yet that saved some on the device"
    lines = [
        f"saved tensors: {lesson.count} storages, budget"
        f" {format_bytes(spill.budget_bytes)}",
        *_plan_lines(lesson, lesson.prefix),
    ]
    rates = spill.lessons.rates
    if rates is not None:
        lines.append(
            f"link: {format_bytes(rates.d2h)}/s to the host,"
            f" {format_bytes(rates.h2d)}/s from it"
        )
    return "\n".join(lines)


def _plan_lines(lesson: Lesson, prefix: Prefix) -> Iterator[str]:
    forecast = lesson.forecast
    if lesson.useless:
        yield "switched off: the peak of device memory is elsewhere"
    elif not prefix.count:
        yield f"all of it stays: {format_bytes(prefix.kept_bytes)}"
    else:
        yield (
            f"the first {prefix.count} leave: {format_bytes(prefix.nbytes)};"
            f" {format_bytes(prefix.kept_bytes)} stay"
        )
    if forecast is not None and not lesson.useless:
        yield (
            f"predicted: {forecast.overhead:.1%} longer than without a budget"
            f" ({forecast.forward_stall * 1e3:.3f} ms in forward,"
            f" {forecast.backward_stall * 1e3:.3f} ms in backward)"
        )
