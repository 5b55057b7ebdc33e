"""What the link does: each way alone, by size, both at once, and what pinning costs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.clock import Spread, time_on

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stagehand.core.device import Device, Stream

__all__ = ["Link", "both_ways", "calibrate", "copy_rate"]

_ROUNDS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Rates in bytes a second, medians of several copies."""

    h2d: dict[int, float]
    """By the bytes of one copy, copies queued one behind the other."""
    d2h: float
    h2d_both: float
    """While the other way is as busy."""
    d2h_both: float
    pin_seconds_per_gb: float
    """Of 1e9 bytes, first touch included, on the host's clock."""

    def line(self) -> dict[str, Any]:
        """Return what is written to the results."""
        return {"kind": "link", **asdict(self)}


def calibrate(device: Device, sizes: tuple[int, ...]) -> Link:
    """Measure the link.

    Args:
        device: An accelerator.
        sizes: Bytes of the copies; the last is used wherever one size is enough.
    """
    largest = sizes[-1]
    began = time.perf_counter()
    host = device.pinned(largest)
    pinning = time.perf_counter() - began
    there, stream = device.empty(largest), device.new_stream()
    both = both_ways(device, largest)
    return Link(
        h2d={
            size: _rate(device, stream, there[:size], host[:size], largest)
            for size in sizes
        },
        d2h=_rate(device, stream, host, there, largest),
        h2d_both=both[0],
        d2h_both=both[1],
        pin_seconds_per_gb=pinning * 1e9 / largest,
    )


def both_ways(device: Device, nbytes: int) -> tuple[float, float]:
    """Return the bytes a second to the device and from it, both at once."""
    there, back = device.pinned(nbytes), device.pinned(nbytes)
    one, other = device.empty(nbytes), device.empty(nbytes)
    up, down = device.new_stream(), device.new_stream()
    to_device = _copies(device, up, one, there)
    to_host = _copies(device, down, back, other)

    def both() -> None:
        for _ in range(_ROUNDS):
            to_device()
            to_host()

    both()  # the first copies of all are slower
    seconds = time_on(device, (up, down), both)
    return _ROUNDS * nbytes / seconds[0], _ROUNDS * nbytes / seconds[1]


def copy_rate(device: Device, nbytes: int, *, home: bool = False) -> float:
    """Return the bytes a second of pinned copies to the device, or home."""
    host, there = device.pinned(nbytes), device.empty(nbytes)
    source, target = (there, host) if home else (host, there)
    return _rate(device, device.new_stream(), target, source, nbytes)


def _copies(
    device: Device, stream: Stream, target: torch.Tensor, source: torch.Tensor
) -> Callable[[], None]:
    def copy() -> None:
        with device.on(stream):
            device.copy(target, source)

    return copy


def _rate(
    device: Device,
    stream: Stream,
    target: torch.Tensor,
    source: torch.Tensor,
    largest: int,
) -> float:
    size = target.numel()
    count = min(100, max(1, largest // size))
    copy = _copies(device, stream, target, source)

    def queue() -> None:
        for _ in range(count):
            copy()

    device.synchronize()  # the buffers may be what another stream has just given back
    queue()
    seconds = [time_on(device, (stream,), queue)[0] for _ in range(_ROUNDS)]
    return count * size / Spread.of(seconds).median
