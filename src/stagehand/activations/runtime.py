"""Keeps saved tensors under a budget step by step, with a record of each."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagehand.activations.advice import BlockWatch
from stagehand.activations.config import ActivationStagehandConfig
from stagehand.activations.parts import Parts, report_of, state_of
from stagehand.activations.recompute import contexts_for
from stagehand.activations.record import ActivationStep
from stagehand.activations.timing import StallClock
from stagehand.core.clock import Phase, PhaseClock
from stagehand.core.device import find_device
from stagehand.core.telemetry import LineFile
from stagehand.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch
    from torch import nn

    from stagehand.core.ledger import Account
    from stagehand.core.limits import Bounds
    from stagehand.core.transfer import TransferEngine

__all__ = ["ActivationRuntime"]

_WINDOW = 100


class ActivationRuntime:
    """Keeps saved tensors off the device, step by step, with a record of each.

    It works alone, inside of a runtime for weights, and under a conductor. Threads may
    run forwards in it at the same time; steps belong to one of them.

    Args:
        config: Settings; the defaults if left out.
        device: Where the model computes: the accelerator by default.

    Raises:
        ConfigError: If a budget is not a size, or the settings are of another type.

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
        config = ActivationStagehandConfig() if config is None else config
        if not isinstance(config, ActivationStagehandConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}: expected an"
                " ActivationStagehandConfig; its from_json() takes files and"
                " dictionaries"
            )
        self.config = config
        self.clock = PhaseClock()
        self._closed = False
        self._parts: Parts | None = None
        self._file: LineFile | None = None
        self._records: deque[ActivationStep] = deque(maxlen=_WINDOW)
        if not self.config.enabled:
            return
        self._parts = Parts(find_device(device), self.config)
        if self.config.telemetry_enabled:
            self._parts.carrier.stalls = StallClock(self._parts.device)
            if self.config.telemetry_file is not None:
                self._file = LineFile(Path(self.config.telemetry_file))

    def __repr__(self) -> str:
        if self._parts is None:
            return "ActivationRuntime(disabled)"
        return f"ActivationRuntime({state_of(self._parts.spill)})"

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

    def _record(self, parts: Parts) -> ActivationStep:
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
            over_count=tally.over_count,
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
        return report_of(self._parts)

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
            ConfigError: If they are not pairs of a name and a module.

        Example:
            >>> with runtime.watch_blocks(model.blocks.named_children()) as watch:
            ...     train_step()
            >>> print(watch.advise("4GB"))
        """
        self._open_parts()
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
            "max_d2h": spill.most_leaving,
            "max_h2d": spill.most_coming,
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

    def _open_parts(self) -> Parts | None:
        if self._closed:
            raise ClosedError(
                "this ActivationRuntime was shut down; make a new one to go on"
            )
        return self._parts

    def _need_parts(self) -> Parts:
        if self._parts is None:
            raise ClosedError(
                "this ActivationRuntime is disabled, so it has no parts to limit or to"
                " measure with: set enabled=True in its config, or leave this call out"
            )
        return self._parts
