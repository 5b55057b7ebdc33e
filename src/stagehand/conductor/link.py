"""How fast the link is in each direction, alone and while the other is busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from stagehand.core.device import Device, Event, Stream

__all__ = ["LinkRates", "measure_link"]

_PIECE_BYTES = 16 << 20  # smaller copies tell of their cost, not of the link
_PIECES = 4
_UNDISTURBED = 0.8  # loads with this share of their speed alone are not slowed down


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Bytes a second."""

    h2d: float
    """To the device, alone."""
    d2h: float
    """From the device, alone."""
    h2d_busy: float
    """To the device, while as much comes from it."""
    d2h_busy: float
    """From the device, while as much goes to it."""

    @property
    def is_duplex(self) -> bool:
        """Whether loads keep their speed beside copies home."""
        return self.h2d_busy >= _UNDISTURBED * self.h2d


_known: dict[torch.device, LinkRates] = {}


def measure_link(device: Device) -> LinkRates:
    """Return the rates of a device's link, measured at the first call.

    Waits for the device, and takes some milliseconds and 2 x `_PIECE_BYTES` of device
    and of pinned memory for as long.

    Args:
        device: An accelerator.
    """
    rates = _known.get(device.torch_device)
    if rates is None:
        rates = _known[device.torch_device] = _measure(device, _PIECE_BYTES)
    return rates


def _measure(device: Device, piece_bytes: int) -> LinkRates:
    to_device = _Way(device, device.new_stream(), piece_bytes, home=False)
    from_device = _Way(device, device.new_stream(), piece_bytes, home=True)
    _run(device, [to_device, from_device])  # the first copies are slow
    alone = [_run(device, [way])[0] for way in (to_device, from_device)]
    both = _run(device, [to_device, from_device])
    return LinkRates(h2d=alone[0], d2h=alone[1], h2d_busy=both[0], d2h_busy=both[1])


class _Way:
    """One direction: a stream, and what is copied on it again and again."""

    def __init__(
        self, device: Device, stream: Stream, nbytes: int, *, home: bool
    ) -> None:
        self.stream = stream
        self.nbytes = nbytes
        there, here = device.empty(nbytes), device.pinned(nbytes).zero_()
        self.pair: tuple[torch.Tensor, torch.Tensor]
        self.pair = (here, there) if home else (there, here)

    def copy(self, device: Device) -> None:
        target, source = self.pair
        device.copy(target, source, self.stream)


def _run(device: Device, ways: list[_Way]) -> list[float]:
    """Copy some pieces each way at once; return the rates."""
    device.synchronize()
    starts = [_mark(device, way.stream) for way in ways]
    for _ in range(_PIECES):
        for way in ways:
            way.copy(device)
    ends = [_mark(device, way.stream) for way in ways]
    device.synchronize()
    nbytes = _PIECES * ways[0].nbytes
    return [
        nbytes / max(start.elapsed_time(end) / 1e3, 1e-9)
        for start, end in zip(starts, ends, strict=True)
    ]


def _mark(device: Device, stream: Stream) -> Event:
    event = device.new_event(timing=True)
    event.record(stream)
    return event
