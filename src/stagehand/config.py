"""Settings of block mode, under the names that users know."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stagehand.core.ledger import Watermarks
from stagehand.errors import ConfigError
from stagehand.guards import Checks
from stagehand.settings import check_types
from stagehand.units import MIB

__all__ = ["StagehandConfig", "Transport"]

Transport = Literal["plain", "packed"]
"""How weights cross the link."""

_SIZES = (
    "pinned_pool_mb",
    "pinned_slab_mb",
    "vram_high_watermark_mb",
    "vram_low_watermark_mb",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagehandConfig:
    """Settings of a `StagehandRuntime`. Sizes are in MiB (2**20 bytes), whole or not.

    Raises:
        ConfigError: If a value is of another type, or some cannot work together.

    Example:
        >>> StagehandConfig(pinned_pool_mb=8192, vram_high_watermark_mb=20000,
        ...                 vram_low_watermark_mb=16000).prefetch_window_blocks
        3
    """

    pinned_pool_mb: float = 8192
    """Page-locked host memory at most. What does not fit is staged through it."""
    pinned_slab_mb: float = 2048
    """The largest block that is accepted; staging slabs are as large as the largest
    block that needs one."""
    vram_high_watermark_mb: float = 22000
    """Weights never take more device memory; and when all of this process's tensors
    reach it, weights make room."""
    vram_low_watermark_mb: float = 18000
    """Down to which weights make room."""
    prefetch_window_blocks: int = 3
    """How far to load ahead at most: so many of the largest blocks, or more that are
    smaller, or all of a region that checkpoints compute again. With 0 nothing is."""
    max_inflight: int | None = 2
    """Copies in flight in each direction before prefetches wait; None for no limit."""
    copy_stream_priority: int = -1
    """Priority of the streams on which copies run; lower runs first."""
    nan_inf_check: bool = False
    """Count NaN and infinite values in outputs of blocks. Costs a pass over them."""
    strict_bf16: bool = False
    """Refuse a floating-point parameter or output of a block that is not bfloat16."""
    dtype_promotion_check: bool = False
    """Count outputs of blocks that are wider than every floating-point input, as when
    something in float32 slips into a bfloat16 stream."""
    fail_on_dtype_promotion: bool = False
    """Raise at the first of these. Counts them, too."""
    telemetry_enabled: bool = True
    """Time uses and copies, for hits, stalls and the trace."""
    telemetry_interval_steps: int = 10
    """Steps between lines in the log `stagehand`."""
    shared: bool = True
    """Share device memory and lanes with other runtimes on the device; see `layer`."""
    transport: Transport = "plain"
    """"packed" sends bfloat16 weights in three quarters of their bytes; see `layer`."""
    telemetry_file: str | Path | None = None
    """A file for one line of JSON a step. None writes no file."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_types(self)
        for name in _SIZES:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: expected more than 0 MiB"
                )
        if self.telemetry_interval_steps < 1:
            raise ConfigError(
                f"telemetry_interval_steps is {self.telemetry_interval_steps}: expected"
                " 1 or more"
            )
        if self.prefetch_window_blocks < 0:
            raise ConfigError(
                f"prefetch_window_blocks is {self.prefetch_window_blocks}: expected 0"
                " (load on demand) or more"
            )
        if self.max_inflight is not None and self.max_inflight < 1:
            raise ConfigError(
                f"max_inflight is {self.max_inflight}: expected 1 or more, or None"
            )
        if self.pinned_slab_mb > self.pinned_pool_mb:
            raise ConfigError(
                f"pinned_slab_mb is {self.pinned_slab_mb} but pinned_pool_mb only"
                f" {self.pinned_pool_mb}: a slab must fit the pool"
            )
        self.watermarks()

    def checks(self) -> Checks:
        """Return which checks are asked for."""
        return Checks(
            nan_inf_check=self.nan_inf_check,
            strict_bf16=self.strict_bf16,
            dtype_promotion_check=self.dtype_promotion_check,
            fail_on_dtype_promotion=self.fail_on_dtype_promotion,
        )

    def watermarks(self) -> Watermarks:
        """Return both marks in bytes."""
        return Watermarks(
            high_bytes=int(self.vram_high_watermark_mb * MIB),
            low_bytes=int(self.vram_low_watermark_mb * MIB),
        )
