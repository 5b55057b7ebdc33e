"""Steps, times and records of one runtime, for telemetry, report and trace."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from stagehand.core.arena import Arena
from stagehand.core.clock import PhaseClock
from stagehand.core.device import Device
from stagehand.core.ledger import Account
from stagehand.core.stopwatch import CopyTime, Stopwatch, UseTime
from stagehand.core.telemetry import StepRecord, Telemetry, Trace
from stagehand.residency.blocks import Block

__all__ = ["Measure"]

_READY_MS = 0.02  # a wait that is over takes a stream a few microseconds
_PACES = 8


class Measure:
    """Collects what one runtime did, step by step.

    Args:
        device: Whose memory and clock are read.
        telemetry: Where steps are recorded.
        timed: Whether every pass is timed; otherwise only those asked for.
        traced: Whether spans are kept for a trace.
    """

    def __init__(
        self, device: Device, telemetry: Telemetry, *, timed: bool, traced: bool
    ) -> None:
        self.clock = PhaseClock()
        self.telemetry = telemetry
        self.timed = timed or traced
        self.passes = 0
        self.first_seconds: float | None = None
        """What the first pass took the host."""
        self.stopwatch = Stopwatch(device)
        self._device = device
        self._trace = Trace() if traced else None
        self._names: dict[int, str] = {}
        self._streamed: frozenset[int] = frozenset()
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._pass_began: float | None = None
        self._step_began: float | None = None
        self._copy_ms = 0.0
        self._compute_ms = 0.0

    @property
    def in_step(self) -> bool:
        """Whether a step is open."""
        return self._step_began is not None

    @property
    def seconds_per_pass(self) -> float | None:
        """Mean host time of the latest passes but the first, or None."""
        paces = list(self._paces)[1:] if self.passes <= _PACES else list(self._paces)
        return sum(paces) / len(paces) if paces else None

    def know(self, blocks: Sequence[Block]) -> None:
        """Take note of the blocks' names and of which of them stream."""
        self._names = {block.index: block.name for block in blocks}
        self._streamed = frozenset(b.index for b in blocks if not b.stays)

    def begin_pass(self) -> None:
        """Note the time."""
        self._pass_began = time.perf_counter()

    def end_pass(self) -> None:
        """Note how long the pass took the host."""
        if self._pass_began is not None:
            self._paces.append(time.perf_counter() - self._pass_began)
            if self.first_seconds is None:
                self.first_seconds = self._paces[0]
            self._pass_began = None
            self.passes += 1

    def forget_pass(self) -> None:
        """Count no pass: it was left, or refused before it had begun."""
        self._pass_began = None
        self.stopwatch.forget()

    def collect(self) -> tuple[list[UseTime], list[CopyTime]]:
        """Read the stopwatch and add its times to the open step."""
        uses, copies = self.stopwatch.resolve()
        counters = self.telemetry.counters
        for use in uses:
            self._compute_ms += use.compute_ms
            for waited in (use.stall_ms, use.home_ms):
                if waited > _READY_MS:
                    counters.stall_count += 1
                    counters.stall_time_ms += waited
            if use.block in self._streamed:
                if use.stall_ms > _READY_MS:
                    counters.prefetch_misses += 1
                else:
                    counters.prefetch_hits += 1
        self._copy_ms += sum(copy.duration_ms for copy in copies)
        if self._trace is not None:
            self._add_spans(self._trace, uses, copies)
        return uses, copies

    def _add_spans(
        self, trace: Trace, uses: Sequence[UseTime], copies: Sequence[CopyTime]
    ) -> None:
        for use in uses:
            name = self._names.get(use.block, "?")
            if use.stall_ms > _READY_MS:
                trace.add("stall", name, use.start_ms, use.stall_ms)
            begun, taken = use.start_ms + use.stall_ms, use.compute_ms + use.home_ms
            trace.add("compute", name, begun, taken)
        for copy in copies:
            name = self._names.get(copy.block, "?")
            trace.add(
                copy.lane, name, copy.start_ms, copy.duration_ms, nbytes=copy.nbytes
            )

    def begin_step(self, step: int | None = None) -> None:
        """Open a step on the clock."""
        self.clock.begin_step(step)
        self._step_began = time.perf_counter()

    def end_step(
        self, weights: Account, pool: Arena, pinning_bytes: int
    ) -> StepRecord | None:
        """Close the open step and record it; None if none is open."""
        began, self._step_began = self._step_began, None
        if began is None:
            return None
        self.clock.end_step()
        timed = self.timed
        record = self.telemetry.end_step(
            step=self.clock.step,
            duration_ms=(time.perf_counter() - began) * 1e3,
            copy_time_ms=self._copy_ms if timed else None,
            compute_time_ms=self._compute_ms if timed else None,
            device_used_bytes=weights.held_bytes,
            device_peak_bytes=weights.peak_bytes,
            device_allocated_bytes=self._device.allocated_bytes(),
            device_reserved_bytes=self._device.reserved_bytes(),
            pool_used_bytes=pool.leased_bytes,
            pool_free_bytes=pool.account.free_bytes,
            pinning_bytes=pinning_bytes,
            pool_wait_count=pool.wait_count,
            pool_wait_ms=pool.wait_ms,
        )
        self._copy_ms = self._compute_ms = 0.0
        return record

    def write_trace(self, path: Path | str) -> bool:
        """Write the trace; False if none is kept."""
        if self._trace is None:
            return False
        self._trace.write(path)
        return True
