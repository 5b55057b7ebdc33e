"""The only file that names streams, events, pinning and memory counters.

One class serves every accelerator that PyTorch knows through `torch.accelerator`;
another serves machines without one, where "device memory" is host memory and copies are
done when they are asked for. Both have the same methods. What is above asks `is_host`
only where a lane, a copy or page-locked memory would be for nothing.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import time
import warnings
import weakref
from functools import cache
from typing import Any, Protocol

import torch

from stagehand.core.copies import clear
from stagehand.core.machine import free_host_bytes
from stagehand.errors import ConfigError, StagehandWarning
from stagehand.torch_private import allocated_on, inference_mode, reserved_on, stream_on
from stagehand.units import rounded_up

__all__ = [
    "AcceleratorDevice",
    "Device",
    "Event",
    "HostDevice",
    "Stream",
    "find_device",
    "host_memory",
]

_HUGE_PAGE = 2 << 20
# Some drivers fail, and leak, above exactly 2 GiB. Larger pieces are better: CUDA may
# refuse the copy of a tensor that lies in two of them, and users copy what they like.
_REGISTER_CHUNK = (2 << 30) - _HUGE_PAGE
# From _OWN_SEGMENT on, torch's allocator takes a segment from CUDA for each tensor, in
# whole steps.
_OWN_SEGMENT = 10 << 20
_SEGMENT_STEP = 2 << 20
# Smaller tensors share segments, of two kinds: the largest tensor, and the segment.
_SHARED_SEGMENTS = ((1 << 20, 2 << 20), (_OWN_SEGMENT, 20 << 20))
_SMALLEST_PIECE = 512
# Environment variables that change how the allocator works; torch reads all of them.
_ALLOCATOR_SETTINGS = tuple(
    f"PYTORCH_{kind}ALLOC_CONF" for kind in ("", "CUDA_", "HIP_")
)
_MADV_HUGEPAGE = 14
_MADV_WIPEONFORK = 18
_PROT_NONE = 0
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Event(Protocol):
    """A point in a stream's work. Recording it again moves it, for later waits only."""

    def record(self, stream: Any = None) -> None:
        """Stand for all work that `stream` was given until now."""

    def query(self) -> bool:
        """Return whether that work is done, without waiting."""

    def synchronize(self) -> None:
        """Block the host until that work is done."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this point to `end_event`'s."""


class Stream(Protocol):
    """An ordered queue of device work."""

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream start only after `event`'s."""

    def synchronize(self) -> None:
        """Block the host until all work of this stream is done."""


