"""What disk, memory and link of this machine give at most: measured, not looked up."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagehand.core.device import host_memory
from stagehand.core.machine import free_host_bytes
from stagehand.core.workers import WorkerGroup
from stagehand.streamer.images import footprint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from stagehand.core.device import Device
    from stagehand.stores.files import FileSet
    from stagehand.streamer.depths import Footprint
    from stagehand.streamer.images import LayerImage

__all__ = ["Rates", "measure_rates"]

_READ_BYTES = 2 << 30  # read to find the disk's rate, at most
_COPY_BYTES = 256 << 20  # a larger copy is no faster
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The best rates found, in bytes per second, and what memory is free."""

    disk: float
    """Reading layers from their files, as a streamer reads them."""
    memory: float
    """Copying in host memory."""
    link: float
    """From pinned memory to the device; infinite where the host is the device."""
    pageable_link: float
    """From ordinary memory to the device; infinite where the host is the device."""
    device_free_bytes: int
    """Device memory that can be had."""
    host_free_bytes: int
    """Host memory that can be had."""
    footprint: Footprint
    """What a layer takes of both."""

    @property
    def on_host(self) -> bool:
        """Whether the host is the device."""
        return math.isinf(self.link)


def measure_rates(
    images: Sequence[LayerImage], files: FileSet, device: Device
) -> Rates:
    """Measure what no streamer on this machine can exceed.

    Files are read twice, and the better time counts: where a checkpoint fits the page
    cache, streamers will find it there.

    Raises:
        CheckpointError: If a layer cannot be read.
    """
    footprint = footprint_of(images, files, device)
    free = device.free_bytes(), free_host_bytes()
    buffers = [host_memory(max(1, footprint.waiting)) for _ in range(2)]
    disk = max(_read_rate(images, files, buffers) for _ in range(2))
    one, other = (buffer[:_COPY_BYTES] for buffer in buffers)
    link = pageable = math.inf
    if not device.is_host:
        target = device.empty(one.numel())
        pinned = device.pinned(one.numel())
        link = _copy_rate(lambda: device.copy(target, pinned), target, device)
        pageable = _copy_rate(lambda: device.copy(target, one), target, device)
    return Rates(
        disk=disk,
        memory=_copy_rate(lambda: one.copy_(other), one, device),
        link=link,
        pageable_link=pageable,
        device_free_bytes=free[0],
        host_free_bytes=free[1],
        footprint=footprint,
    )


def _read_rate(
    images: Sequence[LayerImage], files: FileSet, buffers: Sequence[torch.Tensor]
) -> float:
    """Read layers two at a time, as long as it takes to tell."""
    workers = [WorkerGroup("probe", 1) for _ in buffers]
    total, jobs = 0, []
    began = time.perf_counter()
    try:
        for number, image in enumerate(images):
            if total + image.read_bytes > _READ_BYTES and number >= len(buffers):
                break
            turn = number % len(buffers)
            skew, memory = image.skew(files), buffers[turn]
            if skew:
                memory = memory[skew.start_in(memory) :]
            jobs.append(workers[turn].submit(image.read, files, memory))
            total += image.read_bytes
        for job in jobs:
            job.result()
        return total / max(time.perf_counter() - began, 1e-9)
    finally:
        for worker in workers:
            worker.close()


def _copy_rate(
    copy: Callable[[], object], moved: torch.Tensor, device: Device
) -> float:
    best = math.inf
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        copy()
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return moved.numel() / max(best, 1e-9)
