"""Measures one cell: resident first, then in less memory, held against each other."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.cells import LEAST
from benchmarks.gpu.clock import Steps, operator_seconds, time_each, time_phases
from benchmarks.gpu.link import copy_rate, disk_rates
from benchmarks.gpu.outcomes import difference, equal, repeatable
from benchmarks.gpu.rates import Rates, copied_bytes
from benchmarks.gpu.resident import Resident, run_resident
from benchmarks.gpu.stages import Stages
from benchmarks.gpu.tasks.base import Room, nbytes_of
from benchmarks.gpu.tasks.making import KINDS, make
from benchmarks.gpu.tasks.training import FineTuning, stepped
from benchmarks.gpu.ways.base import LeftOutError, Pins, Setting
from benchmarks.gpu.ways.every import WAYS
from stagehand.core.machine import free_host_bytes
from stagehand.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.card import Card, Copies
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.tasks.base import Task
    from stagehand.activations.books import Tally
    from stagehand.core.device import Device
    from stagehand.runtime import Runtime

__all__ = ["measure"]

_WARM_UP = 3  # steps, for those that learn nothing
_WATCHED = 4  # steps, to see where compute waits
_SLACK = 32  # this part of the cap is left for fragments and the driver's own
_ROUNDED = 16  # all weights are there with at most this part more
_PROBED = 2048 * MIB
_KEPT = 4  # this part of what is saved stays on the device, where most of it leaves


def measure(
    cell: Cell, card: Card, folder: Path | None = None, stages: Stages | None = None
) -> dict[str, Any]:
    """Return what was found, for the results.

    Args:
        cell: What is measured.
        card: Where; it can hold all weights once.
        folder: Where files are written for a while; None for the system's place.
        stages: Told what is done now.

    Raises:
        AssertionError: If this library's outcome is not the resident one, bit for bit.
        LeftOutError: If another library cannot do it, as it says itself.
    """
    stages = stages or Stages()
    stages.begin("resident")
    found = run_resident(cell, card)
    stages.begin("building")
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="bench-") as files,
        ExitStack() as capped,
    ):
        rates = Rates.of(card, disk=_disk_rate(cell, found, Path(files)))
        card.empty_cache()
        cap = _cap(cell, card, found)
        setting = Setting(
            cell=cell,
            room=_room(cell, card, found, cap),
            task=make(cell, card.place, resident=False),
            place=card.place,
            folder=Path(files),
        )
        card.empty_cache()  # of what blocks were made with: that may be above the cap
        capped.enter_context(card.capped(cap))
        first = _kept(setting)
        with setting.ends:
            line = _away(setting, card, found, rates, first, stages)
            # What is left needs memory of its own: a profiler's buffers.
            capped.close()
            line |= _checked(setting, card, found, first, stages)
        del setting
    line["h2d_rate_after"] = copy_rate(card.device, copied_bytes(card))
    stages.begin("end")
    line["took"] = stages.seconds
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
    spilled = 0
    if WAYS[cell.way].spills:
        spilled = found.saved_bytes - found.saved_bytes // _KEPT
    if cell.budget == LEAST:
        budget = 0
    elif cell.budget is not None:
        budget = parse_bytes(cell.budget, name="budget", of=whole)
    elif cap is not None:
        budget = cap - cap // _SLACK - card.used_bytes() - found.beside_bytes + spilled
        assert budget > 0, f"{cell.cap} do not hold what a step needs beside weights"
    else:
        budget = whole
    ram = None if cell.ram is None else parse_bytes(cell.ram, name="ram", of=whole)
    return Room(
        whole_bytes=whole,
        budget_bytes=min(budget, whole + whole // _ROUNDED),
        ram_bytes=ram,
        saved_bytes=found.saved_bytes - spilled,
        spilled_bytes=spilled,
    )


def _disk_rate(cell: Cell, found: Resident, folder: Path) -> float | None:
    """What reading such files takes, of one that is deleted again."""
    if cell.ram is None:
        return None
    path = folder / "probe"
    with path.open("wb") as file:
        piece = os.urandom(min(32 * MIB, found.moved_bytes))
        while file.tell() < min(found.moved_bytes, _PROBED):
            file.write(piece)
    rates = disk_rates(path)
    path.unlink()
    return max(rates.values())


def _kept(setting: Setting) -> list[torch.Tensor]:
    """Copy the weights that this library's steps change."""
    if not setting.cell.ours:
        return []
    return [p.detach().to("cpu", copy=True) for p in setting.task.trained]


