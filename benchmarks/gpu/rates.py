"""What link, host memory and disk do, measured in the process that is held to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gpu.link import both_ways, copy_rate, host_rate
from stagehand.units import MIB

if TYPE_CHECKING:
    from benchmarks.gpu.card import Card

__all__ = ["Rates", "copied_bytes"]

_COPIED = 64 * MIB
_HOST_COPIED = 1024 * MIB
_DRY = MIB // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Bytes a second."""

    h2d: float
    d2h: float
    h2d_both: float
    """While the other way is as busy."""
    d2h_both: float
    host: float
    """Of a copy within host memory, by all of torch's threads."""
    disk: float | None = None
    """Of reading files that are in no cache; None where nothing is read."""

    @classmethod
    def of(cls, card: Card, *, disk: float | None = None) -> Rates:
        """Measure them."""
        nbytes = copied_bytes(card)
        both = both_ways(card.device, nbytes)
        return cls(
            h2d=copy_rate(card.device, nbytes),
            d2h=copy_rate(card.device, nbytes, home=True),
            h2d_both=both[0],
            d2h_both=both[1],
            host=host_rate(_DRY if card.dry else _HOST_COPIED),
            disk=disk,
        )


def copied_bytes(card: Card) -> int:
    """Return the size of the copies that rates are measured with."""
    return _DRY if card.dry else _COPIED
