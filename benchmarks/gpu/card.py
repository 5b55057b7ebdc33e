"""The card under test and what it can say: its memory, page-locked bytes, copies."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from benchmarks.gpu.ballast import ballast
from benchmarks.simulated import load_simulated_device
from stagehand.core.device import _RegisteredMemory, find_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Card", "Copies", "SimulatedCard"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # as traces name it
_RATES = {"h2d_gbps": 1.0, "d2h_gbps": 1.0}  # about as slow as small kernels


@dataclass(frozen=True, slots=True)
class Copies:
    """What crossed the link."""

    h2d: int
    d2h: int
    h2d_bytes: int
    d2h_bytes: int


class Card:
    """A CUDA device, which nobody else uses: bytes that are gone are our process's."""

    dry = False
    _profiled = (torch.profiler.ProfilerActivity.CUDA,)
    _oldest = 2
    """Objects of how many generations are looked through."""

    def __init__(self) -> None:
        self.device = find_device(None)
        self.place = self.device.torch_device
        self._held = 0

    @property
    def name(self) -> str:
        """As the driver writes it."""
        return str(torch.cuda.get_device_name(self.place))

    def empty_cache(self) -> None:
        """Give back what torch's allocators keep, and let peaks begin anew."""
        gc.collect(self._oldest)
        self.device.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        self._empty_pinned()

    def _empty_pinned(self) -> None:
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        else:  # torch 2.11 knows it by this name only
            torch._C._host_emptyCache()
        torch.cuda.reset_peak_host_memory_stats()

    def used_bytes(self) -> int:
        """Bytes that are gone for the driver, without the ballast: our process's."""
        free, total = torch.accelerator.get_memory_info()
        return int(total - free - self._held)

    @contextlib.contextmanager
    def capped(self, cap_bytes: int | None) -> Iterator[None]:
        """Be a card with so much memory, of which our process already uses some."""
        if cap_bytes is None:
            yield
            return
        used = self.used_bytes()
        with self._smaller(cap_bytes - used):
            # The ballast's own context counts to what it holds.
            self._held = self.used_bytes() - used
            try:
                yield
            finally:
                self._held = 0

    @contextlib.contextmanager
    def _smaller(self, leave_bytes: int) -> Iterator[None]:
        with ballast(leave_bytes):
            yield

    def most_used_bytes(self) -> int:
        """The most that `used_bytes` was since `empty_cache`.

        What torch's allocator has given back since then comes on top of what is gone.
        """
        given_back = torch.accelerator.max_memory_reserved()
        given_back -= torch.accelerator.memory_reserved()
        return self.used_bytes() + given_back

    def allocator_calls(self) -> int:
        """How often torch's allocator took memory from the device, or gave some back.

        Where a card is nearly full it may do so in each step, and the device waits.
        """
        stats = torch.accelerator.memory_stats()
        return int(stats["num_device_alloc"] + stats["num_device_free"])

    def pinned_bytes(self) -> int:
        """Page-locked bytes: the most that torch had, and what the library has."""
        own = [m for m in gc.get_objects() if type(m) is _RegisteredMemory]
        stats = torch.cuda.host_memory_stats()
        return sum(map(len, own)) + int(stats.get("allocated_bytes.peak", 0))

    def resident_bytes(self) -> int:
        """Host bytes of this process."""
        return int(psutil.Process().memory_info().rss)

    def copies(self, run: Callable[[], object]) -> Copies | None:
        """What crossed the link while something ran, as the profiler saw it.

        None if it saw nothing of the device at all: it needs CUPTI, for which some
        containers lack the rights.
        """
        # There is one cycle only, but torch 2.11 warns that it forgets others.
        with torch.profiler.profile(
            activities=self._profiled, acc_events=True
        ) as found:
            run()
            self.device.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return count_copies(events)


def count_copies(events: list[dict[str, Any]]) -> Copies | None:
    """Count the copies of a trace as the profiler exports it; see `Card.copies`."""
    if not any(event.get("cat") in _ON_DEVICE for event in events):
        return None
    found = {
        way: [e for e in events if e.get("name", "").startswith(f"Memcpy {way}")]
        for way in ("HtoD", "DtoH")
    }
    up, down = (
        sum(int(event.get("args", {}).get("bytes", 0)) for event in events)
        for events in found.values()
    )
    return Copies(len(found["HtoD"]), len(found["DtoH"]), up, down)


class SimulatedCard(Card):
    """The simulated device, in virtual time."""

    dry = True
    _oldest = 0

    def __init__(self) -> None:
        self._sim = load_simulated_device()
        self._sim.configure(**_RATES)
        torch.set_num_threads(1)  # small operators; the time is virtual
        super().__init__()

    @property
    def name(self) -> str:
        """See `Card`."""
        return "simulated"

    def _empty_pinned(self) -> None:
        self._sim.reset_peak()

    @contextlib.contextmanager
    def _smaller(self, leave_bytes: int) -> Iterator[None]:
        self._sim.configure(
            capacity_bytes=self._sim.allocated_bytes() + leave_bytes, **_RATES
        )
        try:
            yield
        finally:
            self._sim.configure(**_RATES)

    def pinned_bytes(self) -> int:
        """See `Card`."""
        return int(self._sim.peak_pinned_bytes())

    def copies(self, run: Callable[[], object]) -> Copies:
        """See `Card`."""
        before = self._counts()
        run()
        self.device.synchronize()
        return Copies(*(b - a for a, b in zip(before, self._counts(), strict=True)))

    def _counts(self) -> tuple[int, ...]:
        sim = self._sim
        return sim.h2d_copies(), sim.d2h_copies(), sim.h2d_bytes(), sim.d2h_bytes()
