"""What the conductor writes down: a record at an interval, and events on request."""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stagehand.core.telemetry import LineFile

__all__ = ["ConductorRecord", "Recorder"]

_LOG = logging.getLogger("stagehand")
_WINDOW = 100
_EVENTS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorRecord:
    """A step in numbers. Counts go back to the record before."""

    step_id: int
    """The step's number."""
    vram_allocated_mb: float | None
    """Device memory that the process has allocated, in MiB; None if not measured."""
    vram_headroom_mb: float | None
    """MiB from there to the hard cap; None if not measured."""
    pinned_granted_mb: float
    """Page-locked memory that is granted here or used by what is attached, in MiB."""
    h2d_inflight: int
    """Copies to the device, and tokens for such, at the step's end."""
    d2h_inflight: int
    """Copies from the device, and tokens for such, at the step's end."""
    grant_count: int
    """Requests of memory that got all."""
    deny_count: int
    """Requests of memory or of a slot that got nothing."""
    partial_count: int
    """Requests of memory that got a part."""
    phase_durations: dict[str, float] = field(default_factory=dict)
    """Host seconds of forward, backward and optimizer."""
    runtime_snapshots: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each attached runtime says of itself."""

    def to_json(self) -> str:
        """Return the record as one line of JSON, without the line's end."""
        return json.dumps(asdict(self))


class Recorder:
    """Keeps the latest records and events, and writes records to a file.

    Args:
        path: A file for one line of JSON a record, or None.
        traces: Whether events are kept.

    Raises:
        ConfigError: If the path cannot be a file.
    """

    def __init__(self, path: Path | str | None, *, traces: bool) -> None:
        self.records: deque[ConductorRecord] = deque(maxlen=_WINDOW)
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        """The latest, as `{"event": ..., "step": ..., ...}`."""
        self.traces = traces
        self._file = None if path is None else LineFile(Path(path))

    def __repr__(self) -> str:
        return f"Recorder({len(self.records)} records, {len(self.events)} events)"

    def add(self, record: ConductorRecord) -> None:
        """Keep a record and write it."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(record.to_json())

    def trace(self, event: str, step: int, **what: Any) -> None:
        """Keep an event, if they are kept."""
        if self.traces:
            self.events.append({"event": event, "step": step, **what})
            _LOG.debug("conductor, step %d: %s %s", step, event, what)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
