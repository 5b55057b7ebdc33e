"""What users hold: contexts inside which saved tensors are kept under a budget."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagehand.activations.advice import BlockWatch
from stagehand.activations.carrier import Carrier
from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.pool import SlabPool, slab_counts
from stagehand.activations.recompute import contexts_for
from stagehand.activations.record import ActivationStep
from stagehand.activations.saving import Saving
from stagehand.activations.spill import Spill
from stagehand.activations.timing import StallClock
from stagehand.core.arena import Arena
from stagehand.core.clock import Phase, PhaseClock
from stagehand.core.device import find_device
from stagehand.core.ledger import SubAccount
from stagehand.core.telemetry import Counters, LineFile
from stagehand.core.transfer import TransferEngine
from stagehand.errors import ClosedError, StagehandWarning
from stagehand.residency.shared import shared_device
from stagehand.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    import torch
    from torch import nn

    from stagehand.activations.learning import Lesson
    from stagehand.core.device import Device
    from stagehand.core.ledger import Account
    from stagehand.core.limits import Bounds

__all__ = ["ActivationRuntime", "Activations"]

_SMALLEST_BYTES = 4096  # a copy of less costs more than it frees
_NO_LIMIT = 1 << 62
_WINDOW = 100
_NAME = "saved tensors"


class _Parts:
    """What a runtime is made of: one ledger and one pair of lanes with the weights."""

    def __init__(self, device: Device, config: ActivationStagehandConfig) -> None:
        self.device = device
        shared = self.shared = shared_device(device)
        pinned = _NO_LIMIT
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
            budget = _NO_LIMIT if marks is None else marks.high_bytes
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


class Activations:
    """Keeps what autograd saves inside it under a budget; one object for all steps.

    Enter it around the forward pass, or around forward and backward; outside of any
    checkpointed region. It can be entered again while graphs of earlier entries live.

    Args:
        budget: Device bytes of saved tensors: an int, "2GB", or "20%" of what is free.
        ram_budget: Page-locked host bytes for what leaves; None for no limit of its
            own. Beyond it, pageable memory is used, with a warning.
        device: Where the model computes: the accelerator by default. On the host there
            is nowhere to spill to: everything stays, with a warning.

    Raises:
        ConfigError: If a budget is not a size.

    Example:
        >>> saved = stagehand.activations(budget="2GB")
        >>> with saved:
        ...     loss = model(batch).sum()
        >>> loss.backward()
    """

    def __init__(
        self,
        budget: int | str,
        *,
        ram_budget: int | str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        config = ActivationStagehandConfig(budget=budget, ram_budget=ram_budget)
        self._parts = _Parts(find_device(device), config)

    def __repr__(self) -> str:
        return f"Activations({_state(self._parts.spill)})"

    def __enter__(self) -> None:
        """Begin a forward."""
        self._parts.saving.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it; what was saved stays under the budget."""
        self._parts.saving.leave(failed=kind is not None)
        self._parts.pool.grow()

    def paused(self) -> Any:
        """Return a context in which autograd saves as usual.

        For what refuses hooks for saved tensors, as `torch.func.grad` does.
        """
        return self._parts.saving.paused()

    def report(self) -> str:
        """Return what is done with forwards like the last one, and what it costs."""
        return _report(self._parts.spill)

    def close(self) -> None:
        """Give back the page-locked memory of graphs that are gone. Idempotent."""
        self._parts.spill.close()


