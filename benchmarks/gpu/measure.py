"""Measures one cell: resident first, then in less memory, held against each other."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.clock import Spread, time_each, time_steps
from benchmarks.gpu.link import copy_rate
from benchmarks.gpu.outcomes import difference, equal
from benchmarks.gpu.rates import Rates, read_rate
from benchmarks.gpu.resident import Resident, run_resident
from benchmarks.gpu.tasks.base import Room
from benchmarks.gpu.tasks.making import KINDS, make
from benchmarks.gpu.ways.base import Setting
from benchmarks.gpu.ways.every import WAYS
from stagehand.core.machine import free_host_bytes
from stagehand.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    import stagehand
    from benchmarks.gpu.card import Card, Copies
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.tasks.base import Task
    from stagehand.core.device import Device

__all__ = ["measure"]

_SLACK = 32  # this part of the cap is left for fragments and the driver's own
_ROUNDED = 16  # all weights are there with at most this part more
_CHECKED = 64 * MIB
_PINNED_TWICE = 2  # torch pins each tensor by itself, rounded up to a power of two


def measure(cell: Cell, card: Card, folder: Path | None = None) -> dict[str, Any]:
    """Return what was found, for the results.

    Args:
        cell: What is measured.
        card: Where; it can hold all weights once.
        folder: Where files are written for a while; None for the system's place.

    Raises:
        AssertionError: If this library's outcome is not the resident one, bit for bit.
    """
    found = run_resident(cell, card)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as files,
        ExitStack() as capped,
    ):
        rates = Rates.of(card, disk=_disk_rate(cell, found, Path(files)))
        card.empty_cache()
        cap = _cap(cell, card, found)
        capped.enter_context(card.capped(cap))
        setting = Setting(
            cell=cell,
            room=_room(cell, card, found, cap),
            task=make(cell, card.place, resident=False),
            place=card.place,
            folder=Path(files),
        )
        with setting.ends:
            line = _away(setting, card, found, rates)
            # What is left needs memory of its own: a profiler's buffers.
            capped.close()
            line |= _checked(setting, card, found)
        del setting
    line["h2d_rate_after"] = copy_rate(card.device, MIB if card.dry else _CHECKED)
    return {"kind": "cell", "cell": cell.line(), "cap_bytes": cap, **line}


def _cap(cell: Cell, card: Card, found: Resident) -> int | None:
    """A part stands for what holds that part of the weights, and all else."""
    if cell.cap is None or not cell.cap.endswith("%"):
        return None if cell.cap is None else parse_bytes(cell.cap, name="cap")
    weights = parse_bytes(cell.cap, name="cap", of=found.moved_bytes)
    need = weights + found.beside_bytes + card.used_bytes()
    return need * _SLACK // (_SLACK - 1) + _SLACK


def _room(cell: Cell, card: Card, found: Resident, cap: int | None) -> Room:
    whole = found.moved_bytes
    if cell.budget is not None:
        budget = parse_bytes(cell.budget, name="budget", of=whole)
    elif cap is not None:
        budget = cap - cap // _SLACK - card.used_bytes() - found.beside_bytes
        assert budget > 0, f"{cell.cap} do not hold what a step needs beside weights"
    else:
        budget = whole
    ram = None if cell.ram is None else parse_bytes(cell.ram, name="ram", of=whole)
    budget = min(budget, whole + whole // _ROUNDED)
    return Room(whole_bytes=whole, budget_bytes=budget, ram_bytes=ram)


def _disk_rate(cell: Cell, found: Resident, folder: Path) -> float | None:
    """What reading such files takes, of one that is deleted again."""
    if cell.kind != "disk":
        return None
    path = folder / "probe"
    with path.open("wb") as file:
        written = 0
        while written < min(found.moved_bytes, 32 * _CHECKED):
            written += file.write(bytes(min(_CHECKED, found.moved_bytes)))
    rate = read_rate(path)
    path.unlink()
    return rate


def _away(
    setting: Setting, card: Card, found: Resident, rates: Rates
) -> dict[str, Any]:
    """Run the steps with weights elsewhere, and say what they took."""
    cell, task, device = setting.cell, setting.task, card.device
    way = WAYS[cell.way]
    if not cell.ours and task.at_home:
        _check_host(setting)
    began = time.perf_counter()
    way.prepare(setting)
    task.begin()
    prepared = time.perf_counter() - began
    outcome = task.outcome()
    startup = time.perf_counter() - began
    _check(cell, found, outcome)
    same, apart = equal(outcome, found.outcome), difference(outcome, found.outcome)
    del outcome
    used = card.used_bytes()
    pinned = _pinned(task, device, began)
    for _ in range(cell.settling):
        task.step()
        device.synchronize()
    step = _time(setting, card)
    bound = task.bound(found.phases, setting.room, rates)
    return {
        "version": way.version,
        "step": asdict(step),
        "resident": asdict(found.step),
        "resident_phases": found.phases,
        "bound": bound,
        "over_bound": step.median / bound,
        "over_resident": step.median / found.step.median,
        "equal": same,
        "difference": apart,
        "resident_difference": found.difference,
        **_memory(setting, card, found, used),
        **_reported(task),
        "prepared": prepared,
        "startup": startup,
        "pinned": pinned,
        "rates": asdict(rates),
    }


def _checked(setting: Setting, card: Card, found: Resident) -> dict[str, Any]:
    """Count the copies of one more step, and see whether all is still exact."""
    cell, task = setting.cell, setting.task
    line: dict[str, Any] = _copied(card.copies(task.step))
    if not task.trains:
        last = task.outcome()
        _check(cell, found, last)
        line["equal_at_end"] = equal(last, found.outcome)
    return line


def _check_host(setting: Setting) -> None:
    """Leave out what would drive this machine out of memory."""
    need = _PINNED_TWICE * setting.room.whole_bytes
    free = free_host_bytes()
    if need > free:
        raise MemoryError(
            f"may page-lock {format_bytes(need)}, {format_bytes(free)} are free"
        )


def _time(setting: Setting, card: Card) -> Spread:
    task, steps = setting.task, setting.cell.steps
    if task.before_step is None:
        return time_steps(card.device, task.step, steps)
    return time_each(card.device, task.step, steps, task.before_step)


def _memory(setting: Setting, card: Card, found: Resident, used: int) -> dict[str, int]:
    allocated = card.device.peak_allocated_bytes() or 0
    return {
        "weight_bytes": setting.room.whole_bytes,
        "budget_bytes": setting.room.budget_bytes,
        "allocated_bytes": allocated,
        "reserved_bytes": torch.accelerator.max_memory_reserved(),
        "device_bytes": max(used, card.used_bytes(), allocated),
        "resident_peak_bytes": found.peak_bytes,
        "pinned_bytes": card.pinned_bytes(),
        "host_bytes": card.resident_bytes(),
    }


def _reports(task: Task) -> list[stagehand.Report]:
    """What this library says of itself."""
    runtimes = [getattr(m, "_stagehand_layer_runtime", None) for m in task.models]
    return [runtime.report() for runtime in runtimes if runtime is not None]


def _pinned(task: Task, device: Device, began: float) -> float | None:
    """Run steps until no weight is being pinned; return when that was, if any was."""
    after = None
    while any(report.pinning_bytes for report in _reports(task)):
        task.step()
        device.synchronize()
        after = time.perf_counter() - began
    return after


def _reported(task: Task) -> dict[str, float | None]:
    """How long compute waited for weights."""
    stalls = [report.stall_ms for report in _reports(task)]
    known = [stall for stall in stalls if stall is not None]
    return {"stall_ms": sum(known) if known else None}


def _copied(copies: Copies) -> dict[str, int]:
    return {
        "h2d_copies": copies.h2d,
        "d2h_copies": copies.d2h,
        "h2d_bytes": copies.h2d_bytes,
        "d2h_bytes": copies.d2h_bytes,
    }


def _check(cell: Cell, found: Resident, outcome: list[torch.Tensor]) -> None:
    """Hold this library to its word. Gradients may differ where resident ones do."""
    if not cell.ours:
        return
    first = 1 if KINDS[cell.kind].trains and found.difference else None
    same = equal(outcome[:first], found.outcome[:first])
    assert same, f"{cell.name}: off by {difference(outcome, found.outcome)}"
