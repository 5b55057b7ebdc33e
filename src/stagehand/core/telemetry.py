"""What happened, in numbers: counters, one record a step, and a trace on request.

A number that nobody measured is `None` and written as `null`, never as zero.
"""

import json
import logging
import warnings
from collections import deque
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any

from stagehand.errors import ClosedError, ConfigError, StagehandWarning
from stagehand.units import MIB, format_bytes

__all__ = ["Counters", "LineFile", "StepRecord", "Telemetry", "Trace"]

_LOG = logging.getLogger("stagehand")
_TREND_BYTES = 50 * MIB


@dataclass(slots=True)
class Counters:
    """What has happened since the step began, counted where it happens.

    Plain numbers without a lock: only the thread that runs the model adds to them.
    Worker threads hand their numbers over with their results.
    """

    h2d_bytes: int = 0
    """Bytes copied to the device."""
    d2h_bytes: int = 0
    """Bytes copied from the device."""
    h2d_copies: int = 0
    """Copies to the device."""
    d2h_copies: int = 0
    """Copies from the device."""
    disk_bytes: int = 0
    """Bytes read from files."""
    stall_time_ms: float = 0.0
    """Time that compute waited for a block."""
    stall_count: int = 0
    """Uses that waited."""
    evictions: int = 0
    """Blocks dropped from the device or saved from it."""
    prefetch_hits: int = 0
    """Uses of a streamed block that was ready before it was needed."""
    prefetch_misses: int = 0
    """Uses of a streamed block that was not."""
    resident_uses: int = 0
    """Uses of a block that stays on the device: neither hit nor miss."""
    gathers: int = 0
    """Lookups that sent rows of a table instead of the table."""
    abandoned_slots: int = 0
    """Slots that could not be reused because something outside still held them."""
    nan_count: int = 0
    """NaN values found, where outputs are checked."""
    inf_count: int = 0
    """Infinite values found, where outputs are checked."""
    dtype_promotions: int = 0
    """Outputs of blocks that were wider than every input, where that is checked."""

    def reset(self) -> None:
        """Set every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)


_COUNTERS = tuple(field.name for field in fields(Counters))
_NONFINITE = frozenset({"nan_count", "inf_count"})
_PROMOTIONS = frozenset({"dtype_promotions"})
_TIMED = frozenset({"stall_time_ms", "stall_count", "prefetch_hits", "prefetch_misses"})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step in numbers: the `Counters` of the step, then gauges read at its end."""

    step: int
    """The step's number."""

    h2d_bytes: int
    d2h_bytes: int
    h2d_copies: int
    d2h_copies: int
    disk_bytes: int
    stall_time_ms: float | None
    stall_count: int | None
    evictions: int
    prefetch_hits: int | None
    prefetch_misses: int | None
    resident_uses: int
    gathers: int
    abandoned_slots: int
    nan_count: int | None
    inf_count: int | None
    dtype_promotions: int | None

    duration_ms: float | None = None
    """From the step's begin to its end, on the host."""
    copy_time_ms: float | None = None
    """Time that the lanes spent copying."""
    compute_time_ms: float | None = None
    """Time that the device spent computing."""
    device_used_bytes: int | None = None
    """Device bytes that the runtime holds for weights."""
    device_peak_bytes: int | None = None
    """The most that it has held at once, in any step so far."""
    device_allocated_bytes: int | None = None
    """Device bytes that the whole process has allocated."""
    device_reserved_bytes: int | None = None
    """Device bytes that its allocator has taken from the device."""
    pool_used_bytes: int | None = None
    """Bytes of the pinned pool that are leased."""
    pool_free_bytes: int | None = None
    """Bytes of it that are not."""
    pinning_bytes: int | None = None
    """Bytes of weights that are still being page-locked, in the background."""
    pool_wait_count: int | None = None
    """Leases that had to wait for the pool, in all steps so far."""
    pool_wait_ms: float | None = None
    """Time that they waited."""

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line's end.

        It has every field under its own name, and four under the names that older
        readers of such files know: `vram_used_mb` (the allocated bytes, in MiB),
        `vram_reserved_mb`, `host_pool_free` and `host_pool_in_use` (in bytes).
        """
        line = {field.name: getattr(self, field.name) for field in fields(self)}
        line["vram_used_mb"] = _mib(self.device_allocated_bytes)
        line["vram_reserved_mb"] = _mib(self.device_reserved_bytes)
        line["host_pool_free"] = self.pool_free_bytes
        line["host_pool_in_use"] = self.pool_used_bytes
        return json.dumps(line)


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / MIB


class Telemetry:
    """Turns counters into one record a step, and keeps the last ones.

    It measures nothing itself. Without a path it writes no file.

    Attributes:
        counters: What has happened in the open step; added to directly.
    """

    def __init__(
        self,
        *,
        path: Path | str | None = None,
        interval_steps: int = 1,
        window_steps: int = 100,
        checks_nonfinite: bool = False,
        checks_promotions: bool = False,
        times_uses: bool = True,
    ) -> None:
        """Open no file yet; the first record does.

        Args:
            path: A file to which each step adds one line of JSON.
            interval_steps: Steps per line in the log `stagehand` (level INFO). Files
                get every step.
            window_steps: Steps that `records` and the statistics reach back.
            checks_nonfinite: Whether somebody counts NaN and infinite values; without
                it their counts are `None`.
            checks_promotions: Whether somebody compares outputs with inputs; without
                it the count of promotions is `None`.
            times_uses: Whether somebody times uses; without it hits, misses and stalls
                are `None`.

        Raises:
            ConfigError: If a number is less than one, or `path` is not in an existing
                directory.
        """
        for name, value in (
            ("interval_steps", interval_steps),
            ("window_steps", window_steps),
        ):
            if value < 1:
                raise ConfigError(f"{name} is {value}: expected at least one step")
        self.counters = Counters()
        self._file = None if path is None else LineFile(Path(path))
        self._interval_steps = interval_steps
        self._unmeasured: frozenset[str] = frozenset()
        if not checks_nonfinite:
            self._unmeasured |= _NONFINITE
        if not checks_promotions:
            self._unmeasured |= _PROMOTIONS
        if not times_uses:
            self._unmeasured |= _TIMED
        self._window: deque[StepRecord] = deque(maxlen=window_steps)
        self._ended_steps = 0
        self._ended = Counters()
        self._closed = False

    def __repr__(self) -> str:
        """Show live counts."""
        return f"Telemetry({self._ended_steps} steps, {len(self._window)} kept)"

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The last steps, oldest first; a copy, that any thread may have."""
        return tuple(self._window)

    def end_step(self, *, step: int, **gauges: Any) -> StepRecord:
        """Make the step's record, keep and write it, and start counting anew.

        Args:
            step: The step's number.
            **gauges: The fields of `StepRecord` that are not counters; those left out
                were not measured.

        Raises:
            ClosedError: If the telemetry is closed.
        """
        if self._closed:
            raise ClosedError(
                f"step {step} ended after close(); make a new Telemetry to go on"
            )
        counted: dict[str, Any] = {
            name: None if name in self._unmeasured else getattr(self.counters, name)
            for name in _COUNTERS
        }
        record = StepRecord(step=step, **counted, **gauges)
        for name in _COUNTERS:
            total = getattr(self._ended, name) + getattr(self.counters, name)
            setattr(self._ended, name, total)
        self.counters.reset()
        self._window.append(record)
        self._ended_steps += 1
        if self._ended_steps % self._interval_steps == 0:
            self._log(record)
        if self._file is not None:
            self._file.write(record.to_json())
        return record

    def hit_rate(self) -> float | None:
        """Return hits over uses of streamed blocks in the window, from 0 to 1.

        `None` if no streamed block was used.
        """
        window = self.records
        hits = sum(record.prefetch_hits or 0 for record in window)
        uses = hits + sum(record.prefetch_misses or 0 for record in window)
        return hits / uses if uses else None

    def mean_stall_ms(self) -> float | None:
        """Return the mean stall time of a step in the window; `None` if it is empty."""
        stalls = self._stalls()
        return sum(stalls) / len(stalls) if stalls else None

    def max_stall_ms(self) -> float | None:
        """Return the longest stall time of a step in the window; `None` if empty."""
        return max(self._stalls(), default=None)

    def _stalls(self) -> list[float]:
        found = (record.stall_time_ms for record in self.records)
        return [milliseconds for milliseconds in found if milliseconds is not None]

    def vram_trend(self) -> str | None:
        """Return whether the process's device memory is growing over the window.

        Compares the mean of the newer half of the steps with that of the older half.

        Returns:
            `"growing"` or `"shrinking"` if they differ by more than 50 MiB, else
            `"stable"`; `None` if fewer than four steps have measured it.
        """
        used = [
            record.device_allocated_bytes
            for record in self.records
            if record.device_allocated_bytes is not None
        ]
        half = len(used) // 2
        if half < 2:
            return None
        change = (sum(used[-half:]) - sum(used[:half])) / half
        if abs(change) <= _TREND_BYTES:
            return "stable"
        return "growing" if change > 0 else "shrinking"

    def totals(self) -> dict[str, float | None]:
        """Return every counter summed since the beginning, the open step included."""
        return {
            name: None
            if name in self._unmeasured
            else getattr(self._ended, name) + getattr(self.counters, name)
            for name in _COUNTERS
        }

    def close(self) -> None:
        """Close the file and take no more steps; idempotent. Statistics stay."""
        self._closed = True
        if self._file is not None:
            self._file.close()

    def _log(self, record: StepRecord) -> None:
        if not _LOG.isEnabledFor(logging.INFO):
            return
        rate = self.hit_rate()
        _LOG.info(
            "step %d: %s hits, stalled %.1f ms, %d evictions, %s to the device, "
            "%s of weights on it",
            record.step,
            "no" if rate is None else f"{rate:.0%}",
            record.stall_time_ms or 0.0,
            record.evictions,
            format_bytes(record.h2d_bytes),
            _text(record.device_used_bytes),
        )


