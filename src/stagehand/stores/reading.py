"""Reads parts of a file into memory, past the page cache where that is faster.

Note "Past the cache". What is in the page cache is copied from there, at the speed of
memory. What is not comes straight from the disk (O_DIRECT) if the checkpoint would not
fit the cache anyway: that is faster than through it, costs a tenth of the processor
time, and does not push out what the cache holds for others. Such a read begins and ends
at a sector of the file and, on many devices, of memory. Where a tensor lies so, it is
read in place, from a page of memory on if it can be: a disk of a virtual machine is up
to a fifth slower elsewhere, and a twentieth where pages of the file are not pages of
memory. The rest goes through a small buffer of the thread that reads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from stagehand.core.device import host_memory
from stagehand.errors import ReadError, StagehandInternalError, TruncatedShardError
from stagehand.units import PAGE_BYTES, rounded_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import torch

__all__ = [
    "Chunk",
    "OpenFile",
    "Part",
    "Scratch",
    "Sectors",
    "cut",
    "writable",
]

# Bytes of one read. Larger ones gain nothing, smaller ones lose to whoever holds the
# interpreter lock in between.
_CHUNK_BYTES = 16 << 20
_BUFFER_BYTES = 2 << 20  # a thread's buffer: small enough to stay in a core's caches
_IN_PLACE_BYTES = 256 << 10  # a smaller tensor is read with its neighbours
_GAP_BYTES = 64 << 10  # reading so much too much is cheaper than a second read

_MOSTLY = 0.9  # if this share of a chunk is cached, the rest comes through the cache
_SYS_CACHESTAT = 451
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_DIO_PLACE = 0x98
_AT_EMPTY_PATH = 0x1000
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSALS = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP))
_C = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Sectors(NamedTuple):
    """What the addresses of a read past the page cache must be multiples of."""

    memory: int
    """Bytes, in memory."""
    file: int
    """Bytes, in the file."""


class Part(NamedTuple):
    """Bytes that follow each other in a file and in memory."""

    source: int
    """First byte, counted from the start of the file."""
    target: int
    """Where it goes, counted from the start of the memory."""
    nbytes: int
    """How many."""

    @property
    def end(self) -> int:
        """Where the part ends in the file."""
        return self.source + self.nbytes

    def reaches(self, other: Part) -> bool:
        """Whether `other` goes on where this one ends, in the file and in memory."""
        end = self.target + self.nbytes
        return (self.end, end) == (other.source, other.target)

    def joined(self, other: Part) -> Part:
        """Both in one; this one reaches the other."""
        return Part(self.source, self.target, self.nbytes + other.nbytes)

    def between(self, start: int, end: int) -> Part:
        """The bytes from `start` to `end` of the file."""
        return Part(start, self.target + start - self.source, end - start)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one read brings: parts that are near each other, in the file's order."""

    parts: tuple[Part, ...]
    in_place: bool = False
    """Whether the one part can be read where it goes, past the page cache."""

    @property
    def start(self) -> int:
        """First byte in the file."""
        return self.parts[0].source

    @property
    def end(self) -> int:
        """Where it ends in the file. The last part need not: two may be one tensor."""
        return max(part.end for part in self.parts)


def cut(parts: Iterable[Part], address: int, sectors: Sectors) -> list[Chunk]:
    """Cut what is to be read into chunks, in the file's order.

    Args:
        parts: What is to be read from one file.
        address: The address of the memory that is read into.
        sectors: What reads past the page cache must be multiples of.
    """
    whole: list[Chunk] = []
    rest: list[Part] = []
    for part in sorted(parts):
        body = _body(part, address, sectors)
        if body is None:
            rest.append(part)
            continue
        scraps = ((part.source, body.source), (body.end, part.end))
        rest += [part.between(*scrap) for scrap in scraps if scrap[0] < scrap[1]]
        whole += [
            Chunk((body.between(at, min(at + _CHUNK_BYTES, body.end)),), in_place=True)
            for at in range(body.source, body.end, _CHUNK_BYTES)
        ]
    return sorted([*whole, *_gathered(rest)], key=lambda chunk: chunk.start)