class Device(Protocol):
    """What the library needs to know and do about the place where models compute."""

    torch_device: torch.device
    is_host: bool
    """Whether device memory is host memory: a copy is done when its call returns, and
    a reader thread may fill device memory itself."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return uninitialized bytes of device memory that is the current stream's."""

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """Like `empty`, with shape and type of a contiguous tensor on the host."""

    def taken_bytes(self, nbytes: int) -> int:
        """Return the device bytes that `empty(nbytes)` takes, rounding included."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes of page-locked host memory, exactly that many."""

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Like `pinned`, but raise where that falls back, and warn of nothing.

        For threads of the library: the caller's thread tries again, and warns.

        Raises:
            RuntimeError: If the system refuses to lock it.
        """

    def new_stream(self, priority: int = 0) -> Stream:
        """Return a stream of its own for a lane."""

    def same_stream(self, stream: Stream) -> Stream:
        """Return another object for the same stream.

        A stream object that is entered with `with` remembers the stream to return to:
        two threads may not have entered one object at a time.
        """

    def current_stream(self) -> Stream:
        """Return the stream on which this thread's operators run."""

    def new_event(self, *, timing: bool = False) -> Event:
        """Return an unrecorded event."""

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Let this thread's operators run on `stream` inside the `with`."""

    def claim_thread(self) -> None:
        """Make this the current device of the calling thread, for waits, too.

        For threads of the library: CUDA would set up device 0 for each that does not,
        which takes some hundred megabytes there.

        Raises:
            RuntimeError: If the device cannot be used, as in a forked process.
        """

    def refuse_capture(self, what: str) -> None:
        """Do nothing unless this thread's operators are captured in a CUDA graph.

        Raises:
            ConfigError: Then; it names what cannot be captured.
        """

    def allocated_bytes(self) -> int | None:
        """Return the bytes that this process's tensors hold on the device."""

    def peak_allocated_bytes(self) -> int | None:
        """Return the most bytes that `allocated_bytes` has been."""

    def reserved_bytes(self) -> int | None:
        """Return the bytes that PyTorch's allocator took from the device."""

    def free_bytes(self) -> int:
        """Return the bytes that can still be had, those cached by PyTorch included."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Stream | None = None
    ) -> None:
        """Queue a copy, whose host side is `pinned`, on a stream or the current one.

        Both are of one shape and element type, and the host side starts where that
        memory starts.
        """

    def synchronize(self) -> None:
        """Block the host until the device is idle."""


class AcceleratorDevice:
    """An accelerator behind `torch.accelerator`: CUDA, ROCm, XPU and their like.

    Args:
        device: With an index, or without: then the current one.
    """

    is_host = False

    def __init__(self, device: torch.device) -> None:
        index = device.index
        if index is None:
            index = torch.accelerator.current_device_index()
        self.torch_device = torch.device(device.type, index)
        self._index = index
        self._warned = False
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            _warn_of_rounding()

    def __repr__(self) -> str:
        return f"AcceleratorDevice({str(self.torch_device)!r})"

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        if torch.is_inference_mode_enabled():
            with inference_mode(False):  # takes as long as the rest
                return self.empty(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """See `Device.empty_like`."""
        if torch.is_inference_mode_enabled():
            with inference_mode(False):
                return self.empty_like(host)
        return torch.empty_like(host, device=self.torch_device)

    def taken_bytes(self, nbytes: int) -> int:
        """See `Device.taken_bytes`. What torch's allocator rounds up is lost to others.

        Smaller pieces share segments: each takes its share of a full one, with what is
        left at its end. So at most one segment is taken beyond what is counted.
        """
        if not self._is_cuda or not nbytes:
            return nbytes
        if nbytes >= _OWN_SEGMENT:
            return rounded_up(nbytes, _SEGMENT_STEP)
        segment = next(size for most, size in _SHARED_SEGMENTS if nbytes <= most)
        count = segment // rounded_up(nbytes, _SMALLEST_PIECE)
        return segment // count // _SMALLEST_PIECE * _SMALLEST_PIECE

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Device.pinned`. Falls back to pageable memory with one warning."""
        try:
            return self.page_locked(nbytes)
        except RuntimeError as error:
            self._warn_unpinned(nbytes, error)
            with inference_mode(False):
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """See `Device.page_locked`."""
        with inference_mode(False):
            if not (self._is_cuda and nbytes):
                return torch.empty(
                    nbytes, dtype=torch.uint8, device="cpu", pin_memory=True
                )
            try:
                return _registered_memory(nbytes, self._index)
            except RuntimeError:
                self._drain_error()
                raise

    def _drain_error(self) -> None:
        """Let the driver tell of a refusal here, not in the caller's next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def _warn_unpinned(self, nbytes: int, error: RuntimeError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{nbytes} bytes of host memory could not be page-locked for"
            f" {self.torch_device} ({error}); copies from ordinary memory are several"
            " times slower. Lower ram_budget, or raise the system's limit of locked"
            " memory",
            StagehandWarning,
            stacklevel=3,
        )

    def new_stream(self, priority: int = 0) -> Stream:
        """See `Device.new_stream`. Lower priorities run first."""
        if self._is_cuda:  # torch.Stream takes its priority in order
            stream: Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self.torch_device, priority=priority
            )
            return stream
        return torch.Stream(device=self.torch_device)

    def same_stream(self, stream: Any) -> Stream:
        """See `Device.same_stream`."""
        same: Stream = type(stream)(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        return same

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        stream: Stream = stream_on(self._index)
        return stream

    def new_event(self, *, timing: bool = False) -> Event:
        """See `Device.new_event`."""
        return torch.Event(device=self.torch_device, enable_timing=timing)

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """See `Device.on`."""
        context: contextlib.AbstractContextManager[Any] = stream  # type: ignore[assignment]
        return context

    def claim_thread(self) -> None:
        """See `Device.claim_thread`."""
        torch.accelerator.set_device_index(self._index)

    def refuse_capture(self, what: str) -> None:
        """See `Device.refuse_capture`."""
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"{what} cannot be captured in a CUDA graph: which copies it needs"
                " depends on what ran before, and they wait for work outside of the"
                " graph; capture what computes between them, or run without a capture"
            )

    def allocated_bytes(self) -> int | None:
        """See `Device.allocated_bytes`."""
        return allocated_on(self._index)

    def peak_allocated_bytes(self) -> int | None:
        """See `Device.peak_allocated_bytes`."""
        return torch.accelerator.max_memory_allocated(self._index)

    def reserved_bytes(self) -> int | None:
        """See `Device.reserved_bytes`."""
        return reserved_on(self._index)

    def free_bytes(self) -> int:
        """See `Device.free_bytes`. A process may be limited to a part of a device."""
        free, whole = torch.accelerator.get_memory_info(self._index)
        cached = torch.accelerator.memory_reserved(self._index)
        if self._is_cuda:
            part = torch.cuda.get_per_process_memory_fraction(self._index)
            free = min(free, int(part * whole) - cached)
        return max(0, free + cached - torch.accelerator.memory_allocated(self._index))

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Stream | None = None
    ) -> None:
        """See `Device.copy`. No copy may span two registrations of pinned memory."""
        if stream is None:
            self._copy(target, source)
        else:
            with self.on(stream):
                self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.nbytes <= _REGISTER_CHUNK:
            target.copy_(source, non_blocking=True)
            return
        if target.stride() != source.stride():  # torch would do that, and copy at once
            alike = torch.empty_like(target, device=source.device)
            source = alike.copy_(source)
        target, source = _bytes_of(target), _bytes_of(source)
        for start in range(0, target.numel(), _REGISTER_CHUNK):
            piece = slice(start, start + _REGISTER_CHUNK)
            target[piece].copy_(source[piece], non_blocking=True)

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.accelerator.synchronize(self._index)


@cache
def _warn_of_rounding() -> None:
    """Warn, once, of an allocator setting with which weights take more than counted."""
    for name in _ALLOCATOR_SETTINGS:
        if "roundup_power2_divisions" in os.environ.get(name, ""):
            warnings.warn(
                f"{name} has roundup_power2_divisions: weights take up to half as much"
                " device memory again as vram_budget counts; leave that out, or lower"
                " vram_budget",
                StagehandWarning,
                stacklevel=4,
            )


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class _RegisteredMemory(mmap.mmap):
    """Anonymous memory, page-locked for CUDA in place, and unlocked before it goes.

    PyTorch's own pinned allocator rounds each request up to a power of two, which can
    nearly double the host memory that a model needs; this has the exact size.

    What is still locked is never unmapped: CUDA would take what comes to lie at these
    addresses for locked, and copy the old pages. Nor is it shared with a forked
    process: whoever writes to a shared page first gets another one, while the device
    goes on with the old; newer systems copy all that is locked instead.
    """

    _locked: list[int]
    _address: int
    _index: int
    """The device that copies it. It must be current for calls that lock or unlock: with
    another one CUDA would set up that, which takes some hundred megabytes there."""

    # Bound early: an exiting interpreter may have taken the module apart.
    _stay = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

    def lock(self, address: int, nbytes: int, index: int) -> None:
        while _put_off:
            _put_off.pop().let_go()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._locked, self._address, self._index = [], address, index
        with contextlib.suppress(OSError):  # a kernel that cannot: it copies them
            self.madvise(_MADV_WIPEONFORK)
        _registered.add(self)
        with torch.accelerator.device_index(index):
            for start in range(0, nbytes, _REGISTER_CHUNK):
                size = min(_REGISTER_CHUNK, nbytes - start)
                self._locked.append(address + start)  # an interrupt may follow the call
                code = int(runtime.cudaHostRegister(address + start, size, 1))
                if code:
                    self._locked.pop()
                    self._unlock()
                    raise RuntimeError(f"cudaHostRegister gave error {code}")

    def _unlock(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._locked:
            code = int(runtime.cudaHostUnregister(self._locked[-1]))
            if code:
                raise RuntimeError(f"cudaHostUnregister gave error {code}")
            self._locked.pop()

    def leave_to_parent(self) -> None:
        """The process was forked: the memory is its parent's, and reads as zeros here.

        No weight may be read as that.
        """
        self._locked.clear()
        protect = ctypes.CDLL(None).mprotect
        protect(ctypes.c_void_p(self._address), ctypes.c_size_t(len(self)), _PROT_NONE)

    def let_go(self) -> None:
        """Unlock it, before it is unmapped."""
        try:
            with torch.accelerator.device_index(self._index):
                torch.cuda.synchronize()  # a copy may still read what is unlocked
                self._unlock()
        finally:
            if self._locked:
                self._stay(self)

    def __del__(self) -> None:
        if not getattr(self, "_locked", None):
            return
        if sys.is_finalizing():  # the driver does it, and faster
            self._stay(self)
        elif torch.cuda.is_current_stream_capturing():  # a wait would break the graph
            _put_off.append(self)
        else:
            self.let_go()


_registered: "weakref.WeakSet[_RegisteredMemory]" = weakref.WeakSet()
_put_off: list[_RegisteredMemory] = []
"""What was collected while a CUDA graph was captured: it goes with the next lock."""


def _leave_all_to_parent() -> None:
    for memory in (*_registered, *_put_off):
        memory.leave_to_parent()
    _put_off.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _registered_memory(nbytes: int, index: int) -> torch.Tensor:
    memory = _RegisteredMemory(-1, nbytes, flags=_ANONYMOUS)
    if nbytes >= _HUGE_PAGE:  # not the end: it would take a whole huge page
        _advise_huge_pages(memory, nbytes // _HUGE_PAGE * _HUGE_PAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    clear(whole)  # by several threads: present pages lock faster
    memory.lock(whole.data_ptr(), nbytes, index)
    return whole


def host_memory(nbytes: int) -> torch.Tensor:
    """Return uninitialized host memory; large pieces lie in huge pages.

    Disks write faster into huge pages, by a third where all of a piece lies in them. So
    a piece begins at one: what is left out before it costs addresses, not memory.
    """
    if torch.is_inference_mode_enabled():
        with inference_mode(False):  # takes longer than the rest
            return host_memory(nbytes)
    if nbytes < _HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    # Not the end: it would take a whole huge page.
    _advise_huge_pages(memory, start + nbytes // _HUGE_PAGE * _HUGE_PAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


def _advise_huge_pages(memory: mmap.mmap, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # a kernel without them: slower to lock
        memory.madvise(_MADV_HUGEPAGE, 0, nbytes)


class _HostEvent:
    """A moment of the host's clock; all work before it is done by then."""

    _at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end_event: "_HostEvent") -> float:
        return (end_event._at - self._at) * 1e3


