"""Load the simulated accelerator into this process, and steer and question it.

Importing this module compiles `sim_device.cpp` (once per version of it and of torch)
and makes `torch.device("hpu")` the process's accelerator, for good. README.md says what
the device simulates and what it catches.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("sim_device.cpp")
_BUILD = _SOURCE.parents[2] / "build" / "sim_device"


class _Config(ctypes.Structure):
    """`Config` of sim_device.cpp."""

    _fields_ = (
        ("capacity_bytes", ctypes.c_uint64),
        ("h2d_gbps", ctypes.c_double),
        ("d2h_gbps", ctypes.c_double),
        ("tflops", ctypes.c_double),
        ("hbm_gbps", ctypes.c_double),
        ("launch_us", ctypes.c_double),
        ("host_launch_us", ctypes.c_double),
        ("deferred", ctypes.c_int32),
        ("half_duplex", ctypes.c_int32),
    )


class _Readings(ctypes.Structure):
    """`Readings` of sim_device.cpp."""

    _fields_ = (
        ("allocated_bytes", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("pinned_bytes", ctypes.c_uint64),
        ("peak_pinned_bytes", ctypes.c_uint64),
        ("h2d_bytes", ctypes.c_uint64),
        ("d2h_bytes", ctypes.c_uint64),
        ("h2d_copies", ctypes.c_uint64),
        ("d2h_copies", ctypes.c_uint64),
        ("kernel_launches", ctypes.c_uint64),
        ("syncs", ctypes.c_uint64),
        ("now_seconds", ctypes.c_double),
        ("host_seconds", ctypes.c_double),
    )


def _compile(library: Path) -> None:
    if shutil.which("g++") is None:
        raise RuntimeError(
            "the simulated device needs a C++ compiler, but there is no g++ on the "
            "PATH: install one (Debian: apt-get install g++)"
        )
    root = Path(torch.__file__).parent
    # Written elsewhere and renamed: an interrupted build leaves no half library.
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        "g++", "-O1", "-std=c++20", "-fPIC", "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include",
        str(_SOURCE), "-o", str(unfinished),
        f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"the simulated device does not compile against torch {torch.__version__}: "
            f"g++ says {result.stderr[-4000:]}"
        )
    unfinished.replace(library)


def _load() -> ctypes.CDLL:
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()
    library = _BUILD / f"{key[:16]}.so"
    _BUILD.mkdir(parents=True, exist_ok=True)
    # One process builds while its neighbours (parallel test workers) wait for it.
    with (_BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return ctypes.CDLL(str(library))


def _register_module() -> None:
    """Give torch the `torch.hpu` that its Python side looks for."""
    module = types.ModuleType("torch.hpu")
    functions: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "manual_seed_all": lambda seed: None,  # kernels draw from the CPU's generator
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    torch._register_device_module("hpu", module)  # type: ignore[no-untyped-call]


_lib = _load()
_lib.sim_configure.argtypes = [ctypes.POINTER(_Config)]
_lib.sim_read.argtypes = [ctypes.POINTER(_Readings)]
_lib.sim_advance_host.argtypes = [ctypes.c_double]
_lib.sim_stream_count.restype = ctypes.c_uint64
_lib.sim_race_count.restype = ctypes.c_uint64
_lib.sim_race.argtypes = [ctypes.c_uint64]
_lib.sim_race.restype = ctypes.c_char_p
_lib.sim_keep_races.argtypes = [ctypes.c_uint64]
_register_module()

device = torch.device("hpu")


def configure(
    *,
    capacity_bytes: int = 2**40,
    h2d_gbps: float = 25.0,
    d2h_gbps: float = 25.0,
    tflops: float = 100.0,
    hbm_gbps: float = 1000.0,
    launch_us: float = 5.0,
    host_launch_us: float = 0.0,
    deferred: bool = True,
    half_duplex: bool = False,
) -> None:
    """Set the capacity and the cost model; what is not named gets its default.

    Args:
        capacity_bytes: Device memory; allocating more raises `torch.OutOfMemoryError`.
        h2d_gbps: Rate of the link to the device, in 1e9 bytes a second.
        d2h_gbps: Rate of the link from the device, in 1e9 bytes a second.
        tflops: Rate of matrix products, in 1e12 operations a second.
        hbm_gbps: Rate of device memory, in 1e9 bytes a second. A kernel takes the
            longer of its FLOPs and the bytes of its tensor arguments.
        launch_us: Device time that each kernel and each copy costs besides.
        host_launch_us: Host time that the launching thread pays for each kernel and
            each copy. Zero lets the host run ahead of the device without limit.
        deferred: Whether asynchronous copies run only when something waits for them.
            If not they run at once; the race check is the same.
        half_duplex: Whether the link carries one direction at a time: a copy then takes
            the link's free time, in pieces, in order of launch.
    """
    config = _Config(
        capacity_bytes,
        h2d_gbps,
        d2h_gbps,
        tflops,
        hbm_gbps,
        launch_us,
        host_launch_us,
        deferred,
        half_duplex,
    )
    _lib.sim_configure(ctypes.byref(config))


def reset() -> None:
    """Start afresh: default configuration, no races, clocks and counters at zero.

    Queued copies run first. Memory stays allocated, and peaks fall to what is. The
    calling thread's clock becomes the one that new threads start at.
    """
    _lib.sim_reset()
    configure()


def races() -> list[str]:
    """Return every misuse of memory seen since `reset()`, in order; see README.md."""
    return [_lib.sim_race(i).decode() for i in range(_lib.sim_race_count())]


def clear_races() -> None:
    """Forget all races."""
    _lib.sim_keep_races(0)


@contextmanager
def expect_races(match: str = "") -> Iterator[list[str]]:
    """Take the races that happen inside off the record, for a test that provokes them.

    Args:
        match: A text that at least one of them must contain.

    Yields:
        A list that holds the races after the block has ended.

    Raises:
        AssertionError: If there was none.
    """
    before = _lib.sim_race_count()
    found: list[str] = []
    yield found
    found.extend(races()[before:])
    _lib.sim_keep_races(before)
    if not any(match in race for race in found):
        raise AssertionError(f"expected a race with {match!r}, found {found}")


def _read() -> _Readings:
    readings = _Readings()
    _lib.sim_read(ctypes.byref(readings))
    return readings


def allocated_bytes() -> int:
    """Return the device memory allocated now."""
    return int(_read().allocated_bytes)


def peak_bytes() -> int:
    """Return the most device memory allocated since `reset()` or `reset_peak()`."""
    return int(_read().peak_bytes)


def pinned_bytes() -> int:
    """Return the pinned host memory allocated now."""
    return int(_read().pinned_bytes)


def peak_pinned_bytes() -> int:
    """Return the most pinned memory allocated since `reset()` or `reset_peak()`."""
    return int(_read().peak_pinned_bytes)


def reset_peak() -> None:
    """Let both peaks start again from what is allocated now."""
    _lib.sim_reset_peak()


def used_streams() -> int:
    """Return how many streams had work since `reset()`: each is in every clock."""
    return int(_lib.sim_stream_count())


def h2d_bytes() -> int:
    """Return the bytes that copies to the device were asked to move since `reset()`."""
    return int(_read().h2d_bytes)


def d2h_bytes() -> int:
    """Return the bytes that copies to the host were asked to move since `reset()`."""
    return int(_read().d2h_bytes)


def h2d_copies() -> int:
    """Return the number of copies to the device since `reset()`."""
    return int(_read().h2d_copies)


def d2h_copies() -> int:
    """Return the number of copies to the host, `item()` included, since `reset()`."""
    return int(_read().d2h_copies)


def kernel_launches() -> int:
    """Return the number of kernels, copies within the device included."""
    return int(_read().kernel_launches)


def syncs() -> int:
    """Return how often the host waited since `reset()`.

    That is: for an event, a stream, the device, or a blocking copy, which is one
    without `non_blocking=True` or with host memory that is not pinned.
    """
    return int(_read().syncs)


def now_seconds() -> float:
    """Return the virtual time at which all streams and the calling thread are done."""
    return float(_read().now_seconds)


def host_seconds() -> float:
    """Return the calling thread's virtual time."""
    return float(_read().host_seconds)


def advance_host_us(microseconds: float) -> None:
    """Let the calling thread spend virtual time, say on reading a file."""
    _lib.sim_advance_host(microseconds)


configure()