def _text(nbytes: int | None) -> str:
    return "an unknown size" if nbytes is None else format_bytes(nbytes)


class LineFile:
    """A text file that lines are added to; a failed write ends it, not the run."""

    def __init__(self, path: Path) -> None:
        try:
            path.lstat()
        except FileNotFoundError:
            pass  # the first line makes it
        except (OSError, ValueError) as error:  # too long, or with a NUL in it
            raise ConfigError(
                f"telemetry file {str(path)!r} cannot be made ({error}): expected a "
                "path that the system takes"
            ) from error
        if not path.parent.is_dir():
            raise ConfigError(
                f"telemetry file {str(path)!r} cannot be made: the directory "
                f"{str(path.parent)!r} does not exist; make it first"
            )
        if path.is_dir():
            raise ConfigError(
                f"telemetry file {str(path)!r} is a directory: expected a file's path"
            )
        self._path = path.absolute()  # wherever the process goes later
        self._file: FileIO | None = None
        self._failed = False

    def write(self, line: str) -> None:
        if self._failed:
            return
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            self._failed = True
            self.close()
            warnings.warn(
                f"telemetry file {str(self._path)!r} could not be written ({error}): "
                "it gets no more steps, the run goes on",
                StagehandWarning,
                stacklevel=3,
            )

    def _append(self, data: bytes) -> None:
        if self._file is None:
            # Unbuffered: a line that could not be written must not stay behind in a
            # buffer, where close() would fail on it again.
            self._file = FileIO(self._path, "ab")
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Trace:
    """Spans of work on named lanes, to look at in Perfetto or `chrome://tracing`.

    For a few steps on request, not for a whole run: it keeps every span until it is
    dropped.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def __repr__(self) -> str:
        """Show live counts."""
        return f"Trace({len(self._spans)} spans)"

    def add(
        self, lane: str, name: str, start_ms: float, duration_ms: float, **args: Any
    ) -> None:
        """Add one span.

        Args:
            lane: The row that it is drawn in, such as `"h2d"` or `"compute"`.
            name: What was done, usually the block's name.
            start_ms: When it began; all spans of a trace count from the same moment.
            duration_ms: How long it took.
            **args: What else to show of it; values that JSON has.
        """
        self._spans.append((lane, name, start_ms, duration_ms, args))

    def write(self, path: Path | str) -> None:
        """Write all spans so far as a trace file, over an older one.

        Raises:
            OSError: If the file cannot be written.
        """
        lanes: dict[str, int] = {}
        for lane, *_ in self._spans:
            lanes.setdefault(lane, len(lanes))
        events: list[dict[str, Any]] = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": tid,
                "args": {"name": lane},
            }
            for lane, tid in lanes.items()
        ]
        events += (
            {
                "ph": "X",
                "name": name,
                "pid": 0,
                "tid": lanes[lane],
                "ts": start_ms * 1000,
                "dur": duration_ms * 1000,
                "args": args,
            }
            for lane, name, start_ms, duration_ms, args in self._spans
        )
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
