"""Settings of the conductor, under the names that users know."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stagehand.errors import ConfigError
from stagehand.settings import check_types
from stagehand.units import MIB

__all__ = ["Arbitration", "ConductorConfig"]

Arbitration = Literal["measure", "always", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConductorConfig:
    """Settings of a `ConductorRuntime`. Sizes are in MiB (2**20 bytes), whole or not.

    Raises:
        ConfigError: If a value is of another type, or cannot work.

    Example:
        >>> ConductorConfig(vram_soft_cap_mb=22000, vram_hard_cap_mb=23500).h2d_slots
        2
    """

    enabled: bool = True
    """Without it the conductor has no parts, and its methods return at once."""
    vram_soft_cap_mb: float | None = None
    """Device memory that grants share; None is the hard cap. BURST grants and floors
    may go up to the hard cap."""
    vram_hard_cap_mb: float | None = None
    """The most device memory that is granted, and what pressure is measured against;
    None is what the process can have."""
    pinned_cap_mb: float | None = None
    """The most page-locked host memory that weights, saved tensors and grants have
    together; None is no limit."""
    h2d_slots: int = 2
    """Copies to the device in flight beyond which prefetches wait."""
    d2h_slots: int = 2
    """Copies from the device in flight beyond which early spills wait."""
    detect_phases: bool = True
    """Follow an attached runtime and torch's optimizers, until a phase is told by hand:
    the first runtime that loads ahead, or else the first."""
    link_arbitration: Arbitration = "measure"
    """Whether copies home yield to weights: "measure" finds out once per device, which
    takes some milliseconds, if both directions at once slow the weights down."""
    yield_backlog_mb: float = 256
    """Device memory of gradients and spills that may wait for their way home."""
    telemetry_interval_steps: int = 10
    """Steps between records."""
    telemetry_file: str | Path | None = None
    """A file for one line of JSON a record. None writes no file."""
    debug_event_trace: bool = False
    """Keep and log phases, requests and denials one by one."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_types(self)
        for name in ("vram_soft_cap_mb", "vram_hard_cap_mb", "pinned_cap_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}: expected more than 0 MiB")
        backlog = self.yield_backlog_mb
        if not 0 <= backlog < math.inf:
            raise ConfigError(
                f"yield_backlog_mb is {backlog!r}: expected 0 MiB or more"
            )
        for name in ("h2d_slots", "d2h_slots", "telemetry_interval_steps"):
            count = getattr(self, name)
            if count < 1:
                raise ConfigError(f"{name} is {count!r}: expected 1 or more")
        soft, hard = self.vram_soft_cap_mb, self.vram_hard_cap_mb
        if soft is not None and hard is not None and soft > hard:
            raise ConfigError(
                f"vram_soft_cap_mb is {soft} MiB and vram_hard_cap_mb {hard} MiB:"
                " expected a soft cap that is not above the hard one"
            )

    def bytes_of(self, name: str) -> int | None:
        """Return one of the sizes, by its name here, in bytes; None if it is unset."""
        value = getattr(self, name)
        return None if value is None else int(value * MIB)
