"""What link, host memory and disk do, measured in the process that is held to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.disk import drop_cache
from benchmarks.gpu.link import both_ways, copy_rate
from stagehand.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.card import Card

__all__ = ["Rates", "read_rate"]

_COPIED = 64 * MIB
_DRY = MIB // 4
_ROUNDS = 5


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
        nbytes = _DRY if card.dry else _COPIED
        both = both_ways(card.device, nbytes)
        return cls(
            h2d=copy_rate(card.device, nbytes),
            d2h=copy_rate(card.device, nbytes, home=True),
            h2d_both=both[0],
            d2h_both=both[1],
            host=_host_rate(nbytes),
            disk=disk,
        )


def _host_rate(nbytes: int) -> float:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds)


def read_rate(path: Path, chunk_bytes: int = 16 * MIB) -> float:
    """Return the rate of reading a file, dropped from memory before, front to back."""
    drop_cache(path)
    buffer = bytearray(chunk_bytes)
    began, total = time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    drop_cache(path)
    return total / (time.perf_counter() - began)