def _away(
    setting: Setting,
    card: Card,
    found: Resident,
    rates: Rates,
    first: list[torch.Tensor],
    stages: Stages,
) -> dict[str, Any]:
    """Run the steps with weights elsewhere, and say what they took."""
    cell, task, device = setting.cell, setting.task, card.device
    way = WAYS[cell.way]
    if not cell.ours and task.at_home:
        _check_host(setting)
    way.load()
    stages.begin("first outcome")
    began = time.perf_counter()
    way.prepare(setting)
    _watch(task, on=False)
    task.begin()
    prepared = time.perf_counter() - began
    with repeatable():
        outcome = task.outcome()
    first_output = task.came - began
    expected = task.expected or found.outcome
    _check(cell, found, outcome, expected)
    same, apart = equal(outcome, expected), difference(outcome, expected)
    same_step = _check_step(setting, found, first, outcome)
    del outcome, expected
    stages.begin("settling")
    pinned = _pinned(task, device, began)
    for _ in range(cell.settling if cell.ours else min(cell.settling, _WARM_UP)):
        task.step()
        device.synchronize()
    if task.tally is not None:
        task.tally.reset()
    stages.begin("timing")
    operator = [operator_seconds(device)]
    calls = card.allocator_calls()
    steps = _time(setting, card)
    calls = card.allocator_calls() - calls
    operator.append(operator_seconds(device))
    stages.begin("watching")
    stall_ms = _stall_ms(task, lambda: _time(setting, card, _WATCHED))
    bound = task.bound(found.steps.phases, setting.room, rates)
    return {
        "version": way.version,
        "step": asdict(steps.whole),
        "timed_steps": steps.count,
        "phases": steps.phases,
        "host_seconds": steps.host,
        "resident_host_seconds": found.steps.host,
        "operator_seconds": operator,
        "resident_operator_seconds": found.operator,
        "allocator_calls": calls / steps.count,
        "resident": asdict(found.steps.whole),
        "resident_phases": found.steps.phases,
        "bound": bound,
        "over_bound": steps.whole.median / bound,
        "over_resident": steps.whole.median / found.steps.whole.median,
        "equal": same,
        "difference": apart,
        "equal_stepped": same_step,
        "resident_difference": found.difference,
        **_memory(setting, card, found),
        "host_bytes": card.resident_bytes() - nbytes_of([*first, *found.outcome]),
        "stall_ms": stall_ms,
        "planned_h2d_bytes": _planned_bytes(task),
        "freed_share": _freed_share(task.tally),
        "prepared": prepared,
        "first_output": first_output,
        "pinned": pinned,
        "rates": asdict(rates),
    }


def _checked(
    setting: Setting,
    card: Card,
    found: Resident,
    first: list[torch.Tensor],
    stages: Stages,
) -> dict[str, Any]:
    """Count the copies of one more step, and see whether all is still exact.

    Of weights that were trained, when they are again what they were at first.
    """
    cell, task = setting.cell, setting.task
    stages.begin("counting")
    line = _copied(card.copies(task.step))
    stages.begin("last outcome")
    if not task.trains or first:
        with torch.no_grad():
            for weight, value in zip(task.trained, first, strict=True):
                weight.copy_(value)
        with repeatable():
            last = task.outcome()
        expected = task.expected or found.outcome
        _check(cell, found, last, expected)
        line["equal_at_end"] = equal(last, expected)
    return line


def _check_host(setting: Setting) -> None:
    """Leave out what would drive this machine out of memory."""
    pins = WAYS[setting.cell.way].pins
    if pins is Pins.NOTHING:
        return
    weights = [w.numel() * w.element_size() for w in setting.task.streamed_weights()]
    need = sum(1 << (nbytes - 1).bit_length() for nbytes in weights)
    if pins is Pins.IN_PLACE:
        need -= sum(weights)
    free = free_host_bytes()
    if need > free:
        raise LeftOutError(
            f"page-locks {format_bytes(need)} more, {format_bytes(free)} are free"
        )


def _time(setting: Setting, card: Card, most: int | None = None) -> Steps:
    """Time the cell's steps, or so many at most, without what times the library."""
    task, steps = setting.task, setting.cell.steps
    steps = steps if most is None else min(steps, most)
    if task.before_step is None:
        return time_phases(card.device, task.phases(), steps)
    return time_each(card.device, task.phases(), steps, task.before_step)


