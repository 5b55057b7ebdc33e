"""Where the tests of this folder run: a CUDA device, or the simulated one to rehearse.

What only one of them can tell stands here, behind the same methods. All else uses
`torch.accelerator`, `torch.Event` and `torch.profiler`, which both have.
"""

import gc
import re
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from stagehand.core.device import _RegisteredMemory

MIB = 1 << 20
_MEASURED = "measured"

# What a settled pass must not call: the host would wait, or memory is made.
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
_MAKES = ("Malloc", "Free", "HostAlloc", "HostRegister", "HostUnregister", "FreeHost")
_FORBIDDEN = {
    prefix + name for prefix in ("cuda", "hip", "cu") for name in (*_WAITS, *_MAKES)
}
_CALL = re.compile("(cuda|hip|cu)[A-Z]")

# What other libraries warn of on a GPU is shown, and is no failure of ours. Nor is it
# that tests in several processes share out the processors.
_WARNINGS = (
    "default",
    "error::stagehand.errors.StagehandWarning",
    "ignore:PyTorch uses .* of the .* processors",
)
ON_GPU = pytest.param(
    "gpu", marks=(pytest.mark.gpu, pytest.mark.filterwarnings(*_WARNINGS))
)
"""The one `place` of a test that has no rehearsal: a parameter of the fixture."""


@dataclass(frozen=True)
class Span:
    """Something that took time, in microseconds."""

    name: str
    start: float
    end: float
    on_device: bool


def shared_time(some: list[Span], others: list[Span]) -> float:
    """Return for how long at least one of both kinds ran, in microseconds."""
    return sum(
        max(0.0, min(a.end, b.end) - max(a.start, b.start))
        for a in some
        for b in others
    )