def _body(part: Part, address: int, sectors: Sectors) -> Part | None:
    """The whole sectors of a part, if they can be read in place and it is worth it."""
    shift = address + part.target - part.source
    if sectors.file > 1 and shift % sectors.file == 0:
        # A page of memory begins at a sector of the file.
        start = rounded_up(part.source + shift, PAGE_BYTES) - shift
    else:
        start = rounded_up(part.source, sectors.file)
    end = part.end // sectors.file * sectors.file
    if (end - start) % _CHUNK_BYTES < _GAP_BYTES:
        end -= (end - start) % _CHUNK_BYTES  # so little is read with what follows
    body = part.between(start, end)
    if body.nbytes < _IN_PLACE_BYTES or (address + body.target) % sectors.memory:
        return None
    return body


def _gathered(parts: Sequence[Part]) -> Iterator[Chunk]:
    """Put small parts together, and cut large ones."""
    together: list[Part] = []
    for part in parts:
        at = part.source
        while at < part.end:
            if together and (
                at < together[0].source  # the same bytes again, for another tensor
                or at - together[-1].end > _GAP_BYTES
                or at - together[0].source >= _CHUNK_BYTES
            ):
                yield Chunk(tuple(together))
                together = []
            first = together[0].source if together else at
            end = min(part.end, first + _CHUNK_BYTES)
            together.append(part.between(at, end))
            at = end
    if together:
        yield Chunk(tuple(together))


class Scratch(threading.local):
    """The buffer of each thread that reads: a huge page, which begins at a sector."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def get(self) -> tuple[memoryview, int]:
        """Return the calling thread's buffer and its address."""
        if self._memory is None:
            self._memory = host_memory(_BUFFER_BYTES)
        memory = self._memory
        view = (ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())
        return memoryview(view).cast("B"), memory.data_ptr()