def _memory(setting: Setting, card: Card, found: Resident) -> dict[str, int]:
    allocated = card.device.peak_allocated_bytes() or 0
    return {
        "weight_bytes": setting.room.whole_bytes,
        "budget_bytes": setting.room.budget_bytes,
        "allocated_bytes": allocated,
        "reserved_bytes": torch.accelerator.max_memory_reserved(),
        "device_bytes": card.most_used_bytes(),
        "resident_peak_bytes": found.peak_bytes,
        "pinned_bytes": card.pinned_bytes(),
    }


def _runtimes(task: Task) -> list[Runtime]:
    """This library's, where it streams a model."""
    found = [getattr(m, "_stagehand_layer_runtime", None) for m in task.models]
    return [runtime for runtime in found if runtime is not None]


def _planned_bytes(task: Task) -> int | None:
    """What plans let cross to the device in a step; None if nobody plans.

    Beside that come rows of tables, what was spilled, and what gave way to another
    model.
    """
    plans = [runtime._parts.steering.plan for runtime in _runtimes(task)]
    return sum(plan.streamed_bytes for plan in plans) if plans else None


def _pinned(task: Task, device: Device, began: float) -> float | None:
    """Run steps until no weight is being pinned; return when that was, if any was."""
    after = None
    while any(runtime.report().pinning_bytes for runtime in _runtimes(task)):
        task.step()
        device.synchronize()
        after = time.perf_counter() - began
    return after


def _stall_ms(task: Task, run: Callable[[], Steps]) -> float | None:
    """Run steps that are timed from inside; return how long compute waits in one.

    None if nobody times it. That costs the host some time, for each use and each copy:
    so these are no steps whose own time counts.
    """
    runtimes, saved = _runtimes(task), task.stalls
    if not runtimes and saved is None:
        return None
    before = sum(map(_waited_ms, runtimes))
    if saved is not None:
        saved.take()
    _watch(task, on=True)
    steps = run()
    _watch(task, on=False)
    waited = sum(map(_waited_ms, runtimes)) - before
    if saved is not None:
        waited += saved.take()[1]
    return waited / steps.count


def _freed_share(tally: Tally | None) -> float | None:
    """Of the bytes that left, those whose memory was let go; None if none left."""
    if tally is None or not tally.spilled_bytes:
        return None
    return tally.freed_bytes / tally.spilled_bytes


def _watch(task: Task, *, on: bool) -> None:
    """Let this library time each use and each copy, or not."""
    for runtime in _runtimes(task):
        runtime._measure.timed = on


def _waited_ms(runtime: Runtime) -> float:
    """How long compute has waited for weights."""
    runtime.end_step()  # counts what is over by now
    return runtime.telemetry.totals()["stall_time_ms"] or 0.0


def _copied(copies: Copies | None) -> dict[str, Any]:
    names = ("h2d_copies", "d2h_copies", "h2d_bytes", "d2h_bytes")
    if copies is None:
        return dict.fromkeys(names)
    return dict(zip(names, astuple(copies), strict=True))


def _check_step(
    setting: Setting,
    found: Resident,
    first: list[torch.Tensor],
    outcome: list[torch.Tensor],
) -> bool | None:
    """Hold this library's first step of all weights to PyTorch's, gradients given."""
    task = setting.task
    if not isinstance(task, FineTuning) or not first or found.difference:
        return None
    if not task.overlaps:  # else it was made beside backward
        with repeatable():
            task.step()
    same = all(
        equal([now.detach().cpu()], [stepped(weight, gradient, now.device)])
        for now, weight, gradient in zip(task.trained, first, outcome[1:], strict=True)
    )
    assert same, f"{setting.cell.name}: a step's weights are not those of AdamW"
    return same


def _check(
    cell: Cell,
    found: Resident,
    outcome: list[torch.Tensor],
    expected: list[torch.Tensor],
) -> None:
    """Hold this library to its word. Gradients may differ where resident ones do."""
    if not cell.ours:
        return
    first = 1 if KINDS[cell.kind].trains and found.difference else None
    same = equal(outcome[:first], expected[:first])
    assert same, f"{cell.name}: off by {difference(outcome, expected)}"
