"""Settings of a runtime for saved tensors, under the names that users know."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stagehand.activations.pool import slab_counts
from stagehand.core.ledger import Watermarks
from stagehand.errors import ConfigError
from stagehand.settings import check_types
from stagehand.units import MIB, parse_bytes

__all__ = ["ActivationStagehandConfig"]

_MARKS = {"vram_high_watermark_mb": 20000.0, "vram_low_watermark_mb": 16000.0}


class _Unnamed(str):
    """A budget that nobody has named: it gives way to watermarks."""

    __slots__ = ()


_BUDGET = _Unnamed("50%")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationStagehandConfig:
    """Settings of an `ActivationRuntime`. Sizes are in MiB (2**20 bytes), whole or not.

    Raises:
        ConfigError: If a value is of another type, cannot work, or contradicts another.

    Example:
        >>> ActivationStagehandConfig(budget="4GB").max_inflight_d2h is None
        True
    """

    enabled: bool = True
    """Without it the runtime has no parts, and its methods return at once."""
    budget: int | str | None = _BUDGET
    """Device bytes of saved tensors: an int, "4GB", or a part of what is free when the
    runtime is made. None lets the watermarks decide, and so does who names watermarks
    and no budget; both are a contradiction."""
    vram_high_watermark_mb: float | None = None
    """Device memory of the whole process at which the oldest saved tensors leave, if
    there is no budget: 20000 then, unless it is named."""
    vram_low_watermark_mb: float | None = None
    """Down to which they leave; below it more may stay. 16000, as above."""
    pinned_pool_classes_mb: tuple[float, ...] = ()
    """Sizes of page-locked slabs, ascending. None of them: slabs are made as they are
    needed, of a size that fits."""
    slabs_per_class: int | tuple[int, ...] = 0
    """Slabs of each class that are made at the start: one number for all, or one for
    each. What a step lacks is made after it."""
    ram_budget: int | str | None = None
    """Page-locked host memory that all of it may take; beyond it, pageable memory is
    used, with a warning. None is no limit of its own."""
    max_inflight_d2h: int | None = None
    """Copies to the host under way before planned ones wait; None is no limit. They
    follow each other on one stream, so few do not spare the link: they start late."""
    max_inflight_h2d: int | None = None
    """Copies to the device under way before those that are not needed yet wait."""
    debug_checksums: bool = False
    """Compare CRC32 sums of what leaves and of what returns. The host waits then."""
    telemetry_enabled: bool = True
    """Time waits, and keep a record of each step."""
    telemetry_file: str | Path | None = None
    """A file for one line of JSON a step. None writes no file."""
    recompute_threshold_bytes: int = 0
    """In regions that are checkpointed with the runtime's `checkpoint_contexts`,
    tensors below this are computed again; the others are kept, or leave. Zero: all of
    a region is computed again, as by any checkpoint."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_types(self)
        self._check_budgets()
        classes = self.pinned_pool_classes_mb
        if (
            not classes
            and isinstance(self.slabs_per_class, int)
            and self.slabs_per_class
        ):
            raise ConfigError(
                f"slabs_per_class is {self.slabs_per_class} and pinned_pool_classes_mb"
                " is empty: expected the sizes of these slabs"
            )
        if any(not 1 <= size * MIB < math.inf for size in classes) or list(
            classes
        ) != sorted(set(classes)):
            raise ConfigError(
                f"pinned_pool_classes_mb is {classes}: expected sizes above 0 MiB, each"
                " larger than the one before"
            )
        slab_counts(classes, self.slabs_per_class)
        for name in ("max_inflight_d2h", "max_inflight_h2d"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: expected 1 or more, or None")
        if self.recompute_threshold_bytes < 0:
            raise ConfigError(
                f"recompute_threshold_bytes is {self.recompute_threshold_bytes}:"
                " expected 0 bytes or more"
            )

    def _check_budgets(self) -> None:
        if self.ram_budget is not None:
            parse_bytes(self.ram_budget, name="ram_budget")
        if self.budget is not None:
            parse_bytes(self.budget, name="budget", of=1 << 62)
        named = [name for name in _MARKS if getattr(self, name) is not None]
        for name in named:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: expected more than 0 MiB"
                )
        if named and isinstance(self.budget, _Unnamed):
            object.__setattr__(self, "budget", None)
        if self.budget is None:
            for name in _MARKS.keys() - set(named):
                object.__setattr__(self, name, _MARKS[name])
            self.watermarks()
        elif named:
            raise ConfigError(
                f"budget is {self.budget!r} and {named[0]} is given too: expected a"
                " budget or watermarks, not both"
            )

    def watermarks(self) -> Watermarks | None:
        """Return both marks in bytes; None if there is a budget."""
        high, low = self.vram_high_watermark_mb, self.vram_low_watermark_mb
        if self.budget is not None or high is None or low is None:
            return None
        return Watermarks(high_bytes=int(high * MIB), low_bytes=int(low * MIB))

    @classmethod
    def from_json(
        cls, source: str | Path | Mapping[str, Any]
    ) -> ActivationStagehandConfig:
        """Return the settings that a file or a dictionary has.

        Lists are taken for tuples; all else is as if it was given in code.

        Args:
            source: A path, or what such a file has in it.

        Raises:
            ConfigError: If it is no object, or has a key that there is not.
            OSError: If the file cannot be read.
        """
        if isinstance(source, str | Path):
            try:
                source = json.loads(Path(source).read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{str(source)!r} is not JSON: {error}") from None
        if not isinstance(source, Mapping):
            raise ConfigError(
                "settings for saved tensors are"
                f" {type(source).__name__}: expected an object with their names"
            )
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(source) - known):
            raise ConfigError(
                f"settings for saved tensors have {', '.join(map(repr, unknown))}:"
                f" expected {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in source.items()
        }
        return cls(**values)
