"""The open files of a checkpoint: exact reads, private mappings, change detection."""

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path

import torch

from stagehand.core.layout import contiguous_stride, own_storage, plain_tensors
from stagehand.core.machine import free_host_bytes
from stagehand.core.workers import WorkerGroup
from stagehand.errors import (
    ClosedError,
    ReadError,
    ShardChangedError,
    TruncatedShardError,
)
from stagehand.stores.base import Skew
from stagehand.stores.checkpoint import Extent
from stagehand.stores.headers import FileStamp
from stagehand.stores.reading import (
    Chunk,
    OpenFile,
    Part,
    Scratch,
    Sectors,
    cut,
)
from stagehand.units import PAGE_BYTES

__all__ = ["FileSet", "naming"]

# Threads: four keep a fast disk busy. With few cores, one waits for the disk while the
# others copy; more would be in each other's way.
_READERS = min(4, 1 + (os.cpu_count() or 3))
_SHARED_BYTES = 1 << 20  # less is read before a thread has woken up
_CACHE_SHARE = 0.6  # a checkpoint of at most this share of free memory fits the cache
# Without it Linux refuses to map a file larger than its memory, though a private
# mapping costs only the pages that are written. Python names the flag since 3.13.
_MAP_NORESERVE = getattr(
    mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0
)