class _HostStream:
    """Stands for a stream where each copy and operator is done before the next."""

    def wait_event(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


class HostDevice:
    """The CPU in the place of an accelerator: same code, plain copies."""

    is_host = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._stream = _HostStream()
        self._nothing = contextlib.nullcontext()

    def __repr__(self) -> str:
        return "HostDevice()"

    def empty(self, nbytes: int) -> torch.Tensor:
        """See `Device.empty`."""
        return host_memory(nbytes)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        """See `Device.empty_like`."""
        if torch.is_inference_mode_enabled():
            with inference_mode(False):
                return self.empty_like(host)
        return torch.empty_like(host)

    def taken_bytes(self, nbytes: int) -> int:
        """See `Device.taken_bytes`."""
        return nbytes

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Device.pinned`. There is nobody to lock it for: ordinary memory."""
        return self.empty(nbytes)

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """See `Device.page_locked`."""
        return self.empty(nbytes)

    def new_stream(self, priority: int = 0) -> Stream:
        """See `Device.new_stream`."""
        return self._stream

    def same_stream(self, stream: Stream) -> Stream:
        """See `Device.same_stream`."""
        return stream

    def current_stream(self) -> Stream:
        """See `Device.current_stream`."""
        return self._stream

    def new_event(self, *, timing: bool = False) -> Event:
        """See `Device.new_event`."""
        return _HostEvent()

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """See `Device.on`."""
        return self._nothing

    def claim_thread(self) -> None:
        """See `Device.claim_thread`. Every thread has the host as its device."""

    def refuse_capture(self, what: str) -> None:
        """See `Device.refuse_capture`. Nothing is captured on the host."""

    def allocated_bytes(self) -> int | None:
        """See `Device.allocated_bytes`. The host does not count."""
        return None

    def peak_allocated_bytes(self) -> int | None:
        """See `Device.peak_allocated_bytes`. The host does not count."""
        return None

    def reserved_bytes(self) -> int | None:
        """See `Device.reserved_bytes`. The host does not count."""
        return None

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        return free_host_bytes()

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, stream: Stream | None = None
    ) -> None:
        """See `Device.copy`. Done when it returns."""
        target.copy_(source)

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        return


def find_device(device: torch.device | str | int | None) -> Device:
    """Return the device that a user means.

    Args:
        device: `None` for the accelerator, or for the host where there is none; else
            whatever `torch.device` takes.

    Raises:
        ConfigError: If the machine has no such device, or it cannot hold weights.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return HostDevice() if accelerator is None else AcceleratorDevice(accelerator)
    try:
        wanted = torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device is {device!r}: {error}") from None
    except TypeError:
        raise ConfigError(
            f"device is {device!r}: expected what torch.device takes, such as 'cuda:0',"
            " or None"
        ) from None
    if wanted.type == "cpu":
        return HostDevice()
    if accelerator is None or accelerator.type != wanted.type:
        found = "none" if accelerator is None else str(accelerator)
        raise ConfigError(
            f"device is {str(wanted)!r}, but this machine's accelerator is {found};"
            " pass device=None to take what is there, or device='cpu'"
        )
    count = torch.accelerator.device_count()
    if wanted.index is not None and wanted.index >= count:
        raise ConfigError(
            f"device is {str(wanted)!r}, but this machine has {count} of that kind,"
            " counted from 0"
        )
    return AcceleratorDevice(wanted)
