"""The host: how much memory and how many processors there are for this process."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["free_host_bytes", "give_back_freed", "host_bytes", "processors"]

_ROOT = Path("/")


class _Files(NamedTuple):
    """What the files of a control group are called, in one of their two versions."""

    limit: str
    used: str
    cached: tuple[str, ...]
    """Fields of `memory.stat`: pages of files, which the system takes back at will."""


_OLD = _Files(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    cached=("total_inactive_file", "total_active_file"),
)
_NEW = _Files(
    limit="memory.max",
    used="memory.current",
    cached=("inactive_file", "active_file"),
)


def free_host_bytes(root: Path = _ROOT) -> int:
    """Return the host memory that can be had; what only caches files counts as free.

    Args:
        root: Where the system's own file systems are mounted.
    """
    free: int = psutil.virtual_memory().available
    return max(0, min([free, *(limit - used for limit, used in _groups(root))]))


def host_bytes(root: Path = _ROOT) -> int:
    """Return the host memory that there is for this process and its like.

    Args:
        root: See `free_host_bytes`.
    """
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _groups(root))])


def processors(root: Path = _ROOT) -> int:
    """Return how many processors this process may use at a time.

    Args:
        root: See `free_host_bytes`.
    """
    usable = getattr(os, "sched_getaffinity", None)
    count = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return max(1, round(min([count, *_quotas(root)])))


def give_back_freed() -> None:
    """Have the allocator give the system what this process has freed, where it can.

    glibc keeps freed tensors below 32 MiB as long as anything above them is in use, and
    tcmalloc, which some start Python with, keeps all.
    """
    for release in _releases():
        release()


@cache
def _releases() -> tuple[Callable[[], object], ...]:
    if sys.platform != "linux":
        return ()
    process = ctypes.CDLL(None)
    trim = getattr(process, "malloc_trim", None)
    tcmalloc = getattr(process, "MallocExtension_ReleaseFreeMemory", None)
    found = [] if trim is None else [partial(trim, 0)]
    if tcmalloc is not None:
        tcmalloc.restype = None
        found.append(tcmalloc)
    return tuple(found)


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of memory of each control group that this process is in."""
    for group, is_old in _folders(root, "memory"):
        if (found := _read(group, _OLD if is_old else _NEW)) is not None:
            yield found


def _quotas(root: Path) -> Iterator[float]:
    """Yield the processors' time that each control group gives, in processors."""
    for group, is_old in _folders(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_old else ("cpu.max",)
        try:
            words = " ".join((group / name).read_text() for name in names).split()
            quota, period = map(int, words)
        except (OSError, ValueError):  # "max" where there is no limit
            continue
        if quota > 0 and period > 0:
            yield quota / period


def _folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each control group that this process is in, innermost first.

    And whether it is of the old version. A group's limit holds for all groups inside of
    it. Within a container the path may be that of the machine, where nothing is: then
    the top is the container's.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a system without
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            yield group, bool(controllers)
            group = group.parent


def _read(group: Path, files: _Files) -> tuple[int, int] | None:
    try:
        limit = int((group / files.limit).read_text())  # "max" where there is none
        used = int((group / files.used).read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    fields = dict(line.split() for line in stat.splitlines())
    return limit, used - sum(int(fields.get(name, 0)) for name in files.cached)
