"""What all readers are held against: the disk's own rate, and that of memory.

Both with the same threads, over the same bytes, and into the same memory as a reader:
a small buffer would stay in the processor's caches, and no model fits there.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

__all__ = ["Rival", "drop_cache"]

_CHUNK_BYTES = 16 << 20
_PAGE = 4096


def drop_cache(path: Path) -> None:
    """Let the page cache hold nothing of a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)  # what is not written yet is kept
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


class Rival:
    """Fills pieces of memory from a file or from memory, as two threads do it best.

    Args:
        path: The file.
        slabs: Memory to fill, one after the other; it was touched before.
        nbytes: How much of a slab is filled from one piece of the file.
    """

    def __init__(self, path: Path, slabs: Sequence[torch.Tensor], nbytes: int) -> None:
        self._nbytes = nbytes // _PAGE * _PAGE
        self._places = [-(-slab.data_ptr() // _PAGE) * _PAGE for slab in slabs]
        self._threads = ThreadPoolExecutor(2)
        self._through = os.open(path, os.O_RDONLY)
        try:
            self._past = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system without
            self._past = os.dup(self._through)
        self._source: torch.Tensor | None = None

    def read(self, pieces: range, *, direct: bool) -> None:
        """Read some pieces of the file, the n-th from its n-th part of these bytes."""
        file = self._past if direct else self._through

        def read(place: int, start: int, nbytes: int) -> None:
            memory = (ctypes.c_ubyte * nbytes).from_address(place)
            os.preadv(file, [memory], start)

        self._run(pieces, read)

    def copy(self, pieces: range) -> None:
        """Copy as many bytes from memory that is as large as what is read at once."""
        if self._source is None:
            size = len(self._places) * self._nbytes
            self._source = torch.ones(size, dtype=torch.uint8)
        source, size = self._source.data_ptr(), len(self._source)
        self._run(
            pieces,
            lambda place, start, nbytes: ctypes.memmove(
                place, source + start % size, nbytes
            ),
        )

    def _run(self, pieces: range, fill: Callable[[int, int, int], object]) -> None:
        jobs = [
            self._threads.submit(
                fill,
                self._places[number % len(self._places)] + at,
                number * self._nbytes + at,
                min(_CHUNK_BYTES, self._nbytes - at),
            )
            for number in pieces
            for at in range(0, self._nbytes, _CHUNK_BYTES)
        ]
        for job in jobs:
            job.result()

    def close(self) -> None:
        """Close the file, and end the threads."""
        self._threads.shutdown()
        os.close(self._through)
        os.close(self._past)
