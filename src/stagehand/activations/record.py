"""What a step did with saved tensors, as a record and as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from stagehand.units import MIB

__all__ = ["ActivationStep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationStep:
    """One step in numbers. Several saved tensors in one storage count once."""

    step: int
    """The step's number."""
    activations_saved: int
    """Storages that autograd saved and that could have left."""
    activations_kept: int
    """Saved storages that stayed on the device."""
    activations_spilled: int
    """Saved storages that left the device."""
    activations_restored: int
    """Storages that came back to the device."""
    spill_bytes: int
    """Bytes copied to the host."""
    freed_bytes: int
    """Bytes copied to the host whose device memory was free before backward came, for
    nobody else kept it."""
    restore_bytes: int
    """Bytes copied back."""
    stall_time_ms: float | None
    """Time that compute waited for copies, as far as the device has come by now; the
    rest counts in the next record. None where nothing is timed."""
    stall_count: int | None
    """How often it waited."""
    demand_count: int
    """Copies back that had not begun when they were needed."""
    pool_hits: int
    """Slabs of pinned host memory that the pool had."""
    pool_misses: int
    """Slabs that it had to make, or to replace by pageable memory."""
    pageable_count: int
    """How often pageable memory was used, which makes the host wait."""
    saved_peak_bytes: int
    """The most bytes of saved tensors on the device."""
    over_count: int
    """How often saved tensors exceeded the budget because nothing more could leave:
    one is larger than the budget, or what is in use is."""
    budget_bytes: int
    """Bytes of saved tensors that were allowed; the watermarks may have moved it."""
    vram_peak_bytes: int | None
    """The most device memory of the process so far; None where nobody counts it."""

    @property
    def pool_hit_rate(self) -> float | None:
        """Hits over all requests, from 0 to 1; None if there were none."""
        asked = self.pool_hits + self.pool_misses
        return self.pool_hits / asked if asked else None

    def to_json(self) -> str:
        """Return one line: every field under its name, and `vram_peak_mb` in MiB."""
        line = asdict(self)
        peak = self.vram_peak_bytes
        line["vram_peak_mb"] = None if peak is None else peak / MIB
        return json.dumps(line)