class ActivationRuntime:
    """Keeps saved tensors off the device, step by step, with a record of each.

    It works alone, inside of a runtime for weights, and under a conductor. Threads may
    run forwards in it at the same time; steps belong to one of them.

    Args:
        config: Settings; the defaults if left out.
        device: Where the model computes: the accelerator by default.

    Raises:
        ConfigError: If a budget is not a size.

    Example:
        >>> runtime = ActivationRuntime(ActivationStagehandConfig(budget="4GB"))
        >>> runtime.step_begin(0)
        >>> with runtime.managed_forward():
        ...     loss = model(batch).sum()
        >>> loss.backward()
        >>> runtime.step_end().activations_spilled
    """

    kind = "activation_stagehand"
    window = 0

    def __init__(
        self,
        config: ActivationStagehandConfig | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.config = config or ActivationStagehandConfig()
        self.clock = PhaseClock()
        self._closed = False
        self._parts: _Parts | None = None
        self._file: LineFile | None = None
        self._records: deque[ActivationStep] = deque(maxlen=_WINDOW)
        if not self.config.enabled:
            return
        self._parts = _Parts(find_device(device), self.config)
        if self.config.telemetry_enabled:
            self._parts.carrier.stalls = StallClock(self._parts.device)
            if self.config.telemetry_file is not None:
                self._file = LineFile(Path(self.config.telemetry_file))

    def __repr__(self) -> str:
        if self._parts is None:
            return "ActivationRuntime(disabled)"
        return f"ActivationRuntime({_state(self._parts.spill)})"

    # Steps

    def step_begin(self, step: int | None = None) -> None:
        """Open a step; one that is still open is ended first.

        Graphs of earlier steps may live on: nothing of theirs is dropped.

        Args:
            step: Its number; the next one if left out.

        Raises:
            ClosedError: After `shutdown()`.
        """
        parts = self._open_parts()
        if parts is None:
            return
        if self.clock.phase is not Phase.STEP_END:
            self.step_end()
        self.clock.begin_step(step)
        parts.spill.peak_bytes = 0

    @contextmanager
    def managed_forward(self) -> Iterator[None]:
        """Keep what autograd saves inside under the budget.

        Inside of a checkpointed region nothing is done, with a warning; around one, the
        inputs of the region are what is saved.

        Raises:
            ClosedError: After `shutdown()`.
        """
        parts = self._open_parts()
        if parts is None:
            yield
            return
        if self.clock.phase is Phase.STEP_END:
            self.clock.begin_step()
        if self.clock.phase is not Phase.OPTIMIZER:
            self.clock.enter(Phase.FORWARD)
        parts.saving.enter()
        failed = True
        try:
            yield
            failed = False
        finally:
            parts.saving.leave(failed=failed)

    def paused(self) -> Any:
        """Return a context in which autograd saves as usual.

        For what refuses hooks for saved tensors, as `torch.func.grad` does.

        Raises:
            ClosedError: After `shutdown()`.
        """
        parts = self._open_parts()
        return nullcontext() if parts is None else parts.saving.paused()

    def step_end(self) -> ActivationStep | None:
        """Close the step and return its record; None without telemetry.

        Raises:
            ClosedError: After `shutdown()`.
        """
        parts = self._open_parts()
        if parts is None:
            return None
        self.clock.end_step()
        record = self._record(parts)
        parts.spill.tally.reset()
        parts.pool.hits = parts.pool.misses = parts.pool.pageable = 0
        parts.pool.grow()
        if not self.config.telemetry_enabled:
            return None
        self._records.append(record)
        if self._file is not None:
            self._file.write(record.to_json())
        return record

    def _record(self, parts: _Parts) -> ActivationStep:
        tally, pool, stalls = parts.spill.tally, parts.pool, parts.carrier.stalls
        count, stalled = (None, None) if stalls is None else stalls.take()
        return ActivationStep(
            step=self.clock.step,
            activations_saved=tally.saved_count,
            activations_kept=max(0, tally.saved_count - tally.spilled_count),
            activations_spilled=tally.spilled_count,
            activations_restored=tally.restored_count,
            spill_bytes=tally.spilled_bytes,
            freed_bytes=tally.freed_bytes,
            restore_bytes=tally.restored_bytes,
            stall_time_ms=stalled,
            stall_count=count,
            demand_count=tally.demanded_count,
            pool_hits=pool.hits,
            pool_misses=pool.misses,
            pageable_count=pool.pageable,
            saved_peak_bytes=parts.spill.peak_bytes,
            budget_bytes=parts.spill.budget_bytes,
            vram_peak_bytes=parts.device.peak_allocated_bytes(),
        )

    @property
    def records(self) -> tuple[ActivationStep, ...]:
        """The last hundred steps, oldest first."""
        return tuple(self._records)

    def report(self) -> str:
        """Return what is done with forwards like the last one, and what it costs."""
        if self._parts is None:
            return "saved tensors: disabled"
        return _report(self._parts.spill)

    # Checkpoints

    @property
    def checkpoint_contexts(self) -> Callable[[], Any]:
        """For `torch.utils.checkpoint.checkpoint(..., context_fn=...)`.

        Of what the region computes, tensors of `recompute_threshold_bytes` and more are
        kept under the budget, or leave; the others are computed again in backward.
        """
        parts = self._open_parts()
        threshold = self.config.recompute_threshold_bytes
        spill = None if parts is None or parts.saving.off else parts.spill
        return contexts_for(spill, threshold)

    def watch_blocks(self, blocks: Iterable[tuple[str, nn.Module]]) -> BlockWatch:
        """Return a context in which one step measures blocks, for advice.

        Args:
            blocks: By name, in the order in which they run.

        Raises:
            ClosedError: After `shutdown()`, or if the runtime is disabled.

        Example:
            >>> with runtime.watch_blocks(model.blocks.named_children()) as watch:
            ...     train_step()
            >>> print(watch.advise(4_000_000_000))
        """
        parts = self._need_parts()
        return BlockWatch(parts.saving, parts.device, blocks)

    # With a conductor

    @property
    def bounds(self) -> Bounds:
        """Limits on it: post them here."""
        return self._need_parts().spill.bounds

    @property
    def engine(self) -> TransferEngine:
        """The lanes that it copies on."""
        return self._need_parts().engine

    @property
    def is_open(self) -> bool:
        """Whether it was not shut down."""
        return not self._closed

    @property
    def device_account(self) -> Account | None:
        """None: saved tensors are autograd's, not the library's."""
        return None

    def link_need(self) -> None:
        """Return None: what it asks of the link can wait for the weights."""

    def snapshot(self) -> dict[str, Any]:
        """Return a few numbers for a conductor's record."""
        if self._parts is None:
            return {}
        spill, arena = self._parts.spill, self._parts.arena
        return {
            "held_bytes": spill.held_bytes,
            "budget_bytes": spill.budget_bytes,
            "pinned_bytes": arena.account.held_bytes,
            "max_d2h": spill.bounds.current.inflight_d2h,
            "max_h2d": spill.bounds.current.inflight_h2d,
        }

    # The end

    def shutdown(self) -> None:
        """Give back the page-locked memory of graphs that are gone. Idempotent.

        Graphs that are alive can still go backward.
        """
        self._closed = True
        if self._parts is not None:
            self._parts.spill.close()
            self._parts.abandon()
        if self._file is not None:
            self._file.close()

    def _open_parts(self) -> _Parts | None:
        if self._closed:
            raise ClosedError(
                "this ActivationRuntime was shut down; make a new one to go on"
            )
        return self._parts

    def _need_parts(self) -> _Parts:
        parts = self._open_parts()
        if parts is None:
            raise ClosedError("this ActivationRuntime is disabled; it has no parts")
        return parts


def _state(spill: Spill) -> str:
    return (
        f"{format_bytes(spill.held_bytes)} of {format_bytes(spill.budget_bytes)} on the"
        f" device, {spill.tally.spilled_count} spilled"
    )


def _report(spill: Spill) -> str:
    lesson = spill.lessons.latest
    if lesson is None or lesson.prefix is None:
        return "saved tensors: no forward has ended yet"
    lines = [
        f"saved tensors: {lesson.count} storages, budget"
        f" {format_bytes(spill.budget_bytes)}",
        *_plan_lines(lesson),
    ]
    rates = spill.lessons.rates
    if rates is not None:
        lines.append(
            f"link: {format_bytes(rates.d2h)}/s to the host,"
            f" {format_bytes(rates.h2d)}/s from it"
        )
    return "\n".join(lines)


def _plan_lines(lesson: Lesson) -> Iterator[str]:
    prefix, forecast = lesson.prefix, lesson.forecast
    if prefix is None:
        return
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