class FileSet:
    """The open files of a checkpoint, shared by the stores of its blocks.

    Any thread may read. Files are opened when they are first needed, again in a forked
    process (which may have closed what it inherited), and compared with what they were
    when their headers were read. A file that is closed while a thread still reads from
    it stays open until that read returns.

    Memory: where reads pass the page cache, at most a buffer of 2 MiB for each of the
    threads that read, of which there are four at most.
    """

    def __init__(
        self, files: Mapping[Path, FileStamp], *, past_cache: bool | None = None
    ) -> None:
        """Open nothing yet.

        Args:
            files: The files and their stamps, as `Checkpoint.files` gives them.
            past_cache: Whether what is not in the page cache shall be read past it. By
                default, if all files together would not fit there.
        """
        self._stamps = dict(files)
        if past_cache is None:
            total = sum(stamp.size for stamp in self._stamps.values())
            past_cache = total > _CACHE_SHARE * free_host_bytes()
        self._past_cache = past_cache
        self._scratch = Scratch()
        self._readers = WorkerGroup("file", _READERS)
        self._descriptors: dict[tuple[int, Path], OpenFile] = {}
        self._mappings: dict[tuple[Path, int], torch.Tensor] = {}
        self._requests: dict[Extent, itertools.count[int]] = {}
        self.overlay_bytes = 0
        """Bytes of tensors whose values are in host memory, and not the file's."""
        self._closed = False

    def check(self) -> None:
        """Do nothing if every file is what it was; to be called once per pass.

        Raises:
            ShardChangedError: If a file was rewritten, replaced or removed.
        """
        for path in self._stamps:
            self.check_file(path)

    def check_file(self, path: Path) -> None:
        """Do nothing if one file is what it was when its header was read.

        Raises:
            ShardChangedError: Otherwise.
        """
        try:
            found = FileStamp.of(path)
        except OSError as error:
            raise ShardChangedError(
                f"{path} was there when its header was read and is not now ({error}): "
                f"put it back, or load the model again"
            ) from error
        self._compare(path, found)

    def check_mapped(self, path: Path) -> None:
        """Do nothing if a mapped file was not changed; it may have been replaced.

        Raises:
            CheckpointError: If it was rewritten or cut short, in place.
        """
        if not self._closed:
            self._compare(path, FileStamp.of(self._descriptor(path).number))

    def read(self, path: Path, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a file from `offset` on.

        Raises:
            ReadError: If the system cannot read them.
            TruncatedShardError: If the file ends before.
            ShardChangedError: If the file changed before it was first opened.
            ClosedError: If this set is closed.
        """
        self.fill({path: [Part(offset, 0, len(target))]}, target)

    def fill(
        self,
        parts: Mapping[Path, Sequence[Part]],
        target: memoryview,
        *,
        compare: bool = True,
    ) -> int:
        """Fill parts of `target` from the files, several at a time; return the bytes.

        On return, whatever it is, no thread writes to `target` any more.

        Args:
            parts: What goes where, by file.
            target: Writable bytes.
            compare: Whether a file that changed since its header was read is refused.

        Raises:
            ReadError: If the system cannot read them.
            TruncatedShardError: If a file ends before.
            ShardChangedError: If a file changed since its header was read.
            ClosedError: If this set is closed.
        """
        if not len(target):
            return 0
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(target))
        files = {path: self._descriptor(path) for path in parts}
        jobs = [
            (file, chunk)
            for path, file in files.items()
            for chunk in cut(parts[path], address, file.sectors)
        ]
        nbytes = sum(part.nbytes for wanted in parts.values() for part in wanted)
        if len(jobs) > 1 and nbytes >= _SHARED_BYTES:
            self._share_out(jobs, target)
        else:
            for file, chunk in jobs:
                file.read(chunk, target, self._scratch)
        for path, file in files.items() if compare else ():
            self._compare(path, FileStamp.of(file.number))
        return nbytes

    def _share_out(
        self, jobs: Sequence[tuple[OpenFile, Chunk]], target: memoryview
    ) -> None:
        """Let the reader threads do all jobs, in order, and wait for them."""
        try:
            self._readers.do_all(
                partial(file.read, chunk, target, self._scratch) for file, chunk in jobs
            )
        except (CancelledError, ClosedError):
            raise ClosedError(
                f"{jobs[0][0].path} cannot be read: its files were closed"
            ) from None

    def sectors(self, path: Path) -> Sectors:
        """Return the alignment at which reads of a file go straight into memory.

        Raises:
            CheckpointError: If the file changed or cannot be opened.
        """
        file = self._descriptor(path)
        return file.sectors if file.is_direct else Sectors(1, 1)

    def skew(self, parts: Mapping[Path, Sequence[Part]], widest: int) -> Skew | None:
        """Return where an image begins if the most bytes are to be read in place.

        Of several such places, it is the one where the most pages of memory lie on
        pages of the file.

        Args:
            parts: All that is read into it.
            widest: Bytes of the widest element that lies there.

        Raises:
            CheckpointError: If a file changed or cannot be opened.
        """
        in_line: Counter[Skew] = Counter()
        in_pages: Counter[tuple[Skew, Skew]] = Counter()
        for path, wanted in parts.items():
            line = self.sectors(path).memory
            page = max(line, PAGE_BYTES) if line > 1 else 1
            for part in wanted:
                shift = part.source - part.target
                skew = Skew(shift % line, line)
                in_line[skew] += part.nbytes
                in_pages[skew, Skew(shift % page, page)] += part.nbytes
        if not in_pages:
            return None
        _, skew = max(in_pages, key=lambda both: (in_line[both[0]], in_pages[both]))
        return None if skew.past % widest or skew.of % widest else skew

    def map_tensor(self, extent: Extent) -> torch.Tensor:
        """Return a tensor that a file holds, as private, writable memory.

        A read pages the file in; a write stays in this process and is seen by no other
        tensor from here, not even by a second one of the same extent.

        Args:
            extent: At a multiple of its element size.

        Raises:
            ReadError: If the system cannot map the file.
            ShardChangedError: If the file changed before it was first opened.
            ClosedError: If this set is closed.
        """
        # One mapping serves a whole file as long as no extent is asked for twice. The
        # n-th request for an extent takes it from the n-th mapping.
        layer = next(self._requests.setdefault(extent, itertools.count()))
        key = (extent.path, layer)
        if key not in self._mappings:
            self._mappings.setdefault(key, self._map(extent.path))
        with plain_tensors():
            view = torch.empty(0, dtype=extent.dtype, device="cpu").set_(
                self._mappings[key].untyped_storage(),
                extent.offset // extent.dtype.itemsize,
                extent.shape,
                contiguous_stride(extent.shape),
            )
            return own_storage(view, extent.nbytes)

    def close(self) -> None:
        """Let go of every file. Host tensors that were handed out stay valid."""
        self._closed = True
        self._readers.close()
        self._scratch = Scratch()
        self._descriptors.clear()
        self._mappings.clear()

    def _map(self, path: Path) -> torch.Tensor:
        descriptor = self._descriptor(path)
        try:
            memory = mmap.mmap(
                descriptor.number,
                self._stamps[path].size,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except (OSError, ValueError) as error:
            raise ReadError(f"{path} cannot be mapped: {error}") from error
        with plain_tensors():
            return torch.frombuffer(memory, dtype=torch.uint8)

    def _descriptor(self, path: Path) -> OpenFile:
        key = (os.getpid(), path)
        descriptor = self._descriptors.get(key)
        if descriptor is None and not self._closed:
            descriptor = self._descriptors.setdefault(key, self._open(path))
        # Looked at again: `close` may have run between the test and the insertion.
        if descriptor is None or self._closed:
            self._descriptors.clear()
            raise ClosedError(f"{path} cannot be read: its files were closed")
        return descriptor

    def _open(self, path: Path) -> OpenFile:
        try:
            descriptor = OpenFile(path, past_cache=self._past_cache)
            found = FileStamp.of(descriptor.number)
        except OSError as error:
            raise ReadError(f"{path} cannot be opened: {error}") from error
        self._compare(path, found)
        return descriptor

    def _compare(self, path: Path, found: FileStamp) -> None:
        expected = self._stamps[path]
        if found != expected:
            raise ShardChangedError(
                f"{path} changed since its header was read: expected {expected}, found "
                f"{found}; load the model again"
            )


@contextlib.contextmanager
def naming(extents: Iterable[Extent]) -> Iterator[None]:
    """Name the tensor, where a file that is read turns out to be shorter than it was.

    Args:
        extents: What is read.

    Raises:
        TruncatedShardError: For the first of them that the file does not hold.
    """
    try:
        yield
    except TruncatedShardError as error:
        with contextlib.suppress(OSError):  # the path may be gone
            for extent in extents:
                found = extent.path.stat().st_size - extent.offset
                if found < extent.nbytes:
                    raise TruncatedShardError(
                        f"tensor {extent.name!r} in {extent.path} is truncated:"
                        f" expected {extent.nbytes} bytes, found {max(found, 0)}; the"
                        " file was longer when its header was read: get it again"
                    ) from error
        raise
