"""The disk's own rate: what all readers are held against."""

import mmap
import os
import threading
from pathlib import Path

__all__ = ["CHUNK_BYTES", "drop_cache", "read_raw"]

CHUNK_BYTES = 8 << 20

_memory: list[mmap.mmap] = []


def drop_cache(path: Path) -> None:
    """Let the page cache hold nothing of a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)  # what is not written yet is kept
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def read_raw(path: Path, *, direct: bool) -> None:
    """Read a file with two threads into memory that is used over and over."""
    if not _memory:
        for _ in range(2):
            anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            _memory.append(mmap.mmap(-1, 2 * CHUNK_BYTES, flags=anonymous))
            _memory[-1].madvise(mmap.MADV_HUGEPAGE)
            _memory[-1].write(bytes(2 * CHUNK_BYTES))
    size = path.stat().st_size
    try:
        file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError:  # a file system without
        file = os.open(path, os.O_RDONLY)

    def read(turn: int) -> None:
        view = memoryview(_memory[turn])[:CHUNK_BYTES]
        for start in range(turn * CHUNK_BYTES, size, 2 * CHUNK_BYTES):
            os.preadv(file, [view], start)

    threads = [threading.Thread(target=read, args=(turn,)) for turn in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(file)