class OpenFile:
    """One open file. It closes when the last reader lets go of it.

    Closing it under a reader would let the system give its number to another file,
    whose bytes would then arrive as weights.

    Args:
        path: The file.
        past_cache: Whether what is not in the page cache shall stay out of it.

    Raises:
        OSError: If it cannot be opened.
    """

    # Bound early: an exiting interpreter may have taken the module apart.
    _close = staticmethod(os.close)
    _getpid = staticmethod(os.getpid)

    def __init__(self, path: Path, *, past_cache: bool) -> None:
        self.path = path
        self._direct = -1
        self._pid = self._getpid()
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._past_cache = past_cache
        self._refuses = False
        self.sectors = Sectors(1, 1)
        if past_cache:
            self.sectors = _sectors(self.number)
            self._direct = _open_direct(path, self.number)

    def __del__(self) -> None:
        # A forked process may have closed everything and use the numbers for its own.
        if getattr(self, "_pid", None) == self._getpid():
            for number in (getattr(self, "number", -1), self._direct):
                if number >= 0:
                    self._close(number)

    @property
    def is_direct(self) -> bool:
        """Whether the file system lets reads pass the page cache."""
        return self._direct >= 0 and not self._refuses

    def read(self, chunk: Chunk, target: memoryview, scratch: Scratch) -> None:
        """Fill the parts of a chunk; to be called by any thread.

        Raises:
            ReadError: If the system cannot read.
            TruncatedShardError: If the file ends before.
        """
        if not self._past_cache or self._is_cached(chunk):
            self._read_parts(chunk, target)
        elif not (self.is_direct and self._read_past(chunk, target, scratch)):
            self._read_parts(chunk, target)
            self._forget(chunk)

    def _read_parts(self, chunk: Chunk, target: memoryview) -> None:
        """Read each part through the page cache."""
        for part in chunk.parts:
            piece = target[part.target : part.target + part.nbytes]
            self._read_exactly(self.number, piece, part.source, len(piece))

    def _forget(self, chunk: Chunk) -> None:
        """Let the page cache drop what was read for us alone."""
        if hasattr(os, "posix_fadvise"):
            length = chunk.end - chunk.start
            advice = os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self.number, chunk.start, length, advice)

    def _read_past(self, chunk: Chunk, target: memoryview, scratch: Scratch) -> bool:
        """Read past the page cache; False if the file system turns out to refuse."""
        try:
            if chunk.in_place:
                (part,) = chunk.parts
                piece = target[part.target : part.target + part.nbytes]
                self._read_exactly(self._direct, piece, part.source, len(piece))
            else:
                self._read_through_buffer(chunk, target, scratch)
        except ReadError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _REFUSALS:
                self._refuses = True  # other threads may be reading: it stays open
                return False
            raise
        return True

    def _read_through_buffer(
        self, chunk: Chunk, target: memoryview, scratch: Scratch
    ) -> None:
        """Read whole sectors into the thread's buffer, and copy what is wanted."""
        buffer, address = scratch.get()
        first = chunk.start // self.sectors.file * self.sectors.file
        for start in range(first, chunk.end, _BUFFER_BYTES):
            stop = min(start + _BUFFER_BYTES, chunk.end)
            end = rounded_up(stop, self.sectors.file)
            self._read_exactly(self._direct, buffer[: end - start], start, stop - start)
            for part in chunk.parts:
                piece = part.between(max(part.source, start), min(part.end, stop))
                if piece.nbytes <= 0:
                    continue
                into = ctypes.c_ubyte.from_buffer(target, piece.target)
                ctypes.memmove(
                    ctypes.addressof(into),
                    address + piece.source - start,
                    piece.nbytes,
                )

    def _read_exactly(
        self, number: int, target: memoryview, offset: int, needed: int
    ) -> None:
        """Fill at least `needed` bytes; what the file has after them may come, too."""
        done = 0
        while done < needed:
            piece = target[done : done + _CHUNK_BYTES]
            try:
                got = os.preadv(number, [piece], offset + done)
            except OSError as error:
                raise ReadError(
                    f"{self.path} cannot be read at byte {offset + done}: {error}"
                ) from error
            if got == 0:
                raise TruncatedShardError(
                    f"{self.path} is truncated: expected {needed} bytes at {offset}, "
                    f"found {done}; it was longer when its header was read"
                )
            done += got

    def _is_cached(self, chunk: Chunk) -> bool:
        """Whether the page cache holds the bytes. Without an answer it does not."""
        if _C is None:
            return False
        length = chunk.end - chunk.start
        asked = (ctypes.c_uint64 * 2)(chunk.start, length)
        found = (ctypes.c_uint64 * 5)()
        if _C.syscall(_SYS_CACHESTAT, self.number, asked, found, 0):
            return False
        return int(found[0]) * os.sysconf("SC_PAGE_SIZE") >= _MOSTLY * length


def _sectors(number: int) -> Sectors:
    """What the file's device asks for; the most any does where it does not say."""
    if _C is not None and hasattr(_C, "statx"):
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        if not _C.statx(number, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
            (mask,) = struct.unpack_from("I", buffer)
            memory, file = struct.unpack_from("II", buffer, _DIO_PLACE)
            if mask & _STATX_DIOALIGN and memory and 0 < file <= PAGE_BYTES:
                return Sectors(memory, file)
    return Sectors(PAGE_BYTES, PAGE_BYTES)


def _open_direct(path: Path, number: int) -> int:
    """Open a file that is open as `number` once more, to read past the page cache.

    Returns -1 if the file system refuses, or the path is another file by now.
    """
    if not _O_DIRECT:
        return -1
    try:
        direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSALS:
            return -1
        raise
    if os.path.sameopenfile(number, direct):
        return direct
    os.close(direct)
    return -1


def writable(memory: torch.Tensor) -> memoryview:
    """Return the memory of a 1-D uint8 host tensor, which must outlive the view."""
    if memory.device.type != "cpu":
        raise StagehandInternalError(f"a file cannot be read into {memory.device}")
    array = (ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())
    return memoryview(array).cast("B")
