"""Host memory: how much of it there is for this process, and giving some back."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["free_host_bytes", "give_back_freed", "host_bytes"]

_ROOT = Path("/")


class _Files(NamedTuple):
    """What the files of a control group are called, in one of their two versions."""

    mount: str
    limit: str
    used: str
    cached: tuple[str, ...]
    """Fields of `memory.stat`: pages of files, which the system takes back at will."""


_OLD = _Files(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    cached=("total_inactive_file", "total_active_file"),
)
_NEW = _Files(
    mount="sys/fs/cgroup",
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


def give_back_freed() -> None:
    """Have the C library give the system what this process has freed, where it can.

    glibc keeps freed tensors below 32 MiB as long as anything above them is in use.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group that this process is in.

    A group's limit holds for all groups inside of it. Within a container the path may
    be that of the machine, where nothing is: then the top is the container's.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # a system without
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _OLD if controllers else _NEW
        top = root / files.mount
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            if (found := _read(group, files)) is not None:
                yield found
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
