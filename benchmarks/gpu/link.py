"""What the link does: each way alone, both at once, by size; and what is beside it.

Beside it: what pinning costs, and the rates of host memory and of the disk.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.disk import Rival, drop_cache
from benchmarks.gpu.clock import Spread, time_on
from stagehand.core.device import host_memory
from stagehand.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stagehand.core.device import Device, Stream

__all__ = ["Link", "both_ways", "calibrate", "copy_rate", "disk_rates", "host_rate"]

_ROUNDS = 7
_QUEUED = 8  # copies: the first one's way to the device is not their rate
_THREADS = (1, 2, 4, 8, 16)
_SLAB_BYTES = 64 * MIB

Rates = dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Rates in bytes a second, medians of several copies, by the bytes of one copy."""

    h2d: Rates
    """Copies queued one behind the other."""
    h2d_single: Rates
    """The host waits for each."""
    d2h: Rates
    h2d_both: Rates
    """While the other way is as busy."""
    d2h_both: Rates
    h2d_pageable: float
    """From ordinary memory, of the largest size."""
    pin_seconds_per_gb: float
    """Of 1e9 bytes as the library locks them, first touch included."""
    torch_pin_seconds_per_gb: float
    """As torch does."""
    host: Rates
    """Of a copy within host memory, by the number of threads."""
    disk: dict[str, float]
    """Of reading a file that is in no cache, by how."""

    def line(self) -> dict[str, Any]:
        """Return what is written to the results."""
        return {"kind": "link", **asdict(self)}


def calibrate(device: Device, sizes: tuple[int, ...], folder: Path) -> Link:
    """Measure the link.

    Args:
        device: An accelerator.
        sizes: Bytes of the copies; the last is used wherever one size is enough.
        folder: On the disk under test.
    """
    largest = sizes[-1]
    pinning, host = _pin(device.pinned, largest)
    by_torch, _ = _pin(
        lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True), largest
    )
    there = device.empty(largest)
    up, down, single, both = {}, {}, {}, {}
    for size in sizes:
        count = min(100, max(_QUEUED, largest // size))
        up[size] = _rate(device, there[:size], host[:size], count)
        down[size] = _rate(device, host[:size], there[:size], count)
        single[size] = _rate(device, there[:size], host[:size], 1)
        both[size] = both_ways(device, size, count)
    ordinary = torch.zeros(largest, dtype=torch.uint8)
    pageable, _ = _timed(lambda: there.copy_(ordinary))
    return Link(
        h2d=up,
        h2d_single=single,
        d2h=down,
        h2d_both={size: rates[0] for size, rates in both.items()},
        d2h_both={size: rates[1] for size, rates in both.items()},
        h2d_pageable=largest / pageable,
        pin_seconds_per_gb=pinning * 1e9 / largest,
        torch_pin_seconds_per_gb=by_torch * 1e9 / largest,
        host=_host_rates(largest),
        disk=_probe(folder, 2 * largest),
    )


def _timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    made = run()
    return time.perf_counter() - began, made


def _pin(
    make: Callable[[int], torch.Tensor], nbytes: int
) -> tuple[float, torch.Tensor]:
    make(1)  # the first of all sets the device up
    return _timed(lambda: make(nbytes))


# The link


def both_ways(device: Device, nbytes: int, count: int = _QUEUED) -> tuple[float, float]:
    """Return the bytes a second to the device and from it, both at once."""
    there, back = device.pinned(nbytes), device.pinned(nbytes)
    one, other = device.empty(nbytes), device.empty(nbytes)
    up, down = device.new_stream(), device.new_stream()
    to_device = _copies(device, up, one, there)
    to_host = _copies(device, down, back, other)

    def both() -> None:
        for _ in range(count):
            to_device()
            to_host()

    device.synchronize()  # the buffers may be what another stream has just given back
    both()  # the first copies of all are slower
    seconds = time_on(device, (up, down), both)
    return count * nbytes / seconds[0], count * nbytes / seconds[1]


def copy_rate(device: Device, nbytes: int, *, home: bool = False) -> float:
    """Return the bytes a second of pinned copies to the device, or home."""
    host, there = device.pinned(nbytes), device.empty(nbytes)
    source, target = (there, host) if home else (host, there)
    return _rate(device, target, source, _QUEUED)


def _copies(
    device: Device, stream: Stream, target: torch.Tensor, source: torch.Tensor
) -> Callable[[], None]:
    def copy() -> None:
        with device.on(stream):
            device.copy(target, source)

    return copy


def _rate(
    device: Device, target: torch.Tensor, source: torch.Tensor, count: int
) -> float:
    stream = device.new_stream()
    copy = _copies(device, stream, target, source)

    def queue() -> None:
        for _ in range(count):
            copy()

    device.synchronize()  # the buffers may be what another stream has just given back
    queue()
    seconds = [time_on(device, (stream,), queue)[0] for _ in range(_ROUNDS)]
    return count * target.numel() / Spread.of(seconds).median


# Beside it


def host_rate(nbytes: int) -> float:
    """Return the bytes a second of a copy within host memory, by torch's threads.

    Args:
        nbytes: Of the copy: more than the processor's caches hold, or it tells of them.
    """
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    seconds = [_timed(lambda: target.copy_(source))[0] for _ in range(_ROUNDS)]
    return nbytes / Spread.of(seconds).median


def _host_rates(nbytes: int) -> Rates:
    threads, found = torch.get_num_threads(), {}
    for number in _THREADS:
        if number <= (os.cpu_count() or 1):
            torch.set_num_threads(number)
            found[number] = host_rate(nbytes)
    torch.set_num_threads(threads)
    return found


def _probe(folder: Path, nbytes: int) -> dict[str, float]:
    path = folder / "probe"
    with path.open("wb") as file:
        piece = os.urandom(min(nbytes, 1 << 26))
        while file.tell() < nbytes:
            file.write(piece)
    found = disk_rates(path)
    path.unlink()
    return found


def disk_rates(path: Path) -> dict[str, float]:
    """Return the bytes a second of reading a file that is dropped from memory before.

    By two threads, past the page cache and through it.
    """
    nbytes, found = path.stat().st_size, {}
    slabs = [host_memory(_SLAB_BYTES + mmap.PAGESIZE).zero_() for _ in range(2)]
    rival = Rival(path, slabs, _SLAB_BYTES)
    for name, direct in (("past the cache", True), ("through it", False)):
        drop_cache(path)
        began = time.perf_counter()
        rival.read(range(-(-nbytes // _SLAB_BYTES)), direct=direct)
        found[name] = nbytes / (time.perf_counter() - began)
    rival.close()
    drop_cache(path)
    return found