class Place:
    """A device under test."""

    name: str
    """As torch writes it."""
    width: int
    """Of the models: each block takes some time to copy and to compute."""
    tokens: int
    """Rows of a batch for which a block computes about as long as it is copied."""
    exact_time: bool
    """Whether times are the same at every run."""
    page_bytes: int
    """Device memory of one piece is rounded up to this at most."""
    library_bytes = 0
    """The most that the matrix library keeps for itself."""
    activities: tuple[ProfilerActivity, ...] = (ProfilerActivity.CPU,)

    def __init__(self) -> None:
        self.ends = ExitStack()
        """What a test that fails leaves undone: others run on the same device."""

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.accelerator.synchronize()

    def allocated_bytes(self) -> int:
        """Bytes of all tensors on the device."""
        return torch.accelerator.memory_allocated()

    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator has taken from the device."""
        return torch.accelerator.memory_reserved()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most bytes that tensors take while something runs."""
        self.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        run()
        self.synchronize()
        return torch.accelerator.max_memory_allocated()

    def seconds(self, run: Callable[[], object], *, rounds: int = 1) -> float:
        """Median time on the current stream from before something to after it."""
        found = []
        for _ in range(rounds):
            start, end = (torch.Event(self.name, enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def link_rate(self, nbytes: int) -> float:
        """Bytes a second of one pinned copy after another to the device."""
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(nbytes, dtype=torch.uint8, device=self.name)

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return nbytes / self.seconds(copy, rounds=5)

    def spans(self, run: Callable[[], object]) -> list[Span]:
        """Everything that the profiler saw while something ran."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the profiler, about itself
            with profile(activities=self.activities) as found:
                with record_function(_MEASURED):
                    run()
                self.synchronize()
            events = [_span(event) for event in found.events()]
        frame = next(s for s in events if s.name == _MEASURED and not s.on_device)
        return [s for s in events if s.on_device or frame.start <= s.start < frame.end]

    def forbidden_calls(self, run: Callable[[], object]) -> list[str]:
        """Calls that let the host wait, or make memory, while something runs."""
        return [span.name for span in self.spans(run) if span.name in _FORBIDDEN]

    def overlap_seconds(
        self, run: Callable[[], object], compute_seconds: float
    ) -> float:
        """For how long copies to the device and kernels ran at the same time."""
        raise NotImplementedError

    def pinned_bytes(self) -> int:
        """Page-locked bytes of this process."""
        raise NotImplementedError

    @contextmanager
    def late(self) -> Iterator[None]:
        """Let the device fall far behind what the host queues inside."""
        raise NotImplementedError


def _span(event: Any) -> Span:
    return Span(
        event.name,
        event.time_range.start,
        event.time_range.end,
        event.device_type != DeviceType.CPU,
    )


class Rehearsal(Place):
    """The simulated device, with models so small that all takes a few seconds."""

    name = "hpu"
    width = 32
    tokens = 64
    exact_time = True
    page_bytes = 1
    link = 1.0  # GB/s: about as slow as the small kernels

    def __init__(self, sim: ModuleType) -> None:
        super().__init__()
        self._sim = sim
        sim.configure(h2d_gbps=self.link)

    def forbidden_calls(self, run: Callable[[], object]) -> list[str]:
        """See `Place`. What the device counts, besides what the profiler sees."""
        made: list[int] = []

        def counted() -> None:
            waits, held = self._sim.syncs(), self._sim.pinned_bytes()
            run()
            made.append(self._sim.syncs() - waits)
            made.append(self._sim.pinned_bytes() - held)

        calls = super().forbidden_calls(counted)
        return calls + [f"{count} waits or bytes" for count in made if count]

    def overlap_seconds(
        self, run: Callable[[], object], compute_seconds: float
    ) -> float:
        """See `Place`. In virtual time: what a sum of both would have taken more."""
        moved = self._sim.h2d_bytes()
        elapsed = self.seconds(run)
        copy_seconds = (self._sim.h2d_bytes() - moved) / (self.link * 1e9)
        self.spans(run)
        return compute_seconds + copy_seconds - elapsed

    def pinned_bytes(self) -> int:
        """See `Place`."""
        return self._sim.pinned_bytes()

    @contextmanager
    def late(self) -> Iterator[None]:
        """See `Place`. A link that is a thousand times slower."""
        self._sim.configure(h2d_gbps=self.link / 1000)
        yield
        self._sim.configure(h2d_gbps=self.link)


class Gpu(Place):
    """A CUDA device."""

    name = "cuda"
    width = 1024
    tokens = 2048
    exact_time = False
    page_bytes = 2 * MIB
    library_bytes = 64 * MIB
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def allocated_bytes(self) -> int:
        """See `Place`. Without what the matrix library keeps for itself."""
        torch._C._cuda_clearCublasWorkspaces()
        return super().allocated_bytes()

    def left_bytes(self, before: int) -> int:
        """Bytes that tensors take now and did not take before."""
        self.synchronize()
        if self.allocated_bytes() > before:
            self._clear_autograds_thread()
            gc.collect()
        return self.allocated_bytes() - before

    def _clear_autograds_thread(self) -> None:
        """It lets go of its last graph when it takes up the next one.

        What the matrix library keeps is each thread's own in newer versions of torch.
        """
        one = torch.ones(1, device=self.name, requires_grad=True)
        one.register_hook(lambda _: torch._C._cuda_clearCublasWorkspaces())
        one.sum().backward()

    def spans(self, run: Callable[[], object]) -> list[Span]:
        """See `Place`. What saw nothing of the device shows nothing, and fails."""
        found = super().spans(run)
        calls = any(_CALL.match(s.name) for s in found if not s.on_device)
        done = any(s.on_device and s.name != _MEASURED for s in found)
        if not (calls and done):
            missing = "work of the device" if calls else "calls of the driver"
            pytest.fail(
                f"the profiler saw no {missing} at all: let this process use CUPTI,"
                " which wants more rights in some containers"
            )
        return found

    def forbidden_calls(self, run: Callable[[], object]) -> list[str]:
        """See `Place`. torch itself raises where it would wait."""

        def strict() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it does not see every wait
                torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return super().forbidden_calls(strict)

    def overlap_seconds(
        self, run: Callable[[], object], compute_seconds: float
    ) -> float:
        """See `Place`."""
        on_device = [span for span in self.spans(run) if span.on_device]
        copies = [s for s in on_device if "HtoD" in s.name]
        kernels = [s for s in on_device if not s.name.startswith(("Mem", _MEASURED))]
        return shared_time(copies, kernels) / 1e6

    def pinned_bytes(self) -> int:
        """See `Place`. What torch pinned, and what the library registered itself."""
        gc.collect()  # what is still there shall not go between two readings
        own = (m for m in gc.get_objects() if type(m) is _RegisteredMemory)
        stats = torch.cuda.host_memory_stats()
        return sum(map(len, own)) + int(stats.get("allocated_bytes.current", 0))

    @contextmanager
    def late(self) -> Iterator[None]:
        """See `Place`. A kernel that takes a second or two before all else."""
        torch.cuda._sleep(3_000_000_000)
        yield
